"""A run's name is the hash of its spec; its spec is believed once its own operator's key signed it."""

from __future__ import annotations

from barnraise.protocol.envelope import content_id, open_signed
from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.manifest import ADAPTER_CONFIG, WEIGHTS_FILE
from barnraise.protocol.messages import Signed
from barnraise.protocol.pretrain import check_pretrain
from barnraise.protocol.spec import RunSpec


def run_id(signed_spec: Signed) -> bytes:
    """Return the run's id: the SHA-256 of the spec's canonical bytes (32 bytes)."""
    return content_id(signed_spec)


def open_run_spec(signed: Signed) -> RunSpec:
    """Check that a run spec is signed by the operator it names, and return it.

    Raises:
        SignatureError: signed by somebody else, or altered.
        MalformedError: properly signed, but not a run spec that this version can read.
    """
    spec = open_signed(signed, RunSpec, None)
    if spec.operator != signed.signer:
        raise SignatureError("the run spec names one operator and is signed by another: do not trust it")
    if (spec.phase == "pretrain") != (spec.pretrain is not None):
        raise MalformedError(
            f"a run spec of phase {spec.phase!r} must say how it pretrains, and no other may"
        )
    adapter = spec.model.adapter
    if adapter is not None:
        if spec.pretrain is not None:
            raise MalformedError("a run that pretrains changes all weights: it cannot have adapters")
        if ADAPTER_CONFIG not in spec.model.assets or WEIGHTS_FILE in spec.model.assets:
            raise MalformedError(f"a run with adapters pins {ADAPTER_CONFIG}, and its base by digest alone")
    if spec.pretrain is not None:
        check_pretrain(spec.pretrain, spec.rollout.versions)
    return spec
