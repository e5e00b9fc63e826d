"""Triton kernels are used where they agree with the reference, and nowhere else; they compile for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_support import kernels

from barnraise.kernels import checked_triton, sampling
from barnraise.kernels.checked_triton import fused_logprobs, fused_sampling

CPU = torch.device("cpu")
logprobs_triton, sampling_triton = kernels("logprobs_triton"), kernels("sampling_triton")

# In a process of its own, as the interpreter cannot compile. {arch: what its assembly must hold}
COMPILER = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from barnraise.kernels import logprobs_triton as logprobs, sampling_triton as sampling

def compiled(kernel, types, constants, target, **options):
    names = kernel.arg_names
    pointers = {name for name in names if name not in constants and types[name].startswith("*")}
    sized = pointers | {"rows", "columns", "width", "share", "first", "slice_columns", "stride"}
    attributes = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in sized}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)

numbers = ("rows", "columns", "width", "share", "first", "slice_columns", "vocab", "stride")
floats = ("found", "level", "entropy", "along_chosen", "along_entropy", "table", "out", "borders", "numbers")
plain = dict.fromkeys(numbers, "i32") | dict.fromkeys(floats, "*fp32")
plain |= dict.fromkeys(("targets", "keys", "positions"), "*i64") | {"temperature": "fp32", "indices": "*i32"}
bfloat = plain | dict.fromkeys(("hidden", "weight", "bias", "grad", "logits"), "*bf16")
block = dict(HAS_BIAS=True, SOFTCAP=30.0, TEMPERATURE=0.7, PRECISION="ieee", ROWS=128, COLUMNS=128, WIDTH=64,
             SUM=tl.float32, WIDEN=False)
for target, word in ((GPUTarget("cuda", 80, 32), "mma.sync"), (GPUTarget("cuda", 90, 32), "wgmma.mma_async"),
                     (GPUTarget("hip", "gfx942", 64), "v_mfma")):
    for kernel in (logprobs._forward, logprobs._backward):
        stages = 3 if target.backend == "cuda" else 2
        made = compiled(kernel, bfloat, block, target, num_warps=8, num_stages=stages)
        text = made.asm["ptx" if target.backend == "cuda" else "amdgcn"]
        assert word in text, (target, kernel)
        assert "cp.async" in text or target.backend == "hip", (target, kernel)
        # What a GeForce's block of threads may have, and 64 KiB on AMD.
        assert made.metadata.shared <= (99 if target.backend == "cuda" else 64) * 1024, (target, kernel)
    drawn = compiled(sampling._draw, bfloat, dict(TRUNCATED=True, GROUPS=256), target)
    if target.backend == "cuda":
        assert "div.rn.f32" in drawn.asm["ptx"] and "div.full" not in drawn.asm["ptx"]
    compiled(sampling._noise, plain, dict(RAW=False, GROUPS=256), target)
print("compiled")
"""


@pytest.fixture(autouse=True)
def forgotten() -> None:
    fused_logprobs.cache_clear()
    fused_sampling.cache_clear()


def test_kernels_that_agree_with_the_reference_are_used(recwarn: pytest.WarningsRecorder) -> None:
    with torch.inference_mode():
        assert fused_logprobs(CPU) is logprobs_triton.token_logprobs_triton
        assert fused_sampling(CPU) == (sampling_triton.gumbel, sampling_triton.draw)
    assert not recwarn.list


def test_a_kernel_that_is_wrong_or_does_not_run_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = logprobs_triton.token_logprobs_triton

    def half(hidden: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        chosen, entropy = right(hidden, *rest)
        return chosen.detach() + 0.5 * (chosen - chosen.detach()), entropy  # values right, gradients not

    monkeypatch.setattr(logprobs_triton, "token_logprobs_triton", half)
    with pytest.warns(UserWarning, match="logprobs_triton differs from the torch reference on cpu; torch is"):
        assert fused_logprobs(CPU) is None
    assert fused_logprobs(CPU) is None  # once: warnings are errors here unless expected

    def broken(*rest: object) -> Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(sampling_triton, "gumbel", broken)
    with pytest.warns(UserWarning, match="sampling_triton does not run: RuntimeError: no kernel image"):
        assert fused_sampling(CPU) is None


def test_noise_that_is_wrong_in_a_single_bit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_off(seeds: list[int], positions: Tensor, vocab: int) -> Tensor:
        noise = sampling.gumbel(seeds, positions, vocab)
        noise[2, 1000] = torch.nextafter(noise[2, 1000], torch.tensor(torch.inf))
        return noise

    monkeypatch.setattr(sampling_triton, "gumbel", one_off)
    with pytest.warns(UserWarning, match="differs from the torch reference"):
        assert fused_sampling(CPU) is None


def test_without_triton_torch_does_the_work_without_a_word(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(checked_triton.importlib.util, "find_spec", lambda name: None)
    assert fused_logprobs(CPU) is None
    assert fused_sampling(CPU) is None
    assert not recwarn.list


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    program = tmp_path / "compiler.py"  # triton reads the kernels' source, so from files
    program.write_text(COMPILER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-P", str(program)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["compiled"]
