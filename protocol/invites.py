"""Invites: what lets a new key into a run that does not take everybody.

An invite is signed by the run's key and travels as one word of text, by mail or chat.
Whoever has it may use it, as often as it says and until it ends; the coordinator
counts. It is no secret of the network's: it is shown to the coordinator alone, over
the encrypted session.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from msgspec import Meta

from barnraise.protocol import wire
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, MalformedError
from barnraise.protocol.messages import Digest, Message, Millis, Nonce, Signed

PREFIX = "barnraise-invite-1-"
MAX_TEXT = 2048


class Invite(Message, frozen=True):
    """*Signed* by the run's key: ``uses`` new keys may join run ``run_id`` until ``expires_at``."""

    run_id: Digest
    invite: Nonce
    uses: Annotated[int, Meta(ge=1, le=65_536)]
    expires_at: Millis


def invite_text(signed: Signed) -> str:
    """A signed invite as one word of letters, digits, ``-`` and ``_``."""
    return PREFIX + base64.urlsafe_b64encode(wire.encode(signed)).decode("ascii").rstrip("=")


def read_invite(text: str) -> tuple[Invite, Signed]:
    """Inverse of ``invite_text``; the signature is checked, though not whose run it is.

    Raises:
        MalformedError: it is no invite, or was copied incompletely.
    """
    word = "".join(text.split())
    if len(word) > MAX_TEXT or not word.startswith(PREFIX):
        raise MalformedError(f"this is no invite: one begins with {PREFIX}")
    body = word.removeprefix(PREFIX)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        signed = wire.decode(data, Signed)
        return open_signed(signed, Invite, signed.signer), signed
    except (BarnraiseError, binascii.Error, ValueError):
        raise MalformedError("the invite is damaged: copy the whole word again") from None
