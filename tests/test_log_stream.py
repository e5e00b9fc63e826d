import pytest
import trio
from tlog_support import entries_of, head_of, log_of, tile_bytes

from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.log_messages import LOG_PROTOCOL, LogReply, LogRequest
from barnraise.protocol.log_stream import STREAMS_PER_PEER, fetch_files, fetch_tiles, hand_in, serve_log
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import ShardRequest
from barnraise.protocol.network import Handler, Network, Stream
from barnraise.protocol.tlog_tiles import Tile, TileTree, parse_path, tiles_to_compare
from barnraise.protocol.wire import MessageReader, send_message

ALL = entries_of(300)
LOG = log_of(ALL)


async def read(path: str) -> bytes | None:
    if path == "checkpoint":
        return head_of(LOG).note
    tile = parse_path(path)
    served = tile.width == 256 or tile in (Tile(0, 1, 44), Tile(1, 0, 1))
    try:
        return tile_bytes(LOG, ALL, tile) if served else None
    except IndexError:
        return None


async def ask(handler: Handler, use: object) -> object:
    swarm = MemorySwarm()
    async with swarm.network("server") as server, swarm.network("client") as client:
        server.set_handler(LOG_PROTOCOL, handler)
        await client.connect(server.addresses[0])
        return await use(client)  # type: ignore[operator]


async def test_files_come_by_path_and_absent_ones_are_told(autojump_clock: object) -> None:
    async def use(network: Network) -> None:
        paths = ["checkpoint", "tile/0/000", "tile/0/005", "tile/entries/000"]
        note, tile, absent, entries = await fetch_files(network, "server", paths)
        assert (note, absent) == (head_of(LOG).note, None)
        assert tile == tile_bytes(LOG, ALL, Tile(0, 0))
        assert entries == tile_bytes(LOG, ALL, Tile(-1, 0))

    await ask(serve_log(read), use)


async def test_a_whole_tile_stands_for_a_partial_one_that_is_gone(autojump_clock: object) -> None:
    async def use(network: Network) -> None:
        tiles = await fetch_tiles(network, "server", tiles_to_compare(200, 250))
        assert tiles is not None
        tree = TileTree(250, tiles.__getitem__)
        assert tree.consistency_proof(200) == LOG.consistency_proof(200, 250)
        assert await fetch_tiles(network, "server", [Tile(0, 1, 50)]) is None

    await ask(serve_log(read), use)


async def test_a_cosignature_is_handed_over_with_its_sender(autojump_clock: object) -> None:
    taken: list[tuple[str, str]] = []

    def take(peer_id: str, line: str) -> bool:
        taken.append((peer_id, line))
        return line == "good"

    async def use(network: Network) -> None:
        assert await hand_in(network, "server", "good")
        assert not await hand_in(network, "server", "bad")

    await ask(serve_log(read, take), use)
    assert taken == [("client", "good"), ("client", "bad")]


@pytest.mark.parametrize(
    "path", ["../run.key", "tile/0/../../run.key", "/etc/passwd", "tile/entries/x1/000", "c"]
)
async def test_no_other_path_reaches_the_disk(autojump_clock: object, path: str) -> None:
    async def use(network: Network) -> None:
        stream = await network.open_stream("server", LOG_PROTOCOL)
        await send_message(stream, LogRequest(path=path))
        with pytest.raises(PeerError):
            await stream.read(100)

    asked: list[str] = []

    async def spy(path: str) -> bytes | None:
        asked.append(path)
        return b"secret"

    await ask(serve_log(spy), use)
    assert asked == []


async def test_whoever_says_anything_else_or_too_much_loses_the_stream(autojump_clock: object) -> None:
    async def use(network: Network) -> None:
        stream = await network.open_stream("server", LOG_PROTOCOL)
        await send_message(stream, ShardRequest(digest=bytes(32)))
        with pytest.raises(PeerError):
            await stream.read(1)
        streams = [await network.open_stream("server", LOG_PROTOCOL) for _ in range(STREAMS_PER_PEER + 1)]
        await trio.sleep(1)
        await send_message(streams[0], LogRequest(path="checkpoint"))
        assert isinstance(await MessageReader(streams[0], (LogReply,)).receive(), LogReply)
        with pytest.raises(PeerError):
            await streams[-1].read(1)
        with pytest.raises(PeerError):  # and who says nothing, after a while
            await streams[1].read(1)

    await ask(serve_log(read), use)


@pytest.mark.parametrize("lie", ["large", "short", "silent", "closed"])
async def test_a_server_that_lies_costs_its_asker_nothing(autojump_clock: object, lie: str) -> None:
    async def handler(stream: Stream) -> None:
        await MessageReader(stream, (LogRequest,)).receive()
        if lie == "silent":
            await trio.sleep_forever()
        if lie != "closed":
            await send_message(stream, LogReply(size=8193 if lie == "large" else 8192))
            await stream.write(bytes(100))

    async def use(network: Network) -> None:
        with pytest.raises((PeerError, MalformedError)):
            await fetch_files(network, "server", ["tile/0/000"])

    await ask(handler, use)


async def test_over_libp2p_it_is_the_same() -> None:
    taken: list[str] = []

    def take(peer_id: str, line: str) -> bool:
        taken.append(peer_id)
        return True

    listen = ("/ip4/127.0.0.1/tcp/0",)
    async with (
        open_libp2p(Identity.generate(), listen=listen) as server,
        open_libp2p(Identity.generate()) as client,
    ):
        server.set_handler(LOG_PROTOCOL, serve_log(read, take))
        with trio.fail_after(60):
            await client.connect(server.addresses[0])
            files = await fetch_files(
                client, server.peer_id, ["checkpoint", "tile/entries/000", "tile/0/009"]
            )
            tiles = await fetch_tiles(client, server.peer_id, tiles_to_compare(100, 300))
            assert await hand_in(client, server.peer_id, "a line")
    assert files == [head_of(LOG).note, tile_bytes(LOG, ALL, Tile(-1, 0)), None]
    assert tiles is not None
    assert TileTree(300, tiles.__getitem__).root() == LOG.root()
    assert taken == [client.peer_id]
