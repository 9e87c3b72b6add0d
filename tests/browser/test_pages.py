"""The pages in a real browser, with a real broker behind them: as an operator uses them."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from datetime import timedelta

import pytest

import postdate
from tests.browser.conftest import DESKTOP, LONG_NAME, PHONE, Shop, Window
from tests.pages import pages_without

pytestmark = pytest.mark.packaging

PAGES = {
    "/": "Nothing was delivered yet|On time|Late.*|.* ready, the oldest for .*",
    "/timeline": ".+",
    "/timeline?unit=year": r"\d+ to \d+",
    "/timeline?unit=hour&topic=orders": ".+",
    "/scheduled": "All topics",
    "/scheduled?topic=orders": "orders",
    "/topics": "Topics",
    "/topics/orders": "orders",
    "/new-topic": "Create a topic",
    "/topics/orders/settings": "Settings of orders",
    "/topics/orders/delete": "Delete orders",
    "/topics/orders/produce": "Produce a message",
    "/topics/orders/new-subscription": "Create a subscription",
    "/topics/orders/subscriptions/billing/settings": "Settings of billing",
    "/topics/orders/subscriptions/billing/seek": "Move billing",
    "/topics/orders/subscriptions/billing/delete": "Delete billing",
    "/topics/orders/messages/1:1": "Message 1:1.*",
    "/topics/orders/subscriptions/billing/skip": "This will skip .*",
    "/topics/jobs/subscriptions/work/owed": "work",
    "/topics/reports/recurring": "Recurring schedules",
    "/topics/reports/recurring/" + LONG_NAME: LONG_NAME + " paused",
    "/topics/reports/recurring/daily": "daily",
    "/scheduled/change?topic=orders&action=now": "This will send now .*",
    "/dead-letters": "Dead letters",
    "/dead-letters/jobs/work": "work",
    "/dead-letters/jobs/work/purge": "This will purge .*",
    "/storage": "Storage",
    "/storage/orders": "orders",
    "/audit": "No folder of reports is set",
}


def test_no_page_is_forgotten():
    assert pages_without(PAGES) == {
        "/topics/{topic}/bulk-changes/{id}",
        "/audit/report.html",
    }  # seen while a change runs; a report


OVERLAPS = """[...document.querySelectorAll(".chart text")].flatMap(text => {
    const t = text.getBoundingClientRect();
    return [...text.closest("svg").querySelectorAll("rect:not(.column)")].filter(bar => {
        const b = bar.getBoundingClientRect();
        return t.width && b.left < t.right && t.left < b.right && b.top < t.bottom && t.top < b.bottom;
    }).map(() => text.textContent);
})"""
WITHOUT_A_HINT = """[...document.querySelectorAll("body *")].filter(each =>
    each.scrollWidth > each.clientWidth + 1 && ["auto", "scroll"].includes(getComputedStyle(each).overflowX)
    && (getComputedStyle(each).backgroundImage.match(/gradient/g) ?? []).length < 4
    && !["TEXTAREA", "SELECT", "INPUT"].includes(each.tagName)).map(each => each.tagName + "." + each.className)"""


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_page_fits_its_screen_and_the_console_is_silent(window: Window, viewport: dict[str, int]):
    page = window.page
    page.set_viewport_size(viewport)
    for path, heading in PAGES.items():
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert window.go(path).status == 200, path
            assert re.fullmatch(heading, window.heading), (path, window.heading)
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], path
        unnamed = page.evaluate(
            """[...document.querySelectorAll("input:not([type=hidden]), select")]
                 .filter(each => !each.labels.length && !each.ariaLabel).map(each => each.outerHTML)"""
        )
        assert not unnamed, path
        hidden = page.evaluate(OVERLAPS)
        assert not hidden, (path, "text lies over bars", hidden)
        bare = page.evaluate(WITHOUT_A_HINT)
        assert not bare, (path, "goes on beyond the edge, and does not show it", bare)
        assert not page.evaluate(
            "[...document.querySelectorAll('table')].filter(t => !t.querySelector('th[scope]')).length"
        ), path
    assert not window.complaints


def test_light_and_dark_are_readable(window: Window):
    """Text against what it stands on, as WCAG counts it: at least 4.5."""
    ratio = """
        names => {
            const style = getComputedStyle(document.documentElement);
            const light = name => {
                const canvas = document.createElement("canvas").getContext("2d");
                canvas.fillStyle = style.getPropertyValue(name).trim();
                canvas.fillRect(0, 0, 1, 1);
                const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(
                    c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const [a, b] = names.map(light).sort();
            return (b + 0.05) / (a + 0.05);
        }"""
    window.go("/")
    pairs = [(ink, ground) for ink in ("--ink", "--soft", "--accent") for ground in ("--bg", "--card")]
    pairs += [(f"--{name}", f"--{name}-soft") for name in ("good", "warn", "bad", "accent")]
    for scheme in ("light", "dark"):
        window.page.emulate_media(color_scheme=scheme)
        found = {pair: window.page.evaluate(ratio, list(pair)) for pair in pairs}
        assert {pair: value for pair, value in found.items() if value < 4.5} == {}, scheme


def test_from_the_timeline_to_a_message_bar_by_bar(window: Window):
    page = window.page
    window.go("/timeline?unit=year&topic=orders")
    for unit in ("month", "day", "hour", "minute", "second"):
        page.locator(".chart a").first.click()
        page.wait_for_url(f"**/timeline?unit={unit}*")
    page.locator(".chart a").first.click()
    page.wait_for_url("**/scheduled?*")
    page.locator("tbody a").first.click()
    page.wait_for_url("**/messages/*")
    assert window.heading.startswith("Message 1:")
    assert "order/" in page.inner_text("main")
    assert "<b>& ü</b>" in page.inner_text("pre")
    assert not window.complaints


def test_the_timeline_goes_by_keyboard(window: Window):
    page = window.page
    window.go("/timeline?unit=hour&topic=orders")
    page.locator(".chart a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/timeline?unit=minute*")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent").strip() == "Skip to content"


def test_zooming_out_and_going_on(window: Window):
    page = window.page
    window.go("/timeline?unit=minute&start=2027-03-04T05:00&topic=orders")
    assert page.inner_text(".crumbs").split() == ["All", "2027", "March", "4"]
    page.click("text=Zoom out")
    page.wait_for_url("**/timeline?unit=hour*")
    assert window.heading == "Thursday 4 March 2027"
    page.click("text=Later")
    page.wait_for_url("**2027-03-05*")
    page.select_option("#topic", "")  # submits by itself
    page.wait_for_url(lambda url: "topic=orders" not in url)


def test_a_message_is_cancelled_and_another_moved(window: Window, shop: Shop):
    page = window.page
    window.go("/scheduled?topic=orders&key=order/010")
    page.click("summary:has-text('Cancel')")
    page.click("text=for good")
    assert re.fullmatch(r"Cancelled: 1:\d+\.", window.flash)
    assert "cancelled" in window.heading
    window.go("/scheduled?topic=orders&key=order/011")
    page.click("summary:has-text('Move')")
    page.select_option("#how", "at")
    page.fill("#at", "2031-05-06T07:08:09")
    page.click("button:has-text('Move 1:')")
    assert window.flash.endswith("to 2031-05-06 07:08:09 UTC.")
    moved = shop.do(lambda client: client.schedule.get("orders", schedule_key="order/011"))
    assert moved.deliver_at.year == 2031 and moved.revision == 1


def test_a_wrong_time_is_told_and_nothing_is_moved(window: Window):
    page = window.page
    window.go("/scheduled?topic=orders&key=order/012")
    page.click("summary:has-text('Move')")
    page.fill("#by", "soon")
    page.click("button:has-text('Move 1:')")
    assert "is not a duration" in window.flash
    assert window.heading.startswith("Message 1:")


def test_all_that_match_are_counted_then_cancelled(window: Window, shop: Shop):
    page = window.page
    window.go("/scheduled?topic=orders")
    page.fill("#prefix", "order/2")
    page.click("button:has-text('Search')")
    page.click("summary:has-text('Change all')")
    page.click("button:has-text('Cancel…')")
    assert window.heading == "This will cancel 100 messages"
    page.click("button:has-text('Cancel 100 messages')")
    assert window.heading == "Cancel: done"
    assert window.flash == "Cancelled: 100 of 100 messages that matched."
    page.click("a:has-text('To the list')")
    assert "Nothing here." in page.inner_text("main")

    async def left(client):
        return [each.schedule_key async for each in client.schedule.list("orders", key_prefix="order/2")]

    assert shop.do(left) == []


def test_a_subscription_is_paused_and_resumed(window: Window, shop: Shop):
    page = window.page
    window.go("/topics/orders")
    page.click("button:has-text('Pause')")
    assert window.flash == "Paused: billing."
    assert shop.do(lambda client: client.subscriptions.get("orders", "billing")).paused
    page.click("button:has-text('Resume')")
    assert window.flash == "Resumed: billing."


def test_dead_letters_are_requeued_and_purged(window: Window, shop: Shop):
    page = window.page
    window.go("/dead-letters")
    page.get_by_role("link", name="work", exact=True).click()
    page.get_by_role("button", name=re.compile("^Requeue [0-9]+:[0-9]+$")).first.click()
    assert window.flash == "Requeued: 1."
    page.get_by_role("link", name=re.compile("^Purge [0-9]+:[0-9]+$")).first.click()
    page.click("button:has-text('Purge 1 dead letter')")
    assert window.flash == "Purged: 1."
    assert "2 dead letters" in page.inner_text("main")
    (jobs,) = shop.do(lambda client: client.stats("jobs"))
    assert jobs.subscriptions[0].ready_messages == 1


def test_a_topic_is_created_set_and_deleted_by_forms(window: Window, shop: Shop):
    page = window.page
    window.go("/topics")
    page.click("text=Create a topic…")
    page.get_by_label("Name").fill("no name")
    page.get_by_label("max_delay_ms").fill("90d")
    page.click("text=Create the topic")
    # What was typed is kept, and what is wrong is told at the field.
    assert "cannot name a topic" in page.inner_text("#name-error")
    assert page.get_by_label("max_delay_ms").input_value() == "90d"
    page.get_by_label("Name").fill("made")
    page.click("text=Create the topic")
    assert (window.heading, window.flash) == ("made", "Created: made.")
    assert shop.do(lambda client: client.topics.get("made")).policy.max_delay == timedelta(days=90)
    page.click("main >> text=Settings…")
    assert page.get_by_label("max_delay_ms").input_value() == "90d"
    page.get_by_label("max_delay_ms").fill("soon")
    page.click("text=Save")
    assert "cannot be 'soon'" in page.inner_text("#max_delay_ms-error")
    page.get_by_label("max_delay_ms").fill("")
    page.get_by_label("default_ttl_ms").fill("1h")
    page.click("text=Save")
    assert window.flash == "Saved: max_delay_ms, default_ttl_ms."
    page.click("main >> text=Delete…")
    page.get_by_label("Name of the topic").fill("orders")
    page.click("text=Delete it for good")
    assert window.flash == "Type made to confirm: nothing was deleted."
    page.get_by_label("Name of the topic").fill("made")
    page.click("text=Delete it for good")
    assert window.flash == "Deleted: made."


def test_a_subscription_is_created_moved_and_deleted_and_a_message_produced(window: Window, shop: Shop):
    page = window.page
    window.go("/topics/reports")
    page.click("text=Create a subscription…")
    page.get_by_label("Name").fill("readers")
    page.get_by_label("Type").select_option("KEY_SHARED")
    page.get_by_label("max_delivery_rate").fill("2.5")
    page.click("text=Create the subscription")
    assert window.flash == "Created: readers."
    window.go("/topics/reports/produce")
    page.get_by_label("Payload", exact=True).fill("two\nlines")
    page.get_by_label("Properties").fill("kind=report\nbad")
    page.get_by_label("Due").select_option("after")
    page.get_by_label("Delay").fill("2h")
    page.click("text=Produce it")
    assert "not of the form name=value" in page.inner_text("#properties-error")
    assert page.get_by_label("Payload", exact=True).input_value() == "two\nlines"
    page.get_by_label("Properties").fill("kind=report")
    page.click("text=Produce it")
    assert window.heading.startswith("Message ") and "two\nlines" in page.inner_text("pre")
    assert (
        shop.do(lambda client: client.subscriptions.get("reports", "readers")).policy.max_delivery_rate == 2.5
    )
    window.go("/topics/reports")
    page.click("text=Move…")
    page.click("text=Move it")
    assert window.flash == "Say to which time."
    page.get_by_label("To").select_option("EARLIEST")
    page.click("text=Move it")
    assert window.flash.startswith("Moved: readers begins at ")
    page.click("[aria-label='Delete readers']")
    page.get_by_label("Name of the subscription").fill("readers")
    page.click("text=Delete it for good")
    assert window.flash == "Deleted: readers."
    assert all("400" in each for each in window.complaints)  # forms that were refused


def test_a_form_from_elsewhere_or_with_another_token_is_refused(window: Window, shop: Shop):
    page = window.page
    window.go("/topics/orders")
    page.evaluate("document.querySelector('form[action$=\"/billing\"] [name=csrf]').value = 'guessed'")
    page.click("button:has-text('Pause')")
    assert "The form was refused" in window.heading
    form = (
        f'<form method="post" action="http://{shop.http}/topics/orders/subscriptions/billing">'
        '<input name="action" value="pause"><button>Win a prize</button></form>'
    )
    for origin in (
        "http://evil.example/",
        f"http://{shop.http.rpartition(':')[0]}:9/",
    ):  # another site; another port
        page.route(origin, lambda route: route.fulfill(body=form, content_type="text/html"))
        page.goto(origin)
        page.click("button")
        page.wait_for_url(f"http://{shop.http}/**")
        assert "The form was refused. It was not sent from one of these pages." in window.heading
    assert not shop.do(lambda client: client.subscriptions.get("orders", "billing")).paused


def test_it_cannot_be_framed_and_answers_to_no_other_name(window: Window, shop: Shop):
    request = urllib.request.Request(f"http://{shop.http}/", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(request)
    headers = window.go("/").headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_times_can_be_local_and_stay_so(browser, shop: Shop):
    context = browser.new_context(
        viewport=DESKTOP, base_url=f"http://{shop.http}", timezone_id="Asia/Kolkata"
    )
    page = context.new_page()
    page.goto("/scheduled?topic=orders")
    utc = page.inner_text("tbody time >> nth=0")
    page.click("#zone")
    local = page.inner_text("tbody time >> nth=0")
    assert (
        utc.endswith("UTC") and not local.endswith("UTC") and local[14:16] != utc[14:16]
    )  # half an hour apart
    page.goto("/topics/orders")
    assert page.inner_text("#zone") == "Local time"
    context.close()


def test_everything_works_without_scripts(browser, shop: Shop):
    context = browser.new_context(java_script_enabled=False, base_url=f"http://{shop.http}")
    page = context.new_page()
    page.goto("/timeline?unit=hour")
    page.select_option("#topic", "orders")
    page.click("button:has-text('Show')")
    assert "topic=orders" in page.url
    page.goto("/")
    assert page.locator("#zone").is_hidden()
    context.close()


def test_the_overview_keeps_up_by_itself(window: Window):
    page = window.page
    page.clock.install()
    window.go("/")
    page.evaluate("document.querySelector('.tiles').dataset.old = '1'")
    page.clock.fast_forward(5_500)
    page.wait_for_selector(".tiles:not([data-old])")
    assert not window.complaints
    page.route("**/", lambda route: route.abort())
    page.clock.fast_forward(5_500)
    page.get_by_text("The broker does not answer").wait_for()
    page.unroute("**/")
    page.clock.fast_forward(5_500)
    page.get_by_text("The broker does not answer").wait_for(state="detached")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_longest_names_fit_as_well(window: Window, shop: Shop, viewport: dict[str, int]):
    topic, subscription = "t" * 255, "s" * 200

    async def name(client: postdate.Client) -> None:
        if topic not in [each.name async for each in client.topics.list()]:
            await client.subscriptions.create(topic, subscription)
            async with client.producer(topic) as producer:
                await producer.send(b"", deliver_after=timedelta(hours=1), schedule_key="long")

    shop.do(name)
    page = window.page
    page.set_viewport_size(viewport)
    window.go(f"/scheduled?topic={topic}")
    message = page.locator("table a", has_text=":").first.get_attribute("href")
    paths = ["/", "/timeline", "/scheduled", f"/timeline?topic={topic}", "/topics", f"/topics/{topic}"]
    for path in [*paths, message, "/storage", f"/storage/{topic}", "/dead-letters"]:
        assert window.go(path).status == 200, path
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], path


def test_a_column_sorts_the_rows_that_are_shown(window: Window):
    page = window.page
    window.go("/topics")
    names = "main tbody th"
    by_name = page.locator(names).all_inner_texts()
    assert {"jobs", "orders"} <= set(by_name)
    page.get_by_role("button", name="Topic", exact=True).click()
    page.get_by_role("button", name="Topic", exact=True).click()
    assert page.locator(names).all_inner_texts() == by_name[::-1]
    page.get_by_role("button", name="Scheduled", exact=True).click()
    assert page.locator(names).all_inner_texts()[0] == "orders"
    assert page.locator("th[aria-sort]").all_inner_texts() == ["Scheduled"]
    page.get_by_role("button", name="Stored", exact=True).click()
    sizes = page.locator("main tbody td:last-child").all_inner_texts()
    in_bytes = [float(count) * {"B": 1, "KiB": 1024}[unit] for count, unit in map(str.split, sizes)]
    assert in_bytes == sorted(in_bytes, reverse=True)
    assert not window.complaints


def test_what_producers_write_holds_up_no_sorting(window: Window, shop: Shop):
    texts = [f"{digits}x" for digits in ("1" * 40, "1 " * 20, "1," * 20, "1 min " * 15)] + ["0"]

    async def produce(client: postdate.Client) -> None:
        await client.subscriptions.create("digits", "work")
        async with client.producer("digits") as producer:
            await producer.send_many([text.encode() for text in texts])

    shop.do(produce)
    page = window.page
    window.go("/topics/digits/subscriptions/work/owed")
    page.set_default_timeout(1_000)
    page.get_by_role("button", name="Payload", exact=True).click()
    assert page.locator("th[aria-sort]").all_inner_texts() == ["Payload"]
    assert set(page.locator("main tbody td:last-child").all_inner_texts()) == set(texts)
    assert not window.complaints


def test_from_a_subscription_to_who_holds_a_message_until_when(window: Window, shop: Shop):
    async def lease(client: postdate.Client) -> None:
        await client.subscriptions.create("held", "work")
        async with client.producer("held") as producer:
            await producer.send_many([b"first", b"second", b"third"])
        # Leases of these outlive the call.
        assert len(await client.receive("held", "work", max_messages=2)) == 2

    shop.do(lease)
    page = window.page
    window.go("/topics/held")
    page.click("text=leased >> xpath=../dd/a")
    assert window.heading == "work"
    assert page.locator("tbody tr").count() == 2
    assert "until 20" in page.inner_text("tbody tr:first-child")
    page.click(".presets >> text=ready")
    assert page.locator("tbody tr").count() == 1
    assert not window.complaints
