"""The Triton kernel against the torch reference, in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install barnraise[gpu])"
)

PROGRAM = """
import torch
from barnraise.kernels.sampling import gumbel, philox4x32
from barnraise.kernels.sampling_triton import gumbel as fused, uniform_integers

seeds, positions = [0, 1, 0x0123456789ABCDEF, 2**64 - 1], torch.tensor([0, 7, 2**31, 2**32 - 1])
for vocab in (1, 30, 4099, 20_001):
    groups = (vocab + 3) // 4
    keys = torch.tensor([[s & 0xFFFFFFFF, s >> 32] for s in seeds])
    zero = torch.zeros(1, 1, dtype=torch.int64)
    counter = (torch.arange(groups)[None], positions[:, None], zero, zero)
    words = philox4x32(counter, (keys[:, :1], keys[:, 1:]))
    expected = torch.stack(words, dim=-1).view(4, groups * 4)[:, :vocab] >> 9
    assert torch.equal(uniform_integers(seeds, positions, vocab).long(), expected), vocab
    noise, reference = fused(seeds, positions, vocab), gumbel(seeds, positions, vocab)
    assert noise.shape == reference.shape and noise.dtype == reference.dtype
    # Two float64 logarithms, each right to about its last bit, then float32: one unit apart at most, seldom.
    steps = (noise.view(torch.int32).long() - reference.view(torch.int32).long()).abs()
    assert steps.max() <= 1, vocab
    assert (steps > 0).sum() <= 1, vocab
print("same")
"""


def test_the_kernel_gives_the_integers_and_the_noise_of_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["same"]
