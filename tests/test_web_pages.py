"""The coordinator's pages and JSON over a whole small history, in memory."""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock
from web_support import BIDI, EVIL, Web, connect, key_of, ordinary, website

from barnraise.coordinator.web.app import POLICY
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import peer_id_of

PAGES = (
    *("/", "/nodes", "/nodes?by=recent&page=7", "/nodes?q=nobody", "/nodes/anna", "/units/3", "/ledger"),
    *("/ledger?kind=judged&since=1970-01-01&node=anna", "/versions", "/about"),
)
ANNA = peer_id_of(key_of(0))


@pytest.fixture
async def web(tmp_path: Path, autojump_clock: MockClock) -> AsyncIterator[Web]:
    async with website(tmp_path) as found:
        await found.record(ordinary(found.core.run_id).events)
        connect(found, 0)
        await found.settled()
        yield found


class _Outline(HTMLParser):
    """What a screen reader goes by, and what could load or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def named(self, *names: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if tag in names]


def outline(text: str) -> _Outline:
    found = _Outline()
    found.feed(text)
    return found


async def test_every_page_can_be_read_without_sight_mouse_or_script(
    web: Web, autojump_clock: MockClock
) -> None:
    for path in PAGES:
        reply = await web.get(path)
        page = outline(reply.text)
        assert page.named("html") == [{"lang": "en"}], path
        assert [len(page.named(tag)) for tag in ("h1", "main", "header", "footer")] == [1, 1, 1, 1], path
        assert all(nav["aria-label"] for nav in page.named("nav"))
        assert len(page.named("table")) == len(page.named("caption")), path
        assert all(cell.get("scope") in ("row", "col") for cell in page.named("th")), path
        assert all(
            chart["role"] == "img" and chart["aria-label"] for chart in page.named("svg") if "role" in chart
        )
        labelled = {label["for"] for label in page.named("label")}
        assert labelled == {field["id"] for field in page.named("input", "select")}, path
        ids = Counter(tag["id"] for _, tag in page.tags if "id" in tag)
        assert max(ids.values()) == 1, (path, ids.most_common(1))
        pointed = {tag["href"][1:] for tag in page.named("a") if tag.get("href", "").startswith("#")}
        assert pointed <= ids.keys()
        assert page.named("a")[0] == {"class": "skip", "href": "#main"}


async def test_a_page_loads_nothing_from_elsewhere_and_runs_nothing_of_its_own_text(
    web: Web, autojump_clock: MockClock
) -> None:
    for path in PAGES:
        reply = await web.get(path)
        assert reply.headers["content-security-policy"] == POLICY
        assert "unsafe" not in POLICY
        page = outline(reply.text)
        loaded = [tag.get("src") or tag.get("href", "") for tag in page.named("script", "link", "img")]
        assert loaded
        assert all(re.fullmatch(r"/static/[a-z.]+\?v=[0-9a-f]{12}", url) for url in loaded), loaded
        for tag, attributes in page.tags:
            assert tag not in ("style", "iframe", "object", "embed")
            assert not [name for name in attributes if name == "style" or name.startswith("on")], (tag, path)
        for url in loaded:
            static = await web.get(url)
            assert "immutable" in static.headers["cache-control"]


async def test_strangers_words_stay_words(web: Web, autojump_clock: MockClock) -> None:
    for path in (*PAGES, f"/nodes/{peer_id_of(key_of(1))}", f"/nodes/{peer_id_of(key_of(2))}"):
        text = (await web.get(path)).text
        assert EVIL not in text
        assert not set(BIDI) - set("evil") & set(text), path
    banned = (await web.get(f"/nodes/{peer_id_of(key_of(2))}")).text
    assert "floods others &lt;script&gt;" in banned
    reply = await web.get("/nodes?q=" + EVIL.replace('"', "%22") + "x")
    assert EVIL not in reply.text


async def test_the_overview_shows_the_runs_figures(web: Web, autojump_clock: MockClock) -> None:
    state, view = web.core.state, await web.json("/api/v1/run")
    assert view["version"] == state.head == 5
    assert (view["work"]["accepted"], view["work"]["rejected"]) == (state.accepted, state.rejected)
    assert view["work"]["rejections"] == {"toploc": 1, "bad-signature": 1}
    assert view["nodes"] == {"known": 6, "live": 1}
    assert [version for version, _ in view["curves"]["reward"]] == [1, 2, 3, 4, 5]
    assert view["ledger"]["size"] == view["ledger"]["published"] == len(web.core.ledger)
    assert view["rates"]["tokens_per_s"] > 0
    page = (await web.get("/")).text
    for text in ("No alarms", "Policy version", "bad-signature", f"barnraise join {view['join']}"):
        assert text in page
    assert page.count('class="chart"') == 3


async def test_trouble_becomes_an_alarm_and_readiness_ends_but_no_path_is_told(
    web: Web, autojump_clock: MockClock
) -> None:
    assert (await web.json("/readyz")) == {"ready": True, "reasons": []}
    web.core.trouble = f"cannot write {web.run_folder}/state.sqlite (disk full): free some disk space"
    web.clock[0] += 1000
    text = (await web.get("/")).text
    assert "cannot write RUN/state.sqlite (disk full)" in text
    assert "No alarms" not in text
    reply = await web.get("/readyz", 503)
    assert str(web.run_folder) not in text + reply.text
    assert not reply.json()["ready"]
    assert (await web.get("/healthz")).text == "ok\n"


async def test_a_node_is_found_by_name_and_by_either_end_of_its_id(
    web: Web, autojump_clock: MockClock
) -> None:
    for text in ("anna", ANNA, ANNA[-8:], f"..{ANNA[-8:]}"):
        found = await web.json(f"/api/v1/nodes/{text}")
        assert (found["node"], found["state"]) == (ANNA, "generating")
    reply = await web.get(f"/nodes?q={ANNA[-8:]}", 303)
    assert reply.headers["location"] == f"/nodes/{ANNA}"
    several = await web.get("/api/v1/nodes/12D3KooW", 404)
    assert "several nodes are meant" in several.json()["error"]
    assert "no node has this name" in (await web.get("/nodes/%25", 404)).text
    assert (await web.get("/api/v1/nodes/ANNA", 404)).json()


async def test_a_unit_tells_its_whole_story(web: Web, autojump_clock: MockClock) -> None:
    entries = (await web.json("/api/v1/ledger?kind=appealed"))["entries"]
    (appealed,) = entries
    story = await web.json(f"/api/v1/units/{appealed['unit_id']}")
    assert [entry["entry"] for entry in story["entries"]] == [
        *("LeaseIssued", "Submitted", "Judged", "Appealed", "Reviewed"),
    ]
    assert story["entries"][2]["verdict"] == {
        "threshold": 3.0,
        "value": 17.25,
        "position": "rollout 2 chunk 1",
        "message": "mantissas differ by 17.25 on average",
    }
    page = (await web.get(f"/units/{appealed['submission_id'][:8]}")).text
    assert "17.25, threshold 3" in page
    assert "rollout 2 chunk 1" in page
    first = await web.json("/api/v1/units/0")
    assert first["uses"][0]["used_in_version"] == 1
    skipped = [
        unit
        for unit in range(web.core.state.next_unit)
        if any(use["skipped"] for use in (await web.json(f"/api/v1/units/{unit}"))["uses"])
    ]
    assert len(skipped) == 1
    assert (await web.get("/units?id=0", 303)).headers["location"] == "/units/0"


REFUSED = (
    ("ledger?kind=nonsense", 400, "kinds of entries are"),
    ("ledger?since=tomorrow", 400, "a moment is"),
    ("ledger?unit=-1", 400, "whole number"),
    ("ledger?before=99999999999999999999", 400, "whole number"),
    ("ledger?node=" + "a&node=" * 9 + "a", 400, "at most 8 values"),
    ("ledger?kind=" + "j" * 201, 400, "200 characters"),
    ("ledger?node=%00%ff%3Cb%3E", 404, "no node has this name"),
    ("nodes?by=luck", 400, "ranked by credit or by recent"),
    ("nodes?page=1.5", 400, "whole number"),
    ("units/99", 404, "no unit 99"),
    ("units/xyz", 400, "a unit is a number"),
    ("units/%2e%2e%2f", 404, "Not Found"),
    ("units/deadbeef00", 404, "no unit, lease or submission"),
    ("nothing", 404, "Not Found"),
)


async def test_what_cannot_be_answered_is_said_in_words(web: Web, autojump_clock: MockClock) -> None:
    for path, status, text in REFUSED:
        reply = await web.client.get(f"/api/v1/{path}")
        assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json"), path
        assert text in reply.json()["error"]
        page = await web.client.get(f"/{path}")
        assert page.status_code == status, path
        assert len(outline(page.text).named("h1")) == 1
    long = await web.client.get("/ledger?" + "unit=1&" * 600)
    assert long.status_code == 414


async def test_only_reading_is_allowed(web: Web, autojump_clock: MockClock) -> None:
    for path in ("/", "/ledger", "/api/v1/run", "/log/checkpoint", "/metrics", "/live"):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            reply = await web.client.request(method, path)
            assert reply.status_code == 405, (method, path)
    head = await web.client.head("/")
    assert (head.status_code, head.content) == (200, b"")


async def test_the_openapi_description_is_of_what_is_answered(web: Web, autojump_clock: MockClock) -> None:
    document = await web.json("/api/v1/openapi.json")
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]

    def check(schema: dict[str, Any], value: Any, where: str) -> None:
        if "$ref" in schema:
            check(schemas[schema["$ref"].rsplit("/", 1)[1]], value, where)
        for part in schema.get("allOf", ()):
            check(part, value, where)
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        names = {
            "object": dict,
            "array": list,
            "string": str,
            "integer": int,
            "number": (int, float),
            "boolean": bool,
            "null": type(None),
        }
        assert not kinds or any(isinstance(value, names[kind]) for kind in kinds), (where, value)
        assert "enum" not in schema or value in schema["enum"], where
        for name in schema.get("required", ()):
            check(schema["properties"][name], value[name], f"{where}.{name}")
        for item in value if "items" in schema else ():
            check(schema["items"], item, f"{where}[]")

    for path, methods in document["paths"].items():
        if path.startswith("/admin"):
            continue
        url = f"/api/v1{path}".replace("{node}", "anna").replace("{unit}", "0")
        answer = await web.json(url)
        check(methods["get"]["responses"]["200"]["content"]["application/json"]["schema"], answer, path)
        assert json.dumps(answer)
        for parameter in methods["get"]["parameters"]:
            assert parameter["description"]


async def test_metrics_can_be_read_and_count_what_happened(web: Web, autojump_clock: MockClock) -> None:
    await web.get("/")
    text = (await web.get("/metrics")).text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for name, family in found.items() if name.startswith("barnraise"))

    def value(name: str, **labels: str) -> float:
        family = next(family for family in found.values() if name.startswith(family.name))
        return next(s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items())

    state = web.core.state
    assert value("barnraise_verdicts_total", verdict="accepted") == state.accepted
    assert value("barnraise_rejections_total", check="toploc") == 1
    assert value("barnraise_policy_version") == 5
    assert value("barnraise_ledger_entries") == len(web.core.ledger)
    assert value("barnraise_work_seconds_count") == state.submitted
    assert value("barnraise_work_seconds_bucket", le="3.0") == state.submitted
    assert value("barnraise_verdict_seconds_bucket", le="0.3") == 0
    assert value("barnraise_http_first_byte_seconds_count") >= 1
    assert value("process_resident_memory_bytes") > 0
    assert "anna" not in text


async def test_new_keys_are_counted_and_nothing_says_where_they_come_from(
    web: Web, autojump_clock: MockClock
) -> None:
    with web.door.counting(b"k" * 32, "peer"):
        pass
    for key in (b"l" * 32, b"l" * 32, b"m" * 32):
        with pytest.raises(RefusedError):
            web.door.check(key, "peer")
    web.clock[0] += 1000
    text = (await web.get("/metrics")).text
    for line in ("new_keys_total 1.0", "new_keys_refused_total 3.0", "new_keys_waiting 2.0"):
        assert f"\nbarnraise_{line}\n" in text
    run = (await web.get("/api/v1/run")).text
    assert '"turned_away_1h": 2' in run or '"turned_away_1h":2' in run
    for path in ("/", "/nodes", "/ledger", "/metrics", "/api/v1/run"):
        assert "203.0.113.9" not in (await web.get(path)).text


async def test_live_figures_come_when_they_change(web: Web, autojump_clock: MockClock) -> None:
    site = web.service.site
    messages: list[dict[str, Any]] = []
    body = ""
    gone = trio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal body
        messages.append(message)
        body += message.get("body", b"").decode()

    headers = [(b"host", b"page")]
    scope = {"type": "http", "method": "GET", "path": "/live", "raw_path": b"/live", "query_string": b""}
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "server": None, "client": None}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(web.service.app, scope, receive, send)
        await trio.sleep(5)
        assert site.viewers == 1
        assert body.count("event: values") == 1
        web.hub.by_key.clear()
        web.clock[0] += 1000
        await trio.sleep(2)
        last = json.loads(body.strip().rsplit("data: ", 1)[1])
        assert last["nodes_live"] == "0"
        assert "accepted" not in last
        await trio.sleep(20)
        assert ": still here" in body
        gone.set()
    assert site.viewers == 0
    site.viewers = 64
    reply = await web.client.get("/live")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "60")
