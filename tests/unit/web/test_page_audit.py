"""Every change on the pages leaves a line in the audit trail, whatever comes of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from broker.web.routes import ROUTES
from tests.unit.web.conftest import MakePages
from tests.unit.web.test_pages import filled

CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "change_message": ("/topics/orders/messages/1:3", {"action": "cancel"}, "done"),
    "start_change": ("/scheduled/change", {"topic": "orders", "action": "cancel", "matched": "20"}, "done"),
    "stop_job": ("/changes/none", {}, "refused"),
    "change_subscription": ("/topics/orders/subscriptions/billing", {"action": "pause"}, "done"),
    "skip_all": ("/topics/orders/subscriptions/billing/skip", {}, "done"),
    "change_letters": ("/dead-letters/orders/billing", {"action": "purge"}, "nothing"),
}
"""By its handler: a form that asks for it, and what comes of that."""


def trail(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(each)["fields"] for each in caplog.records if each.getMessage() == "Audit: a change"]


def test_every_change_has_a_case() -> None:
    assert {each.handler.__name__ for each in ROUTES if each.method == "POST"} == set(CHANGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
async def test_every_change_leaves_a_line(
    make_pages: MakePages, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    pages = await filled(make_pages)
    await pages.log_in()
    path, form, result = CHANGES[name]
    with caplog.at_level(logging.INFO):
        caplog.clear()
        await pages.post(path, **form)
    found = {each["action"]: each for each in trail(caplog)}
    line = found[f"pages.{name}"]
    assert (line["result"], line["principal"], line["peer"]) == (result, "admin_token", "127.0.0.1")
    assert line["topic"] == ("" if name == "stop_job" else "orders")
    if name == "start_change":  # the change itself goes on by itself, and says what it came to
        done = found["pages.changed_by_filter"]
        assert (done["result"], done["matched"], done["done"]) == ("done", 20, 20)


async def test_refused_change_says_why(make_pages: MakePages, caplog: pytest.LogCaptureFixture) -> None:
    pages = await filled(make_pages)
    await pages.log_in()
    with caplog.at_level(logging.INFO):
        await pages.post("/topics/nowhere/messages/1:3", action="cancel")
    assert trail(caplog)[-1]["result"] == "TOPIC_NOT_FOUND"
