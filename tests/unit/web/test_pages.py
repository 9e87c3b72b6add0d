"""The pages of a real broker: what they show is escaped, who changes things is known, every change is told."""

from __future__ import annotations

import asyncio
import html
import itertools
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from jinja2 import Environment
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.policy import OVERDUE_DEAD_LETTER, TRACKER_MEMORY, SubscriptionPolicy, TopicPolicy
from broker.runtime.supervise import YieldBudget
from broker.storage.records import GivenBack, ReturnReason
from broker.storage.recurring_values import Definition, RecurringRule
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.types import SubscriptionType
from broker.topics import control
from broker.web import changes, dead_letters, overview
from broker.web.calendar_window import start_name
from broker.web.render import Renderer, compact
from broker.web.search import form_time
from tests.harness import EARLIEST, LATEST, Outgoing, entries_of
from tests.pages import pages_without
from tests.unit.web.conftest import TOKEN, MakePages, Pages, access_files

HOUR_MS = 3_600_000
NASTY = "\"><script>alert(1)</script>'&{{7*7}}"
PATHS = [
    "/",
    "/new-topic",
    "/topics/orders/settings",
    "/topics/orders/delete",
    "/topics/orders/produce",
    "/topics/orders/new-subscription",
    "/topics/orders/subscriptions/billing/settings",
    "/topics/orders/subscriptions/billing/seek",
    "/topics/orders/subscriptions/billing/delete",
    "/timeline",
    "/timeline?unit=second",
    "/scheduled",
    "/scheduled?topic=orders",
    "/scheduled/change?topic=orders&action=now",
    "/topics",
    "/topics/orders",
    "/topics/orders/messages/1:1",
    "/topics/orders/subscriptions/billing/skip",
    "/topics/orders/subscriptions/billing/owed",
    "/topics/orders/recurring",
    "/topics/orders/recurring/report",
    "/dead-letters",
    "/dead-letters/orders/billing",
    "/dead-letters/orders/billing/purge",
    "/storage",
    "/storage/orders",
    "/audit",
    "/login",
]


PASSING_PAGES = {
    "/topics/{topic}/bulk-changes/{id}",  # needs a bulk change
    "/audit/report.html",  # needs a report; has headers of its own
}


def test_no_page_is_forgotten():
    assert pages_without(PATHS) == PASSING_PAGES


async def filled(make_pages: MakePages, **settings: object) -> Pages:
    pages = await make_pages(**settings)
    topic = await pages.broker.registry.topic_or_create("orders")
    await topic.subscriptions.create("billing", SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy())
    await pages.broker.recurring.put(
        topic, "report", Definition(RecurringRule(cron="0 9 1 1 *"), b"", paused=True)
    )
    await pages.produce(
        "orders",
        *(
            Outgoing(b'{"n": %d}' % i, deliver_after_ms=HOUR_MS + i * 1_000, schedule_key=f"order/{i}")
            for i in range(20)
        ),
    )
    return pages


@pytest.mark.slow
async def test_every_page_is_guarded_by_its_headers_and_runs_nothing_inline(make_pages):
    pages = await filled(make_pages)
    for path in [*PATHS[:-1], "/nowhere", "/scheduled?from=soon", "/static/style.css", "/static/none"]:
        async with pages.session.get(path) as response:
            text = await response.text()
            policy = response.headers["Content-Security-Policy"]
            assert (
                policy.startswith("default-src 'none'")
                and "unsafe" not in policy
                and "frame-ancestors 'none'" in policy
            )
            assert response.headers["X-Frame-Options"] == "DENY"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "same-origin"
            assert response.headers["Server"] == "postdate"
            assert ("no-store" in response.headers["Cache-Control"]) is (path != "/static/style.css")
        if response.content_type == "text/html":
            assert not re.search(
                r"<script(?![^>]*src=\"/static/)|\son[a-z]+=|\sstyle=|<style|https?://(?!www\.w3\.org)", text
            ), path
            assert TOKEN not in text


async def test_a_topic_shows_each_policy_in_the_form_of_its_kind(make_pages):
    pages = await make_pages()
    await pages.broker.registry.create_topic(
        "orders",
        TopicPolicy(
            tracker=TRACKER_MEMORY,
            retention_ms=36 * HOUR_MS,
            retention_bytes=3 << 30,
            max_pending_messages=12_345,
            overdue_action=OVERDUE_DEAD_LETTER,
        ),
    )
    text = re.sub(r"<[^>]*>|\s+", " ", await pages.get("/topics/orders"))
    for shown in (
        r"tracker +memory",
        r"retention_ms +36h",
        r"retention_bytes +3GiB",
        r"max_pending_messages +12,345",
        r"overdue_action +dead_letter",
        r"delayed_delivery +enabled",
    ):
        assert re.search(shown, text), shown


async def test_the_first_look_at_a_topic_tells_the_age_of_its_oldest_message(make_pages):
    pages = await make_pages()
    topic = await pages.broker.registry.topic_or_create("orders")
    await topic.subscriptions.create("billing", SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy())
    await pages.produce("orders", Outgoing(b"x"))
    stored_ms = pages.broker.clock.now_ms()
    while pages.broker.clock.now_ms() < stored_ms + 20:
        await asyncio.sleep(0.005)
    text = re.sub(r"<[^>]*>|\s+", " ", await pages.get("/topics/orders"))
    assert re.search(r"oldest ready +[1-9]", text), text


