"""Attacks where engines compute in bfloat16, and fine ones where all of them compute in float32."""

from __future__ import annotations

import pytest
import torch

from attacks import suite
from attacks.registry import ATTACKS

torch.set_num_threads(1)
FINE = [name for name, attack in ATTACKS.items() if attack.least < 1 and attack.precision == "float32"]


@pytest.mark.parametrize("name", [name for name, each in ATTACKS.items() if each.precision == "bfloat16"])
def test_an_attack_on_a_bfloat16_run_is_caught_by_the_check_that_is_meant_for_it(
    stages: suite.Stages, name: str
) -> None:
    suite.expect(stages["bfloat16"], ATTACKS[name])


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
