"""What a malicious operator may try with its own ledger, and who finds it by which command (docs/ledger.md).

The operator holds the key: every file here is properly signed. The auditor holds what the
case says: an older copy, a node's receipts, the head that a node saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from barnraise.node.receipts import ReceiptBook
from barnraise.node.witness import Witness
from barnraise.protocol.envelope import sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import LedgerEntry, Submitted
from barnraise.protocol.messages import Signed, TreeHead
from barnraise.protocol.tlog_tiles import Tile, hash_tile
from barnraise.protocol.witness_store import WitnessStore
from tests.test_ledger import (
    ANN,
    BAD,
    BEN,
    GOOD,
    OPERATOR,
    RUN,
    SIGNED_SPEC,
    STORY,
    judged,
    lease,
    receipt_of,
    submitted,
)
from tests.test_ledger_inspect import call, saved
from tests.test_tlog_proof import KEY, checkpoint_of, log_of

NODE = Identity.from_private_bytes(bytes([9]) * 32)
LATER_MS = 4 * 10**12  # when the operator signs what it shows afterwards
MORE: list[LedgerEntry] = [lease(5, ANN, 1), submitted(5, ANN), judged(5, ANN, GOOD, 100)]


@dataclass(frozen=True)
class Attack:
    """``entries``: the ledger that is shown now, honest until then. ``found``: commands that exit with 1.

    ``blind``: commands that see nothing wrong, for want of what the others hold.
    """

    entries: list[LedgerEntry]
    found: tuple[str, ...]
    blind: tuple[str, ...] = ()
    witness: bool = True  # a node that saw the first ledger is shown this one: does it convict?


REWRITTEN = [*STORY[:10], judged(2, BEN, GOOD, 77), *STORY[11:]]
DROPPED = [entry for entry in STORY if entry != STORY[10]]
ATTACKS = {
    "rewrites an entry, keeps the size": Attack(
        REWRITTEN, ("receipts ben", "checkpoint", "old copy", "import"), ("alone", "receipts ann")
    ),
    "drops an entry": Attack(
        DROPPED, ("receipts ben", "checkpoint", "old copy", "import"), ("receipts ann",)
    ),
    "drops an entry and goes on": Attack(
        [*DROPPED, *MORE], ("receipts ben", "checkpoint", "old copy", "import"), ("alone", "receipts ann")
    ),
    "swaps two entries": Attack(
        [*STORY[:4], STORY[5], STORY[4], *STORY[6:]], ("checkpoint", "old copy", "import"), ("alone",)
    ),
    "shows one node a fork": Attack(
        [*STORY[:12], STORY[12], lease(4, ANN, 1), submitted(4, ANN), judged(4, ANN, GOOD, 160)],
        ("receipts ben", "checkpoint", "old copy", "import"),
        ("alone", "receipts ann"),
    ),
    "goes back to a backup": Attack(
        STORY[:12],
        ("receipts ben", "checkpoint", "cosigned"),
        ("alone", "receipts ann", "old copy", "import"),
        witness=False,
    ),
    "goes back to a backup and goes on": Attack(
        [*STORY[:13], *MORE, lease(6, BEN, 1)],
        ("receipts ben", "checkpoint", "old copy", "import"),
        ("alone", "receipts ann"),
    ),
    "denies a receipt": Attack(
        [*STORY[:15], judged(4, BEN, BAD, 0)],
        ("receipts ben", "checkpoint", "old copy", "import"),
        ("alone", "receipts ann"),
    ),
}


def told(path: Path, node: bytes, receipts: Sequence[Signed]) -> Path:
    """A node's data folder with its receipts."""
    book = ReceiptBook(path / "runs" / RUN.hex()[:16] / "receipts.bin", OPERATOR.public_key, RUN, node)
    for receipt in receipts:
        book.add(receipt)
    return path


