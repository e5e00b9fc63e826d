"""Which key every coordinator showed us, and which runs the volunteer agreed to.

Trust on first use: whoever answers at a known coordinator identity with a run signed
by another key is refused, and the person decides. The run served last is remembered,
so that its nodes are found while the coordinator is away (``barnraise.node.remembered``).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import SignatureError, StorageError
from barnraise.protocol.identity import fingerprint

MAX_ENTRIES = 1000


class _Known(msgspec.Struct):
    operators: dict[str, str] = {}  # coordinator's peer id -> run key, hex
    approved: list[str] = []  # run ids, hex
    runs: dict[str, str] = {}  # coordinator's peer id -> the run it served last, id in hex


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
