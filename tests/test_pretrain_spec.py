"""What a run of phase pretrain may say of itself."""

from __future__ import annotations

import msgspec
import pytest
from spec_support import pretrain_spec

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.pretrain import check_pretrain, part_name, segments, stream, unit_start


def test_a_sound_spec_passes_and_says_how_its_units_lie() -> None:
    spec = pretrain_spec(steps=10, commit_every=4, contributors=3, blocks=2)
    check_pretrain(spec, 3)
    assert segments(spec) == (4, 4, 2)
    assert [stream(spec, block) for block in range(2)] == [(0, 2), (1, 2)]
    assert stream(msgspec.structs.replace(spec, data="shared"), 1) == (0, 1)
    each = 10 * spec.recipe.batch
    assert [unit_start(spec, 1, slot) for slot in range(3)] == [3 * each, 4 * each, 5 * each]
    assert part_name(spec, 0) == "model-00001-of-00003.safetensors"


@pytest.mark.parametrize(
    ("changes", "versions"),
    [
        ({"quorum": 3, "contributors": 2}, 3),
        ({"blocks": 3, "scaffold_layers": 2}, 3),
        ({"steps": 65, "commit_every": 1}, 3),
        ({"scaffold": None, "scaffold_recipe": msgspec.structs.replace(pretrain_spec().adapt, steps=0)}, 3),
        ({"timeout_s": 20.0, "deadline_s": 10.0}, 3),
        ({"recipe": msgspec.structs.replace(pretrain_spec().recipe, beta1=1.0)}, 3),
        ({}, 2),
        ({}, 4),
        ({"then_posttrain": True}, 3),
    ],
    ids=[
        "quorum",
        "slices",
        "segments",
        "scaffold",
        "deadline",
        "beta",
        "no room",
        "beyond",
        "no room to go on",
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(changes: dict[str, object], versions: int) -> None:
    with pytest.raises(MalformedError):
        check_pretrain(msgspec.structs.replace(pretrain_spec(), **changes), versions)
