"""The kernels' benchmark runs without a GPU, says so, and judges what a GPU would have shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so_and_measures_the_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    kernels.main(["--quick", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"] == report["conditions"]["gpu"] == "no GPU: not measured"
    assert report["cpu_logprobs"][0]["reference"]["both_s"] > 0
    assert report["cpu_draws"][0]["reference_top_50_s"] > 0
    assert all(
        row["mib"]["triton"] < row["mib"]["reference"] < row["mib"]["plain"] for row in report["memory"]
    )
    kernels.main(["--quick"])
    assert "gpu: no GPU: not measured" in capsys.readouterr().out


def test_ratios_are_of_one_run_and_what_ran_out_of_memory_is_left_out() -> None:
    shape = kernels.Shape("one", 1000, 100, 10_000)  # 2 GFLOP forward
    ours = {"forward_s": 0.001, "both_s": 0.004, "peak_mib": 10.0}
    compiled = {"forward_s": 0.002, "both_s": 0.006, "peak_mib": 100.0}
    found = {"plain": "out of memory", "compiled": compiled, "triton": ours}
    judged = kernels.judged(found, shape, 4e12)
    assert judged == {
        "roofline_forward": 0.5,
        "roofline": 0.375,
        "speedup_over_compiled": 1.5,
        "speedup_over_compiled_forward": 2.0,
    }
    assert kernels.judged({**found, "plain": compiled}, shape, 4e12)["memory_saved"] == 0.9
    assert kernels.judged({"triton": "out of memory"}, shape, 4e12) == {}


def test_the_two_ways_that_a_cpu_compares_compute_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 16, generator=generator), torch.randn(90, 16, generator=generator)
    targets = torch.randint(90, (40,), generator=generator)
    for one, other in zip(
        kernels.plain(hidden, weight, targets), kernels.chunked(hidden, weight, targets), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
