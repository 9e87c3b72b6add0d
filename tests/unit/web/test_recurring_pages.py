"""The pages of recurring schedules."""

from __future__ import annotations

import pytest

from broker.model import DELIVER_AT_MS_MAX
from broker.storage.recurring_values import Definition, OverdueRuns, RecurringRule
from tests.harness import Outgoing
from tests.unit.web.conftest import MakePages


@pytest.mark.slow
async def test_schedules_and_the_next_ten_times_of_one(make_pages: MakePages) -> None:
    pages = await make_pages()
    await pages.produce("orders", Outgoing(b"x"))
    topic = pages.broker.registry.topic("orders")
    assert "None" in await pages.get("/topics/orders/recurring")
    cron = RecurringRule(cron="0 9 * * *", zone="Europe/Berlin")
    definition = Definition(cron, b"", jitter_ms=60_000, overdue=OverdueRuns.ONE)
    await pages.broker.recurring.put(topic, "report", definition)
    await pages.broker.recurring.put(
        topic, "stopped", Definition(RecurringRule(interval_ms=90_000), b"", paused=True)
    )
    for number in range(60):
        await pages.broker.recurring.put(
            topic, f"z{number}", Definition(RecurringRule(interval_ms=3_600_000), b"")
        )
    page = await pages.get("/topics/orders/recurring")
    assert "62 schedules" in page and "0 9 * * *" in page and "Europe/Berlin" in page and "paused" in page
    assert "z9" not in page and "z9" in await pages.get("/topics/orders/recurring?after=z50")
    page = await pages.get("/topics/orders/recurring/report")
    assert page.count("09:00:00 C") == 10 and "one" in page
    assert "None while it is paused" in await pages.get("/topics/orders/recurring/stopped")
    await pages.get("/topics/orders/recurring/no", status=404)
    assert "/topics/orders/recurring" in await pages.get("/topics/orders")


async def test_a_zone_that_is_not_there_and_a_time_that_is_too_late_for_one(make_pages: MakePages) -> None:
    pages = await make_pages()
    await pages.produce("orders", Outgoing(b"x"))
    topic = pages.broker.registry.topic("orders")
    for name, rule in (
        ("cron", RecurringRule(cron="0 9 * * *", zone="Europe/Bonn")),
        ("interval", RecurringRule(interval_ms=90_000, zone="Europe/Bonn")),
        ("last", RecurringRule(times_ms=(DELIVER_AT_MS_MAX,), zone="Pacific/Kiritimati")),
    ):
        await pages.broker.recurring.put(topic, name, Definition(rule, b""))
    page = await pages.get("/topics/orders/recurring")
    assert "3 schedules" in page and "Fri 9999-12-31 23:59:59 UTC" in page
    assert "does not know its time zone" in await pages.get("/topics/orders/recurring/cron")
    assert ":00 UTC" in await pages.get("/topics/orders/recurring/interval")
    assert "Fri 9999-12-31 23:59:59 UTC" in await pages.get("/topics/orders/recurring/last")
