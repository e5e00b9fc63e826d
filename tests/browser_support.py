"""A headless Chromium for tests of pages, driven by its DevTools protocol. Needs no driver program."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
import trio_websocket

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-extensions"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--font-render-hinting=none", "--lang=en"),
    *("--remote-debugging-port=0", "--disable-dev-shm-usage", "--no-proxy-server"),
)


def find_browser() -> str | None:
    """Where one is; None: nowhere (Debian: apt-get install chromium)."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@dataclass
class Tab:
    """One tab. ``errors``: what the page's console, its script or its requests complained of."""

    socket: Any
    errors: list[str] = field(default_factory=list)
    _number: int = 0
    _replies: dict[int, Any] = field(default_factory=dict)
    _happened: dict[str, trio.Event] = field(default_factory=dict)

    async def listen(self) -> None:
        while True:
            message = json.loads(await self.socket.get_message())
            if "id" in message:
                waiting = self._replies[message["id"]]
                self._replies[message["id"]] = message
                waiting.set()
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("text", "an exception"))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method in self._happened:
            self._happened[method].set()

    async def ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        number, waiting = self._number, trio.Event()
        self._replies[number] = waiting
        await self.socket.send_message(json.dumps({"id": number, "method": method, "params": params}))
        with trio.fail_after(30):
            await waiting.wait()
        reply = self._replies.pop(number)
        assert "error" not in reply, reply
        return reply["result"]

    async def open(self, url: str) -> None:
        """Go there and wait until it is loaded."""
        loaded = self._happened["Page.loadEventFired"] = trio.Event()
        await self.ask("Page.navigate", url=url)
        with trio.fail_after(30):
            await loaded.wait()

    async def run(self, script: str) -> Any:
        """A script's value (of a promise: what it comes to)."""
        reply = await self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def shape(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = "dark" if dark else "light"
        await self.ask(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    async def scripts(self, allowed: bool) -> None:
        """Whether pages that are opened from now on may run their own scripts."""
        await self.ask("Emulation.setScriptExecutionDisabled", value=not allowed)

    async def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def picture(self, path: Path, whole: bool = True) -> None:
        reply = await self.ask(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=whole,
            **({"clip": await self._all()} if whole else {}),
        )
        path.write_bytes(base64.b64decode(reply["data"]))

    async def _all(self) -> dict[str, float]:
        size = (await self.ask("Page.getLayoutMetrics"))["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}


@asynccontextmanager
async def browser(program: str, profile: Path) -> AsyncIterator[Tab]:
    """A tab of a fresh browser, which ends with the block."""
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    command = [program, *FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = profile / "DevToolsActivePort"
        with trio.fail_after(60):
            while not (port_file.is_file() and port_file.read_text().count("\n")):
                assert process.poll() is None, "the browser ended at once"
                await trio.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        async with trio.open_nursery() as nursery:
            main = await trio_websocket.connect_websocket(
                nursery, "127.0.0.1", int(port), path, use_ssl=False, max_message_size=1 << 20
            )
            whole = Tab(main)
            nursery.start_soon(whole.listen)
            target = (await whole.ask("Target.createTarget", url="about:blank"))["targetId"]
            socket = await trio_websocket.connect_websocket(
                nursery,
                "127.0.0.1",
                int(port),
                f"/devtools/page/{target}",
                use_ssl=False,
                max_message_size=1 << 28,
            )
            tab = Tab(socket)
            nursery.start_soon(tab.listen)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.ask(f"{domain}.enable")
            yield tab
            nursery.cancel_scope.cancel()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
