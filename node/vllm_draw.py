"""Our seeded Gumbel-max as a logits processor of vLLM's V1 engine.

vLLM samples greedily; the processor has drawn before, and makes its token the largest.
So the draw is the very function that the torch engine and the verifier call, on the
model's raw logits, and the log-probabilities are the policy's own, at the run's temperature
and truncation (vLLM's raw ones would be at temperature 1).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from barnraise.node.vllm_rows import DESK, Seat, Seats

ARGUMENT = "barnraise"
"""Key of a request's ``extra_args``: (sequence, seed). Requests without it are none of ours."""


class SeededDraw(LogitsProcessor):
    """See the module; constructed by vLLM in its worker."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._seats = Seats()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self._seats.update(
            batch_update.removed,
            [(row, _seat(params, output)) for row, params, _, output in batch_update.added],
            [(one, two, kind == MoveDirectionality.SWAP) for one, two, kind in batch_update.moved],
        )

    def apply(self, logits: Tensor) -> Tensor:
        return DESK.draw(self._seats, logits)


def _seat(params: SamplingParams, output: list[int]) -> Seat | None:
    ours = (params.extra_args or {}).get(ARGUMENT)
    return None if ours is None else Seat(int(ours[0]), int(ours[1]), output)
