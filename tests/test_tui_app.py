"""The terminal application: every key of every screen, what strangers may write, life without a node."""

import asyncio
import fcntl
import inspect
import json
import time
from collections.abc import Iterator
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import pytest
from app_support import Stage, Watched, burst, drawn, frame, play, press, recorded, text, use_utc
from textual.binding import Binding
from textual.widgets import Input

from barnraise.node.supervise import lock_path
from barnraise.tui.app.app import NodeApp
from barnraise.tui.app.clean import cleaned
from barnraise.tui.app.consent import Consent
from barnraise.tui.app.dialogs import Ask, Confirm, PauseFor
from barnraise.tui.app.help import Help
from barnraise.tui.app.listing import Entry, Listing
from barnraise.tui.app.screen import TABS, NodeScreen
from barnraise.tui.app.sheet import Sheet, words


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    it = Stage()
    yield it
    it.close()


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    use_utc(monkeypatch)


def test_a_number_opens_its_screen(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        for number, name in reversed(list(enumerate(TABS, 1))):
            await press(app, pilot, str(number))
            assert app.current_mode == name
            assert app.screen.tab == name
            assert frame(app)[-1].endswith("q Quit")  # the footer fits 80 columns

    stage.play(story)


def test_tab_and_arrows_go_around_the_screens(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        seen = []
        for key in ("tab", "right", "tab", "tab", "right", "tab"):
            await press(app, pilot, key)
            seen.append(app.current_mode)
        assert seen == [*TABS[1:], TABS[0]]
        await press(app, pilot, "left")
        assert app.current_mode == TABS[-1]
        await press(app, pilot, "shift+tab")
        assert app.current_mode == TABS[-2]

    stage.play(story)


def test_pause_resume_and_finish_work_on_every_screen(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        for number in range(1, 7):
            await press(app, pilot, str(number), "p", "r", "f")
            assert app.sent == [("pause", {}), ("resume", {}), ("finish", {})]
            app.sent.clear()

    stage.play(story)


def test_leaving_asks_first_on_every_screen(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        for number, no in enumerate(("n", "escape", "q", "n", "escape", "q"), 1):
            await press(app, pilot, str(number), "l")
            assert isinstance(app.screen, Confirm)
            assert "Leave the run and end this node?" in text(app)
            await press(app, pilot, no)
            assert not isinstance(app.screen, Confirm)
            assert app.sent == []
        await press(app, pilot, "l", "y")
        assert app.sent == [("leave", {})]

    stage.play(story)


def test_a_pause_may_end_by_itself(stage: Stage) -> None:
    answers = {("f1",): 1800, ("f2",): 3600, ("f3",): 7200, ("f4",): 28_800, (*"1h30m", "enter"): 5400}

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        for keys, seconds in answers.items():
            await press(app, pilot, "P")
            assert isinstance(app.screen, PauseFor)
            await press(app, pilot, *keys)
            assert app.sent.pop() == ("pause", {"seconds": seconds})
            assert app.screen.tab == "overview"

    stage.play(story)


def test_a_time_that_is_none_is_explained_and_escape_changes_nothing(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "P", *"soon", "enter")
        assert "write it like 30m" in text(app)
        await press(app, pilot, "escape")
        assert app.sent == []

    stage.play(story)


def test_quitting_says_that_the_node_goes_on() -> None:
    for key in ("q", "ctrl+q", "ctrl+c"):
        app = Watched()

        async def story(app: Watched, pilot: Any, key: str = key) -> None:
            app.take_state(recorded())
            await press(app, pilot, key)

        play(story, app)
        assert app.sent == []
        assert app.return_value is not None
        assert app.return_value.startswith("the node goes on (generating, for 2h 44m now)")
        assert "barnraise leave" in app.return_value


def test_help_names_every_key_of_the_app_and_its_screens(stage: Stage) -> None:
    from barnraise.tui.app import help

    told = " ".join(f"{key} {about}" for pairs in (help.KEYS, help.SCREENS) for key, about in pairs)
    spelled = {
        "question_mark": "",
        "slash": "/",
        "ctrl+p": "^p",
        "ctrl+r": "^r",
        "ctrl+q": "^q",
        "ctrl+c": "",
    }
    for owner in (NodeApp, *(screen for screen in NodeApp.MODES.values())):
        for binding in owner.BINDINGS:
            assert isinstance(binding, Binding)
            if binding.key[0].isdigit() or "scroll" in binding.action or "neighbour" in binding.action:
                continue
            keys = [spelled.get(key, key) for key in binding.key.split(",")]
            assert any(key in told or key.capitalize() in told for key in keys), binding

    async def story(app: Watched, pilot: Any) -> None:
        for way_out in ("escape", "question_mark", "q", "enter"):
            await press(app, pilot, "question_mark")
            assert isinstance(app.screen, Help)
            await press(app, pilot, "down", "j", "pagedown", "up", "k", "pageup", way_out)
            assert not isinstance(app.screen, Help)

    stage.play(story)


def test_every_key_in_the_footer_explains_itself() -> None:
    for owner in (NodeApp, *NodeApp.MODES.values(), Ask, PauseFor, Confirm, Consent, Help):
        for binding in owner.BINDINGS:
            assert isinstance(binding, Binding)
            if binding.show:
                assert binding.tooltip, (owner, binding)


def test_the_palette_finds_commands_by_name(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "ctrl+p")
        await press(app, pilot, *"pause for 2h")
        for _ in range(100):
            await pilot.pause(0.05)
            if "Pause for 2h" in text(app):
                break
        await press(app, pilot, "enter")
        for _ in range(100):
            await pilot.pause(0.05)
            if app.sent:
                break
        assert app.sent == [("pause", {"seconds": 7200})]

    stage.play(story)


def test_every_command_of_the_palette_can_be_called(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        for command in list(app.get_system_commands(app.screen)):
            if command.title == "Quit":
                continue
            command.callback()
            await drawn(app)
            if not isinstance(app.screen, NodeScreen):
                await press(app, pilot, "escape")
        assert [name for name, _ in app.sent] == ["pause"] * 5 + ["resume", "finish"]

    stage.play(story)


def test_t_changes_between_dark_and_light(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        assert app.current_theme.dark
        await press(app, pilot, "t")
        assert not app.current_theme.dark
        await press(app, pilot, "t")
        assert app.current_theme.dark

    stage.play(story)
    assert not Watched(light=True).current_theme.dark


# --- the lists


def test_work_lists_verdicts_from_the_receipts_and_the_cursor_shows_one_in_full() -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        await press(app, pilot, "2")
        listing = app.screen.query_one(Listing)
        assert len(listing.entries) == 61
        assert listing.current == "802"
        await press(app, pilot, "down", "j")
        assert listing.current == "779"
        assert "accepted, every check passed: +609 Mflop" in text(app)
        await press(app, pilot, "end")
        assert listing.at_end
        await press(app, pilot, "home", "pagedown", "pageup", "up", "k", "g", "G")
        assert listing.at_end
        await press(app, pilot, "x")
        assert "nothing was rejected" in text(app)
        await press(app, pilot, "x")
        assert len(listing.entries) == 61

    play(story, Watched())


def test_only_a_rejection_can_be_appealed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        await press(app, pilot, "2", "a")
        assert app.sent == []
        assert "only a rejected submission" in app.said[-1]
        last = app.book.verdicts[-1]
        app.book = replace(
            app.book,
            verdicts=(
                *app.book.verdicts[:-1],
                replace(last, outcome="rejected", text="rejected by check toploc"),
            ),
        )
        app.draw()
        await press(app, pilot, "x", "a")
        assert app.sent == [("appeal", {"receipt": "#802"})]

    play(story, Watched())


def test_the_ledger_shows_the_balance_and_that_every_signature_was_checked(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "4")
        shown = text(app)
        assert "37.4 Gflop" in shown
        assert "all 61 signatures hold, by the run's key e91c f058 86c1 61ca" in shown
        await press(app, pilot, "c")
        assert app.said == ["checked 61 of 61 signatures"]

    stage.play(story)


def test_swarm_shows_peers_and_moves(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "3", "down")
        shown = text(app)
        assert "12D3KooWNAUnwcNxQwiTcXNFanWaZrruFuh6XqJuEpdrTnhxy7v6" in shown  # the one at the cursor
        assert "coordinator  direct        parent" in shown
        assert "16/16 shards" in shown

    stage.play(story)


def test_a_limit_is_changed_in_place(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "5", "enter")
        assert isinstance(app.screen, Ask)
        await press(app, pilot, *"fast", "enter")
        assert "is no rate" in text(app)
        await press(app, pilot, *["backspace"] * 4, *"20MB/s", "enter")
        await press(app, pilot, "down", "o")
        while app.screen.query_one(Listing).current != "when":
            await press(app, pilot, "down")
        await press(app, pilot, "e")
        await press(app, pilot, "down", "o")
        assert app.sent == [
            ("limits", {"down": 20_000_000}),
            ("limits", {"up": None}),
            ("limits", {"when": "idle"}),
        ]
        assert "there is always a limit" in app.said[-1]

    stage.play(story)


def test_a_limit_is_changed_for_a_while_and_that_is_ended(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "5", "home", "u")
        assert "download for a while" in text(app)
        await press(app, pilot, *"1MB/s", "enter")
        assert "say for how long" in text(app)
        await press(app, pilot, *" for 2h", "enter")
        until = round((app.clock() + 7200) * 1000)
        assert app.sent == [("limits", {"down": 1_000_000, "until_ms": until})]
        await press(app, pilot, "U")
        assert app.said == ["nothing holds for a while only: u changes a limit for a time"]
        limits = recorded()["limits"] | {"until_ms": until, "for_now": ["down"]}
        app.take_state(recorded() | {"limits": limits})
        await drawn(app)
        assert "until Wed 06:08 only; most that is" in text(app)
        await press(app, pilot, "U")
        assert app.sent[1:] == [("limits", {"until_ms": None})]

    stage.play(story)


def test_keys_that_come_at_once_go_where_they_were_meant_to_go(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "5", "home")
        await burst(app, "down", "down", "down", "enter", *"off")
        assert isinstance(app.screen, Ask)
        assert app.screen.query_one(Input).value == "off"
        assert app.sent == []
        await burst(app, "escape", "P", *"2h", "enter", "l", "y", "1", "P", "f1")
        assert app.sent == [("pause", {"seconds": 7200}), ("leave", {}), ("pause", {"seconds": 1800})]
        assert app.current_mode == "overview"

    stage.play(story)


def test_limits_of_a_node_that_ended_are_its_last_and_promise_no_work(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded() | {"mode": "finish"})
        await press(app, pilot, "5")
        assert "finishing: r takes it back" in text(app)
        app.take_loss("the daemon has ended", app.clock() + 1)
        await drawn(app)
        assert "none: the node has ended. These were its limits." in text(app)
        assert "takes it back" not in text(app)

    stage.play(story)


def test_an_entry_is_looked_up_in_the_log_and_a_contradiction_is_loud(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "4", "home", "down", "down", "v")
        assert app.sent == [("prove", {"index": 779})]
        assert "790 entries, cosigned 38s ago, root 5b1f0c7e; 0 of your 59 found in" in text(app)
        assert [line.split()[-1] for line in entries(app)[:4]] == ["newer", "newer", "signed", "signed"]
        app.take_proof({"ok": True, "proven": [779, 757], "wrong": []})
        await drawn(app)
        assert entries(app)[2].endswith("in log")
        assert "2 of your 59" in text(app)
        app.take_proof({"ok": False, "proven": [], "wrong": [[757, "the log says otherwise: \x1b[2Jcredit"]]})
        await drawn(app)
        assert entries(app)[3].endswith("WRONG")
        assert "#757: the log says otherwise" in text(app)
        assert_harmless(app)

    stage.play(story)


def entries(app: NodeApp) -> list[str]:
    return [line.rstrip(" ▃▁") for line in frame(app) if line.lstrip().startswith("#")]


def test_an_alarm_of_the_ledger_is_on_every_screen(stage: Stage) -> None:
    witness = recorded()["witness"] | {"alarm": "SPLIT VIEW: the operator signed two ledgers"}

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded() | {"witness": witness})
        for number in range(1, 7):
            await press(app, pilot, str(number))
            assert "Ledger alarm: SPLIT VIEW: the operator signed two ledgers" in text(app)
        app.take_loss("the daemon has ended", app.clock() + 1)
        await drawn(app)
        assert "SPLIT VIEW" in text(app)

    stage.play(story)


def test_the_theme_is_remembered_and_what_is_asked_for_is_not(tmp_path: Path) -> None:
    settings = tmp_path / "config" / "app.json"

    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "t")

    play(story, Watched(settings=settings))
    assert not Watched(settings=settings).current_theme.dark
    assert Watched(settings=settings, light=False).current_theme.dark
    assert not Watched(settings=settings).current_theme.dark
    for rubbish in (b"", b"[" * 5000, b"[]", b'{"theme": 3}', b"\xff"):
        settings.write_bytes(rubbish)
        assert Watched(settings=settings).current_theme.dark


def test_limits_of_a_node_that_knows_fewer_are_fewer(stage: Stage) -> None:
    state = recorded()
    state["limits"] = {"up": None, "down": 1e6, "monthly": None, "monthly_used": 5, "spent_until_ms": None}

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(state)
        await press(app, pilot, "5")
        assert [entry.key for entry in app.screen.query_one(Listing).entries] == ["down", "up", "monthly"]

    stage.play(story)


def test_the_log_is_followed_searched_and_filtered() -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        await press(app, pilot, "6")
        listing = app.screen.query_one(Listing)
        assert listing.at_end
        last = listing.current
        await press(app, pilot, "slash", *"published", "enter")
        assert "version 38 was published" in text(app)
        assert listing.current != last
        first = listing.current
        await press(app, pilot, "N")
        assert listing.current != first
        await press(app, pilot, "n")
        assert listing.current == first
        count = len(listing.entries)
        await press(app, pilot, "o")
        assert 0 < len(listing.entries) < count
        await press(app, pilot, "o", "escape")
        assert len(listing.entries) == count
        await press(app, pilot, "space")
        assert listing.at_end
        await press(app, pilot, "w")
        assert len(listing.entries) == 1  # an error of the network's
        await press(app, pilot, "w", "slash", *"nowhere", "enter", "o")
        assert "no such line" in text(app)
        await press(app, pilot, "escape")
        await press(app, pilot, "w", "end")
        assert len(listing.entries) == count
        await press(app, pilot, "slash", "escape")
        assert app.focused is listing

    play(story, Watched())


def test_a_log_that_grows_is_followed_and_one_that_is_read_stands_still(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("".join(f"2026-12-02 04:00:{i:02d},000 INFO barnraise.node line {i}\n" for i in range(40)))

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        await press(app, pilot, "6")
        listing = app.screen.query_one(Listing)
        with log.open("a") as file:
            file.write("2026-12-02 04:01:00,000 ERROR barnraise.node it broke\nTraceback\n")
        app.draw()
        await drawn(app)
        assert listing.current == "41"
        await press(app, pilot, "up", "up")
        with log.open("a") as file:
            file.write("2026-12-02 04:01:01,000 INFO barnraise.node on\n")
        app.draw()
        await drawn(app)
        assert listing.current == "39"
        await press(app, pilot, "w", "w", "space")
        assert [entry.key for entry in listing.entries] == ["40", "41"]

    play(story, Watched(tmp_path))


def test_what_is_read_stays_in_its_line_while_a_list_changes(stage: Stage) -> None:
    def listed(numbers: range) -> list[Entry]:
        return [Entry(str(n), (words(f"e{n}"), *[words("")] * 6)) for n in numbers]

    async def story(app: Watched, pilot: Any) -> None:
        await press(app, pilot, "4", "home")
        listing = app.screen.query_one(Listing)

        async def lists(numbers: range) -> list[str]:
            listing.show(listed(numbers))
            await drawn(app)
            return [line.split()[0] for line in frame(app)[-12:-1] if line.lstrip().startswith("e")]

        assert (await lists(range(50, 0, -1)))[:2] == ["e50", "e49"]
        assert (await lists(range(53, 0, -1)))[:2] == ["e53", "e52"]  # on the first: the newest is seen
        assert listing.current == "53"
        await press(app, pilot, *["down"] * 20)
        before = [line.split()[0] for line in frame(app)[-12:-1] if line.lstrip().startswith("e")]
        assert listing.current == "33"
        assert "e33" in before
        assert await lists(range(60, 0, -1)) == before  # more at the beginning
        assert await lists(range(58, 0, -1)) == before  # fewer
        assert listing.current == "33"

    stage.play(story)


# --- consent


def asked() -> dict[str, Any]:
    return {
        "run_id": "ab" * 32,
        "fields": [["run", "reverse [bold red]x[/]"], ["operator", "e91c f058"], ["disk", "about 3.1 GB"]],
    }


@pytest.mark.parametrize(("key", "command"), [("y", "agree"), ("n", "decline")], ids=["yes", "no"])
def test_a_run_is_described_before_it_is_joined(stage: Stage, key: str, command: str) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        state = recorded() | {"consent": asked()}
        app.take_state(state)
        await drawn(app)
        assert isinstance(app.screen, Consent)
        assert "reverse [bold red]x[/]" in text(app)
        assert "about 3.1 GB" in text(app)
        await press(app, pilot, "down", "up", key)
        assert app.sent == [(command, {"run_id": "ab" * 32})]
        app.take_state(state)  # the daemon has not seen the answer yet
        await drawn(app)
        assert not isinstance(app.screen, Consent)

    stage.play(story)


def test_consent_given_elsewhere_closes_the_question_and_q_leaves_it_open() -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded() | {"consent": asked()})
        await drawn(app)
        app.take_state(recorded() | {"consent": None})
        await drawn(app)
        assert not isinstance(app.screen, Consent)
        app.take_state(recorded() | {"consent": asked()})
        await drawn(app)
        assert isinstance(app.screen, Consent)
        await press(app, pilot, "q")

    app = Watched()
    play(story, app)
    assert app.sent == []
    assert (app.return_value or "").startswith("the node goes on")


# --- without a node


def test_a_node_that_never_ran_says_how_to_start_it(tmp_path: Path) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_loss("no process serves x", app.clock() + 4)
        for number in range(1, 7):
            await press(app, pilot, str(number))
            shown = " ".join(text(app).split())
            assert "No node is running here." in shown
            assert "barnraise join MULTIADDR --data" in shown
            assert "Looking again in 4s" in shown
        await press(app, pilot, "ctrl+r")

    play(story, Watched(tmp_path), size=(100, 24))


def test_a_node_that_ended_leaves_its_last_picture_and_comes_back(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        app.take_loss("the daemon has ended", app.clock() + 1)
        await drawn(app)
        shown = text(app)
        assert "The node has ended. This is what was last seen of it, at 04:08:29" in shown
        assert "37.4 Gflop" in shown
        assert "no node" in frame(app)[0]
        app.take_state(recorded())
        await drawn(app)
        assert "The node has ended" not in text(app)

    stage.play(story)


def test_a_node_that_was_not_found_is_not_said_to_go_on() -> None:
    app = Watched()

    async def story(app: Watched, pilot: Any) -> None:
        app.take_loss("nobody there", app.clock() + 1)
        await press(app, pilot, "q")

    play(story, app)
    assert app.return_value == "no node is running here"


def test_without_a_node_nothing_is_said_of_its_credit(tmp_path: Path) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_loss("no process serves x", app.clock() + 4)
        await drawn(app)
        shown = " ".join(text(app).split())
        assert "No node is running here. No process serves x." in shown
        assert "0 Mflop" not in shown
        assert "not known while no node runs" in shown

    play(story, Watched(tmp_path), size=(100, 24))


def test_a_node_that_crashed_is_said_to_start_again(tmp_path: Path) -> None:
    app = Watched(tmp_path)

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        app.take_loss("the daemon has ended", app.clock() + 1)
        await drawn(app)
        shown = " ".join(text(app).split())
        assert "The node crashed: killed; it starts again in" in shown
        assert "barnraise join" not in shown
        await press(app, pilot, "q")

    with lock_path(tmp_path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        until = round((time.time() + 60) * 1000)
        file.write(
            json.dumps({"pid": 1, "crashes": 1, "text": "the node crashed: killed", "until_ms": until})
        )
        file.flush()
        play(story, app, size=(100, 24))
    assert (app.return_value or "").startswith("the node crashed: killed; it starts again in")


def test_a_suspension_shows_its_reason_and_cure_on_every_screen(stage: Stage) -> None:
    state = recorded() | {
        "state": "paused",
        "suspended": [{"reason": "on battery", "cure": "plug it in", "until_ms": None}],
    }

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(state)
        for number in range(1, 7):
            await press(app, pilot, str(number))
            assert "Suspended: on battery; plug it in" in text(app)

    stage.play(story)


def test_another_node_with_the_same_key_is_announced_everywhere(stage: Stage) -> None:  # R9
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded() | {"duplicate_key": True})
        await drawn(app)
        assert "Another node uses the same key" in text(app)

    stage.play(story)


# --- strangers


HOSTILE = (
    "[bold red]x[/]",
    "[/]",
    "[@click=app.detach]click[/]",
    "[link=file:///etc/passwd]y",
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "a\u202egnp.exe",
    "line\r\nline",
    "\u200b\u200d\ufeff",
    "$text-error",
    "{name}",
    "\\[",
    "漢字" * 40,
    "e\u0301" * 30,
    "👩‍👩‍👧‍👦" * 10,
    "\ud800",
    "x" * 100_000,
)


def poisoned(value: Any, poisons: Iterator[str]) -> Any:
    """``value`` with each of its strings replaced by the next poison."""
    if isinstance(value, dict):
        return {key: poisoned(item, poisons) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, poisons) for item in value]
    return next(poisons) if isinstance(value, str) else value


@pytest.mark.parametrize("first", [0, 3, 7, 12])
def test_no_text_from_outside_is_markup_or_moves_the_cursor(stage: Stage, first: int) -> None:
    plain = [poison for poison in HOSTILE if poison.isascii() and poison.isprintable() and len(poison) < 30]

    async def story(app: Watched, pilot: Any) -> None:
        state = poisoned(recorded(), cycle([*HOSTILE[first:], *HOSTILE[:first]])) | {
            "name": plain[first % len(plain)],
            "consent": {"run_id": HOSTILE[first], "fields": [[poison, poison] for poison in HOSTILE]},
            "suspended": [{"reason": HOSTILE[first], "cure": HOSTILE[first + 1], "until_ms": None}],
        }
        app.take_state(cleaned(state))
        await drawn(app)
        assert isinstance(app.screen, Consent)
        assert all(poison in text(app) for poison in plain[:4])
        assert_harmless(app)
        await press(app, pilot, *["down"] * 30)
        assert_harmless(app)
        await press(app, pilot, "n")
        for number in (2, 3, 4, 5, 1):
            await press(app, pilot, str(number))
            assert_harmless(app)
        assert plain[first % len(plain)][:12] in frame(app)[0]
        for poison in HOSTILE[first::3]:
            app.say(poison)
        await drawn(app)
        assert_harmless(app)

    stage.play(story)


def assert_harmless(app: NodeApp) -> None:
    for line in frame(app):
        assert line.isprintable(), ascii(line)
    for strip in app.screen._compositor.render_strips():
        assert strip.cell_length == app.size.width
        for segment in strip:
            meta = segment.style.meta if segment.style else {}
            assert not any(name.startswith("@") and "detach" in str(action) for name, action in meta.items())
            assert segment.style is None or segment.style.link is None


def test_the_log_holds_no_markup_either(tmp_path: Path) -> None:
    lines = [
        f"2026-12-02 04:00:00,000 INFO barnraise.node {poison}" for poison in HOSTILE if poison != "\ud800"
    ]
    (tmp_path / "node.log").write_text("\n".join(lines) + "\n", encoding="utf-8")

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        await press(app, pilot, "6")
        for _ in range(len(HOSTILE)):
            assert_harmless(app)
            await press(app, pilot, "up")
        assert "[bold red]x[/]" in text(app)

    play(story, Watched(tmp_path))


# --- poor terminals


def test_ascii_is_all_that_a_poor_terminal_gets() -> None:
    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(poisoned(recorded(), repeat("Ålesund 漢 ▇")))
        for number in range(1, 7):
            await press(app, pilot, str(number))
            assert text(app).isascii()
        for keys in (("l",), ("n", "question_mark"), ("escape", "P"), ("escape", "ctrl+p")):
            await press(app, pilot, *keys)
            assert text(app).isascii()
        for strip in app.screen._compositor.render_strips():
            assert strip.cell_length == 80

    play(story, Watched(ascii=True))


def test_no_color_means_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        for key in "123456":
            await press(app, pilot, key)
            for strip in app.screen._compositor.render_strips():
                for segment in strip:
                    style = segment.style
                    for color in (style.color, style.bgcolor) if style else ():
                        assert color is None or color.is_default, (key, segment)
        cursor = [
            strip
            for strip in app.screen._compositor.render_strips()
            for s in strip
            if s.style and s.style.reverse
        ]
        assert cursor  # the cursor is seen all the same

    play(story, Watched())


def test_any_size_is_drawn_also_one_that_changes(stage: Stage) -> None:
    async def story(app: Watched, pilot: Any) -> None:
        for size in ((200, 60), (20, 5), (40, 10), (80, 24)):
            await pilot.resize_terminal(*size)
            for key in "123456":
                await press(app, pilot, key, "down")
                assert_harmless(app)
                assert len(frame(app)) == size[1]

    stage.play(story)


def test_what_did_not_change_is_not_drawn_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    painted: list[str] = []
    render_line = Sheet.render_line

    def counted(self: Sheet, y: int) -> Any:
        painted.append(self.id or "")
        return render_line(self, y)

    async def story(app: Watched, pilot: Any) -> None:
        app.take_state(recorded())
        await drawn(app)
        monkeypatch.setattr(Sheet, "render_line", counted)
        for _ in range(20):
            app.take_state(recorded())
            await drawn(app)
        assert painted == []
        app.take_state(recorded() | {"credit": 40_000})
        await drawn(app)
        assert painted == ["earned"]

    stage.play(story)


def test_every_action_that_a_key_names_exists() -> None:
    for owner in (NodeApp, *NodeApp.MODES.values(), Ask, PauseFor, Confirm, Consent, Help, Listing):
        for binding in owner.BINDINGS:
            name = binding.action.partition("(")[0]
            holder = NodeApp if name.startswith("app.") else owner
            action = getattr(holder, f"action_{name.removeprefix('app.')}", None)
            assert callable(action) or inspect.iscoroutinefunction(action), binding


def test_the_app_ends_at_once_although_a_command_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        app = NodeApp(tmp_path, ascii=False)
        async with app.run_test() as pilot:
            app.order("pause")
            await press(app, pilot, "q")

    asyncio.run(asyncio.wait_for(run(), 60))
