"""Which key every coordinator showed us, and which runs the volunteer agreed to.

Trust on first use: whoever answers at a known coordinator identity with a run signed
by another key is refused, and the person decides. The run served last is remembered,
so that its nodes are found while the coordinator is away (``barnraise.node.remembered``),
and by which addresses it was reached, so that a person need not type one again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import PeerError, SignatureError, StorageError
from barnraise.protocol.identity import fingerprint
from barnraise.protocol.wire import printable

MAX_ENTRIES = 1000
MAX_ADDRESSES = 4  # of one coordinator: each that is dead costs a wait before the next is tried
_LISTED = 6


class Lead(NamedTuple):
    """A run that was joined, and where."""

    run_id: str  # hex
    name: str
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return f"'{self.name}' ({self.run_id[:16]})"


class _Lead(msgspec.Struct, frozen=True):
    name: str
    addresses: tuple[str, ...]


class _Known(msgspec.Struct):
    operators: dict[str, str] = {}  # coordinator's peer id -> run key, hex
    approved: list[str] = []  # run ids, hex
    runs: dict[str, str] = {}  # coordinator's peer id -> the run it served last, id in hex
    leads: dict[str, _Lead] = {}  # coordinator's peer id -> how to get there; the last joined is the last


class KnownRuns:
    """The file ``known.json`` in the data folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known = msgspec.json.decode(path.read_bytes(), type=_Known)
        except FileNotFoundError:
            self._known = _Known()
        except (OSError, msgspec.MsgspecError) as error:
            raise StorageError(
                f"cannot read {path}: {error}. It remembers whom you trusted; "
                "restore it, or delete it to trust the next answer anew"
            ) from error

    def check(self, peer_id: str, operator: bytes) -> None:
        """Compare the run's key with the one seen before at this coordinator; remember the first.

        Raises:
            SignatureError: another key than before.
            StorageError: the disk refused.
        """
        before = self._known.operators.get(peer_id)
        if before is None:
            if len(self._known.operators) >= MAX_ENTRIES:
                self._known.operators.pop(next(iter(self._known.operators)))
            self._known.operators[peer_id] = operator.hex()
            self._save()
        elif before != operator.hex():
            raise SignatureError(
                f"the run's key changed: this coordinator served key {fingerprint(bytes.fromhex(before))} "
                f"before and now {fingerprint(operator)}. Ask the operator; if the change is intended, "
                f"remove {peer_id} from {self._path}"
            )

    def operator_of(self, peer_id: str) -> bytes | None:
        """The run key seen at this coordinator."""
        return _bytes(self._known.operators.get(peer_id))

    def run_of(self, peer_id: str) -> bytes | None:
        """The id of the run that this coordinator served last, if it was joined."""
        return _bytes(self._known.runs.get(peer_id))

    def joined(self, peer_id: str, run_id: bytes) -> None:
        """Remember which run this coordinator serves."""
        if self.run_of(peer_id) != run_id:
            while len(self._known.runs) >= MAX_ENTRIES:
                self._known.runs.pop(next(iter(self._known.runs)))
            self._known.runs[peer_id] = run_id.hex()
            self._save()

    def reached(self, peer_id: str, name: str, addresses: Iterable[str]) -> None:
        """Remember where the coordinator of the run called ``name`` was met; the best address first.

        Raises:
            StorageError: the disk refused.
        """
        before = self._known.leads.pop(peer_id, None)
        older = () if before is None else before.addresses
        lead = _Lead(name, tuple(dict.fromkeys((*addresses, *older)))[:MAX_ADDRESSES])
        last = next(reversed(self._known.leads), None) if before is None else peer_id
        while len(self._known.leads) >= MAX_ENTRIES:
            self._known.leads.pop(next(iter(self._known.leads)))
        self._known.leads[peer_id] = lead
        if lead != before or last != peer_id:
            self._save()

    def leads(self) -> list[Lead]:
        """The runs that were joined here and can be joined again without an address; the last one last."""
        return [
            Lead(run, lead.name, lead.addresses)
            for peer_id, lead in self._known.leads.items()
            if lead.addresses and (run := self._known.runs.get(peer_id))
        ]

    def lead(self, wanted: str | None) -> Lead:
        """The run of this name, or whose id begins so; None: the last that was joined.

        Raises:
            PeerError: there is none, or there are several; says which there are.
        """
        leads = self.leads()
        if not leads:
            raise PeerError(
                f"no run was joined from {self._path.parent} yet, so its address is needed: "
                "the operator gives it to you, ending in /p2p/<peer id>",
            )
        if wanted is None:
            return leads[-1]
        found = [lead for lead in leads if lead.name == wanted]
        if not found and len(wanted) >= 2:
            found = [lead for lead in leads if lead.run_id.startswith(wanted.lower())]
        if found and len({lead.run_id for lead in found}) == 1:
            return found[-1]
        there = ", ".join(map(str, (found or leads)[: -_LISTED - 1 : -1]))
        text = printable(wanted, 100)
        raise PeerError(
            f"'{text}' may be any of {there}: name one by its id"
            if found
            else f"'{text}' is neither an address nor a run that was joined from {self._path.parent}: "
            f"give an address, or one of {there}",
        )

    def approved(self, run_id: bytes) -> bool:
        """Whether the person agreed to this run before."""
        return run_id.hex() in self._known.approved

    def approve(self, run_id: bytes) -> None:
        """Remember that they did."""
        if run_id.hex() not in self._known.approved:
            self._known.approved = [*self._known.approved[-MAX_ENTRIES:], run_id.hex()]
            self._save()

    def _save(self) -> None:
        write_durably(self._path, msgspec.json.format(msgspec.json.encode(self._known)) + b"\n")


def _bytes(text: str | None) -> bytes | None:
    try:
        return None if text is None else bytes.fromhex(text)
    except ValueError:
        return None
