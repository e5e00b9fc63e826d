"""A worker on another machine, seen from the coordinator: started by a command, given the files it needs.

Any command that carries standard input and output will do (``ssh gpu-box barnraise worker``): the frames
that cross a child's pipes here cross that command. Who may run it may run anything there, and its
machine is trusted as this one is.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio
from msgspec import Struct, structs

from barnraise.coordinator import checkpoints
from barnraise.coordinator.block_workers import (
    REPORT_FILE,
    BlockVerifyJob,
    RecombineJob,
    RoundJob,
    corpus_folder,
)
from barnraise.coordinator.draw_checks import STALE_VERSIONS
from barnraise.coordinator.patience import WorkerAwayError
from barnraise.coordinator.remote_files import (
    PART_BYTES,
    Digests,
    FileFact,
    FileRequest,
    GetPart,
    Lacking,
    Listed,
    ListFolder,
    Meet,
    Met,
    Mirror,
    Part,
    PutPart,
    Taken,
    check_path,
    names_of,
)
from barnraise.coordinator.workers import (
    Report,
    Trained,
    TrainJob,
    VerifyJob,
    WorkerSetup,
    checkpoint_folder,
    first_policy,
)
from barnraise.protocol.child import Child
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import ChildError, StorageError
from barnraise.protocol.hello import our_hello
from barnraise.protocol.log_lines import level_asked

Reply = TypeVar("Reply", bound=Struct)

log = logging.getLogger(__name__)

ANSWER_S = 120.0
"""For a part of a file: a line that carries 4 MiB more slowly is no use."""
HASH_S = 1800.0
"""For a look at all files, which may have to be hashed."""
TOLD_AFTER_S = 2.0
_TRAINING_ONLY = frozenset(
    {
        checkpoints.MASTER_FILE,
        checkpoints.OPTIMIZER_FILE,
        checkpoints.OUTER_FILE,
        checkpoints.SHARDS_FOLDER,
        checkpoints.RECORD_FILE,
    }
)
"""What nobody needs who only runs a version."""


class Elsewhere:
    """Where one worker runs, and what is sent there and brought back. One caller at a time."""

    def __init__(self, command: Sequence[str], kind: str, setup: WorkerSetup) -> None:
        """Nothing is started yet.

        Args:
            command: what starts ``barnraise worker`` there; ``kind`` is added as its last word.
            kind: ``"verifier"`` or ``"learner"``.
            setup: as the worker would get it on this machine.
        """
        self.argv = (*command, kind)
        self.label = shlex.join(command)[:80]
        self.setup = structs.replace(setup, folder="")
        self.on_progress: Report = lambda subject, fraction: None
        self._kind = kind
        self._setup = setup
        self._folder = Path(setup.folder)
        self._digests = Digests()
        self._unfetched: set[int] = set()  # trained there, and not here yet

    async def meet(self, child: Child) -> None:
        """Before its setup: agree on the release, and send what the setup itself reads.

        Raises:
            WorkerAwayError: another release is there, its disk is full, or the command starts no worker.
        """
        try:
            meet = Meet(release=release(), run_id=self._setup.run_id, level=level_asked())
            await self._ask(child, meet, Met)
        except ChildError as error:
            hint = ": the command prints something of its own" if "a frame of" in str(error) else ""
            raise WorkerAwayError(f"{error}{hint} (started as: {shlex.join(self.argv)})") from error
        await self._send(child, ())

    async def send_for(
        self,
        child: Child,
        request: Sequence[VerifyJob] | BlockVerifyJob | TrainJob | RoundJob | RecombineJob | None,
    ) -> None:
        """Have all files there that ``request`` reads. None: a learner's first.

        Raises:
            WorkerAwayError: the worker is gone, or its disk refuses.
            ChildError: a file cannot be read here.
        """
        units: list[str] = []
        versions: set[int] = set()
        if request is None:
            pass
        elif isinstance(request, BlockVerifyJob):
            versions = {request.lease.policy_version}
            units = [request.delta, *request.states.values()]
        elif isinstance(request, TrainJob | RoundJob | RecombineJob):
            versions = {request.version - 1}
            units = [part.delta for part in request.contributions] if isinstance(request, RoundJob) else []
        else:
            newest = {job.lease.policy_version for job in request if job.model_check}
            # The verifier looks whether claims are rather those of versions shortly before.
            versions = {old for new in newest for old in range(new - STALE_VERSIONS, new + 1)}
        # Optimisers are large: a learner keeps what its next version is made from, and nothing older.
        await self._send(child, versions, units, drop=self._kind == "learner" and request is not None)

    def made(self, version: int) -> Trained | None:
        """A version that is whole in the run folder: a job that was done is not done again elsewhere.

        Raises:
            RunFolderError: its record is damaged.
        """
        record = checkpoints.read_record(self._folder, version)
        return None if record is None else record.trained

    async def bring(self, child: Child, trained: Trained) -> Trained:
        """Read the version that was made there into the run folder; the same, with our path.

        Raises:
            ChildError: the worker is gone; what it made is brought when the same job is asked for again.
            StorageError: our disk refuses.
        """
        self._unfetched.add(trained.version)
        final = checkpoint_folder(self._folder, trained.version)
        name = f"checkpoints/{final.name}"
        listed = await self._ask(child, ListFolder(folder=name), Listed, HASH_S)
        for fact in listed.files:
            if not check_path(fact.path).startswith(f"{name}/"):
                raise ChildError(f"the learner lists {fact.path} in {name}")
        record = f"{name}/{checkpoints.RECORD_FILE}"
        if record not in {fact.path for fact in listed.files}:
            raise ChildError(f"the learner says that version {trained.version} is done, but it is not whole")
        await self._bring_folder(child, final, name, listed.files)
        if self._setup.spec.pretrain is not None:
            await self._bring_report(child)
        self._unfetched.discard(trained.version)
        return structs.replace(trained, weights=str(final / Path(trained.weights).name))

    # --- sending

    async def _send(
        self, child: Child, versions: Iterable[int], units: Sequence[str] = (), drop: bool = False
    ) -> None:
        wanted = {0, first_policy(self._setup.spec), *versions}
        facts, folders = await trio.to_thread.run_sync(partial(self._wanted, wanted, units))
        kept = wanted if drop else await trio.to_thread.run_sync(checkpoints.version_folders, self._folder)
        mirror = Mirror(files=facts, folders=folders, versions=(*kept, *self._unfetched))
        try:
            lacking = set((await self._ask(child, mirror, Lacking, HASH_S)).paths)
            missing = [fact for fact in facts if fact.path in lacking]
            tell = self._teller("sending files to", sum(fact.size for fact in missing))
            for fact in missing:
                await self._send_file(child, fact, tell)
        except ChildError as error:
            raise WorkerAwayError(f"files could not be sent to {self.label}: {error}") from error

    def _wanted(
        self, versions: set[int], units: Sequence[str]
    ) -> tuple[tuple[FileFact, ...], tuple[str, ...]]:
        without = frozenset() if self._kind == "learner" else _TRAINING_ONLY
        numbers = [version for version in sorted(versions) if version >= 0]
        folders = [f"checkpoints/{checkpoint_folder(self._folder, number).name}" for number in numbers]
        names = [name for folder in folders for name in names_of(self._folder, folder, without)]
        if self._setup.spec.pretrain is not None:
            names += names_of(self._folder, corpus_folder(Path()).as_posix())
            if self._kind == "learner":
                names += [n for n in ("scaffold.safetensors", REPORT_FILE) if (self._folder / n).is_file()]
        try:
            facts = [self._digests.fact(self._folder, name) for name in (*names, *units)]
        except OSError as error:
            raise ChildError(
                f"{error.filename} cannot be read ({error.strerror}): the worker needs it"
            ) from error
        return tuple(facts), tuple(folders)

    async def _send_file(self, child: Child, fact: FileFact, tell: Callable[[int], None]) -> None:
        async with await trio.open_file(self._folder / fact.path, "rb") as file:
            offset = 0
            while offset < fact.size or offset == 0:
                data = await file.read(PART_BYTES)
                if not data and fact.size:
                    raise ChildError(f"{self._folder / fact.path} shrank while it was sent")
                await self._ask(child, PutPart(fact=fact, offset=offset, data=data), Taken)
                offset += len(data)
                tell(len(data))
                if not fact.size:
                    return

    # --- bringing back

    async def _bring_folder(self, child: Child, final: Path, name: str, files: Sequence[FileFact]) -> None:
        """A new version, whole or not at all, as ``checkpoints.save_checkpoint``; version 0 in its place."""
        grows = final.is_dir() and final.name == checkpoint_folder(self._folder, 0).name
        target = final if grows else final.with_name(checkpoints.TEMPORARY + final.name)
        try:
            await trio.to_thread.run_sync(partial(_make_room, target, files, fresh=not grows))
            here = await trio.to_thread.run_sync(partial(self._same, final, name, files))
            lacking = [fact for fact in files if not grows or fact.path not in here]
            lacking.sort(
                key=lambda fact: fact.path.endswith(f"/{checkpoints.RECORD_FILE}")
            )  # last: it says whole
            tell = self._teller("fetching from", sum(fact.size for fact in lacking))
            for fact in lacking:
                await self._bring_file(child, fact, target / fact.path.removeprefix(f"{name}/"), tell)
            if not grows:
                await trio.to_thread.run_sync(partial(_put_in_place, target, final))
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}; free some space there") from error

    def _same(self, final: Path, name: str, files: Sequence[FileFact]) -> set[str]:
        same = set()
        for fact in files:
            path = final / fact.path.removeprefix(f"{name}/")
            if path.is_file() and self._digests.of(path) == (fact.size, fact.sha256):
                same.add(fact.path)
        return same

    async def _bring_file(
        self, child: Child, fact: FileFact, path: Path, tell: Callable[[int], None]
    ) -> None:
        part = path.with_name(f".part-{path.name}")
        digest = hashlib.sha256()
        size = 0
        async with await trio.open_file(part, "wb") as file:
            while data := (await self._ask(child, GetPart(path=fact.path, offset=size), Part)).data:
                size += len(data)
                if size > fact.size:
                    break
                digest.update(data)
                await file.write(data)
                tell(len(data))
            await file.flush()
            await trio.to_thread.run_sync(os.fsync, file.fileno())
        if size != fact.size or digest.digest() != fact.sha256:
            part.unlink(missing_ok=True)
            raise ChildError(f"{fact.path} changed while it was fetched from the learner")
        part.replace(path)

    async def _bring_report(self, child: Child) -> None:
        """What the block stage wrote for the report; it got ours first, so it is never shorter."""
        listed = await self._ask(child, GetPart(path=REPORT_FILE, offset=0), Part)
        data, piece = b"", listed.data
        while piece:
            data += piece
            piece = (await self._ask(child, GetPart(path=REPORT_FILE, offset=len(data)), Part)).data
        part = self._folder / f".part-{REPORT_FILE}"
        part.write_bytes(data)
        part.replace(self._folder / REPORT_FILE)

    # --- both

    async def _ask(
        self, child: Child, request: FileRequest, reply: type[Reply], within_s: float = ANSWER_S
    ) -> Reply:
        with trio.move_on_after(within_s):
            return await child.request(request, reply)
        await child.kill()
        raise ChildError(
            f"the {self._kind} elsewhere did not answer within {within_s:.0f} s and was given up"
        )

    def _teller(self, what: str, total: int) -> Callable[[int], None]:
        """Tells of progress, and in the log of what takes longer."""
        began, done, told = trio.current_time(), 0, False
        where = f"the {self._kind} elsewhere ({self.label})"

        def tell(count: int) -> None:
            nonlocal done, told
            done += count
            self.on_progress(f"{what} {where}", done / max(1, total))
            if not told and trio.current_time() - began > TOLD_AFTER_S:
                told = True
                log.info("%s %s: %.1f MB", what, where, total / 1e6)

        return tell


def release() -> str:
    """What has to be the same on both sides: requests are structs of this very release."""
    own = our_hello()
    return f"{own.software}, protocol {own.major}.{own.minor}"


def _make_room(target: Path, files: Sequence[FileFact], *, fresh: bool) -> None:
    if fresh:
        shutil.rmtree(target, ignore_errors=True)
    for fact in files:
        inside = fact.path.split("/")[2:]
        (target / Path(*inside)).parent.mkdir(parents=True, exist_ok=True)


def _put_in_place(temporary: Path, final: Path) -> None:
    sync_folder(temporary)
    if final.exists():  # not whole, or it would not have been made again
        shutil.rmtree(final)
    os.rename(temporary, final)
    sync_folder(final.parent)
