"""The pages of a front: one login for all shards, pages of a topic from its shard, lists of all of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from broker.errors import Unavailable
from broker.observe.audit_trail import AuditTrail
from broker.policy import SubscriptionPolicy
from broker.rpc.page_calls import PageAnswer, PageCalls
from broker.runtime.clock import SystemClock
from broker.subscriptions.types import SubscriptionType
from broker.topic_shards import TopicShard, shard_of
from broker.topics import control
from broker.web import shard_http, shard_pages
from broker.web.guard import FORM_HEADER, SHARD_HEADER
from broker.web.render import size
from broker.web.routes import ROUTES
from broker.web.scheduled import ScheduledList
from broker.web.server import HttpServer
from broker.web.shard_http import ShardHttp
from broker.web.site import Site, Visit
from broker.web.source import PageSource, ShardPage, ShardSource
from broker.web.storage import StorageFigures, merge_storage
from tests.configs import broker_config
from tests.harness import EARLIEST, Outgoing
from tests.unit.web.conftest import MakePages, Pages, access_files

pytestmark = pytest.mark.slow

SHARDS = 2
TOPICS = tuple(
    next(name for name in (f"topic{n}" for n in range(99)) if shard_of(name, SHARDS) == number)
    for number in range(SHARDS)
)
"""One of each shard."""


@dataclass
class Front:
    """The pages of two shards behind a front; without one that is away."""

    pages: Pages
    shards: list[Pages]
    away: set[int]
    elsewhere: set[int]
    """Shards that another node owns."""
    pages_of_owner: list[str]
    """One: the URL of its pages; empty: not known."""

    async def begin(self) -> str:
        """Fill the shards, and return the token of forms."""
        await self.fill()
        return await self.pages.csrf()

    async def fill(self) -> None:
        for shard, topic in zip(self.shards, TOPICS, strict=True):
            await shard.produce(
                topic, *(Outgoing(b"%d" % n, deliver_after_ms=3_600_000 + n) for n in range(5))
            )
            await shard.broker.registry.topic(topic).subscriptions.create(
                "billing", SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy()
            )


class RoutedCalls:
    """The port of a front, as its pages use it: calls go to the shard of their topic."""

    def __init__(self, shards: Sequence[PageCalls], away: set[int]) -> None:
        self._shards = shards
        self._away = away
        self.has_rules, self.identify = shards[0].has_rules, shards[0].identify
        self.allows, self.check, self.sees_all = shards[0].allows, shards[0].check, shards[0].sees_all
        self.limits_of = shards[0].limits_of

    async def call(
        self, name: str, fields: Mapping[str, Any], authorization: str, address: str
    ) -> PageAnswer:
        number = shard_of(fields.get("topic") or fields["name"], SHARDS)
        if number in self._away:
            return PageAnswer(503, {"detail": f"Shard {number} is on another node"})
        return await self._shards[number].call(name, fields, authorization, address)


MakeFront = Callable[..., Awaitable[Front]]


@pytest.fixture
async def make_front(make_pages: MakePages, tmp_path: Path) -> AsyncIterator[MakeFront]:
    stack = AsyncExitStack()

    async def make(**settings: object) -> Front:
        settings = {"http_address": "127.0.0.1:0", **settings}
        shards, https, away, elsewhere = [], [], set[int](), set[int]()
        pages_of_owner = ["http://10.0.0.2:7680"]
        for number in range(SHARDS):
            path = str(tmp_path / f"{number}.http")
            shard = await make_pages(
                **settings,
                data_dir=str(tmp_path / f"shard{number}"),
                http_socket=path,
                topic_shard=TopicShard(number, SHARDS),
            )
            shards.append(shard)
            https.append(ShardHttp(number, path))
            stack.push_async_callback(https[-1].close)
        config = broker_config(data_dir=str(tmp_path), **settings)
        clock = SystemClock()

        def find(number: int) -> ShardHttp:
            if number in away:
                raise Unavailable(f"Shard {number} is on another node")
            if number in elsewhere:
                raise Unavailable(
                    f"Shard {number} is owned by node b", reason="NOT_OWNER", pages=pages_of_owner[0]
                )
            return https[number]

        calls = RoutedCalls([shard.calls for shard in shards], away)
        shard_source = ShardSource(SHARDS, find)
        source = PageSource(config, clock, "1.2.3", AuditTrail(clock), calls, shards=shard_source)
        server = HttpServer(config.http_address, _no_metrics, lambda: None, pages=source)
        server.listen()
        await server.start()
        stack.push_async_callback(server.stop)
        jar = aiohttp.CookieJar(unsafe=True)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://{server.address}", cookie_jar=jar)
        )
        pages = Pages(shards[0].broker, server, session, shards[0].calls)
        return Front(pages, shards, away, elsewhere, pages_of_owner)

    async with stack:
        yield make


async def _no_metrics() -> bytes:
    return b""


async def test_lists_have_the_topics_of_all_shards_and_their_pages_come_from_the_shard(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    for path in ("/", "/topics"):
        text = await front.pages.get(path)
        for topic in TOPICS:
            assert f'href="/topics/{topic}"' in text, path
    assert "2 topics" in await front.pages.get("/topics")
    for number, topic in enumerate(TOPICS):
        for path in (
            f"/topics/{topic}",
            f"/storage/{topic}",
            f"/timeline?topic={topic}",
            f"/scheduled?topic={topic}",
        ):
            text = await front.pages.get(path)
            assert f"· shard {number} ·" in text, path
        assert f"/topics/{topic}/messages/1:" not in await front.pages.get(f"/?shard={1 - number}")
    await front.pages.get("/topics/nothing", status=404)


async def test_a_list_goes_on_over_all_shards_and_says_which_one_is_missing(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    names = sorted(f"t{n:03}" for n in range(120))
    for name in names:
        await front.shards[shard_of(name, SHARDS)].produce(name, Outgoing(b"x"))
    seen: list[str] = []
    path = "/topics?q=t"
    for _ in range(3):
        text = await front.pages.get(path)
        seen += re.findall(r'href="/topics/(t\d+)"', text)
        following = re.search(r'href="([^"]+)" rel="next"', text)
        path = following[1].replace("&amp;", "&") if following else ""
    assert seen == names
    assert not path
    front.away.add(1)
    text = await front.pages.get("/topics")
    assert "Shard 1 is on another node. Its topics are not shown" in text
    assert "1 of 2 shards answer here" in await front.pages.get("/")
    assert "Shard 1 is on another node" in await front.pages.get(f"/topics/{TOPICS[1]}", status=503)
    await front.pages.get(f"/topics/{TOPICS[0]}")


async def test_changes_are_calls_of_the_front_and_told_on_the_page_of_the_shard(
    make_front: MakeFront, caplog: pytest.LogCaptureFixture
):
    front = await make_front()
    await front.fill()
    caplog.set_level("INFO")
    for number, topic in enumerate(TOPICS):
        path = f"/topics/{topic}"
        text = await front.pages.post(f"{path}/subscriptions/billing", action="pause", back=path)
        assert "Paused: billing." in text and f"· shard {number} ·" in text
        assert "Paused: billing." not in await front.pages.get(path), "it is told once"
        assert front.shards[number].broker.registry.topic(topic).subscription("billing").paused
    # Changes of many lead to the page of their shard.
    text = await front.pages.post("/scheduled/change", topic=TOPICS[1], action="cancel")
    assert "Cancelled: 5 of 5" in text
    notes = [record for record in caplog.records if record.getMessage().startswith("Audit: a change")]
    assert len(notes) == SHARDS + 1
    text = await front.pages.post("/new-topic", name=TOPICS[1] + "-x", max_delay_ms="5d", back="/topics")
    assert f"Created: {TOPICS[1]}-x." in text and "· shard" in text


async def test_forms_of_a_shards_page_are_those_of_the_front(make_front: MakeFront):
    front = await make_front()
    csrf = await front.begin()
    for topic in TOPICS:
        found = re.findall(r'name="csrf" value="([^"]+)"', await front.pages.get(f"/topics/{topic}"))
        assert set(found) == {csrf}


async def test_a_refused_change_is_told_where_the_form_was_and_one_that_reaches_no_shard_too(
    make_front: MakeFront,
):
    front = await make_front()
    await front.fill()
    back = f"/topics/{TOPICS[1]}"
    text = await front.pages.post(f"{back}/subscriptions/none", action="pause", back=back)
    assert 'class="flash failed"' in text and "· shard 1 ·" in text
    front.away.add(0)
    text = await front.pages.post(f"/topics/{TOPICS[0]}/subscriptions/billing", action="pause", back=back)
    assert "Shard 0 is on another node" in text


async def test_with_rules_a_front_and_its_shards_judge_the_token_of_who_asks(
    make_front: MakeFront, tmp_path: Path
):
    grants = f"""
