"""Seeds that both sides derive, so that nobody chooses: which task, which noise.

All are the first eight bytes (big-endian) of a SHA-256 over a domain name and
fixed-width fields.
"""

from __future__ import annotations

import hashlib


def _seed(domain: bytes, *fields: bytes) -> int:
    digest = hashlib.sha256(b"barnraise/1/" + domain + b"\0")
    for field in fields:
        digest.update(len(field).to_bytes(4, "big") + field)
    return int.from_bytes(digest.digest()[:8], "big")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "big")


def task_seed(run_id: bytes, lease_id: bytes, node: bytes, prompt: int) -> int:
    """Seed (64 bits) of the task behind prompt ``prompt`` of a lease."""
    return _seed(b"task", run_id, lease_id, node, _u64(prompt))


def sample_seed(run_id: bytes, lease_id: bytes, prompt: int, sample: int) -> int:
    """Seed (64 bits) of the Gumbel noise of one sample of one prompt; the position is the counter."""
    return _seed(b"sample", run_id, lease_id, _u64(prompt), _u64(sample))


def held_out_seed(run_id: bytes, index: int) -> int:
    """Seed (64 bits) of the ``index``-th held-out task of a run."""
    return _seed(b"held-out", run_id, _u64(index))
