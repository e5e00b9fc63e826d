"""The JSON files of a model's folder: read with a bound, and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from barnraise.protocol.errors import BarnraiseError

_MAX_JSON = 16 * 1024 * 1024


class ModelError(BarnraiseError):
    """A folder does not hold a model that can be loaded; the text says which file and why."""


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
