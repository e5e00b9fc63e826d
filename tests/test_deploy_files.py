"""What lies in deploy/ to be copied is what its programs and our command line take."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from test_docs_commands import parse

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "barnraise-coordinator@.service"
CONTAINER = DEPLOY / "Containerfile"


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with an executable that every machine has, since systemd looks for it."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "barnraise-coordinator@demo.service"
    path.write_text(UNIT.read_text().replace("/opt/barnraise/bin/barnraise", "/bin/true"))
    return path


def analyzed(*words: str) -> str:
    done = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60)
    if "nrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is too old: " + done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path) -> None:
    assert unit.name not in analyzed("verify", "--man=no", str(unit))


def test_the_unit_leaves_little_to_an_attacker(unit: Path) -> None:
    analyzed("security", "--offline=true", "--threshold=25", str(unit))  # 0 to 100; 92 without hardening


def test_the_unit_starts_and_stops_by_commands_that_there_are() -> None:
    commands = re.findall(r"^Exec\w+=(\S+) (.*)$", UNIT.read_text(), re.MULTILINE)
    assert [program for program, _ in commands] == ["/opt/barnraise/bin/barnraise"] * 2
    for _, words in commands:
        parse(words.split())


def test_the_container_file_pins_its_base_runs_as_nobody_and_asks_for_its_health() -> None:
    text = CONTAINER.read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    steps = [(word, rest) for word, rest in lines]
    bases = [rest.split()[0] for word, rest in steps if word == "FROM"]
    assert bases
    assert all(re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-\w+", base) for base in bases)
    users = [rest for word, rest in steps if word == "USER"]
    assert users
    assert int(users[-1]) > 0
    assert any(word == "HEALTHCHECK" and "/healthz" in rest for word, rest in steps)
    assert not re.search(r"password|secret|token|\.key\b", text, re.IGNORECASE)
    for word, rest in steps:
        if word == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / name).exists() for name in rest.split()[:-1])
    (command,) = [rest for word, rest in steps if word == "CMD"]
    parse(re.findall(r'"([^"]+)"', command))


def test_what_is_copied_into_the_container_is_what_a_wheel_is_made_of() -> None:
    packages = set(re.findall(r"^COPY (\w+) \1$", CONTAINER.read_text(), re.MULTILINE))
    wanted = re.findall(r"^    barnraise\.(\w+) = \1$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert packages == set(wanted)


def test_prometheus_and_grafana_are_given_files_that_there_are() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]
    for service in services.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        for source in (volume.split(":")[0] for volume in service["volumes"]):
            assert not source.startswith("./") or (DEPLOY / source).exists()
    for path in DEPLOY.rglob("*.yml"):
        assert yaml.safe_load(path.read_text())
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in scrape] == ["barnraise"]  # as alerts.yml says


@pytest.mark.parametrize("path", ["nginx/barnraise.conf", "caddy/Caddyfile"])
def test_a_proxy_lets_strangers_read_and_no_more(path: str) -> None:
    text = (DEPLOY / path).read_text()
    assert text.count("{") == text.count("}")
    assert "127.0.0.1:8080" in text
    assert "/metrics" in text
    assert ("limit_except GET { deny all; }" in text) or ("not method GET HEAD" in text)
