"""A model from nothing, by real processes: text in, two blocks by two volunteers, a model out, a report."""

import json
from pathlib import Path

import pytest
from e2e_support import Place, call
from safetensors import safe_open

from barnraise.coordinator.demo_corpus import SEQUENCE, prepare_demo_corpus
from barnraise.node.receipts import read_receipts
from barnraise.protocol.ledger_file import verify_ledger_file

# In short: test_block_coordinator (the children), test_block_node (nodes and coordinator in memory).
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


def test_two_volunteers_pretrain_a_model_that_transformers_loads(tmp_path: Path) -> None:
    prepare_demo_corpus(tmp_path / "corpus", 0, documents=300)
    config = {
        "model_type": "qwen3",
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    run = tmp_path / "run"
    made = call(
        *("run", "init", str(run), "--phase", "pretrain", "--model", str(tmp_path / "config")),
        *("--corpus", str(tmp_path / "corpus"), "--sequence", str(SEQUENCE), "--batch", "16"),
        *("--scaffold-steps", "12", "--rounds", "2", "--steps", "6", "--adapt-steps", "8"),
    )
    assert made.returncode == 0, made.stderr
    here = Place(tmp_path, run)
    try:
        address = here.coordinator()
        for name in ("node-1", "node-2"):
            here.node(name, address)
        final = here.wait(run, lambda state: state["complete"])
        beside = call("report", str(run), "--json")  # while the coordinator runs
        shown = call("status", str(run), "--json")
        for name in ("node-1", "node-2"):  # every verdict reaches its node
            here.wait(tmp_path / name, lambda state: state["awaiting_verdict"] == 0 and state["pending"] == 0)
    finally:
        here.stop()
    assert final["policy_version"] == 3
    assert final["rejected"] == 0
    assert json.loads(shown.stdout)["complete"] is True
    assert beside.returncode == 0, beside.stderr
    told = json.loads(beside.stdout)
    assert [unit["accepted"] for unit in told["units"]] == [True] * 4
    assert all(unit["losses"] and unit["used"] for unit in told["units"])
    assert {unit["block"] for unit in told["units"]} == {0, 1}
    assert len(told["rounds"]) == 2
    assert told["adapted_perplexity"] < told["cold_perplexity"]
    assert told["critical_path_s"] <= told["serial_s"]
    assert {Path(path).name for path in told["plots"]} >= {"losses.png", "perplexity.png", "seams.png"}
    assert call("ledger", "export", str(run), str(tmp_path / "ledger.bin")).returncode == 0
    receipts = [
        signed for path in tmp_path.glob("node-*/runs/*/receipts.bin") for signed in read_receipts(path)
    ]
    ledger = verify_ledger_file(tmp_path / "ledger.bin", receipts)
    assert ledger.problems == ()
    assert len(receipts) == ledger.accepted == final["accepted"]
    _loads(run / "checkpoints" / "v000003")
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("*.log"))


def _loads(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    assert not info["missing_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert model.config.vocab_size >= len(tokenizer)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
