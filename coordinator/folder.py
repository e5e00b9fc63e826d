"""The run folder: everything that a coordinator owns, in one place that can be copied or moved.

::

    RUN/run.key          the run's signing key (0600); whoever has it speaks for the run
    RUN/spec.bin         the signed run spec
    RUN/format           the layout's version, "1"
    RUN/run.toml         how it was made, and how this machine serves it (``barnraise.coordinator.run_file``)
    RUN/state.sqlite     the journal; or RUN/state.postgres names the database that has it
    RUN/log/             the ledger as static files (``barnraise.coordinator.log_folder``)
    RUN/snapshots/       what a start need not replay (``barnraise.coordinator.snapshot``); may be deleted
    RUN/checkpoints/     v000000/ (config, tokenizer, weights), v000001/ ...
    RUN/store/           shards that lie in no checkpoint
    RUN/rollouts/        with [keep] rollouts: what was drawn (``barnraise.coordinator.rollout_files``)
    RUN/corpus/          with phase "pretrain": the text, in token shards
    RUN/pretrain.jsonl, RUN/units.jsonl     what ``barnraise report`` reads beside the journal
    RUN/scaffold.safetensors    an earlier run's scaffold, where the run takes one
    RUN/newcomers.bin    hashes of where new keys came from within a day (0600); in no backup
    RUN/admin.token      what programs steer the run with over HTTP (0600), once it was asked for
    RUN/control.sock     while a coordinator runs; RUN/lock keeps a second one out
    RUN/coordinator.log, RUN/units.log, RUN/verifier.log, RUN/learner.log    bounded; 'coordinator logs'
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from barnraise.coordinator.block_workers import corpus_folder
from barnraise.coordinator.journal_place import journal_begun, journal_path
from barnraise.coordinator.model_folder import describe_model
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol import wire
from barnraise.protocol.durable import link_or_copy
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import BarnraiseError, RunFolderError, StorageError
from barnraise.protocol.identity import Identity, load_identity, save_identity
from barnraise.protocol.manifest import ADAPTER_FILE, WEIGHTS_FILE
from barnraise.protocol.messages import Signed
from barnraise.protocol.pretrain import PretrainSpec
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.spec import (
    Admission,
    Dtype,
    EnvironmentSpec,
    EvalSpec,
    GrpoSpec,
    ModelSpec,
    RolloutSpec,
    RunSpec,
    SamplingSpec,
    VerifySpec,
)

FORMAT = "1"
IMPORTED_SCAFFOLD = "scaffold.safetensors"
_MAX_SPEC = 1024 * 1024
_VERSION = re.compile(r"v[0-9]{6,10}")


@dataclass(frozen=True)
class Settings:
    """What an operator chooses about a run, apart from model and verification (see ``presets``)."""

    environment: EnvironmentSpec
    sampling: SamplingSpec
    rollout: RolloutSpec
    grpo: GrpoSpec
    evaluation: EvalSpec
    weights_dtype: Dtype
    compute_dtype: Dtype
    admission: Admission = "open"


@dataclass(frozen=True)
class Run:
    """An opened run folder."""

    path: Path
    spec: RunSpec
    signed_spec: Signed
    run_id: bytes
    identity: Identity

    @property
    def journal_path(self) -> Path:
        return journal_path(self.path)

    @property
    def store_path(self) -> Path:
        return self.path / "store"

    @property
    def log_folder(self) -> Path:
        return self.path / "log"

    @property
    def snapshot_folder(self) -> Path:
        return self.path / "snapshots"

    @property
    def control_path(self) -> Path:
        return self.path / "control.sock"


def create_run(
    folder: Path,
    model_folder: Path,
    settings: Settings,
    verify: VerifySpec,
    *,
    name: str,
    description: str,
    model_name: str,
    seed: int,
    now_ms: int,
    identity: Identity | None = None,
) -> bytes:
    """Make a run folder around a prepared model and return the run's id.

    ``model_folder`` holds config.json, the tokenizer's files and one
    ``model.safetensors``. ``folder`` must not exist, or be empty; it appears whole
    or not at all.

    Raises:
        RunFolderError: ``folder`` is in use, or the model folder lacks something.
        StorageError: the disk refuses.
    """
    model = describe_model(model_folder, model_name, settings.weights_dtype, settings.compute_dtype)
    words = _Words(name, description, seed, now_ms)
    weights = (WEIGHTS_FILE,) if model.adapter is None else (WEIGHTS_FILE, ADAPTER_FILE)
    files = {name: model_folder / name for name in (*model.assets, *weights)}
    return _create(folder, model, settings, verify, words, files, None, identity)


def create_pretrain_run(
    folder: Path,
    model_folder: Path,
    parameters: int,
    corpus: Path,
    pretrain: PretrainSpec,
    settings: Settings,
    verify: VerifySpec,
    *,
    name: str,
    description: str,
    model_name: str,
    seed: int,
    now_ms: int,
    scaffold: Path | None = None,
    identity: Identity | None = None,
) -> bytes:
    """Make the folder of a run that begins with a model without weights, and return the run's id.

    ``model_folder`` holds config.json and the tokenizer's files (no weights), ``corpus``
    a prepared corpus (``barnraise.coordinator.corpus_files``), which the run gets a copy
    of; ``parameters``: the model's, all of them; ``scaffold``: the file that
    ``pretrain.scaffold`` is the SHA-256 of.

    Raises:
        RunFolderError: as ``create_run``; or corpus and model have different tokenizers.
        StorageError: the disk refuses.
    """
    model = describe_model(
        model_folder, model_name, settings.weights_dtype, settings.compute_dtype, parameters
    )
    if model.assets["tokenizer.json"] != file_digest(corpus / "tokenizer.json"):
        raise RunFolderError(f"{model_folder} and the corpus {corpus} have different tokenizers")
    words = _Words(name, description, seed, now_ms)
    files = {name: model_folder / name for name in model.assets}
    return _create(folder, model, settings, verify, words, files, (pretrain, corpus, scaffold), identity)


@dataclass(frozen=True)
class _Words:
    name: str
    description: str
    seed: int
    now_ms: int


_Pretraining = tuple[PretrainSpec, Path, Path | None]  # how, the corpus's folder, an earlier scaffold


def _create(
    folder: Path,
    model: ModelSpec,
    settings: Settings,
    verify: VerifySpec,
    words: _Words,
    files: Mapping[str, Path],
    pretraining: _Pretraining | None,
    identity: Identity | None,
) -> bytes:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} exists and is not an empty folder: choose another, or remove it")
    identity = identity or Identity.generate()
    spec = RunSpec(
        format=1,
        name=words.name,
        description=words.description,
        operator=identity.public_key,
        created_at=words.now_ms,
        phase="posttrain" if pretraining is None else "pretrain",
        seed=words.seed,
        model=model,
        environment=settings.environment,
        sampling=settings.sampling,
        rollout=settings.rollout,
        grpo=settings.grpo,
        verify=verify,
        evaluation=settings.evaluation,
        admission=settings.admission,
        pretrain=None if pretraining is None else pretraining[0],
    )
    signed = sign(spec, identity)
    try:
        open_run_spec(signed)  # what others would refuse must not be signed in the first place
    except BarnraiseError as error:
        raise RunFolderError(f"these settings make no valid run: {error}") from None
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.absolute().parent))
        try:
            _fill(part, files, signed, identity)
            if pretraining is not None:
                _copy_corpus(pretraining[1], corpus_folder(part))
                if pretraining[2] is not None:
                    link_or_copy(pretraining[2], part / IMPORTED_SCAFFOLD)
            if folder.exists():
                folder.rmdir()
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"cannot make the run folder {folder}: {error}") from error
    return run_id(signed)


def _fill(part: Path, files: Mapping[str, Path], signed: Signed, identity: Identity) -> None:
    checkpoint = checkpoint_folder(part, 0)
    checkpoint.mkdir(parents=True)
    (part / "store").mkdir()
    for name, path in files.items():
        shutil.copyfile(path, checkpoint / name)
        _sync(checkpoint / name)
    save_identity(identity, part / "run.key")
    (part / "spec.bin").write_bytes(wire.encode(signed))
    _sync(part / "spec.bin")
    (part / "format").write_text(FORMAT + "\n")
    _sync(part / "format")
    part.chmod(0o755)


def _copy_corpus(source: Path, target: Path) -> None:
    """Shards never change, so one on the same file system is linked; the rest is copied."""
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(path, place)


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file. Raises RunFolderError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from None


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_spec(folder: Path) -> tuple[RunSpec, Signed, bytes]:
    """The run's spec, as signed, and its id; works beside a running coordinator.

    Raises:
        RunFolderError: no run folder, incomplete, damaged, or of another format version.
    """
    try:
        found = (folder / "format").read_text(errors="replace").strip()[:20]
        data = (folder / "spec.bin").read_bytes()[: _MAX_SPEC + 1]
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise RunFolderError(
            f"{folder} is no complete run folder ({missing} is missing): "
            "make one with `barnraise run init DIR`"
        ) from None
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be read: {error}") from None
    if found != FORMAT:
        raise RunFolderError(
            f"{folder} has layout version {found or 'unknown'}, this barnraise reads version {FORMAT}: "
            "use the barnraise release that made it, or make a new run with `barnraise run init`"
        )
    try:
        signed = wire.decode(data, Signed)
        return open_run_spec(signed), signed, run_id(signed)
    except BarnraiseError as error:
        raise RunFolderError(
            f"{folder / 'spec.bin'} is damaged ({error}): restore it from a backup"
        ) from None


@contextmanager
def open_run(folder: Path) -> Iterator[Run]:
    """Open a run folder for the one coordinator that may use it at a time.

    Raises:
        RunFolderError: as ``read_spec``; or another coordinator uses it; or the key is not the run's.
        KeyFileError: the key file is missing, damaged, or readable by others.
    """
    spec, signed, identifier = read_spec(folder)
    identity = load_identity(folder / "run.key")
    if identity.public_key != spec.operator:
        raise RunFolderError(
            f"{folder / 'run.key'} is not the key that signed {folder / 'spec.bin'}: "
            "restore the run's own key"
        )
    first = WEIGHTS_FILE if spec.pretrain is None else "config.json"  # weights come from training
    if not (checkpoint_folder(folder, 0) / first).is_file():
        raise RunFolderError(
            f"{folder} has no checkpoint of version 0: restore it from a backup, or make a new run"
        )
    with locked(folder):
        _check_journal(folder)
        yield Run(folder, spec, signed, identifier, identity)


def _check_journal(folder: Path) -> None:
    """A run that has lost its journal must not quietly begin again: credit and ledger would be gone."""
    if journal_begun(folder):
        return
    journal = journal_path(folder)
    begun = sorted(path.name for path in (folder / "checkpoints").iterdir() if _VERSION.fullmatch(path.name))
    if begun and begun[-1] != checkpoint_folder(folder, 0).name:
        raise RunFolderError(
            f"{journal} is missing or empty, though the run has come to {begun[-1]}: restore it from a "
            "backup (it holds the ledger and everybody's credit), or make a new run"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every coordinator out of a run folder. Raises RunFolderError: one is in it."""
    path = folder / "lock"
    try:
        file = path.open("a+")
    except OSError as error:
        raise RunFolderError(f"{folder} is not writable: {error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read(20).strip()
            who = f"another coordinator (process {owner})" if owner else "another coordinator"
            raise RunFolderError(f"{who} is using {folder}: stop it first") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield  # closing the file, even by kill -9, releases the lock
