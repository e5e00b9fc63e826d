"""What stands in for the model: a policy that is one number and some noise.

Everything around it is the real thing: manifests, shards, patches, leases, signatures,
submissions, the checks that need no model, the ledger. Only prefill, decoding and
backward are replaced by hashes, because a thousand models do not fit into a test.

A policy is a safetensors file with a scalar ``skill`` in [0, 1] and as much noise as the
scenario's ``model_bytes`` asks for. Its digest keys a hash from which tokens,
log-probabilities and proofs follow, so that work done with another version, for another
prompt, or edited afterwards does not verify, as with the real proofs (section 5 of the
design). A token is "right" with probability ``skill``; the reward of a completion is its
share of right tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from barnraise.protocol.durable import replace_file
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.manifest import WEIGHTS_FILE
from barnraise.protocol.messages import Rollout
from barnraise.protocol.seeds import sample_seed, task_seed

VOCABULARY = 64
EOS = 0
RIGHT = VOCABULARY // 2  # token ids from here on count as right
PROOF_BYTES = 258
CHUNK = 32


@dataclass(frozen=True)
class Policy:
    """One version's weights as the stand-in sees them."""

    version: int
    skill: float
    digest: bytes


def write_model(folder: Path, size: int, seed: int) -> None:
    """A model folder that ``create_run`` accepts: config, tokenizer and version 0's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "standin", "vocab_size": VOCABULARY, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "standin"}}))
    write_policy(folder / WEIGHTS_FILE, 0.1, noise(size, seed), 0)


def noise(size: int, seed: int) -> bytes:
    """``size`` bytes (an even number, two at least) that follow from ``seed``."""
    return hashlib.shake_256(b"standin" + seed.to_bytes(8, "big")).digest(max(2, size) // 2 * 2)


def write_policy(path: Path, skill: float, noise: bytes, version: int) -> None:
    """Write a version; consecutive ones differ in ``skill`` and about one value of noise in a hundred."""
    changed = bytearray(noise)
    step = 200
    for at in range((version * 2) % step, len(changed) - 1, step):
        changed[at] ^= (version * 37 + at) & 0x3F
    header = {
        "noise": {"dtype": "BF16", "shape": [len(changed) // 2], "data_offsets": [0, len(changed)]},
        "skill": {"dtype": "BF16", "shape": [2], "data_offsets": [len(changed), len(changed) + 4]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    replace_file(path, len(text).to_bytes(8, "little") + text + bytes(changed) + struct.pack("<f", skill))


def read_policy(path: Path, version: int) -> Policy:
    """Read a version's weights file.

    Raises:
        RunFolderError: it is not there, or not a stand-in's.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from None
    (skill,) = struct.unpack("<f", data[-4:])
    if not 0.0 <= skill <= 1.0:
        raise RunFolderError(f"{path} is no stand-in policy")
    return Policy(version, skill, hashlib.blake2b(data, digest_size=32).digest())


@lru_cache(maxsize=4096)  # whoever judges draws what was drawn a moment ago
def complete(
    policy: Policy, task: int, sample: int, length: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Tokens (uint32 [length]) and log-probabilities (float32 [length]) of one sample; read-only."""
    stream = hashlib.shake_256(policy.digest + struct.pack(">QQ", task, sample)).digest(length * 4)
    words = np.frombuffer(stream, dtype="<u4")
    right = (words >> 8).astype(np.float64) / 2**24 < policy.skill
    low = 1 + (words & 0xFF) % (RIGHT - 1)
    tokens = np.where(right, RIGHT + (words & 0xFF) % (VOCABULARY - RIGHT), low).astype(np.uint32)
    # Two outcomes, each spread evenly over half of the vocabulary.
    high, rest = max(policy.skill, 1e-6), max(1.0 - policy.skill, 1e-6)
    logprobs = np.where(right, math.log(high / (VOCABULARY - RIGHT)), math.log(rest / (RIGHT - 1)))
    claimed = logprobs.astype(np.float32)
    tokens.flags.writeable = claimed.flags.writeable = False
    return tokens, claimed


def prove(policy: Policy, task: int, tokens: bytes) -> bytes:
    """Proof bytes of one completion: ``PROOF_BYTES`` for each chunk of 32 tokens begun."""
    chunks = -(-len(tokens) // (4 * CHUNK))
    return hashlib.shake_256(policy.digest + struct.pack(">Q", task) + tokens).digest(PROOF_BYTES * chunks)


def rollouts(
    policy: Policy, run_id: bytes, lease_id: bytes, node: bytes, prompts: int, group_size: int, length: int
) -> tuple[Rollout, ...]:
    """A whole unit, ordered by prompt, then sample."""
    made = []
    for prompt in range(prompts):
        task = task_seed(run_id, lease_id, node, prompt)
        for sample in range(group_size):
            seed = sample_seed(run_id, lease_id, prompt, sample)
            tokens, logprobs = complete(policy, task, seed, length)
            data = tokens.tobytes()
            made.append(
                Rollout(
                    prompt=prompt,
                    sample=sample,
                    tokens=data,
                    logprobs=logprobs.tobytes(),
                    proofs=prove(policy, task, data),
                )
            )
    return tuple(made)


def reward(tokens: npt.NDArray[np.int64]) -> float:
    """The share of right tokens."""
    return float((tokens >= RIGHT).mean())


def noise_of(path: Path) -> bytes:
    """The noise of a version's weights file, to make the next one from."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") : -4]
