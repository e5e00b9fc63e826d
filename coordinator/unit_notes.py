"""What nodes told about their block units, kept for the report when the submissions are dropped.

``RUN/units.jsonl``: one JSON object a line; of a repeated one (a crash between note and
drop) the last counts. For people to read: no decision depends on it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from barnraise.coordinator.journal import Journal
from barnraise.protocol import wire
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.pretrain import BlockSubmission

log = logging.getLogger(__name__)

UNITS_FILE = "units.jsonl"
_MAX_BYTES = 256 * 1024 * 1024

Told = tuple[float, list[float]]  # seconds of training, mean loss of each segment (nats per token)


def keep_notes(journal: Journal, run_folder: Path, submissions: Iterable[bytes]) -> None:
    """Note those of ``submissions`` that are of blocks, before their payloads go.

    Where the disk refuses, a report will know less, and nothing else suffers.
    """
    lines = []
    for submission, payload in journal.payloads(list(submissions)).items():
        told = read_told(payload)
        if told is not None:
            fields = {"submission": submission.hex(), "seconds": told[0], "losses": told[1]}
            lines.append(json.dumps(fields) + "\n")
    if lines:
        try:
            with (run_folder / UNITS_FILE).open("a") as file:
                file.write("".join(lines))
        except OSError as error:
            log.warning("losses of %d block units are not kept for the report: %s", len(lines), error)


def read_told(payload: bytes) -> Told | None:
    """From a signed payload; None where it is no block submission."""
    try:
        told = wire.decode(payload, BlockSubmission)
    except MalformedError:
        return None
    return told.train_ms / 1000, [loss for loss in told.losses if math.isfinite(loss)]


def read_notes(run_folder: Path) -> Iterator[tuple[bytes, Told]]:
    """(submission, what was told), oldest first; lines that a crash cut short are passed over."""
    try:
        with (run_folder / UNITS_FILE).open("rb") as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            note = json.loads(line)
            told = float(note["seconds"]), [float(loss) for loss in note["losses"]]
            yield bytes.fromhex(note["submission"]), told
        except (ValueError, KeyError, TypeError):
            continue
