"""What a machine shows of itself: batteries, programs, heat, and what it costs to look."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.node import gpu_heat
from barnraise.node.gpu_heat import GpuHeat
from barnraise.node.machine import Machine, Programs, Seldom, Wanted, among, battery_in_sysfs
from barnraise.node.presence import Answer


def supply(power: Path, name: str, **values: str) -> None:
    (power / name).mkdir(parents=True)
    for key, value in values.items():
        (power / name / key).write_text(value + "\n")


MAINS_OFF = {"type": "Mains", "online": "0"}
MAINS_ON = {"type": "Mains", "online": "1"}


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ({}, None),
        ({"AC": MAINS_ON}, False),
        ({"AC": MAINS_ON, "BAT0": {"type": "Battery", "status": "Charging"}}, False),
        ({"AC": MAINS_OFF, "BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"AC": MAINS_OFF, "BAT0": {"type": "Battery", "status": "Not charging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Full"}}, False),
        ({"mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, None),
        (
            {"AC": MAINS_ON, "mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"}},
            False,
        ),
        ({"ups": {"type": "UPS", "status": "Discharging"}}, True),
        ({"usb": {"type": "USB", "online": "1"}, "BAT0": {"type": "Battery", "status": "Unknown"}}, False),
    ],
    ids=[
        "none",
        "desktop",
        "charging",
        "unplugged",
        "idle",
        "alone",
        "full",
        "mouse",
        "mouse2",
        "ups",
        "usb",
    ],
)
def test_r14_a_battery_is_told_from_a_mouses(
    tmp_path: Path, supplies: dict[str, dict[str, str]], on_battery: bool | None
) -> None:
    power = tmp_path / "power"
    power.mkdir()
    for name, values in supplies.items():
        supply(power, name, **values)
    assert battery_in_sysfs(power) is on_battery
    assert battery_in_sysfs(tmp_path / "missing") is None


def process(proc: Path, pid: int, comm: str, cmdline: str = "") -> None:
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "comm").write_text(comm + "\n")
    (proc / str(pid) / "cmdline").write_text(cmdline.replace(" ", "\0"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_r14_programs_are_found_by_name_as_they_start_and_end(tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    process(tmp_path, 1, "init")
    process(tmp_path, 20, "a-rather-long-n", "/opt/games/a-rather-long-name --full")
    process(tmp_path, 21, "Game.exe")
    (tmp_path / "uptime").write_text("1")
    assert programs.running((), 0.0) == frozenset()
    wanted = ("game", "A-Rather-Long-Name", "editor")
    assert programs.running(wanted, 1.0) == {"game", "A-Rather-Long-Name"}
    process(tmp_path, 30, "bash")
    assert programs.running(wanted, 2.0) == {"game", "A-Rather-Long-Name"}
    process(tmp_path, 30, "editor")  # the shell has become what it was asked for
    assert "editor" in programs.running(wanted, 3.0)
    for name in ("comm", "cmdline"):
        (tmp_path / "30" / name).unlink()
    (tmp_path / "30").rmdir()
    assert "editor" not in programs.running(wanted, 4.0)
    assert programs.running(("init",), 4.1) == {"init"}  # another question is answered at once


@given(st.lists(st.text(max_size=8), max_size=6), st.lists(st.text(max_size=8), max_size=6))
def test_names_match_whatever_their_case(wanted: list[str], running: list[str]) -> None:
    found = among(wanted, running)
    assert found <= set(wanted)
    assert among(wanted, [name.upper() + ".EXE" for name in wanted if name.isascii()]) >= {
        name for name in wanted if name.isascii()
    }


def test_a_real_program_is_seen_within_a_second(tmp_path: Path) -> None:
    script = tmp_path / "pretended-game-of-long-name"
    script.symlink_to("/bin/sleep")
    machine = Machine([])
    wanted = Wanted(programs=("pretended-game-of-long-name",))
    assert machine.look(wanted).programs == frozenset()
    child = subprocess.Popen([os.fspath(script), "60"])
    try:
        for _ in range(600):  # within a second, on an idle machine
            seen = machine.look(wanted)
            if seen.programs:
                break
            time.sleep(0.05)
        assert seen.programs == {"pretended-game-of-long-name"}
    finally:
        child.kill()
        child.wait()


def test_the_machine_is_seen_whole() -> None:
    class Somebody:
        name = "test"

        def ask(self) -> Answer:
            return Answer("test", 12.0)

    seen = Machine([Somebody()]).look(Wanted(engine=os.getpid()))
    assert (seen.presence.source, seen.presence.idle_s) == ("test", 12.0)
    assert seen.memory_free is not None
    assert seen.memory_free > 0
    assert 10**6 < seen.engine_memory < seen.memory_total
    assert Machine([]).look(Wanted(engine=2**22 + 1)).engine_memory == 0


def test_what_changes_seldom_is_read_seldom() -> None:
    values = iter(range(10))
    seldom = Seldom(2.0, lambda: next(values))
    assert [seldom(now) for now in (0.0, 1.0, 1.9, 2.0, 3.9, 4.0)] == [0, 0, 0, 1, 1, 2]


class Nvml:
    """As much of NVIDIA's library as is asked."""

    def __init__(self, temperatures: list[int]) -> None:
        self.temperatures = temperatures
        self.broken = False

    def nvmlInit(self) -> None:
        if self.broken:
            raise RuntimeError("driver not loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.temperatures)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        if self.broken:
            raise RuntimeError("GPU is lost")
        assert sensor == 0
        return self.temperatures[handle]


def test_the_hottest_gpu_counts_and_a_lost_driver_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml, clock = Nvml([51, 77]), [0.0]
    monkeypatch.setattr(gpu_heat, "import_module", lambda name: nvml)
    monkeypatch.setattr(gpu_heat, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    heat = GpuHeat(tmp_path)
    assert heat.read() == 77.0
    nvml.broken = True
    assert heat.read() is None
    nvml.broken, clock[0] = False, 30.0
    assert heat.read() is None  # not looked for at every breath
    clock[0] = 61.0
    assert heat.read() == 77.0


def test_an_amd_gpus_heat_is_the_kernels_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(gpu_heat, "import_module", missing)
    for card, vendor, heat in (("card0", "0x8086", "99000"), ("card1", "0x1002", "64500")):
        sensors = tmp_path / card / "device" / "hwmon" / "hwmon3"
        sensors.mkdir(parents=True)
        (tmp_path / card / "device" / "vendor").write_text(vendor + "\n")
        (sensors / "temp1_input").write_text(heat + "\n")
    assert GpuHeat(tmp_path).read() == 64.5
    assert GpuHeat(tmp_path / "none").read() is None
