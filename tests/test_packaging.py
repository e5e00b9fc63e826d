"""The distribution as strangers get it: wheel and sdist, used outside the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protocol", "kernels", "node", "coordinator", "simulation", "tui")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what an sdist would hold, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "barnraise"
    copy.mkdir()
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from that sdist (not from the tree)."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(out), cwd=source)
    (sdist,) = out.glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), cwd=tree)
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def test_the_wheel_imports_outside_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(site)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import barnraise.protocol.messages, barnraise.kernels.grpo, barnraise.node.daemon\n"
        "import barnraise.coordinator.server, barnraise.tui.main\n"
        "import importlib.util\n"
        "from pathlib import Path\n"
        "assert Path(barnraise.tui.main.__file__).is_relative_to(sys.argv[1]), barnraise.tui.main.__file__\n"
        "assert importlib.util.find_spec('kernels') is None\n"
        "sys.exit(barnraise.tui.main.main(['--help']))\n"
    )
    shown = run(sys.executable, "-P", "-c", code, str(site), cwd=tmp_path)
    assert "demo" in shown
    assert "join" in shown


def test_the_wheel_holds_the_namespace_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"barnraise", next(top for top in tops if top.endswith(".dist-info"))}
    for package in PACKAGES:
        assert f"barnraise/{package}/__init__.py" in names
        assert f"barnraise/{package}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".md", ".service")) or "/docs/" in name]


def test_every_package_folder_is_in_the_wheel(built: tuple[Path, Path]) -> None:
    """A new subfolder that setup.cfg does not name would be missing only for users."""
    names = set(zipfile.ZipFile(built[1]).namelist())
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert f"barnraise/{path.relative_to(ROOT).as_posix()}" in names
    for folder in ("templates", "static"):  # the web page's: what it shows and what that loads
        for path in (ROOT / "coordinator/web" / folder).iterdir():
            assert f"barnraise/{path.relative_to(ROOT).as_posix()}" in names
