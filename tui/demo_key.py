"""The key of a demo's run, made from its seed: the same demo twice is the same run.

A run's id is the hash of its spec, and the order of its data, its first weights and its
tasks are drawn from that id. A random key would make every demo another run, and
``--seed`` an empty promise.

**A key that follows from a number is no secret.** Whoever knows the seed can sign as the
operator. That costs nothing in a demo: the coordinator listens on 127.0.0.1 alone, its
volunteers are this machine's own processes, and the folder is deleted at the end. A run
that is kept (``demo --keep``) may be served to others later, so it gets a key of its
own, from the operating system's randomness, as every run of ``run init`` does.
"""

from __future__ import annotations

import hashlib

from barnraise.protocol.identity import Identity

MADE_MS = 1_767_225_600_000
"""2026-01-01, UTC: a spec holds the time at which it was made, and so does its hash."""


def key_of_seed(seed: int) -> Identity:
    """The operator's key of a throw-away run. Known to everybody: see above."""
    return Identity.from_private_bytes(hashlib.sha256(b"barnraise/1/demo run key\0%d" % seed).digest())
