"""The options of a ``join`` as they were given, to start the same node in another process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from barnraise.node.config import default_data_path
from barnraise.tui.given_invite import invite_file

# What says how this process shows the node, not what the node does.
SHOWING = frozenset({"headless", "plain", "as_json", "background"})


def as_given(context: typer.Context) -> list[str]:
    """The command line's arguments again, without those about showing; paths are made absolute.

    An invite is named by the file that has it, see ``barnraise.tui.given_invite.keep_invite``.
    """
    words: list[str] = []
    options: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in SHOWING or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if name == "invite":
            value = invite_file(value, Path(context.params.get("data") or default_data_path()))
        if parameter.param_type_name == "argument":
            words.append(_text(value))
        elif isinstance(value, bool):
            options += [parameter.opts[0]] if value else []
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                options += [parameter.opts[0], _text(each)]
    return [*words, *options]


def _text(value: Any) -> str:
    return os.path.abspath(value) if isinstance(value, Path) else str(value)