async def test_what_producers_write_is_escaped(make_pages):
    pages = await make_pages()
    keyed = Outgoing(NASTY.encode(), deliver_after_ms=HOUR_MS, schedule_key=NASTY, key=NASTY)
    (position,) = await pages.produce("orders", keyed)
    for path in (
        "/scheduled?topic=orders",
        f"/topics/orders/messages/{position.ledger_id}:{position.entry_id}",
    ):
        text = await pages.get(path)
        assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text and "{{7*7}}" in text
    for path in (f"/scheduled?topic=orders&prefix={quote(NASTY)}", f"/topics?q={quote(NASTY)}"):
        assert "<script>alert" not in await pages.get(path)
    for path in (
        f"/scheduled?topic={quote(NASTY)}",
        f"/topics/{quote(NASTY)}",
        f"/scheduled?from={quote(NASTY)}",
    ):
        text = await pages.get(path, status=404 if "from" not in path else 400)
        assert "<script>alert" not in text


async def test_payloads_are_shown_as_what_they_are(make_pages):
    pages = await make_pages()
    json_id, text_id, binary_id, empty_id = await pages.produce(
        "orders",
        *(
            Outgoing(payload, deliver_after_ms=HOUR_MS)
            for payload in (b'{"a":[1,2]}', "grüße\n".encode(), b"\0\xff\x80", b"")
        ),
    )

    async def page(position):
        return await pages.get(f"/topics/orders/messages/{position.ledger_id}:{position.entry_id}")

    assert "&#34;a&#34;: [" in await page(json_id)
    assert "grüße" in await page(text_id)
    assert "00 ff 80" in await page(binary_id)
    assert "Empty." in await page(empty_id)


UNSEEN = "\u202d\u202e\u2066\u2069\u200e\u200f\u061c\u200b\ufeff\u00ad\u2028\x1b\x85"


async def test_what_turns_or_hides_text_is_shown_escaped(make_pages):
    pages = await make_pages()
    sly = f"a{UNSEEN}\n\tb"
    payload = b'{"a": "\\u202egnp\\ud800", "b": "' + "\u202e\u2067".encode() + b'\\n"}\n'
    (position,) = await pages.produce(
        "orders",
        Outgoing(
            payload, deliver_after_ms=HOUR_MS, schedule_key=sly, key=sly, properties=((sly, f"{sly}!"),)
        ),
    )
    await pages.produce("orders", Outgoing(sly.encode(), deliver_after_ms=HOUR_MS))
    shown = r"a\u202d\u202e\u2066\u2069\u200e\u200f\u061c\u200b\ufeff\xad\u2028\x1b\x85\n\tb"
    prefix = quote(sly)
    for path, count in (
        ("/scheduled?topic=orders", 1),
        (f"/scheduled?topic=orders&prefix={prefix}", 2),
        (f"/scheduled/change?topic=orders&prefix={prefix}&action=cancel", 2),
        (f"/topics/orders/messages/{position.ledger_id}:{position.entry_id}", 4),
    ):
        text = await pages.get(path)
        assert text.count(shown) == count, path
        inputs = re.compile(r'value="[^"]*"')  # are sent back as they are
        assert not set(UNSEEN) & set(inputs.sub("", text)), path
    assert r"\u202egnp\ud800" in text  # as JSON
    assert "{\n  &#34;a&#34;" in text  # its lines are lines
    assert r"&#34;b&#34;: &#34;\u202e\u2067\n" in text


async def test_another_host_name_gets_nothing_but_machines_do(make_pages):
    pages = await filled(make_pages, http_hosts="postdate.example")
    text = await pages.get("/scheduled?topic=orders", status=421, Host="evil.example")
    assert "evil.example" in text and "order/1" not in text
    await pages.get("/static/style.css", status=421, Host="evil.example")
    assert "postdate_up" not in await pages.get("/metrics", status=421, Host="evil.example")
    assert await pages.get("/metrics", Host="postdate.example") == "postdate_up 1\n"
    assert await pages.get("/livez", Host="evil.example") == "ok\n"


async def test_without_rules_pages_change_nothing_where_grpc_has_tls(make_pages):
    # Over gRPC nobody can call without a certificate, perhaps: pages must be no way around that.
    pages = await filled(make_pages)
    pages.calls._has_tls = True
    for path in ("/", "/topics", "/topics/orders", "/scheduled?topic=orders", "/topics/orders/messages/1:1"):
        assert '<form method="post"' not in await pages.get(path), path
    for path in ("/new-topic", "/topics/orders/produce", "/topics/orders/subscriptions/billing/skip"):
        assert "set access_file" in await pages.get(path, status=403), path
    csrf = await pages.csrf("/login")
    await pages.post("/topics/orders/subscriptions/billing", csrf=csrf, action="pause", status=403)
    assert not pages.broker.registry.topic("orders").subscription("billing").paused


async def test_beyond_this_machine_there_are_pages_only_where_that_is_allowed(make_pages):
    pages = await filled(make_pages, http_address="0.0.0.0:0")
    for path in PATHS:
        text = await pages.get(path, status=403)
        assert "POSTDATE_ALLOW_PLAINTEXT" in text and "order/1" not in text
    assert await pages.get("/readyz") == "ok\n"


