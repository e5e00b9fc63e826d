"""Of a journal, which version used which work, signed for whoever reads the exported ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from barnraise.coordinator.block_events import RoundFormed
from barnraise.coordinator.events import BatchFormed, Event, SubmissionsSkipped, VersionPublished
from barnraise.protocol.envelope import sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger_uses import MOST, UNUSED, Uses
from barnraise.protocol.messages import Signed


class UseNotes:
    """What the events of a journal, passed through ``watch``, say of use."""

    def __init__(self) -> None:
        self._formed: dict[int, tuple[bytes, ...]] = {}  # by version; one that was formed again counts last
        self._skipped: list[bytes] = []
        self._published: set[int] = set()

    def watch(self, events: Iterable[Event]) -> Iterator[Event]:
        """The same events."""
        for event in events:
            match event:
                case BatchFormed() | RoundFormed():
                    self._formed[event.version] = event.submissions
                case SubmissionsSkipped():
                    self._skipped += event.submissions
                case VersionPublished():
                    self._published.add(event.version)
            yield event

    def signed(self, run_id: bytes, identity: Identity) -> Iterator[Signed]:
        """One ``Uses`` or more for each published version that was made of work, and for what was skipped."""
        used = [
            (version, self._formed[version]) for version in sorted(self._formed) if version in self._published
        ]
        for version, submissions in (*used, (UNUSED, tuple(self._skipped))):
            for start in range(0, len(submissions), MOST):
                part = submissions[start : start + MOST]
                yield sign(Uses(run_id=run_id, version=version, submissions=part), identity)
