"""ListOwed: what a subscription is owed and is due, by state, page by page."""

from __future__ import annotations

from typing import Any

import pytest

from broker.rpc.paging import encode_token
from broker.topics import owed_list
from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2
from tests.wire.conftest import Ahead, Id, Message, Serve, Wire, eventually, ids_of, now_ms, refused, within

READY = consumer_pb2.OWED_STATE_READY
LEASED = consumer_pb2.OWED_STATE_LEASED
RETRYING = consumer_pb2.OWED_STATE_RETRYING
NO_BACKOFF = admin_pb2.SubscriptionPolicy(initial_backoff_ms=0)
HOUR_MS = 3_600_000
TOKEN = "INVALID_PAGE_TOKEN"


async def owed_of(
    wire: Wire, *states: int, page_size: int = 0, **fields: Any
) -> list[consumer_pb2.OwedMessage]:
    """All that subscription `s` of topic `t` is owed, page by page."""
    found: list[consumer_pb2.OwedMessage] = []
    token = ""
    while True:
        request = consumer_pb2.ListOwedRequest(
            topic="t", subscription="s", states=states, page_size=page_size, page_token=token, **fields
        )
        response = await within(wire.consumer.ListOwed(request))
        assert not page_size or len(response.owed) <= page_size
        found += response.owed
        if not (token := response.next_page_token):
            return found


def states_of(owed: list[consumer_pb2.OwedMessage]) -> dict[Id, int]:
    return {(each.id.ledger_id, each.id.entry_id): each.state for each in owed}


