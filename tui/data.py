"""``barnraise data``: corpora for pretraining."""

from __future__ import annotations

from pathlib import Path

import typer

from barnraise.tui.console import Progress, emit_json, examples, print_rows

app = typer.Typer(
    help="Prepare text for pretraining.",
    epilog=examples("data prepare ./corpus --from python-docs"),
    no_args_is_help=True,
)


@app.callback()
def group() -> None:
    """Prepare text for pretraining."""


@app.command(
    short_help="Make a corpus: tokenizer and token shards.",
    epilog=examples(
        "data prepare ./corpus --from python-docs",
        "data prepare ./corpus ./books ./notes.parquet --licence 'CC BY 4.0'",
        "data prepare ./corpus ./books --tokenizer ./Qwen3-0.6B/tokenizer.json",
    ),
)
def prepare(
    out: Path = typer.Argument(..., metavar="DIR", help="The corpus folder to make."),
    sources: list[Path] = typer.Argument(
        None, metavar="[TEXT]...", help="Text files, Parquet files with a column 'text', or folders of both."
    ),
    builtin: str | None = typer.Option(
        None, "--from", metavar="NAME", help="A text that is fetched for you: python-docs (11 MB, PSF-2.0)."
    ),
    vocabulary: int = typer.Option(
        4096, "--vocabulary", metavar="N", min=257, max=262_144, help="Entries of the tokenizer made."
    ),
    tokenizer: Path | None = typer.Option(
        None, "--tokenizer", metavar="FILE", help="Use this tokenizer.json instead of making one."
    ),
    shard_tokens: int = typer.Option(
        65_536,
        "--shard-tokens",
        metavar="N",
        min=16,
        max=2**20,
        help="Tokens per shard; a unit reads whole shards.",
    ),
    name: str | None = typer.Option(None, "--name", metavar="TEXT", help="Its name (default: the folder's)."),
    licence: str = typer.Option(
        "unknown",
        "--licence",
        metavar="TEXT",
        help="Under what terms the text may be used; volunteers see it.",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object as the last line."),
) -> None:
    """Tokenise text, hold a twentieth of the documents out, and pack the rest into shards.

    Everything that volunteers will read is public: they fetch the shards from the swarm.
    """
    from barnraise.coordinator import corpus_files
    from barnraise.coordinator.corpus_sources import SOURCES, fetched

    if bool(sources) == bool(builtin):
        raise typer.BadParameter("give either text files or folders, or --from NAME")
    if builtin is not None and builtin not in SOURCES:
        raise typer.BadParameter(f"known texts: {', '.join(SOURCES)}", param_hint="--from")
    progress = Progress()
    settings = {"vocabulary": vocabulary, "tokenizer": tokenizer, "shard_tokens": shard_tokens}
    name = corpus_files.safe_name(name or builtin or out.absolute().name)
    if builtin is not None:
        source = SOURCES[builtin]
        with fetched(source, progress) as folder:
            corpus = corpus_files.prepare(
                [folder],
                out,
                name=name,
                licence=source.licence,
                source=source.origin,
                progress=progress,
                **settings,  # type: ignore[arg-type]
            )
    else:
        origin = ", ".join(path.name for path in sources)[:500]
        corpus = corpus_files.prepare(
            sources,
            out,
            name=name,
            licence=licence[:500],
            source=origin,
            progress=progress,
            **settings,  # type: ignore[arg-type]
        )
    _describe(out, corpus, as_json)


@app.command(short_help="What a corpus holds.", epilog=examples("data show ./corpus"))
def show(
    folder: Path = typer.Argument(..., metavar="DIR", help="A corpus folder."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Size, licence and name of a corpus, and whether every shard is there and undamaged."""
    from barnraise.coordinator import corpus_files

    corpus = corpus_files.open_corpus(folder)
    corpus_files.check_shards(folder, corpus)
    _describe(folder, corpus, as_json)


def _describe(folder: Path, corpus: object, as_json: bool) -> None:
    from barnraise.protocol.corpus import Corpus, corpus_digest

    assert isinstance(corpus, Corpus)
    train, held_out = (len(shards) * corpus.shard_tokens for shards in (corpus.train, corpus.held_out))
    if as_json:
        emit_json(
            {
                "folder": str(folder),
                "corpus": corpus_digest(corpus).hex(),
                "name": corpus.name,
                "vocabulary": corpus.vocabulary,
                "train_tokens": train,
                "held_out_tokens": held_out,
                "shards": len(corpus.train) + len(corpus.held_out),
                "licence": corpus.licence,
            }
        )
        return
    print_rows(
        [
            ("corpus", f"{corpus.name}  {corpus_digest(corpus).hex()[:16]}"),
            ("tokens", f"{train:,} to train on, {held_out:,} held out"),
            ("shards", f"{len(corpus.train) + len(corpus.held_out)} of {corpus.shard_tokens:,} tokens"),
            ("vocabulary", f"{corpus.vocabulary:,}"),
            ("source", corpus.source),
            ("licence", corpus.licence),
        ]
    )
