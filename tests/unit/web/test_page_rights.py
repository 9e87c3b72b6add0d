"""The access rules say what somebody sees and changes, on every page that there is."""

from __future__ import annotations

import asyncio
import html
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from broker.policy import SubscriptionPolicy
from broker.rpc.access_rules import RULES
from broker.storage.recurring_values import Definition, RecurringRule
from broker.subscriptions.types import SubscriptionType
from broker.web.figures import FIGURE_ROUTES
from broker.web.routes import CLUSTER_ROUTES, ROUTES
from broker.web.site import PageRoute
from tests.harness import EARLIEST, Outgoing
from tests.unit.web.conftest import MakePages, Pages, access_files

GRANTS = """
[[grant]]
principals = ["token:ada"]
topics = ["orders"]
rights = ["produce", "consume", "schedule", "manage"]

[[grant]]
principals = ["token:producer"]
topics = ["orders"]
rights = ["produce"]

[[grant]]
principals = ["token:scheduler"]
topics = ["orders"]
rights = ["schedule"]

[[grant]]
principals = ["token:consumer"]
topics = ["orders"]
rights = ["consume"]

[[grant]]
principals = ["token:billing"]
topics = ["orders"]
rights = ["consume", "manage"]
subscriptions = ["billing"]

[[grant]]
principals = ["token:operator"]
topics = ["*"]
rights = ["produce", "consume", "schedule", "manage"]
"""
PRINCIPALS = ("ada", "producer", "scheduler", "consumer", "billing", "operator", "nobody")
SECRETS = ("payroll", "salaries", "boni", "raise of eve", "secret-schedule", "raise/1")
"""Names and texts of the topic of others."""
OF_TOPIC = {"topic": "payroll", "name": "salaries", "id": "1:0"}
HOUR_MS = 3_600_000


@dataclass
class Company:
    """A broker with a topic of orders, and one of the wages."""

    pages: Pages

    @classmethod
    async def found(cls, make_pages: MakePages, tmp_path: Path, access: str = GRANTS) -> Company:
        tokens = {name: f"token of {name}" for name in PRINCIPALS}
        pages = await make_pages(**access_files(tmp_path, access, **tokens))
        names = {"orders": ("billing", "mail"), "payroll": ("salaries", "boni")}
        for topic_name, subscriptions in names.items():
            topic = await pages.broker.registry.topic_or_create(topic_name)
            for name in subscriptions:
                await topic.subscriptions.create(
                    name, SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy()
                )
            rule = RecurringRule(cron="0 9 1 1 *")
            schedule = "secret-schedule" if topic_name == "payroll" else "report"
            await pages.broker.recurring.put(topic, schedule, Definition(rule, b"", paused=True))
        await pages.produce(
            "orders",
            Outgoing(b"an order", deliver_after_ms=HOUR_MS, schedule_key="order/1"),
            Outgoing(b"now"),
        )
        await pages.produce(
            "payroll", Outgoing(b"raise of eve", deliver_after_ms=HOUR_MS, schedule_key="raise/1")
        )
        await pages.produce("payroll", Outgoing(b"raise of eve"))
        return cls(pages)

    async def log_in(self, name: str) -> None:
        self.pages.session.cookie_jar.clear()
        csrf = await self.pages.csrf("/login")
        await self.pages.post("/login", csrf=csrf, follow=False, status=303, token=f"token of {name}")

    def wages(self) -> tuple[object, ...]:
        """State that a change of the topic of others would change."""
        topics = self.pages.broker.registry.by_name
        topic = topics["payroll"]
        salaries = topic.subscription("salaries")
        return (
            sorted(topics),
            topic.policies.own,
            sorted(each.name for each in topic.subscriptions.values()),
            (salaries.paused, salaries.image.policy, salaries.unsettled_count()),
            (topic.index.scheduled_count(), topic.counters.produced_messages, topic.counters.moved_messages),
        )


def path_of(route: PageRoute, **params: str) -> str:
    path = route.template
    for name in route.path.groupindex:
        path = path.replace(f"{{{name}}}", quote(params[name], safe=""))
    return path


def secrets_in(text: str, path: str = "") -> list[str]:
    """Names of the topic of others on a page, but for what was asked for, which a refusal names."""
    told = html.unescape(text).replace(path, "").replace("'payroll'", "").replace("'salaries'", "")
    return [secret for secret in SECRETS if secret in told]


