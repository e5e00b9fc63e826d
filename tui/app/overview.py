"""Overview: what the machine does and why, what it earned, how fast, and how it is reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from barnraise.node.fetching import in_words
from barnraise.tui.app.screen import NodeScreen, mark
from barnraise.tui.app.sheet import Row, Sheet, Words, bar, spark, words
from barnraise.tui.app.tail import Tail
from barnraise.tui.app.view import View, clock, count, credit, number, rate, short, text, told, version
from barnraise.tui.console import size
from barnraise.tui.status import standing

LOG_LINES = 7


class Overview(NodeScreen):
    """The first screen."""

    tab = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "app.pause", "Pause", tooltip="Stop the work within two seconds, until r"),
        Binding("P", "app.pause_for", "for a time", key_display="P", tooltip="Stop the work, then go on"),
        Binding("r", "app.resume", "Resume", tooltip="Go on working; takes a finish back, too"),
        Binding("f", "app.finish", "Finish", tooltip="Complete the unit, take no more, end the node"),
        Binding("l", "app.leave", "Leave", tooltip="Give the unit back and end the node now (asks first)"),
        Binding("up,k,pageup", "scroll(-3)", "Up", show=False),
        Binding("down,j,pagedown", "scroll(3)", "Down", show=False),
    ]
    DEFAULT_CSS = """
    Overview {
        #body { height: 1fr; overflow-y: auto; scrollbar-size-vertical: 1; }
        Horizontal { height: auto; margin-bottom: 1; }
        Horizontal > Sheet { width: 1fr; }
        #now { margin-bottom: 1; }
        #news { margin-bottom: 1; }
        &.-short #log { display: none; }
        &.-short #news, &.-short #now, &.-short Horizontal { margin-bottom: 0; }
    }
    """
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012  (Textual's own declaration)

    def body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield Sheet("Now", id="now", most=4)
            with Horizontal():
                yield Sheet("Earned", id="earned")
                yield Sheet("Speed", id="speed", label=8, most=1)
            with Horizontal():
                yield Sheet("Machine", id="machine", label=8)
                yield Sheet("Network", id="network", label=12)
            yield Sheet("News", id="news", label=10, most=2)
            yield Sheet("Log", id="log", label=10, most=1)

    def draw(self, view: View) -> None:
        short = self.size.height < 30
        width = self.size.width
        for name in ("machine", "network"):
            self.query_one(f"#{name}", Sheet).limit(1 if short else 3)
        self.query_one("#now", Sheet).show(now_rows(view, max(10, width - 14)))
        self.query_one("#earned", Sheet).show(earned_rows(view))
        self.query_one("#speed", Sheet).show(speed_rows(view, max(6, min(60, width // 2 - 26))))
        self.query_one("#machine", Sheet).show(machine_rows(view))
        self.query_one("#network", Sheet).show(network_rows(view))
        self.query_one("#news", Sheet).show(news_rows(view, 2 if short else 5))
        if not short:
            self.query_one("#log", Sheet).show(log_rows(self.node.tail))

    def action_scroll(self, by: int) -> None:
        """Scroll what does not fit."""
        self.query_one("#body", Vertical).scroll_relative(y=by, animate=False)


def now_rows(view: View, width: int) -> Iterator[Row]:
    """The state with its reason, finished progress, version; ``width``: cells for a bar and its figures."""
    state = view.state
    if not state:
        yield "state", words(("waiting for the node to answer" if not view.lost else "no node", "dim"))
        return
    name, reason = text(state.get("state"), "?"), text(state.get("reason"))
    if reason.startswith(name):
        yield "state", (mark(name), (reason, "strong"))
    else:
        yield "state", words(mark(name), (name, "strong"), f": {reason}" if reason else "")
    since = view.ago(state.get("since_ms"))
    then, left = text(state.get("then")), view.left(state.get("until_ms"))
    ends = f"; {then} in {left}" if then and left else ""
    yield "for", words((f"{since}{ends}" if since else "-", "dim"))
    unit = view.part("unit")
    if unit:
        done, of, what = _progress(unit)
        figures = f"  {done:,.0f} of {of:,.0f} {what}"
        yield "unit", bar(done / of if of else 0.0, max(8, width - len(figures))) + words(figures)
    else:
        yield "unit", words(("none at work", "dim"))
    fetch = view.part("fetch")
    if fetch:
        total = number(fetch.get("total"))
        share = number(fetch.get("done")) / total if total else 0.0
        what = text(fetch.get("what")) or f"version {version(fetch.get('version'))}"
        figures = f"  {what}, {told(in_words, {**fetch, 'sources': ()})}"
        loaded = f"; {version(state.get('policy_version'))} loaded"
        tail = loaded if len(figures) + len(loaded) + 8 <= width else ""
        room = max(8, min(24, width - len(figures) - len(tail)))
        yield "fetching", bar(share, room) + words(figures, (tail, "dim"))
        return  # in the version's place: a line that came and went would move all others each time
    newest, last = version(state.get("head_version")), version(state.get("final_version"))
    yield (
        "version",
        words(
            f"{version(state.get('policy_version'))} loaded",
            (f", newest {newest}" + (f" of {last}" if last != "none" else ""), "dim"),
        ),
    )


def _progress(unit: object) -> tuple[float, float, str]:
    if not isinstance(unit, dict):
        return 0.0, 0.0, ""
    if unit.get("kind") == "block":
        loss = unit.get("loss")
        tail = f", loss {loss:.2f}" if isinstance(loss, float) else ""
        return number(unit.get("step")), number(unit.get("steps")), f"steps{tail}"
    return number(unit.get("completions")), number(unit.get("of")), "completions"


def earned_rows(view: View) -> Iterator[Row]:
    """Credit and verdicts."""
    state = view.state
    if not state:  # a zero would look like a loss
        yield "credit", words(("not known while no node runs", "dim"))
        return
    today = state.get("credit_today")
    if today is not None:
        yield "today", words((credit(today), "strong"))
    yield "credit", words((credit(state.get("credit")), "strong"))
    yield "accepted", words(count(state.get("accepted")), (f" of {_judged(view)} judged", "dim"))
    rejected = number(state.get("rejected"))
    yield "rejected", words((count(rejected), "warn" if rejected else ""))
    waiting, pending = number(state.get("awaiting_verdict")), number(state.get("pending"))
    yield (
        "waiting",
        words(f"{count(waiting)} for a verdict", f", {count(pending)} to send" if pending else ""),
    )


def _judged(view: View) -> str:
    return count(number(view.state.get("accepted")) + number(view.state.get("rejected")))


def speed_rows(view: View, width: int) -> Iterator[Row]:
    """Rates with their course since the app was attached."""
    history = view.history
    speed = number(view.state.get("tokens_per_s"))
    for label, value, course in (
        ("engine", f"{speed:,.0f} tok/s" if speed else "-", history.speed),
        ("down", rate(history.down[-1]) if history.down else "-", history.down),
        ("up", rate(history.up[-1]) if history.up else "-", history.up),
    ):
        yield label, words(f"{value:>12}", "  ", (spark(list(course), width), "spark"))
    yield (
        "total",
        words(
            f"{size(number(view.state.get('bytes_in')))} down, {size(number(view.state.get('bytes_out')))} up"
        ),
    )
    limits = view.part("limits")
    if limits:
        used, most = number(limits.get("monthly_used")), limits.get("monthly")
        of = f" of {size(number(most))}" if most is not None else ""
        tone = "warn" if limits.get("spent_until_ms") else ""
        yield "month", words((f"{size(used)}{of}", tone))


def machine_rows(view: View) -> Iterator[Row]:
    """Engine, devices, and whether a person is there."""
    state, hardware = view.state, view.part("hardware")
    engine, device = text(state.get("engine")), text(state.get("device"))
    if engine and device and device not in engine:
        engine = f"{engine} on {device}"
    memory = number(state.get("engine_memory"))
    yield "engine", words(engine or ("not started", "dim"), f", {size(memory)}" if memory else "")
    gpus = view.items("gpus", "hardware")
    for gpu in gpus[:2]:
        yield "GPU", _gpu(gpu)
    if hardware and not gpus:
        yield "GPU", words(("none", "dim"))
    if hardware.get("memory_total"):
        free, total = number(hardware.get("memory_free")), number(hardware["memory_total"])
        yield "memory", words(f"{size(free)} of {size(total)} free")
    presence = view.part("presence")
    if presence:
        yield "you", words(text(presence.get("text")) or ("here" if presence.get("in_use") else "away"))


def _gpu(gpu: Mapping[str, Any]) -> Words:
    """Figures first: where there is little room, the name is cut."""
    name = text(gpu.get("name"), "?")
    if not gpu.get("used"):
        return words((f"{name} not used: {text(gpu.get('reason'), 'no reason given')}", "dim"))
    parts = []
    if isinstance(gpu.get("temperature"), int | float):
        parts.append(f"{gpu['temperature']:.0f} °C")
    if number(gpu.get("memory_total")):
        parts.append(f"{number(gpu.get('memory_used')) / 1e9:.1f} of {size(number(gpu['memory_total']))}")
    return words(", ".join([*parts, name]))


def network_rows(view: View) -> Iterator[Row]:
    """The coordinator, how others reach this node, and how the coordinator sees it."""
    state = view.state
    if not state:
        return
    up = state.get("connected")
    yield (
        "coordinator",
        words(
            ("connected", "good") if up else ("not connected", "bad"),
            (f" {short(state.get('coordinator'))}", "dim"),
        ),
    )
    reach = view.part("reach")
    if reach:
        kind, cure = text(reach.get("kind"), "?"), text(reach.get("cure"))
        yield "reachable", words((kind, "good" if kind == "direct" else ""), f"; {cure}" if cure else "")
    yield "peers", words(f"{count(state.get('peers'))} connected")
    opinion = told(standing, state.get("standing"), view.now)
    if opinion:
        yield "standing", words((opinion, "bad" if opinion.startswith("banned") else ""))
    offset = number(state.get("clock_offset_ms"))
    if abs(offset) > 300_000:
        yield "clock", words((f"{abs(offset) / 1000:.0f} s off: set it by NTP", "warn"))


def log_rows(tail: Tail) -> Iterator[Row]:
    """The log's last lines, the newest last."""
    newest = islice((line for line in reversed(tail.lines) if line.level != "DEBUG"), LOG_LINES)
    for line in reversed(list(newest)):
        yield line.time or " ", words((line.text, "bad" if line.bad else "warn" if line.grave else "dim"))


def news_rows(view: View, most: int) -> Iterator[Row]:
    """The node's last lines, the newest first."""
    notices = view.items("notices")[-most:]
    for notice in reversed(notices):
        at = clock(number(notice.get("at_ms")) / 1000)
        tone = "bad" if notice.get("level") in ("error", "critical") else ""
        yield at, words((text(notice.get("text")), tone))
    if not notices:
        yield "", words(("nothing since the node began", "dim"))
