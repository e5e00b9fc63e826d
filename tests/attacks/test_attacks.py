"""Attacks under the thresholds of a run on the demo model: what each must fail by, or why it may pass."""

from __future__ import annotations

from random import Random

import pytest
import torch

from attacks import suite
from attacks.registry import ATTACKS
from attacks.stage import Stage

torch.set_num_threads(1)


@pytest.mark.parametrize("name", [name for name, each in ATTACKS.items() if each.precision == "float32"])
def test_an_attack_is_caught_by_the_check_that_is_meant_for_it(stages: suite.Stages, name: str) -> None:
    suite.expect(stages["float32"], ATTACKS[name])


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
