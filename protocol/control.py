"""The control socket: a daemon shows its whole state to viewers and takes their commands.

A Unix domain socket that only its owner may open. Frames are four bytes of length
(big-endian) and a MessagePack map with a ``type``: the daemon sends ``state`` (the
whole tree, on every change, at most five times a second) and ``reply``; a viewer
sends ``command``. A viewer that sends rubbish or does not read is dropped; the
daemon and other viewers never notice.

Where the path is too long for a socket address (about 100 bytes), the socket lies
under a short name made from the path's hash, in ``$XDG_RUNTIME_DIR`` or else in a
folder of the user's own in the temporary directory; ``read_state`` and the others
take the long path all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio

from barnraise.protocol.errors import AbsentError, BarnraiseError, MalformedError, PeerError

log = logging.getLogger(__name__)

State = dict[str, Any]
Command = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

MAX_PATH_BYTES = 100
MAX_COMMAND = 64 * 1024
MAX_STATE = 16 * 1024 * 1024
MAX_VIEWERS = 64
MAX_COMMANDS_UNDER_WAY = 8
PUSH_INTERVAL_S = 0.2
WRITE_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 30.0
_LENGTH = struct.Struct(">I")


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="command"):
    id: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    args: Annotated[dict[str, Any], msgspec.Meta(max_length=64)]


class _StatePush(msgspec.Struct, frozen=True, tag="state"):
    state: State


class _Reply(msgspec.Struct, frozen=True, tag="reply"):
    id: int
    result: dict[str, Any] | None
    error: str  # "" if it worked


_command_decoder = msgspec.msgpack.Decoder(_Command)
_answer_decoder: msgspec.msgpack.Decoder[_StatePush | _Reply] = msgspec.msgpack.Decoder(_StatePush | _Reply)


class Changed:
    """Says that the state has changed; any number of tasks wait for it, none misses the last change."""

    def __init__(self) -> None:
        self._count = 0
        self._event = trio.Event()

    def set(self) -> None:
        """Note a change. Cheap: call it on every one."""
        self._count += 1
        self._event.set()
        self._event = trio.Event()

    async def wait(self, seen: int) -> int:
        """Wait until there were more than ``seen`` changes, and return how many (start with -1)."""
        while self._count <= seen:
            await self._event.wait()
        return self._count


def socket_path(path: Path) -> Path:
    """Where the socket for ``path`` is made: ``path`` itself unless that is too long."""
    return _candidates(path)[0]


# --- the daemon's side


async def serve_control(
    path: Path,
    get_state: Callable[[], State],
    commands: Mapping[str, Command],
    changed: Changed,
    *,
    task_status: Any = trio.TASK_STATUS_IGNORED,  # trio.TaskStatus[Path]; older stubs of trio lack it
) -> None:
    """Serve until cancelled; reports the socket's real path by ``nursery.start``.

    Args:
        path: the socket file; one that a dead process left is replaced.
        get_state: the whole state as a dict of plain values (it is encoded at once).
        commands: name -> ``async (args) -> result``. A ``BarnraiseError`` that one
            raises reaches the viewer as text; any other is logged.
        changed: ``set()`` whenever ``get_state`` would answer differently.

    Raises:
        BarnraiseError: another living process serves ``path``, or it cannot be made.
    """
    place = socket_path(path)
    listener = await _listen(place)
    mine = place.stat().st_ino
    viewers = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal viewers
        if viewers >= MAX_VIEWERS:
            return
        viewers += 1
        try:
            await _Viewer(stream, get_state, commands, changed).run()
        except Exception:
            log.exception("a viewer's connection failed")
        finally:
            viewers -= 1

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            task_status.started(place)
    finally:
        with contextlib.suppress(OSError):
            if place.stat().st_ino == mine:
                place.unlink()


class _Viewer:
    def __init__(
        self,
        stream: trio.SocketStream,
        get_state: Callable[[], State],
        commands: Mapping[str, Command],
        changed: Changed,
    ) -> None:
        self._stream = stream
        self._get_state = get_state
        self._commands = commands
        self._changed = changed
        self._sending = trio.Lock()
        self._under_way = 0

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._push_states)
                await self._obey(nursery)
                nursery.cancel_scope.cancel()
        except* (BarnraiseError, trio.BrokenResourceError, trio.ClosedResourceError) as errors:
            log.info("dropped a viewer: %s", _innermost(errors))

    async def _push_states(self) -> None:
        seen = -1
        while True:
            seen = await self._changed.wait(seen)
            try:
                frame = _frame(_StatePush(self._get_state()), MAX_STATE)
            except Exception:
                log.exception("the state could not be shown")
            else:
                await self._send(frame)
            await trio.sleep(PUSH_INTERVAL_S)

    async def _obey(self, nursery: trio.Nursery) -> None:
        while (body := await _receive(self._stream, MAX_COMMAND)) is not None:
            try:
                command = _command_decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                raise MalformedError(f"not a command: {error}") from None
            if self._under_way >= MAX_COMMANDS_UNDER_WAY:
                raise PeerError(f"more than {MAX_COMMANDS_UNDER_WAY} commands at once")
            self._under_way += 1
            nursery.start_soon(self._execute, command)

    async def _execute(self, command: _Command) -> None:
        handler = self._commands.get(command.name)
        try:
            if handler is None:
                known = ", ".join(sorted(self._commands)) or "none"
                reply = _Reply(command.id, None, f"no command {command.name!r}; there are: {known}")
            else:
                reply = _Reply(command.id, await handler(command.args), "")
            frame = _frame(reply, MAX_STATE)
        except BarnraiseError as error:
            frame = _frame(_Reply(command.id, None, str(error) or type(error).__name__), MAX_STATE)
        except Exception as error:
            log.exception("command %s failed", command.name)
            text = f"{command.name} failed ({type(error).__name__}); the log says more"
            frame = _frame(_Reply(command.id, None, text), MAX_STATE)
        finally:
            self._under_way -= 1
        await self._send(frame)

    async def _send(self, frame: bytes) -> None:
        with trio.move_on_after(WRITE_TIMEOUT_S):
            async with self._sending:
                await self._stream.send_all(frame)
            return
        raise PeerError(f"it read nothing for {WRITE_TIMEOUT_S:.0f} s")


async def _listen(place: Path) -> trio.SocketListener:
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


# --- the viewer's side


class ControlClient:
    """A viewer's connection. Make one with ``connect_control``.

    Attributes:
        state: the latest state received.
    """

    def __init__(self, stream: trio.SocketStream, state: State) -> None:
        self._stream = stream
        self.state = state
        self._changes = Changed()
        self._seen = 0
        self._next_id = 0
        self._waiting: dict[int, trio.MemorySendChannel[_Reply]] = {}
        self._lost = ""
        self._sending = trio.Lock()

    async def wait_change(self) -> State:
        """Wait for a newer state than the one this last returned, and return it.

        Raises:
            PeerError: the daemon is gone.
        """
        self._seen = await self._changes.wait(self._seen)
        if self._lost:
            raise PeerError(self._lost)
        return self.state

    async def command(self, name: str, **args: Any) -> dict[str, Any]:
        """Have the daemon do ``name`` and return its answer.

        Raises:
            BarnraiseError: the daemon refused; its text.
            PeerError: the daemon is gone or did not answer within 30 s.
        """
        if self._lost:
            raise PeerError(self._lost)
        self._next_id += 1
        send, receive = trio.open_memory_channel[_Reply](1)
        self._waiting[self._next_id] = send
        number = self._next_id
        try:
            with trio.move_on_after(COMMAND_TIMEOUT_S):
                frame = _frame(_Command(number, name, args), MAX_COMMAND)
                try:
                    async with self._sending:
                        with trio.CancelScope(shield=True):  # never half a frame; it fits the buffer
                            await self._stream.send_all(frame)
                    reply = await receive.receive()
                except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
                    raise PeerError(self._lost or "the daemon is gone") from None
                return _result(reply)
            raise PeerError(f"the daemon did not answer {name} within {COMMAND_TIMEOUT_S:.0f} s")
        finally:
            self._waiting.pop(number, None)

    async def _read(self) -> None:
        try:
            while (body := await _receive(self._stream, MAX_STATE)) is not None:
                answer = _decode_answer(body)
                if isinstance(answer, _StatePush):
                    self.state = answer.state
                    self._changes.set()
                elif (waiting := self._waiting.get(answer.id)) is not None:
                    with contextlib.suppress(trio.WouldBlock, trio.BrokenResourceError):
                        waiting.send_nowait(answer)
            self._lost = "the daemon has ended"
        except (BarnraiseError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._lost = f"the daemon is gone: {error}"
        self._changes.set()
        for waiting in self._waiting.values():
            waiting.close()


@asynccontextmanager
async def connect_control(path: Path) -> AsyncIterator[ControlClient]:
    """Watch the daemon that serves ``path``; its state is there on entry.

    Raises:
        PeerError: nothing serves ``path``, or it does not answer.
    """
    with trio.move_on_after(WRITE_TIMEOUT_S) as scope:
        stream = await _open(path)
        body = await _receive(stream, MAX_STATE)
    if scope.cancelled_caught or body is None:
        raise PeerError(f"the process behind {path} does not show its state")
    failure: Exception | None = None
    async with stream, trio.open_nursery() as nursery:
        first = _decode_answer(body)
        client = ControlClient(stream, first.state if isinstance(first, _StatePush) else {})
        nursery.start_soon(client._read)
        try:
            yield client
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure  # the body's own, not wrapped in a group


def read_state(path: Path, timeout_s: float = 5.0) -> State:
    """Return the state of the daemon that serves ``path``. Blocking; for command lines.

    Raises:
        PeerError: nothing serves ``path``, or it does not answer within ``timeout_s``.
    """
    with _connect(path, timeout_s) as sock:
        return _first_state(sock, path)


def send_command(path: Path, name: str, timeout_s: float = COMMAND_TIMEOUT_S, **args: Any) -> dict[str, Any]:
    """Have the daemon that serves ``path`` do ``name``; return its answer. Blocking.

    Raises:
        BarnraiseError: the daemon refused; its text.
        PeerError: nothing serves ``path``, or it does not answer within ``timeout_s``.
    """
    with _connect(path, timeout_s) as sock:
        try:
            sock.sendall(_frame(_Command(1, name, args), MAX_COMMAND))
            while True:
                answer = _decode_answer(_read_frame(sock))
                if isinstance(answer, _Reply):
                    return _result(answer)
        except OSError as error:
            raise PeerError(f"the process behind {path} did not answer {name}: {error}") from error


def _first_state(sock: socket.socket, path: Path) -> State:
    try:
        while True:
            answer = _decode_answer(_read_frame(sock))
            if isinstance(answer, _StatePush):
                return answer.state
    except OSError as error:
        raise PeerError(f"the process behind {path} does not show its state: {error}") from error


def _connect(path: Path, timeout_s: float) -> socket.socket:
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


async def _open(path: Path) -> trio.SocketStream:
    for place in _candidates(path):
        try:
            return await trio.open_unix_socket(os.fspath(place))
        except (FileNotFoundError, ConnectionRefusedError):
            continue
        except OSError as error:
            raise PeerError(f"cannot open {place}: {error}") from error
    raise AbsentError(f"no process serves {path}")


# --- frames and places


def _frame(message: msgspec.Struct, limit: int) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > limit:
        raise MalformedError(f"{len(body)} bytes are too many for a frame of at most {limit}")
    return _LENGTH.pack(len(body)) + body


async def _receive(stream: trio.SocketStream, limit: int) -> bytearray | None:
    data = bytearray()
    size = _LENGTH.size
    while len(data) < size:
        piece = await stream.receive_some(min(size - len(data), 65_536))
        if not piece:
            if data:
                raise MalformedError("the connection ended inside a frame")
            return None
        data += piece
        if size == _LENGTH.size and len(data) == size:
            (length,) = _LENGTH.unpack(data)
            if length > limit:
                raise MalformedError(f"a frame of {length} bytes, over the limit of {limit}")
            size += length
    return data[_LENGTH.size :]


def _read_frame(sock: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = sock.recv(min(count - len(data), 65_536))
            if not piece:
                raise ConnectionResetError("it closed the connection")
            data += piece
        return bytes(data)

    (length,) = _LENGTH.unpack(exactly(_LENGTH.size))
    if length > MAX_STATE:
        raise MalformedError(f"a frame of {length} bytes, over the limit of {MAX_STATE}")
    return exactly(length)


def _decode_answer(body: bytes | bytearray) -> _StatePush | _Reply:
    try:
        return _answer_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError(f"not a daemon's answer: {error}") from None


def _result(reply: _Reply) -> dict[str, Any]:
    if reply.error:
        raise BarnraiseError(reply.error)
    return reply.result or {}


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


def _innermost(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors
