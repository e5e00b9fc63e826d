"""``barnraise ledger export``, ``import`` and ``diff``: whole ledgers as files, kept and compared."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import typer

from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError, StorageError
from barnraise.protocol.ledger_compare import Comparison, compare
from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.ledger_lines import line, shown
from barnraise.protocol.messages import TreeHead
from barnraise.protocol.moments import minute
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.tui.console import emit_json, examples, size
from barnraise.tui.ledger_source import SOURCE, ledger_file, usable
from barnraise.tui.ledger_verify import audit, print_report

EXPORT_EXAMPLES = examples("ledger export ./my-run ledger.bin")
IMPORT_EXAMPLES = examples("ledger import ledger.bin ./ledgers")
DIFF_EXAMPLES = examples("ledger diff monday.bin friday.bin", "ledger diff mine.bin theirs.bin --json")


def export(
    source: Path = SOURCE,
    target: Path = typer.Argument(..., metavar="FILE", help="The file to write."),
) -> None:
    """Write the whole ledger as one file that anybody can verify offline."""
    if target.is_dir() or not target.parent.is_dir():
        raise typer.BadParameter(
            f"{target} is a folder" if target.is_dir() else f"there is no folder {target.parent}",
            param_hint="FILE",
        )
    if not source.is_dir():
        raise typer.BadParameter(f"{source} is no run folder", param_hint="DIR|FILE")
    from barnraise.coordinator.export import export_run

    export_run(source, target)
    typer.echo(f"ledger written to {target}, {size(target.stat().st_size)}")


def import_(
    file: Path = typer.Argument(..., metavar="FILE", help="A file made by 'barnraise ledger export'."),
    folder: Path = typer.Argument(..., metavar="DIR", help="Where to keep ledgers, one file per run."),
) -> None:
    """Keep a copy of a ledger, after checking all of it and that it only adds to the copy kept before.

    Exit 1, and nothing is replaced, if anything is wrong with it, or if it tells another
    history than the copy that is here: then both files together are the evidence.
    """
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {file}", param_hint="FILE")
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder", param_hint="DIR")
    arrived = _taken(file, folder)
    try:
        try:
            report = audit(arrived)
        except (MalformedError, SignatureError) as error:
            raise BarnraiseError(f"not kept: the ledger cannot be believed: {error}") from error
        if not report.ok:
            print_report(report)
            raise BarnraiseError("not kept: the ledger is wrong")
        kept = folder / f"{report.run_id.hex()[:32]}.ledger"
        if kept.exists():
            found = _compared(kept, arrived)
            if found.relation == "split":
                for text in _words(found, "kept", "arrived"):
                    typer.echo(text)
                raise BarnraiseError(f"not kept: it is not the history in {kept}; keep both as evidence")
            if found.relation in ("same", "extension"):
                typer.echo(f"{kept} has all of it already, {found.sizes[0]:,} entries")
                return
        try:
            arrived.replace(kept)
            sync_folder(folder)
        except OSError as error:
            raise StorageError(f"cannot write {kept} ({error.strerror})") from error
        typer.echo(f"{report.size:,} entries verified and kept in {kept}")
    finally:
        arrived.unlink(missing_ok=True)


def _taken(file: Path, folder: Path) -> Path:
    """A copy of ``file`` inside ``folder``: what is checked is what is kept."""
    arrived = folder / f".arrived-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, arrived)
    except OSError as error:
        arrived.unlink(missing_ok=True)
        raise StorageError(f"cannot copy {file} to {folder} ({error.strerror})") from error
    return arrived


def diff(
    a: Path = typer.Argument(..., metavar="A", help="A ledger file or run folder."),
    b: Path = typer.Argument(..., metavar="B", help="Another one, of the same run."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Say whether one ledger extends the other, or where two histories of one run part (exit 1)."""
    with usable("A"), ledger_file(a) as first, usable("B"), ledger_file(b) as second:
        with open_ledger(first) as one, open_ledger(second) as other:
            open_run_spec(one.run_spec)
            if run_id_of(one.run_spec) != run_id_of(other.run_spec):
                raise typer.BadParameter("these are the ledgers of two different runs", param_hint="B")
        found = _compared(first, second)
    if as_json:
        emit_json(
            {
                "relation": found.relation,
                "entries": list(found.sizes),
                "shared": found.shared,
                "first_difference": None
                if found.entries is None
                else [shown(found.shared, entry) for entry in found.entries],
                "signed_by_operator": found.heads is not None if found.relation == "split" else None,
            }
        )
    else:
        for text in _words(found, "A", "B"):
            typer.echo(text)
    raise typer.Exit(1 if found.relation == "split" else 0)


def _compared(a: Path, b: Path) -> Comparison:
    with open_ledger(a) as one, open_ledger(b) as other:
        return compare(one, other)


def _words(found: Comparison, a: str, b: str) -> list[str]:
    more = abs(found.sizes[0] - found.sizes[1])
    if found.relation == "same":
        return [f"same: {found.shared:,} entries, all equal"]
    if found.relation == "prefix":
        return [f"{b} extends {a}: {found.shared:,} equal entries, then {more:,} more in {b}"]
    if found.relation == "extension":
        return [f"{a} extends {b}: {found.shared:,} equal entries, then {more:,} more in {a}"]
    assert found.entries is not None
    texts = [f"SPLIT at entry {found.shared}: {found.shared:,} equal entries, then two histories"]
    for name, entry in zip((a, b), found.entries, strict=True):
        texts.append(f"{name}: {line(shown(found.shared, entry), {})}")
    if found.heads is None:
        texts.append(
            "no proof against the operator: not both are covered there by a tree head that it signed, "
            "so one of the files may have been altered since (barnraise ledger verify)"
        )
        return texts
    texts.append("the operator signed both: these two tree heads prove a split view")
    for name, head in zip((a, b), found.heads, strict=True):
        when = f", {minute(head.issued_at)} UTC" if isinstance(head, TreeHead) else ""
        texts.append(f"{name}: {head.size} entries, root {head.root.hex()}{when}")
    return texts
