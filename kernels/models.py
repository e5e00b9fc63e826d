"""Any Hugging Face decoder-only causal LM as a policy: load, swap, save.

Built from ``config.json`` and safetensors alone: no pickle, no code from the model's
folder, no kernels fetched by name. Shapes are compared with the files' headers
before a byte of weights is allocated.

A policy is seen as two functions: ``hidden`` = the base model's post-norm
``last_hidden_state`` (what TOPLOC proves), and ``logits`` = output head of it,
computed only where needed. ``load_policy`` checks that together they *are* the model.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.protocol.limits import bounded

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_JSON = 16 * 1024 * 1024
# A config comes with the run, and each number in it may ask for more than there is.
MAX_LAYERS = 4096
MAX_NUMBER = 2**40
MAX_LISTED = 2**24
MAX_DERIVED_BYTES = 2 * 1024**3  # tables that a model computes for itself, beside its weights
PLAN_SECONDS = 120.0
PLAN_BYTES = 2 * 1024**3


class ModelError(BarnraiseError):
    """A folder does not hold a model that can be loaded; the text says which file and why."""


@dataclass
class Policy:
    """A loaded model in evaluation mode.

    ``head_weight`` [V, H] and ``head_bias`` [V] are the live parameters of the output
    head (``head_weight`` is the embedding where the two are tied); ``softcap`` is
    Gemma's final logit soft cap, or None.
    """

    model: nn.Module
    base: nn.Module
    device: torch.device
    compute_dtype: torch.dtype
    hidden_size: int
    vocabulary: int
    softcap: float | None
    cache_argument: str  # what this architecture's forward calls its key-value cache

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
    shapes = _headers(files)
    with torch.device("meta"), _few_modules(len(shapes), folder):
        plan = _build(AutoModelForCausalLM, config, dtype)
    _check_fit(plan, shapes, folder)
    _check_derived(plan, shapes, folder)
    with no_init_weights():
        model = _build(AutoModelForCausalLM, config, dtype)
    model.tie_weights()  # type: ignore[operator]
    _copy_weights(model, files)
    model.to(device)
    model.eval()
    policy = _wrap(model, torch.device(device), dtype)
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

    shapes = _headers((path,))
    with torch.device("meta"), _few_modules(len(shapes), path.parent):
        plan = _build(AutoModelForCausalLM, config, torch.float32)
    _check_fit(plan, shapes, path)
    _check_derived(plan, shapes, path)
    model = build_model(config, torch.float32)
    _copy_weights(model, (path,))
    return model


def swap_weights(policy: Policy, path: Path) -> None:
    """Copy another version's weights into ``policy`` in place.

    ``path`` is a safetensors file or a model folder. Headers are checked first, so a
    file that does not fit leaves the policy as it was.

    Raises:
        ModelError: missing, damaged, or of another architecture.
    """
    files = weight_files(path) if path.is_dir() else (path,)
    _check_fit(policy.model, _headers(files), path)
    _copy_weights(policy.model, files)


def save_weights(model: nn.Module, path: Path, dtype: str) -> None:
    """Write ``model``'s weights to ``path`` as one safetensors file, atomically and synced.

    Tied weights are written once. The same weights give the same bytes.

    Args:
        dtype: ``"float32"`` or ``"bfloat16"``; floating-point tensors are cast to it.

    Raises:
        StorageError: the disk refused.
    """
    target = DTYPES[dtype]
    tensors = {
        name: tensor.detach().to("cpu", target if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in _own_tensors(model)
    }
    save_tensors(tensors, path)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write ``tensors`` (CPU, contiguous) to ``path`` as safetensors: temporary file, sync, rename.

    Raises:
        StorageError: the disk refused.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        raise StorageError(f"cannot write {path} ({size / 1e6:.1f} MB): {error}") from error


def read_config(folder: Path) -> Any:
    """The transformers config of ``folder``'s ``config.json``, with nothing in it that names code.

    Raises:
        ModelError: missing, not JSON, unknown ``model_type``, remote code, quantised, or an encoder-decoder.
    """
    from transformers import CONFIG_MAPPING

    data = read_json(folder / "config.json")
    model_type = data.get("model_type")
    if "auto_map" in data:
        raise ModelError(
            f"{folder / 'config.json'} asks for code of its own (auto_map), which is never run; "
            "use a model whose architecture transformers itself knows"
        )
    if data.get("quantization_config") is not None:
        raise ModelError(f"{folder / 'config.json'} describes quantised weights; use the float version")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{folder / 'config.json'} has model_type {model_type!r}, unknown to the installed transformers; "
            "update transformers, or use another model"
        )
    _check_numbers(data, folder / "config.json")
    try:
        with bounded("it", seconds=PLAN_SECONDS, memory=PLAN_BYTES):
            config = CONFIG_MAPPING[model_type].from_dict(_plain(data))
    except Exception as error:
        raise ModelError(
            f"{folder / 'config.json'} does not describe a {model_type} model: {error}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{folder} holds an encoder-decoder ({model_type}); a decoder-only model is needed")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path`` (at most 16 MB).

    Raises:
        ModelError: missing, too long, or not a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ModelError(f"{path} is longer than {_MAX_JSON} bytes")
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; a Hugging Face model folder is expected") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object")
    return data


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, sorted.

    Raises:
        ModelError: there are none, or the index names a file outside the folder or a missing one.
    """
    single = folder / WEIGHTS_NAME
    if single.is_file():
        return (single,)
    index = folder / INDEX_NAME
    if not index.is_file():
        raise ModelError(
            f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; only safetensors are read "
            "(pickled .bin files are refused: convert them first)"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no weight_map")
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    for file in files:
        if file.parent != folder or not file.is_file():
            raise ModelError(f"{index} names {file.name}, which is not in {folder}")
    return files


def _plain(value: Any) -> Any:
    """``value`` without the keys that choose an implementation or a dtype, or belong to classifiers."""
    if isinstance(value, dict):
        banned = (
            *("attn_implementation", "experts_implementation", "dtype", "torch_dtype"),
            *("num_labels", "id2label", "label2id"),
        )
        return {k: _plain(v) for k, v in value.items() if not k.startswith("_") and k not in banned}
    return value


def _check_numbers(value: Any, where: Path, key: str = "", listed: bool = False) -> None:
    """Refuse counts that would be unrolled into lists and modules without end."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_numbers(item, where, name)
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item, where, key, listed=True)
    elif isinstance(value, int):
        layers = "layer" in key.lower() and not listed
        most = MAX_LAYERS if layers else MAX_LISTED if listed else MAX_NUMBER
        if abs(value) > most:
            raise ModelError(f"{where} asks for {key} {value:.6g}; at most {most} are allowed")


@contextmanager
def _few_modules(tensors: int, folder: Path) -> Iterator[None]:
    """Stop the building of a model that has far more modules than its files have tensors."""
    most = 1000 + 50 * tensors
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ModelError(
                f"config.json in {folder} describes a model of more than {most} modules, "
                f"but the weights beside it hold {tensors} tensors: the two do not fit each other"
            )

    hook = register_module_module_registration_hook(count)
    try:
        with bounded(f"the model in {folder}", seconds=PLAN_SECONDS, memory=PLAN_BYTES):
            yield
    finally:
        hook.remove()


def _check_derived(plan: nn.Module, shapes: dict[str, list[int]], where: Path) -> None:
    """Refuse tables that no file holds (masks, rotary angles) when they are out of all proportion."""
    derived = sum(
        buffer.numel() * buffer.element_size() for name, buffer in plan.named_buffers() if name not in shapes
    )
    if derived > MAX_DERIVED_BYTES:
        raise ModelError(
            f"the model in {where} needs {derived / 1e9:.1f} GB for tables that it computes itself, "
            f"at most {MAX_DERIVED_BYTES / 1e9:.1f} GB are allowed; see max_position_embeddings"
        )


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


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once, under their first name) and persistent buffers, by name."""
    parameters = dict(model.named_parameters())  # removes duplicates
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from parameters.items()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in aliases:
            yield name, tensor


def _headers(files: tuple[Path, ...]) -> dict[str, list[int]]:
    """Shape of every tensor in ``files``; nothing but headers is read."""
    shapes: dict[str, list[int]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in shapes:
                        raise ModelError(f"{path} holds {name} a second time")
                    shapes[name] = list(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
    return shapes


def _check_fit(model: nn.Module, shapes: dict[str, list[int]], where: Path) -> None:
    own = {name: list(tensor.shape) for name, tensor in _own_tensors(model)}
    missing = sorted(own.keys() - shapes.keys())
    unknown = sorted(shapes.keys() - own.keys() - model.state_dict(keep_vars=True).keys())
    wrong = sorted(name for name in own.keys() & shapes.keys() if own[name] != shapes[name])
    for what, names in (
        ("missing", missing),
        ("not of this architecture", unknown),
        ("of another shape", wrong),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"weights in {where} do not fit config.json: {', '.join(names[:3])}{more} {what}"
            )


@torch.no_grad()
def _copy_weights(model: nn.Module, files: tuple[Path, ...]) -> None:
    own = dict(_own_tensors(model))
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in own:  # the other name of a tied weight is not read
                    own[name].copy_(file.get_tensor(name))
