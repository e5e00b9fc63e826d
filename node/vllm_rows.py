"""What vLLM's worker draws and computes, row by row, put together again per completion. Needs no vLLM.

vLLM batches as it likes: prompts in pieces, sequences that are preempted and resumed, rows
that move. Two things tell them apart again. ``Seats`` follows which sequence sits in which
row of the persistent batch, by the updates that vLLM sends its logits processors.
``Record`` keeps, per sequence, the token, its log-probability and the hidden state of every
*position* of the completion, the position being the number of tokens that vLLM holds for
the sequence: a piece of a prefill is drawn from as well, at the position that is still
open, and what the last piece gives takes its place.

States are folded into proofs as soon as a chunk of them is whole, so that memory holds
few of them however long completions are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from barnraise.kernels.sampling import draw
from barnraise.kernels.toploc import build_proofs
from barnraise.protocol.errors import BarnraiseError

FOLD_AT = 32  # whole chunks that wait to be folded together


class RecordError(BarnraiseError):
    """What was seen in the worker and what vLLM returned do not fit: nothing may be sent."""


class Seat(NamedTuple):
    """A sequence in a row. ``drawn``: vLLM's own running list of its tokens."""

    key: int
    seed: int
    drawn: Sequence[int]


class Seats:
    """Which sequence sits in which row of the persistent batch."""

    def __init__(self) -> None:
        self._rows: dict[int, Seat] = {}

    def update(
        self,
        removed: Iterable[int],
        added: Iterable[tuple[int, Seat | None]],
        moved: Iterable[tuple[int, int, bool]],
    ) -> None:
        """One update, applied in vLLM's order: removed, added, moved.

        Args:
            removed: rows that are free now.
            added: (row, who sits there now); None for a sequence that is not ours.
            moved: (from, to, whether the two are swapped instead).
        """
        for row in removed:
            self._rows.pop(row, None)
        for row, seat in added:
            self._rows.pop(row, None)
            if seat is not None:
                self._rows[row] = seat
        for source, target, swap in moved:
            one, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if one is not None:
                self._rows[target] = one
            if swap and other is not None:
                self._rows[source] = other

    def at(self, rows: int) -> list[tuple[int, Seat]]:
        """Our sequences among the first ``rows`` rows, in order."""
        return [(row, seat) for row in range(rows) if (seat := self._rows.get(row)) is not None]


class Proven(NamedTuple):
    """A completion: T log-probabilities in nats, and its proofs (empty where none were asked for)."""

    logprobs: list[float]
    proofs: bytes


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    states: list[tuple[Tensor, int]] = field(default_factory=list)  # (step's states, row), not folded yet
    proofs: list[bytes] = field(default_factory=list)
    waiting: int = 0  # chunks cut off and not folded yet


