"""The run's card: what is in it comes from the run, and strangers' names stay text."""

from pathlib import Path

import pytest
import trio
from coordinator_history import published
from coordinator_support import make_run, opened

from barnraise.coordinator.amending import settings_in_force
from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.events import NodeJoined
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.operator_events import SettingsAmended
from barnraise.coordinator.run_card import card, facts_of, write_card
from barnraise.protocol.errors import RunFolderError

EVIL = "<script>|`x`](http://e)"


async def amended_run(tmp_path: Path) -> Path:
    """A run that one volunteer with an evil name joined, and that was amended."""
    folder = make_run(tmp_path)
    with opened(folder) as run:
        journal = Journal(run.journal_path)
        core = Core(journal, run.spec, run.run_id, run.identity, lambda: 1_790_000_000_000, in_place)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            await core.open()
            await core.record([published(core.state, core.now_ms())])
            change = SettingsAmended(
                number=1,
                changes={"grpo.learning_rate": "5e-07"},
                reason="KL | grew",
                amendment=b"a" * 32,
                signed=b"s",
                at_ms=core.now_ms(),
            )
            await core.record([NodeJoined(node=b"n" * 32, name=EVIL, at_ms=core.now_ms()), change])
            await core.sign_tree_head()
            nursery.cancel_scope.cancel()
        journal.close()
    return folder


async def test_a_run_is_reckoned_with_the_settings_in_force(tmp_path: Path) -> None:
    folder = await amended_run(tmp_path)
    signed = read_spec(folder)[0]
    in_force = settings_in_force(folder, signed)
    assert in_force.grpo.learning_rate == 5e-7 != signed.grpo.learning_rate


async def test_a_card_names_task_changes_credits_and_the_signed_head(tmp_path: Path) -> None:
    facts = facts_of(await amended_run(tmp_path))
    text = card(facts, 0)
    assert facts.head is not None
    assert facts.head.root.hex() in text
    assert facts.run_id in text
    assert "`grpo.learning_rate` = `5e-07` (KL \\| grew)" in text
    assert f"`{facts.spec.environment.name}`" in text
    assert text.startswith("---\nlibrary_name: transformers\n")


async def test_a_volunteers_name_is_text_and_breaks_no_table(tmp_path: Path) -> None:
    run_folder = await amended_run(tmp_path)
    target = tmp_path / "card"
    with pytest.raises(RunFolderError, match="the newest is"):
        write_card(run_folder, target, 99)
    assert not target.exists()
    text = write_card(run_folder, target, 0).read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if "script" in line)
    assert "<script>" not in text
    assert "](http" not in text.replace("\\](http", "")
    assert row.replace("\\|", "").count("|") == 5


def test_a_run_that_has_not_begun_has_a_card_too(tmp_path: Path) -> None:
    facts = facts_of(make_run(tmp_path))
    assert facts.head is None
    assert "Nothing was evaluated yet" in card(facts, 0)
