"""Forms of topics, subscriptions and messages: what they hold, what they send, and what they say when that is refused."""

from __future__ import annotations

import html
import re
from dataclasses import fields
from typing import Any

import pytest

from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.web.forms import BUCKET_FIELDS
from postdate_api.v1 import admin_pb2
from tests.unit.web.conftest import MakePages, Pages
from tests.unit.web.test_pages import filled

SETTINGS = {
    "/topics/orders/settings": TopicPolicy,
    "/topics/orders/subscriptions/billing/settings": SubscriptionPolicy,
}


def fields_of(text: str) -> dict[str, Any]:
    """The fields of one line that a page holds, as a browser would send them."""
    found: dict[str, Any] = {}
    for tag in re.findall(r"<input [^>]*>", text):
        name, value = re.search(r'name="([^"]*)"', tag), re.search(r'value="([^"]*)"', tag)
        if name is not None:
            found[name[1]] = html.unescape(value[1]) if value is not None else ""
    for name, options in re.findall(r'<select id="\w+" name="(\w+)".*?>(.*?)</select>', text, re.DOTALL):
        chosen = re.search(r'value="([^"]*)" selected', options)
        found[name] = chosen[1] if chosen is not None else ""
    return found


async def send(pages: Pages, path: str, *, status: int = 200, **changed: str) -> str:
    """Send the form of a page with some fields changed."""
    form = fields_of(await pages.get(path)) | changed
    return await pages.post(path, status=status, csrf=form.pop("csrf"), **form)


