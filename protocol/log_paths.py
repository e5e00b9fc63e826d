"""Where the run spec lies beside a log's static files: ``spec/<run id in hex>``.

The run id is the SHA-256 of the spec's payload, so that nobody can serve another one there.
The file is the ``Signed`` envelope as ``wire.encode`` has it.
"""

from __future__ import annotations

import re

_SPEC = re.compile(r"spec/[0-9a-f]{64}")


def spec_path(run_id: bytes) -> str:
    """The path of a run's signed spec, below the log's prefix."""
    return f"spec/{run_id.hex()}"


def is_spec_path(path: str) -> bool:
    """Whether it is one of those."""
    return _SPEC.fullmatch(path) is not None
