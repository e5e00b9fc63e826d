"""Frames over a child process's pipes: how a daemon talks to its engine, verifier or learner.

The parent (trio, torch-free) owns a ``Child``; the child's main thread calls
``serve``. Bodies are msgspec structs of a closed union that both sides import;
the framing is that of the network (four bytes of length, MessagePack).

Why a process: an out-of-memory or a crash in a model must never take the daemon
along (R5), and the daemon's event loop must never wait for torch. The child dies
with its parent: a reader thread ends it on end-of-file of stdin, and on Linux the
kernel does (PR_SET_PDEATHSIG). SIGINT is ignored by children: the parent decides.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

Reply = TypeVar("Reply", bound=msgspec.Struct)
MAX_PIPE_FRAME = 1024 * 1024 * 1024