def test_the_settings_in_buckets_are_those_of_the_calls() -> None:
    assert set(BUCKET_FIELDS) == set(admin_pb2.BucketPolicy.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("path", [*SETTINGS, "/new-topic", "/topics/orders/new-subscription"])
async def test_a_form_has_every_setting_and_each_field_a_label(make_pages: MakePages, path: str) -> None:
    pages = await filled(make_pages)
    text = await pages.get(path)
    kind = SETTINGS.get(path) or (TopicPolicy if path == "/new-topic" else SubscriptionPolicy)
    for field in fields(kind):
        assert f'<label for="{field.name}">' in text and f'name="{field.name}"' in text
    ids = set(re.findall(r'<(?:input|select|textarea) id="(\w+)"', text))
    assert ids == set(re.findall(r'<label for="(\w+)"', text))


@pytest.mark.parametrize("path", SETTINGS)
async def test_a_form_that_is_sent_as_it_came_changes_nothing(make_pages: MakePages, path: str) -> None:
    pages = await filled(make_pages)
    topic = pages.broker.registry.topic("orders")
    before = topic.policies.own, topic.subscription("billing").image.policy
    assert "Nothing was changed." in await send(pages, path)
    assert (topic.policies.own, topic.subscription("billing").image.policy) == before


async def test_settings_are_read_written_and_inherited_again(make_pages: MakePages) -> None:
    pages = await filled(make_pages)
    topic, path = pages.broker.registry.topic("orders"), "/topics/orders/settings"
    text = await send(
        pages,
        path,
        max_delay_ms="36h",
        tracker="memory",
        ledger_max_bytes="8MiB",
        max_buckets="7",
        seal_after_ms="5s",
    )
    assert "Saved: tracker, max_delay_ms, ledger_max_bytes, buckets." in text
    own = topic.policies.own
    assert (own.max_delay_ms, own.tracker, own.ledger_max_bytes) == (129_600_000, 2, 8 << 20)
    assert (own.max_buckets, own.seal_after_ms, own.min_index_count) == (7, 5_000, None)
    shown = fields_of(await pages.get(path))
    assert (shown["max_delay_ms"], shown["tracker"], shown["ledger_max_bytes"]) == ("36h", "memory", "8MiB")
    await send(pages, path, max_buckets="", tracker="")
    assert (topic.policies.own.max_buckets, topic.policies.own.seal_after_ms) == (None, 5_000)
    assert (topic.policies.own.tracker, topic.policies.own.max_delay_ms) == (None, 129_600_000)


async def test_who_edits_one_setting_leaves_what_others_set_meanwhile(make_pages: MakePages) -> None:
    pages = await filled(make_pages)
    path = "/topics/orders/subscriptions/billing/settings"
    form = fields_of(await pages.get(path))
    await send(pages, path, max_delivery_attempts="9", honor_delay="true")
    await pages.post(path, **(form | {"lease_ms": "45s"}))
    policy = pages.broker.registry.topic("orders").subscription("billing").image.policy
    assert (policy.lease_ms, policy.max_delivery_attempts, policy.honor_delay) == (45_000, 9, True)


@pytest.mark.parametrize(
    ("path", "field", "value", "told"),
    [
        ("/new-topic", "name", "no name", "cannot name a topic"),
        ("/topics/orders/settings", "max_delay_ms", "soon", "cannot be 'soon'"),
        ("/topics/orders/settings", "dedup_entries", "0", "must be from 1 to"),
        ("/topics/orders/subscriptions/billing/settings", "lease_ms", "20h", "lease"),
        ("/topics/orders/subscriptions/billing/settings", "dead_letter_topic", "a b", "cannot name a topic"),
        ("/topics/orders/produce", "key", "k" * 2_000, "key"),
    ],
)
async def test_what_is_wrong_is_told_at_its_field_and_what_was_typed_is_kept(
    make_pages: MakePages, path: str, field: str, value: str, told: str
) -> None:
    pages = await filled(make_pages)
    text = await send(pages, path, status=400, **{field: value})
    error = re.search(rf'id="{field}-error" role="alert">([^<]*)<', text)
    assert error is not None, text
    assert told in html.unescape(error[1])
    assert fields_of(text)[field] == value
    assert f'aria-describedby="{field}' in text and 'aria-invalid="true"' in text


async def test_a_topic_that_is_there_is_refused_and_one_that_is_deleted_wants_its_name(
    make_pages: MakePages,
) -> None:
    pages = await filled(make_pages)
    text = await send(pages, "/new-topic", status=409, name="orders")
    assert "orders" in text and 'role="alert"' in text
    assert "Type orders to confirm" in await send(pages, "/topics/orders/delete", status=400, confirm="order")
    assert "orders" in pages.broker.registry.by_name
    assert "Deleted: orders." in await send(pages, "/topics/orders/delete", confirm="orders")
    assert "orders" not in pages.broker.registry.by_name


async def test_a_message_is_produced_with_all_that_it_has(make_pages: MakePages) -> None:
    pages = await filled(make_pages)
    text = await send(
        pages,
        "/topics/orders/produce",
        payload="AAEC\r\n/w==",
        how="base64",
        key="k",
        properties="a=b=c\r\n\r\nd=",
        when="at",
        deliver_at_ms="2030-01-02T03:04:05",
        schedule_key="new",
    )
    assert "Produced: " in text and "2030-01-02 03:04:05" in text and "00 01 02 ff" in text
    found = await pages.broker.registry.topic("orders").schedule.get("new")
    assert found.schedule_key == "new"
    for field, value, told in (
        ("payload", "no", "not base64"),
        ("deliver_at_ms", "", "Say at which time"),
        ("deliver_after_ms", "soon", "is not a duration"),
        ("deliver_after_ms", "99999999d", "after the year 9999"),  # what the call refuses
    ):
        when = "after" if field == "deliver_after_ms" else "at"
        form = {"how": "base64", "payload": "", "when": when, "deliver_at_ms": "2030-01-02T03:04:05"}
        text = await send(pages, "/topics/orders/produce", status=400, **(form | {field: value}))
        assert re.search(rf'id="{field}-error" role="alert">[^<]*{told}', text), text


async def test_a_message_without_a_payload_is_there_like_any_other(make_pages: MakePages) -> None:
    pages = await filled(make_pages)
    text = await send(pages, "/topics/orders/produce")
    (place,) = re.findall(r"Produced: (\d+:\d+)\.", text)
    assert f"Message {place}" in await pages.get(f"/topics/orders/messages/{place}")
    listed = await pages.get("/topics/orders/subscriptions/billing/owed?state=ready")
    assert f'/messages/{place}"' in listed


async def test_a_subscription_is_moved(make_pages: MakePages) -> None:
    pages = await filled(make_pages)
    path = "/topics/orders/subscriptions/billing/seek"
    assert "begins at 1:20 now" in await send(pages, path, to="LATEST")
    assert "begins at 1:0 now" in await send(pages, path, to="EARLIEST")
    assert "Say to which time" in await send(pages, path, status=400, to="time")
    assert "Moved: billing" in await send(pages, path, to="time", time="2020-01-01T00:00")
    assert 'role="alert"' in await send(pages, path, status=400, to="time", time="2999-01-01T00:00")
