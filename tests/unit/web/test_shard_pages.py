"""The pages of a front: one login for all shards, pages of a topic from its shard, lists of all of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from broker.errors import Unavailable
from broker.observe.audit import AuditTrail
from broker.policy import SubscriptionPolicy
from broker.runtime.clock import SystemClock
from broker.subscriptions.types import SubscriptionType
from broker.topic_shards import TopicShard, shard_of
from broker.web.guard import LOGIN_HEADER, SHARD_HEADER, FrontSeal, Guard
from broker.web.routes import ROUTES
from broker.web.server import HttpServer
from broker.web.shard_http import ShardHttp
from broker.web.source import PageSource, ShardSource
from tests.configs import broker_config
from tests.harness import EARLIEST, Outgoing
from tests.unit.web.conftest import TOKEN, MakePages, Pages

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

    async def fill(self) -> None:
        for shard, topic in zip(self.shards, TOPICS, strict=True):
            await shard.produce(
                topic, *(Outgoing(b"%d" % n, deliver_after_ms=3_600_000 + n) for n in range(5))
            )
            await shard.broker.registry.topic(topic).subscriptions.create(
                "billing", SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy()
            )


MakeFront = Callable[..., Awaitable[Front]]


@pytest.fixture
async def make_front(make_pages: MakePages, tmp_path: Path) -> AsyncIterator[MakeFront]:
    stack = AsyncExitStack()

    async def make(shard_token: str = TOKEN, **settings: object) -> Front:
        settings = {"admin_token": TOKEN, "http_address": "127.0.0.1:0", **settings}
        shards, https, away = [], [], set[int]()
        for number in range(SHARDS):
            path = str(tmp_path / f"{number}.http")
            shard = await make_pages(
                **{**settings, "admin_token": shard_token},
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
            return https[number]

        source = PageSource(config, clock, "1.2.3", AuditTrail(clock), shards=ShardSource(SHARDS, find))
        server = HttpServer(config.http_address, _no_metrics, lambda: None, pages=source)
        server.listen()
        await server.start()
        stack.push_async_callback(server.stop)
        jar = aiohttp.CookieJar(unsafe=True)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://{server.address}", cookie_jar=jar)
        )
        return Front(Pages(shards[0].broker, server, session), shards, away)

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
    assert "Shard 1 is on another node: its topics are not shown" in text
    assert "1 of 2 shards answer here" in await front.pages.get("/")
    assert "Shard 1 is on another node" in await front.pages.get(f"/topics/{TOPICS[1]}", status=503)
    await front.pages.get(f"/topics/{TOPICS[0]}")


async def test_one_login_changes_things_on_every_shard(
    make_front: MakeFront, caplog: pytest.LogCaptureFixture
):
    front = await make_front()
    await front.fill()
    await front.pages.log_in()
    caplog.set_level("INFO")
    for number, topic in enumerate(TOPICS):
        path = f"/topics/{topic}"
        text = await front.pages.post(
            f"{path}/subscriptions/billing", csrf=await front.pages.csrf(path), action="pause", back=path
        )
        assert "Paused: billing." in text  # told on the page that it leads to
        assert front.shards[number].broker.registry.topic(topic).subscription("billing").paused
    notes = [record for record in caplog.records if record.getMessage().startswith("Audit: a change")]
    assert len(notes) == SHARDS  # by the shards, and not by the front as well
    # Changes of many have the topic in the form, and their own page in its address.
    text = await front.pages.post("/scheduled/change", topic=TOPICS[1], action="cancel", matched="5")
    assert "Cancelled: 5." in text
    await front.pages.post("/logout")
    for topic in TOPICS:
        assert "Log out" not in await front.pages.get(f"/topics/{topic}")
        await front.pages.post(
            f"/topics/{topic}/subscriptions/billing", csrf="x", status=403, action="resume"
        )


async def test_a_form_of_another_session_or_origin_is_refused_before_a_shard_has_it(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    await front.pages.log_in()
    path = f"/topics/{TOPICS[0]}/subscriptions/billing"
    await front.pages.post(path, csrf="of another", status=403, action="pause")
    elsewhere = {"Origin": "http://elsewhere", "Sec-Fetch-Site": "cross-site"}
    await front.pages.post(path, status=403, headers=elsewhere, action="pause")
    assert not front.shards[0].broker.registry.topic(TOPICS[0]).subscription("billing").paused
    await front.pages.get(f"/topics/{TOPICS[0]}", status=421, Host="elsewhere")


async def test_where_reading_needs_a_login_no_shard_is_read_without_one(
    make_front: MakeFront, tmp_path: Path
):
    rights = tmp_path / "rights"
    rights.write_text("")
    front = await make_front(access_file=str(rights))
    await front.fill()
    for path in ("/", "/topics", f"/topics/{TOPICS[0]}", "/?shard=0"):
        async with front.pages.session.get(path, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"].partition("?")[0]) == (303, "/login"), path
    await front.pages.log_in()
    assert TOPICS[0] in await front.pages.get(f"/topics/{TOPICS[0]}")
    # The same for who opens the socket of a shard.
    async with _at_socket(tmp_path) as session:
        for headers in ({}, {SHARD_HEADER: "0"}):
            async with session.get(
                "http://localhost/figures", headers=headers, allow_redirects=False
            ) as answer:
                assert answer.status == 303
        forged = FrontSeal("another token").close("csrf", "10.0.0.1")
        async with session.get("http://localhost/topics", headers={LOGIN_HEADER: forged}) as answer:
            assert answer.status == 503


def _at_socket(tmp_path: Path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "0.http")))


async def test_who_vouches_for_himself_to_the_front_is_nobody(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    seal = FrontSeal(TOKEN).close("csrf", "10.0.0.1")  # even with the token it is no session here
    text = await front.pages.get(f"/topics/{TOPICS[0]}", Postdate_Login=seal, Postdate_Shard="7")
    assert "Log out" not in text
    assert "· shard 0 ·" in text


async def test_a_shard_with_another_token_says_so(make_front: MakeFront):
    front = await make_front(shard_token="another-token-of-some-length")
    await front.fill()
    await front.pages.log_in()
    text = await front.pages.get(f"/topics/{TOPICS[0]}", status=503)
    assert "different settings of admin_token" in text


async def test_a_page_about_no_topic_asks_for_a_shard_and_stays_with_it(make_front: MakeFront):
    front = await make_front()
    await front.fill()
    for path in ("/timeline", "/scheduled", "/storage", "/audit"):
        text = await front.pages.get(f"{path}?unit=day")
        assert "Each shard has its own" in text
        assert f'href="{path}?unit=day&amp;shard=1"' in text
        text = await front.pages.get(f"{path}?shard=1")
        assert "· shard 1 ·" in text
        assert f'href="{path}?shard=1" aria-current="page"' in text
    text = await front.pages.get("/timeline?unit=day&shard=1")
    links = re.findall(r'href="(/(?:timeline|scheduled)\?[^"]+)"', text)
    assert len(links) > 5
    assert all("shard=1" in link or "topic=" in link for link in links)
    for wrong in ("2", "-1", "x", "99999999", "1.0"):
        assert "There is no such shard" in await front.pages.get(f"/?shard={wrong}", status=404)


async def test_every_page_of_a_broker_is_there(make_front: MakeFront):
    front = await make_front()
    for page in ROUTES:
        path = page.template.format(topic=TOPICS[0], id="1:1", name="billing", job="none")
        async with front.pages.session.request(page.method, path) as answer:
            assert "There is no such page" not in await answer.text(), page.template
    assert "There is no such page" in await front.pages.get("/figures", status=404)


async def test_a_change_that_a_shard_does_not_answer_is_in_doubt(tmp_path: Path, make_front: MakeFront):
    front = await make_front()
    await front.fill()
    await front.pages.log_in()
    csrf = await front.pages.csrf()
    front.away.add(0)
    text = await front.pages.post(
        f"/topics/{TOPICS[0]}/subscriptions/billing", csrf=csrf, status=503, action="pause"
    )
    assert "Whether anything was changed is not known" in text


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
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.UnixSite(runner, path).start()
    shard = ShardHttp(0, path)
    try:
        with pytest.raises(Unavailable, match="too large"):
            await shard.page("GET", "/endless", {}, None, 50)
        with pytest.raises(Unavailable, match="does not answer"):
            await shard.page("GET", "/stuck", {}, None, 0.05)
    finally:
        await shard.close()
        await runner.cleanup()


def test_a_seal_is_of_one_token_and_of_what_it_says():
    seal = FrontSeal(TOKEN)
    sealed = seal.close("a-csrf", "10.0.0.1")
    assert seal.open(sealed) == ("a-csrf", "10.0.0.1")
    assert seal.open(sealed.replace("10.0.0.1", "10.0.0.2")) is None
    assert FrontSeal("another").open(sealed) is None
    for text in ("", " ", "a-csrf 10.0.0.1", "\ud800 x y"):
        assert seal.open(text) is None


def test_sessions_that_a_front_vouches_for_are_bounded_and_need_a_token():
    guard = Guard(TOKEN, "localhost", SystemClock())
    seal = FrontSeal(TOKEN)
    first = guard.vouched(seal.close("csrf0", ""))
    assert first is not None
    again = guard.vouched(seal.close("csrf0", "x"))
    assert again is not None
    assert again[0] is first[0]
    for number in range(1, 1_001):
        guard.vouched(seal.close(f"csrf{number}", ""))
    anew = guard.vouched(seal.close("csrf0", ""))
    assert anew is not None
    assert anew[0] is not first[0]
    assert Guard("", "localhost", SystemClock()).vouched(FrontSeal("").close("csrf", "")) is None