async def test_in_a_trusted_network_pages_are_open_without_rules(make_pages):
    pages = await filled(make_pages, http_address="0.0.0.0:0", allow_plaintext=True)
    assert "orders" in await pages.get("/topics")
    await pages.get("/topics", status=403, X_Forwarded_For="203.0.113.9")


async def test_with_rules_nobody_sees_anything_without_a_login(make_pages, tmp_path: Path):
    pages = await filled(make_pages, **access_files(tmp_path))
    for path in PATHS[:-1]:
        text = await pages.get(path, status=303)
        assert "order" not in text
    assert "order/1" in await pages.post(
        "/login", csrf=await pages.csrf("/login"), token=TOKEN, next="/scheduled?topic=orders"
    )
    assert await pages.get("/metrics") == "postdate_up 1\n"


async def test_tokens_are_not_taken_in_the_clear_beyond_this_machine(make_pages, tmp_path: Path):
    pages = await filled(make_pages, http_address="0.0.0.0:0", **access_files(tmp_path))
    assert "not encrypted" in await pages.get("/login", status=403)


async def test_what_came_through_a_proxy_needs_access_rules(make_pages, tmp_path: Path):
    pages = await filled(make_pages, http_hosts="postdate.example")
    assert "POSTDATE_ACCESS_FILE" in await pages.get("/topics", status=403, Host="postdate.example")
    await pages.get("/topics", status=403, X_Forwarded_For="203.0.113.9")


async def test_logging_in_and_out(make_pages, tmp_path: Path):
    pages = await filled(make_pages, **access_files(tmp_path))
    assert "not accepted" in await pages.log_in("wrong")
    text = await pages.log_in()
    assert "Log out" in text and "token:admin" in text
    cookie = next(each for each in pages.session.cookie_jar if each.key == "postdate_session")
    assert (
        cookie["httponly"]
        and cookie["samesite"] == "Strict"
        and not cookie["secure"]
        and int(cookie["max-age"]) <= 8 * 3600
    )
    text = await pages.post("/logout")
    assert "Log in" in text and "Log out" not in text


async def test_a_session_ends_with_its_token(make_pages, tmp_path: Path):
    pages = await filled(make_pages, **access_files(tmp_path))
    await pages.log_in()
    await pages.get("/topics")
    access_files(tmp_path, ada="of-ada")  # admin's is another one now
    (tmp_path / "tokens.toml").write_text((tmp_path / "tokens.toml").read_text().replace('"admin"', '"eve"'))
    access = pages.calls._port.access
    assert access is not None
    assert [each.refresh() for each in access.watched] == [True, True]
    await pages.get("/topics", status=303)
    text = await pages.post("/topics/orders/subscriptions/billing", csrf="x", action="pause", status=401)
    assert "Nothing was changed: log in" in text and 'href="/login"' in text


async def test_cookies_are_secure_behind_https(make_pages, tmp_path: Path):
    pages = await filled(make_pages, **access_files(tmp_path))
    csrf = await pages.csrf("/login")
    headers = {"Origin": f"http://{pages.server.address}", "X-Forwarded-Proto": "https"}
    async with pages.session.post(
        "/login", data={"csrf": csrf, "token": TOKEN}, headers=headers, allow_redirects=False
    ) as response:
        assert response.cookies["postdate_session"]["secure"]


async def test_guessing_a_token_has_to_wait(make_pages, tmp_path: Path):
    pages = await filled(make_pages, **access_files(tmp_path))
    for wrong in ("wrong", "", "x" * 9_000, "\u00e9", "a.b.c"):
        assert "not accepted" in await pages.log_in(wrong)
    assert "Too many" in await pages.log_in()
    await pages.get("/", status=303)


async def test_logins_and_forms_that_are_refused_write_one_line_a_minute(make_pages, caplog, tmp_path: Path):
    def lines() -> list[dict[str, Any]]:
        found = [vars(each)["fields"] for each in caplog.records if each.name == "broker.web.site"]
        caplog.clear()
        return found

    pages = await filled(make_pages, **access_files(tmp_path))
    for _ in range(10):
        await pages.log_in("wrong")
    assert [each["too_many"] for each in lines()] == [False] * 5 + [True]
    for _ in range(10):
        await pages.post("/login", csrf="another", status=403)
    assert [each["path"] for each in lines()] == ["/login"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "csrf"),
    [
        ({}, None),
        ({"Origin": "http://evil.example"}, None),
        ({"Origin": "null"}, None),
        ({"Sec-Fetch-Site": "cross-site"}, None),
        (None, "wrong"),
        (None, ""),
    ],
)  # fmt: skip
async def test_forms_that_are_not_ours_change_nothing(make_pages, headers, csrf):
    pages = await filled(make_pages)
    text = await pages.post(
        "/topics/orders/subscriptions/billing", csrf=csrf, headers=headers, action="pause", status=403
    )
    assert "The form was refused" in text
    assert not pages.broker.registry.topic("orders").subscription("billing").paused


async def test_another_sessions_token_does_not_do(make_pages, tmp_path: Path):
    pages = await filled(make_pages, **access_files(tmp_path))
    await pages.log_in()
    csrf = await pages.csrf()
    pages.session.cookie_jar.clear()
    await pages.log_in()
    await pages.post("/topics/orders/subscriptions/billing", csrf=csrf, action="pause", status=403)


