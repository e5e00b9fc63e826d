"""``barnraise run export-rollouts`` and ``check-rollouts``: what volunteers drew, as a dataset."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import typer

from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.ledger_uses import uses_of
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.tui.console import Progress, emit_json, examples, size
from barnraise.tui.ledger_source import ledger_file, usable

EXAMPLES = examples(
    "run export-rollouts ./my-run ./my-rollouts",
    "run export-rollouts ./my-run ./my-rollouts --versions 100..199 --license cc-by-4.0",
    "run export-rollouts ./my-backup ./my-rollouts --no-text --include-refused --proofs",
)
CHECK_EXAMPLES = examples(
    "run check-rollouts ./my-rollouts ./my-run", "run check-rollouts ./my-rollouts ledger.bin"
)
MB = 1_000_000


def export_rollouts(
    folder: Path = typer.Argument(
        ..., metavar="DIR", help="A run folder, which may be served meanwhile, or a backup of one."
    ),
    target: Path = typer.Argument(
        ..., metavar="OUT", help="The folder to make; must not exist, or be empty."
    ),
    versions: str = typer.Option(
        "", "--versions", metavar="A..B", help="Policy versions, both included: 7, 5..9, 5.. or ..9 (all)."
    ),
    text: bool = typer.Option(
        True, "--text/--no-text", help="Add prompts and completions as text, or leave token ids alone."
    ),
    refused: bool = typer.Option(
        False, "--include-refused", help="Also what checks refused, with the reason, where it was kept."
    ),
    anonymous: bool = typer.Option(
        False, "--anonymous", help="Leave out volunteers' keys, and ids that lead to them in the ledger."
    ),
    proofs: bool = typer.Option(False, "--proofs", help="Add the TOPLOC proofs, where they were kept."),
    shard_mb: int = typer.Option(
        256, "--shard-mb", metavar="MB", min=1, max=100_000, help="Largest file, before compression."
    ),
    licence: str = typer.Option(
        "",
        "--license",
        metavar="ID",
        help="For the dataset's card, such as cc-by-4.0 (default: yours to add).",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Write a run's rollouts as Parquet that Hugging Face 'datasets' loads, with a dataset card.

    The run keeps them with rollouts = "accepted" (or "all") in [keep] of run.toml; without, only the newest
    versions are at hand. Broken off, the export goes on where it was when it is done again.
    """
    from barnraise.coordinator.rollout_export import export_rollouts as export
    from barnraise.coordinator.rollout_source import Wanted

    if anonymous and proofs:
        raise typer.BadParameter(
            "proofs are there to be checked, which takes the keys", param_hint="--proofs"
        )
    if licence and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}", licence):
        raise typer.BadParameter("one of Hugging Face's ids, such as cc-by-4.0", param_hint="--license")
    first, last = _versions(versions)
    wanted = Wanted(
        first=first,
        last=last,
        text=text,
        refused=refused,
        anonymous=anonymous,
        proofs=proofs,
        shard_bytes=shard_mb * MB,
        license=licence,
    )
    progress = Progress()
    done = export(folder, target, wanted, (lambda *_: None) if as_json else progress)
    made = done.summary
    if as_json:
        emit_json({"folder": str(done.folder), "reused": done.reused, **asdict(made)})
        return
    typer.echo(
        f"{made.rows:,} rollouts of versions {made.first} to {made.last} written to {done.folder}: "
        f"{made.files} file{'' if made.files == 1 else 's'}, {size(made.size)}"
        + (f"; {made.rows - made.accepted:,} of them were refused" if refused else "")
    )
    typer.echo(
        "README.md there is the dataset's card: read it before you publish"
        + ("" if licence else ", and say a licence")
    )


def check_rollouts(
    dataset: Path = typer.Argument(..., metavar="OUT", help="A folder made by 'run export-rollouts'."),
    source: Path = typer.Argument(
        ...,
        metavar="DIR|FILE",
        help="The run's ledger: its folder, or a file made by 'barnraise ledger export'.",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Hold exported rollouts against the run's public ledger: node, version, verdict, tokens and credit.

    Where the rows have their proofs, what the node signed is put together again and its digest compared.
    Whether the ledger is sound is for 'barnraise ledger verify' to say.
    """
    from barnraise.coordinator.rollout_check import check_rollouts as check

    with ledger_file(source) as path, usable(), open_ledger(path) as ledger:
        spec = open_run_spec(ledger.run_spec)
        run = run_id(ledger.run_spec)
        uses = uses_of(ledger.uses, spec.operator, run)
        found = check(dataset, run, spec.model.parameters, ledger.entries, uses)
    good = not found.problems and found.submissions > 0
    if as_json:
        emit_json({"ok": good, **asdict(found)})
    else:
        for problem in found.problems:
            typer.echo(problem)
        if found.unnamed:
            typer.echo(f"and {found.unnamed:,} more problems")
        if found.elsewhere:
            typer.echo(f"{found.elsewhere:,} submissions are of another run than this ledger's: not checked")
        count = len(found.problems) + found.unnamed
        typer.echo(
            f"{found.submissions:,} submissions with {found.rows:,} rollouts: "
            + (f"{count:,} problems" if count else "all as the ledger says" if good else "nothing to check")
            + f"; {found.remade:,} digests made again from the rows"
        )
    if not good:
        raise typer.Exit(1)


def _versions(text: str) -> tuple[int, int]:
    """``A..B`` as numbers. Raises typer.BadParameter."""
    most = 1 << 31
    if not text:
        return 0, most
    match = re.fullmatch(r"([0-9]{0,9})(\.\.)?([0-9]{0,9})", text.strip())
    if match is None or (not match[2] and (not match[1] or match[3])):
        raise typer.BadParameter("write 7, 5..9, 5.. or ..9", param_hint="--versions")
    first = int(match[1] or 0)
    last = int(match[3] or most) if match[2] else first
    if last < first:
        raise typer.BadParameter(f"{last} is before {first}", param_hint="--versions")
    return first, last
