"""``/log/`` of the page: the log's files and not one byte else."""

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import trio
from trio.testing import MockClock
from web_support import ordinary, website

from barnraise.protocol.tlog_tiles import tiles_for

NOT_OF_A_LOG = (
    *("", "checkpoint/", "Checkpoint", "tile", "tile/0", "tile/0/0", "tile/0/000.p/0", "tile/0/000.p/256"),
    *(
        "tile/0/x001",
        "tile/8/000",
        "tile/00/000",
        "tile/-1/000",
        "tile/entries/1000",
        "tile/0/../../checkpoint",
    ),
    *("../state.sqlite", "..%2fstate.sqlite", "%2e%2e/%2e%2e/etc/passwd", "tile/0/%2e%2e/%2e%2e/run.key"),
    *("%2fetc%2fpasswd", "/etc/passwd", "checkpoint%00", "tile/0/000%00", "tile\\0\\000"),
    *("tile/0/" + "x000/" * 20 + "000", "tile/entries/٠٠٠", "~root/.ssh/id_rsa", "tile/0/999"),
)


async def asked(app: Any, path: str) -> tuple[int, bytes]:
    """What the application answers, given the very path: a client would tidy it up first."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await trio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode()}
    scope |= {"headers": [], "query_string": b"", "http_version": "1.1", "scheme": "http"}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def test_the_logs_files_are_served_as_they_are(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with website(tmp_path) as web:
        assert (await web.get("/log/checkpoint", 404)).text.startswith("there is no such file")
        await web.record(ordinary(web.core.run_id, versions=12).events)
        await web.settled()
        folder, size = web.public_log.folder.folder, len(web.core.ledger)
        assert size > 256
        for path in ("checkpoint", *(tile.path for tile in tiles_for(size))):
            reply = await web.get(f"/log/{path}")
            assert reply.content == (folder / path).read_bytes()
            kept = path != "checkpoint"
            kind = "application/octet-stream" if kept else "text/plain; charset=utf-8"
            assert reply.headers["content-type"] == kind
            assert ("immutable" in reply.headers["cache-control"]) == kept
            assert reply.headers["access-control-allow-origin"] == "*"
        for path in NOT_OF_A_LOG:
            status, body = await asked(web.service.app, f"/log/{path}")
            assert status == 404, path
            assert len(body) < 200
