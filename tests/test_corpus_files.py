"""Text becomes a corpus: whole or not at all, documents held out by content, text read back as written."""

from __future__ import annotations

import json
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from barnraise.coordinator import corpus_files
from barnraise.coordinator.corpus_files import (
    check_shards,
    is_held_out,
    open_corpus,
    prepare,
    shard_path,
)
from barnraise.coordinator.corpus_sources import _unpack_text
from barnraise.kernels.token_shards import CorpusError, batches, held_out, read_tokens
from barnraise.protocol.corpus import Corpus, sequences
from barnraise.tui.main import main

WORDS = {"name": "test", "licence": "CC0", "source": "made up"}


def write_texts(folder: Path, count: int = 60) -> list[str]:
    folder.mkdir()
    texts = [f"Document {number}: " + f"the {number} barns were raised. " * 12 for number in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return texts


def made(tmp_path: Path, **changes: Any) -> tuple[Corpus, list[str]]:
    texts = write_texts(tmp_path / "texts")
    settings: dict[str, Any] = {"vocabulary": 300, "shard_tokens": 32} | changes
    return prepare([tmp_path / "texts"], tmp_path / "corpus", **WORDS, **settings), texts


def decoded(folder: Path, digests: tuple[bytes, ...], corpus: Corpus) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [read_tokens(corpus, shard_path(folder, digest).read_bytes()) for digest in digests]
    text: str = tokenizer.decode(np.concatenate(ids).tolist(), skip_special_tokens=False)
    return text


def test_a_corpus_holds_the_text_in_order_and_keeps_held_out_documents_apart(tmp_path: Path) -> None:
    corpus, texts = made(tmp_path)
    folder = tmp_path / "corpus"
    assert open_corpus(folder) == corpus
    check_shards(folder, corpus)
    for kept, shards in ((False, corpus.train), (True, corpus.held_out)):
        wanted = "".join(text + "<|endoftext|>" for text in texts if is_held_out(text) is kept)
        found = decoded(folder, shards, corpus)
        assert wanted.startswith(found)
        assert len(found) > len(wanted) / 2


def test_the_same_text_makes_the_same_corpus(tmp_path: Path) -> None:
    corpus, _ = made(tmp_path)
    again = prepare([tmp_path / "texts"], tmp_path / "again", **WORDS, vocabulary=300, shard_tokens=32)
    assert again == corpus


def test_adding_files_moves_no_document_across_the_split(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    assert 0 < sum(map(is_held_out, texts)) < len(texts) / 2


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    texts = write_texts(tmp_path / "texts")
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "rows.parquet")
    of_rows = prepare([tmp_path / "rows.parquet"], tmp_path / "a", **WORDS, vocabulary=300, shard_tokens=32)
    of_files = prepare([tmp_path / "texts"], tmp_path / "b", **WORDS, vocabulary=300, shard_tokens=32)
    assert of_rows.train == of_files.train
    parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "other.parquet")
    with pytest.raises(CorpusError, match="'text'"):
        prepare([tmp_path / "other.parquet"], tmp_path / "c", **WORDS)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(CorpusError, match=r"bad\.parquet"):
        prepare([tmp_path / "bad.parquet"], tmp_path / "d", **WORDS)
    assert not any((tmp_path / name).exists() for name in "cd")


def test_a_given_tokenizer_is_used(tmp_path: Path) -> None:
    corpus, _ = made(tmp_path)
    given = tmp_path / "corpus" / "tokenizer.json"
    again = prepare([tmp_path / "texts"], tmp_path / "again", **WORDS, tokenizer=given, shard_tokens=32)
    assert (again.tokenizer, again.train) == (corpus.tokenizer, corpus.train)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"no tokenizer\.json"):
        prepare([tmp_path / "texts"], tmp_path / "x", **WORDS, tokenizer=tmp_path / "bad.json")


@pytest.mark.parametrize("case", ["nothing", "missing", "kind", "little", "in use"])
def test_what_makes_no_corpus_is_refused_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    source, out = tmp_path / "texts", tmp_path / "corpus"
    if case == "nothing":
        source.mkdir()
    elif case == "kind":
        source = tmp_path / "a.pdf"
        source.write_bytes(b"%PDF")
    elif case == "little":
        write_texts(source, 2)
    elif case == "in use":
        write_texts(source)
        out.mkdir()
        (out / "mine").write_text("x")
    with pytest.raises(CorpusError):
        prepare([source], out, **WORDS, vocabulary=300, shard_tokens=32)
    assert sorted(path.name for path in tmp_path.iterdir() if "corpus" in path.name) == (
        ["corpus"] if case == "in use" else []
    )


