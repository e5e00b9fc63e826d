"""What a block unit sends back: the difference of the block's weights, whole or in eight bits.

Eight bits: each row of a tensor (all but its last dimension flattened) is scaled by its
largest magnitude / 127 and rounded. What rounding loses is kept by the node and added
to its next difference of the same block (*error feedback*: Seide et al., "1-bit SGD",
Interspeech 2014), so that nothing is lost for good. A residual is at most half a
rounding step, which is all that a liar can move a difference by under its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from barnraise.kernels.models import ModelError
from barnraise.kernels.mot import Tensors

DeltaFormat = Literal["float32", "bfloat16", "int8"]
_CODE, _SCALE = "q.", "s."
_MOST_ADDED = 0.495  # rounding steps of a residual that go into one difference
_LEAST_SCALE = 1e-30


def difference(end: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tensors:
    """End minus start, float32."""
    return {name: end[name].float() - start[name].float() for name in start}


def encode_delta(
    delta: Mapping[str, Tensor], kind: DeltaFormat, residual: Mapping[str, Tensor] | None = None
) -> tuple[bytes, Tensors]:
    """A difference as the bytes to send, and what the encoding lost (end of this, start of the next).

    Args:
        residual: what the last encoding for the same block lost; added first. Of what was lost
            where steps were coarser than now, as much as ``rounding`` allows; the rest stays lost
            until a later one.
    """
    wanted = {name: value + (residual[name] if residual else 0.0) for name, value in delta.items()}
    tensors: Tensors = {}
    for name in sorted(wanted):
        value = wanted[name]
        if kind != "int8":
            tensors[name] = value.to(getattr(torch, kind)).contiguous()
            continue
        rows = _rows(delta[name])
        if residual:
            most = _MOST_ADDED * rows.abs().amax(dim=1, keepdim=True) / 127
            rows = rows + torch.clamp(_rows(residual[name]), -most, most)
        scale = (rows.abs().amax(dim=1) / 127).clamp_min(_LEAST_SCALE)
        tensors[_CODE + name] = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8).contiguous()
        tensors[_SCALE + name] = scale.contiguous()
    data = save_bytes(tensors)
    sent = decode_delta(data, kind, delta)
    return data, {name: wanted[name] - sent[name] for name in wanted}


def decode_delta(data: bytes, kind: DeltaFormat, like: Mapping[str, Tensor]) -> Tensors:
    """The difference that ``data`` stands for, float32; ``like`` gives its names and shapes.

    Raises:
        ModelError: damaged, other names, shapes or dtypes, or numbers that are not finite.
    """
    try:
        tensors = load_bytes(data)
    except (SafetensorError, ValueError, KeyError) as error:  # KeyError: a dtype that torch has not
        raise ModelError(f"a difference of {len(data)} bytes is no safetensors file: {error}") from error
    found: Tensors = {}
    for name, pattern in like.items():
        if kind == "int8":
            rows = _rows(pattern)
            code = _take(tensors, _CODE + name, torch.int8, tuple(rows.shape))
            scale = _take(tensors, _SCALE + name, torch.float32, (rows.shape[0],))
            _check_scale(name, code, scale)
            value = (code.float() * scale[:, None]).reshape(pattern.shape)
        else:
            value = _take(tensors, name, getattr(torch, kind), tuple(pattern.shape)).float()
        if not bool(torch.isfinite(value).all()):
            raise ModelError(f"{name} of a difference is not finite")
        found[name] = value
    if tensors:
        raise ModelError(f"a difference has {min(tensors)}, which is none of the block's")
    return found


def rounding(data: bytes, kind: DeltaFormat, like: Mapping[str, Tensor]) -> Tensors:
    """How far each weight of a decoded difference may honestly lie from the exact one.

    One rounding step for int8 (half for rounding, half for the residual before); one unit
    of bfloat16's precision; 0 for float32.
    """
    sent = decode_delta(data, kind, like)
    if kind == "float32":
        return {name: torch.zeros_like(value) for name, value in sent.items()}
    if kind == "bfloat16":
        return {name: value.abs() * 2.0**-7 + 1e-12 for name, value in sent.items()}
    scales = load_bytes(data)
    return {
        name: (scales[_SCALE + name][:, None] * torch.ones_like(_rows(value))).reshape(value.shape) * 1.001
        for name, value in sent.items()
    }


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1]) if value.dim() > 1 else value.reshape(1, -1)


def _check_scale(name: str, code: Tensor, scale: Tensor) -> None:
    """A row's largest code is 127, or its scale the least: a coarser one would hide what was added.

    Raises:
        ModelError: it is not.
    """
    fine = (code.int().abs().amax(dim=1) == 127) | (scale <= _LEAST_SCALE * 1.001)
    if code.numel() and not bool((fine & (scale > 0)).all()):
        raise ModelError(f"{_SCALE + name} of a difference is coarser than its largest weight needs")


def _take(tensors: Tensors, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    value = tensors.pop(name, None)
    if value is None or value.dtype != dtype or tuple(value.shape) != shape:
        raise ModelError(f"a difference must have {name} as {dtype} {shape}")
    return value
