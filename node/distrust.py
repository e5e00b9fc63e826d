"""After proof that the operator signed two ledgers: no more work for it, until a person decides otherwise.

Credit is what a node works for, and the ledger is all that says how much there is of it.
The unit at hand is finished and handed in; then nothing is fetched or done. ``resume``
takes that back for good (``WITNESS/overridden``): whether to leave is a person's decision.
"""

from __future__ import annotations

import logging
from pathlib import Path

from barnraise.node.context import Context
from barnraise.node.rules import Suspension
from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import StorageError

_OVERRIDDEN = "overridden"


def hold_back(ctx: Context, folder: Path, evidence: Path) -> None:
    """Take no more work of this run, unless a person has said that it should go on all the same.

    ``folder``: the witness's, where that is noted.
    """
    if ctx.distrusted is not None or ctx.distrust_overridden or (folder / _OVERRIDDEN).exists():
        return
    ctx.witness_folder = folder
    ctx.distrusted = Suspension(
        "split-view",
        "the operator signed two ledgers that contradict each other, so that what you earn may not stand "
        f"(proof: {evidence})",
        "see what 'barnraise ledger evidence' says of it; 'barnraise resume' works on all the same",
        finish=True,
    )
    ctx.changed.set()


def override(ctx: Context) -> str:
    """Work on although the operator was caught, as a person wishes; the words for it."""
    assert ctx.witness_folder is not None
    ctx.distrusted, ctx.distrust_overridden = None, True
    try:
        write_durably(ctx.witness_folder / _OVERRIDDEN, b"")
    except StorageError as error:
        ctx.say(f"this would not outlive a restart: {error}", logging.WARNING)
    return "working on, although the operator signed two ledgers that contradict each other"
