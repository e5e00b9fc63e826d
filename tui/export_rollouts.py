"""``barnraise run export-rollouts``: what volunteers drew, as a dataset."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import typer

from barnraise.tui.console import Progress, emit_json, examples, size

EXAMPLES = examples(
    "run export-rollouts ./my-run ./my-rollouts",
    "run export-rollouts ./my-run ./my-rollouts --versions 100..199 --license cc-by-4.0",
    "run export-rollouts ./my-backup ./my-rollouts --no-text --include-refused --proofs",
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
