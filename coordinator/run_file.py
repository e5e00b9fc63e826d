"""The run file: one TOML file from which a run is made, and by which its coordinator goes afterwards.

Two kinds of keys stand in it. What the sections ``run`` to ``pretrain`` say is signed
when the run is made, and from then on only ``barnraise run amend`` changes it. What
``serve``, ``keep`` and ``guards`` say is this machine's business: it is read with every
start, from ``RUN/run.toml``. ``barnraise.coordinator.run_keys`` documents every key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from barnraise.coordinator.folder import Settings
from barnraise.coordinator.guards import GuardLimits
from barnraise.coordinator.run_bounds import too_small
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.hello import Floor, our_hello
from barnraise.protocol.messages import Text
from barnraise.protocol.spec import (
    Admission,
    EnvironmentSpec,
    EvalSpec,
    GrpoSpec,
    RolloutSpec,
    SamplingSpec,
)

RUN_FILE = "run.toml"
MOST_BYTES = 256 * 1024
_NEAR = 3

Devices = Annotated[str, Meta(max_length=200)]
Command = Annotated[str, Meta(max_length=1000)]
Share = Annotated[float, Meta(ge=0.0, le=1e6)]


class RunFileError(BarnraiseError):
    """The file cannot be used; the text names file, key, cause and cure."""


class RunSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run is. An empty text stands for the default."""

    phase: Literal["posttrain", "pretrain"] = "posttrain"
    model: str = "demo"
    name: Annotated[str, Meta(max_length=64)] = ""
    description: Text = ""
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0
    admission: Admission = "open"
    lora_rank: Annotated[int, Meta(ge=0, le=1024)] = 0
    lora_alpha: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    lora_targets: str = ""


