"""Text to token ids and back, the same on every side.

``plain``: the prompt's text alone, behind the beginning-of-sequence token where the
tokenizer itself puts one, and no other special token. ``chat``: the tokenizer's own
chat template over (system prompt, prompt), ready for the answer
(``barnraise.kernels.chat_template``). Read from ``tokenizer.json`` and
``tokenizer_config.json``: no code from the model's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from barnraise.kernels.chat_template import ChatTemplate
from barnraise.kernels.model_json import ModelError, read_json
from barnraise.kernels.special_tokens import named_token, read_tokenizer
from barnraise.protocol.limits import bounded
from barnraise.protocol.spec import EnvironmentSpec

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# A chat template comes with the run. A real one takes milliseconds.
TEMPLATE_SECONDS = 5.0
TEMPLATE_BYTES = 1024**3
MAX_PROMPT = 4 * 1024**2  # characters


class Codec:
    """Prompts to tokens and completions to text for one environment.

    Attributes:
        eos_token: the tokenizer's own end-of-sequence id; ``ModelSpec.ends`` has it and others.
        start: the beginning-of-sequence id, alone, where plain prompts get one; else empty.
        vocabulary: how many ids the tokenizer knows (a model may have more rows).
    """

    def __init__(self, folder: Path, environment: EnvironmentSpec) -> None:
        """Read the tokenizer in ``folder``.

        Raises:
            ModelError: no or a damaged tokenizer, no end-of-sequence token, or no chat
                template where the environment wants one.
        """
        self._environment = environment
        self._tokenizer = read_tokenizer(folder)
        self.vocabulary: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token: int = _eos_token(folder, self._tokenizer)
        self.start: tuple[int, ...] = _start(folder, self._tokenizer)
        self._chat: ChatTemplate | None = None
        if environment.prompt_format == "chat":
            with bounded("the chat template", seconds=TEMPLATE_SECONDS, memory=TEMPLATE_BYTES):
                self._chat = ChatTemplate(folder)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a task's prompt, at least one.

        Raises:
            ModelError: nothing is left of the prompt, or the chat template fails on it.
        """
        if self._chat is None:
            text: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
            ids = [*self.start, *text] if text else []
        else:
            ids = self._encode_chat(self._chat, prompt)
        if not ids:
            raise ModelError(f"the tokenizer turns the prompt {prompt[:40]!r} into no tokens at all")
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion without special tokens; ids that the tokenizer does not know are left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def _encode_chat(self, chat: ChatTemplate, prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        if self._environment.system_prompt:
            messages.insert(0, {"role": "system", "content": self._environment.system_prompt})
        try:
            with bounded("it", seconds=TEMPLATE_SECONDS, memory=TEMPLATE_BYTES):
                text = chat.render(messages)
            if len(text) > MAX_PROMPT:
                raise ModelError(
                    f"it makes a text of {len(text)} characters, at most {MAX_PROMPT} are allowed"
                )
        except Exception as error:  # a template is a program of the model's author: whatever it raises
            raise ModelError(f"the model's chat template fails on {prompt[:40]!r}: {error}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _eos_token(folder: Path, tokenizer: Any) -> int:
    """``tokenizer_config.json``'s end token; else the first end id of the generation or model config."""
    named = named_token(folder, tokenizer, "eos_token")
    if named is not None:
        return named
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            first = value[0] if isinstance(value, list) and value else value
            if type(first) is int and first >= 0:
                return first
    raise ModelError(
        f"the tokenizer in {folder} names no end-of-sequence token; set eos_token in tokenizer_config.json"
    )


def _start(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """The token that the tokenizer's own rules begin a text with, if it is the one named ``bos_token``."""
    named = named_token(folder, tokenizer, "bos_token")
    added: list[int] = tokenizer.encode("", add_special_tokens=True).ids
    return (named,) if named is not None and added[:1] == [named] else ()
