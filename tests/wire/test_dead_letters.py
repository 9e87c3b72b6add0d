"""Dead letters over gRPC: given up once and for all, found in their topic, listed, requeued, purged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import aiohttp
import grpc
import pytest

from broker.rpc import dead_letters
from broker.runtime.clock import SystemClock
from broker.storage.salvage import read_marking_damage
from broker.topics import dead_letter_list
from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2, schedule_pb2
from tests.wire.conftest import (
    Ahead,
    Id,
    Message,
    Serve,
    Stream,
    Wire,
    failures_of,
    ids_of,
    now_ms,
    refused,
    sets,
    within,
)

EARLIEST = consumer_pb2.INITIAL_POSITION_EARLIEST
FULL = message_pb2.MESSAGE_VIEW_FULL
PREFIX = "postdate.dead-letter."
HOLDER = "dead-letters"
HOUR_MS = 3_600_000


def policy(**fields: Any) -> admin_pb2.SubscriptionPolicy:
    return admin_pb2.SubscriptionPolicy(**{"initial_backoff_ms": 0, **fields})


async def letters_of(
    wire: Wire, topic: str, subscription: str = "s", page_size: int = 0, **fields: Any
) -> list[admin_pb2.DeadLetter]:
    """All dead letters, page by page."""
    found: list[admin_pb2.DeadLetter] = []
    token = ""
    while True:
        request = admin_pb2.ListDeadLettersRequest(
            topic=topic, subscription=subscription, page_size=page_size, page_token=token, **fields
        )
        response = await within(wire.admin.ListDeadLetters(request))
        assert not page_size or len(response.dead_letters) <= page_size
        found += response.dead_letters
        if not (token := response.next_page_token):
            return found


async def requeue(wire: Wire, topic: str, subscription: str = "s", **fields: Any) -> Any:
    request = admin_pb2.RequeueDeadLettersRequest(topic=topic, subscription=subscription, **fields)
    return await within(wire.admin.RequeueDeadLetters(request))


async def purge(wire: Wire, topic: str, subscription: str = "s", **fields: Any) -> Any:
    request = admin_pb2.PurgeDeadLettersRequest(topic=topic, subscription=subscription, **fields)
    return await within(wire.admin.PurgeDeadLetters(request))


async def count_of(wire: Wire, topic: str, subscription: str = "s") -> int:
    stats = (await wire.stats(topic)).subscriptions
    return next(each.dead_letter_messages for each in stats if each.name == subscription)


async def ready_of(wire: Wire, topic: str, subscription: str = "s") -> int:
    stats = (await wire.stats(topic)).subscriptions
    return next(each.ready_messages for each in stats if each.name == subscription)


def letter_ids(letters: Iterable[admin_pb2.DeadLetter]) -> list[Id]:
    return [(each.id.ledger_id, each.id.entry_id) for each in letters]


def payloads(deliveries: Iterable[consumer_pb2.Delivery]) -> list[bytes]:
    return [each.message.payload for each in deliveries]


async def give_up(stream: Stream, count: int, **fields: Any) -> list[Id]:
    """Give up the next so many messages."""
    ids = ids_of(await stream.deliveries(count))
    assert await stream.nack(ids, dead_letter=True, **fields) == []
    return ids


async def test_delivered_ten_times_with_five_seconds_between_and_then_found_in_the_dead_letter_topic(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    offset_ms = 0
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: time.time_ns() // 1_000_000 + offset_ms)
    wire = await serve(clock_recheck_ms=20)
    await wire.create_subscription("orders", "billing", policy=policy(max_delivery_attempts=10))
    stream = await wire.subscribe("orders", "billing")
    message = Message(
        payload=b"p", key="k", properties={"a": "b"}, event_time_ms=7, traceparent="00-t", ttl_ms=10**9
    )
    [id_] = await wire.produce("orders", message)
    for attempt in range(1, 11):
        delivery = await stream.delivery()
        assert (ids_of([delivery]), delivery.delivery_attempt) == ([id_], attempt)
        assert await stream.nack([id_], redeliver_after_ms=5_000) == []
        if attempt == 1:
            await stream.stays_quiet()
        offset_ms += 5_000
    await stream.stays_quiet()
    [letter] = await letters_of(wire, "orders", "billing")
    assert letter.dead_letter_topic == "orders~billing~dead-letters"
    assert (letter.original_id.ledger_id, letter.original_id.entry_id) == id_
    assert (letter.delivery_attempts, letter.reason) == (10, "max_delivery_attempts")
    dead = await wire.subscribe("orders~billing~dead-letters", HOLDER)
    delivery = await dead.delivery()
    assert ids_of([delivery]) == letter_ids([letter])
    assert delivery.delivery_attempt == 1
    assert delivery.message == Message(
        payload=b"p",
        key="k",
        event_time_ms=7,
        traceparent="00-t",
        properties={
            "a": "b",
            PREFIX + "topic": "orders",
            PREFIX + "subscription": "billing",
            PREFIX + "ledger-id": str(id_[0]),
            PREFIX + "entry-id": str(id_[1]),
            PREFIX + "attempts": "10",
            PREFIX + "reason": "max_delivery_attempts",
            PREFIX + "time-ms": str(letter.dead_letter_time_ms),
        },
    )
    assert await count_of(wire, "orders", "billing") == 1
    assert await dead.ack(ids_of([delivery])) == []
    assert await count_of(wire, "orders", "billing") == 0
    assert await letters_of(wire, "orders", "billing") == []


async def test_a_nack_gives_up_at_once_for_its_reason(wire: Wire):
    stream = await wire.subscribe("t")
    await wire.produce("t", b"1", b"2")
    await give_up(stream, 1, reason="no such customer")
    await give_up(stream, 1)
    await stream.stays_quiet()
    letters = await letters_of(wire, "t", view=FULL)
    assert [(each.reason, each.delivery_attempts) for each in letters] == [
        ("no such customer", 1),
        ("nack", 1),
    ]
    assert [each.message.payload for each in letters] == [b"1", b"2"]


async def test_a_unary_nack_gives_up_too(wire: Wire):
    await wire.create_subscription("t")
    await wire.produce("t", b"x")
    received = await wire.receive("t", wait_ms=5_000)
    request = consumer_pb2.NackRequest(
        topic="t",
        subscription="s",
        consumer_id=received.consumer_id,
        entries=sets(ids_of(received.deliveries)),
        dead_letter=True,
        reason="bad",
    )
    assert not (await within(wire.consumer.Nack(request))).failures
    assert [each.reason for each in await letters_of(wire, "t")] == ["bad"]


async def test_leases_that_end_and_consumers_that_vanish_count_as_deliveries(wire: Wire):
    await wire.create_subscription("t", policy=policy(max_delivery_attempts=3))
    await wire.produce("t", b"x")
    first = await wire.subscribe("t", lease_ms=400)
    assert [(await first.delivery()).delivery_attempt for _ in range(2)] == [1, 2]  # its lease ends
    second = await wire.subscribe("t", lease_ms=60_000)
    first.cancel()
    assert (await second.delivery()).delivery_attempt == 3
    second.cancel()

    async def is_dead() -> bool:
        return await count_of(wire, "t") == 1

    async with asyncio.timeout(10):
        while not await is_dead():
            await asyncio.sleep(0.01)
    [letter] = await letters_of(wire, "t")
    assert (letter.delivery_attempts, letter.reason) == (3, "max_delivery_attempts")


async def test_attempts_survive_a_restart(serve: Serve):
    wire = await serve()
    await wire.create_subscription("t", policy=policy(max_delivery_attempts=2))
    [id_] = await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    await stream.delivery()
    asked_ms = now_ms()
    assert await stream.nack([id_], redeliver_after_ms=300) == []
    await wire.disconnect()
    await wire.stop()
    wire = await serve(data_dir=wire.server.config.data_dir)
    stream = await wire.subscribe("t")
    delivery = await stream.delivery()
    assert delivery.delivery_attempt == 2
    assert now_ms() >= asked_ms + 300
    assert await stream.nack([id_]) == []
    assert await count_of(wire, "t") == 1
    await wire.disconnect()
    await wire.stop()
    wire = await serve(data_dir=wire.server.config.data_dir)
    assert [each.delivery_attempts for each in await letters_of(wire, "t")] == [2]
    await (await wire.subscribe("t")).stays_quiet()


async def test_lists_come_in_pages_oldest_first_with_as_much_as_asked_for(wire: Wire):
    messages = [
        Message(payload=b"%d" % i * (i + 1), key=f"k{i}", properties={"n": str(i)}) for i in range(25)
    ]
    stream = await wire.subscribe("t")
    ids = await wire.produce("t", *messages)
    await give_up(stream, 25)
    for page_size in (0, 1, 7, 25, 1_000):
        letters = await letters_of(wire, "t", page_size=page_size)
        assert letter_ids(letters) == sorted(letter_ids(letters))
        assert [(each.original_id.ledger_id, each.original_id.entry_id) for each in letters] == ids
        assert [each.payload_bytes for each in letters] == [len(each.payload) for each in messages]
        assert all(not each.message.payload for each in letters)
        assert [(each.message.key, dict(each.message.properties)) for each in letters] == [
            (each.key, dict(each.properties)) for each in messages
        ]
    letters = await letters_of(wire, "t", page_size=10, view=FULL)
    assert [each.message for each in letters] == messages


async def test_a_page_ends_before_it_is_too_large_for_a_frame(wire: Wire):
    stream = await wire.subscribe("t")
    for _ in range(9):
        await wire.produce("t", bytes(700_000))
    await give_up(stream, 9)
    request = admin_pb2.ListDeadLettersRequest(topic="t", subscription="s", view=FULL)
    response = await within(wire.admin.ListDeadLetters(request))
    assert response.ByteSize() < 3_670_016
    assert 1 < len(response.dead_letters) < 9
    assert len(await letters_of(wire, "t", view=FULL)) == 9
    assert (
        len(
            (
                await within(
                    wire.admin.ListDeadLetters(admin_pb2.ListDeadLettersRequest(topic="t", subscription="s"))
                )
            ).dead_letters
        )
        == 9
    )


async def test_requeued_messages_reach_their_subscription_only(wire: Wire):
    streams = {name: await wire.subscribe("t", name) for name in ("s", "other")}
    await wire.produce("t", b"1", b"2", b"3")
    for name, stream in streams.items():
        await give_up(stream, 3, reason=name)
    first, second, third = letter_ids(await letters_of(wire, "t"))
    response = await requeue(wire, "t", entries=sets([second, (second[0], 10**6)]))
    assert response.requeued_messages == 1
    assert failures_of(response.failures) == {(second[0], 10**6): "NOT_FOUND"}
    assert response.failures[0].error.message == "This message is no dead letter of this subscription"
    delivery = await streams["s"].delivery()
    assert (delivery.message, delivery.delivery_attempt) == (Message(payload=b"2"), 1)
    assert letter_ids(await letters_of(wire, "t")) == [first, third]
    assert (await requeue(wire, "t", all=True)).requeued_messages == 2
    assert payloads(await streams["s"].deliveries(2)) == [b"1", b"3"]
    await streams["other"].stays_quiet()
    assert (await count_of(wire, "t"), await count_of(wire, "t", "other")) == (0, 3)
    assert await ready_of(wire, "t", "other") == 0
    assert (await requeue(wire, "t", all=True)).requeued_messages == 0


async def test_requeued_messages_wait_as_long_as_asked(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    offset_ms = 0
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: time.time_ns() // 1_000_000 + offset_ms)
    wire = await serve(clock_recheck_ms=20)
    stream = await wire.subscribe("t")
    other = await wire.subscribe("t", "other")
    await wire.produce("t", b"x")
    await other.ack(ids_of(await other.deliveries(1)))
    await give_up(stream, 1)
    await requeue(wire, "t", all=True, deliver_after_ms=60_000)
    await stream.stays_quiet()
    assert (await wire.stats("t")).scheduled_messages == 1
    offset_ms = 60_000
    assert (await stream.delivery()).message.payload == b"x"
    await other.stays_quiet()


async def test_requeue_works_where_producers_are_refused(wire: Wire):
    """It is no produce: no quota, no rate and no switched-off delay concerns it."""
    stream = await wire.subscribe("t")
    await wire.produce("t", b"1", b"2")
    await give_up(stream, 2)
    limits = admin_pb2.TopicPolicy(
        max_pending_messages=1,
        max_produce_rate=1,
        delayed_delivery=admin_pb2.DELAYED_DELIVERY_DISABLED,
    )
    request = admin_pb2.UpdateTopicRequest(name="t", policy=limits)
    request.update_mask.paths.extend(("max_pending_messages", "max_produce_rate", "delayed_delivery"))
    await within(wire.admin.UpdateTopic(request))
    assert (await requeue(wire, "t", all=True, deliver_after_ms=50)).requeued_messages == 2
    assert sorted(payloads(await stream.deliveries(2))) == [b"1", b"2"]


async def test_purged_messages_are_gone(wire: Wire):
    stream = await wire.subscribe("t")
    await wire.produce("t", b"1", b"2", b"3")
    await give_up(stream, 3)
    first, *_ = letter_ids(await letters_of(wire, "t"))
    response = await purge(wire, "t", entries=sets([first, first, (first[0], 77)]))
    assert response.purged_messages == 1
    assert failures_of(response.failures) == {(first[0], 77): "NOT_FOUND"}
    assert response.failures[0].error.message == "This message is no dead letter of this subscription"
    assert await count_of(wire, "t") == 2
    assert (await purge(wire, "t", all=True)).purged_messages == 2
    assert await letters_of(wire, "t") == []
    assert await ready_of(wire, f"t~s~{HOLDER}", HOLDER) == 0


async def test_an_ack_that_comes_after_the_dead_letter_is_confirmed_and_changes_nothing(wire: Wire):
    stream = await wire.subscribe("t")
    await wire.produce("t", b"x")
    ids = await give_up(stream, 1)
    assert await stream.ack(ids) == []
    assert await count_of(wire, "t") == 1
    assert (await requeue(wire, "t", all=True)).requeued_messages == 1
    assert (await stream.delivery()).message.payload == b"x"


async def test_a_seek_back_shows_purged_and_requeued_letters_again(wire: Wire):
    stream = await wire.subscribe("t")
    await wire.produce("t", b"1", b"2")
    await give_up(stream, 2)
    first, _ = letter_ids(await letters_of(wire, "t"))
    assert (await purge(wire, "t", entries=sets([first]))).purged_messages == 1
    assert (await requeue(wire, "t", all=True)).requeued_messages == 1
    place = f"t~s~{HOLDER}"
    assert await ready_of(wire, place, HOLDER) == 0
    request = admin_pb2.SeekRequest(topic=place, subscription=HOLDER, initial_position=EARLIEST)
    await within(wire.admin.Seek(request))
    assert await ready_of(wire, place, HOLDER) == 2


async def test_dead_letters_that_are_given_up_go_on_and_leave_the_first_list(wire: Wire):
    """Also in a circle: nothing forbids two dead-letter topics that point at each other."""
    await wire.create_subscription("t", "s", policy=policy(dead_letter_topic="a"))
    await wire.create_subscription("a", HOLDER, policy=policy(dead_letter_topic="b"))
    await wire.create_subscription("b", HOLDER, policy=policy(dead_letter_topic="a"))
    await wire.produce("t", b"x")
    await give_up(await wire.subscribe("t"), 1)
    assert await count_of(wire, "t") == 1
    first, second = [await wire.subscribe(topic, HOLDER) for topic in ("a", "b")]
    await give_up(first, 1)
    assert (await count_of(wire, "t"), await count_of(wire, "a", HOLDER)) == (0, 1)
    await give_up(second, 1)
    assert (await count_of(wire, "a", HOLDER), await count_of(wire, "b", HOLDER)) == (0, 1)
    assert (await first.delivery()).message.payload == b"x"


async def test_a_repeat_with_the_same_request_id_changes_nothing(wire: Wire):
    stream = await wire.subscribe("t")
    await wire.produce("t", b"1")
    await give_up(stream, 1)
    assert [(await requeue(wire, "t", all=True, request_id="r")).requeued_messages for _ in range(2)] == [
        1,
        1,
    ]
    await give_up(stream, 1)
    assert [(await purge(wire, "t", all=True, request_id="r")).purged_messages for _ in range(2)] == [1, 1]
    await stream.stays_quiet()


async def test_two_subscriptions_with_one_dead_letter_topic_see_their_own(wire: Wire):
    for name in ("a", "b"):
        await wire.create_subscription("t", name, policy=policy(dead_letter_topic="dead"))
    streams = {name: await wire.subscribe("t", name) for name in ("a", "b")}
    await wire.produce("t", b"1", b"2")
    for name, stream in streams.items():
        await give_up(stream, 2, reason=name)
    for name in ("a", "b"):
        letters = await letters_of(wire, "t", name)
        assert [(each.reason, each.dead_letter_topic) for each in letters] == [(name, "dead")] * 2
    theirs = letter_ids(await letters_of(wire, "t", "b"))
    response = await purge(wire, "t", "a", entries=sets(theirs))
    assert response.purged_messages == 0
    assert set(failures_of(response.failures)) == set(theirs)
    assert (await purge(wire, "t", "a", all=True)).purged_messages == 2
    assert (await requeue(wire, "t", "b", all=True)).requeued_messages == 2
    assert payloads(await streams["b"].deliveries(2)) == [b"1", b"2"]
    await streams["a"].stays_quiet()


async def test_a_deleted_dead_letter_topic_is_made_again(wire: Wire):
    stream = await wire.subscribe("t")
    await wire.produce("t", b"1", b"2")
    await give_up(stream, 1)
    await within(wire.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=f"t~s~{HOLDER}")))
    assert (await letters_of(wire, "t"), await count_of(wire, "t")) == ([], 0)
    await give_up(stream, 1)
    assert [each.message.payload for each in await letters_of(wire, "t", view=FULL)] == [b"2"]


async def test_dead_letters_outlive_their_subscription_in_their_topic(wire: Wire):
    stream = await wire.subscribe("t")
    await wire.produce("t", b"1")
    await give_up(stream, 1)
    await within(wire.admin.DeleteSubscription(admin_pb2.DeleteSubscriptionRequest(topic="t", name="s")))
    dead = await wire.subscribe(f"t~s~{HOLDER}", HOLDER)
    assert (await dead.delivery()).message.payload == b"1"
    await wire.create_subscription("t")
    assert await letters_of(wire, "t") == []  # another one, which has given up nothing


async def refusals(wire: Wire) -> dict[str, Any]:
    """Calls that are refused, by what is wrong with them."""
    named = {"topic": "t", "subscription": "s"}
    list_, requeue_, purge_ = (
        wire.admin.ListDeadLetters,
        wire.admin.RequeueDeadLetters,
        wire.admin.PurgeDeadLetters,
    )
    one = sets([(1, 1)])
    requests = {
        "INVALID_NAME topic": (list_, admin_pb2.ListDeadLettersRequest(topic="/", subscription="s")),
        "INVALID_NAME subscription": (list_, admin_pb2.ListDeadLettersRequest(topic="t", subscription="")),
        "TOPIC_NOT_FOUND ": (list_, admin_pb2.ListDeadLettersRequest(topic="u", subscription="s")),
        "SUBSCRIPTION_NOT_FOUND ": (
            purge_,
            admin_pb2.PurgeDeadLettersRequest(topic="t", subscription="r", all=True),
        ),
        "INVALID_PAGE_SIZE page_size": (list_, admin_pb2.ListDeadLettersRequest(**named, page_size=1_001)),
        "INVALID_PAGE_TOKEN page_token": (
            list_,
            admin_pb2.ListDeadLettersRequest(**named, page_token="bm8="),
        ),
        "INVALID_VIEW view": (list_, admin_pb2.ListDeadLettersRequest(**named, view=9)),
        "REASON_TOO_LARGE reason": (list_, admin_pb2.ListDeadLettersRequest(**named, reason="r" * 10_000)),
        "INVALID_TIME_RANGE dead_letter_time": (
            list_,
            admin_pb2.ListDeadLettersRequest(
                **named, dead_letter_time=schedule_pb2.TimeRange(start_ms=2, end_ms=1)
            ),
        ),
        "INVALID_SELECTION entries": (requeue_, admin_pb2.RequeueDeadLettersRequest(**named)),
        "INVALID_SELECTION entries ": (
            purge_,
            admin_pb2.PurgeDeadLettersRequest(**named, entries=one, all=True),
        ),
        "EMPTY_ENTRY_SET entries[0].entry_ids": (
            requeue_,
            admin_pb2.RequeueDeadLettersRequest(**named, entries=[message_pb2.EntrySet(ledger_id=1)]),
        ),
        "INVALID_DELIVER_AFTER_MS deliver_after_ms": (
            requeue_,
            admin_pb2.RequeueDeadLettersRequest(**named, all=True, deliver_after_ms=-1),
        ),
        "DELIVER_AT_TOO_FAR deliver_after_ms": (
            requeue_,
            admin_pb2.RequeueDeadLettersRequest(**named, all=True, deliver_after_ms=1_001),
        ),
    }
    return {name: await refused(call(request)) for name, (call, request) in requests.items()}


async def test_requests_that_make_no_sense_are_refused(serve: Serve):
    wire = await serve(max_delay_ms=1_000)
    await wire.create_subscription("t")
    refused_with = await refusals(wire)
    for name, refusal in refused_with.items():
        reason, field = name.split(" ", 1)
        assert (refusal.reason, refusal.fields) == (reason, (field.strip(),) if field else ()), name
    texts = {name: refusal.message for name, refusal in refused_with.items()}
    assert (
        texts["INVALID_SELECTION entries"] == "The request selects no dead letters: give entries, or set all"
    )
    assert texts["INVALID_SELECTION entries "] == "The request has both entries and all: give one of them"
    views = "MESSAGE_VIEW_UNSPECIFIED, MESSAGE_VIEW_BASIC or MESSAGE_VIEW_FULL"
    assert texts["INVALID_VIEW view"] == f"view must be {views}, not 9"


async def test_where_there_is_no_place_for_dead_letters_the_broker_says_so(wire: Wire):
    name = "t" * 250
    request = admin_pb2.CreateSubscriptionRequest(
        topic=name, name="s", policy=policy(max_delivery_attempts=3)
    )
    refusal = await refused(wire.admin.CreateSubscription(request))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_DEAD_LETTER_TOPIC")
    stream = await wire.subscribe(name)
    await wire.produce(name, b"x")
    ids = ids_of(await stream.deliveries(1))
    await stream.send(nack=consumer_pb2.Nack(request_id=1, entries=sets(ids), dead_letter=True))
    assert (await stream.refusal()).reason == "NO_DEAD_LETTER_TOPIC"
    request.policy.dead_letter_topic = "short"
    request.name = "other"
    await within(wire.admin.CreateSubscription(request))


async def test_the_place_of_dead_letters_is_shown_and_can_be_changed(wire: Wire):
    await wire.create_subscription("t")
    get = admin_pb2.GetSubscriptionRequest(topic="t", name="s")
    shown = (await within(wire.admin.GetSubscription(get))).subscription
    assert not shown.policy.HasField("dead_letter_topic")
    assert shown.effective_policy.dead_letter_topic == "t~s~dead-letters"
    request = admin_pb2.UpdateSubscriptionRequest(topic="t", name="s", policy=policy(dead_letter_topic="t"))
    request.update_mask.paths.append("dead_letter_topic")
    assert (await refused(wire.admin.UpdateSubscription(request))).reason == "NO_DEAD_LETTER_TOPIC"
    request.policy.dead_letter_topic = "dead"
    changed = (await within(wire.admin.UpdateSubscription(request))).subscription
    assert changed.effective_policy.dead_letter_topic == "dead"
    stream = await wire.subscribe("t")
    await wire.produce("t", b"x")
    await give_up(stream, 1)
    assert [each.dead_letter_topic for each in await letters_of(wire, "t")] == ["dead"]
    assert await wire.topic_names() == ["dead", "t"]


async def test_metrics_count_what_became_of_dead_letters(wire: Wire):
    stream = await wire.subscribe("t")
    await wire.produce("t", b"1", b"2", b"3")
    await give_up(stream, 3)
    first, *_ = letter_ids(await letters_of(wire, "t"))
    await requeue(wire, "t", entries=sets([first]))
    await purge(wire, "t", all=True)
    url = f"http://{wire.server.http_address}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        text = await response.text()
    for line in (
        'postdate_dead_lettered_messages_total{subscription="s",topic="t"} 3.0',
        f'postdate_requeued_messages_total{{subscription="{HOLDER}",topic="t~s~{HOLDER}"}} 1.0',
        f'postdate_purged_messages_total{{subscription="{HOLDER}",topic="t~s~{HOLDER}"}} 2.0',
    ):
        assert line in text


async def test_the_last_reason_is_kept_with_the_attempts_and_over_a_restart(serve: Serve, tmp_path, caplog):
    folder = str(tmp_path / "data")
    settings = {"data_dir": folder, "max_delivery_attempts": 3, "initial_backoff_ms": 1}
    caplog.set_level("INFO")
    wire = await serve(**settings)
    await wire.create_subscription("t")
    ids = await wire.produce("t", b"x", b"y")
    stream = await wire.subscribe("t")
    await stream.deliveries(2)
    assert await stream.nack(ids[:1], reason="boom 1", redeliver_after_ms=1) == []
    assert await stream.nack(ids[1:], reason="never seen again", redeliver_after_ms=1) == []
    await within(wire.stop())
    wire = await serve(**settings)
    stream = await wire.subscribe("t")
    await stream.deliveries(2)
    assert (
        await stream.nack(ids, redeliver_after_ms=1) == []
    )  # which gives no reason, and leaves the last one
    await stream.deliveries(2)
    assert await stream.nack(ids[1:], reason="boom 3") == []
    assert await stream.nack(ids[:1]) == []
    letters = await letters_of(wire, "t")
    assert {each.reason for each in letters} == {"max_delivery_attempts"}
    assert [each.last_reason for each in letters] == ["boom 3", "boom 1"]
    lines = [vars(each)["fields"] for each in caplog.records if "boom 3" in str(vars(each).get("fields"))]
    assert [each["reason"] for each in lines] == ["max_delivery_attempts"], "the last nack is told once"
    subscription = wire.broker.registry.topic("t").subscription("s")
    assert subscription.reasons.texts == {}


async def test_a_search_reads_many_letters_at_once_whatever_the_page_holds(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    stream = await wire.subscribe("t")
    await wire.produce("t", *[b"x"] * 20)
    await give_up(stream, 20)
    reads = []

    async def counted(log: Any, ledger_id: int, ids: Any, bytes_max: int) -> Any:
        reads.append(len(ids))
        return await read_marking_damage(log, ledger_id, ids, bytes_max)

    monkeypatch.setattr(dead_letter_list, "read_marking_damage", counted)
    nothing = schedule_pb2.TimeRange(start_ms=1, end_ms=2)
    for search in ({"reason": "of the moon"}, {"dead_letter_time": nothing}):
        assert await letters_of(wire, "t", page_size=1, **search) == []
        assert reads == [20]
        reads.clear()
    request = admin_pb2.ListDeadLettersRequest(topic="t", subscription="s", page_size=1)
    assert len((await within(wire.admin.ListDeadLetters(request))).dead_letters) == 1
    assert reads == [1, 1]


async def test_letters_are_searched_by_reason_and_time(
    timed: Wire, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
):
    await timed.create_subscription("t", policy=policy())
    ids = await timed.produce("t", *[b"x"] * 6)
    stream = await timed.subscribe("t", lease_ms=10 * HOUR_MS)
    assert ids_of(await stream.deliveries(6)) == ids
    for id_ in ids:
        reason = "Timeout of the bank" if id_ in ids[::2] else "no stock"
        assert await stream.nack([id_], dead_letter=True, reason=reason) == []
        ahead.step(HOUR_MS)
    letters = await letters_of(timed, "t")
    times = [each.dead_letter_time_ms for each in letters]
    assert times == sorted(times)

    async def found(page_size: int, **fields: Any) -> list[Id]:
        chosen = await letters_of(timed, "t", page_size=page_size, **fields)
        return [(each.original_id.ledger_id, each.original_id.entry_id) for each in chosen]

    def between(start_ms: int, end_ms: int) -> schedule_pb2.TimeRange:
        return schedule_pb2.TimeRange(start_ms=start_ms, end_ms=end_ms)

    for page_size, looked_max in ((1, 10_000), (2, 1), (100, 2), (100, 10_000)):
        monkeypatch.setattr(dead_letters, "LOOKED_MAX", looked_max)
        assert await found(page_size, reason="timeout") == ids[::2]
        assert await found(page_size, reason="of the moon") == []
        assert await found(page_size, dead_letter_time=between(times[1], times[4])) == ids[1:4]
        assert await found(page_size, reason="STOCK", dead_letter_time=between(times[2], 0)) == ids[3::2]
        assert await found(page_size, dead_letter_time=between(0, times[1])) == ids[:1]
