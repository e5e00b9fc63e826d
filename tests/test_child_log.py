"""A child's stderr file stays bounded although the child holds it open."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from barnraise.protocol.child import Child
from barnraise.protocol.child_log import LOG_BYTES, bound_log

TALKER = """
import sys
import msgspec
from barnraise.protocol.child_serve import serve
class Say(msgspec.Struct):
    length: int
def handle(request, send):
    print("x" * request.length, file=sys.stderr, flush=True)
    return request
serve(handle, Say)
"""


class Say(msgspec.Struct):
    length: int


def test_a_file_that_a_child_holds_open_is_emptied_in_place_and_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    bound_log(path, 10)  # none yet
    with path.open("ab", buffering=0) as held:
        for part in (b"one", b"two", b"three", b"four"):
            held.write(b"x" * 20 + part)
            bound_log(path, 10)
            assert path.stat().st_size == 0
        held.write(b"short")
        bound_log(path, 10)
    assert path.read_bytes() == b"short"
    assert (tmp_path / "engine.log.1").read_bytes() == b"xxxxxxfour"
    assert (tmp_path / "engine.log.2").read_bytes() == b"xxxxxthree"
    assert len(list(tmp_path.iterdir())) == 3


def test_where_nothing_can_be_kept_the_file_is_bounded_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(b"x" * 20)
    (tmp_path / "engine.log.1" / "in the way").mkdir(parents=True)
    (tmp_path / "engine.log.2").write_bytes(b"")
    bound_log(path, 10)
    assert path.read_bytes() == b""


async def test_what_earlier_children_left_is_bounded_when_one_starts(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(b"x" * (LOG_BYTES + 1))
    child = await Child.start([sys.executable, "-S", "-c", "import sys; sys.stderr.write('new')"], log=path)
    await child.wait()
    await child.close()
    assert path.read_bytes() == b"new"


async def test_a_child_that_says_much_is_bounded_with_each_of_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier lives for months, and beats never."""
    monkeypatch.setattr("barnraise.protocol.child._BOUND_EVERY_S", 0.0)
    monkeypatch.setattr("barnraise.protocol.child.bound_log", lambda path: bound_log(path, 50_000))
    path = tmp_path / "worker.log"
    child = await Child.start([sys.executable, "-c", TALKER], log=path)
    for _ in range(20):
        await child.request(Say(20_000), Say)
    await child.close()
    assert path.stat().st_size <= 70_000 + 1_000
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 3 * 70_000
