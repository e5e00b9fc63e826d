"""``ledger fetch``: a whole ledger from the public log, against honest servers and hostile ones."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import structs
from web_support import ordinary, website

from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.web.listen import Bind, open_listeners, urls_of
from barnraise.node.ledger_copy import Copied, SplitViewError, copy_ledger
from barnraise.node.log_site import LogDirectory, LogSite
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError, SignatureError
from barnraise.protocol.evidence import check_evidence
from barnraise.protocol.identity import Identity, load_identity
from barnraise.protocol.ledger import LedgerEntry, NodeBanned, NodeJoined, RunCreated, encode_entry
from barnraise.protocol.ledger_compare import compare
from barnraise.protocol.ledger_file import open_ledger, verify_ledger_file, write_ledger
from barnraise.protocol.log_paths import spec_path
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Signed, TreeHead
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.tlog_checkpoint import Checkpoint, Head, log_key, origin_of, sign_checkpoint
from barnraise.protocol.wire import encode
from barnraise.protocol.witness import Conflict
from barnraise.tui.main import main

SIZE = 256 * 40 + 77


class Log:
    """A run's published log, which grows as it is told to."""

    def __init__(self, folder: Path, spec: Signed, identity: Identity, salt: int = 0, same: int = 0) -> None:
        self.run_id, self.identity, self.spec = run_id(spec), identity, spec
        self.folder = folder
        self._public = LogFolder(folder, log_key(self.run_id, identity.public_key))
        self._public.put_spec(spec)
        self._log = MerkleLog()
        self._salt, self._same = salt, same
        self.entries: list[bytes] = []

    def _entry(self, number: int) -> LedgerEntry:
        if not number:
            return RunCreated(at_ms=1000, run_id=self.run_id)
        node = b"%032d" % (number // 2)
        if number % 2:
            return NodeJoined(at_ms=1000 + number, node=node, name=f"n{number}")
        salt = self._salt if number >= self._same else 0
        until = 10**9 + number + salt
        return NodeBanned(at_ms=1000 + number, node=b"%032d" % 0, reason="x" * 40, until=until)

    def root(self) -> bytes:
        return self._log.root()

    def grow(self, size: int) -> Head:
        start = len(self._log)
        new = [encode_entry(self._entry(number)) for number in range(start, size)]
        for data in new:
            self._log.append(data)
        self.entries += new
        checkpoint = Checkpoint(origin_of(self.run_id), size, self._log.root())
        head = Head(checkpoint, sign_checkpoint(checkpoint, self.identity).encode())
        start = self._public.missing_from()
        self._public.grow(self._log, head, start, self.entries[start:])
        return head


@pytest.fixture
def make_log(tmp_path: Path) -> Callable[..., Log]:
    from coordinator_support import make_run

    run = make_run(tmp_path)
    identity = load_identity(run / "run.key")
    _, spec, _ = read_spec(run)
    return lambda name, **more: Log(tmp_path / name, spec, identity, **more)


Answer = Callable[[BaseHTTPRequestHandler, str], bool]


@contextmanager
def served(folder: Path, twist: Answer = lambda handler, path: False) -> Iterator[tuple[str, list[str]]]:
    """The folder at a real socket; ``twist`` may answer instead. Gives the URL, and what was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.removeprefix("/log/")
            asked.append(path)
            if twist(self, path):
                return
            file = folder / path
            send(self, file.read_bytes() if file.is_file() else b"", 200 if file.is_file() else 404)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *args: None  # type: ignore[method-assign]  # clients hang up here
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/log/", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler: Any, body: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def copied(url: str | Path, target: Path, timeout: float = 5.0) -> Copied:
    async def work() -> Copied:
        source = LogDirectory(url) if isinstance(url, Path) else LogSite(url, timeout=timeout, pause=0.01)
        try:
            with trio.fail_after(60):
                return await copy_ledger(source, target, lambda subject, fraction: None)
        finally:
            await source.close()

    return trio.run(work)


def entries_of(path: Path) -> list[bytes]:
    with open_ledger(path) as ledger:
        return [encode_entry(entry) for entry in ledger.entries]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5 * 256, SIZE])
def test_a_log_is_copied_whole_and_passes_the_audit(
    tmp_path: Path, make_log: Callable[..., Log], size: int
) -> None:
    log = make_log("log")
    head = log.grow(size)
    with served(log.folder) as (url, asked):
        found = copied(url, tmp_path / "ledger.bin")
    assert (found.size, found.root, found.known) == (size, head.root, 0)
    assert entries_of(tmp_path / "ledger.bin") == log.entries
    assert len(asked) == len(set(asked)) + (size % 256 != 0)  # the last bundle is looked at twice
    report = verify_ledger_file(tmp_path / "ledger.bin")
    assert (report.size, report.root) == (size, head.root)
    assert report.ok, report.problems[:3]
    assert not list(tmp_path.glob("ledger.bin.*"))
    copied(log.folder, tmp_path / "folder.bin")
    assert (tmp_path / "folder.bin").read_bytes() == (tmp_path / "ledger.bin").read_bytes()


def test_a_copy_whose_checkpoint_or_entries_were_changed_is_wrong(
    tmp_path: Path, make_log: Callable[..., Log]
) -> None:
    log = make_log("log")
    head = log.grow(700)
    copied(log.folder, tmp_path / "good.bin")
    data = (tmp_path / "good.bin").read_bytes()
    for name, old, new in (
        ("note", head.note, head.note[:-10] + bytes((head.note[-10] ^ 1,)) + head.note[-9:]),
        ("entry", log.entries[301], log.entries[301].replace(b"n301", b"n302")),
    ):
        (tmp_path / name).write_bytes(data.replace(old, new, 1))
        rules = {one.rule for one in verify_ledger_file(tmp_path / name).problems}
        assert rules & {"head-signed", "head-root"}, name
        assert "head-covers" in rules


def test_only_what_is_new_is_fetched_again(tmp_path: Path, make_log: Callable[..., Log]) -> None:
    log, target = make_log("log"), tmp_path / "ledger.bin"
    log.grow(SIZE)
    with served(log.folder) as (url, asked):
        copied(url, target)
        asked.clear()
        assert copied(url, target).known == SIZE
        assert sorted(path[:5] for path in asked) == ["check", "spec/"]
        log.grow(SIZE + 600)
        asked.clear()
        found = copied(url, target)
    assert (found.known, found.size) == (SIZE, SIZE + 600)
    assert entries_of(target) == log.entries
    bundles = {path.removeprefix("tile/entries/")[:3] for path in asked if "entries" in path}
    assert bundles == {"040", "041", "042"}


def test_an_interrupted_download_goes_on_where_it_was(tmp_path: Path, make_log: Callable[..., Log]) -> None:
    log, target = make_log("log"), tmp_path / "ledger.bin"
    log.grow(SIZE)
    broken, seen = True, threading.Event()

    def twist(handler: Any, path: str) -> bool:
        if path == "tile/entries/030":  # asked for once those before 015 are written
            seen.set()
        if broken and path == "tile/entries/020":
            assert seen.wait(20)
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return True
        return False

    with served(log.folder, twist) as (url, asked):
        with pytest.raises(PeerError, match="tried 6 times"):
            copied(url, target, timeout=20.0)
        assert not target.exists()
        part = tmp_path / "ledger.bin.part"
        with part.open("r+b") as file:  # and the machine lost the end of what was written
            file.truncate(part.stat().st_size - 1000)
            file.seek(0, 2)
            file.write(b"E\x00\x00\x00\x40rubbish")
        broken = False
        asked.clear()
        copied(url, target)
    assert entries_of(target) == log.entries
    assert "tile/entries/010" not in asked
    assert "tile/entries/020" in asked
    assert not part.exists()


def test_what_another_hand_put_into_the_unfinished_file_is_not_believed(
    tmp_path: Path, make_log: Callable[..., Log]
) -> None:
    log, target = make_log("log"), tmp_path / "ledger.bin"
    log.grow(SIZE)
    copied(log.folder, tmp_path / "whole.bin")
    data = (tmp_path / "whole.bin").read_bytes()
    start = data.index(b"C", data.index(encode(log.spec)) + len(encode(log.spec)))
    length = int.from_bytes(data[start + 1 : start + 5], "big")
    changed = data[:start] + data[start + 5 + length :].replace(b"n601", b"n602", 1)
    (tmp_path / "ledger.bin.part").write_bytes(changed)
    with served(log.folder) as (url, asked):
        copied(url, target)
    assert entries_of(target) == log.entries
    assert "tile/entries/001" not in asked
    assert "tile/entries/002" in asked


def _longer(handler: Any, path: str) -> bool:
    if path != "tile/entries/003":
        return False
    send(handler, b"", length=200_000_000)
    return True


def _endless(handler: Any, path: str) -> bool:
    if path != "tile/entries/003":
        return False
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    for _ in range(4000):
        handler.wfile.write(b"\0" * 65_536)
    return True


def _with(path_: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Answer]:
    def made(folder: Path) -> Answer:
        def twist(handler: Any, path: str) -> bool:
            if path != path_ and not path.startswith(f"{path_}/"):
                return False
            send(handler, change((folder / path).read_bytes()))
            return True

        return twist

    return made


def _to(location: str) -> Callable[[Path], Answer]:
    def made(folder: Path) -> Answer:
        def twist(handler: Any, path: str) -> bool:
            if path == "tile/entries/003":
                send(handler, b"", 302, Location=location)
                return True
            return False

        return twist

    return made


def _status(code: int) -> Callable[[Path], Answer]:
    def made(folder: Path) -> Answer:
        def twist(handler: Any, path: str) -> bool:
            if path == "tile/entries/003":
                send(handler, b"", code)
                return True
            return False

        return twist

    return made


HOSTILE: dict[str, tuple[Callable[[Path], Answer], type[BarnraiseError], str]] = {
    "long": (lambda folder: _longer, MalformedError, "offers 200000000 bytes"),
    "endless": (lambda folder: _endless, MalformedError, "sends more than"),
    "short": (_with("tile/entries/003", lambda data: data[:-1]), MalformedError, "cut short"),
    "few": (_with("tile/entries/003", lambda data: b""), MalformedError, "0 entries instead of 256"),
    "changed": (
        _with("tile/entries/003", lambda data: data.replace(b"n771", b"n772")),
        MalformedError,
        "not those that were signed",
    ),
    "hashes": (_with("tile/1/000.p", lambda data: bytes(len(data))), MalformedError, "do not lead to"),
    "tile": (_with("tile/1/000.p", lambda data: data[:-1]), MalformedError, "bytes instead of"),
    "signature": (
        _with("checkpoint", lambda data: data[:-20] + b"AAAAAAAAAAAAAAAA" + data[-4:]),
        SignatureError,
        "altered, or forged",
    ),
    "root": (
        _with("checkpoint", lambda data: data.replace(b"\n10317\n", b"\n10318\n")),
        SignatureError,
        "signature",
    ),
    "no log": (_with("checkpoint", lambda data: b"<html>hello</html>"), MalformedError, "note"),
    "spec": (_with("spec", lambda data: data[:-1] + bytes((data[-1] ^ 1,))), SignatureError, "signature"),
    "elsewhere": (_to("http://127.0.0.2:1/x"), MalformedError, "another place"),
    "scheme": (_to("file:///etc/passwd"), MalformedError, "another place"),
    "loop": (_to("/log/tile/entries/003"), MalformedError, "redirects more than"),
    "gone": (_status(404), MalformedError, "is not there"),
    "busy": (_status(503), PeerError, "tried 6 times"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_gets_nothing_believed(
    tmp_path: Path, make_log: Callable[..., Log], name: str
) -> None:
    twist, kind, text = HOSTILE[name]
    log, target = make_log("log"), tmp_path / "ledger.bin"
    log.grow(SIZE)
    with served(log.folder, twist(log.folder)) as (url, _), pytest.raises(kind, match=text):
        copied(url, target)
    assert not target.exists()


def test_a_stranger_with_a_spec_of_his_own_cannot_sign_for_the_run(
    tmp_path: Path, make_log: Callable[..., Log]
) -> None:
    log, target = make_log("log"), tmp_path / "ledger.bin"
    head = log.grow(700)
    stranger = Identity.from_private_bytes(b"s" * 32)
    spec = sign(structs.replace(open_run_spec(log.spec), operator=stranger.public_key), stranger)
    (log.folder / spec_path(log.run_id)).write_bytes(encode(spec))
    (log.folder / "checkpoint").write_bytes(sign_checkpoint(head.checkpoint, stranger).encode())
    with served(log.folder) as (url, _), pytest.raises(MalformedError, match="another run's"):
        copied(url, target)
    assert not target.exists()


def test_a_server_that_trickles_is_given_up(tmp_path: Path) -> None:
    stop = threading.Event()

    def twist(handler: Any, path: str) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        while not stop.wait(0.02):
            handler.wfile.write(b"x")
        return True

    async def work(url: str) -> None:
        with closing(Closer(stop)):
            site = LogSite(url, timeout=0.05, pause=0.001)
            with trio.fail_after(20), pytest.raises(PeerError, match="too slowly"):
                await site.get("checkpoint", 1000)
            await site.close()

    with served(tmp_path, twist) as (url, _):
        trio.run(work, url)


class Closer:
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def close(self) -> None:
        self._event.set()


def test_a_redirect_within_the_same_place_is_followed(tmp_path: Path, make_log: Callable[..., Log]) -> None:
    log = make_log("log")
    log.grow(SIZE)
    (log.folder / "moved").write_bytes((log.folder / "tile/entries/003").read_bytes())
    with served(log.folder, _to("/log/moved")(log.folder)) as (url, _):
        copied(url, tmp_path / "ledger.bin")
    assert entries_of(tmp_path / "ledger.bin") == log.entries


def test_an_old_checkpoint_changes_nothing(tmp_path: Path, make_log: Callable[..., Log]) -> None:
    log, old, target = make_log("log"), make_log("old"), tmp_path / "ledger.bin"
    log.grow(1000)
    old.grow(700)
    copied(log.folder, target)
    before = target.read_bytes()
    with pytest.raises(MalformedError, match="old checkpoint"):
        copied(old.folder, target)
    assert target.read_bytes() == before


@pytest.mark.parametrize(("mine", "theirs"), [(700, 1500), (1500, 700), (700, 700), (512, 900), (900, 512)])
def test_another_history_is_proof_and_both_are_kept(
    tmp_path: Path, make_log: Callable[..., Log], mine: int, theirs: int
) -> None:
    log, other, target = make_log("log"), make_log("other", salt=5, same=300), tmp_path / "ledger.bin"
    log.grow(mine)
    other.grow(theirs)
    copied(log.folder, target)
    before = target.read_bytes()
    with pytest.raises(SplitViewError, match="SPLIT VIEW"):
        copied(other.folder, target)
    assert target.read_bytes() == before
    (kept,) = tmp_path.glob("ledger.bin.other-*")
    assert entries_of(kept) == other.entries
    (evidence,) = tmp_path.glob("evidence-split-view-*.json")
    assert isinstance(check_evidence(evidence.read_bytes()).trouble, Conflict)
    assert main(["ledger", "evidence", str(evidence)]) == 0
    assert main(["ledger", "diff", str(target), str(kept)]) == 1


def test_another_history_than_an_exports_is_kept_too(tmp_path: Path, make_log: Callable[..., Log]) -> None:
    log, other, target = make_log("log"), make_log("other", salt=5, same=300), tmp_path / "export.bin"
    size = log.grow(700).size
    other.grow(900)
    head = TreeHead(run_id=log.run_id, size=size, root=log.root(), issued_at=5000)
    write_ledger(target, log.spec, [sign(head, log.identity)], log.entries)
    before = target.read_bytes()
    with pytest.raises(SplitViewError, match="ledger diff"):
        copied(other.folder, target)
    assert target.read_bytes() == before
    (kept,) = tmp_path.glob("export.bin.other-*")
    with open_ledger(target) as one, open_ledger(kept) as two:
        found = compare(one, two)
    assert (found.relation, found.shared) == ("split", 300)
    assert found.heads is not None  # the tree head here, the checkpoint there


def test_a_file_in_the_way_is_left_alone(tmp_path: Path, make_log: Callable[..., Log]) -> None:
    log, target = make_log("log"), tmp_path / "ledger.bin"
    log.grow(700)
    copied(log.folder, target)
    data = target.read_bytes()
    for bad in (b"a letter", data.replace(b"n301", b"n302")):  # a damaged copy accuses nobody
        target.write_bytes(bad)
        with pytest.raises(MalformedError, match="in the way"):
            copied(log.folder, target)
        assert target.read_bytes() == bad


async def test_the_real_page_is_fetched_verified_and_read_like_an_export(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    listeners = open_listeners(Bind("127.0.0.1", 0, fall_back=False))
    (home,) = urls_of(listeners)
    target, exported = str(tmp_path / "ledger.bin"), str(tmp_path / "export.bin")

    async def said(*words: str, code: int = 0) -> str:
        capfd.readouterr()
        found = await trio.to_thread.run_sync(main, ["ledger", *words])
        out = capfd.readouterr()
        assert found == code, (words, out)
        return out.out

    async with website(tmp_path, http=listeners) as web:
        story = ordinary(web.core.run_id, versions=12)
        await web.record(story.events)
        await web.settled()
        reply = await web.get(f"/log/{spec_path(web.core.run_id)}")
        assert "immutable" in reply.headers["cache-control"]
        assert f"{len(web.core.ledger):,} new" in await said("fetch", home, target)
        await said("fetch", home, target, "--run", "00" * 4, code=1)
        # What this history breaks of the rules is found in the same words, whatever it is read from.
        assert (await said("verify", home, code=1)) == (await said("verify", target, code=1))
        await said("export", str(web.run_folder), exported)
        shown = await said("show", target, "--limit", "1000")
        assert shown == await said("show", exported, "--limit", "1000")
        unit = await said("unit", target, "3")
        assert unit.splitlines()[:-1] == (await said("unit", exported, "3")).splitlines()[:-1]
        assert await said("verify", target, code=1) == await said("verify", exported, code=1)
        checkpoint = str(web.public_log.folder.folder / "checkpoint")
        assert "1 of 1 checkpoints" in await said("verify", target, "--checkpoint", checkpoint, code=1)
        (tmp_path / "proof").write_text(await said("prove", target, "5"))
        assert "5" in await said("check", str(tmp_path / "proof"))
        assert "same" in await said("diff", target, exported)
        assert "all of it already" in await said("fetch", f"{home}log/", exported)
        before, told = len(web.core.ledger), len(story.events)
        for number in range(40):
            story.unit(number % 4)
        story.publish()
        await web.record(story.events[told:])
        await web.settled()
        assert len(web.core.ledger) > before
        grown = f"({len(web.core.ledger) - before:,} new)"
        assert grown in await said("fetch", home, exported)
        with open_ledger(Path(exported)) as ledger:
            assert ledger.heads  # what only an export has is kept
            assert ledger.uses
            assert ledger.checkpoint
        wrong = (await said("verify", home, code=1)).splitlines()
        assert (await said("verify", exported, code=1)).splitlines() == wrong
        (tmp_path / "proof").write_text(await said("prove", exported, str(len(web.core.ledger) - 1)))
        await said("check", str(tmp_path / "proof"))
