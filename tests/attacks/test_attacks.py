"""Every attack of the registry, performed on the demo model: what it must fail by, or why it may pass."""

from __future__ import annotations

from random import Random

import pytest
import torch

from attacks import suite
from attacks.registry import ATTACKS
from attacks.stage import Stage

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> suite.Stages:
    return suite.Stages(tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_caught_by_the_check_that_is_meant_for_it(stages: suite.Stages, name: str) -> None:
    attack = ATTACKS[name]
    row = suite.perform(stages[attack.precision], attack, tries=1)
    if attack.honest:
        assert row["caught"] == 0, row
        return
    assert row["caught"] >= attack.least * row["of"], row
    for check in row["checks"]:
        assert check.startswith(attack.caught_by), f"{name} is found by {check} instead"


FINE = [name for name, attack in ATTACKS.items() if attack.least < 1 and attack.precision == "float32"]


@pytest.mark.parametrize("name", FINE)
def test_a_fine_attack_is_caught_where_engines_are_exact(stages: suite.Stages, name: str) -> None:
    attack = ATTACKS[name]
    row = suite.perform(stages["exact"], attack, tries=1)
    assert row["caught"] >= attack.least_exact * row["of"], row


def test_honest_work_passes_where_engines_are_exact(stages: suite.Stages) -> None:
    stage = stages["exact"]
    me = stage.join("honest")
    for _ in range(5):
        assert stage.submit(me, stage.honest(me)[1]).accepted


def test_what_cannot_be_detected_says_why() -> None:
    for attack in ATTACKS.values():
        assert attack.honest or attack.least > 0 or attack.limits, attack.name
        assert attack.honest or attack.caught_by, attack.name


def test_an_attack_earns_nothing_and_costs_its_sender(stages: suite.Stages) -> None:
    stage: Stage = stages["float32"]
    me = stage.join("a cheat whose books we read")
    for _ in range(2):
        assert not ATTACKS["own-noise"].perform(stage, me, Random(1)).accepted
    node = stage.state.nodes[me.public_key]
    assert (node.credit, node.accepted, node.rejected, node.strikes) == (0, 0, 2, 2)