class Serve(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the coordinator is started, where the command line says nothing else."""

    listen: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] = ("/ip4/0.0.0.0/tcp/4001",)
    http: Annotated[str, Meta(max_length=200)] = ""
    no_http: bool = False
    admin: Literal["local", "proxy", "clear", "off"] = "local"
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    verifiers: Annotated[str, Meta(max_length=8)] = ""
    verify_all: bool = False
    verifier_devices: Devices = ""
    verifier_at: Annotated[tuple[Command, ...], Meta(max_length=64)] = ()
    learner_processes: Annotated[str, Meta(max_length=8)] = "1"
    learner_devices: Devices = ""
    learner_at: Command = ""
    learner_recompute: bool = False
    learner_torchrun: Annotated[str, Meta(max_length=2000)] = ""
    mirrors: Annotated[tuple[str, ...], Meta(max_length=8)] = ()
    upload_copies: Share = 0.0
    relay_mbit: Annotated[float, Meta(ge=0.0, le=100_000)] = 0.0
    floor_minor: Annotated[int, Meta(ge=-1, le=65_535)] = -1
    floor_from: Annotated[str, Meta(max_length=40)] = ""
    new_keys_per_day: Annotated[int, Meta(ge=0, le=65_536)] = 64
    limit_private: bool = False


class Keep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stays on the disk beyond what the run itself needs: for a rollback, and of the rollouts."""

    every: Annotated[int, Meta(ge=0, le=65_536)] = 25
    most: Annotated[int, Meta(ge=0, le=65_536)] = 8
    disk_gb: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    rollouts: Literal["off", "accepted", "all"] = "off"
    rollouts_gb: Annotated[float, Meta(ge=0.0, le=1e6)] = 10.0
    rollout_proofs: bool = False


def fields_of(section: str, kind: type[Any]) -> dict[str, Any]:
    """The keys of a section that is read into ``kind``, with their annotated types."""
    hints = get_type_hints(kind, include_extras=True)
    return {key: hint for key, hint in hints.items() if f"{section}.{key}" not in LEFT_OUT}


def _optional(name: str, kind: type[Any]) -> Any:
    """A struct with those fields and their bounds, each of which may be left out."""
    fields = [(field, hint | UnsetType, UNSET) for field, hint in fields_of(name, kind).items()]
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


SIGNED: dict[str, type[Any]] = {
    "environment": EnvironmentSpec,
    "sampling": SamplingSpec,
    "rollout": RolloutSpec,
    "grpo": GrpoSpec,
    "evaluation": EvalSpec,
    "held_out": EnvironmentSpec,
}
"""Sections that replace parts of a preset: what the file leaves out stays as the preset has it."""

OWN: dict[str, type[Any]] = {"serve": Serve, "keep": Keep, "guards": GuardLimits}
"""Sections that are read with every start."""

LEFT_OUT = ("evaluation.environment", "pretrain.scaffold")
"""Fields that are no keys: a section of its own, ``held_out``; and what ``--scaffold`` names by its hash."""


class RunFile(Struct, frozen=True, kw_only=True):
    """A file that was read. ``signed``: what it says of each of ``SIGNED``, and of ``pretrain``."""

    run: RunSection = RunSection()
    signed: dict[str, dict[str, Any]] = {}
    serve: Serve = Serve()
    keep: Keep = Keep()
    guards: GuardLimits = GuardLimits()


def read_run_file(path: Path, made: bool = False) -> RunFile:
    """Read and check a run file. ``made``: what is signed is signed, whatever sense it makes.

    Raises:
        RunFileError: it cannot be read, is no TOML, or a key is unknown or out of its bounds.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RunFileError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > MOST_BYTES:
        raise RunFileError(f"{path} is larger than {MOST_BYTES // 1024} KiB: it is no run file")
    try:
        tables = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunFileError(f"{path} is no TOML: {error}") from None
    return _run_file(tables, str(path), made)


def operating(folder: Path) -> RunFile:
    """What ``RUN/run.toml`` says; all defaults where there is none (a run from before there were any).

    Raises:
        RunFileError: it is there and cannot be used.
    """
    path = folder / RUN_FILE
    return read_run_file(path, made=True) if path.exists() else RunFile()


def _run_file(tables: dict[str, Any], where: str, made: bool) -> RunFile:
    known = ["run", *SIGNED, "pretrain", *OWN]
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise RunFileError(f"{where}: {name!r} stands outside of a section: {', '.join(known)}")
        if name not in known:
            raise RunFileError(f"{where}: there is no section [{name}]{_near(name, known)}")
    own = {name: _read(kind, tables.get(name, {}), name, where) for name, kind in OWN.items()}
    signed = {}
    for name, kind in {**SIGNED, "pretrain": _choices()}.items():
        signed[name] = _floats(kind, tables.get(name, {}))
        _read(_optional(name, kind), signed[name], name, where)
    run = _read(RunSection, tables.get("run", {}), "run", where)
    said = {
        f"{name}.{key}": value
        for name, table in tables.items()
        for key, value in table.items()
        if name in OWN or not made
    }
    if wrong := too_small(said):
        raise RunFileError(f"{where}: {wrong}")
    if signed["pretrain"] and run.phase != "pretrain":
        raise RunFileError(f'{where}: [pretrain] is for run.phase = "pretrain"')
    try:
        floor_of(own["serve"])
    except RunFileError as error:
        raise RunFileError(f"{where}: {error}") from None
    return RunFile(run=run, signed=signed, **own)


def floor_of(serve: Serve) -> Floor | None:
    """The oldest protocol minor that ``[serve]`` lets in, and from when on; None: every one of our major.

    Raises:
        RunFileError: no such minor yet, or no date.
    """
    if serve.floor_minor < 0:
        if serve.floor_from:
            raise RunFileError("[serve] floor_from says when, but floor_minor is -1: say from which minor on")
        return None
    if serve.floor_minor > (ours := our_hello()).minor:
        raise RunFileError(
            f"[serve] floor_minor {serve.floor_minor} is above what this coordinator speaks itself "
            f"({ours.major}.{ours.minor}): nobody could join; upgrade it first"
        )
    try:
        since = datetime.fromisoformat(serve.floor_from or "1970-01-01")
    except ValueError:
        raise RunFileError(
            f'[serve] floor_from {serve.floor_from!r} is no date: write "2026-12-31" or '
            '"2026-12-31T18:00", UTC'
        ) from None
    if since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    return Floor(serve.floor_minor, max(0, int(since.timestamp() * 1000)))


def _choices() -> type[Any]:
    from barnraise.coordinator.pretrain_presets import Choices

    return Choices


def _floats(kind: type[Any], table: dict[str, Any]) -> dict[str, Any]:
    """Whole numbers where a float is meant, as people write them, made floats; the rest as it is."""
    hints = get_type_hints(kind)
    return {
        key: float(value)
        if isinstance(value, int) and not isinstance(value, bool) and "float" in str(hints.get(key))
        else value
        for key, value in table.items()
    }


def _read(kind: Any, table: dict[str, Any], section: str, where: str) -> Any:
    fields = list(get_type_hints(kind))
    for key in table:
        if key not in fields:
            raise RunFileError(f"{where}: [{section}] has no key {key!r}{_near(key, fields)}")
    if kind in OWN.values() or kind is RunSection:
        table = _floats(kind, table)
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as error:
        text, _, at = str(error).partition(" - at `$.")
        raise RunFileError(f"{where}: [{section}] {at.rstrip('`') or 'is wrong'}: {text}") from None


def _near(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=_NEAR)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are: {', '.join(known)}"


def settings_of(file: RunFile, preset: Settings) -> Settings:
    """The preset with what the file says instead.

    Raises:
        RunFileError: the parts do not go together.
    """
    changed: dict[str, Any] = {}
    for name in SIGNED:
        if name == "held_out":
            continue
        part = getattr(preset, name)
        fields = {**msgspec.to_builtins(part), **file.signed.get(name, {})}
        if name == "environment" and "settings" in file.signed.get(name, {}):
            _check_json(fields["settings"])
        changed[name] = msgspec.convert(fields, type(part), strict=True)
    if file.signed.get("held_out"):
        own = {**msgspec.to_builtins(changed["environment"]), **file.signed["held_out"]}
        _check_json(own["settings"])
        held_out = msgspec.convert(own, EnvironmentSpec, strict=True)
        changed["evaluation"] = msgspec.structs.replace(changed["evaluation"], environment=held_out)
    rollout = changed["rollout"]
    if rollout.max_groups_per_version < rollout.groups_per_version:
        raise RunFileError("[rollout] max_groups_per_version is below groups_per_version: change both")
    if rollout.deadline_s < rollout.timeout_s:
        raise RunFileError("[rollout] deadline_s is below timeout_s: change both")
    return dataclasses.replace(preset, **changed)


def _check_json(text: str) -> None:
    try:
        good = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        good = False
    if not good:
        raise RunFileError("[environment] settings is a JSON object in quotes, such as '{\"max_terms\": 3}'")
