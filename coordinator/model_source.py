"""Where a run's first weights come from: a built-in model, a folder, or a Hugging Face repository.

Only configuration, tokenizer and safetensors are ever taken; a folder that offers
pickled weights alone is refused where it is loaded (``barnraise.kernels.models``).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from barnraise.protocol.environments import build_environment
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.manifest import ADAPTER_CONFIG, ADAPTER_FILE, WEIGHTS_FILE
from barnraise.protocol.spec import Dtype, EnvironmentSpec

BUILT_IN = ("demo", "smollm2")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_WANTED = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"]
_WANTED += ["chat_template.jinja", "*.safetensors", "model.safetensors.index.json"]

Progress = Callable[[str, float], None]


class ModelSourceError(BarnraiseError):
    """The model asked for cannot be had; the text names the cause and the cure."""


def resolve_model(model: str, scratch: Path, seed: int, progress: Progress) -> Path:
    """Return a folder with config.json, tokenizer and safetensors of ``model``.

    Args:
        model: ``"demo"``, ``"smollm2"``, a folder, or a Hugging Face id ``owner/name``.
        scratch: where a model that is made on the spot may be written.
        progress: called with what is being done and the finished fraction.

    Raises:
        ModelSourceError: no such folder, or the repository cannot be downloaded.
        BarnraiseError: the model itself cannot be made or fetched.
    """
    if model == "demo":
        from barnraise.kernels.demo_model import create_demo_model

        create_demo_model(scratch / "model", seed, progress)
        return scratch / "model"
    if model == "smollm2":
        from barnraise.kernels.smollm2 import prepare_smollm2

        return prepare_smollm2(progress)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelSourceError(f"{folder} is a file; name the folder that holds config.json and safetensors")
    if _HUB_ID.match(model):
        return _from_hub(model, progress)
    raise ModelSourceError(
        f"there is no model {model!r}: name a folder, a Hugging Face id such as Qwen/Qwen3-0.6B, "
        f"or one of {', '.join(BUILT_IN)}"
    )


def _from_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {model} from the Hugging Face hub", 0.0)
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED))
    except Exception as error:  # the hub client raises its own, requests' and the OS's errors alike
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelSourceError(
            f"{model} is no folder here, and the Hugging Face hub did not deliver it ({cause}); "
            "check the name and the connection, or download it yourself and name the folder"
        ) from error


class AdapterChoice(NamedTuple):
    """Adapters that a run is to train instead of the model; ``targets`` empty: all linear layers."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def prepare_model(
    source: Path,
    target: Path,
    weights_dtype: Dtype,
    environment: EnvironmentSpec,
    adapter: AdapterChoice | None = None,
    seed: int = 0,
) -> None:
    """Copy a model into ``target`` as a run publishes it: one safetensors file in ``weights_dtype``.

    The model is loaded, draws a few tokens, and its tokenizer encodes a task of
    ``environment``, so that what cannot work is refused before anything is signed. With
    ``adapter`` the target also holds first adapters, drawn by ``seed``.

    Raises:
        BarnraiseError: the folder holds no model that can be loaded, or the tokenizer or
            the environment cannot be used.
    """
    from barnraise.kernels import lora
    from barnraise.kernels.agreement import check_agreement
    from barnraise.kernels.models import load_policy, save_weights
    from barnraise.kernels.tokens import Codec

    if (source / ADAPTER_CONFIG).is_file():
        raise ModelSourceError(
            f"{source} holds adapters ({ADAPTER_CONFIG}): merge them into their model and save it whole first"
        )
    policy = load_policy(source, "float32")
    check_agreement(policy)
    prompt = build_environment(environment).task(0, held_out=True).prompt
    Codec(source, environment).encode_prompt(prompt)
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    save_weights(policy.model, target / WEIGHTS_FILE, weights_dtype)
    if adapter is not None:
        names = tuple(sorted(set(adapter.targets))) or lora.linear_targets(policy.model)
        chosen = lora.Adapter(adapter.rank, adapter.alpha, names)
        lora.attach_adapter(policy.model, chosen, policy.compute_dtype)
        lora.start_adapter(policy.model, seed)
        lora.write_adapter_config(chosen, target)
        lora.save_adapter(policy.model, target / ADAPTER_FILE, weights_dtype)
