"""A real nginx with the configuration in deploy/, before a real page: only ports and paths are others."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from web_support import Web, connect, ordinary, website

from barnraise.coordinator.core import in_thread
from barnraise.coordinator.web.listen import Bind, open_listeners

CONF = Path(__file__).parent.parent / "deploy" / "nginx" / "barnraise.conf"
NAME = "run.example.org"
AROUND = """\
{user}
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/barnraise.conf;
}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def certificate(folder: Path) -> None:
    """``cert.pem`` and ``key.pem``, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def configure(folder: Path, coordinator: int, clear: int, secure: int) -> Path:
    """Our file with other ports and paths, and what Debian's nginx.conf puts around it."""
    text = CONF.read_text()
    for old, new in (
        ("127.0.0.1:8080", f"127.0.0.1:{coordinator}"),
        (f"/etc/letsencrypt/live/{NAME}/fullchain.pem", str(folder / "cert.pem")),
        (f"/etc/letsencrypt/live/{NAME}/privkey.pem", str(folder / "key.pem")),
    ):
        assert old in text
        text = text.replace(old, new)
    text = re.sub(r"listen (\[::\]:)?(80|443)\b", lambda found: _listen(found, clear, secure), text)
    (folder / "barnraise.conf").write_text(text)
    user = "user root;" if os.geteuid() == 0 else ""
    path = folder / "nginx.conf"
    path.write_text(AROUND.format(user=user, folder=folder))
    return path


def _listen(found: re.Match[str], clear: int, secure: int) -> str:
    return f"listen {'[::1]' if found[1] else '127.0.0.1'}:{clear if found[2] == '80' else secure}"


@asynccontextmanager
async def proxied(folder: Path) -> AsyncIterator[tuple[Web, httpx.AsyncClient, int]]:
    """A page, whoever asks for it through nginx over TLS and HTTP/2, and the port without TLS."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed (Debian: apt-get install --no-install-recommends nginx-light)")
    certificate(folder)
    listeners = open_listeners(Bind("127.0.0.1", 0, fall_back=False))
    clear, secure = free_port(), free_port()
    path = configure(folder, listeners[0].socket.getsockname()[1], clear, secure)
    words = [program, "-p", str(folder), "-c", str(path), "-e", str(folder / "error.log")]
    checked = subprocess.run([*words, "-t"], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    trust = ssl.create_default_context(cafile=folder / "cert.pem")
    trust.check_hostname = False  # it is asked for by address
    async with website(folder, in_thread, listeners) as web:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with trio.fail_after(20):
                while not await _listens(secure):
                    assert process.poll() is None, (folder / "error.log").read_text()
                    await trio.sleep(0.05)
            async with httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{secure}",
                headers={"Host": NAME},
                verify=trust,
                http2=True,
                trust_env=False,
                timeout=20,
            ) as client:
                yield web, client, clear
        finally:
            process.terminate()
            process.wait(10)


async def _listens(port: int) -> bool:
    try:
        await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
    except OSError:
        return False
    return True


@pytest.mark.e2e
async def test_nginx_shows_the_page_and_lets_nobody_steer(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (web, client, clear):
        await web.record(ordinary(web.core.run_id).events)
        connect(web, 0)
        await web.settled()
        await readable(client)
        await closed(client)
        await paced(client)
        await fresh(client, web)
        async with httpx.AsyncClient(trust_env=False) as plain:
            reply = await plain.get(f"http://127.0.0.1:{clear}/nodes", headers={"Host": NAME})
        assert (reply.status_code, reply.headers["location"]) == (301, f"https://{NAME}/nodes")


async def readable(client: httpx.AsyncClient) -> None:
    for path in ("/", "/nodes", "/static/live.js", "/api/v1/openapi.json", "/log/checkpoint", "/healthz"):
        reply = await client.get(path)
        assert (reply.status_code, reply.http_version) == (200, "HTTP/2"), path
        assert reply.headers["server"] == "nginx"
    assert (await client.head("/")).status_code == 200


async def closed(client: httpx.AsyncClient) -> None:
    """What is not for strangers, however they write it and whoever they say that they are."""
    lies = ({}, {"X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1"}, {"Host": "127.0.0.1"})
    for path in ("/api/v1/admin/status", "/api/v1/%61dmin/status", "/api/v1//admin/status", "/metrics"):
        for lie in lies:
            reply = await client.get(path, headers=lie)
            assert reply.status_code == 404, (path, lie)
            assert "nginx" in reply.text, "it did not come as far as the coordinator"
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert (await client.request(method, "/")).status_code == 403
    long = await client.request("GET", "/", content=b"x" * 30_000)
    assert long.status_code == 413


async def paced(client: httpx.AsyncClient) -> None:
    """An auditor's many requests are all answered; a page's are refused beyond what one person asks for."""

    async def ask(path: str, statuses: list[int]) -> None:
        statuses.append((await client.get(path)).status_code)

    for path, number in (("/log/checkpoint", 12), ("/healthz", 15)):
        statuses: list[int] = []
        for _ in range(8):
            async with trio.open_nursery() as nursery:
                for _ in range(number):
                    nursery.start_soon(ask, path, statuses)
        assert set(statuses) == ({200} if path.startswith("/log") else {200, 429})


async def fresh(client: httpx.AsyncClient, web: Web) -> None:
    """Events come one by one as they happen."""
    await trio.sleep(0.3)  # the last step has used up this address's requests
    with trio.fail_after(20):
        async with client.stream("GET", "/live") as reply:
            assert reply.status_code == 200
            lines = (line async for line in reply.aiter_lines() if line.startswith("data:"))
            assert json.loads((await anext(lines))[5:])["nodes_live"] == "1"
            connect(web, 3)
            web.clock[0] += 1000
            while json.loads((await anext(lines))[5:]).get("nodes_live") != "2":
                pass
