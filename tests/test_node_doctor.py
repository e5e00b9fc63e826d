"""The doctor names each device, and for each that is not used, why and what would help (R11)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from barnraise.node.doctor import (
    DisplayDevice,
    Finding,
    NodeFile,
    TorchDevice,
    TorchFacts,
    examine,
    judge_clock,
    judge_devices,
    judge_disk,
    judge_key,
    judge_memory,
    judge_packages,
    judge_python,
    judge_threads,
    memory_limit,
    nvidia_driver,
    probe_display,
    probe_node_files,
)
from barnraise.protocol.identity import Identity, save_identity

CARD = DisplayDevice("0000:01:00.0", 0x10DE, 0x2684, "nvidia")
AMD = DisplayDevice("0000:03:00.0", 0x1002, 0x73BF, "amdgpu")
VIRTUAL = DisplayDevice("0000:00:02.0", 0x1AF4, 0x1050, "")
OPEN = NodeFile("/dev/nvidia0", True)
CUDA = TorchFacts(version="2.13.0", cuda="12.8")
GPU = TorchDevice("cuda", 0, "RTX 4090", (8, 9), 24 * 10**9, 20 * 10**9)


def about(findings: list[Finding], word: str) -> Finding:
    return next(f for f in findings if word in f.subject)


@pytest.mark.parametrize(
    ("files", "driver", "torch", "reason", "cure"),
    [
        ([], "", CUDA, "driver is not loaded", "install NVIDIA's driver"),
        ([replace(OPEN, readable=False)], "550.54", CUDA, "no permission to open /dev/nvidia0", "groups"),
        ([], "550.54", CUDA, "no /dev/nvidia0", "--gpus all"),
        ([OPEN], "550.54", TorchFacts(version="2.13.0+cpu"), "built without CUDA", "torch"),
        ([OPEN], "450.1", replace(CUDA, cuda_error="driver too old"), "driver too old", "update the driver"),
    ],
)
def test_an_unused_nvidia_card_is_explained(
    files: list[NodeFile], driver: str, torch: TorchFacts, reason: str, cure: str
) -> None:
    findings = judge_devices([CARD], files, driver, torch)
    found = about(findings, "NVIDIA")
    assert found.status == "note"
    assert reason in found.text
    assert cure in found.cure
    assert "no usable GPU" in about(findings, "devices").text
    assert about(findings, "cpu").status == "ok"


def test_a_usable_card_is_shown_with_memory_and_capability() -> None:
    findings = judge_devices([CARD], [OPEN], "550.54", replace(CUDA, devices=(GPU,)))
    found = about(findings, "cuda:0")
    assert found.status == "ok"
    for part in ("RTX 4090", "20.0 GB of 24.0 GB", "8.9"):
        assert part in found.text
    assert not [f for f in findings if "NVIDIA" in f.subject or f.subject == "devices"]


def test_an_old_card_and_a_full_card_say_so() -> None:
    old = replace(GPU, capability=(5, 2))
    full = replace(GPU, index=1, free=10**9)
    findings = judge_devices([], [OPEN], "550", replace(CUDA, devices=(old, full)))
    assert "not used" in about(findings, "cuda:0").text
    assert about(findings, "cuda:1").status == "warning"


def test_other_graphics_are_rejected_with_a_reason() -> None:
    findings = judge_devices([AMD, VIRTUAL], [], "", CUDA)
    assert "without ROCm" in about(findings, "AMD").text
    assert "no engine supports it" in about(findings, "1af4").text


def test_a_broken_torch_is_a_problem() -> None:
    (found,) = judge_devices([CARD], [], "", TorchFacts(error="ImportError: libcudart"))
    assert found.status == "problem"
    assert "libcudart" in found.text


def test_probes_read_what_linux_shows(tmp_path: Path) -> None:
    for slot, kind in (("0000:01:00.0", "0x030000"), ("0000:02:00.0", "0x020000")):
        (tmp_path / "pci" / slot).mkdir(parents=True)
        for name, value in (("class", kind), ("vendor", "0x10de"), ("device", "0x2684")):
            (tmp_path / "pci" / slot / name).write_text(value)
    (tmp_path / "pci" / "0000:09:00.0").mkdir()
    assert probe_display(tmp_path / "pci") == [DisplayDevice("0000:01:00.0", 0x10DE, 0x2684, "")]
    for name in ("nvidia0", "nvidiactl", "nvidia-caps"):
        (tmp_path / name).touch()
    assert [Path(f.path).name for f in probe_node_files(tmp_path)] == ["nvidia0", "nvidiactl"]
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu")
    assert nvidia_driver(tmp_path / "version") == "550.54.14"
    assert nvidia_driver(tmp_path / "none") == ""
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("4000000000\n")
    assert memory_limit(tmp_path) == 4_000_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) is None


def test_a_key_is_missing_fine_or_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    assert judge_key(path).status == "note"
    identity = Identity.generate()
    save_identity(identity, path)
    assert identity.peer_id in judge_key(path).text
    path.chmod(0o644)
    found = judge_key(path)
    assert found.status == "problem"
    assert "chmod" in found.text
    path.chmod(0o600)
    path.write_bytes(b"rubbish")
    path.chmod(0o600)
    assert judge_key(path).status == "problem"


def test_the_rest_is_judged_by_its_numbers(tmp_path: Path) -> None:
    assert judge_python((3, 10, 0), "x").status == "problem"
    assert judge_python((3, 11, 0), "x").status == "ok"
    assert judge_memory(16 * 10**9, 10**9, None).status == "warning"
    assert judge_memory(16 * 10**9, 8 * 10**9, 10**9).status == "warning"
    assert judge_memory(16 * 10**9, 8 * 10**9, None).status == "ok"
    assert judge_threads(8, 4, 4).cure == "--threads 2"
    assert judge_threads(2, 4, 4).status == "ok"
    assert judge_disk(tmp_path, 10**8, True).status == "warning"
    assert judge_disk(tmp_path, 10**12, False).status == "problem"
    assert judge_clock(1000.0, None).status == "warning"
    assert judge_clock(1_800_000_000.0, True).status == "ok"
    assert judge_clock(1_800_000_000.0, False).status == "note"
    assert [f.status for f in judge_packages({"torch": "2", "trio": ""})] == ["ok", "problem"]


def test_this_machine_is_examined_without_touching_anything(tmp_path: Path) -> None:
    findings = examine(tmp_path / "data", tmp_path / "node.key", threads=1)
    subjects = [f.subject for f in findings]
    for subject in ("python", "packages", "threads", "memory", "cpu", "disk", "key", "clock"):
        assert subject in subjects
    assert not os.listdir(tmp_path)
