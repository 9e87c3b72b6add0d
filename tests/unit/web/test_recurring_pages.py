"""The pages of recurring schedules."""

from __future__ import annotations

from broker.storage.recurring_values import Definition, OverdueRuns, RecurringRule
from tests.harness import Outgoing
from tests.unit.web.conftest import MakePages


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
