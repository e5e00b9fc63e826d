"""``barnraise ledger``: read, audit, prove and compare a run's ledger, in a run folder or a file."""

from __future__ import annotations

import typer

from barnraise.protocol.ledger_lines import line, shown
from barnraise.tui import (
    ledger_evidence,
    ledger_fetch,
    ledger_files,
    ledger_nodes,
    ledger_prove,
    ledger_show,
    ledger_unit,
    ledger_verify,
)
from barnraise.tui.console import examples
from barnraise.tui.ledger_source import ledger_file
from barnraise.tui.ledger_verify import audit, receipts_for, report_fields

__all__ = ["app", "audit", "ledger_file", "line", "receipts_for", "report_fields", "shown"]

app = typer.Typer(
    help="Read and audit a run's contribution ledger.",
    epilog=examples("ledger export ./my-run ledger.bin", "ledger verify ledger.bin --receipts node-1"),
    no_args_is_help=True,
)


def _add(name: str, short: str, verb: object, epilog: str) -> None:
    app.command(name, short_help=short, epilog=epilog)(verb)  # type: ignore[type-var]


_add("show", "Print entries, filtered, oldest first.", ledger_show.show, ledger_show.EXAMPLES)
_add("top", "Rank the nodes by credit.", ledger_nodes.top, ledger_nodes.TOP_EXAMPLES)
_add("node", "What one node did and earned.", ledger_nodes.node, ledger_nodes.NODE_EXAMPLES)
_add("unit", "One unit's whole story.", ledger_unit.unit, ledger_unit.EXAMPLES)
_add("verify", "Check every rule, hash, signature and balance.", ledger_verify.verify, ledger_verify.EXAMPLES)
_add("prove", "Prove one entry in a small file.", ledger_prove.prove, ledger_prove.PROVE_EXAMPLES)
_add("check", "Check such a proof offline.", ledger_prove.check, ledger_prove.CHECK_EXAMPLES)
_add("evidence", "What proof of two ledgers says.", ledger_evidence.evidence, ledger_evidence.EXAMPLES)
_add("diff", "Compare two copies of one ledger.", ledger_files.diff, ledger_files.DIFF_EXAMPLES)
_add("fetch", "Take it from the public log.", ledger_fetch.fetch, ledger_fetch.EXAMPLES)
_add(
    "export",
    "Write the ledger as one file.",
    ledger_files.export,
    ledger_files.EXPORT_EXAMPLES,
)
_add("import", "Check such a file and keep it.", ledger_files.import_, ledger_files.IMPORT_EXAMPLES)