@pytest.fixture
def auditor(tmp_path: Path) -> dict[str, tuple[object, ...]]:
    """What each auditor does with ``now``, the ledger shown today; all hold something from before."""
    now, before = tmp_path / "now.bin", saved(tmp_path / "before.bin", STORY)
    ann = told(tmp_path / "ann", ANN, [sign(receipt_of(8), OPERATOR)])
    mine = [sign(receipt_of(10, verdict=BAD), OPERATOR), sign(receipt_of(15), OPERATOR)]
    ben = told(tmp_path / "ben", BEN, mine)
    WitnessStore(ben / "runs" / RUN.hex()[:16] / "witness").keep(KEY, checkpoint_of(STORY, 10**9))
    cosigned = tmp_path / "cosigned"
    cosigned.write_bytes(checkpoint_of(STORY, 10**9).note)
    assert call("ledger", "import", before, tmp_path / "kept") == 0
    return {
        "alone": ("verify", now),
        "receipts ann": ("verify", now, "--receipts", ann),
        "receipts ben": ("verify", now, "--receipts", ben),
        "checkpoint": ("verify", now, "--checkpoint", ben),
        "cosigned": ("verify", now, "--checkpoint", cosigned),
        "old copy": ("diff", before, now),
        "import": ("import", now, tmp_path / "kept"),
    }


def shown(path: Path, entries: list[LedgerEntry]) -> None:
    head = TreeHead(run_id=RUN, size=len(entries), root=log_of(entries).root(), issued_at=LATER_MS)
    saved(path / "now.bin", entries, [sign(head, OPERATOR)])


@pytest.mark.parametrize("name", ATTACKS)
def test_an_operator_is_found_by_whoever_holds_what_the_documents_say(
    name: str, tmp_path: Path, auditor: dict[str, tuple[object, ...]]
) -> None:
    attack = ATTACKS[name]
    shown(tmp_path, attack.entries)
    for command in attack.found:
        assert call("ledger", *auditor[command]) == 1, command
    for command in attack.blind:
        assert call("ledger", *auditor[command]) == 0, command


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_node_that_saw_the_first_ledger_convicts_or_says_nothing(name: str, tmp_path: Path) -> None:
    attack = ATTACKS[name]
    log = log_of(attack.entries)

    async def fetch(tiles: Sequence[Tile]) -> dict[Tile, bytes]:
        await trio.lowlevel.checkpoint()
        larger = log if len(log) > len(STORY) else log_of(STORY)
        return {tile: hash_tile(larger, tile) for tile in tiles}

    witness = Witness(tmp_path, KEY, NODE, SIGNED_SPEC)
    line, alarms = await witness.hear(checkpoint_of(STORY, None).note, fetch, 1)
    assert (line is not None, alarms) == (True, [])
    line, alarms = await witness.hear(checkpoint_of(attack.entries, None).note, fetch, 2)
    assert line is None  # whatever it is, it is not cosigned
    assert witness.convicted == bool(alarms)
    assert witness.convicted == attack.witness
    if witness.evidence is not None:
        assert call("ledger", "evidence", witness.evidence) == 0


async def test_an_old_checkpoint_shown_again_is_old_news(tmp_path: Path) -> None:
    async def fetch(tiles: Sequence[Tile]) -> dict[Tile, bytes]:
        await trio.lowlevel.checkpoint()
        return {tile: hash_tile(log_of(STORY), tile) for tile in tiles}

    witness = Witness(tmp_path, KEY, NODE)
    for entries in (STORY[:9], STORY):
        assert (await witness.hear(checkpoint_of(entries, None).note, fetch, 1))[0] is not None
    assert await witness.hear(checkpoint_of(STORY[:9], None).note, fetch, 2) == (None, [])
    assert witness.last is not None
    assert witness.last.checkpoint == checkpoint_of(STORY).checkpoint


def test_what_was_submitted_and_never_judged_is_still_there(tmp_path: Path) -> None:
    """Silence is no entry: work that is never judged stays in the ledger without a verdict."""
    entries = [*STORY, lease(7, ANN, 1), submitted(7, ANN)]
    assert isinstance(entries[-1], Submitted)
    assert call("ledger", "verify", saved(tmp_path / "l.bin", entries)) == 0
