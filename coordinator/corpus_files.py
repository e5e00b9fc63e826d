"""From text files to a corpus that a run can name: documents, tokenizer, packed token shards.

::

    CORPUS/corpus.bin       the canonical description; its SHA-256 is what the run spec names
    CORPUS/tokenizer.json   the tokenizer that made the ids
    CORPUS/shards/HEX       token shards, named by their SHA-256

Documents are told apart as held out or not by a hash of their text, so that the split
survives files being added. Each ends with the end-of-text token; what does not fill a
last shard is left out. One pass over the text, memory bounded by one document.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from barnraise.kernels.token_shards import CorpusError, read_tokens
from barnraise.protocol.corpus import Corpus, corpus_bytes, read_corpus
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import MalformedError, StorageError

DESCRIPTION, TOKENIZER, SHARDS = "corpus.bin", "tokenizer.json", "shards"
END_OF_TEXT = "<|endoftext|>"
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".tex", ".py"})
SAMPLE_BYTES = 64 * 1024 * 1024  # of text that a new tokenizer is trained on
MAX_DOCUMENT = 64 * 1024 * 1024
HELD_OUT_SHARE = 0.05

Progress = Callable[[str, float], None]


def prepare(
    sources: Sequence[Path],
    out: Path,
    *,
    name: str,
    licence: str,
    source: str,
    vocabulary: int = 4096,
    tokenizer: Path | None = None,
    shard_tokens: int = 65_536,
    progress: Progress = lambda subject, fraction: None,
) -> Corpus:
    """Make the corpus folder ``out`` from text files, folders of them, or Parquet files.

    Args:
        tokenizer: a tokenizer.json to use; None trains a byte-level BPE of ``vocabulary`` entries.
        shard_tokens: tokens per shard; blocks with disjoint data need at least one shard each.

    Raises:
        CorpusError: no text, too little of it, an unknown kind of file, or ``out`` is in use.
        StorageError: the disk refuses. ``out`` appears whole or not at all.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CorpusError(f"{out} exists and is not an empty folder: choose another, or remove it")
    files = list(_files(sources))
    if not files:
        raise CorpusError(
            f"no text under {', '.join(map(str, sources))}: "
            f"files end in {', '.join(sorted(TEXT_SUFFIXES))} or .parquet"
        )
    total = sum(path.stat().st_size for path in files)
    part = out.with_name(f".{out.name}-{os.getpid()}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        (part / SHARDS).mkdir(parents=True)
        if tokenizer is None:
            progress("training the tokenizer", 0.0)
            made = _train_tokenizer(files, vocabulary)
        else:
            made = _read_tokenizer(tokenizer)
        made.save(str(part / TOKENIZER))
        corpus = _pack(files, total, made, part, shard_tokens, (name, licence, source), progress)
        _write(part / DESCRIPTION, corpus_bytes(corpus))
        sync_folder(part)
        if out.exists():
            out.rmdir()
        part.rename(out)
    except MalformedError as error:
        raise CorpusError(str(error)) from error
    except OSError as error:
        raise StorageError(f"cannot make the corpus {out}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return corpus


def open_corpus(folder: Path) -> Corpus:
    """The description in a corpus folder, checked; its shards are looked at when they are read.

    Raises:
        CorpusError: no corpus folder, or a damaged one.
    """
    try:
        return read_corpus((folder / DESCRIPTION).read_bytes())
    except FileNotFoundError:
        raise CorpusError(f"{folder} is no corpus: make one with `barnraise data prepare`") from None
    except (OSError, MalformedError) as error:
        raise CorpusError(
            f"{folder / DESCRIPTION} cannot be read: {error}; prepare the corpus again"
        ) from error


def check_shards(folder: Path, corpus: Corpus) -> None:
    """Re-hash every shard, and read it: a description from a stranger may name shards that are none.

    Raises:
        CorpusError: one is missing or damaged, of another size, or has a token outside the vocabulary.
    """
    for digest in (*corpus.train, *corpus.held_out):
        path = shard_path(folder, digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"{path} cannot be read: {error}; prepare the corpus again") from error
        if hashlib.sha256(data).digest() != digest:
            raise CorpusError(f"{path} is damaged: prepare the corpus again")
        try:
            read_tokens(corpus, data)
        except CorpusError as error:
            raise CorpusError(f"{path} is no shard of {corpus.name}: {error}; prepare it again") from None


def shard_path(folder: Path, digest: bytes) -> Path:
    """Where a corpus folder keeps a shard."""
    return folder / SHARDS / digest.hex()


def documents(path: Path) -> Iterator[str]:
    """The texts in a file: a text file is one, a row's ``text`` column in a Parquet file each.

    Raises:
        CorpusError: a Parquet file without such a column, or nothing installed to read it.
    """
    if path.suffix != ".parquet":
        yield path.read_bytes()[:MAX_DOCUMENT].decode("utf-8", errors="replace")
        return
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise CorpusError(
            f"{path} is a Parquet file, which needs pyarrow: pip install 'barnraise[parquet]'"
        ) from None
    try:
        with ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise CorpusError(
                    f"{path} has no column 'text', only {', '.join(file.schema_arrow.names[:8])}: rename one"
                )
            for batch in file.iter_batches(columns=["text"], batch_size=256):
                yield from (str(value) for value in batch.column(0).to_pylist() if value)
    except ArrowException as error:
        raise CorpusError(f"{path} is no readable Parquet file: {error}") from error


def _files(sources: Iterable[Path]) -> Iterator[Path]:
    known = TEXT_SUFFIXES | {".parquet"}
    for source in sources:
        if source.is_dir():
            yield from sorted(path for path in source.rglob("*") if path.suffix in known and path.is_file())
        elif source.is_file() and source.suffix in known:
            yield source
        elif source.is_file():
            raise CorpusError(f"{source}: text files end in {', '.join(sorted(known))}")
        else:
            raise CorpusError(f"{source} does not exist")


def _train_tokenizer(files: Sequence[Path], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # spread over all files, so that the first folder does not decide the vocabulary
    share = max(1, sum(path.stat().st_size for path in files) // SAMPLE_BYTES)
    texts = chain.from_iterable(documents(path) for path in files[:: min(share, len(files))])
    tokenizer.train_from_iterator(_lines(texts), trainer)
    if tokenizer.get_vocab_size() < 257:
        raise CorpusError(f"a vocabulary of {vocabulary} leaves no room: ask for at least 257")
    return tokenizer


def _lines(texts: Iterable[str]) -> Iterator[str]:
    size = 0
    for text in texts:
        for line in text.splitlines(keepends=True):
            size += len(line)
            if size > SAMPLE_BYTES:
                return
            yield line


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CorpusError(f"{path} is no tokenizer.json: {error}") from error


def _pack(
    files: Sequence[Path],
    total: int,
    tokenizer: Tokenizer,
    part: Path,
    shard_tokens: int,
    words: tuple[str, str, str],
    progress: Progress,
) -> Corpus:
    vocabulary = tokenizer.get_vocab_size()
    width = 2 if vocabulary <= 2**16 else 4
    end = end_token(tokenizer)
    shards: dict[bool, list[bytes]] = {False: [], True: []}
    rest: dict[bool, list[int]] = {False: [], True: []}
    seen: set[bytes] = set()  # a repeated shard would be drawn twice in an epoch
    done = 0
    for path in files:
        for text in documents(path):
            held_out = is_held_out(text)
            ids = [*rest[held_out], *tokenizer.encode(text, add_special_tokens=False).ids, end]
            full = len(ids) - len(ids) % shard_tokens
            for start in range(0, full, shard_tokens):
                data = np.array(ids[start : start + shard_tokens], dtype=f"<u{width}").tobytes()
                digest = hashlib.sha256(data).digest()
                if digest not in seen:
                    seen.add(digest)
                    _write(shard_path(part, digest), data)
                    shards[held_out].append(digest)
            rest[held_out] = ids[full:]
        done += path.stat().st_size
        progress("packing tokens", done / max(1, total))
    if not shards[False] or not shards[True]:
        found = len(rest[False]) + shard_tokens * len(shards[False])
        spare = len(rest[True]) + shard_tokens * len(shards[True])
        raise CorpusError(
            f"{found} tokens to train on and {spare} held out do not fill a shard of {shard_tokens} each: "
            "give more text, or smaller shards"
        )
    name, licence, source = words
    return Corpus(
        format=1,
        name=name,
        licence=licence,
        source=source,
        tokenizer=hashlib.sha256((part / TOKENIZER).read_bytes()).digest(),
        vocabulary=vocabulary,
        width=2 if width == 2 else 4,
        shard_tokens=shard_tokens,
        train=tuple(shards[False]),
        held_out=tuple(shards[True]),
    )


def is_held_out(text: str) -> bool:
    """Whether a document is kept for evaluation: by its content alone."""
    digest = hashlib.sha256(b"barnraise/1/held-out-text\0" + text.encode("utf-8", errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def end_token(tokenizer: Tokenizer) -> int:
    """The id that ends a document. Raises CorpusError if no token of a known name does."""
    for text in (END_OF_TEXT, "</s>", "<eos>", "<|im_end|>", "<end_of_turn>"):
        token = tokenizer.token_to_id(text)
        if token is not None:
            return int(token)
    raise CorpusError("the tokenizer has no end-of-text token that is known here")


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def safe_name(text: str) -> str:
    """A corpus name from a folder's: letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-")[:64] or "corpus"
