"""Triton's interpreter in the tests' own process.

Triton decides when it is imported whether it interprets, for its own library too; so the
variable is set here first. Tests that compile take a process of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType

import pytest

MISSING = "triton is not installed: pip install 'barnraise[gpu]', or run make test-triton"


def kernels(name: str) -> ModuleType:
    """``barnraise.kernels.<name>``, to run on CPU tensors; the calling module's tests skip without triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip(MISSING, allow_module_level=True)
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    if not importlib.import_module("triton").knobs.runtime.interpret:
        pytest.skip("triton was imported to compile: set TRITON_INTERPRET=1", allow_module_level=True)
    return importlib.import_module(f"barnraise.kernels.{name}")
