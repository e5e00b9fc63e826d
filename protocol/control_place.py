"""Where a control socket lies, and what may be there before it.

The socket of a path is the path itself. Where that is too long for a socket address (about 100
bytes), it lies under a short name made from the path's hash, in ``$XDG_RUNTIME_DIR`` or else in
a folder of the user's own in the temporary directory. Only its owner may open it; one that a
dead process left is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

import trio

from barnraise.protocol.errors import AbsentError, BarnraiseError, PeerError

MAX_PATH_BYTES = 100


def socket_path(path: Path) -> Path:
    """Where the socket for ``path`` is made: ``path`` itself unless that is too long."""
    return _candidates(path)[0]


async def listen_at(place: Path) -> trio.SocketListener:
    """Make the socket at ``place``, one of ``socket_path``'s, for its owner alone.

    Raises:
        BarnraiseError: another living process serves it, something else is in its place, or the disk refused.
    """
    _refuse_if_served(place)
    # Bound under another name and renamed: whoever finds the socket finds it listening.
    new = place.with_name(f".{secrets.token_hex(4)}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(new))
        new.chmod(0o600)
        sock.listen(128)
        new.rename(place)
    except OSError as error:
        sock.close()
        new.unlink(missing_ok=True)
        raise BarnraiseError(f"cannot make the control socket {place}: {error}") from error
    sock.setblocking(False)
    await trio.lowlevel.checkpoint()
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


def _refuse_if_served(place: Path) -> None:
    try:
        mode = place.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise BarnraiseError(f"cannot look at {place}: {error}") from error
    if not stat.S_ISSOCK(mode):
        raise BarnraiseError(f"{place} is in the way of the control socket: remove that file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(place))
        except (ConnectionRefusedError, FileNotFoundError):
            return  # its process is dead
        except OSError:
            pass  # alive and too busy to answer
    raise BarnraiseError(f"another process serves {place}: stop it first (or use another folder)")


def open_blocking(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the socket of ``path``. Blocking.

    Raises:
        AbsentError: nobody serves it.
        PeerError: it cannot be opened.
    """
    for place in _candidates(path):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(os.fspath(place))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            continue
        except OSError as error:
            sock.close()
            raise PeerError(f"cannot open {place}: {error}") from error
        return sock
    raise AbsentError(f"no process serves {path}")


async def open_socket(path: Path) -> trio.SocketStream:
    """``open_blocking`` for the event loop; the caller sets the time limit."""
    for place in _candidates(path):
        try:
            return await trio.open_unix_socket(os.fspath(place))
        except (FileNotFoundError, ConnectionRefusedError):
            continue
        except OSError as error:
            raise PeerError(f"cannot open {place}: {error}") from error
    raise AbsentError(f"no process serves {path}")


def _candidates(path: Path) -> list[Path]:
    """Where the socket of ``path`` may lie: first where it would be made now."""
    absolute = Path(os.path.abspath(path))
    # A new socket is bound under a name of nine characters beside the old one.
    longest = max(len(os.fsencode(absolute)), len(os.fsencode(absolute.parent)) + 10)
    if longest <= MAX_PATH_BYTES:
        return [absolute]
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16] + ".sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = []
    if runtime and len(os.fsencode(runtime)) + len(name) < MAX_PATH_BYTES and _is_private(Path(runtime)):
        places.append(Path(runtime) / name)
    places.append(_private_temporary() / name)
    return places


def _private_temporary() -> Path:
    folder = Path(tempfile.gettempdir()) / f"barnraise-{os.getuid()}"
    if len(os.fsencode(folder)) + 22 > MAX_PATH_BYTES:
        folder = Path("/tmp") / folder.name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise BarnraiseError(f"{folder} must be a folder of yours that nobody else may enter (chmod 700)")
    return folder


def _is_private(folder: Path) -> bool:
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