async def test_another_browsers_token_does_not_do_where_nobody_logs_in(make_pages):
    pages = await filled(make_pages)
    csrf = await pages.csrf()
    pages.session.cookie_jar.clear()
    await pages.post("/topics/orders/subscriptions/billing", csrf=csrf, action="pause", status=403)
    await pages.get("/topics")  # another cookie
    await pages.post("/topics/orders/subscriptions/billing", csrf=csrf, action="pause", status=403)
    assert "Paused: billing." in await pages.post(
        "/topics/orders/subscriptions/billing", csrf=await pages.csrf(), action="pause"
    )


async def test_a_form_that_is_too_large_is_refused_under_the_same_headers(make_pages):
    pages = await filled(make_pages)
    headers = {"Origin": f"http://{pages.server.address}"}
    async with pages.session.post("/logout", data={"csrf": "x" * 100_000}, headers=headers) as response:
        assert response.status == 413
        assert response.headers["X-Frame-Options"] == "DENY"
        text = html.unescape(await response.text())
        assert "A form may have 64 KiB as it is sent: nothing was changed." in text and "<h1>" in text


async def test_a_form_that_names_no_change_changes_nothing(make_pages):
    pages = await filled(make_pages)
    subscription = pages.broker.registry.topic("orders").subscription("billing")
    csrf, path = await pages.csrf(), "/topics/orders/subscriptions/billing"
    await pages.post(path, csrf=csrf, action="pause")
    for action in ("", "stop"):
        assert "neither pause nor resume" in await pages.post(path, csrf=csrf, status=400, action=action)
    assert subscription.paused
    await pages.post(path, csrf=csrf, action="resume")
    assert not subscription.paused


async def test_reading_changes_nothing_whatever_the_method(make_pages):
    pages = await filled(make_pages)
    assert "takes no such request" in await pages.get("/logout", status=405)
    async with pages.session.head("/topics") as response:
        assert response.status == 200 and not await response.read()
    async with pages.session.put("/topics/orders/subscriptions/billing") as response:
        assert response.status == 405


@pytest.mark.slow
async def test_one_message_is_cancelled_moved_or_sent(make_pages):
    pages = await filled(make_pages)
    schedule = pages.broker.registry.topic("orders").schedule
    place = "/topics/orders/messages/1:0"
    assert "Moved: 1:0 to 2030-01-01 00:00:00 UTC." in await pages.post(
        place, action="move", how="at", at="2030-01-01T00:00"
    )
    assert "is not a time" in await pages.post(place, action="move", how="at", at="soon", back=place)
    assert "Cancelled: 1:0." in await pages.post(place, action="cancel")
    assert "was already cancelled" in await pages.post(place, action="cancel")
    assert "Sent now: 1:1." in await pages.post("/topics/orders/messages/1:1", action="now")
    assert (await schedule.get("order/2")).position == (1, 2)
    assert "was not found" in await pages.post("/topics/orders/messages/9:9", action="cancel")


async def test_all_that_match_are_counted_first_and_changed_after(make_pages):
    pages = await filled(make_pages)
    text = await pages.get("/scheduled/change?topic=orders&prefix=order/1&action=cancel")
    assert "This will cancel 11 messages" in text
    topic = pages.broker.registry.topic("orders")
    assert topic.index.scheduled_count() == 20 and not topic.bulk.ids()
    text = await pages.post("/scheduled/change", topic="orders", prefix="order/1", action="cancel")
    assert "Cancelled: 11 of 11 messages that matched." in text
    assert topic.index.scheduled_count() == 9
    text = await pages.post("/scheduled/change", topic="orders", action="move", how="by", by="1d")
    assert "Moved: 9 of 9 messages that matched." in text


async def test_a_count_that_takes_long_ends_with_what_the_index_knows(make_pages, monkeypatch):
    pages = await filled(make_pages)
    monkeypatch.setattr(changes, "_COUNT_SECONDS", 0.0)
    text = await pages.get("/scheduled/change?topic=orders&prefix=order/1&action=cancel")
    assert "This will cancel about 20 messages" in text


async def test_a_form_that_is_sent_twice_changes_once(make_pages):
    pages = await filled(make_pages)
    topic = pages.broker.registry.topic("orders")
    before = (await topic.schedule.get("order/7")).deliver_at_ms
    text = await pages.get("/scheduled/change?topic=orders&action=move&how=by&by=1h")
    form = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', text))
    for _ in range(2):
        assert "Moved: 20 of 20" in await pages.post("/scheduled/change", **form)
    assert topic.bulk.ids() == [1]
    assert (await topic.schedule.get("order/7")).deliver_at_ms == before + HOUR_MS


