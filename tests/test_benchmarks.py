"""The benchmarks of the broadcast still run, and say what they document; how fast is their own business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import broadcast, hop, modelled, netns, relaysim

WHY_NOT = netns.why_not()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
MEGABIT = 1e6 / 8
MIB = 1024 * 1024


def test_the_broadcast_benchmark_reports_every_key_that_it_documents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broadcast.main(["--quick", "--json"])
    report = json.loads(capsys.readouterr().out)
    documented = {
        *("ratio_to_lower_bound", "ratio_capped", "ratio_with_churn", "ratio_mixed", "ratio_large"),
        *("origin_copies", "speedup_over_star", "speedup_over_relay", "schemes", "growth", "conditions"),
    }
    assert documented <= report.keys()
    assert report["ratio_to_lower_bound"] >= 1
    assert all(scheme["ratio"] >= 1 for scheme in report["schemes"].values())
    assert broadcast.__doc__ is not None
    assert all(key in broadcast.__doc__ for key in documented - {"conditions"})


def test_one_hop_is_compared_with_the_bare_stream(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"stock": hop.carry("stock", 1), "stream": 2e8, "treecast": 1e8}  # six processes would take long
    assert rates["stock"] > 0
    monkeypatch.setattr(hop, "carry", lambda kind, mebibytes: rates[kind])
    broadcast.main(["hop", "--quick", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {"hop_efficiency", "of_our_stream", "stream_of_stock", "conditions"} <= report.keys()
    assert report["of_our_stream"] == 0.5


@needs_namespaces
def test_real_processes_with_shaped_links_are_compared_with_a_star(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broadcast.main(["real", "--quick", "--nodes", "2", "--only", "treecast,star", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {"ratio_to_lower_bound", "bound_s", "seconds", "speedup_over_star", "conditions"} <= report.keys()
    assert report["ratio_to_lower_bound"] >= 1
    assert report["runs"]["treecast"]["defects"] == 0


@needs_namespaces
def test_a_laboratory_that_fails_leaves_no_namespace_and_no_process_behind() -> None:
    started: list[tuple[str, subprocess.Popen[str]]] = []

    def fail() -> None:
        with netns.open_lab({"a": netns.Shape(10, 20)}) as lab:
            process = lab.start("a", [sys.executable, "-c", "import time; time.sleep(600)"])
            started.append((lab.namespace("a"), process))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    mine, process = started[0]
    assert process.poll() is not None
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert mine not in listed


def test_a_star_takes_as_long_as_its_origin_needs_to_send_a_copy_to_each() -> None:
    sizes = [MIB] * 16
    done = relaysim.broadcast([MEGABIT] * 8, 100 * MEGABIT, 80 * MEGABIT, sizes, relays=0)
    assert done[-1] == pytest.approx(8 * sum(sizes) / (80 * MEGABIT), rel=0.05)


def test_a_relay_passes_a_shard_on_before_it_has_the_next() -> None:
    sizes = [MIB] * 32
    one_copy = sum(sizes) / (10 * MEGABIT)
    done = relaysim.broadcast([10 * MEGABIT] * 2, 100 * MEGABIT, 10 * MEGABIT, sizes, relays=1)
    assert done[-1] < 1.4 * one_copy  # one after the other it would be twice that


def test_as_many_relays_are_used_as_origin_and_clients_can_bear() -> None:
    assert relaysim.best_relays(8, 22, 200) == 5
    assert relaysim.best_relays(2, 1, 1) == 1


def test_an_origin_on_a_modest_link_goes_on_using_all_of_it() -> None:
    """Receivers that take from many were once mistaken for a slow uplink, and it sent one shard at a time."""
    result = modelled.broadcast(8, 64, up=11, down=50, origin=100, shard=MIB, origin_active=8, origin_slots=8)
    assert result.ratio < 1.3
    assert result.origin_copies > 3
