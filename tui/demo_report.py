"""What a demo came to: the summary on screen, and the same numbers as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from barnraise.protocol.errors import BarnraiseError
from barnraise.tui import ledger
from barnraise.tui.chart import draw_rewards
from barnraise.tui.console import duration, size
from barnraise.tui.demo_view import State, measured_words


def report(
    run: Path,
    final: State,
    model: str,
    seed: int,
    nodes: int,
    seconds: float,
    making_seconds: float,
    memory: dict[str, int],
) -> dict[str, Any]:
    """Audit the ledger offline, draw the chart into the run folder, and gather the demo's numbers.

    ``seconds`` in all, ``making_seconds`` of them until the run was made; ``memory``: each
    process's peak with its children, bytes.
    """
    accuracy = [(int(version), float(value)) for version, value in final.get("accuracy", [])]
    rewards = [(int(version), float(value)) for version, value in final.get("rewards", [])]
    problems: list[str] = []
    balances: dict[str, int] = {}
    try:
        audit = ledger.report_fields(ledger.audit(run))
        balances = audit["balances"]
        problems = [problem["text"] for problem in audit["problems"]]
        ledger_ok = bool(audit["ok"])
    except BarnraiseError as error:
        ledger_ok, problems = False, [str(error)]
    charts = draw_rewards(rewards, accuracy, f"barnraise demo: {model}, seed {seed}, {nodes} nodes", run)
    names = {row.get("peer_id"): row.get("name") for row in final.get("nodes", [])}
    measured = (final.get("pretrain") or {}).get("measured", [])
    return {
        "model": model,
        "phase": "pretrain" if final.get("pretrain") else "posttrain",
        "pretrain": _pretrained(measured) if final.get("pretrain") else None,
        "measured": [list(pair) for pair in measured_words(final)],
        "seed": seed,
        "nodes": nodes,
        "reward_before": accuracy[0][1] if accuracy else None,
        "reward_after": accuracy[-1][1] if accuracy else None,
        "versions": int(final.get("policy_version", 0)),
        "accepted": int(final.get("accepted", 0)),
        "rejected": int(final.get("rejected", 0)),
        "rejections": final.get("rejections", {}),
        "credit": {names.get(node) or node: credit for node, credit in balances.items()},
        "ledger_ok": ledger_ok,
        "ledger_problems": problems[:5],
        "seconds": round(seconds, 1),
        "making_seconds": round(making_seconds, 1),
        "memory": memory,
        "training_seconds": final.get("training_seconds"),
        "bytes_out": int(final.get("bytes_out", 0)),
        "charts": [str(path) for path in charts],
        "complete": bool(final.get("complete")),
    }


def _pretrained(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Held-out figures of each stage that was reached; None for the others."""
    found: dict[str, Any] = dict.fromkeys(("scaffold_perplexity", "cold_perplexity", "adapted_perplexity"))
    found["block_losses"] = []
    for note in measured:
        if note.get("stage") == "scaffold":
            found["scaffold_perplexity"] = note.get("perplexity")
        elif note.get("stage") == "round":
            found["block_losses"].append(note.get("block_losses"))
        elif note.get("stage") == "adaptation":
            found |= {key: note.get(key) for key in ("cold_perplexity", "adapted_perplexity")}
    return found


def summary_lines(result: dict[str, Any], kept: Path | None) -> list[str]:
    """The report for a person; ``kept`` is the folder that stays, if one does."""

    def share(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.3f}"

    causes = ", ".join(f"{check} {count}" for check, count in result["rejections"].items())
    learning = result["training_seconds"]
    lines = [
        "",
        *(f"{name:15}  {text}" for name, text in result["measured"]),
        f"held-out reward  {share(result['reward_before'])} before, {share(result['reward_after'])} after "
        "(tasks never trained on)",
        f"policy versions  {result['versions']} published"
        + ("" if result["versions"] else ": there was not time for one, see --minutes"),
        f"submissions      {result['accepted']} accepted, {result['rejected']} rejected"
        + (f" ({causes})" if causes else ""),
    ]
    lines += [
        f"credit           {name}: {credit:,} Mflop" for name, credit in sorted(result["credit"].items())
    ]
    found = "verified offline: every rule, hash, signature and balance"
    if not result["ledger_ok"]:
        found = "WRONG: " + "; ".join(result["ledger_problems"])
    lines.append(f"ledger           {found}")
    making = duration(result["making_seconds"])
    lines.append(
        f"time             {duration(result['seconds'])}, {making} of it to make the run"
        + (f", {duration(learning)} of optimiser steps" if learning else "")
    )
    lines += [f"memory, at most  {name}: {size(peak)}" for name, peak in result["memory"].items()]
    if kept is None:
        lines.append(
            "kept             nothing (--keep DIR keeps the run, its reward chart, the nodes, the logs)"
        )
        return lines
    lines.append(f"chart            {result['charts'][0]}")
    lines.append(f"kept             {kept}; look closer with")
    lines.append(f"  barnraise report {kept / 'run'}")
    lines.append(f"  barnraise ledger show {kept / 'run'} --limit 20")
    lines.append(f"  barnraise ledger verify {kept / 'run'} --receipts {kept / 'node-1'}")
    lines.append(f"  barnraise coordinator run {kept / 'run'}      (goes on where it was)")
    return lines
