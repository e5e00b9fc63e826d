"""MkDocs hooks: the pages that are made, not written, and links where the sources have plain words.

The pages in docs/ are read on their own as well, so they name each other and the code in words
(``docs/ledger.md``, `protocol/merkle.py`); on the site those words become links.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "protocol": "what all peers agree on",
    "kernels": "numerics for both sides",
    "node": "the volunteer's daemon and its engine",
    "coordinator": "the operator's side",
    "simulation": "a whole swarm in virtual time",
}
VECTORS = "tests/data/protocol_vectors.json"
_FENCED = re.compile(r"^(```.*?^```|(?: {4}.*\n)+)", re.MULTILINE | re.DOTALL)
_PAGE = re.compile(
    r"(?<!\[)`docs/((?:decisions/)?[\w-]+\.md)`|(?<![\w/`\[])docs/((?:decisions/)?[\w-]+\.md)\b"
)
_SOURCE = re.compile(r"(?<!\[)`((?:" + "|".join(PACKAGES) + r")/[\w/]+)\.py`(?!\])")
_SENTENCE = re.compile(r"(.+?[.:;])(?:\s|$)", re.DOTALL)


def modules(package: str) -> dict[str, str]:
    """Public modules of a package by dotted name below it, with the first sentence of each."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        if any(part.startswith("_") for part in parts):
            continue
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = _SENTENCE.match(told)
        found[".".join(parts)] = " ".join((first[1] if first else told).rstrip(":;").split())
    return found


def on_startup(command: str, dirty: bool) -> None:
    """Lay the packages out as they are imported, for mkdocstrings, which reads them without importing."""
    names = ROOT / "build/docs-source/barnraise"
    names.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        link = names / package
        if not link.is_symlink():
            link.symlink_to(ROOT / package, target_is_directory=True)


def on_config(config: Any) -> Any:
    """Complete the navigation."""
    docs = Path(config.docs_dir)
    decisions = sorted(path.relative_to(docs).as_posix() for path in (docs / "decisions").glob("*.md"))
    for section in config.nav:
        for title, entries in section.items():
            if title == "Developer":
                entries[-1] = {"Decisions": decisions}
            elif title == "API":
                entries += [f"reference/{package}.md" for package in PACKAGES]
    named = str(config.nav)
    if more := sorted(path.name for path in docs.glob("*.md") if f"'{path.name}'" not in named):
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: Any) -> Files:
    """The API reference, a page for each module, and the protocol's test vectors."""

    def page(name: str, text: str) -> None:
        files.append(File.generated(config, f"reference/{name}.md", content=text))

    told_once = (
        "From the docstrings. Imports point down only: simulation; node and coordinator; kernels; protocol."
    )
    index = ["# API reference", "", told_once, ""]
    for package, what in PACKAGES.items():
        index.append(f"- [barnraise.{package}]({package}.md): {what}")
        table = [
            f"# barnraise.{package}",
            "",
            f"{what[0].upper()}{what[1:]}.",
            "",
            "| module | |",
            "| --- | --- |",
        ]
        for name, told in modules(package).items():
            table.append(f"| [`{name}`]({package}/{name}.md) | {told.replace('|', chr(92) + '|')} |")
            page(f"{package}/{name}", f"# barnraise.{package}.{name}\n\n::: barnraise.{package}.{name}\n")
        page(package, "\n".join(table) + "\n")
    page("index", "\n".join(index) + "\n")
    files.append(File.generated(config, "protocol_vectors.json", abs_src_path=str(ROOT / VECTORS)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links instead of words, outside of code blocks."""
    here = posixpath.dirname(page.file.src_uri)

    def to(target: str, shown: str) -> str:
        return (
            f"[{shown}]({posixpath.relpath(target, here or '.')})"
            if files.get_file_from_path(target)
            else shown
        )

    def prose(text: str) -> str:
        text = _PAGE.sub(lambda found: to(found[1] or found[2], found[0]), text)
        text = text.replace(f"`{VECTORS}`", to("protocol_vectors.json", f"`{VECTORS}`"))

        def module(found: re.Match[str]) -> str:
            package, _, rest = found[1].partition("/")
            return to(f"reference/{package}/{rest.replace('/', '.')}.md", found[0])

        return _SOURCE.sub(module, text)

    if here.startswith("reference"):
        return markdown
    parts = _FENCED.split(markdown)
    return "".join(part if index % 2 else prose(part) for index, part in enumerate(parts))
