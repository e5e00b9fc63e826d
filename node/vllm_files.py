"""What is checked of a version's files before vLLM, which believes more than we do, is shown them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from barnraise.kernels.model_config import check_derived, few_modules, read_config
from barnraise.kernels.model_files import check_fit, read_headers, weight_files
from barnraise.kernels.models import build_model


def check_folder(folder: Path) -> tuple[Any, str]:
    """Config and class name of a model whose safetensors files in ``folder`` fit it; no weights are read.

    A config need not name its class, and vLLM guesses then, without knowing what the model is for.

    Raises:
        ModelError: as ``barnraise.kernels.models.load_policy`` does.
    """
    config = read_config(folder)
    shapes = read_headers(weight_files(folder))
    with torch.device("meta"), few_modules(len(shapes), folder):
        plan = build_model(config, torch.float32)
    check_fit(plan, shapes, folder)
    check_derived(plan, shapes, folder)
    return config, type(plan).__name__