class Record:
    """Tokens, log-probabilities and proofs of the sequences at work."""

    def __init__(self, top_k: int = 128, chunk: int = 32, *, proofs: bool = True) -> None:
        """``proofs`` False: keep no states (to measure what proofs cost)."""
        self._top_k = top_k
        self._chunk = chunk
        self._prove = proofs
        self._open: dict[int, _Sequence] = {}
        self._whole: list[tuple[_Sequence, Tensor]] = []

    def open(self, key: int) -> None:
        """Expect a sequence."""
        self._open[key] = _Sequence()

    def clear(self) -> None:
        """Forget all sequences: their unit was given up, or is over."""
        self._open.clear()
        self._whole.clear()

    def note(
        self,
        seats: Sequence[tuple[int, Seat]],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        states: Tensor,
    ) -> None:
        """One step of vLLM's.

        Args:
            seats: the sequences and their rows in ``states``; those that are not open are left out.
            tokens, logprobs: what was drawn, one for each of ``seats``.
            states: [B, H], kept until they are folded: nobody may change them.

        Raises:
            RecordError: a position was left out, or comes again.
        """
        for (row, seat), token, logprob in zip(seats, tokens, logprobs, strict=True):
            sequence = self._open.get(seat.key)
            if sequence is None:
                continue
            position, have = len(seat.drawn), len(sequence.tokens)
            if position == have - 1:  # a piece of a prefill came before
                sequence.tokens[-1], sequence.logprobs[-1] = token, logprob
                if self._prove:
                    sequence.states[-1] = (states, row)
                continue
            if position != have:
                raise RecordError(f"vLLM drew position {position} of a completion of which {have} are known")
            if self._prove:
                if position and position % self._chunk == 0:
                    self._cut(sequence)
                sequence.states.append((states, row))
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)

    def take(self, finished: Sequence[tuple[int, Sequence[int]]]) -> list[Proven]:
        """Log-probabilities and proofs of sequences that ended, in order; they are forgotten here.

        Args:
            finished: (key, the tokens that vLLM returned).

        Raises:
            RecordError: vLLM returned other tokens than were drawn.
            ValueError: the states are not finite.
        """
        sequences = []
        for key, tokens in finished:
            sequence = self._open.pop(key, None)
            if sequence is None:
                raise RecordError(f"vLLM returned a completion that was not asked for ({key})")
            if list(tokens) != sequence.tokens:
                same = sum(1 for a, b in zip(tokens, sequence.tokens, strict=False) if a == b)
                raise RecordError(
                    f"vLLM returned {len(tokens)} tokens, {len(sequence.tokens)} were drawn, {same} agree; "
                    "use the torch engine (--engine torch) and report this"
                )
            if sequence.states:
                self._cut(sequence)
            sequences.append(sequence)
        if any(sequence.waiting for sequence in sequences):
            self._fold()
        return [Proven(sequence.logprobs, b"".join(sequence.proofs)) for sequence in sequences]

    def _cut(self, sequence: _Sequence) -> None:
        """What is kept of its states is a chunk."""
        rows = [states[row] for states, row in sequence.states]
        sequence.states.clear()
        sequence.waiting += 1
        self._whole.append((sequence, torch.stack(rows).to(torch.bfloat16)))
        if len(self._whole) >= FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        whole, self._whole = self._whole, []
        proofs = build_proofs([states for _, states in whole], self._top_k, self._chunk)
        for (sequence, _), proof in zip(whole, proofs, strict=True):
            sequence.proofs.append(proof)
            sequence.waiting -= 1


class Desk:
    """What the worker and the logits processor share: the last states, and the draw.

    One per process. Until ``begin`` was called, and again after ``end``, it does nothing, so
    that vLLM's own warming up goes undisturbed.
    """

    def __init__(self) -> None:
        self.record: Record | None = None
        self.softcap: float | None = None
        self._states: Tensor | None = None
        self._temperature = 1.0
        self._top_k = 0
        self._top_p = 1.0

    def begin(self, record: Record, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        """Draw so from now on."""
        self.record = record
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p

    def end(self) -> None:
        """Nothing is at work."""
        self.record, self._states = None, None

    def see(self, states: Tensor) -> None:
        """The final hidden states [B, H] of which logits are computed next."""
        self._states = states if self.record is not None else None

    def draw(self, seats: Seats, logits: Tensor) -> Tensor:
        """Draw a token for every row of ours, and leave logits whose largest is that token.

        Args:
            logits: float32 [B, V], raw; changed in place.

        Raises:
            RecordError: no states were seen for these rows.
        """
        rows = seats.at(len(logits))
        record, states = self.record, self._states
        self._states = None
        if record is None or not rows:
            return logits
        if states is None or len(states) != len(logits):
            have = "none" if states is None else f"{len(states)}"
            raise RecordError(f"vLLM computed {len(logits)} rows of logits of {have} hidden states")
        own = logits if len(rows) == len(logits) else logits[[row for row, _ in rows]]
        if self.softcap is not None:
            own = torch.tanh(own / self.softcap) * self.softcap
        tokens, logprobs = draw(
            own,
            [seat.seed for _, seat in rows],
            torch.tensor([len(seat.drawn) for _, seat in rows], device=logits.device),
            self._temperature,
            self._top_k,
            self._top_p,
        )
        index = torch.tensor([row for row, _ in rows], device=logits.device)
        logits[index, tokens] = torch.inf
        record.note(rows, tokens.tolist(), logprobs.tolist(), states)
        return logits


DESK = Desk()
"""This process's."""