async def test_each_message_stands_in_one_state_and_the_counts_agree(timed: Wire, ahead: Ahead):
    await timed.create_subscription("t", policy=NO_BACKOFF)
    ids = await timed.produce("t", *(Message(payload=b"p", key=f"k{at}") for at in range(5)))
    await timed.produce("t", Message(payload=b"later", deliver_after_ms=HOUR_MS))
    [due] = await timed.produce("t", Message(payload=b"due", deliver_after_ms=60_000))
    stream = await timed.subscribe("t", permits=4, consumer_name="worker-1", lease_ms=HOUR_MS // 2)
    assert ids_of(await stream.deliveries(4)) == ids[:4]
    assert await stream.ack(ids[:1]) == []
    before = now_ms()
    assert await stream.nack(ids[1:2], redeliver_after_ms=HOUR_MS, reason="no stock") == []
    assert states_of(await owed_of(timed)) == {
        ids[1]: RETRYING,
        ids[2]: LEASED,
        ids[3]: LEASED,
        ids[4]: READY,
    }
    [retrying] = await owed_of(timed, RETRYING)
    assert (retrying.attempts, retrying.last_reason, retrying.consumer_name) == (1, "no stock", "")
    assert 0 <= retrying.next_attempt_ms - before - HOUR_MS < 10_000
    first, _ = await owed_of(timed, LEASED)
    assert (first.consumer_name, first.attempts, first.next_attempt_ms) == ("worker-1", 0, 0)
    assert 0 < first.lease_end_ms - before <= HOUR_MS // 2 + 10_000
    assert (first.message.key, first.message.payload) == ("k2", b"")
    assert first.deliver_at_ms == first.publish_time_ms
    [ready] = await owed_of(timed, READY, view=message_pb2.MESSAGE_VIEW_FULL)
    assert (ready.message.payload, ready.lease_end_ms) == (b"p", 0)
    ahead.step(60_000)
    topic = timed.broker.registry.topic("t")
    await eventually(lambda: topic.index.scheduled_count() == 1)
    assert states_of(await owed_of(timed, READY)) == {ids[4]: READY, due: READY}
    [stats] = (await timed.stats("t")).subscriptions
    assert (stats.ready_messages, stats.leased_messages, stats.scheduled_messages) == (2, 2, 2)
    ahead.step(HOUR_MS)
    await eventually(lambda: topic.index.scheduled_count() == 0)
    [again] = [each for each in await owed_of(timed, READY) if each.attempts]
    assert (again.id.entry_id, again.last_reason, again.next_attempt_ms) == (ids[1][1], "no stock", 0)


async def test_an_extended_lease_tells_its_new_end_and_who_has_left_its_id(wire: Wire):
    await wire.create_subscription("t")
    ids = await wire.produce("t", b"a", b"b")
    received = await wire.receive("t", max_messages=1, lease_ms=30_000)
    [held] = await owed_of(wire, LEASED)
    assert held.consumer_name == received.consumer_id
    stream = await wire.subscribe("t", consumer_name="worker", lease_ms=30_000)
    assert ids_of([await stream.delivery()]) == ids[1:]
    assert await stream.extend(ids[1:], 600_000) == []
    _, extended = await owed_of(wire, LEASED)
    assert extended.consumer_name == "worker"
    assert 500_000 < extended.lease_end_ms - now_ms() <= 600_000


async def test_pages_hold_each_message_once_whatever_their_size(wire: Wire):
    await wire.create_subscription("t", policy=NO_BACKOFF)
    ids = await wire.produce("t", *([b"x"] * 50))
    stream = await wire.subscribe("t", permits=30)
    await stream.deliveries(30)
    await stream.ack(ids[:30:3])
    await stream.nack(ids[1:30:3], redeliver_after_ms=HOUR_MS)
    for page_size in (1, 7, 40, 1_000):
        found = await owed_of(wire, page_size=page_size)
        assert [(each.id.ledger_id, each.id.entry_id) for each in found] == [
            id_ for id_ in ids if id_ not in ids[:30:3]
        ]
        assert len(await owed_of(wire, LEASED, RETRYING, page_size=page_size)) == 20


async def test_a_page_looks_at_so_many_entries_at_most(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owed_list, "LOOKED_MAX", 20)
    monkeypatch.setattr(owed_list, "_STEP", 10)
    await wire.create_subscription("t")
    later = await wire.produce("t", *(Message(deliver_after_ms=HOUR_MS) for _ in range(100)))
    [last] = await wire.produce("t", b"last")
    request = consumer_pb2.ListOwedRequest(topic="t", subscription="s")
    page = await within(wire.consumer.ListOwed(request))
    assert (list(page.owed), bool(page.next_page_token)) == ([], True)
    assert states_of(await owed_of(wire)) == {last: READY}
    assert len(later) == 100


async def test_what_the_answer_has_no_room_for_comes_on_the_next_page(serve: Serve):
    wire = await serve(frame_bytes_max=1 << 20)
    await wire.create_subscription("t")
    ids = await wire.produce("t", *(Message(payload=bytes(400_000)) for _ in range(5)))
    found = await owed_of(wire, view=message_pb2.MESSAGE_VIEW_FULL)
    assert [(each.id.ledger_id, each.id.entry_id) for each in found] == ids
    request = consumer_pb2.ListOwedRequest(topic="t", subscription="s", view=message_pb2.MESSAGE_VIEW_FULL)
    assert len((await within(wire.consumer.ListOwed(request))).owed) == 2


async def test_a_subscription_that_ignores_delays_is_owed_all_at_once(wire: Wire):
    await wire.create_subscription("t", type=consumer_pb2.SUBSCRIPTION_TYPE_EXCLUSIVE)
    ids = await wire.produce("t", Message(deliver_after_ms=HOUR_MS), b"now")
    assert states_of(await owed_of(wire)) == dict.fromkeys(ids, READY)


async def test_refusals(wire: Wire):
    await wire.create_subscription("t")
    named = {"topic": "t", "subscription": "s"}
    for expected, fields in {
        "INVALID_NAME topic": {"topic": "/", "subscription": "s"},
        "INVALID_NAME subscription": {"topic": "t", "subscription": ""},
        "TOPIC_NOT_FOUND ": {"topic": "u", "subscription": "s"},
        "SUBSCRIPTION_NOT_FOUND ": {"topic": "t", "subscription": "u"},
        "INVALID_OWED_STATE states[1]": {**named, "states": [READY, 9]},
        "INVALID_PAGE_SIZE page_size": {**named, "page_size": 1_001},
        "INVALID_PAGE_TOKEN page_token": {**named, "page_token": "bm8="},
        "INVALID_VIEW view": {**named, "view": 9},
    }.items():
        refusal = await refused(wire.consumer.ListOwed(consumer_pb2.ListOwedRequest(**fields)))
        assert f"{refusal.reason} {''.join(refusal.fields)}" == expected


async def test_a_page_begins_after_a_place_that_there_can_be(wire: Wire):
    await wire.create_subscription("t")
    await wire.produce("t", b"1")
    await (await wire.subscribe("t")).delivery()
    named = {"topic": "t", "subscription": "s"}
    places = {"1.4294967295": "", "1.4294967296": TOKEN, "1.9999999999": TOKEN, f"{1 << 48}.0": TOKEN}
    for place, reason in places.items():
        token = encode_token(place)
        owed = wire.consumer.ListOwed(
            consumer_pb2.ListOwedRequest(**named, states=[LEASED], page_token=token)
        )
        letters = wire.admin.ListDeadLetters(admin_pb2.ListDeadLettersRequest(**named, page_token=token))
        for call in (owed, letters):
            if reason:
                assert (await refused(call)).reason == reason
            else:
                assert (await within(call)).next_page_token == ""
