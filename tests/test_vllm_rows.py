"""What vLLM's worker saw, put together again: without vLLM, on plain tensors and fake updates."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.kernels.sampling import draw
from barnraise.kernels.toploc import build_proofs
from barnraise.node.vllm_rows import FOLD_AT, Desk, Record, RecordError, Seat, Seats

HIDDEN, VOCABULARY = 8, 11


def states(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_rows_are_followed_through_removals_moves_and_swaps() -> None:
    seats, people = Seats(), {name: Seat(i, i, []) for i, name in enumerate("abcd")}
    seats.update([], [(row, people[name]) for row, name in enumerate("abcd")], [])
    seats.update([1], [], [(3, 1, False)])
    assert [(row, seat.key) for row, seat in seats.at(3)] == [(0, 0), (1, 3), (2, 2)]
    seats.update([], [], [(0, 2, True)])
    assert [(row, seat.key) for row, seat in seats.at(3)] == [(0, 2), (1, 3), (2, 0)]
    seats.update([], [(1, None)], [])  # somebody else's sequence takes the row
    assert [(row, seat.key) for row, seat in seats.at(3)] == [(0, 2), (2, 0)]
    assert [(row, seat.key) for row, seat in seats.at(1)] == [(0, 2)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 70), min_size=1, max_size=6), st.integers(2, 9))
def test_however_vllm_batches_the_proofs_are_those_of_the_completion(
    seed: int, lengths: list[int], chunk: int
) -> None:
    """Pieces of prefills, before the first token and after a preemption, leave no trace."""
    dice = random.Random(seed)
    truth = [states(length, index) for index, length in enumerate(lengths)]
    record, drawn = Record(4, chunk), [list[int]() for _ in lengths]
    for key in range(len(lengths)):
        record.open(key)
    while alive := [key for key, length in enumerate(lengths) if len(drawn[key]) < length]:
        batch = dice.sample(alive, dice.randint(1, len(alive)))
        partial = [dice.random() < 0.3 for _ in batch]
        rows = [
            torch.full((HIDDEN,), 9e9) if part else truth[key][len(drawn[key])]
            for key, part in zip(batch, partial, strict=True)
        ]
        seats = [(row, Seat(key, 0, drawn[key])) for row, key in enumerate(batch)]
        tokens = [-1 if part else len(drawn[key]) for key, part in zip(batch, partial, strict=True)]
        record.note(seats, tokens, [-0.5] * len(batch), torch.stack(rows))
        for key, part in zip(batch, partial, strict=True):
            if not part:
                drawn[key].append(len(drawn[key]))
    done = record.take([(key, list(range(length))) for key, length in enumerate(lengths)])
    assert [one.proofs for one in done] == build_proofs(truth, 4, chunk)
    assert [len(one.logprobs) for one in done] == lengths


def test_few_states_are_held_however_long_a_completion_is() -> None:
    record, drawn = Record(4, 2), list[int]()
    record.open(0)
    most = 0
    for position in range(4 * FOLD_AT + 1):
        record.note([(0, Seat(0, 0, drawn))], [7], [0.0], states(1, position))
        drawn.append(7)
        most = max(most, len(record._whole))
    assert most < FOLD_AT
    assert len(record.take([(0, drawn)])[0].proofs) == (2 * FOLD_AT + 1) * (2 + 2 * 4)


def test_what_does_not_fit_is_never_sent() -> None:
    record = Record()
    record.open(0)
    with pytest.raises(RecordError, match="position 2 of a completion of which 0"):
        record.note([(0, Seat(0, 0, [1, 2]))], [3], [0.0], states(1, 0))
    record.note([(0, Seat(0, 0, []))], [3], [0.0], states(1, 0))
    with pytest.raises(RecordError, match="returned 1 tokens, 1 were drawn, 0 agree"):
        record.take([(0, [4])])
    with pytest.raises(RecordError, match="not asked for"):
        record.take([(1, [4])])


def test_a_sequence_that_was_given_up_is_left_out() -> None:
    record = Record()
    record.open(0)
    record.clear()
    record.note([(0, Seat(0, 0, [1]))], [3], [0.0], states(1, 0))
    with pytest.raises(RecordError):
        record.take([(0, [1, 3])])


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "soft cap"])
def test_the_draw_is_the_torch_engines_whatever_else_sits_in_the_batch(softcap: float | None) -> None:
    desk, record, seats = Desk(), Record(4, 2), Seats()
    seats.update([], [(0, Seat(5, 77, [])), (2, Seat(6, 2**64 - 1, [1, 1, 1]))], [])
    for position in range(4):
        record.open(6 if position < 3 else 5)
    for count in range(3):
        record.note([(0, Seat(6, 0, [1] * count))], [1], [0.0], states(1, 9))
    desk.softcap = softcap
    desk.begin(record, 0.7, top_k=5, top_p=0.9)
    logits = 3 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    raw, hidden = logits.clone(), states(3, 4)
    desk.see(hidden)
    assert desk.draw(seats, logits) is logits
    capped = raw if softcap is None else torch.tanh(raw / softcap) * softcap
    tokens, logprobs = draw(capped[[0, 2]], [77, 2**64 - 1], torch.tensor([0, 3]), 0.7, 5, 0.9)
    assert logits[[0, 2]].argmax(dim=1).tolist() == tokens.tolist()
    assert torch.equal(logits[1], raw[1])  # a sequence that is none of ours
    (one,) = record.take([(5, tokens[:1].tolist())])
    assert one.logprobs == logprobs[:1].tolist()
    assert one.proofs == build_proofs([hidden[:1]], 4, 2)[0]


def test_logits_without_their_states_are_refused_and_nothing_is_done_between_units() -> None:
    desk, seats, logits = Desk(), Seats(), torch.randn(1, VOCABULARY)
    seats.update([], [(0, Seat(0, 0, []))], [])
    before = logits.clone()
    desk.see(states(1, 0))
    assert torch.equal(desk.draw(seats, logits), before)
    record = Record()
    record.open(0)
    desk.begin(record, 1.0)
    with pytest.raises(RecordError, match="1 rows of logits of none"):
        desk.draw(seats, logits)
    desk.see(states(2, 0))
    with pytest.raises(RecordError, match="of 2 hidden states"):
        desk.draw(seats, logits)