def test_every_page_names_a_call_that_has_a_rule() -> None:
    calls = {path.rpartition("/")[2] for path in RULES}
    assert {route.call for route in (*ROUTES, *FIGURE_ROUTES, *CLUSTER_ROUTES)} <= calls


@pytest.mark.slow
async def test_a_page_of_another_topic_is_refused_and_tells_nothing(
    make_pages: MakePages, tmp_path: Path
) -> None:
    company = await Company.found(make_pages, tmp_path)
    await company.log_in("ada")
    before = company.wages()
    for route in ROUTES:
        path = path_of(route, **OF_TOPIC)
        if route.method == "GET":
            async with company.pages.session.get(f"{path}?topic=payroll&id=1:0&action=now") as response:
                text, status = await response.text(), response.status
        else:
            form = {
                "topic": "payroll",
                "action": "cancel" if route.template == "/scheduled/change" else "pause",
                "confirm": "salaries",
                "to": "LATEST",
                "name": "orders",
            }
            status, text = await sent(company, path, form)
        of_others = "{topic}" in route.template or route.template in (
            "/timeline",
            "/scheduled",
            "/scheduled/change",
        )
        assert not secrets_in(text, path), f"{route.method} {path}: {secrets_in(text, path)}"
        if of_others or route.template.startswith("/audit"):
            assert status == 403, f"{route.method} {path}: {status}"
        if status == 403:
            assert "token:ada may not" in html.unescape(text), path
        assert company.wages() == before, f"{route.method} {path}"


async def sent(company: Company, path: str, form: dict[str, str]) -> tuple[int, str]:
    csrf = await company.pages.csrf()
    headers = {"Sec-Fetch-Site": "same-origin"}
    async with company.pages.session.post(path, data={"csrf": csrf, **form}, headers=headers) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("name", [name for name in PRINCIPALS if name not in ("operator", "nobody")])
async def test_pages_of_all_topics_show_those_of_who_asks(
    make_pages: MakePages, tmp_path: Path, name: str
) -> None:
    company = await Company.found(make_pages, tmp_path)
    await company.log_in(name)
    for route in ROUTES:
        if route.method == "GET" and not route.path.groupindex:
            async with company.pages.session.get(route.template) as response:
                text = await response.text()
                assert not secrets_in(text), f"{route.template}: {secrets_in(text)}"
                assert response.status in (200, 400, 403, 404)
    assert "orders" in await company.pages.get("/topics")


@pytest.mark.slow
async def test_who_has_no_right_sees_no_page(make_pages: MakePages, tmp_path: Path) -> None:
    company = await Company.found(make_pages, tmp_path)
    await company.log_in("nobody")
    for route in ROUTES:
        if route.method == "GET":
            path = path_of(route, **OF_TOPIC)
            text = await company.pages.get(path, status=403)
            assert "token:nobody may not" in html.unescape(text) and not secrets_in(text, path), path


async def test_who_has_rights_on_a_subscription_sees_no_other(make_pages: MakePages, tmp_path: Path) -> None:
    company = await Company.found(make_pages, tmp_path)
    await company.log_in("billing")
    text = await company.pages.get("/topics/orders")
    assert 'id="billing"' in text and "mail" not in text
    assert "2 ready" not in await company.pages.get("/")
    for other in ("owed", "skip", "seek", "settings", "delete"):
        await company.pages.get(f"/topics/orders/subscriptions/mail/{other}", status=403)
        await company.pages.get(f"/topics/orders/subscriptions/billing/{other}")
    text = await company.pages.post(
        "/topics/orders/subscriptions/billing", action="pause", back="/topics/orders"
    )
    assert "Paused: billing." in text


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINCIPALS[:-1])
async def test_nothing_is_offered_that_would_be_refused(
    make_pages: MakePages, tmp_path: Path, name: str
) -> None:
    """Every link and form of every page that is reached from the first one."""
    company = await Company.found(make_pages, tmp_path)
    await company.log_in(name)
    calls = {(route.method, route.template): route.call for route in ROUTES}
    seen, unread, forms = set[str](), deque(["/"]), set[str]()
    while unread:
        path = unread.popleft()
        async with company.pages.session.get(path) as response:
            text = await response.text()
            assert response.status == 200, f"{path} is offered to {name}: {response.status}"
        for link in map(html.unescape, re.findall(r'<a [^>]*href="(/[^"]*)"', text)):
            place = urlsplit(link).path
            if place not in seen:
                seen.add(place)
                unread.append(link)
        forms |= {html.unescape(each) for each in re.findall(r'<form method="post" action="([^"]*)"', text)}
    principal = f"token:{name}"
    for action in forms - {"/logout"}:
        route = next(each for each in ROUTES if each.method == "POST" and each.path.fullmatch(action))
        match = route.path.fullmatch(action)
        assert match is not None
        params = match.groupdict()
        call = calls["POST", route.template]
        assert company.pages.calls.allows(principal, call, params.get("topic", ""), params.get("name", ""))
    assert ("/new-topic" in seen) is (name in ("ada", "billing", "operator"))
    assert ("/topics/orders/produce" in seen) is (name in ("ada", "producer", "operator"))
    assert ("/audit" in seen) is (name == "operator")
    assert any("payroll" in place for place in seen) is (name == "operator")