async def test_a_long_change_goes_on_by_itself_and_can_be_stopped(make_pages, monkeypatch):
    pages = await filled(make_pages)
    topic = pages.broker.registry.topic("orders")
    may_go_on = asyncio.Event()
    monkeypatch.setattr(changes, "_LOOKS", 0)
    monkeypatch.setattr(pages.broker.bulk_changes, "_wait_room", may_go_on_after_the_first(may_go_on))
    text = await pages.post("/scheduled/change", topic="orders", action="cancel")
    assert "Cancel: running" in text and "0 of 20" in text and "Stop it" in text
    place = "/topics/orders/bulk-changes/1"
    text = await pages.get("/topics/orders")
    assert f'<a href="{place}">Cancel</a>' in text and "running" in text
    text = await pages.post(place)
    assert "It was cancelled. Cancelled: 0 of 0 messages that matched." in text and "Stop it" not in text
    may_go_on.set()
    await pages.post("/scheduled/change", topic="orders", action="now")
    while topic.bulk.unended_ids():
        await asyncio.sleep(0)
    text = await pages.get("/topics/orders/bulk-changes/2")
    assert "Send now: done" in text and "Moved: 20 of 20 messages" in text, "the other one changes no more"
    text = await pages.get("/topics/orders")
    assert text.index(">Send now</a>") < text.index(">Cancel</a>") and ">cancelled</span>" in text
    assert "BULK_CHANGE" not in text
    assert text.count("<td>all</td>") == 2
    form: Any = {
        "topic": "orders",
        "prefix": "order/1",
        "from": "2033-05-18T00:00:00",
        "until": "2033-05-20T00:00:00",
    }
    await pages.post("/scheduled/change", **form, action="now")
    row = (await pages.get("/topics/orders")).split("bulk-changes/3")[1].split("</tr>")[0]
    assert "<code>order/1</code>…" in row and "2033-05-18" in row and "2033-05-20" in row
    assert "has no bulk change 9" in html.unescape(await pages.get(f"{place[:-1]}9", status=404))
    assert "not the number" in await pages.get(f"{place[:-1]}x", status=404)


