"""One coordinator and three nodes as real processes, and what is done to them."""

from __future__ import annotations

import errno
import heapq
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import psutil
from e2e_support import PATIENCE_S, Place, barnraise, environment, words_of
from netns_support import Namespace

from chaos.damage import Outcome, damage
from chaos.links import Link
from chaos.plan import NODES, Act

TOKEN = "BARNRAISE_CHAOS"  # in the environment of every process that is started, for good or by others
MODULES = {"learner": "learner_child", "verifier": "verifier_child", "engine": "engine_child"}
SMALL_DISK = 160 * 2**20
YOUNG_S = 40.0  # until then a process still loads what it needs


@dataclass
class Memory:
    """What one process held: bytes, when it was ``YOUNG_S`` old, at most, and now."""

    what: str
    first: int = 0
    most: int = 0
    last: int = 0


@dataclass
class Chaos(Place):
    """A ``Place`` whose parts are known by the plan's names.

    Attributes:
        hosts: where a process runs that does not run right here.
        addresses: the coordinator's, as each node has to dial it.
        links: between each node and the coordinator.
        done: what was done, in words, for whoever reads a failure.
        outcomes: what has to be so in the end, after damage.
    """

    hosts: dict[str, Namespace] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    memory: dict[tuple[int, float], Memory] = field(default_factory=dict)
    started: float = 0.0
    small_disks: bool = False
    _undo: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)
    _down: set[str] = field(default_factory=set)
    _known: dict[str, Callable[[], None]] = field(default_factory=dict)

    # --- starting and finding

    def coordinator(self) -> str:
        """Start the coordinator and return its address, which stays the same."""
        self.begin("coordinator")
        pid = self.processes["coordinator"].pid
        state = self.wait(self.run, lambda state: state.get("pid") == pid and bool(state.get("address")))
        address = str(state["address"])
        self.listen = address.rsplit("/p2p/", 1)[0]
        return address

    def launch(self, name: str, command: Sequence[str]) -> None:
        host = self.hosts.get(name)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command if host is None else host.command(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )
        self._down.discard(name)

    def begin(self, name: str) -> None:
        """Start the coordinator or a node, again and again in the same way."""
        if name == "coordinator":
            how = ("--listen", self.listen, "--no-http")
            self.launch(name, barnraise("coordinator", "run", str(self.run), *how))
            return
        home = self.home(name)
        home.mkdir(exist_ok=True)
        listen = "0.0.0.0" if name in self.hosts else "127.0.0.1"
        command = barnraise(
            *("join", self.addresses[name], "--yes", "--name", name, "--data", str(home)),
            *("--key", str(self.folder / f"{name}.key"), "--threads", "1"),
            *("--listen", f"/ip4/{listen}/tcp/0"),
        )
        if name == NODES[2]:
            supervise = (sys.executable, "-P", "-m", "barnraise.node.supervise", str(home), "--")
            command = [*supervise, *command, "--background"]
        self.launch(name, command)

    def home(self, name: str) -> Path:
        return self.run if name == "coordinator" else self.folder / name

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log" if name == "coordinator" else self.home(name) / "node.log"

    def find(self, target: str) -> psutil.Process | None:
        """The living process of that name, of the supervised node the node itself."""
        part, _, name = target.rpartition(" of ")
        owner = name if part else "coordinator" if target in MODULES else target
        process = self.processes.get(owner)
        if process is None or process.poll() is not None:
            return None
        try:
            root = psutil.Process(process.pid)
            if target in ("coordinator", *NODES[:2]):
                return root
            word = MODULES.get(part or target, "join")
            for child in root.children(recursive=True):
                if any(word in each for each in words_of(child)):
                    return child
        except psutil.Error:
            pass
        return None

    # --- acts

    def perform(self, acts: Sequence[Act], random: Random) -> None:
        """All of them, each at its time or as soon after as one can; none is undone that is not due."""
        self.started = time.monotonic()
        for act in acts:
            self._until(act.at_s)
            self._act(act, random)
        self._until(max((at for at, _, _ in self._undo), default=0.0))

    def _now(self) -> float:
        return time.monotonic() - self.started

    def _until(self, at_s: float) -> None:
        while self._undo or self._now() < at_s:
            due = self._undo[0][0] if self._undo else at_s
            if due > at_s and self._now() >= at_s:
                return
            if self._undo and due <= self._now():
                heapq.heappop(self._undo)[2]()
            else:
                self.sample()
                time.sleep(min(0.5, max(0.01, min(due, at_s) - self._now())))

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (self._now() + seconds, next(self._numbers), undo))

    def _act(self, act: Act, random: Random) -> None:
        note = ""
        match act.kind:
            case "kill":
                note = self._kill(act.target, act.seconds)
            case "freeze":
                note = self._freeze(act.target, act.seconds)
            case "fill":
                note = self._fill(act.target, act.seconds)
            case "link":
                self.links[act.target].set(act.how)
                self._later(act.seconds, lambda: self.links[act.target].set("through"))
            case "damage":
                note = self._damage(act.target, act.how, act.seconds, random)
        self.done.append(f"{act}  done at {self._now():.1f} s{': ' + note if note else ''}")

    def _kill(self, target: str, seconds: float) -> str:
        process = self.find(target)
        if process is None:
            return "not there"
        with suppress(psutil.Error):
            process.kill()
        if target in self.processes and target != NODES[2]:
            self.processes[target].wait(60)
            self._down.add(target)
            self._later(seconds, lambda: self.begin(target))
        return ""

    def _freeze(self, target: str, seconds: float) -> str:
        process = self.find(target)
        if process is None:
            return "not there"

        def thaw() -> None:
            with suppress(psutil.Error):
                process.resume()

        with suppress(psutil.Error):
            process.suspend()
        self._later(seconds, thaw)
        return ""

    def _fill(self, name: str, seconds: float) -> str:
        if not self.small_disks:
            return "left out: no small disk can be mounted here"
        ballast = self.home(name) / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                while file.write(bytes(2**20)):
                    pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

        def empty() -> None:
            ballast.unlink(missing_ok=True)
            process = self.processes[name]
            if name == "coordinator" and name not in self._down and process.poll() not in (None, -9):
                # It was started where there was no room: it may end, and say so.
                assert "No space left" in self.log_of(name).read_text()[-2000:], (
                    f"{name} ended without a word"
                )
                self.begin(name)

        self._later(seconds, empty)
        return ""

    def _damage(self, name: str, how: str, seconds: float, random: Random) -> str:
        home, log = self.home(name), self.log_of(name)
        if name in self._down:
            return "it is down"
        if how == "version while it lives":
            outcome = self._spoil(how, home, log, random)
            engine = self.find(f"engine of {name}")
            if engine is not None:
                with suppress(psutil.Error):
                    engine.kill()
        else:
            process = self.processes[name]
            process.kill()  # of the supervised node the supervisor; its node is killed below
            if (child := self._supervised(name)) is not None:
                with suppress(psutil.Error):
                    child.kill()
                    child.wait(60)
            process.wait(60)
            outcome = self._spoil(how, home, log, random)
            self._down.add(name)
            if how == "known" and outcome is not None:
                self._later(seconds, lambda: self._refused(name))
            else:
                self._later(seconds, lambda: self.begin(name))
        if outcome is None:
            return "there is no such file"
        self.outcomes.append(outcome)
        return ""

    @staticmethod
    def _spoil(how: str, home: Path, log: Path, random: Random) -> Outcome | None:
        try:
            return damage(how, home, log, random)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return None  # its disk is full just now

    def _supervised(self, name: str) -> psutil.Process | None:
        for process in psutil.process_iter():
            words = words_of(process)
            node = "join" in words and "barnraise.node.supervise" not in words
            if name == NODES[2] and node and str(self.home(name)) in words:
                return process
        return None

    def _refused(self, name: str) -> None:
        """It does not start; then do what it says."""
        self.begin(name)
        assert self.processes[name].wait(PATIENCE_S) != 0, f"{name} starts with a damaged known.json"
        (self.home(name) / "known.json").unlink()
        self.begin(name)

    # --- afterwards

    def heal(self) -> None:
        """Undo what is left, and start what has ended; a process that nobody ended is a finding."""
        while self._undo:
            heapq.heappop(self._undo)[2]()
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}; see {self.log_of(name)}"

    def ours(self) -> list[psutil.Process]:
        """Every living process that was started here, by whomever."""
        token = os.environ[TOKEN]
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ours = process.environ().get(TOKEN) == token and process.pid != os.getpid()
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def sample(self) -> None:
        """What each process holds just now."""
        for name, root in self.processes.items():
            with suppress(psutil.Error):
                top = psutil.Process(root.pid)
                for process in (top, *top.children(recursive=True)):
                    with suppress(psutil.Error):
                        key = (process.pid, process.create_time())
                        at = self.memory.setdefault(
                            key, Memory(f"{name}: {' '.join(words_of(process))[-60:]}")
                        )
                        at.last = process.memory_info().rss
                        at.most = max(at.most, at.last)
                        if not at.first and time.time() - key[1] >= YOUNG_S:
                            at.first = at.last
