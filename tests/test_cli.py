"""The command line: help with examples, one clear line per error, exit codes, tables for people."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from barnraise.protocol.errors import StorageError
from barnraise.protocol.identity import Identity, load_identity, peer_id_of, save_identity
from barnraise.tui import demo, demo_view, ledger
from barnraise.tui import main as command_line
from barnraise.tui.console import duration, size
from barnraise.tui.demo import Interrupted
from barnraise.tui.demo_report import report, summary_lines
from barnraise.tui.status import overview

PEER = peer_id_of(bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"))


def call(*arguments: object) -> int:
    return command_line.main([str(argument) for argument in arguments])


def commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = [(path, command)]
    for name, child in getattr(command, "commands", {}).items():
        found += commands(child, (*path, name))
    return found


EVERY = commands(typer.main.get_command(command_line.app))


@pytest.mark.parametrize("path", [path for path, _ in EVERY], ids=" ".join)
def test_every_help_has_an_example_that_can_be_copied(path, capsys):
    assert call(*path, "--help") == 0
    shown = capsys.readouterr().out
    _, _, examples = shown.partition("\n  Example")
    assert f"    barnraise {' '.join(path)}".rstrip() in examples


@pytest.mark.parametrize(
    "path", [path for path, command in EVERY if hasattr(command, "commands")], ids=" ".join
)
def test_no_list_of_commands_cuts_what_one_is_for(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert call(*path, "--help") == 0
    listed = capsys.readouterr().out.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) > 1
    for line in listed:  # one each: none wraps, and none ends in dots
        assert re.fullmatch(r"  [a-z-]+  .*[\w)']\.", line), line
        assert len(line) < 80


@pytest.mark.parametrize(("path", "command"), EVERY)
def test_every_option_explains_itself(path, command):
    for parameter in command.params:
        assert getattr(parameter, "help", None), (path, parameter.name)


def test_every_example_in_a_help_is_a_command_that_exists(capsys):
    known = {path for path, _ in EVERY}
    for path, _ in EVERY:
        call(*path, "--help")
        for line in capsys.readouterr().out.partition("\n  Example")[2].splitlines():
            words = line.split()
            if words[:1] == ["barnraise"] and words[1:2] != ["COMMAND"]:
                assert tuple(words[1:3]) in known or tuple(words[1:2]) in known, line


@pytest.mark.parametrize("path", [(), ("run",), ("ledger",), ("key",), ("coordinator",)], ids=" ".join)
def test_a_bare_group_shows_its_help_and_counts_as_bad_use(path, capsys):
    assert call(*path) == 2
    assert "\nCommands:\n" in capsys.readouterr().err


BAD = [
    ("nonsense",),
    ("ledger", "nonsense"),
    ("--nonsense",),
    ("demo", "--nodes", -1),
    ("demo", "--minutes", -3),
    ("demo", "--minutes", "nan"),
    ("demo", "--model", "gpt"),
    ("demo", "--keep", "FILE"),
    ("demo", "--keep", "FULL"),
    ("demo", "--keep", "FILE/below"),
    ("join",),
    ("join", "hello"),
    ("join", "/ip4/127.0.0.1/tcp/1"),
    ("join", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWshort"),
    ("join", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", "--data", "FILE", "--key", "NOWHERE"),
    ("join", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", "--threads", 0),
    ("join", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", "--listen", "x", "--data", "EMPTY/d", "--key", "EMPTY/k"),
    ("status", "NOWHERE"),
    ("status", "FILE"),
    ("status", "EMPTY"),
    ("coordinator", "run", "NOWHERE"),
    ("coordinator", "run", "EMPTY"),
    ("ledger", "show", "NOWHERE"),
    ("ledger", "show", "EMPTY"),
    ("ledger", "show", "FILE"),
    ("ledger", "show", "FILE", "--limit", -1),
    ("ledger", "verify", "NOWHERE"),
    ("ledger", "export", "EMPTY", "EMPTY/ledger.bin"),
    ("ledger", "export", "EMPTY", "NOWHERE/ledger.bin"),
    ("key", "show", "--key", "NOWHERE"),
    ("key", "export", "--key", "NOWHERE"),
    ("key", "import", "NOWHERE"),
    ("run", "init", "FULL"),
    ("run", "init", "FILE"),
    ("run", "init", "FILE/below"),
    ("run", "init", "NOWHERE", "--versions", 0),
    ("run", "init", "NOWHERE", "--versions", 65_537),
    ("run", "init", "NOWHERE", "--name", "ev\x1b[31mil"),
    ("run", "init", "NOWHERE", "--name", "n" * 65),
    ("run", "init", "NOWHERE", "--description", "two\nlines"),
    ("run", "init", "NOWHERE", "--description", "d" * 501),
    ("run", "init", "NOWHERE", "--environment", "no_such_task"),
    ("run", "init", "NOWHERE", "--environment-settings", "{bad"),
    ("run", "init", "NOWHERE", "--environment-settings", "[1]"),
    ("run", "init", "NOWHERE", "--model", "EMPTY"),
    ("run", "init", "NOWHERE", "--model", "FILE"),
]


@pytest.mark.parametrize("arguments", BAD, ids=lambda words: " ".join(map(str, words))[:60])
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(arguments, tmp_path, capsys):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "thing").write_text("x")
    (tmp_path / "FILE").write_text("no ledger, no key, no folder\n")
    places = ("EMPTY", "FULL", "FILE", "NOWHERE")
    given = [
        tmp_path / word if isinstance(word, str) and word.startswith(places) else word for word in arguments
    ]
    assert call(*given) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("barnraise: ")
    assert complaint.count("\n") == 1
    assert "Traceback" not in complaint
    assert not (tmp_path / "NOWHERE").exists()


@pytest.mark.parametrize("bad", ["\udcff", "\x1b[2J", "\0", "\n", "\x9b"], ids=ascii)
def test_no_text_on_a_command_line_may_be_bytes_or_move_the_cursor(bad, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, command in EVERY:
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert call(*path, parameter.opts[0], "a" + bad) == 2
                error = capsys.readouterr().err
                assert error.count("\n") == 1, error
                assert parameter.opts[0] in error
                assert call(*path, f"{parameter.opts[0]}=a{bad}") == 2
                assert capsys.readouterr().err.rstrip("\n").isprintable()
        assert call(*path, "a" + bad) == 2
        assert capsys.readouterr().err.rstrip("\n").isprintable()
    assert list(tmp_path.iterdir()) == []


@given(st.text())
def test_what_is_printable_may_be_typed(text):
    assert bool(command_line.unreadable(["x", text])) == any(
        "\ud800" <= char <= "\udfff" or char < " " or "\x7f" <= char < "\xa0" for char in text
    )


def test_a_presets_name_wins_over_a_folder_of_that_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # such as the one that `barnraise demo --keep ./demo` makes
    assert call("run", "init", "run", "--model", "demo", "--environment", "no_such_task") == 2
    assert "no_such_task" in capsys.readouterr().err
    assert call("run", "init", "run", "--model", "./demo", "--environment", "no_such_task") == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (StorageError("the disk is full"), 1), (OSError(28, "full"), 1)],
)
def test_what_goes_wrong_in_a_command_is_one_line_too(error, code, monkeypatch, capsys):
    def fail(_path):
        raise error

    monkeypatch.setattr("barnraise.tui.keys.load_identity", fail)
    assert call("key", "show") == code
    assert capsys.readouterr().err.count("\n") == 1


def test_a_key_goes_to_another_machine_and_back(tmp_path, capsys):
    identity = Identity.generate()
    save_identity(identity, tmp_path / "node.key")
    assert call("key", "show", "--key", tmp_path / "node.key", "--json") == 0
    assert json.loads(capsys.readouterr().out)["peer_id"] == identity.peer_id
    assert call("key", "export", "--key", tmp_path / "node.key", "--to", tmp_path / "backup.pem") == 0
    assert call("key", "import", tmp_path / "backup.pem", "--key", tmp_path / "other.key") == 0
    assert load_identity(tmp_path / "other.key").peer_id == identity.peer_id
    assert call("key", "import", tmp_path / "backup.pem", "--key", tmp_path / "other.key") == 2


def test_doctor_in_a_pipe_is_one_line_per_finding(tmp_path, capsys, monkeypatch):
    from barnraise.node.findings import Finding

    found = [
        Finding("memory", "ok", "plenty " * 20),
        Finding("disk", "problem", "[full]", "delete something"),
    ]

    async def examine(*places, **options):
        for finding in found:
            yield finding

    monkeypatch.setattr("barnraise.node.doctor.examine", examine)
    assert call("doctor", "--data", tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1] == "PROBLEM  disk       [full] -> delete something"
    assert call("doctor", "--data", tmp_path, "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_ledger_lines_name_who_and_what():
    key = Identity.generate().public_key
    peer = peer_id_of(key)
    common = {"index": 7, "at": "2026-01-02T03:04:05.678+00:00", "node": peer, "lease_id": "ab" * 16}
    judged = {**common, "entry": "Judged", "accepted": True, "check": "all", "credit": 1234}
    line = ledger.line(judged, {peer: "anna"})
    assert (
        line == f"     7  2026-01-02 03:04:05  accepted     anna ..{peer[-8:]}, lease abababab, +1,234 Mflop"
    )
    rejected = ledger.line({**judged, "accepted": False, "check": "toploc"}, {})
    assert "REJECTED" in rejected
    assert "check toploc" in rejected


COORDINATOR: dict[str, Any] = {
    "kind": "coordinator",
    "run": "r",
    "run_id": "ab" * 32,
    "state": "collecting",
    "reason": "9 of 16 usable groups verified",
    "policy_version": 3,
    "target_version": 40,
    "rewards": [[1, 0.1], [3, 0.5]],
    "accuracy": [[0, 0.1], [3, 0.25]],
    "accepted": 12345,
    "rejected": 1,
    "rejections": {"toploc": 1},
    "groups_usable": 9,
    "groups_wanted": 16,
    "bytes_in": 5e6,
    "bytes_out": 9.9e8,
    "addresses": [f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"],
    "started_ms": 1,
    "nodes_live": 1,
    "nodes_known": 1,
    "nodes": [{"name": "anna", "peer_id": PEER, "state": "generating", "have_version": 3, "credit": 5}],
}
NODE: dict[str, Any] = {
    "kind": "node",
    "name": "anna",
    "peer_id": PEER,
    "state": "waiting",
    "policy_version": 3,
    "accepted": 4,
    "reason": "waiting for work: the verdict on this key's last submission comes first",
    "bytes_in": 1,
    "unit": None,
    "until_ms": 5000,
    "then": "asks again",
    "since_ms": 1000,
    "last_verdict": None,
}


def test_status_says_what_a_person_wants_to_know():
    rows = dict(overview(COORDINATOR, time.time()))
    assert rows["state"] == "collecting: 9 of 16 usable groups verified"
    assert rows["submissions"] == "12,345 accepted, 1 rejected (toploc 1)"
    assert rows["join with"].startswith("barnraise join /ip4/")
    assert "version 3" in rows[f"  anna ..{PEER[-8:]}"]
    rows = dict(overview(NODE, 2.0))
    assert rows["state"].endswith("comes first (for 1s, asks again in 3s)")
    assert overview({}, 0.0)
    assert overview({"kind": "coordinator"}, 0.0)


def test_status_says_that_new_keys_are_turned_away():
    newcomers = {"per_day": 64, "let_in": 70, "refused": 900, "turned_away_1h": 130}
    rows = dict(overview({**COORDINATOR, "newcomers": newcomers}, time.time()))
    assert rows["new keys"].startswith("130 turned away within the last hour: more than 64 a day")
    calm = dict(overview({**COORDINATOR, "newcomers": {**newcomers, "turned_away_1h": 0}}, time.time()))
    assert "new keys" not in calm


def test_the_live_panel_fits_80_columns_and_garbles_nothing():
    console = Console(width=80, height=24, force_terminal=False, no_color=True)
    busy = {**NODE, "state": "generating", "unit": {"completions": 24, "of": 64}}
    view = demo_view.panel(COORDINATOR, {"node-1": busy, "node-2": NODE, "node-3": None}, 65, 360, [])
    with console.capture() as captured:
        console.print(view)
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for words in ("collecting 9/16", "generating 24/64", "waiting for work", "starting", "990.0 MB", "3/40"):
        assert words in shown
    assert "generating 24/64" in demo_view.plain_line(COORDINATOR, {"node-1": busy}, 65)


def test_the_panel_copes_with_processes_that_are_not_up():
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(demo_view.panel(None, {"node-1": None}, 0, 360, []))
    assert captured.get().count("starting") == 2
    assert "coordinator starting" in demo_view.plain_line(None, {"node-1": None}, 0)


def test_the_demos_json_has_what_scripts_read(tmp_path: Path):
    result = report(tmp_path, {**COORDINATOR, "complete": True}, "demo", 1, 2, 99.94, 20.0, {"node-1": 10**9})
    expected = {
        "reward_before": 0.1,
        "reward_after": 0.25,
        "versions": 3,
        "accepted": 12345,
        "rejected": 1,
        "seconds": 99.9,
        "nodes": 2,
        "seed": 1,
        "ledger_ok": False,
        "complete": True,
    }
    assert expected.items() <= json.loads(json.dumps(result)).items()
    assert (tmp_path / "rewards.png").is_file()
    assert (tmp_path / "rewards.svg").is_file()
    lines = summary_lines(result, None)
    assert any(line.startswith("ledger           WRONG") for line in lines)
    assert any("--keep" in line for line in lines)
    assert any(f"ledger show {tmp_path}" in line for line in summary_lines(result, tmp_path))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (999_960, "1.0 MB"), (4_200_000, "4.2 MB")]
)
def test_sizes_for_people(count, text):
    assert size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(47, "47s"), (185, "3m 05s"), (7800, "2h 10m")])
def test_durations_for_people(seconds, text):
    assert duration(seconds) == text


MEASURED = [
    {"stage": "scaffold", "loss": 1.5, "perplexity": 4.482},
    {"stage": "round", "version": 1, "block_losses": [1.49, 1.48]},
    {"stage": "adaptation", "cold_perplexity": 4.4, "adapted_perplexity": 4.2},
]
PRETRAINING = {
    "stage": "blocks round 2 of 2",
    "pretrain": {
        "share": 0.0,
        "blocks": [{"accepted": 1, "contributors": 2}, {"accepted": 0, "contributors": 2}],
        "measured": MEASURED,
    },
}


def test_the_panel_shows_the_stages_of_pretraining():
    console = Console(width=80, height=30, force_terminal=False, no_color=True)
    node = {**NODE, "state": "training", "unit": {"kind": "block", "block": 1, "step": 24, "steps": 60}}
    with console.capture() as captured:
        console.print(demo_view.panel({**COORDINATOR, **PRETRAINING}, {"node-1": node}, 65, 360, []))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 80
    for words in (
        "blocks 1/4",
        "block 1, 24/60",
        "round 2 of 2: 1+0 of 2+2 units",
        "4.400 cold, 4.200 adapted",
    ):
        assert words in shown
    assert "blocks round 2 of 2" in demo_view.plain_line({**COORDINATOR, **PRETRAINING}, {"node-1": node}, 65)
    rows = dict(overview({**COORDINATOR, **PRETRAINING}, 0.0))
    assert rows["stage"] == "blocks round 2 of 2: 1+0 of 2+2 units accepted"
    unknown = {"stage": "scaffold", "pretrain": {"share": -1.0, "blocks": [], "measured": []}}
    assert demo_view.stage_words(unknown) == "scaffold"
    assert rows["recombined"] == "perplexity 4.400 cold, 4.200 adapted"


def test_the_demos_json_has_each_stage_of_pretraining(tmp_path: Path):
    result = report(tmp_path, {**COORDINATOR, **PRETRAINING}, "demo", 1, 2, 99.9, 20.0, {})
    assert result["phase"] == "pretrain"
    assert result["pretrain"] == {
        "scaffold_perplexity": 4.482,
        "block_losses": [[1.49, 1.48]],
        "cold_perplexity": 4.4,
        "adapted_perplexity": 4.2,
    }
    assert any("4.400 cold" in line for line in summary_lines(result, None))


def test_an_interrupt_that_was_swallowed_still_ends_the_demo():
    interrupted = Interrupted()
    interrupted.check()
    with contextlib.suppress(KeyboardInterrupt):
        interrupted(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        interrupted.check()


def test_only_the_demos_own_model_is_pretrained(capsys):
    assert call("demo", "--phase", "both", "--model", "smollm2") == 2
    assert call("demo", "--phase", "odd") == 2
    assert "none of posttrain, pretrain, both" in capsys.readouterr().err


@pytest.mark.parametrize("heavy", ["httpx", "torch", "transformers"])
def test_what_few_commands_need_is_not_loaded_by_all(heavy: str) -> None:
    code = f"import sys, barnraise.tui.main; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_the_demo_ends_with_the_cause_when_a_guard_pauses_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    state = {"complete": False, "paused": {"by": "guard", "reason": "kl: too far", "since_ms": 0}}
    monkeypatch.setattr(demo, "state_of", lambda folder: state)
    with demo.Supervisor({}) as supervisor:
        found = demo._watch(supervisor, Path("run"), {}, 3600.0, True, said.append, Interrupted())
    assert found is state
    assert said[-1] == "the run paused itself, and the demo ends here: kl: too far"
