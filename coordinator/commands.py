"""What the operator may ask of a running coordinator: one table, for the control socket and over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from barnraise.coordinator.admission import (
    admit_known,
    admitted,
    allow,
    disallow,
    make_invite,
    revoke_invite,
    set_mode,
)
from barnraise.coordinator.amending import amend
from barnraise.coordinator.bans import ban, unban
from barnraise.coordinator.core import Core
from barnraise.coordinator.draining import Drain
from barnraise.coordinator.folder import Run
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.coordinator.steering import pause, resume, roll_back, stop
from barnraise.protocol.control import Command
from barnraise.protocol.errors import BarnraiseError


def operator_commands(core: Core, run: Run, drain: Drain, end: Callable[[], None]) -> dict[str, Command]:
    """Name -> ``async (args) -> result``. ``end``: a clean end, after which replies still go out."""
    return {
        "export-ledger": partial(_export, run, core),
        "ban": partial(ban, core),
        "unban": partial(unban, core),
        "pause": partial(pause, core),
        "resume": partial(resume, core),
        "rollback": partial(roll_back, core, run.path),
        "drain": drain.ask,
        "stop": partial(stop, end),
        "amend": partial(amend, core),
        "admission": partial(set_mode, core),
        "invite": partial(make_invite, core),
        "revoke-invite": partial(revoke_invite, core),
        "allow": partial(allow, core),
        "allow-known": partial(admit_known, core),
        "disallow": partial(disallow, core),
        "admitted": partial(admitted, core),
    }


async def _export(run: Run, core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``export-ledger``: write RUN/ledger.bin."""
    if args:
        raise BarnraiseError("export-ledger takes no arguments")
    target = run.path / "ledger.bin"
    lag = run.spec.rollout.max_lag
    await core.offload(
        lambda: export_ledger(core.journal, run.signed_spec, lag, run.identity, core.now_ms(), target)
    )
    return {"path": str(target)}
