"""A PostgreSQL server of the tests' own: an unprivileged process, a Unix socket in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest

FOLDERS = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin")


def programs() -> Path:
    """Where ``initdb`` and ``postgres`` are; skips the test where they are not."""
    pytest.importorskip("sqlalchemy", reason="needs barnraise[postgres]")
    pytest.importorskip("pg8000", reason="needs barnraise[postgres]")
    found = [Path(path) for pattern in FOLDERS for path in sorted(Path("/").glob(pattern[1:]))]
    on_path = shutil.which("initdb")
    for folder in [*reversed(found), *([Path(on_path).resolve().parent] if on_path else [])]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    pytest.skip("no PostgreSQL server here: install the distribution's package, such as postgresql")


@dataclass
class Server:
    """One server. ``url``: of its only database, as the operator would write it."""

    folder: Path
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        return f"postgresql://barnraise@/postgres?host={quote(str(self.folder))}"

    def start(self) -> None:
        options = ("-D", self.folder / "data", "-k", self.folder, "-c", "listen_addresses=")
        self.process = subprocess.Popen(
            [programs() / "postgres", *options],
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "log").open("ab"),
            cwd=self.folder,
            **_unprivileged(),
        )
        end = time.monotonic() + 60
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.05)

    def stop(self, how: int = signal.SIGINT) -> None:
        """``SIGINT``: its fast shutdown; ``SIGKILL``: as a power cut would, but for the disk's cache."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(how)
            self.process.wait()
            self.process = None

    def ask(self, statement: str) -> list[tuple[object, ...]]:
        """Run SQL by hand."""
        from pg8000 import dbapi

        db = dbapi.connect("barnraise", database="postgres", unix_sock=f"{self.folder}/.s.PGSQL.5432")
        try:
            db.autocommit = True
            cursor = db.cursor()
            cursor.execute(statement)
            return [] if cursor.description is None else list(map(tuple, cursor.fetchall()))
        finally:
            db.close()

    def _answers(self) -> bool:
        try:
            self.ask("SELECT 1")
        except Exception:
            return False
        return True


def _unprivileged() -> dict[str, object]:
    """PostgreSQL refuses to run as root."""
    if os.getuid():
        return {}
    user = pwd.getpwnam("nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@contextmanager
def serving() -> Iterator[Server]:
    """A new server with one empty database, stopped and removed at the end."""
    found = programs()
    folder = Path(tempfile.mkdtemp(prefix="barnraise-pg-", dir="/tmp"))
    server = Server(folder)
    try:
        if not os.getuid():
            os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
        made = subprocess.run(
            [found / "initdb", "-D", folder / "data", "-U", "barnraise", "-A", "trust", "-N", "--no-locale"],
            capture_output=True,
            cwd=folder,
            check=False,
            **_unprivileged(),
        )
        if made.returncode:
            pytest.skip(f"initdb does not run here: {made.stderr.decode()[-300:]}")
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
