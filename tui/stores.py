"""``coordinator migrate | backup | restore | export-versions | fetch-version``: where a run is kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.log_messages import CHECKPOINT
from barnraise.protocol.notes import MAX_NOTE
from barnraise.tui.console import emit_json, examples, rounds, size

if TYPE_CHECKING:
    from barnraise.coordinator.journal_copy import Progress

FOLDER = typer.Argument(..., metavar="DIR", help="A run folder.")
JSON = typer.Option(False, "--json", help="One JSON object.")
TELL_EVERY_S = 2.0


def migrate(
    folder: Path = FOLDER,
    to: str = typer.Option(
        ..., "--to", metavar="URL|sqlite", help="postgresql://USER@HOST/DATABASE, or sqlite: the run folder."
    ),
    as_json: bool = JSON,
) -> None:
    """Move a run's journal to PostgreSQL, or back, and have its coordinator use it there.

    Stop the coordinator first. Every row is compared before the run folder names the new place;
    where it was stays as it was. Broken off, it goes on where it was when it is done again. A run
    that has not begun just begins there. The password may be in the URL (it is kept in
    DIR/state.postgres, which only you can read) or in BARNRAISE_STORE_PASSWORD.
    """
    from barnraise.coordinator.folder import open_run
    from barnraise.coordinator.journal_place import journal_begun
    from barnraise.coordinator.migrate import migrate as move
    from barnraise.coordinator.migrate import name_store

    if not journal_begun(folder) and to != "sqlite":
        with open_run(folder) as run:
            place = name_store(folder, to, run.run_id).shown
        done = {"moved": True, "place": place, "left": "", "events": 0}
    else:
        found = move(folder, to, _progress(as_json))
        done = {"moved": found.moved, "place": found.place, "left": found.left, "events": 0}
        if found.copied is not None:
            done["events"] = found.copied.events
            done["events_digest"] = found.copied.digest.hex()
            done["head_size"], done["head_root"] = found.copied.head_size, found.copied.head_root.hex()
    if as_json:
        emit_json(done)
    elif not done["moved"]:
        typer.echo(f"the journal is in {done['place']} already")
    else:
        typer.echo(f"the journal is in {done['place']}: {done['events']} events, compared")
        if done["left"]:
            typer.echo(f"{done['left']} was left as it was; remove it when you are sure")


def backup(
    folder: Path = typer.Argument(..., metavar="DIR", help="A run folder; its coordinator may be running."),
    target: Path = typer.Argument(..., metavar="BACKUP", help="A folder to make."),
    as_json: bool = JSON,
) -> None:
    """Copy a run, whole and consistent, while it goes on. The copy holds the run's key: keep it safe.

    All of it is checked: events by their checksums, the ledger by its newest signed head. BACKUP
    appears when it is complete. See 'restore' for what it can and cannot bring back.
    """
    from barnraise.coordinator.backup import back_up

    done = back_up(folder, target, _now_ms(), _progress(as_json))
    made = done.backup
    if as_json:
        fields = {"path": str(done.path), "size": done.size, "files": len(made.files), "run_id": made.run_id}
        fields |= {"events": made.events, "ledger_size": made.ledger_size, "ledger_root": made.ledger_root}
        emit_json({**fields, "version": made.version, "events_digest": made.events_digest})
    else:
        typer.echo(
            f"{done.path}: {size(done.size)}, {made.events} events, {made.ledger_size} ledger entries, "
            f"version {made.version}; it holds the run's key"
        )


def restore(
    source: Path = typer.Argument(..., metavar="BACKUP", help="A folder made by 'coordinator backup'."),
    folder: Path = typer.Argument(..., metavar="DIR", help="The run folder to make."),
    same_run: bool = typer.Option(
        False,
        "--same-run",
        help="Go on as the same run: its coordinator was stopped before the backup, and not begun again.",
    ),
    checkpoint: list[Path] = typer.Option(
        [],
        "--checkpoint",
        metavar="FILE|DIR",
        help="What was published last: a checkpoint, a mirror's or run's log folder; may be repeated.",
    ),
    store: str = typer.Option(
        "", "--store", metavar="URL", help="postgresql://... for the journal. [default: SQLite]"
    ),
    as_json: bool = JSON,
) -> None:
    """Make a run folder out of a backup: a new run that continues the old one, unless --same-run.

    What was acknowledged after a backup is not in it, and numbers that were signed must not be
    signed again. So the run gets a new id, a new ledger and new invites; the old ledger, as far as
    the backup goes, lies in DIR/before. With --same-run it goes on as it was, which is refused if a
    checkpoint shows that anything was published since.
    """
    from barnraise.coordinator.restore import restore as make

    done = make(
        source,
        folder,
        _now_ms(),
        same_run=same_run,
        checkpoints=[_note(path) for path in checkpoint],
        store=store,
        progress=_progress(as_json),
    )
    if as_json:
        fields = {"run_id": done.run_id.hex(), "same_run": done.same_run, "place": done.place}
        emit_json({**fields, "continues": done.backup.run_id, "missing_entries": done.missing})
        return
    made = done.backup
    typer.echo(f"{folder}: {made.events} events and {made.ledger_size} ledger entries were checked")
    if done.same_run:
        typer.echo(f"it goes on as run {made.run_id[:16]} from version {made.version}")
        return
    typer.echo(f"run {done.run_id.hex()[:16]} continues {made.run_id[:16]} from version {made.version}")
    lost = f"at least {done.missing} ledger entries that" if done.missing else "whatever"
    typer.echo(
        f"lost: {lost} came after the backup. Credit until then stands in "
        f"{folder / 'before/ledger.bin'}; nodes join anew"
    )


def export_versions(
    folder: Path = typer.Argument(..., metavar="DIR", help="A run folder; its coordinator may be running."),
    url: str = typer.Argument(
        ..., metavar="URL", help="s3://bucket/run, file:///srv/run or what fsspec knows."
    ),
    newest: int = typer.Option(3, "--keep", metavar="N", min=1, help="How many of the newest versions."),
    also: list[int] = typer.Option(
        [0], "--keep-version", metavar="VERSION", help="One to keep for good; may be repeated."
    ),
    every: float | None = typer.Option(
        None, "--every", metavar="SECONDS", min=0.5, max=86_400, help="Go on, until Ctrl-C (default: once)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line."),
) -> None:
    """Copy finished versions, optimiser included, to object storage, and remove old ones there.

    Only what is durable here goes out, and only whole versions count there. Keys come from the
    environment, as for any program that uses fsspec (for s3: AWS_ACCESS_KEY_ID and so on).
    """
    from barnraise.coordinator.objects import ObjectStore, keep_versions

    store = ObjectStore(url)
    for _ in rounds(every):
        try:
            done = keep_versions(store, folder, newest, also)
        except BarnraiseError as error:
            if every is None:
                raise
            typer.echo(str(error), err=True)  # tried again in time
        else:
            if as_json:
                emit_json(done._asdict())
            elif done.copied or done.removed or every is None:
                typer.echo(
                    f"{store.shown}: versions {done.there}; copied {done.copied}, removed {done.removed}"
                )


def fetch_version(
    folder: Path = typer.Argument(..., metavar="DIR", help="The run folder to put it into."),
    url: str = typer.Argument(..., metavar="URL", help="As for 'export-versions'."),
    version: int = typer.Argument(..., metavar="VERSION", min=0, help="Which."),
    as_json: bool = JSON,
) -> None:
    """Bring one version back from object storage, compared with what was put there. Stop the coordinator."""
    from barnraise.coordinator.folder import locked
    from barnraise.coordinator.objects import ObjectStore

    with locked(folder):
        path = ObjectStore(url).fetch(version, folder)
    if as_json:
        emit_json({"version": version, "path": str(path)})
    else:
        typer.echo(f"version {version} is in {path}")


def register(app: typer.Typer) -> None:
    """Add these commands to ``barnraise coordinator``."""
    url = "postgresql://barnraise@db.example/runs"
    app.command(
        short_help="Move a run's journal to PostgreSQL, or back.",
        epilog=examples(
            f"coordinator migrate ./my-run --to {url}", "coordinator migrate ./my-run --to sqlite"
        ),
    )(migrate)
    app.command(
        short_help="Copy a run while it goes on.", epilog=examples("coordinator backup ./my-run ./backup-1")
    )(backup)
    app.command(
        short_help="Make a run folder out of a backup.",
        epilog=examples(
            "coordinator restore ./backup-1 ./my-run --checkpoint /srv/www/my-run/log",
            "coordinator restore ./backup-1 ./my-run --same-run      (its coordinator was stopped first)",
        ),
    )(restore)
    app.command(
        "export-versions",
        short_help="Copy finished versions to object storage.",
        epilog=examples("coordinator export-versions ./my-run s3://bucket/my-run --keep 5 --every 60"),
    )(export_versions)
    app.command(
        "fetch-version",
        short_help="Bring a version back from object storage.",
        epilog=examples("coordinator fetch-version ./my-run s3://bucket/my-run 12"),
    )(fetch_version)


def _note(path: Path) -> bytes:
    places = [path, path / CHECKPOINT, path / "log" / CHECKPOINT]
    for place in places:
        if place.is_file():
            return place.read_bytes()[: MAX_NOTE + 1]
    raise typer.BadParameter(f"{path} holds no checkpoint", param_hint="--checkpoint")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _progress(as_json: bool) -> Progress:
    """To standard error, now and then."""
    last = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        if as_json or time.monotonic() - last < TELL_EVERY_S:
            return
        last = time.monotonic()
        typer.echo(f"{what}: {done}{f' of {total}' if total else ''}", err=True)

    return tell
