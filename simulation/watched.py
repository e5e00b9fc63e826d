"""An engine that writes down when it loads, begins, ends and is stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from barnraise.node.block_engine import BlockEngine, BlockProgress, BlockTrained, BlockWork
from barnraise.node.engine import Engine, EngineInfo, Generated, Progress, Work
from barnraise.protocol.errors import ChildError
from barnraise.protocol.spec import RunSpec
from barnraise.simulation.event_log import EventLog


class WatchedEngine:
    """Any engine, of the node ``name``. ``inner``: the engine itself."""

    def __init__(self, inner: Engine, name: str, log: EventLog) -> None:
        self.inner = inner
        self._name = name
        self._log = log

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        """See ``Engine.load``. Event ``loaded``."""
        info = await self.inner.load(spec, folder, version)
        self._log.note("loaded", node=self._name, version=version)
        return info

    async def generate(self, work: Work, progress: Callable[[Progress], None]) -> Generated:
        """See ``Engine.generate``. Events ``begin``, then ``made`` or ``stopped``."""
        lease = work.lease_id.hex()[:16]
        self._log.note("begin", node=self._name, lease=lease, version=work.policy_version)
        made = False
        try:
            generated = await self.inner.generate(work, progress)
            made = True
        finally:
            self._log.note("made" if made else "stopped", node=self._name, lease=lease)
        return generated

    async def train(
        self, spec: RunSpec, work: BlockWork, progress: Callable[[BlockProgress], None]
    ) -> BlockTrained:
        """See ``BlockEngine.train``. Events as those of ``generate``; ``from_segment``: taken up there."""
        lease = work.lease_id.hex()[:16]
        begun = False

        def told(made: BlockProgress) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._log.note(
                    "begin",
                    node=self._name,
                    lease=lease,
                    version=work.policy_version,
                    block=work.block,
                    slot=work.slot,
                    from_segment=made.saved or None,
                )
            progress(made)

        if not isinstance(self.inner, BlockEngine):
            raise ChildError("this engine trains no blocks")
        made = False
        try:
            trained = await self.inner.train(spec, work, told)
            made = True
        finally:
            self._log.note("made" if made else "stopped", node=self._name, lease=lease)
        return trained

    async def close(self) -> None:
        """See ``Engine.close``."""
        await self.inner.close()
