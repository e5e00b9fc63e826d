"""``barnraise status``: what a node or a coordinator on this machine is doing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from barnraise.node.fetching import in_words
from barnraise.node.state import block_words
from barnraise.protocol.control_client import read_state
from barnraise.protocol.credit_words import credit_words
from barnraise.protocol.errors import AbsentError, BarnraiseError, PeerError
from barnraise.tui.background import waiting_in
from barnraise.tui.console import duration, emit_json, examples, print_rows, short_id, size
from barnraise.tui.demo_view import measured_words, stage_words

EXAMPLES = examples("status ./my-run", "status node-1 --json", "status     (this user's node)")

Row = tuple[str, str]


def status(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A run folder or a node's data folder (default: ~/.local/share/barnraise)."
    ),
    as_json: bool = typer.Option(False, "--json", help="The whole state as one JSON object."),
) -> None:
    """Show the state of a running node or coordinator."""
    state = read_folder(folder)
    if as_json:
        emit_json(state)
        return
    print_rows(overview(state, time.time()))


def read_folder(folder: Path | None) -> dict[str, Any]:
    """The state tree of whatever runs in ``folder``; None is this user's node.

    Raises:
        typer.BadParameter: it is no folder of a run or a node.
        BarnraiseError: nothing is running there.
    """
    from barnraise.node.config import default_data_path

    folder = folder_or_default(folder)
    try:
        return read_state(folder / "control.sock")
    except (PeerError, OSError) as error:
        if not isinstance(error, AbsentError):
            raise BarnraiseError(no_answer(folder, error)) from error
        if waits := waiting_in(folder):
            raise BarnraiseError(f"{waits}; see 'barnraise logs'") from error
        if (folder / "spec.bin").is_file():
            cure = f"barnraise coordinator run {folder}"
        elif (folder / "known.json").is_file() or (folder / "lock").is_file():
            where = "" if folder == default_data_path() else f" --data {folder}"
            cure = f"barnraise join{'' if _can_rejoin(folder) else ' MULTIADDR'}{where}"
        else:
            raise typer.BadParameter(f"{folder} is neither a run folder nor a node's data folder") from error
        raise BarnraiseError(f"nothing is running in {folder}; start it with '{cure}'") from error


def no_answer(folder: Path, error: Exception) -> str:
    """What to say where a process serves a folder, and is no help."""
    return (
        f"the process that serves {folder} does not answer ({error}): it may be somebody else's, very busy, "
        "or have too many viewers; look at its log, and try again"
    )


def _can_rejoin(folder: Path) -> bool:
    """Whether the node of this folder knows where its run is."""
    from barnraise.node.known import KnownRuns

    try:
        return bool(KnownRuns(folder / "known.json").leads())
    except BarnraiseError:
        return False


def folder_or_default(folder: Path | None) -> Path:
    """The folder asked for; None is this user's node.

    Raises:
        typer.BadParameter: there is no such folder.
    """
    if folder is None:
        from barnraise.node.config import default_data_path

        folder = default_data_path()
        if not folder.is_dir():
            raise typer.BadParameter(
                f"no node has run here yet: there is no {folder}; name a run folder or a node's data folder"
            )
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder; name a run folder or a node's data folder")
    return folder


def overview(state: dict[str, Any], now: float) -> list[Row]:
    """What a person wants to know of a state tree, as rows of label and text; ``now``: seconds (UTC)."""
    rows = _coordinator(state, now) if state.get("kind") == "coordinator" else _node(state, now)
    return [(label, text) for label, text in rows if text]


def _coordinator(state: dict[str, Any], now: float) -> Iterator[Row]:
    yield "coordinator", f"of run '{state.get('run', '?')}' ({str(state.get('run_id', ''))[:16]})"
    yield "state", _with_reason(state)
    yield from _operated(state, now)
    yield "version", f"{state.get('policy_version', 0)} of {state.get('target_version', '?')}"
    if state.get("pretrain"):
        yield "stage", stage_words(state)
        yield from measured_words(state)
    yield "reward", _course(state.get("rewards", []), "training rollouts")
    yield "held-out", _course(state.get("accuracy", []), "greedy policy, tasks never trained on")
    yield "submissions", _submissions(state)
    waiting = f"{state.get('queue', 0)} waiting ({size(state.get('queue_bytes', 0))})"
    yield "verifier", f"{waiting}, {state.get('verifying', 0)} being verified"
    yield "leases", f"{state.get('leases_open', 0)} open"
    yield "ledger", f"{state.get('ledger_size', 0):,} entries"
    yield "traffic", _traffic(state)
    if state.get("started_ms"):
        yield "running", duration(now - state["started_ms"] / 1000)
    for address in state.get("addresses", []):
        yield "join with", f"barnraise join {address}"
    yield "nodes", f"{state.get('nodes_live', 0)} here, {state.get('nodes_known', 0)} known"
    newcomers = state.get("newcomers") or {}
    if newcomers.get("turned_away_1h"):
        yield (
            "new keys",
            f"{newcomers['turned_away_1h']} turned away within the last hour: more than "
            f"{newcomers['per_day']} a day came from their addresses",
        )
    for node in state.get("nodes", []):
        counts = f"{node.get('accepted', 0)} accepted, {node.get('rejected', 0)} rejected"
        verdict = node.get("last_verdict") or "none yet"
        yield (
            f"  {node.get('name', '?')} {short_id(str(node.get('peer_id', '')))}",
            f"{node.get('state', '?')}, version {_version(node.get('have_version'))}, {counts}, "
            f"{credit_words(node.get('credit', 0))}, last verdict: {verdict}"
            + (f", {node['strikes']} strikes" if node.get("strikes") else "")
            + (f", BANNED{_until(node.get('banned_until'))}: {node['banned']}" if node.get("banned") else "")
            + (f", {node['reach']}" if node.get("reach") else ""),
        )


def _operated(state: dict[str, Any], now: float) -> Iterator[Row]:
    """What guards hold against the run, and what its operator did to it."""
    for alarm in state.get("alarms") or []:
        since = duration(max(0.0, now - alarm["since_ms"] / 1000))
        yield "ALARM", f"{alarm['kind']}, for {since}: {alarm['text']}"
    if state.get("rolling_back_to") is not None:
        yield "rollback", f"to version {state['rolling_back_to']}, under way"
    if state.get("draining_until_ms"):
        left = duration(max(0.0, state["draining_until_ms"] / 1000 - now))
        yield "draining", f"ends once the work at hand is in, waits {left} more at most"
    if state.get("admission") in ("invite", "allow"):
        yield "open to", "the invited and the list" if state["admission"] == "invite" else "the list alone"
    if state.get("amendments"):
        yield "amendments", f"{state['amendments']}, all in the ledger"


def _node(state: dict[str, Any], now: float) -> Iterator[Row]:
    yield "node", f"{state.get('name', '?')}, {state.get('peer_id', '?')}"
    run = state.get("run")
    yield "run", f"'{run}' ({str(state.get('run_id', ''))[:16]})" if run else "none yet"
    ends = ""
    if state.get("until_ms") and state.get("then"):
        ends = f", {state['then']} in {duration(max(0.0, state['until_ms'] / 1000 - now))}"
    since = (
        f" (for {duration(max(0.0, now - state['since_ms'] / 1000))}{ends})" if state.get("since_ms") else ""
    )
    yield "state", _with_reason(state) + since
    for held in (state.get("suspended") or [])[1:]:  # the first is the state's reason
        yield "  also", str(held.get("reason", ""))
    for held in state.get("suspended") or []:
        yield "  cure", str(held.get("cure") or "")
    asked = state.get("consent")
    if asked:
        yield "asks", "join this run? 'barnraise join ADDRESS' or 'barnraise tui' takes the answer"
        for field in asked.get("fields") or []:
            yield f"  {field[0]}", str(field[1])
    if state.get("started_ms"):
        yield (
            "running",
            f"for {duration(max(0.0, now - state['started_ms'] / 1000))}, process {state.get('pid')}",
        )
    yield (
        "coordinator",
        ("connected to " if state.get("connected") else "not connected to ")
        + str(state.get("coordinator", "?")),
    )
    yield "reachable", reachable(state.get("reach"))
    newest = f"newest {_version(state.get('head_version'))}, last {state.get('final_version', '?')}"
    yield "version", f"{_version(state.get('policy_version'))} loaded, {newest}"
    fetch = state.get("fetch")
    if fetch:
        yield "fetching", f"{fetch.get('what') or 'version ' + str(fetch.get('version'))}: {in_words(fetch)}"
    unit = state.get("unit") or {}
    if unit.get("kind") == "block":
        yield "unit", block_words(unit)
    elif unit.get("of"):
        yield "unit", f"{unit.get('completions', 0)} of {unit['of']} completions"
    yield (
        "submissions",
        (
            f"{_submissions(state)}, {state.get('awaiting_verdict', 0)} awaiting their verdict, "
            f"{state.get('pending', 0)} not delivered yet"
        ),
    )
    today = credit_words(state.get("credit_today", 0))
    yield "credit", f"{credit_words(state.get('credit', 0))}, {today} of it today"
    yield "standing", standing(state.get("standing"), now - (state.get("clock_offset_ms") or 0) / 1000)
    verdict = state.get("last_verdict")
    if verdict and not verdict.get("accepted"):
        yield "last verdict", f"rejected by check '{verdict.get('check')}': {verdict.get('message', '')}"
    elif verdict:
        yield "last verdict", f"accepted, {credit_words(verdict.get('credit', 0))}"
    speed = f", {state['tokens_per_s']:,.0f} tokens/s" if state.get("tokens_per_s") else ""
    memory = f", {size(state['engine_memory'])}" if state.get("engine_memory") else ""
    yield "engine", f"{state.get('engine') or 'not started'} on {state.get('device') or '-'}{memory}{speed}"
    if state.get("engine_why"):
        yield "chosen", str(state["engine_why"])
    yield from _machine(state.get("hardware") or {})
    yield "you", str((state.get("presence") or {}).get("text", ""))
    yield "peers", f"{state.get('peers', 0)} connected"
    yield "traffic", _traffic(state)
    if state.get("duplicate_key"):
        yield "WARNING", "another live node uses the same key: give each its own with 'join --key FILE'"
    for notice in state.get("notices", [])[-3:]:
        moment = time.strftime("%H:%M:%S", time.localtime(notice.get("at_ms", 0) / 1000))
        yield f"  {moment}", f"{notice.get('level', '')}: {notice.get('text', '')}"


def _machine(hardware: dict[str, Any]) -> Iterator[Row]:
    if not hardware:
        return
    total, free = hardware.get("memory_total", 0), hardware.get("memory_free", 0)
    yield "machine", f"{hardware.get('cores', '?')} cores, {size(free)} of {size(total)} memory free"
    for gpu in hardware.get("gpus") or []:
        yield (
            "  GPU",
            f"{gpu.get('name', '?')}: {'used' if gpu.get('used') else gpu.get('reason') or 'not used'}",
        )
    yield "  units", str(hardware.get("sized") or "")


def reachable(reach: dict[str, Any] | None) -> str:
    """How others reach a node, why, and what would change that (R1)."""
    if not reach:
        return ""
    cure = f"; {reach['cure']}" if reach.get("cure") else ""
    return f"{reach.get('kind', '?')}: {reach.get('reason', '')}{cure}"


def standing(told: dict[str, Any] | None, now: float) -> str:
    """How the coordinator sees a node, in words; ``now``: seconds (UTC) by the coordinator's clock."""
    if not told:
        return ""
    reason = f": {told['reason']}" if told.get("reason") else ""
    left = told.get("banned_until", 0) / 1000 - now
    if left > 0:
        end = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(told["banned_until"] / 1000))
        return f"banned until {end} ({duration(left)} left){reason}; see 'barnraise receipts --rejected'"
    verified, needed = told.get("verified", 0), told.get("needed", 0)
    text = f"proven, {verified:,} in a row verified" if verified >= needed else ""
    text = text or f"{verified} of {needed} in a row verified, until then all work is checked"
    if told.get("strikes"):
        pause = told.get("quiet_until", 0) / 1000 - now
        wait = f", next work in {duration(pause)}" if pause > 0 else ""
        text += f"; {told['strikes']} rejections not made good yet{reason}{wait}"
    return text


