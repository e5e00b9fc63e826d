"""What a node calls itself, made fit for a ledger that everybody reads for ever.

A name is the only text of a stranger in the log. It is bounded, has nothing that steers a
terminal or turns text around, no stack of accents that covers other lines, no blank that
looks like no name, and no network address: a host's name may well contain one, and
addresses never enter the log. Letters of every script stay, so two names may look alike:
who matters is shown by the peer id beside it. HTML is escaped where it is written.
"""

from __future__ import annotations

import re
import unicodedata

MOST = 64  # characters
MARKS = 2  # combining marks in a row
_UNSEEN = frozenset("\u115f\u1160\u2800\u3164\uffa0")  # printable to Python, and blank to everybody else
_ADDRESS = re.compile(
    r"(?<![0-9])[0-9]{1,3}([.\-_])[0-9]{1,3}\1[0-9]{1,3}\1[0-9]{1,3}(?![0-9])"  # IPv4, as in hosts' names
    r"|(?<![0-9A-Za-z])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,}(?![0-9A-Za-z])"  # IPv6, MAC
    r"|[0-9A-Fa-f]{2}(?:-[0-9A-Fa-f]{2}){5}"  # MAC
)


def pseudonym(text: str, peer_id: str) -> str:
    """A name of 1 to ``MOST`` characters for the node ``peer_id``, from whatever it wants to be called.

    What may not stand in a name becomes U+FFFD, an address ``*``; nothing left: ``node-`` and the end of the
    peer id. A name that it has made comes out as it is.
    """
    name = text[: 8 * MOST]
    for _ in range(8):  # what was taken out may bring together what makes up another address
        before, name = name, _cleaned(name)
        if name == before:
            break
    return name if name.strip("\ufffd* ") else f"node-{peer_id[-6:]}"


def _cleaned(text: str) -> str:
    made = "".join(_seen(char) for char in unicodedata.normalize("NFC", text))
    made = _ADDRESS.sub("*", " ".join(made.split()))
    kept: list[str] = []
    marks = 0
    for char in made:
        marks = marks + 1 if unicodedata.category(char).startswith("M") else 0
        if marks <= MARKS:
            kept.append(char)
    return "".join(kept)[:MOST].strip()


def _seen(char: str) -> str:
    if char.isspace():
        return " "
    return char if char.isprintable() and char not in _UNSEEN else "\ufffd"
