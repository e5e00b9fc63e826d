"""Pictures of the coordinator's web page, for the documentation.

    python -m benchmarks.web_screens docs/screens

Needs Chromium. The run in them is made up: nodes, names and figures come from a script, not from people.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec
import trio
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from browser_support import browser, find_browser
from web_support import Story, Web, connect, identity_of, key_of, website

from barnraise.coordinator.core import in_thread
from barnraise.coordinator.guard_belt import GuardBelt
from barnraise.coordinator.web.listen import Bind, open_listeners, urls_of
from barnraise.protocol.cosignature import cosign, witness_name
from barnraise.protocol.identity import peer_id_of

NAMES = (
    "anna",
    "garage-4090",
    "Bruno's attic",
    "night-owl",
    "kiosk",
    "lab 3, left desk",
    "freundlich",
    "old-miner",
)
VERSIONS = 31
DESK, PHONE = (1200, 800), (390, 844)


def busy(run_id: bytes) -> Story:
    """Thirty versions, of which the last minutes are dense."""
    story = Story(run_id, seed=3)
    for number, name in enumerate(NAMES):
        story.join(number, name)
    story.publish(accuracy=0.061)
    for version in range(1, VERSIONS):
        for number in range(len(NAMES)):
            for _ in range(1 + (number * 5 + version) % 3):
                wrong = story.rng.random() < 0.035
                check = story.rng.choice(("toploc", "draws", "reward", "lengths")) if wrong else "all"
                story.unit(number, check, credit=120_000 + 9_000 * number * (version % 4))
        if version == 12:
            story.appeal(story.unit(2, "toploc"))
            story.ban(7, "asked to stop", 86_400)
        reached = 0.94 * (1 - 0.9**version) + 0.02 * story.rng.random()
        story.publish(accuracy=reached if version % 2 == 0 else -1.0, reward=0.92 * reached)
    for number in range(5):
        story.unit(number)
        story.submit(story.lend(number))
        story.lend(number)
    return story


async def collapse(web: Web, story: Story) -> None:
    """Three versions that are worse and worse, and what the guards make of them."""
    for reached in (0.41, 0.22, 0.17):
        for number in range(len(NAMES)):
            story.unit(number)
        story.publish(accuracy=reached, reward=0.9 * reached)
    await web.record(story.events)
    story.events.clear()
    await GuardBelt(web.core, web.hub).look()
    web.clock[0] += 1000


async def fill(web: Web) -> Story:
    """The whole run, with nodes that are there and witnesses of its checkpoint."""
    core = web.core
    model = msgspec.structs.replace(core.spec.model, name="SmolLM2-135M-Instruct", parameters=134_515_008)
    core.spec = msgspec.structs.replace(core.spec, name="the reading room", model=model)
    core._settings = (b"", core.spec)
    story = busy(core.run_id)
    await web.record(story.events)
    story.events.clear()
    for number in range(6):
        connect(web, number, "generating" if number % 3 else "downloading", VERSIONS - 1 if number else 29)
    await web.settled()
    head = web.public_log.folder.head
    assert head is not None
    for number in (0, 2, 3, 5):
        peer = peer_id_of(key_of(number))
        signature = cosign(
            head.checkpoint.text, witness_name(peer), identity_of(number), web.clock[0] // 1000 - 40
        )
        assert web.public_log._take(peer, signature.line)
    return story


def small(path: Path) -> None:
    """The same picture with a palette: a quarter of the bytes, and nothing that an eye would miss."""
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)


async def main(target: Path) -> None:
    program = find_browser()
    if program is None:
        raise SystemExit("no Chromium is installed (Debian: apt-get install chromium)")
    listeners = open_listeners(Bind("127.0.0.1", 0, fall_back=False))
    (home,) = urls_of(listeners)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        async with website(folder, in_thread, listeners) as web, browser(program, folder / "profile") as tab:
            story = await fill(web)
            unit = (await web.json("/api/v1/ledger?kind=appealed"))["entries"][0]["unit_id"]
            for name, page, (width, height), dark in (
                ("web-overview", "", DESK, False),
                ("web-overview-dark", "", DESK, True),
                ("web-phone", "", PHONE, False),
                ("web-nodes", "nodes", DESK, False),
                ("web-unit", f"units/{unit}", DESK, False),
                ("web-ledger", "ledger?node=anna&kind=judged&limit=12", DESK, False),
                ("web-versions", "versions", DESK, True),
                ("web-paused", "", DESK, False),
                ("web-paused-phone", "", PHONE, True),
            ):
                if name == "web-paused":
                    await collapse(web, story)
                await tab.shape(width, height, dark=dark)
                await tab.open(home + page)
                await trio.sleep(0.3)
                await tab.picture(target / f"{name}.png", whole=name in ("web-overview", "web-unit"))
                small(target / f"{name}.png")


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))
