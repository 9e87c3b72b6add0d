"""The pages of a broker with several shards, in a real browser: one address, all topics."""

from __future__ import annotations

from datetime import timedelta

import pytest

import postdate
from broker.topic_shards import shard_of
from tests.browser.conftest import DESKTOP, PHONE, Shop, Window
from tests.browser.test_pages import OVERLAPS, WITHOUT_A_HINT

pytestmark = pytest.mark.packaging

SETTINGS = {"SHARDS": "2", "SHARD_PORTS": "false"}
"""Of the broker (`shop`)."""
ELSEWHERE = next(name for name in ("mails", "bills", "calls") if shard_of(name, 2) != shard_of("orders", 2))
PAGES = (
    "/",
    "/topics",
    "/topics/orders",
    f"/topics/{ELSEWHERE}",
    "/timeline",
    "/timeline?shard=1&unit=hour",
    "/timeline?topic=orders",
    "/scheduled",
    "/scheduled?shard=0",
    "/scheduled?topic=orders",
    "/dead-letters",
    "/dead-letters/jobs/work",
    "/storage",
    "/storage?shard=1",
    "/storage/orders",
    "/audit",
    "/?shard=0",
    "/?shard=1",
)


@pytest.fixture(scope="module", autouse=True)
def elsewhere(shop: Shop) -> None:
    """Messages on the shard that has no orders."""

    async def fill(client: postdate.Client) -> None:
        await client.subscriptions.create(ELSEWHERE, "post")
        async with client.producer(ELSEWHERE) as producer:
            await producer.send_many(
                [postdate.OutgoingMessage(b"%d" % n, deliver_after=timedelta(hours=n + 1)) for n in range(20)]
            )

    shop.do(fill)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_page_fits_its_screen_and_the_console_is_silent(window: Window, viewport: dict[str, int]):
    page = window.page
    page.set_viewport_size(viewport)
    for path in PAGES:
        assert window.go(path).status == 200, path
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], path
        assert not page.evaluate(OVERLAPS), path
        assert not page.evaluate(WITHOUT_A_HINT), path
    assert not window.complaints


def test_the_overview_leads_to_every_topic(window: Window):
    page = window.page
    for name in ("orders", "jobs", ELSEWHERE):
        window.go("/")
        page.click(f"td a:text-is('{name}'), th a:text-is('{name}')")
        assert window.heading == name


def test_the_timeline_of_all_shards_leads_to_their_messages(window: Window):
    page = window.page
    window.go("/")
    page.click("nav >> text=Timeline")
    for name in ("orders", ELSEWHERE):
        assert page.locator(f"th a:text-is('{name}')").count() == 1
    page.click("text=Next 24 hours")
    while "unit=" in page.url:
        page.click(".chart a >> nth=-1", force=True)
    assert "/scheduled?from=" in page.url
    assert "shard" not in page.inner_text("footer")
    page.click("tbody a")
    name = page.url.partition("/topics/")[2].partition("/")[0]
    assert name in ("orders", ELSEWHERE)
    assert f"shard {shard_of(name, 2)}" in page.inner_text("footer")


def test_storage_leads_to_each_shard_and_the_menu_back_to_all(window: Window):
    page = window.page
    window.go("/storage")
    page.click("text=Shard 1")
    assert "shard 1" in page.inner_text("footer")
    page.click("nav >> text=Storage")
    assert "shard" not in page.inner_text("footer")


def test_a_subscription_is_paused_and_messages_cancelled_on_each_shard(window: Window, shop: Shop):
    page = window.page
    for topic, name in (("orders", "billing"), (ELSEWHERE, "post")):
        window.go(f"/topics/{topic}")
        page.click("text=Pause")
        assert window.flash == f"Paused: {name}."
        stats = shop.do(lambda client, topic=topic: client.stats(topic))
        assert stats[0].subscriptions[0].paused
        window.go(f"/scheduled?topic={topic}")
        page.click("summary:has-text('Change all')")
        page.click("text=Cancel…")
        page.click("button.danger")
        page.wait_for_selector(".flash.done")
        assert "Cancelled: " in window.flash
        assert shop.do(lambda client, topic=topic: client.stats(topic))[0].scheduled_messages == 0
    assert not window.complaints
