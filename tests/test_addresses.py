"""What people and peers may call an address."""

import pytest

from barnraise.protocol.addresses import parse_address
from barnraise.protocol.errors import PeerError
from barnraise.protocol.identity import Identity

PEER = Identity.from_private_bytes(bytes(32)).peer_id  # constant: test ids must be the same in every worker


@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("/ip4/203.0.113.7/tcp/4001", "203.0.113.7"),
        ("/ip6/::1/tcp/4001", "::1"),
        ("/dns4/raise.example.org/tcp/4001", "raise.example.org"),
    ],
)
def test_a_full_address_is_split(place: str, host: str) -> None:
    assert parse_address(f"{place}/p2p/{PEER}") == (host, 4001, PEER)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "abc",
        "http://example.org",
        "/ip4/203.0.113.7/tcp/4001",
        f"/ip4/999.1.1.1/tcp/4001/p2p/{PEER}",
        f"/ip4/::1/tcp/4001/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/0/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/65536/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/+80/p2p/{PEER}",
        f"/ip4/203.0.113.7/udp/4001/p2p/{PEER}",
        f"/dns//tcp/4001/p2p/{PEER}",
        "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWnonsense",
        "/ip4/203.0.113.7/tcp/4001/p2p/\x1b[31m",
    ],
)
def test_anything_else_is_refused_with_an_example_and_no_escape_codes(address: str) -> None:
    with pytest.raises(PeerError) as caught:
        parse_address(address)
    assert "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..." in str(caught.value)
    assert "\x1b" not in str(caught.value)
