"""What may be read by others has no secret: exports for everybody, and what `ps` shows of processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as parquet
import pytest
import typer
from cheats import Greedy, Paced
from e2e_support import Place, call
from swarm_support import OPERATOR, make_model, make_run, swarming
from test_join_command import ADDRESS, Seen, at_a_terminal, place
from test_secrets import forms, mode
from trio.testing import MockClock

from barnraise.coordinator.admission import make_invite
from barnraise.coordinator.core import Core
from barnraise.coordinator.journal_place import PASSWORD
from barnraise.coordinator.web.tokens import make_token, read_token
from barnraise.protocol.envelope import sign
from barnraise.protocol.identity import Identity, load_identity
from barnraise.protocol.invites import Invite, invite_text
from barnraise.tui import join, service
from barnraise.tui.given_invite import invite_word
from barnraise.tui.join_arguments import as_given
from barnraise.tui.main import main


def of_key(identity: Identity) -> set[bytes]:
    """A private key, however it is written."""
    pem = b"".join(identity.to_pem().splitlines()[1:-1])
    return forms(identity.private_bytes()) | {pem}


def plain(path: Path) -> bytes:
    """What a file holds; of compressed ones, what is read out of them as well."""
    data = path.read_bytes()
    if path.suffix == ".parquet":
        table = parquet.read_table(path)
        data += repr(table.schema.metadata).encode()
        for row in table.to_pylist():
            cells = row.values()
            data += b"\n".join(cell if isinstance(cell, bytes) else str(cell).encode() for cell in cells)
    return data


async def test_exported_rollouts_and_models_have_no_key_no_token_and_no_invite(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with swarming(tmp_path / "swarm", make_model(tmp_path / "model"), versions=1) as swarm:
        core: Core = swarm.state.args[0]  # type: ignore[attr-defined]
        invite = (await make_invite(core, {"uses": 1, "seconds": 60}))["invite"].encode()
        folder = swarm.run.path
        token = read_token(make_token(folder)[0]).encode()
        await swarm.join("ann", Paced(1.0))
        await swarm.join("eve", Greedy())
        await swarm.finish()
        keys = [OPERATOR, *(member.identity for member in swarm.members.values())]
    rollouts, model, store = (tmp_path / name for name in ("rollouts", "exported", "store"))
    more = ("--include-refused", "--proofs")
    assert main(["run", "export-rollouts", str(folder), str(rollouts), *more]) == 0
    assert main(["run", "export-model", str(folder), str(model)]) == 0
    assert main(["coordinator", "export-store", str(folder), str(store)]) == 0
    secrets = {invite, token}.union(*map(of_key, keys))
    files = [path for place in (rollouts, model, store) for path in place.rglob("*") if path.is_file()]
    assert {".parquet", ".safetensors", ".md"} <= {path.suffix for path in files}
    assert any(keys[1].peer_id.encode() in plain(path) for path in rollouts.rglob("*.parquet"))
    assert [path for path in files if any(secret in plain(path) for secret in secrets)] == []
    # That it would have been found:
    held = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".sqlite"]
    found = {path.name for path in held if any(secret in plain(path) for secret in secrets)}
    assert found == {"run.key", "admin.token"}


def shown(process: psutil.Process) -> bytes:
    """What other programs of this user see of a process: arguments and environment; none once it ended."""
    try:
        words = [*process.cmdline(), *(f"{key}={value}" for key, value in process.environ().items())]
    except psutil.Error:
        return b""
    return "\n".join(words).encode(errors="surrogateescape")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv(PASSWORD, "S3cret-W0rd")
    made = make_run(
        tmp_path / "run", make_model(tmp_path / "model"), time.time_ns() // 1_000_000, versions=60_000
    )
    it = Place(tmp_path, made)
    try:
        yield it
    finally:
        it.stop()


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_no_process_of_a_run_shows_a_key_a_token_an_invite_or_a_password(here: Place) -> None:
    address = here.coordinator()
    assert call("admit", "mode", str(here.run), "invite").returncode == 0
    invite = call("admit", "invite", str(here.run)).stdout.split()[0]
    (here.folder / "invite").write_text(invite)
    token = read_token(make_token(here.run)[0])
    home = here.node("ann", address, "--invite", str(here.folder / "invite"))
    here.wait(home, lambda state: state.get("accepted", 0) >= 1)
    tops = [psutil.Process(here.processes[name].pid) for name in ("coordinator", "ann")]
    children = [child for top in tops for child in top.children(recursive=True)]
    assert len(children) >= 3, "verifier, learner, engine"
    keys = [load_identity(path) for path in (here.run / "run.key", home / "node.key")]
    secrets = {invite.encode(), token.encode()}.union(*map(of_key, keys))
    told = {process: shown(process) for process in (*tops, *children)}
    assert sum(b"OMP_NUM_THREADS" in text for text in told.values()) >= 5, "they could be read"
    assert [it for it, text in told.items() if any(secret in text for secret in secrets)] == []
    assert [it for it in tops if b"S3cret-W0rd" in told[it]] == tops, "it was given to these"
    assert [it for it in children if b"S3cret-W0rd" in told[it]] == []


# --- what join starts


def an_invite() -> str:
    return invite_text(sign(Invite(run_id=bytes(32), invite=bytes(16), uses=1, expires_at=9), OPERATOR))


@pytest.mark.parametrize("as_file", [False, True])
def test_the_node_that_join_starts_has_an_invite_from_a_file_of_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_file: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(tmp_path)
    seen, word = Seen(monkeypatch), an_invite()
    at_a_terminal(monkeypatch)
    (tmp_path / "mail.txt").write_text(f"{word}\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/invite").write_text("an earlier one")  # and others may read it
    given = "mail.txt" if as_file else word
    assert main(["join", ADDRESS, *map(str, place(tmp_path)), "--yes", "--invite", given]) == 0
    assert seen.what == ["background", "app"]
    assert not [argument for argument in seen.arguments if word in argument]
    told = Path(seen.arguments[seen.arguments.index("--invite") + 1])
    assert told == tmp_path / ("mail.txt" if as_file else "data/invite")
    assert invite_word(str(told)) == word
    if not as_file:
        assert mode(told) == 0o600
    # What is started there, in another folder and once more after a crash, reads the same.
    monkeypatch.chdir("/")
    command = typer.Typer()
    command.command("join")(join.join)
    again = typer.main.get_command(command).make_context("join", list(seen.arguments))
    assert as_given(again) == seen.arguments  # type: ignore[arg-type]


def test_a_service_has_no_invite_in_its_unit_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(service, "_systemctl", lambda *words: "")
    monkeypatch.setattr(service, "_systemd_version", lambda: 255)
    word, data = an_invite(), tmp_path / "data"
    options = ["--data", str(data), "--key", str(tmp_path / "node.key")]
    asked = ["service", "install", ADDRESS, *options, "--invite", word]
    assert main([*asked, "--print"]) == 0
    assert not data.exists()
    assert main(asked) == 0
    (unit,) = (tmp_path / "config").rglob("*.service")
    said = capsys.readouterr()
    assert word not in unit.read_text() + said.out + said.err
    assert f"--invite {data / 'invite'}" in unit.read_text().replace('"', "")
    assert (data / "invite").read_text().strip() == word
    assert mode(data / "invite") == 0o600
    broken = [*asked[:-1], word[:-9]]
    assert main(broken) == 2