def may_go_on_after_the_first(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    """Room for the call that begins a bulk change, and for its work once that is said."""
    calls = itertools.count()

    async def wait() -> None:
        if next(calls):
            await event.wait()

    return wait


async def test_a_change_of_all_needs_a_topic(make_pages):
    pages = await filled(make_pages)
    assert "Choose a topic" in await pages.get("/scheduled/change?action=cancel", status=400)
    assert "beyond this topic" not in await pages.get("/scheduled/change?topic=orders&action=now")


async def test_the_timeline_shows_messages_where_they_are_due(make_pages):
    pages = await filled(make_pages)
    found = await pages.broker.registry.topic("orders").schedule.get("order/7")
    minute = found.deliver_at_ms - found.deliver_at_ms % 60_000
    text = await pages.get(f"/timeline?unit=second&start={start_name('second', minute)}")
    second = found.deliver_at_ms - found.deliver_at_ms % 1_000
    link = f"/scheduled?from={second}&amp;until={second + 1000}"
    assert link in text
    assert "order/7" in await pages.get(link.replace("&amp;", "&"))


async def test_the_timeline_counts_every_message_once_though_the_index_is_sealed(make_pages):
    pages = await make_pages(
        min_index_count=100, ledger_max_entries=100, seal_after_ms=20, max_delay_ms=40_000 * 24 * HOUR_MS
    )
    near, far = [HOUR_MS + i * 60_000 for i in range(310)], [30_000 * 24 * HOUR_MS + i for i in range(3)]
    await pages.produce("orders", *(Outgoing(b"x", deliver_after_ms=each) for each in near + far))
    index = pages.broker.registry.topic("orders").index
    async with asyncio.timeout(10):
        while not index.tracker.stats().bucket_count:
            await asyncio.sleep(0.01)
    now_ms = pages.broker.clock.now_ms()
    for unit, start_ms in (("day", now_ms), ("hour", now_ms), ("minute", now_ms + 3 * HOUR_MS)):
        text = await pages.get(f"/timeline?unit={unit}&start={start_name(unit, start_ms)}")
        shown = re.search(r"<b>(about )?(\d+)</b>.*in this window(, .*)?\.\n", text)
        assert shown, text
        outside = re.findall(r", (about )?(\d+) (before|after) it", shown[3] or "")
        assert int(shown[2]) + sum(int(count) for _, count, _ in outside) == len(near + far)
        assert not shown[1]
        assert bool(outside[0][0]) is (unit == "minute")  # something lies on both sides of it


async def test_lists_go_on_where_the_page_before_ended(make_pages):
    pages = await make_pages()
    await pages.produce(
        "orders", *(Outgoing(b"x", deliver_after_ms=HOUR_MS + i, schedule_key=f"k{i:03}") for i in range(120))
    )
    keys: list[str] = []
    link: str | None = "/scheduled?topic=orders"
    while link is not None:
        text = await pages.get(link)
        keys += re.findall(r">(k[0-9]{3})<", text)
        following = re.search(r'href="([^"]+)" rel="next"', text)
        link = following[1].replace("&amp;", "&") if following else None
    assert keys == [f"k{i:03}" for i in range(120)]


@pytest.mark.slow
async def test_what_large_messages_keep_from_a_page_of_all_topics_comes_before_later_messages_of_others(
    make_pages, monkeypatch
):
    monkeypatch.setattr("broker.topics.scheduled.PAGE_BYTES_MAX", 1)  # of each topic one message at a time
    pages = await make_pages()

    async def store(topic: str, *hours: int) -> None:
        await pages.produce(
            topic,
            *(Outgoing(b"x", deliver_after_ms=n * HOUR_MS, schedule_key=f"{topic}-{n:03}") for n in hours),
        )

    async def shown() -> tuple[list[str], bool]:
        text = await pages.get("/scheduled")
        return re.findall(r">(\w+-[0-9]{3})<", text), "others may come between them" in text

    await store("first", 1, 3, 5)
    await store("other", 4, 6)
    assert await shown() == (["first-001", "first-003", "other-004", "first-005", "other-006"], False)
    await store("first", *range(100, 200))
    keys, has_gaps = await shown()
    assert len(keys) == 22 and keys == sorted(keys, key=lambda key: key[-3:]) and has_gaps
    monkeypatch.undo()
    keys, has_gaps = await shown()
    assert len(keys) == 50 and not has_gaps
    monkeypatch.setattr("broker.topics.scheduled.PAGE_BYTES_MAX", 1)
    monkeypatch.setattr("broker.web.scheduled.SCHEDULED_PAGE", 3)
    assert await shown() == (["first-001", "first-003", "other-004"], False), "the rest is later"
    monkeypatch.undo()
    due_ms = pages.broker.clock.now_ms() + HOUR_MS // 2
    await pages.produce("at-once", *[Outgoing(b"x", deliver_at_ms=due_ms)] * 60)
    assert await shown() == ([], False), "fifty of one time, and the rest of it behind them"


async def test_a_range_that_topics_left_unread_may_hold_is_told_to_have_gaps(make_pages, monkeypatch):
    monkeypatch.setattr("broker.web.scheduled._TOPICS_MERGED", 1)
    pages = await make_pages()
    soon = Outgoing(b"x", deliver_after_ms=HOUR_MS, schedule_key="soon")
    await pages.produce("first", soon)
    await pages.produce("other", *(Outgoing(b"x", deliver_after_ms=n * HOUR_MS) for n in (2, 3)))
    told = "others may come between them"
    assert told in await pages.get("/scheduled"), "the page has room for those of other topics"
    monkeypatch.setattr("broker.web.scheduled.SCHEDULED_PAGE", 1)
    text = await pages.get("/scheduled")
    assert ">soon<" in text and told not in text, "the others come later"
    start = form_time(pages.broker.clock.now_ms() + 3 * HOUR_MS // 2)
    text = await pages.get(f"/scheduled?from={start}")
    assert ">first<" not in text and told in text
    monkeypatch.setattr("broker.web.scheduled._TOPICS_MERGED", 2)
    assert told not in await pages.get(f"/scheduled?from={start}")


async def test_what_pacing_holds_back_is_shown_with_the_subscription(make_pages):
    pages = await filled(make_pages)
    topic = pages.broker.registry.topic("orders")
    assert "paced:" not in await pages.get("/topics/orders")
    billing = topic.subscription("billing")
    await control.update_policy(
        topic, billing, SubscriptionPolicy(max_delivery_rate=0.01), {"max_delivery_rate"}
    )
    consumer = Consumer("c", "c", 60_000)
    consumer.grant(10, 0)
    topic.subscriptions.attach(billing, consumer)
    await pages.produce("orders", Outgoing(b"1"), Outgoing(b"2"))
    await asyncio.wait_for(consumer.wakeup.wait(), 10)
    consumer.next_nowait()
    billing.work.set()
    await asyncio.sleep(0)
    text = await pages.get("/topics/orders")
    assert re.search(r"paced: next in \d+m?s", text)
    assert "99th lateness, paced" not in text
    given = SubscriptionPolicy(max_leased_messages=1)
    await control.update_policy(topic, billing, given, {"max_delivery_rate", "max_leased_messages"})
    await asyncio.sleep(0)
    assert "paced: as many leased as may be" in await pages.get("/topics/orders")
    topic.subscriptions.detach(billing, consumer)


async def test_pause_resume_and_skip(make_pages):
    pages = await filled(make_pages)
    place = "/topics/orders/subscriptions/billing"
    subscription = pages.broker.registry.topic("orders").subscription("billing")
    assert "Paused: billing." in await pages.post(place, action="pause")
    assert subscription.paused
    assert "Resumed: billing." in await pages.post(place, action="resume")
    assert not subscription.paused
    assert "This will skip 20 messages" in await pages.get(f"{place}/skip")
    assert "Skipped for billing: 20." in await pages.post(f"{place}/skip")
    assert subscription.unsettled_count() == 0


async def test_dead_letters_are_requeued_and_purged(make_pages):
    pages = await make_pages()
    topic = await pages.broker.registry.topic_or_create("jobs")
    subscription = await topic.subscriptions.create(
        "work", SubscriptionType.SHARED, LATEST, SubscriptionPolicy(max_delivery_attempts=1)
    )
    ids = await pages.produce("jobs", *(Outgoing(b"job %d" % i) for i in range(3)))
    await subscription.decisions.give_up(
        {ids[0].ledger_id: BitMap([each.entry_id for each in ids])}, "broken <b>", "boom <i>"
    )
    place = "/dead-letters/jobs/work"
    assert "3 messages given up" in await pages.get("/dead-letters")
    text = await pages.get(place)
    assert "broken &lt;b&gt;" in text and "boom &lt;i&gt;" in text and "job 2" in text
    letter = re.search(r'name="id" value="([0-9:]+)"', text)
    assert letter is not None
    assert "Requeued: 1." in await pages.post(place, action="requeue", id=letter[1])
    assert "Not found: 1." in await pages.post(place, action="requeue", id=letter[1])
    assert "Requeue all 2" in await pages.get(place)
    found = await pages.get(f"{place}?reason=BOOM&from=2026-01-01T00:00")
    assert "job 2" in found
    assert "Requeue all" not in found and "Purge all" not in found  # more than what was found
    assert "None matches." in await pages.get(f"{place}?reason=moon")
    assert "None matches." in await pages.get(f"{place}?until=2020-01-01T00:00")
    assert "ends before" in await pages.get(f"{place}?from=2021-01-01&until=2020-01-01", status=400)
    assert "This will purge 2 dead letters" in await pages.get(f"{place}/purge")
    assert "Purged: 2." in await pages.post(place, action="purge")
    assert "No dead letters" in await pages.get(place)


async def test_a_search_for_dead_letters_goes_on_where_its_page_ended(
    make_pages, monkeypatch: pytest.MonkeyPatch
):
    pages = await make_pages()
    topic = await pages.broker.registry.topic_or_create("jobs")
    subscription = await topic.subscriptions.create(
        "work", SubscriptionType.SHARED, LATEST, SubscriptionPolicy(max_delivery_attempts=1)
    )
    ids = await pages.produce("jobs", *(Outgoing(b"job %d" % i) for i in range(5)))
    for at, each in enumerate(ids):
        await subscription.decisions.give_up(entries_of([each]), "even" if at % 2 == 0 else "odd", "")
    monkeypatch.setattr(dead_letters, "LOOKED_MAX", 2)
    found, path = [], "/dead-letters/jobs/work?reason=odd"
    while path:
        text = await pages.get(path)
        found += re.findall(r">(\d+:\d+)</a>", text)
        following = re.search(r'href="([^"]+)" rel="next"', text)
        path = following[1].replace("&amp;", "&") if following else ""
    assert found == [f"{each.ledger_id}:{each.entry_id}" for each in ids[1::2]]


async def test_what_is_owed_is_shown_by_state_page_by_page(make_pages):
    pages = await make_pages()
    topic = await pages.broker.registry.topic_or_create("jobs")
    subscription = await topic.subscriptions.create(
        "work", SubscriptionType.SHARED, LATEST, SubscriptionPolicy()
    )
    ids = await pages.produce("jobs", *(Outgoing(b"job %d" % i) for i in range(120)))
    subscription.states.handed_out("c<1>", entries_of(ids[:2]), 1 << 62)
    subscription.states.returning("c<1>", entries_of(ids[:1]))
    again_ms = pages.broker.clock.now_ms() + HOUR_MS
    subscription.apply_given_back(
        GivenBack(topic.topic_id, 1, ReturnReason.NACKED, again_ms, entries_of(ids[:1]), "<no> stock")
    )
    place = "/topics/jobs/subscriptions/work/owed"
    text = await pages.get("/topics/jobs")
    for state, count in (("ready", 118), ("leased", 1), ("retrying", 1)):
        assert f'<a href="{place}?state={state}">{count}</a>' in text
    leased = await pages.get(f"{place}?state=leased")
    assert "c&lt;1&gt;" in leased and "job 1" in leased and "job 0" not in leased and "job 2" not in leased
    retrying = await pages.get(f"{place}?state=retrying")
    assert "&lt;no&gt; stock" in retrying and "job 0" in retrying and "job 1" not in retrying
    found, path = [], f"{place}?state=ready"
    while path:
        text = await pages.get(path)
        found += re.findall(r">(\d+:\d+)</a>", text)
        following = re.search(r'href="([^"]+)" rel="next"', text)
        path = following[1].replace("&amp;", "&") if following else ""
    assert found == [f"{each.ledger_id}:{each.entry_id}" for each in ids[2:]]
    assert "is ready, leased or retrying" in await pages.get(f"{place}?state=settled", status=400)
    for nowhere in ("x", "1:4294967296"):
        assert "a place that is none" in await pages.get(f"{place}?after={nowhere}", status=400)


async def test_rates_of_the_last_hour_are_shown_once_a_minute_was_counted(
    make_pages, monkeypatch: pytest.MonkeyPatch
):
    pages = await make_pages()
    topic = await pages.broker.registry.topic_or_create("jobs")
    subscription = await topic.subscriptions.create(
        "work", SubscriptionType.SHARED, LATEST, SubscriptionPolicy()
    )
    await pages.produce("jobs", *(Outgoing(b"job") for _ in range(90)))
    subscription.counters.delivered_messages, subscription.counters.acked_messages = 60, 30
    assert "in the last" not in await pages.get("/topics/jobs")
    rates, budget = pages.broker.rates, YieldBudget(pages.broker.clock)
    minute = rates._minute()
    for passed in (1, 2, 70):
        monkeypatch.setattr(rates, "_minute", lambda passed=passed: minute + passed)
        await rates.note_all(budget)
        text = await pages.get("/topics/jobs")
        if passed == 2:
            assert "produced in the last 2 minutes" in text and "acked by minute, at most 30" in text
            assert '90 <span class="soft">0.75/s' in text and '60 <span class="soft">0.5/s' in text
            assert text.count("<rect") == 3
            assert '<td class="n optional">0.75</td>' in await pages.get("/topics")
    assert "delivered in the last hour" in text and "<rect" not in text


async def test_the_page_of_a_message_shows_why_it_came_back_last(make_pages):
    pages = await make_pages()
    topic = await pages.broker.registry.topic_or_create("jobs")
    subscription = await topic.subscriptions.create(
        "work", SubscriptionType.SHARED, LATEST, SubscriptionPolicy()
    )
    [position] = await pages.produce("jobs", Outgoing(b"job"))
    back = GivenBack(topic.topic_id, 1, ReturnReason.NACKED, 0, entries_of([position]), "boom <i>")
    subscription.apply_given_back(back)
    text = await pages.get(f"/topics/jobs/messages/{position.ledger_id}:{position.entry_id}")
    assert '<td class="n">1</td><td>boom &lt;i&gt;</td>' in text


async def test_the_audit_report_is_shown_in_a_sandbox(make_pages, tmp_path: Path):
    folder = tmp_path / "report"
    pages = await make_pages(audit_report_dir=str(folder))
    assert "There is no report in the folder yet" in await pages.get("/audit")
    await pages.get("/audit/report.html", status=404)
    folder.mkdir()
    (folder / "report.json").write_text("[]")
    assert "cannot be read" in await pages.get("/audit")
    (folder / "report.html").write_text("<h1>Report</h1>")
    async with pages.session.get("/audit/report.html") as response:
        assert response.headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
        assert await response.text() == "<h1>Report</h1>"


async def test_a_refusal_of_the_broker_is_told_on_the_page_of_the_form(make_pages):
    pages = await filled(make_pages)
    text = await pages.post("/topics/orders/subscriptions/nobody", action="pause", back="/topics/orders")
    assert "nobody" in text and 'class="flash failed"' in text and "billing" in text


async def test_a_broker_that_drains_changes_nothing(make_pages):
    pages = await filled(make_pages)
    csrf = await pages.csrf()
    pages.broker.drain()
    text = await pages.post("/topics/orders/messages/1:0", csrf=csrf, action="cancel", back="/topics")
    assert "draining" in text


async def test_pages_name_no_file_of_the_broker(make_pages, monkeypatch: pytest.MonkeyPatch):
    pages = await filled(make_pages)

    def damaged(name: str) -> None:
        raise Corrupt("A frame is damaged", path="/secret-place/1.data", offset=7)

    monkeypatch.setattr(pages.broker.registry, "topic", damaged)
    assert "secret-place" not in await pages.get("/topics/orders", status=500)
    text = await pages.post("/topics/orders/subscriptions/billing", action="pause", back="/")
    assert "damaged" in text and "secret-place" not in text


async def test_what_nobody_takes_is_the_headline(make_pages, monkeypatch):
    """Lateness is measured where something is delivered, so all of it may be on time while a topic stands still."""
    pages = await make_pages()
    await pages.produce("orders", *(Outgoing(b"x") for _ in range(3)))
    topic = pages.broker.registry.by_name["orders"]
    await topic.subscriptions.create("billing", SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy())
    assert "ready, the oldest" not in await pages.get("/")  # it has not waited for long
    monkeypatch.setattr(overview, "_WAITING_MS", -1)
    shown = await pages.get("/")
    assert re.search(r"<h1>3 messages ready, the oldest for [^<]+, with nobody to take them</h1>", shown)


async def test_what_nobody_takes_is_the_headline_of_the_first_look(make_pages, monkeypatch):
    pages = await make_pages()
    await pages.produce("orders", Outgoing(b"x"))
    topic = pages.broker.registry.by_name["orders"]
    await topic.subscriptions.create("billing", SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy())
    stored_ms = pages.broker.clock.now_ms()
    while pages.broker.clock.now_ms() == stored_ms:
        await asyncio.sleep(0.001)
    monkeypatch.setattr(
        overview, "_WAITING_MS", 0
    )  # no look came before that would have looked for the oldest
    shown = await pages.get("/")
    assert re.search(r"<h1>1 message ready, the oldest for [^<]+, with nobody to take it</h1>", shown)


async def test_what_is_delivered_late_is_the_headline(make_pages):
    pages = await make_pages()
    await pages.produce("orders", Outgoing(b"x"))
    topic = pages.broker.registry.by_name["orders"]
    subscription = await topic.subscriptions.create(
        "billing", SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy()
    )
    lateness = subscription.counters.lateness
    lateness.observe_many(np.full(300, 400))
    lateness.observe_many(np.full(2, 4_000))
    assert "<h1>On time</h1>" in await pages.get("/")
    lateness.observe_many(np.full(3, 4_000))
    assert re.search(r"<h1>Late: one in a hundred by up to [^<]+</h1>", await pages.get("/"))


def test_templates_are_compiled_once_in_a_process(monkeypatch: pytest.MonkeyPatch):
    Renderer()
    compiled: list[str] = []
    compile_one = Environment.compile

    def compile_noted(self, source, name=None, *args, **kwargs):
        compiled.append(name)
        return compile_one(self, source, name, *args, **kwargs)

    monkeypatch.setattr(Environment, "compile", compile_noted)
    Renderer()
    assert compiled == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999_999, "999,999"),
        (2_000_000, "2 M"),
        (1_250_000, "1.25 M"),
        (3 * 10**10, "30 G"),
        (10**15, "1000 T"),
    ],
)
def test_numbers_beside_a_chart_fit_its_margin(value: int, text: str):
    assert compact(value) == text
    assert len(text) <= 7
