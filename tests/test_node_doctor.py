"""The doctor names each device, and for each that is not used, why and what would help (R11)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.node.bench import Measured
from barnraise.node.devices import (
    DisplayDevice,
    NodeFile,
    NvmlDevice,
    NvmlFacts,
    Signs,
    TorchDevice,
    TorchFacts,
    nvidia_driver,
    probe_display,
    probe_node_files,
    probe_nvml,
)
from barnraise.node.doctor import (
    examine,
    judge_clock,
    judge_key,
    judge_packages,
    judge_python,
    judge_speed,
)
from barnraise.node.findings import Finding
from barnraise.node.gpus import find_gpus, judge_devices
from barnraise.node.processor import (
    judge_memory,
    judge_processor,
    judge_threads,
    memory_limit,
    processor,
)
from barnraise.node.storage import DiskSpeed, judge_disk, measure_disk
from barnraise.protocol.identity import Identity, save_identity

CARD = DisplayDevice("0000:01:00.0", 0x10DE, 0x2684, "nvidia")
AMD = DisplayDevice("0000:03:00.0", 0x1002, 0x73BF, "amdgpu")
VIRTUAL = DisplayDevice("0000:00:02.0", 0x1AF4, 0x1050, "")
OPEN = NodeFile("/dev/nvidia0", True)
CUDA = TorchFacts(version="2.13.0", cuda="12.8")
GPU = TorchDevice("cuda", 0, "RTX 4090", (8, 9), 24 * 10**9, 20 * 10**9)
SEEN = NvmlDevice(0, "RTX 4090", 24 * 10**9, 10**9, 41.0)


def about(findings: list[Finding], word: str) -> Finding:
    return next(f for f in findings if word in f.subject or word in f.text)


@pytest.mark.parametrize(
    ("signs", "torch", "reason", "cure"),
    [
        (Signs(), CUDA, "driver is not loaded", "install NVIDIA's driver"),
        (Signs(files=(replace(OPEN, readable=False),), driver="550"), CUDA, "no permission", "groups"),
        (Signs(driver="550.54"), CUDA, "no /dev/nvidia0", "--gpus all"),
        (Signs(files=(OPEN,), driver="550"), TorchFacts(version="2"), "built without CUDA", "torch"),
        (Signs(files=(OPEN,), driver="450"), replace(CUDA, cuda_error="too old"), "too old", "update"),
        (Signs(files=(OPEN,), driver="550", hidden=""), CUDA, "which hides it", "unset"),
        (Signs(driver="550", nvml=NvmlFacts(error="Driver/library version mismatch")), CUDA, "", "restart"),
        (Signs(files=(OPEN,), driver="550"), TorchFacts(error="libcudart"), "cannot be loaded", "torch"),
    ],
    ids=["no-driver", "permission", "container", "cpu-torch", "old-driver", "hidden", "mismatch", "no-torch"],
)
def test_r11_an_unused_nvidia_card_is_explained(
    signs: Signs, torch: TorchFacts, reason: str, cure: str
) -> None:
    findings = judge_devices(replace(signs, display=(CARD,)), torch)
    found = about(findings, "NVIDIA")
    assert found.status == "note"
    assert "not used: " in found.text
    assert reason in found.text
    assert cure in found.cure
    assert bool(torch.error) == any(finding.status == "problem" for finding in findings)
    assert torch.error or "no usable GPU" in about(findings, "devices").text


def test_r11_a_card_that_only_nvidias_library_sees_has_its_name_memory_and_heat() -> None:
    signs = Signs(display=(CARD,), files=(OPEN,), driver="550", nvml=NvmlFacts("550", (SEEN,)))
    (gpu,) = find_gpus(signs, TorchFacts(version="2.13.0+cpu"))
    assert not gpu.used
    tree = gpu.tree()
    assert (tree["name"], tree["temperature"]) == ("RTX 4090", 41.0)
    assert tree["memory_total"] == 24 * 10**9
    assert "without CUDA" in tree["reason"]


def test_a_usable_card_is_shown_with_memory_capability_and_heat() -> None:
    signs = Signs(display=(CARD,), files=(OPEN,), driver="550", nvml=NvmlFacts("550", (SEEN,)))
    findings = judge_devices(signs, replace(CUDA, devices=(GPU,)))
    found = about(findings, "cuda:0")
    assert found.status == "ok"
    for part in (
        "RTX 4090",
        "23.0 GB of 24.0 GB",
        "8.9",
        "41 degrees",
    ):  # as it is now, not when torch looked
        assert part in found.text
    assert len(findings) == 1


def test_of_two_cards_of_a_kind_each_has_its_own_heat() -> None:
    nvml = NvmlFacts("550", (SEEN, replace(SEEN, index=1, temperature=77.0, used=2 * 10**9)))
    torch = replace(CUDA, devices=(GPU, replace(GPU, index=1)))
    first, second = find_gpus(Signs(driver="550", nvml=nvml), torch)
    assert (first.temperature, second.temperature) == (41.0, 77.0)
    hidden = find_gpus(Signs(driver="550", nvml=nvml, hidden="1"), replace(CUDA, devices=(GPU,)))
    assert hidden[0].temperature is None, "which of the two it is cannot be told"


def test_r11_an_old_card_a_full_card_and_a_third_one_say_so() -> None:
    old = replace(GPU, capability=(5, 2))
    full, third = replace(GPU, index=1, free=10**9), replace(GPU, index=2)
    findings = judge_devices(Signs(files=(OPEN,), driver="550"), replace(CUDA, devices=(old, full, third)))
    assert "not used: its capability 5.2 is below 7.0" in about(findings, "cuda:0").text
    assert about(findings, "cuda:1").status == "warning"
    assert "a node uses one GPU" in about(findings, "cuda:2").text
    assert "CUDA_VISIBLE_DEVICES=2" in about(findings, "cuda:2").cure


@pytest.mark.parametrize(
    ("torch", "kfd", "reason"),
    [
        (CUDA, False, "without ROCm"),
        (TorchFacts(hip="6.2"), False, "/dev/kfd"),
        (TorchFacts(hip="6"), True, "offer"),
    ],
    ids=["cuda-torch", "no-kfd", "not-offered"],
)
def test_r11_an_unused_amd_card_is_explained(torch: TorchFacts, kfd: bool, reason: str) -> None:
    findings = judge_devices(Signs(display=(AMD, VIRTUAL), kfd=kfd), torch)
    assert reason in about(findings, "AMD").text
    assert "no engine supports it" in about(findings, "1af4").text


def test_apples_graphics_and_amds_are_used_where_torch_opens_them() -> None:
    apple = TorchFacts(
        mps_built=True, mps_available=True, devices=(TorchDevice("mps", 0, "M2", (0, 0), 8, 8),)
    )
    (gpu,) = find_gpus(Signs(apple=True), apple)
    assert (gpu.kind, gpu.used) == ("mps", True)
    (shut,) = find_gpus(Signs(apple=True), TorchFacts(mps_built=True))
    assert "Metal is not available" in shut.reason
    rocm = TorchFacts(hip="6.2", devices=(TorchDevice("hip", 0, "RX 7900", (11, 0), 8, 8),))
    (radeon,) = find_gpus(Signs(display=(AMD,), kfd=True), rocm)
    assert (radeon.kind, radeon.used) == ("hip", True)


def test_r11_a_broken_torch_is_a_problem() -> None:
    found = judge_devices(Signs(display=(CARD,)), TorchFacts(error="ImportError: libcudart"))[0]
    assert found.status == "problem"
    assert "libcudart" in found.text


class LibraryNotFound(Exception):
    pass


LibraryNotFound.__name__ = "NVMLError_LibraryNotFound"


def nvml(**changes: Any) -> Any:
    def fail(error: Exception) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            raise error

        return call

    calls: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"550.54",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=24 * 10**9, used=10**9),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
        "nvmlDeviceGetName": lambda handle: "RTX 4090",
    }
    wrong = {name: fail(value) if isinstance(value, Exception) else value for name, value in changes.items()}
    return SimpleNamespace(**(calls | wrong))


def test_r11_nvidias_library_is_asked_and_its_absence_is_no_error() -> None:
    assert probe_nvml(nvml()) == NvmlFacts("550.54", (SEEN,))
    cold = probe_nvml(nvml(nvmlDeviceGetTemperature=ValueError("no sensor")))
    assert cold.devices[0].temperature is None
    assert probe_nvml(nvml(nvmlInit=LibraryNotFound())) == NvmlFacts()
    assert probe_nvml(nvml(nvmlInit=ValueError("Driver Not Loaded"))).error == "Driver Not Loaded"
    assert probe_nvml(nvml(nvmlDeviceGetCount=ValueError("GPU is lost"))).error == "GPU is lost"


def test_the_processors_features_are_read(tmp_path: Path) -> None:
    flags = "fpu avx2 avx512f amx_bf16 amx_tile"
    (tmp_path / "x86").write_text(f"model name\t: Xeon\nflags\t\t: {flags}\n\nflags: sse\n")
    assert processor(tmp_path / "x86") == ("Xeon", ("AVX2", "AVX-512", "AMX", "AMX bf16"))
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert processor(tmp_path / "arm")[1] == ("NEON", "bf16")
    assert processor(tmp_path / "none")[1] == ()
    assert judge_processor("Xeon", ("AVX2",), "x86_64", "AVX2").status == "ok"
    assert "AVX2" in judge_processor("Old", ("AVX-512",), "x86_64").text
    assert judge_processor("Old", ("NEON",), "x86_64").status == "warning"
    assert judge_processor("M2", (), "arm64").status == "ok"


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    speed = measure_disk(tmp_path / "not" / "yet", 10_000_000)
    assert speed is not None
    assert speed.write > 0
    assert speed.read > 0
    assert not os.listdir(tmp_path)
    (tmp_path / "file").touch()
    assert measure_disk(tmp_path / "file") is None
    assert judge_disk(tmp_path, 10**12, True, DiskSpeed(1e6, 1e9, False)).status == "warning"
    assert "reads 1,000 MB/s" in judge_disk(tmp_path, 10**12, True, DiskSpeed(1e9, 1e9, False)).text


def test_r7_the_engines_speed_is_what_was_done_and_scales_with_the_model() -> None:
    measured = Measured(tokens=1000, seconds=5.0, weights=25_000_000, device="cpu", threads=2)
    assert measured.tokens_per_s == 200
    assert measured.gflops == pytest.approx(10.0)
    assert measured.speed_of(1_000_000_000) == pytest.approx(5.0)
    found = judge_speed(measured)
    assert found.status == "ok"
    for part in ("200 tokens/s", "25 M model", "2 thread(s)", "10.0 GFLOP/s", "5.0 of 1 B"):
        assert part in found.text
    assert judge_speed(replace(measured, tokens=0)).status == "warning"


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


async def test_this_machine_is_examined_without_touching_anything(tmp_path: Path) -> None:
    told: list[str] = []
    found = examine(tmp_path / "data", tmp_path / "node.key", threads=1, quick=True, tell=told.append)
    findings = [finding async for finding in found]
    subjects = [f.subject for f in findings]
    for subject in ("python", "packages", "threads", "memory", "cpu", "disk", "key", "clock"):
        assert subject in subjects
    assert "torch uses" in next(f.text for f in findings if f.subject == "cpu")
    assert "engine" not in subjects
    assert told
    assert not os.listdir(tmp_path)
