"""transformers probes for a top-level module ``kernels``; ours must never be taken for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent

RUN_A_MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import barnraise.kernels.models
config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():
    print(tuple(model(torch.tensor([[1, 2, 3]])).logits.shape))
"""


def test_transformers_runs_a_model_with_the_checkout_as_working_directory() -> None:
    # ``-c`` puts the working directory, and so the bare folder ``kernels``, first on the path.
    done = subprocess.run([sys.executable, "-c", RUN_A_MODEL], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("(1, 3, 8)")


def test_outside_of_the_checkout_there_is_no_top_level_kernels(tmp_path: Path) -> None:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('kernels') is not None)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_the_package_files_that_a_probe_could_import_are_empty() -> None:
    for name in ("kernels", "protocol", "node", "coordinator", "tui"):
        text = (CHECKOUT / name / "__init__.py").read_text()
        assert "import" not in text
        assert "__version__" not in text
