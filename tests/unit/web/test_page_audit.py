"""Every change on the pages leaves the line in the audit trail that the call leaves, with who asked."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from broker.web.routes import ROUTES
from tests.unit.web.conftest import TOKEN, MakePages, access_files
from tests.unit.web.test_pages import filled

ORDERS, BILLING = "/topics/orders", "/topics/orders/subscriptions/billing"
CHANGES: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    (f"{ORDERS}/messages/1:3", "/topics/{topic}/messages/{id}"): ({"action": "cancel"}, "CancelScheduled"),
    ("/scheduled/change", "/scheduled/change"): (
        {"topic": "orders", "action": "move", "how": "by", "by": "1d"},
        "StartBulkChange",
    ),
    (f"{ORDERS}/bulk-changes/1", "/topics/{topic}/bulk-changes/{id}"): ({}, "CancelBulkChange"),
    (BILLING, "/topics/{topic}/subscriptions/{name}"): ({"action": "pause"}, "Pause"),
    (f"{BILLING}/skip", "/topics/{topic}/subscriptions/{name}/skip"): ({}, "SkipAll"),
    (f"{BILLING}/settings", "/topics/{topic}/subscriptions/{name}/settings"): (
        {"lease_ms": "5s"},
        "UpdateSubscription",
    ),
    (f"{BILLING}/seek", "/topics/{topic}/subscriptions/{name}/seek"): ({"to": "EARLIEST"}, "Seek"),
    (f"{BILLING}/delete", "/topics/{topic}/subscriptions/{name}/delete"): (
        {"confirm": "billing"},
        "DeleteSubscription",
    ),
    ("/dead-letters/orders/billing", "/dead-letters/{topic}/{name}"): (
        {"action": "purge"},
        "PurgeDeadLetters",
    ),
    ("/new-topic", "/new-topic"): ({"name": "orders2"}, "CreateTopic"),
    (f"{ORDERS}/settings", "/topics/{topic}/settings"): ({"max_delay_ms": "90d"}, "UpdateTopic"),
    (f"{ORDERS}/new-subscription", "/topics/{topic}/new-subscription"): (
        {"name": "mail", "type": "SHARED", "begin": "LATEST"},
        "CreateSubscription",
    ),
    (f"{ORDERS}/delete", "/topics/{topic}/delete"): ({"confirm": "orders"}, "DeleteTopic"),
}
"""By its place and path: a form that asks for it, and the call that it is."""
NO_CHANGES = {
    "/topics/{topic}/produce",  # as Produce, which metrics count
}


def trail(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(each)["fields"] for each in caplog.records if each.getMessage() == "Audit: a change"]


def test_every_change_has_a_case() -> None:
    paths = {path for _, path in CHANGES}
    assert {each.template for each in ROUTES if each.method == "POST"} == paths | NO_CHANGES


@pytest.mark.slow
@pytest.mark.parametrize("has_rules", [False, True])
@pytest.mark.parametrize("case", CHANGES, ids=[path for path, _ in CHANGES])
async def test_every_change_leaves_a_line_with_who_asked(
    make_pages: MakePages,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    case: tuple[str, str],
    has_rules: bool,
) -> None:
    pages = await filled(make_pages, **(access_files(tmp_path) if has_rules else {}))
    if has_rules:
        await pages.log_in()
    form, action = CHANGES[case]
    if action == "CancelBulkChange":
        await pages.post("/scheduled/change", topic="orders", action="cancel")
    with caplog.at_level(logging.INFO):
        caplog.clear()
        await pages.post(case[0], back="/", **form)
    (line,) = trail(caplog)
    principal = "token:admin" if has_rules else "anonymous"
    assert (line["action"], line["result"]) == (action, "done")
    assert (line["principal"], line["peer"]) == (principal, "http:127.0.0.1")
    assert line["topic"] == ("orders2" if action == "CreateTopic" else "orders")


async def test_refused_change_says_why(make_pages: MakePages, caplog: pytest.LogCaptureFixture) -> None:
    pages = await filled(make_pages)
    with caplog.at_level(logging.INFO):
        await pages.post("/topics/nowhere/messages/1:3", action="cancel", back="/")
    assert trail(caplog)[-1]["result"] == "TOPIC_NOT_FOUND"


async def test_login_leaves_a_line(
    make_pages: MakePages, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pages = await filled(make_pages, **access_files(tmp_path))
    with caplog.at_level(logging.INFO):
        await pages.log_in("wrong")
        await pages.log_in()
    (line,) = trail(caplog)
    assert (line["action"], line["principal"], line["peer"]) == ("LogIn", "token:admin", "http:127.0.0.1")
    assert TOKEN not in caplog.text