async def test_the_overview_tells_nothing_untrue_of_messages_that_somebody_may_not_list(
    make_pages: MakePages, tmp_path: Path
) -> None:
    """Counts of a topic are for who consumes it, too; the list of its messages is not."""
    company = await Company.found(make_pages, tmp_path)
    nothing, link = "Nothing is due in the next 24 hours", '"/scheduled?topic=orders"'
    await company.log_in("billing")
    text = await company.pages.get("/")
    assert f"{nothing} in the topics whose messages you may see" in text and link not in text
    await company.log_in("scheduler")
    text = await company.pages.get("/")
    assert nothing not in text and link in text


async def test_who_may_see_no_subscription_is_not_told_that_there_is_none(
    make_pages: MakePages, tmp_path: Path
) -> None:
    company = await Company.found(make_pages, tmp_path)
    for name, told, looked in (("scheduler", "no subscription that you may see", "Nothing of what you may see:"),
                               ("operator", "over all subscriptions", "ready and nobody consumes")):  # fmt: skip
        await company.log_in(name)
        text = await company.pages.get("/topics/orders")
        assert told in text and "No subscription yet" not in text
        assert looked in await company.pages.get("/")


LIMITS = """
[[limit]]
name = "each"
principals = ["token:*"]
bytes_per_second = "10KiB"

[[limit]]
name = "trial-of-ada"
principals = ["token:ada"]
messages_per_second = 7

[[limit]]
name = "team"
topics = ["orders*"]
pending_messages = 3
topics_max = 50

[[limit]]
name = "raise-of-eve"
topics = ["payroll"]
messages_per_second = 1
"""


@pytest.mark.slow
async def test_a_topic_shows_its_limits_and_what_is_used_to_who_produces_or_manages(
    make_pages: MakePages, tmp_path: Path
) -> None:
    company = await Company.found(make_pages, tmp_path, GRANTS + LIMITS)
    pages = company.pages
    access = pages.calls._port.access
    assert access is not None
    limits = asyncio.ensure_future(access.limiter.run(pages.broker.registry))
    try:
        while not pages.broker.counters.limit_totals:
            await asyncio.sleep(0)
        for name, sees in (("producer", True), ("operator", True), ("consumer", False), ("scheduler", False)):
            await company.log_in(name)
            text = await pages.get("/topics/orders")
            assert ("<h2>Limits</h2>" in text) is sees, name
            assert "raise-of-eve" not in text
            assert ("trial-of-ada" in text) is (name == "operator"), name
        await company.log_in("producer")
        place = "/topics/orders/produce"
        await pages.post(place, payload="hello", how="text", when="now")
        refused = html.unescape(await pages.post(place, status=429, payload="hello", how="text", when="now"))
        assert (
            "Limit 'team' allows its topics 3 pending messages: there are 3, and this batch has 1" in refused
        )
        text = (await pages.get("/topics/orders")).split("<h2>Limits</h2>")[1].split("</section>")[0]
    finally:
        limits.cancel()
    rows = [re.sub(r"<[^>]+>", " ", row).split() for row in text.split("</tr>")[1:-1]]
    assert [" ".join(row) for row in rows] == [
        "each bytes per second, of each principal 10.0 KiB – 0",
        "team pending messages 3 3 full 1",
        "team topics 50 1 0",
    ]
