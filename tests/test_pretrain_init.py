"""``barnraise run init --phase pretrain``: a run without weights, every mistake named in time."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from barnraise.coordinator.corpus_files import open_corpus, prepare
from barnraise.coordinator.demo_corpus import SEQUENCE, prepare_demo_corpus
from barnraise.coordinator.folder import open_run, read_spec
from barnraise.coordinator.pretrain_presets import (
    SIZES,
    Choices,
    Counts,
    Size,
    check_text,
    scaffold_depth,
    schedule,
)
from barnraise.kernels.demo_model import write_tokenizer
from barnraise.kernels.models import build_model, read_config
from barnraise.kernels.mot import make_cut, scaffold_config
from barnraise.kernels.token_shards import batches
from barnraise.protocol.corpus import corpus_digest, sequences
from barnraise.protocol.environments import is_held_out
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.pretrain import model_version, segments
from barnraise.tui import demo
from barnraise.tui import main as command_line


def init(*arguments: object) -> int:
    return command_line.main(["run", "init", *map(str, arguments), "--json"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))) for _ in range(300)]
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(words, k=400)))
    prepare(
        [folder],
        folder / "out",
        name="words",
        licence="CC0-1.0",
        source="test",
        vocabulary=300,
        shard_tokens=512,
    )
    return folder / "out"


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_run_without_weights_is_made_and_opens(tmp_path: Path, corpus: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    assert init(run, "--phase", "pretrain", "--model", "tiny", "--corpus", corpus) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    with open_run(run) as opened:
        spec = opened.spec.pretrain
        assert opened.spec.phase == "pretrain"
        assert spec is not None
        assert spec.corpus == corpus_digest(open_corpus(corpus)) == corpus_digest(open_corpus(run / "corpus"))
        assert opened.spec.rollout.versions == model_version(spec) == told["versions"]
        assert opened.run_id.hex() == told["run_id"]
        assert opened.spec.model.parameters == told["parameters"] > 1_000_000
    names = {path.name for path in (run / "checkpoints" / "v000000").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert told["notes"]  # so little text is read many times over


def test_transformers_reads_the_folder_and_counts_the_same(tmp_path: Path, corpus: Path) -> None:
    from transformers import AutoTokenizer

    assert init(tmp_path / "run", "--phase", "pretrain", "--model", "tiny", "--corpus", corpus) == 0
    folder = tmp_path / "run" / "checkpoints" / "v000000"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    spec = read_spec(tmp_path / "run")[0]
    assert tokenizer.eos_token_id == spec.model.eos_token
    assert tokenizer.eos_token == "<|endoftext|>"
    model = build_model(read_config(folder), torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.model.parameters


def test_any_decoders_config_can_be_named(tmp_path: Path, corpus: Path, config_folder: Path) -> None:
    options = ("--sequence", "32", "--blocks", "3", "--scaffold-layers", "3", "--contributors", "2")
    arguments = ("--phase", "pretrain", "--model", config_folder, "--corpus", corpus, *options)
    assert init(tmp_path / "run", *arguments) == 0
    spec = read_spec(tmp_path / "run")[0].pretrain
    assert spec is not None
    assert (spec.blocks, spec.scaffold_layers, spec.contributors, spec.quorum) == (3, 3, 2, 1)
    assert (spec.outer_rate, spec.outer_momentum) == (0.7, 0.9)
    assert len(segments(spec)) <= 8


def test_a_run_can_go_on_to_post_training(tmp_path: Path, corpus: Path) -> None:
    arguments = ("--phase", "pretrain", "--model", "tiny", "--corpus", corpus, "--then-posttrain")
    assert init(tmp_path / "run", *arguments, "--environment", "chain_sum", "--versions", "5") == 0
    spec = read_spec(tmp_path / "run")[0]
    assert spec.pretrain is not None
    assert spec.rollout.versions == model_version(spec.pretrain) + 5
    assert spec.environment.prompt_format == "plain"


def test_an_earlier_runs_scaffold_is_taken_by_its_hash(
    tmp_path: Path, corpus: Path, config_folder: Path
) -> None:
    config = read_config(config_folder)
    model = build_model(scaffold_config(config, make_cut(6, 2, 2)), torch.float32, seed=0)
    file = tmp_path / "earlier" / "checkpoints" / "v000000" / "model-00001-of-00003.safetensors"
    file.parent.mkdir(parents=True)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, file)
    arguments = ("--phase", "pretrain", "--model", config_folder, "--corpus", corpus, "--sequence", "32")
    assert init(tmp_path / "run", *arguments, "--scaffold", tmp_path / "earlier") == 0
    spec = read_spec(tmp_path / "run")[0].pretrain
    assert spec is not None
    assert spec.scaffold_layers == 2  # read off the file
    assert spec.scaffold_recipe.steps == 0
    assert (tmp_path / "run" / "scaffold.safetensors").read_bytes() == file.read_bytes()


def test_a_scaffold_of_another_model_is_refused(
    tmp_path: Path, corpus: Path, config_folder: Path, capsys: Any
) -> None:
    file = tmp_path / "odd.safetensors"
    save_file({"model.layers.0.x": torch.zeros(1), "model.layers.1.x": torch.zeros(1)}, file)
    arguments = ("--phase", "pretrain", "--model", config_folder, "--corpus", corpus, "--sequence", "32")
    assert init(tmp_path / "run", *arguments, "--scaffold", file) == 2
    assert "does not hold a scaffold of 2 layers" in capsys.readouterr().err
    config = read_config(config_folder)
    model = build_model(scaffold_config(config, make_cut(6, 2, 2)), torch.float32, seed=0)
    save_file({name: p.detach() * float("nan") for name, p in model.named_parameters()}, file)
    assert init(tmp_path / "run", *arguments, "--scaffold", file) == 2
    assert "not made of finite numbers" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--model", "tiny"], "pretraining needs a text"),
        (["--model", "tiny", "--corpus", "NOWHERE"], "is no corpus"),
        (["--model", "huge", "--corpus", "CORPUS"], "there is no model 'huge' to pretrain"),
        (["--model", "tiny", "--corpus", "CORPUS", "--blocks", "9"], "cannot be cut into 9 blocks"),
        (["--model", "tiny", "--corpus", "CORPUS", "--scaffold-layers", "1"], "2 to 8 layers, not 1"),
        (["--model", "tiny", "--corpus", "CORPUS", "--quorum", "2"], "never reached"),
        (["--model", "tiny", "--corpus", "CORPUS", "--sequence", "513"], "512 tokens"),
        (["--model", "tiny", "--corpus", "CORPUS", "--init", "odd"], "none of grown, random"),
        (["--model", "CONFIG", "--corpus", "CORPUS", "--sequence", "65"], "the model takes 64 tokens"),
        (["--model", "NARROW", "--corpus", "CORPUS"], "only 200"),
        (["--model", "tiny", "--corpus", "CORPUS", "--scaffold", "NOWHERE"], "holds no scaffold"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_what_cannot_work_is_refused_in_one_line(
    options: list[str], cause: str, tmp_path: Path, corpus: Path, config_folder: Path, capsys: Any
) -> None:
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    config = json.loads((config_folder / "config.json").read_text()) | {"vocab_size": 200}
    (narrow / "config.json").write_text(json.dumps(config))
    places = {"CORPUS": corpus, "CONFIG": config_folder, "NARROW": narrow, "NOWHERE": tmp_path / "nowhere"}
    code = init(tmp_path / "run", "--phase", "pretrain", *(places.get(word, word) for word in options))
    complaint = capsys.readouterr().err.strip()
    assert code == 2
    assert cause in complaint
    assert "\n" not in complaint
    assert not (tmp_path / "run").exists()


def test_fewer_shards_than_disjoint_streams_are_refused(corpus: Path) -> None:
    one = msgspec.structs.replace(open_corpus(corpus), train=(bytes(32),))
    spec = schedule(SIZES["tiny"], Counts(8, 400_000, 800_000), bytes(32), Choices(), "float32")
    with pytest.raises(RunFolderError, match="--data shared"):
        check_text(spec, one)
    assert check_text(msgspec.structs.replace(spec, data="shared"), one)[0].startswith(
        "note: each block reads"
    )


def test_schedule_options_are_for_pretraining_only(tmp_path: Path, corpus: Path, capsys: Any) -> None:
    assert init(tmp_path / "run", "--corpus", corpus) == 2
    assert "--phase pretrain" in capsys.readouterr().err


def test_another_tokenizer_than_the_models_own_is_refused(
    tmp_path: Path, corpus: Path, config_folder: Path, capsys: Any
) -> None:
    write_tokenizer(config_folder)
    arguments = ("--phase", "pretrain", "--model", config_folder, "--corpus", corpus, "--sequence", "32")
    assert init(tmp_path / "run", *arguments) == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_the_demos_text_is_one_task_a_sequence_and_shows_no_held_out_one(tmp_path: Path) -> None:
    corpus = prepare_demo_corpus(tmp_path / "corpus", 0, documents=300)
    places = sequences(corpus, SEQUENCE, bytes(32), 0, 2, 0, 640)
    shards = tmp_path / "corpus" / "shards"
    rows = next(batches(corpus, SEQUENCE, places, 640, lambda digest: (shards / digest.hex()).read_bytes()))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "corpus" / "tokenizer.json"))
    reversals = 0
    for row in rows.tolist():
        text = tokenizer.decode(row[:-1], skip_special_tokens=False)
        letters, answer = text[1:6], text[7:]
        assert (text[0], text[6], row[-1]) == ("r", "=", 1)
        assert not is_held_out(letters)
        assert answer in (letters, letters[::-1])
        reversals += answer == letters[::-1]
    assert 0.2 < reversals / 640 < 0.5
    assert prepare_demo_corpus(tmp_path / "again", 0, documents=300) == corpus


def test_steps_follow_from_the_number_of_parameters_where_nobody_chose_them() -> None:
    size = Size(0, 0, 0, 0, 0, 100, 10, 0, 500, 0, 1e-3)
    spec = schedule(size, Counts(12, 400_000, 1_000_000), bytes(32), Choices(contributors=2), "float32")
    assert spec.rounds * spec.contributors * spec.steps * 1000 == 20 * 1_000_000
    assert spec.scaffold_recipe.steps * 1000 == 25 * 400_000
    assert spec.scaffold_layers == 6
    assert 0.25 <= spec.adapt.steps / (spec.rounds * spec.steps) <= 0.4
    alone = schedule(size, Counts(12, 400_000, 1_000_000), bytes(32), Choices(), "float32")
    assert (alone.outer_rate, alone.outer_momentum) == (1.0, 0.0)


def test_four_contributors_and_more_are_averaged_without_their_extremes() -> None:
    def trim(**choices: Any) -> float:
        made = schedule(SIZES["tiny"], Counts(8, 10**6, 10**6), bytes(32), Choices(**choices), "float32")
        return made.trim

    assert [trim(contributors=number) for number in (1, 3, 4, 8)] == [0.0, 0.0, 0.25, 0.25]
    assert trim(contributors=8, trim=0.0) == 0.0


def test_a_scaffold_is_half_as_deep_but_has_a_layer_for_every_block() -> None:
    assert scaffold_depth(12, 2, None) == 6
    assert scaffold_depth(4, 4, None) == 4
    with pytest.raises(RunFolderError, match="scaffold-layers"):
        scaffold_depth(12, 2, 13)


def test_a_throw_away_run_follows_from_its_seed_and_any_other_has_a_key_of_its_own(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {}
    for number, (seed, *more) in enumerate(
        [(0, "--throw-away"), (0, "--throw-away"), (1, "--throw-away"), (0,)]
    ):
        folder = tmp_path / str(number) / "run"
        options = ("--phase", "pretrain", "--model", "tiny", "--corpus", corpus, "--seed", seed, *more)
        assert init(folder, *options) == 0, capsys.readouterr().err
        made[number] = read_spec(folder)[2]
    assert made[0] == made[1]
    assert len(set(made.values())) == 3


@pytest.mark.parametrize("kept", [False, True])
def test_a_demo_that_is_kept_gets_a_key_that_nobody_can_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    asked: list[bool] = []

    def make(
        run: Path, model: str, phase: str, seed: int, versions: int, throw_away: bool, *more: object
    ) -> None:
        asked.append(throw_away)
        raise RunFolderError("enough")

    monkeypatch.setattr(demo, "_make_run", make)
    assert command_line.main(["demo", *(["--keep", str(tmp_path / "kept")] if kept else [])]) != 0
    assert asked == [not kept]
