"""A tokenizer's chat template, rendered as transformers does it, and the same on every machine.

A template is a program (Jinja) that comes with the run. It runs in Jinja's immutable sandbox
and sees the messages, the tokenizer's special tokens and nothing else: no clock, no chance,
no files. The caller bounds time and memory (``barnraise.protocol.limits``).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from barnraise.kernels.model_json import ModelError, read_json

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"
MAX_TEMPLATE = 1024**2  # characters; the longest in use have some ten thousand
TODAY = datetime.date(2024, 7, 26)
"""What Llama 3's template says where it cannot ask. The true date would differ between node and
verifier around midnight, and between versions of a run."""


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, folder: Path) -> None:
        """Read and compile the template of the tokenizer in ``folder``.

        Raises:
            ModelError: there is none, or it is no template.
        """
        settings = read_json(folder / SETTINGS_FILE) if (folder / SETTINGS_FILE).is_file() else {}
        source = _source(folder, settings)
        if not source:
            raise ModelError(f"the tokenizer in {folder} has no chat template: use --plain-prompts")
        if len(source) > MAX_TEMPLATE:
            raise ModelError(f"the chat template in {folder} is longer than {MAX_TEMPLATE} characters")
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # the compiler of a language meets a stranger's text
            raise ModelError(f"the chat template in {folder} cannot be read: {error}") from error
        self._tokens = _special_tokens(folder, settings)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text for ``messages`` (``role``, ``content``), ending where the answer begins.

        Raises whatever the template does; it is a program of the model's author.
        """
        return self._template.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._tokens,
        )


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks an assistant's text: here it is just text."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    del made.filters["random"]
    made.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = TODAY.strftime
    for name in ("lipsum", "cycler", "joiner"):
        made.globals.pop(name, None)
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _source(folder: Path, settings: Mapping[str, Any]) -> str:
    """The template's text: a file of its own before the settings, there the one named ``default``."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(MAX_TEMPLATE + 1)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = [item for item in found if isinstance(item, dict) and item.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else ""


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like with their texts."""
    legacy = folder / "special_tokens_map.json"
    sources = [read_json(legacy)] if legacy.is_file() else []
    tokens: dict[str, str] = {}
    for source in (*sources, settings):
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and name.isidentifier() and isinstance(text, str):
                tokens[name] = text
    return tokens
