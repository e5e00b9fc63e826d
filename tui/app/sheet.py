"""Labels and texts in two columns, wrapped with a hanging indent, drawn anew only where they changed.

A text is pieces with a tone each (``theme.TONES``): how something stands, never a colour, so
that screens are plain functions of the state and every theme fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.content import Content
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from barnraise.tui.app.theme import TONES

Piece = tuple[str, str]  # text, tone
Words = tuple[Piece, ...]
Row = tuple[str, Words]
Line = list[Piece]

SPARKS = "▁▂▃▄▅▆▇█"


def words(*parts: str | Piece) -> Words:
    """Pieces from texts and (text, tone) pairs; empty ones are left out."""
    pieces = (part if isinstance(part, tuple) else (part, "") for part in parts)
    return tuple(piece for piece in pieces if piece[0])


def bar(share: float, width: int) -> Words:
    """A progress bar of ``width`` cells; ``share`` in [0, 1] is finished."""
    share = min(1.0, max(0.0, share))
    full = int(share * width)  # never more than is finished (R7)
    return words(("━" * full, "bar"), ("─" * (width - full), "track"))


def spark(values: Sequence[float], width: int) -> str:
    """The newest ``width`` values as blocks scaled to the largest; a space where there is none."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    text = "".join(SPARKS[min(7, int(value / top * 7.999)) if top > 0 else 0] for value in shown)
    return text.rjust(width)


def wrapped(pieces: Words, width: int) -> list[Line]:
    """``pieces`` in lines of at most ``width`` cells, broken at spaces, and within words too long."""
    width = max(width, 1)
    lines: list[Line] = [[]]
    used = 0
    for text, tone in pieces:
        for token in _tokens(text):
            size = cell_len(token)
            if used + size > width and token.isspace():
                continue
            if used + size > width and used and not (size > width and used < width // 2):
                lines.append([])
                used = 0
                token = token.lstrip()
                size = cell_len(token)
            while size > width - used:
                head, token = _split(token, width - used)
                _add(lines[-1], head, tone)
                lines.append([])
                used, size = 0, cell_len(token)
            if token:
                _add(lines[-1], token, tone)
                used += size
    return lines


def _add(line: Line, text: str, tone: str) -> None:
    """Join what has one tone: every piece costs a change of style on the way to the terminal."""
    if line and line[-1][1] == tone:
        line[-1] = (line[-1][0] + text, tone)
    else:
        line.append((text, tone))


def _tokens(text: str) -> Iterator[str]:
    """Words with the spaces before them; runs of other characters whole, so that bars and sparks stay."""
    start = 0
    for index in range(1, len(text)):
        if text[index] == " " and text[index - 1] != " ":
            yield text[start:index]
            start = index
    if start < len(text):
        yield text[start:]


def _split(text: str, width: int) -> tuple[str, str]:
    used = 0
    for index, char in enumerate(text):
        used += cell_len(char)
        if used > width:
            return (text[:index], text[index:]) if index else (text[:1], text[1:])
    return text, ""


def fit(pieces: Iterable[Piece], width: int, right: bool = False) -> Line:
    """``pieces`` in exactly ``width`` cells: padded, on the left where ``right``, or cut with an ellipsis."""
    whole = list(pieces)
    size = sum(cell_len(text) for text, _ in whole)
    if size <= width:
        pad = (" " * (width - size), "")
        return [pad, *whole] if right else [*whole, pad]
    line: Line = []
    left = width
    for text, tone in whole:
        length = cell_len(text)
        if length >= left:
            line.append((cut(text if length > left else text + " ", left), tone))
            break
        line.append((text, tone))
        left -= length
    return line


def content(line: Iterable[Piece]) -> Content:
    """One line for Textual; texts are taken as they are, never as markup."""
    return Content.assemble(*((text, TONES.get(tone, "")) for text, tone in line))


def painted(line: Iterable[Piece], style: Style) -> Strip:
    """One line as the terminal gets it, over ``style``; only while an app runs, whose theme has the tones.

    Content would parse, wrap and align it again: that was half of what the app took of the processor.
    """
    joined: Line = []
    for text, tone in line:
        if text:
            _add(joined, text, tone)
    return Strip([Segment(text, _over(style, tone)) for text, tone in joined])


def _over(style: Style, tone: str) -> RichStyle:
    spec = TONES.get(tone, "")
    return (style + Style.parse(spec)).rich_style if spec else style.rich_style


def cut(text: str, width: int) -> str:
    """``text`` in exactly ``width`` cells, with an ellipsis where it is longer."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(width - 1, 0)) + "…"[: max(width, 0)]


class Sheet(Widget):
    """Rows under a heading. ``show`` them as often as you like: only lines that changed are drawn.

    Args:
        title: the heading in the rule above.
        label: cells for the labels.
        most: lines a row may take, the rest is cut with an ellipsis.
    """

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    Sheet {
        height: auto;
        border-top: solid $border-blurred;
        border-title-color: $foreground 75%;
        border-title-style: bold;
        padding: 0 1;
        &.bare { border-top: none; }
    }
    """

    def __init__(
        self,
        title: str = "",
        *,
        label: int = 10,
        most: int = 3,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._title = title
        self._note = ""
        if title:
            self.border_title = Content(title)
        self._label = label
        self.most = most
        self._rows: tuple[Row, ...] = ()
        self._lines: tuple[int, list[Line]] = (-1, [])

    def limit(self, most: int) -> None:
        """Let a row take ``most`` lines from now on."""
        if most != self.most:
            self.most = most
            self._lines = (-1, [])
            self.refresh(layout=True)

    @property
    def rows(self) -> tuple[Row, ...]:
        """What is shown."""
        return self._rows

    def show(self, rows: Iterable[Row]) -> None:
        """Show ``rows`` from now on. A row without a label takes the whole width."""
        new = tuple(rows)
        if new == self._rows:
            return
        width = self.size.width
        before = self._laid_out(width) if width else []
        self._rows = new
        self._lines = (-1, [])
        after = self._laid_out(width) if width else []
        if not width or len(before) != len(after):
            self.refresh(layout=True)
            return
        pairs = enumerate(zip(before, after, strict=True))
        changed = [Region(0, y, width, 1) for y, (was, now) in pairs if was != now]
        if changed:
            self.refresh(*changed)

    def note(self, text: str) -> None:
        """What stands beside the heading."""
        if self._note != text:
            self._note = text
            self.border_title = content([(self._title, ""), (f"  {text}" if text else "", "note")])

    def render_line(self, y: int) -> Strip:
        lines = self._laid_out(self.size.width)
        return painted(lines[y] if y < len(lines) else (), self.visual_style)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._laid_out(width))

    def _laid_out(self, width: int) -> list[Line]:
        if self._lines[0] == width:
            return self._lines[1]
        lines: list[Line] = []
        for label, pieces in self._rows:
            indent = self._label if label else 0
            body = wrapped(pieces, width - indent)
            if len(body) > self.most:
                body = body[: self.most]
                body[-1] = fit((*body[-1], (" …", "dim")), width - indent)
            lines.append([(cut(label, indent), "dim"), *body[0]] if indent else body[0])
            lines += [[(" " * indent, ""), *line] for line in body[1:]]
        self._lines = (width, lines)
        return lines
