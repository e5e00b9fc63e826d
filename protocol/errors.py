"""The errors a user of the protocol can meet, as one small tree.

Every message says the cause and, where there is one, the cure: these strings
reach a terminal as they are.
"""


class BarnraiseError(Exception):
    """Base of every error that Barnraise raises on purpose."""


class MalformedError(BarnraiseError):
    """Bytes from outside are not a message: too long, not MessagePack, wrong fields or values."""


class SignatureError(BarnraiseError):
    """A signature does not verify, or verifies under another key than the expected one."""


class VersionError(BarnraiseError):
    """The two sides speak different protocol versions; the text says which side is old (R20)."""


_RETRY = ";retry="
LONGEST_RETRY_S = 86_400
NEWCOMERS = "newcomers"  # the code of a refusal: too many new keys came from there, come again later


class RefusedError(BarnraiseError):
    """The other side understood a request and refused it.

    Attributes:
        code: a machine-readable reason, such as ``"unknown-lease"``.
        retry_after_s: when it is worth asking again; 0: that was not said.
    """

    def __init__(self, code: str, message: str, retry_after_s: int = 0) -> None:
        """``code`` may come from the wire, where it ends in ``;retry=SECONDS`` if that was said."""
        super().__init__(message)
        self.code, found, seconds = code.partition(_RETRY)
        self.retry_after_s = retry_after_s
        if found and seconds.isascii() and seconds.isdigit() and len(seconds) < 10:
            self.retry_after_s = min(LONGEST_RETRY_S, int(seconds))

    @property
    def wire_code(self) -> str:
        """The code as it travels, at most 64 letters."""
        end = f"{_RETRY}{self.retry_after_s}" if self.retry_after_s > 0 else ""
        return (self.code[: 64 - len(end)] or "refused") + end


class PeerError(BarnraiseError):
    """A peer could not be reached, went away, or was too slow."""


class AbsentError(PeerError):
    """Nobody is there to ask: no process serves a socket."""


class KeyFileError(BarnraiseError):
    """A key file is missing, unreadable, damaged, or readable by others."""


class RunFolderError(BarnraiseError):
    """A run folder is missing, incomplete, in use, or of another format version."""


class StorageError(BarnraiseError):
    """The disk refused: full, read-only, or over the quota; the text says how much is needed where."""


class DamagedVersionError(BarnraiseError):
    """Every shard of a version is right and a whole file is wrong: its publisher's fault, nobody else's."""


class ChildError(BarnraiseError):
    """A child process died or broke its protocol; the text says why ("out of memory", R5)."""
