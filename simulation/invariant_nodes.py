"""What a node believes, held against what is durable at the coordinator: acknowledgements, leases,
versions, receipts, shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from barnraise.coordinator.hub import Hub
from barnraise.node.events import EngineLoaded, Event, Granted, Judged, Restored, UnitDone, Uploaded
from barnraise.node.receipts import read_receipts
from barnraise.protocol import wire
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.ledger import decode_entry, receipt_differs
from barnraise.protocol.ledger_entries import ClawedBack, Reviewed
from barnraise.protocol.ledger_entries import Judged as JudgedEntry
from barnraise.protocol.ledger_entries import Restored as RestoredEntry
from barnraise.protocol.messages import Manifest, Receipt, Signed
from barnraise.protocol.version_folder import version_name
from barnraise.simulation.invariant_record import Broken, Record
from barnraise.simulation.lives import Node

if TYPE_CHECKING:
    from barnraise.node.context import Context

_JUDGING = (JudgedEntry, Reviewed, ClawedBack, RestoredEntry)


@dataclass
class Nodes:
    """What all nodes have seen. ``now_ms``: the coordinator's clock.

    Attributes:
        acknowledged: submissions of which some node was told that they are kept.
        answers: submission -> its lease, as its node knows.
        works_at: lease -> the node that was granted it last.
    """

    record: Record
    now_ms: Callable[[], int]
    acknowledged: set[bytes] = field(default_factory=set)
    answers: dict[bytes, bytes] = field(default_factory=dict)
    works_at: dict[bytes, str] = field(default_factory=dict)

    def hear(self, node: Node, ctx: Context, event: Event) -> None:
        """One event of one node, which is folded into its state already.

        Raises:
            Broken: the node was told, or believes, what is not so.
        """
        match event:
            case UnitDone(submission_id):
                self._remember(ctx, submission_id)
            case Restored(pending):
                for submission_id in pending:
                    self._remember(ctx, submission_id)
            case Uploaded(submission_id, acknowledged):
                if acknowledged:
                    self.acknowledged.add(submission_id)
                    self._kept(node.name, submission_id)
                elif not node.traits.cheat:
                    self._refused(node, submission_id)
            case Judged(submission_id):
                if submission_id not in self.record.submitted:
                    raise Broken("receipts-match", f"{node.name} has a receipt for work that is not stored")
                assert ctx.receipts is not None
                for receipt in ctx.receipts.receipts():
                    if receipt.submission_id == submission_id:
                        check_receipt(self.record, node.name, node.key, receipt)
            case Granted(unit):
                self._granted(node, unit.lease_id)
            case EngineLoaded(version):
                assert ctx.versions is not None
                check_version(self.record, node.name, ctx.versions.folder, version)
            case _:
                pass

    def _remember(self, ctx: Context, submission_id: bytes) -> None:
        lease_id = None if ctx.pending is None else ctx.pending.lease_of(submission_id)
        if lease_id is not None:
            self.answers[submission_id] = lease_id

    def _kept(self, name: str, submission_id: bytes) -> None:
        if submission_id not in self.record.submitted:
            raise Broken(
                "acknowledged-kept",
                f"{name} was told that {submission_id.hex()[:16]} is kept, and it is not on the disk",
            )

    def _refused(self, node: Node, submission_id: bytes) -> None:
        loan = self.record.leases.get(self.answers.get(submission_id, b""))
        if loan is None or submission_id in self.record.submitted:
            return
        now = self.now_ms()
        if now < loan.terms.deadline_at and self.record.banned_until.get(node.key, 0) <= now:
            left = (loan.terms.deadline_at - now) / 1000
            raise Broken(
                "lease-honoured",
                f"{node.name}: work on unit {loan.terms.unit_id} was refused {left:.0f} s before its time",
            )

    def _granted(self, node: Node, lease_id: bytes) -> None:
        loan = self.record.leases.get(lease_id)
        if loan is None:
            if any(lease.lease_id == lease_id for lease in self.record.submitted.values()):
                return  # its answer and the grant crossed
            raise Broken("lease-durable", f"{node.name} holds lease {lease_id.hex()[:16]}, which is not open")
        if loan.terms.node != node.key:
            raise Broken("lent-once", f"{node.name} works at a lease of another node")
        other = self.works_at.setdefault(lease_id, node.name)
        if other != node.name:
            raise Broken("lent-once", f"{node.name} and {other} work at one lease")

    def check_acknowledged(self, durable: set[bytes]) -> None:
        """That everything acknowledged is among the submissions that are on the disk at the end.

        Raises:
            Broken: some is lost.
        """
        lost = self.acknowledged - durable
        if lost:
            raise Broken(
                "acknowledged-kept",
                f"{len(lost)} acknowledged submissions are not in the journal: {min(lost).hex()[:16]}",
            )


def check_version(record: Record, name: str, folder: Path, version: int) -> None:
    """That what lies in ``folder`` as ``version`` is what the operator signed, to the last byte.

    Raises:
        Broken: the manifest is not the published one, or a file differs from it.
    """
    path = folder / f"{version_name(version)}.manifest"
    try:
        signed = wire.decode(path.read_bytes(), Signed)
    except (OSError, BarnraiseError):
        raise Broken("version-signed", f"{name} has loaded version {version} without a manifest") from None
    try:
        record.check_manifest(version, signed)
    except Broken as broken:
        raise Broken(broken.name, f"{name} has loaded it: {broken.what}") from None
    for entry in wire.decode(signed.payload, Manifest).files:
        try:
            data = (folder / version_name(version) / entry.path).read_bytes()
        except OSError:
            data = b""
        if hashlib.sha256(data).digest() != entry.sha256:
            raise Broken("version-signed", f"{name} has loaded version {version} with another {entry.path}")


def check_receipts(record: Record, operator: bytes, name: str, key: bytes, path: Path) -> int:
    """That each receipt in a node's file is signed, and says what the ledger says; how many there are.

    Raises:
        Broken: one does not.
    """
    if not path.exists():
        return 0
    kept = read_receipts(path)
    for signed in kept:
        check_receipt(record, name, key, open_signed(signed, Receipt, operator))
    return len(kept)


def check_receipt(record: Record, name: str, key: bytes, receipt: Receipt) -> None:
    """That one receipt says what the ledger says.

    Raises:
        Broken: it does not.
    """
    index = receipt.ledger_index
    if index >= len(record.entries) or receipt.node != key:
        raise Broken("receipts-match", f"{name} has a receipt for ledger entry {index}, which is not its")
    entry = decode_entry(record.entries[index])
    if not isinstance(entry, _JUDGING):
        raise Broken("receipts-match", f"{name}: ledger entry {index} is no verdict")
    differs = receipt_differs(receipt, entry)
    if differs:
        raise Broken(
            "receipts-match", f"{name}: receipt and ledger entry {index} differ in {', '.join(differs)}"
        )


def check_has_receipts(record: Record, name: str, key: bytes, path: Path, before: int) -> None:
    """That a node which was connected has every receipt for it among the first ``before`` entries.

    Raises:
        Broken: one is missing.
    """
    have = set()
    if path.exists():
        have = {wire.decode(signed.payload, Receipt).ledger_index for signed in read_receipts(path)}
    for index, data in enumerate(record.entries[:before]):
        if key not in data:
            continue
        entry = decode_entry(data)
        if isinstance(entry, _JUDGING) and entry.node == key and index not in have:
            raise Broken("receipts-match", f"{name} never got the receipt of ledger entry {index}")


def check_store(name: str, store: Path) -> None:
    """That each shard in a node's store is what its name says: nothing unverified can be passed on.

    Raises:
        Broken: one is not.
    """
    for path in store.glob("??/*") if store.is_dir() else ():
        if len(path.name) == 64 and hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
            raise Broken("shards-verified", f"{name} keeps a shard that is not {path.name[:16]}")


def check_reports(hub: Hub, spoilers: set[str], known: set[str]) -> None:
    """That nobody is caught with a bad shard but who makes them (``spoilers``, of the ``known`` peers).

    Raises:
        Broken: an honest peer passed one on.
    """
    for report in hub.reports:
        if report["code"] == "corrupt" and report["peer"] in known - spoilers:
            raise Broken(
                "shards-verified", f"{report['by']} had a bad shard of {report['peer']}: {report['text']}"
            )
