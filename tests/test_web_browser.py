"""The pages in a headless Chromium: with scripts and without, on a phone, by keyboard, by axe's rules."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import trio
from browser_support import Tab, browser, find_browser
from web_support import connect, in_trouble, ordinary, website

from barnraise.coordinator.core import in_thread
from barnraise.coordinator.web.listen import Bind, open_listeners, urls_of

PAGES = (
    *(
        "",
        "nodes",
        "nodes?q=nobody",
        "nodes/anna",
        "units/3",
        "ledger?kind=judged",
        "ledger?unit=1",
        "versions",
    ),
    *("about", "nothing-of-this-name"),
)
EVERYWHERE = ("", "ledger?kind=judged")
PHONE, DESK = (360, 740), (1280, 900)
TOO_WIDE = """
[...document.querySelectorAll('main *, header *, footer *')].filter(part => {
  const box = part.getBoundingClientRect();
  return box.right > innerWidth + 1 && !part.closest('.scroll, .hide, svg') && box.width;
}).map(part => part.outerHTML.slice(0, 120))
"""
AXE = """
axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})
  .then(found => [found.passes.length,
    found.violations.map(rule => rule.id + ': ' + rule.nodes.map(node => node.html).join(' | '))])
"""


def axe() -> str | None:
    """The text of axe-core, which a package of PyPI carries; None: it is not installed."""
    spec = find_spec("axe_playwright_python")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next(
        (path.read_text() for place in places if (path := Path(place) / "axe.min.js").is_file()), None
    )


async def fits(tab: Tab, width: int) -> None:
    assert await tab.run("document.documentElement.scrollWidth") <= width
    assert await tab.run(TOO_WIDE) == []


async def judged_by_axe(tab: Tab, rules: str | None) -> list[str]:
    if rules is None:
        return []
    await tab.run(rules + "; null")
    rules_kept, found = await tab.run(AXE)
    assert rules_kept > 15
    broken: list[str] = found
    return broken


@pytest.mark.e2e
async def test_every_page_shows_as_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install --no-install-recommends chromium)")
    rules = axe()
    listeners = open_listeners(Bind("127.0.0.1", 0, fall_back=False))
    (home,) = urls_of(listeners)
    async with website(tmp_path, in_thread, listeners) as web, browser(program, tmp_path / "profile") as tab:
        await web.record(ordinary(web.core.run_id).events)
        connect(web, 0)
        await web.settled()
        for allowed in (False, True):
            await tab.scripts(allowed)
            for page in PAGES:
                for (width, height), dark in ((PHONE, True), (DESK, False)) if allowed else ((PHONE, False),):
                    await tab.shape(width, height, dark=dark)
                    tab.errors.clear()
                    await tab.open(home + page)
                    await fits(tab, width)
                    expected = 1 if page.startswith("nothing") else 0  # the browser notes the 404 itself
                    assert len(tab.errors) == expected, (page, tab.errors)
                    assert await tab.run("document.querySelectorAll('h1').length") == 1
                    if allowed and (page in EVERYWHERE or not dark):
                        assert await judged_by_axe(tab, rules) == [], (page, width, dark)
        tab.errors.clear()
        await keyboard(tab, home)
        await figures_stay_fresh(tab, home, web)
        assert tab.errors == []
        await a_page_comes_back_after_a_refusal(tab, home, monkeypatch)
        await alarms_and_a_pause_are_seen_at_once(tab, home, web, rules)
        assert tab.errors == []


async def keyboard(tab: Tab, home: str) -> None:
    """The first stop is the way past the navigation, every stop can be seen, and each link is one."""
    await tab.shape(*DESK)
    await tab.open(home)
    await tab.press("Tab", 9)
    assert await tab.run("document.activeElement.className") == "skip"
    assert await tab.run("document.activeElement.getBoundingClientRect().left") >= 0
    stops = await tab.run("document.querySelectorAll('a, button, input, select, summary').length")
    seen: list[Any] = []
    for _ in range(stops):
        seen.append(await tab.run("getComputedStyle(document.activeElement).outlineStyle"))
        await tab.press("Tab", 9)
    assert set(seen) == {"solid"}


async def figures_stay_fresh(tab: Tab, home: str, web: Any) -> None:
    """What changes at the coordinator changes on an open page."""
    await tab.open(home)
    lamp = "document.getElementById('link').hidden"
    live = "document.querySelector('[data-live=nodes_live]').textContent"
    with trio.fail_after(30):
        while await tab.run(lamp):
            await trio.sleep(0.05)
        assert await tab.run(live) == "1"
        connect(web, 3)
        web.clock[0] += 1000
        while await tab.run(live) != "2":
            await trio.sleep(0.05)


async def a_page_comes_back_after_a_refusal(tab: Tab, home: str, patch: pytest.MonkeyPatch) -> None:
    """Browsers give up on events when a reply is an error: a proxy's while the coordinator starts."""
    patch.setattr("barnraise.coordinator.web.live.VIEWERS", 0)
    await tab.open(home)
    words = "document.getElementById('link-text').textContent"
    with trio.fail_after(30):
        while "lost" not in await tab.run(words):
            await trio.sleep(0.05)
        patch.undo()
        while await tab.run(words) != "live":
            await trio.sleep(0.05)
    tab.errors.clear()  # the browser notes the 503 itself


async def alarms_and_a_pause_are_seen_at_once(tab: Tab, home: str, web: Any, rules: str | None) -> None:
    """On a page that is open already, said to those who do not look, and readable on a phone."""
    await tab.shape(*PHONE)
    await tab.open(home)
    assert await tab.run("document.querySelector('.paused, .alarms')") is None
    lamp = "document.getElementById('link').hidden"
    while await tab.run(lamp):
        await trio.sleep(0.05)
    await web.record(in_trouble(web.core.now_ms()))
    web.clock[0] += 1000
    with trio.fail_after(30):
        while await tab.run("document.querySelectorAll('.paused, .alarms li').length") < 3:
            await trio.sleep(0.05)
    assert await tab.run("document.getElementById('said').textContent") == "Alarms: 2. The run is paused."
    text = await tab.run("document.getElementById('trouble').innerText")
    for words in (
        "Paused by a guard",
        "reward-collapse",
        "Seen",
        "the reward fell from 0.812 to 0.203",
        "To do",
    ):
        assert words in text
    assert "barnraise report" in await tab.run("document.querySelector('.alarms code').textContent")
    for (width, height), dark in ((PHONE, True), (PHONE, False), (DESK, True), (DESK, False)):
        await tab.shape(width, height, dark=dark)
        await tab.open(home)
        await fits(tab, width)
        assert await judged_by_axe(tab, rules) == [], (width, dark)