[[grant]]
principals = ["token:ada"]
topics = ["{TOPICS[0]}"]
rights = ["manage", "schedule"]
"""
    front = await make_front(**access_files(tmp_path, grants, ada="of-ada"))
    await front.fill()
    for path in ("/", "/topics", f"/topics/{TOPICS[0]}", "/?shard=0"):
        async with front.pages.session.get(path, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"].partition("?")[0]) == (303, "/login"), path
    await front.pages.log_in("of-ada")
    for path in ("/", "/topics", "/timeline", "/scheduled", "/dead-letters", "/storage"):
        text = await front.pages.get(path)
        assert TOPICS[1] not in text, path
        assert TOPICS[0] in text or path == "/dead-letters", path
    assert "token:ada" in await front.pages.get(f"/topics/{TOPICS[0]}")
    for path in (f"/topics/{TOPICS[1]}", f"/timeline?topic={TOPICS[1]}", f"/storage/{TOPICS[1]}"):
        text = await front.pages.get(path, status=403)
        assert "token:ada may not" in text and "billing" not in text, path
    text = await front.pages.post(
        f"/topics/{TOPICS[1]}/subscriptions/billing", action="pause", back="/topics"
    )
    assert "token:ada may not manage" in text
    assert not front.shards[1].broker.registry.topic(TOPICS[1]).subscription("billing").paused
    # The same for who opens the socket of a shard, with whatever a front would say.
    async with _at_socket(tmp_path) as session:
        for headers in ({}, {SHARD_HEADER: "0", FORM_HEADER: "x"}, {"Authorization": "Bearer of-eve"}):
            for path in ("/figures", "/topics"):
                async with session.get(f"http://localhost{path}", headers=headers) as answer:
                    assert answer.status == 401
                    assert TOPICS[0] not in await answer.text()


async def test_who_says_to_be_a_front_gains_nothing(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    told = await front.pages.get(f"/topics/{TOPICS[0]}", Postdate_Shard="7", Postdate_Told="done Hello")
    assert "· shard 0 ·" in told and "Hello" not in told


async def test_slow_pages_of_a_shard_keep_no_figures_and_no_changes_waiting(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
):
    front = await make_front()
    csrf = await front.begin()
    hold = Hold("/storage")
    hold.put_on(monkeypatch)
    slow = []
    for count in range(1, shard_http._PAGES_MAX + 1):
        hold.came.clear()
        slow.append(asyncio.create_task(front.pages.get("/storage?shard=0")))
        await asyncio.wait_for(hold.came.wait(), 30)
        assert hold.held == count
    text = await front.pages.get("/")
    assert "does not answer" not in text
    assert f'href="/topics/{TOPICS[0]}"' in text
    path = f"/topics/{TOPICS[0]}/subscriptions/billing"
    await front.pages.post(path, csrf=csrf, follow=False, status=303, action="pause")
    assert front.shards[0].broker.registry.topic(TOPICS[0]).subscription("billing").paused
    monkeypatch.setattr(shard_pages, "_PAGE_SECONDS", 0.2)
    text = await front.pages.get(f"/topics/{TOPICS[0]}", status=503)
    assert "Shard 0 is busy with other pages" in text
    hold.release()
    await asyncio.gather(*slow)


async def test_a_form_of_another_session_or_origin_is_refused_before_a_shard_has_it(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    path = f"/topics/{TOPICS[0]}/subscriptions/billing"
    await front.pages.post(path, csrf="of another", status=403, action="pause")
    elsewhere = {"Origin": "http://elsewhere", "Sec-Fetch-Site": "cross-site"}
    await front.pages.post(path, status=403, headers=elsewhere, action="pause")
    assert not front.shards[0].broker.registry.topic(TOPICS[0]).subscription("billing").paused
    await front.pages.get(f"/topics/{TOPICS[0]}", status=421, Host="elsewhere")


def _at_socket(tmp_path: Path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "0.http")))


async def test_links_on_a_page_of_one_shard_stay_with_it_and_the_menu_leads_to_all(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    for path in ("/timeline", "/scheduled", "/storage"):
        assert "· shard" not in await front.pages.get(path)
        text = await front.pages.get(f"{path}?shard=1")
        assert "· shard 1 ·" in text
        assert f'href="{path}" aria-current="page"' in text
        assert TOPICS[0] not in text
    text = await front.pages.get("/timeline?unit=day&shard=1")
    links = re.findall(r'href="(/(?:timeline|scheduled)\?[^"]+)"', text)
    assert len(links) > 5
    assert all("shard=1" in link or "topic=" in link for link in links)
    for wrong in ("2", "-1", "x", "99999999", "1.0"):
        assert "There is no such shard" in await front.pages.get(f"/?shard={wrong}", status=404)


HOUR_MS = 3_600_000


def _due_times(clock_ms: int, *hours: float) -> list[Outgoing]:
    start_ms = clock_ms // HOUR_MS * HOUR_MS
    return [Outgoing(b"x", deliver_at_ms=start_ms + int(hour * HOUR_MS)) for hour in hours]


def _cells(text: str, heading: str) -> list[list[str]]:
    """The rows of the table below a heading, without tags."""
    table = text.split(f"<h2>{heading}</h2>")[1].split("</table>", maxsplit=1)[0].split("<tbody>")[1]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return [
        [
            re.sub(r"<[^>]+>", "", cell).strip()
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        ]
        for row in rows
    ]


async def test_the_timeline_is_of_all_shards(make_front: MakeFront):
    front = await make_front()
    now_ms = front.shards[0].broker.clock.now_ms()
    # Twelve topics: most of the others lie on both shards, so bars of topics without a colour are added up.
    names = [f"t{n:02}" for n in range(12)]
    numbers = [shard_of(name, SHARDS) for name in names]
    assert {numbers.count(0), numbers.count(1)} <= set(range(3, 10))
    for n, name in enumerate(names):
        await front.shards[numbers[n]].produce(name, *_due_times(now_ms, 5, *([7] * n)))
    await front.shards[0].produce(TOPICS[0], *_due_times(now_ms, 1_000))  # after the window
    text = await front.pages.get("/timeline")
    assert "<b>78</b> messages are due in this window, 1 after it." in text
    assert "Messages due, by hour" in text  # most is due in a day
    assert _cells(text, "By topic")[:2] == [["t11", "12", "Messages"], ["t10", "11", "Messages"]]
    assert len(_cells(text, "By topic")) == 12
    bars = [
        count
        for _, count in re.findall(
            r'<tr><th scope="row"><a [^>]+>([^<]+:00)</a></th><td class="n">(\d+)<', text
        )
    ]
    assert bars == ["12", "66"]
    legend = re.findall(r"</svg>\s*(.+?) <b>([\d,]+)</b></li>", text)
    assert legend == [*((f"t{n:02}", str(n + 1)) for n in range(7, 12)), ("7 other topics", "28")]
    links = re.findall(r'href="(/(?:timeline|scheduled)\?[^"]+)"', text)
    assert links and not any("shard=" in link for link in links)
    options = re.findall(r"<option>([^<]+)</option>", text)
    assert options == sorted([*names, TOPICS[0]])
    # Other windows, and what is known when a shard is away.
    assert "<b>1</b> message is due" in await front.pages.get(f"/timeline?topic={TOPICS[0]}&unit=month")
    assert "<b>79</b> messages are due in this window." in await front.pages.get("/timeline?unit=month")
    front.away.add(1)
    text = await front.pages.get("/timeline")
    of_first = sum(n + 1 for n in range(12) if numbers[n] == 0)
    assert f"<b>{of_first}</b> messages are due" in text
    assert "Shard 1 is on another node. Its topics are not shown here" in text
    front.away.add(0)
    assert "Nothing is due here." in await front.pages.get("/timeline")


async def test_the_first_window_is_that_of_what_all_shards_have(make_front: MakeFront):
    front = await make_front()
    now_ms = front.shards[0].broker.clock.now_ms()
    await front.shards[0].produce(TOPICS[0], *_due_times(now_ms, *([3] * 18)))
    assert "by hour" in await front.pages.get("/timeline")
    await front.shards[1].produce(TOPICS[1], *_due_times(now_ms, 100, 101))
    assert "by hour" in await front.pages.get("/timeline")  # nine of ten
    await front.shards[1].produce(TOPICS[1], *_due_times(now_ms, 102))
    assert "by day" in await front.pages.get("/timeline")


async def test_scheduled_messages_of_all_shards_come_by_due_time(make_front: MakeFront):
    front = await make_front()
    now_ms = front.shards[0].broker.clock.now_ms()
    for number, topic in enumerate(TOPICS):
        times = [1 + 2 * n + number for n in range(40)]
        await front.shards[number].produce(topic, *_due_times(now_ms, *times))
    text = await front.pages.get("/scheduled")
    assert "<b>80</b> messages wait, soonest first." in text
    assert "These are the next 50; choose a topic to see more." in text
    rows = re.findall(r'href="(/topics/(\w+)/messages/[\d:]+)"', text)
    assert [topic for _, topic in rows] == [*TOPICS] * 25
    assert "· shard 1 ·" in await front.pages.get(rows[1][0])
    start_ms = now_ms // HOUR_MS * HOUR_MS
    window = f"from={start_ms + 10 * HOUR_MS}&until={start_ms + 15 * HOUR_MS}"
    text = await front.pages.get(f"/scheduled?{window}")
    assert "<b>5</b> messages wait in this range, soonest first." in text
    assert len(re.findall(r'href="/topics/\w+/messages/', text)) == 5
    parts = [ScheduledList([], (0, True), [], has_gaps) for has_gaps in (False, True)]
    assert shard_pages.merge_scheduled(parts).has_gaps
    assert not shard_pages.merge_scheduled(parts[:1]).has_gaps
    assert "Messages whose schedule key begins with <code>k</code>" in await front.pages.get(
        "/scheduled?prefix=k"
    )
    assert "The range ends before it begins." in await front.pages.get(
        "/scheduled?from=200000000&until=100000000", status=400
    )
    assert "belongs to a topic: choose one" in await front.pages.get("/scheduled?id=1:1", status=400)
    front.away.add(0)
    text = await front.pages.get("/scheduled")
    assert "<b>40</b> messages wait, soonest first." in text
    assert "Shard 0 is on another node. Its topics are not shown here" in text


async def test_storage_lists_all_shards_and_their_sums(make_front: MakeFront):
    front = await make_front()
    for number, topic in enumerate(TOPICS):
        await front.shards[number].produce(
            topic, *(Outgoing(b"x" * 5_000 * (1 + 9 * number)) for _ in range(4))
        )
    text = await front.pages.get("/storage")
    sizes = [front.shards[n].broker.registry.topic(topic).log.data_bytes for n, topic in enumerate(TOPICS)]
    assert [row[:2] for row in _cells(text, "Shards")] == [
        [f"Shard {n}", size(sizes[n])] for n in range(SHARDS)
    ]
    assert [row[:2] for row in _cells(text, "Topics")] == [[TOPICS[n], size(sizes[n])] for n in (1, 0)]
    assert f"<span>messages</span><b>{size(sum(sizes))}</b>" in text
    front.away.add(1)
    text = await front.pages.get("/storage")
    assert f"<span>messages</span><b>{size(sizes[0])}</b>" in text
    assert "Shard 1 is on another node. Its topics are not shown here" in text
    assert 'href="/storage?shard=0"' in text and 'href="/storage?shard=1"' not in text
    front.away.add(0)
    assert "No shard tells its topics." in await front.pages.get("/storage")


def test_sums_of_storage_show_the_fullest_disk_and_no_more_topics_than_a_page_has():
    parts = [
        StorageFigures(
            [(n, f"{shard}-{n}", 1, 0, 0) for n in range(100, 0, -1)], shard, 5, 1, 2, 3, free, 40, 1, 1, 1
        )
        for shard, free in ((0, 900), (7, 30), (1, 500))
    ]
    sums = merge_storage(parts)
    assert (sums.free_bytes, sums.reserve_bytes, sums.data_bytes, sums.journal_bytes) == (30, 40, 15, 6)
    assert len(sums.rows) == 100 and sums.more == 208
    assert [row[0] for row in sums.rows[:4]] == [100, 100, 100, 99]


@pytest.mark.parametrize(
    ("page", "odd"),
    [
        *(("/timeline", odd) for odd in ("more", "fewer", "bars", "text")),
        *(("/scheduled", odd) for odd in ("fewer", "text")),
        *(("/storage", odd) for odd in ("more", "fewer", "text")),
    ],
)
async def test_a_shard_of_another_version_is_named_on_pages_of_all(
    page: str, odd: str, make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
):
    front = await make_front()
    await front.fill()
    figures_of = ShardHttp.figures

    async def figures(shard: ShardHttp, path: str, headers: Mapping[str, str], seconds: float) -> ShardPage:
        answer = await figures_of(shard, path, headers, seconds)
        if headers[SHARD_HEADER] != "1":
            return answer
        told = json.loads(answer.body)
        if odd == "bars" and "bars" in told:
            told["bars"]["others"] = [0]
        elif odd == "fewer":
            told.popitem()
        elif odd == "more":
            told["newer"] = 1
        return answer._replace(body=b"no JSON" if odd == "text" else json.dumps(told).encode())

    monkeypatch.setattr(ShardHttp, "figures", figures)
    text = await front.pages.get(page)
    assert "Shard 1 is of another version: start the broker anew. Its topics are not shown here" in text
    assert TOPICS[0] in text


async def test_every_page_of_a_broker_is_there(make_front: MakeFront):
    front = await make_front()
    for page in ROUTES:
        path = page.template.format(topic=TOPICS[0], id="1:1", name="billing", job="none")
        async with front.pages.session.request(page.method, path) as answer:
            assert "There is no such page" not in await answer.text(), page.template
    assert "There is no such page" in await front.pages.get("/figures", status=404)


def _notes(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """The action, the result and the topic of each line of the audit trail."""
    notes = [record.__dict__["fields"] for record in caplog.records if "Audit: a change" in record.message]
    return [(note["action"], note["result"], note["topic"]) for note in notes]


class Hold:
    """Requests that a shard holds back."""

    def __init__(self, path: str) -> None:
        self.held = 0
        self.came = asyncio.Event()
        self._path = path
        self._end = asyncio.Event()

    def put_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dispatch = Site._dispatch

        async def held(site: Site, visit: Visit) -> web.Response:
            if site.config.http_socket and visit.request.path == self._path:
                self.held += 1
                self.came.set()
                await self._end.wait()
            return await dispatch(site, visit)

        monkeypatch.setattr(Site, "_dispatch", held)

    def release(self) -> None:
        self._end.set()


async def test_blanks_around_a_topic_lead_to_the_same_shard(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    for number, topic in enumerate(TOPICS):
        for page in ("/scheduled", "/timeline"):
            for given in (f"%20{topic}", f"{topic}%20"):
                assert f"· shard {number} ·" in await front.pages.get(f"{page}?topic={given}")
        text = await front.pages.post("/scheduled/change", topic=f" {topic} ", action="cancel")
        assert "Cancelled: 5 of 5" in text


async def test_lists_of_all_topics_are_of_one_shard_only_where_that_is_named(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    for path in ("/", "/topics", "/dead-letters"):
        text = await front.pages.get(f"{path}?topic={TOPICS[1]}")
        assert "· shard" not in text
        text = await front.pages.get(f"{path}?topic={TOPICS[1]}&shard=0")
        assert "· shard 0 ·" in text


async def test_the_report_of_the_audit_is_shown_by_the_front(make_front: MakeFront, tmp_path: Path):
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "report.html").write_text("the one report")
    front = await make_front(audit_report_dir=str(folder))
    await front.fill()
    front.away.update(range(SHARDS))
    for query in ("", "?shard=1", "?topic=x"):
        text = await front.pages.get(f"/audit{query}")
        assert "There is no report in the folder yet." in text
        assert "· shard" not in text
        assert await front.pages.get(f"/audit/report.html{query}") == "the one report"
    front.away.clear()
    text = await front.pages.get(f"/topics/{TOPICS[1]}")
    assert 'href="/audit"' in text  # and not that of the shard whose page it is on


@pytest.mark.parametrize("odd", ["more", "fewer", "state", "note", "list", "text"])
async def test_a_shard_of_another_version_takes_nothing_of_others_away(
    odd: str, make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
):
    front = await make_front()
    await front.fill()
    figures_of = ShardHttp.figures

    async def figures(shard: ShardHttp, path: str, headers: Mapping[str, str], seconds: float) -> ShardPage:
        page = await figures_of(shard, path, headers, seconds)
        if headers[SHARD_HEADER] != "1" or path != "/figures":
            return page
        told = json.loads(page.body)
        changed = {
            "more": {**told, "newer": 1},
            "fewer": {name: value for name, value in told.items() if name != "ready"},
            "state": {**told, "state": "splendid"},
            "note": {**told, "attention": [["/", "name"]]},
            "list": [told],
        }
        body = b"no JSON" if odd == "text" else json.dumps(changed[odd]).encode()
        return page._replace(body=body)

    monkeypatch.setattr(ShardHttp, "figures", figures)
    text = await front.pages.get("/")
    assert "Shard 1 is of another version: start the broker anew" in text
    assert "1 of 2 shards answer here" in text
    assert 'href="/?shard=0"' in text


async def test_shards_of_other_nodes_are_not_away_and_an_early_delivery_comes_before_all(
    make_front: MakeFront,
):
    front = await make_front()
    await front.fill()
    front.elsewhere.add(1)
    text = await front.pages.get("/")
    assert "<h1>On time</h1>" in text
    assert "Shard 1 is owned by node b" in text
    front.elsewhere.add(0)
    assert "<h1>Other nodes own all shards</h1>" in await front.pages.get("/")
    front.elsewhere.clear()
    front.away.add(1)
    assert "<h1>1 of 2 shards answer here</h1>" in await front.pages.get("/")
    front.shards[0].broker.registry.topic(TOPICS[0]).subscription("billing").counters.early_deliveries = 2
    assert "<h1>2 messages left before the time." in await front.pages.get("/")


async def test_pages_lead_to_the_node_that_owns_a_shard_where_it_can_be_reached(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    front.elsewhere.add(1)
    there = "http://10.0.0.2:7680"
    text = await front.pages.get("/")
    assert "1 of 2 shards, those of this node" in text
    assert f'href="{there}/?shard=1"' in text and 'class="flash' not in text
    for path in ("/topics", "/dead-letters", "/timeline", "/scheduled", "/storage"):
        text = await front.pages.get(f"{path}?q=a%26b")
        assert f'href="{there}{path}?q=a%26b&amp;shard=1"' in text, path
        assert 'class="flash nothing"' in text and "Shard 1 is owned by node b" in text, path
    for path in (f"/topics/{TOPICS[1]}", f"/timeline?topic={TOPICS[1]}", "/storage?shard=1"):
        text = await front.pages.get(path, status=503)
        assert re.search(rf'href="{there}{re.escape(path)}\??"', text), (path, text)
    front.pages_of_owner[0] = ""
    for path, status in (("/topics", 200), ("/timeline", 200), ("/storage?shard=1", 503)):
        text = await front.pages.get(path, status=status)
        assert "Shard 1 is owned by node b" in text and "there</a>" not in text, path


@pytest.mark.parametrize(
    ("listens", "host", "url"),
    [
        ("0.0.0.0:7680", "10.0.0.2", "http://10.0.0.2:7680"),
        ("[::]:7680", "fd00::2", "http://[fd00::2]:7680"),
        ("10.1.1.1:80", "10.0.0.2", "http://10.1.1.1"),
        ("127.0.0.1:7680", "10.0.0.2", ""),
        ("localhost:7680", "node-b", ""),
        ("127.0.0.1:7680", "127.0.0.1", "http://127.0.0.1:7680"),
        ("10.1.1.1:0", "10.0.0.2", ""),
        ("", "10.0.0.2", ""),
        ("javascript:alert(1)", "10.0.0.2", ""),
        ("a@b:80", "10.0.0.2", ""),
        ("a?b:80", "10.0.0.2", ""),
        ("unix:/run/x", "10.0.0.2", ""),
    ],
)
def test_the_pages_of_a_node_are_where_others_reach_them(listens: str, host: str, url: str):
    assert shard_http.pages_url(listens, host) == url


async def test_notes_are_of_all_shards_in_turn_and_the_rest_is_counted(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    for number, topic in enumerate(TOPICS):
        paused = front.shards[number].broker.registry.topic(topic)
        for n in range(9):
            name = f"s{n}"
            await paused.subscriptions.create(name, SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy())
            await control.pause(paused, paused.subscription(name), paused=True)
    last = front.shards[1].broker.registry.topic(TOPICS[1]).subscription("s8")
    last.counters.early_deliveries = 1
    text = await front.pages.get("/")
    notes = re.findall(r"<li><a [^>]*>(\S+) / (\w+)</a> <span>(.*?)</span>", text)
    assert notes[0] == (TOPICS[1], "s8", "delivered before its time: this must never happen")
    assert len(notes) == 8
    assert [topic for topic, *_ in notes].count(TOPICS[0]) == 4
    assert "And 11 more." in text  # of 18 that are paused and one early delivery
    assert "And 2 more." in await front.pages.get("/?shard=1")


async def test_what_a_shard_sends_without_end_or_never_is_given_up(tmp_path: Path):
    stuck = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/stuck":
            await stuck.wait()
        response = web.StreamResponse()
        await response.prepare(request)
        part = b"x" * (1 << 20)
        while True:
            await response.write(part)

    path = str(tmp_path / "0.http")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.UnixSite(runner, path).start()
    shard = ShardHttp(0, path)
    try:
        with pytest.raises(Unavailable, match="too large"):
            await shard.page("/endless", {}, 50)
        with pytest.raises(Unavailable, match="does not answer"):
            await shard.page("/stuck", {}, 0.05)
    finally:
        await shard.close()
        await runner.cleanup()
