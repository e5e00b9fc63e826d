"""Any Hugging Face decoder-only causal LM as a policy: load and swap.

Built from ``config.json`` (``barnraise.kernels.model_config``) and safetensors
(``barnraise.kernels.model_files``) alone: no pickle, no code from the model's folder, no
kernels fetched by name. Shapes are compared with the files' headers before a byte of
weights is allocated.

A policy is seen as two functions: ``hidden`` = the base model's post-norm
``last_hidden_state`` (what TOPLOC proves), and ``logits`` = output head of it,
computed only where needed. ``load_policy`` checks that together they *are* the model.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from barnraise.kernels.lora import Adapter, attach_adapter, load_adapter, read_adapter_config
from barnraise.kernels.model_config import check_derived, few_modules, read_config
from barnraise.kernels.model_files import (
    DTYPES,
    INDEX_NAME,
    WEIGHTS_NAME,
    check_fit,
    copy_weights,
    read_headers,
    save_tensors,
    save_weights,
    weight_files,
)
from barnraise.kernels.model_json import ModelError, read_json
from barnraise.protocol.manifest import ADAPTER_FILE

__all__ = [
    "DTYPES",
    "INDEX_NAME",
    "WEIGHTS_NAME",
    "ModelError",
    "Policy",
    "build_model",
    "load_policy",
    "random_policy",
    "read_config",
    "read_json",
    "read_model",
    "save_tensors",
    "save_weights",
    "swap_weights",
    "weight_files",
]


@dataclass
class Policy:
    """A loaded model in evaluation mode.

    ``head_weight`` [V, H] and ``head_bias`` [V] are the live parameters of the output
    head (``head_weight`` is the embedding where the two are tied); ``softcap`` is
    Gemma's final logit soft cap, or None. ``adapter``: what of it is trained, if not all.
    """

    model: nn.Module
    base: nn.Module
    device: torch.device
    compute_dtype: torch.dtype
    hidden_size: int
    vocabulary: int
    softcap: float | None
    cache_argument: str  # what this architecture's forward calls its key-value cache
    adapter: Adapter | None = None

    @property
    def head_weight(self) -> Tensor:
        weight: Tensor = _head(self.model).weight
        return weight

    @property
    def head_bias(self) -> Tensor | None:
        bias: Tensor | None = _head(self.model).bias
        return bias

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.model.config

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def hidden(self, input_ids: Tensor, **arguments: Any) -> Tensor:
        """Final post-norm hidden states [B, L, H] of ``input_ids`` [B, L], in the compute dtype."""
        state: Tensor = self.base(input_ids=input_ids, **arguments).last_hidden_state
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] of hidden states [..., H], soft cap applied."""
        logits = nn.functional.linear(hidden, self.head_weight, self.head_bias).float()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_policy(folder: Path, compute_dtype: str = "float32", device: str = "cpu") -> Policy:
    """Load ``config.json`` and safetensors (one file, or shards with an index) from ``folder``.

    With an ``adapter_config.json`` there the adapters beside it are part of the policy.

    Args:
        compute_dtype: ``"float32"`` or ``"bfloat16"``: what the parameters are held and run in.

    Raises:
        ModelError: a file is missing or damaged, the architecture is unknown or needs
            code of its own, or weights and config do not fit each other.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if compute_dtype not in DTYPES:
        raise ModelError(f"compute dtype {compute_dtype!r} is not one of {', '.join(DTYPES)}")
    config = read_config(folder)
    files = weight_files(folder)
    dtype = DTYPES[compute_dtype]
    shapes = read_headers(files)
    with torch.device("meta"), few_modules(len(shapes), folder):
        plan = _build(AutoModelForCausalLM, config, dtype)
    check_fit(plan, shapes, folder)
    check_derived(plan, shapes, folder)
    with no_init_weights():
        model = _build(AutoModelForCausalLM, config, dtype)
    model.tie_weights()  # type: ignore[operator]
    copy_weights(model, files)
    adapter = read_adapter_config(folder)
    if adapter is not None:
        attach_adapter(model, adapter, dtype)
        load_adapter(model, folder / ADAPTER_FILE)
    model.to(device)
    model.eval()
    policy = _wrap(model, torch.device(device), dtype)
    policy.adapter = adapter
    _check_head(policy, folder)
    return policy


def build_model(config: Any, dtype: torch.dtype, seed: int | None = None) -> nn.Module:
    """A causal LM of ``config`` without weights from a file, in evaluation mode.

    ``seed`` None leaves the weights unspecified (whoever asks fills them all);
    otherwise they are drawn as transformers draws them, the same for a seed.

    Raises:
        ModelError: transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if seed is None:
        with no_init_weights():
            model = _build(AutoModelForCausalLM, config, dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(AutoModelForCausalLM, config, dtype)
    model.tie_weights()  # type: ignore[operator]
    model.eval()
    return model


def random_policy(config: Any, compute_dtype: str, device: str, seed: int) -> Policy:
    """A policy of ``config`` with weights drawn as transformers draws them: to measure speed with.

    Raises:
        ModelError: transformers cannot build it.
    """
    dtype = DTYPES[compute_dtype]
    return _wrap(build_model(config, dtype, seed).to(device), torch.device(device), dtype)


def read_model(config: Any, path: Path) -> nn.Module:
    """A model of ``config`` in float32 with the weights in the safetensors file ``path``.

    Header and config are compared before anything of the model's size is made.

    Raises:
        ModelError: missing, damaged, or of another architecture.
    """
    from transformers import AutoModelForCausalLM

    shapes = read_headers((path,))
    with torch.device("meta"), few_modules(len(shapes), path.parent):
        plan = _build(AutoModelForCausalLM, config, torch.float32)
    check_fit(plan, shapes, path)
    check_derived(plan, shapes, path)
    model = build_model(config, torch.float32)
    copy_weights(model, (path,))
    return model


def swap_weights(policy: Policy, path: Path) -> None:
    """Copy another version's weights into ``policy`` in place.

    ``path`` is a safetensors file or a model folder. Headers are checked first, so a
    file that does not fit leaves the policy as it was. Of a policy with adapters only
    those are read: the base is the same in all versions.

    Raises:
        ModelError: missing, damaged, or of another architecture.
    """
    if policy.adapter is not None:
        load_adapter(policy.model, path / ADAPTER_FILE if path.is_dir() else path)
        return
    files = weight_files(path) if path.is_dir() else (path,)
    check_fit(policy.model, read_headers(files), path)
    copy_weights(policy.model, files)


def _build(factory: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    try:
        model: nn.Module = factory.from_config(config, dtype=dtype, trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"cannot build a causal LM from a {config.model_type} config: {error}") from error
    return model


def _wrap(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Policy:
    base: nn.Module = getattr(model, str(model.base_model_prefix))
    names = inspect.signature(base.forward).parameters
    text = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    softcap = getattr(text, "final_logit_softcapping", None)
    weight = _head(model).weight
    return Policy(
        model=model,
        base=base,
        device=device,
        compute_dtype=dtype,
        hidden_size=int(weight.shape[1]),
        vocabulary=int(weight.shape[0]),
        softcap=None if softcap is None else float(softcap),
        cache_argument="cache" if "cache" in names else "past_key_values",
    )


def _head(model: nn.Module) -> Any:
    return model.get_output_embeddings()  # type: ignore[operator]


@torch.no_grad()
def _check_head(policy: Policy, folder: Path) -> None:
    # Scaled logits, projections after the norm and the like would silently give
    # another policy than the model's own forward: refuse what we do not reproduce.
    ids = torch.arange(min(4, policy.vocabulary), device=policy.device)[None]
    theirs = policy.model(input_ids=ids, use_cache=False).logits.float()
    ours = policy.logits(policy.hidden(ids, use_cache=False))
    if not bool(torch.isfinite(theirs).all()):
        raise ModelError(f"the weights in {folder} give logits that are not finite; the files are damaged")
    tolerance = 1e-3 if policy.compute_dtype == torch.float32 else 0.1
    if ours.shape != theirs.shape or float((ours - theirs).abs().max()) > tolerance:
        raise ModelError(
            f"the output head of {policy.config.model_type} does more than a linear layer and a soft cap; "
            "this architecture is not supported"
        )
