"""A model's tokenizer, and the ids of the special tokens that its settings name. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from barnraise.kernels.model_json import ModelError, read_json
from barnraise.protocol.limits import bounded

SETTINGS = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
# A tokenizer comes with the run. A real one takes a few seconds and 200 MB.
READ_SECONDS = 120.0
READ_BYTES = 4 * 1024**3


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of ``folder``'s ``tokenizer.json``, without padding and truncation.

    Raises:
        ModelError: missing or damaged, or it takes too much time or memory.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        raise ModelError(
            f"{path} is missing; the model needs a fast tokenizer "
            "(save it with transformers' AutoTokenizer.save_pretrained)"
        )
    try:
        with bounded("it", seconds=READ_SECONDS, memory=READ_BYTES):
            tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:  # the bindings raise plain Exception, or PanicException, which is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def named_token(folder: Path, tokenizer: Any, name: str) -> int | None:
    """The id of the token that ``tokenizer_config.json`` has under ``name``, such as ``eos_token``.

    None: it has none there, or ``tokenizer`` does not know it.

    Raises:
        ModelError: the file cannot be read.
    """
    settings = folder / SETTINGS
    token = read_json(settings).get(name) if settings.is_file() else None
    if isinstance(token, dict):  # the form of an AddedToken
        token = token.get("content")
    known = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return None if known is None else int(known)