@pytest.mark.parametrize(("data", "cause"), [(b"\xff" * 64, "vocabulary"), (b"\x00" * 62, "62 bytes")])
def test_a_strangers_corpus_whose_shards_are_none_is_refused(tmp_path: Path, data: bytes, cause: str) -> None:
    """Named by its right digest, so that only its content tells: every node would fail on it."""
    corpus, _ = made(tmp_path)
    digest = sha256(data).digest()
    lying = msgspec.structs.replace(corpus, train=(*corpus.train, digest))
    shard_path(tmp_path / "corpus", digest).write_bytes(data)
    with pytest.raises(CorpusError, match=cause):
        check_shards(tmp_path / "corpus", lying)


def test_a_damaged_corpus_says_what_is_wrong(tmp_path: Path) -> None:
    corpus, _ = made(tmp_path)
    folder = tmp_path / "corpus"
    shard = shard_path(folder, corpus.train[0])
    data = shard.read_bytes()
    shard.write_bytes(b"\xff" + data[1:])
    with pytest.raises(CorpusError, match="damaged"):
        check_shards(folder, corpus)
    with pytest.raises(CorpusError, match="vocabulary"):
        read_tokens(corpus, b"\xff" * len(data))
    with pytest.raises(CorpusError, match="bytes"):
        read_tokens(corpus, data[:-1])
    (folder / "corpus.bin").write_bytes(b"junk")
    with pytest.raises(CorpusError, match="prepare the corpus again"):
        open_corpus(folder)
    with pytest.raises(CorpusError, match="data prepare"):
        open_corpus(tmp_path)


def test_a_repeated_shard_is_kept_once(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "same.txt").write_text("a" * 4000)
    write_texts(tmp_path / "texts" / "more")
    corpus = prepare([tmp_path / "texts"], tmp_path / "corpus", **WORDS, vocabulary=257, shard_tokens=64)
    assert len(set(corpus.train)) == len(corpus.train)


def test_an_archive_chooses_no_path(tmp_path: Path) -> None:
    (tmp_path / "evil.txt").write_text("evil")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "evil.txt", arcname="../../outside.txt")
        tar.add(tmp_path / "evil.txt", arcname="/absolute.txt")
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    _unpack_text(tmp_path / "a.tar", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000000.txt", "000001.txt"]


def test_the_command_makes_and_shows_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path / "texts")
    out = tmp_path / "corpus"
    arguments = ["data", "prepare", str(out), str(tmp_path / "texts"), "--licence", "CC0"]
    assert main([*arguments, "--vocabulary", "300", "--shard-tokens", "32", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["licence"] == "CC0"
    assert said["train_tokens"] == 32 * len(open_corpus(out).train)
    assert main(["data", "show", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corpus"] == said["corpus"]
    assert main(["data", "prepare", str(out), str(tmp_path / "texts")]) == 1
    assert "choose another" in capsys.readouterr().err
    assert main(["data", "prepare", str(tmp_path / "x")]) == 2
    assert main(["data", "prepare", str(tmp_path / "x"), "--from", "moon"]) == 2


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    _, _ = made(tmp_path)
    data = json.loads((tmp_path / "corpus" / "tokenizer.json").read_text())
    data["added_tokens"] = []
    data["model"]["vocab"] = {
        text: number for text, number in data["model"]["vocab"].items() if text != corpus_files.END_OF_TEXT
    }
    (tmp_path / "endless.json").write_text(json.dumps(data))
    with pytest.raises(CorpusError, match="end-of-text"):
        prepare([tmp_path / "texts"], tmp_path / "x", **WORDS, tokenizer=tmp_path / "endless.json")


def test_batches_are_the_sequences_that_the_stream_names(tmp_path: Path) -> None:
    corpus, _ = made(tmp_path)

    def get(digest: bytes) -> bytes:
        return shard_path(tmp_path / "corpus", digest).read_bytes()

    places = sequences(corpus, 8, bytes(32), 0, 1, 0, 7)
    found = list(batches(corpus, 8, places, 3, get))
    assert [tuple(batch.shape) for batch in found] == [(3, 8), (3, 8)]
    shard, first = places[4]
    assert found[1][1].tolist() == read_tokens(corpus, get(corpus.train[shard]))[first : first + 8].tolist()
    spare = held_out(corpus, 8, 5, get, batch=2)
    assert [len(batch) for batch in spare] == [2, 2, 1]
    assert sum(map(len, held_out(corpus, 8, 10**6, get))) == 4 * len(corpus.held_out)