def _until(at_ms: Any) -> str:
    if not isinstance(at_ms, int) or not 0 < at_ms < 253_402_300_800_000:  # the year 10,000
        return ""
    return time.strftime(" until %Y-%m-%d %H:%M UTC", time.gmtime(at_ms / 1000))


def _with_reason(state: dict[str, Any]) -> str:
    """``state: reason``, or the reason alone where it begins with the state's name."""
    name, reason = str(state.get("state", "?")), str(state.get("reason") or "")
    if not reason or reason.startswith(name):
        return reason or name
    return f"{name}: {reason}"


def _submissions(state: dict[str, Any]) -> str:
    causes = ", ".join(f"{check} {count}" for check, count in (state.get("rejections") or {}).items())
    text = f"{state.get('accepted', 0):,} accepted, {state.get('rejected', 0):,} rejected"
    return text + (f" ({causes})" if causes else "")


def _traffic(state: dict[str, Any]) -> str:
    return f"{size(state.get('bytes_in', 0))} in, {size(state.get('bytes_out', 0))} out"


def _version(number: Any) -> str:
    return str(number) if isinstance(number, int) and number >= 0 else "none"


def _course(pairs: list[list[float]], of: str) -> str:
    if not pairs:
        return ""
    (first, start), (last, end) = pairs[0], pairs[-1]
    if first == last:
        return f"{end:.3f} at version {last:.0f} ({of})"
    return f"{start:.3f} at version {first:.0f}, {end:.3f} at version {last:.0f} ({of})"
