"""What a node remembers of a run, so that it finds its neighbours while the coordinator is away.

    runs/<run id>/run.bin        the signed spec, as the coordinator showed it
    runs/<run id>/overlay.json   the nodes it was linked to, or has heard of lately, with their addresses

Neither is believed more than what comes over the network: the spec must hash to the
run that the person joined and be signed by the key that was seen then; an address
only says where to dial, who answers there has to prove its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from barnraise.node.known import KnownRuns
from barnraise.node.link import Run
from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.messages import Signed
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.tree_messages import Contact
from barnraise.protocol.wire import decode, encode

MOST = 64  # contacts
_MOST_BYTES = 512 * 1024
_MOST_SPEC = 1024 * 1024


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    contacts: Annotated[list[Contact], msgspec.Meta(max_length=MOST)] = []


def save_contacts(folder: Path, contacts: Iterable[Contact]) -> None:
    """Keep the first ``MOST`` of ``contacts`` that have an address, whole or not at all.

    Raises:
        StorageError: the disk refused.
    """
    kept = [contact for contact in contacts if contact.addresses][:MOST]
    write_durably(folder / "overlay.json", msgspec.json.encode(_File(contacts=kept)) + b"\n")


def load_contacts(folder: Path) -> list[Contact]:
    """What was kept; nothing where the file is missing, damaged or not of this format."""
    try:
        with (folder / "overlay.json").open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            return []
        return msgspec.json.decode(data, type=_File).contacts
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return []


def save_run(folder: Path, signed_spec: Signed) -> None:
    """Keep the spec of a run that was joined.

    Raises:
        StorageError: the disk refused.
    """
    path, data = folder / "run.bin", encode(signed_spec)
    if not path.is_file() or path.read_bytes() != data:
        write_durably(path, data)


def read_run(folder: Path) -> Signed | None:
    """What ``save_run`` kept, not checked; None: nothing that can be read."""
    try:
        path = folder / "run.bin"
        return decode(path.read_bytes(), Signed) if path.stat().st_size <= _MOST_SPEC else None
    except (OSError, BarnraiseError):
        return None


def remembered_run(known: KnownRuns, runs: Path, coordinators: Iterable[str]) -> tuple[str, Run] | None:
    """The coordinator (peer id) among these whose run was joined before, and that run; None: none of them.

    ``runs`` is the folder of all runs, see ``NodeConfig.run_path``.
    """
    for peer_id in coordinators:
        identity = known.run_of(peer_id)
        if identity is None:
            continue
        try:
            signed = read_run(runs / identity.hex()[:16])
            if signed is None:
                continue
            spec = open_run_spec(signed)
        except BarnraiseError:
            continue
        if run_id(signed) == identity and known.operator_of(peer_id) == spec.operator:
            return peer_id, Run(spec, identity)
    return None
