"""Seek, skip, pause and resume, dead letters: what is asked for, and what consumers notice."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest

import postdate
from postdate_api.v1 import consumer_pb2, message_pb2
from tests.unit.client.fake_server import DEAD_LETTERS, FakeBroker
from tests.unit.client.fake_values import status

EARLIEST, LATEST = postdate.InitialPosition.EARLIEST, postdate.InitialPosition.LATEST


async def produced(client: postdate.Client, count: int) -> list[postdate.MessageId]:
    async with client.producer("t") as producer:
        receipts = await producer.send_many([b"%d" % number for number in range(count)])
    await client.subscriptions.create("t", "s")
    return receipts.ids()


async def test_seek_goes_to_a_message_a_time_or_an_end(broker: FakeBroker, client: postdate.Client) -> None:
    await produced(client, 3)
    when = datetime(2020, 1, 1, tzinfo=UTC)
    targets: list[tuple[Any, str, Any]] = [
        (postdate.MessageId(7, 2), "id", 2),
        (when, "publish_time_ms", 0),
        (EARLIEST, "initial_position", 0),
        (LATEST, "initial_position", 3),
    ]
    for to, kind, entry_id in targets:
        assert await client.subscriptions.seek("t", "s", to) == (7, entry_id)
        assert broker.unary[-1].WhichOneof("target") == kind
        assert broker.unary[-1].request_id
    assert broker.unary[2].publish_time_ms == 1_577_836_800_000
    with pytest.raises(ValueError, match="no time zone"):
        await client.subscriptions.seek("t", "s", datetime(2020, 1, 1))
    with pytest.raises(postdate.NotFound):
        await client.subscriptions.seek("t", "nope", EARLIEST)


async def test_consumer_comes_back_after_a_seek_and_gets_what_it_says(
    broker: FakeBroker, client: postdate.Client
) -> None:
    ids = await produced(client, 10)
    async with client.subscribe("t", "s", permits=4) as subscription:
        for _ in range(10):
            await (await anext(subscription)).ack()
        await client.subscriptions.seek("t", "s", ids[6])
        again = [await anext(subscription) for _ in range(4)]
        assert [message.id for message in again] == ids[6:]
        await subscription.ack_many(again)
        assert await subscription.receive_many(timeout=timedelta(milliseconds=50)) == []
    assert len(broker.opens) == 2


async def test_what_nobody_took_before_a_skip_is_not_handed_out_after_it(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await produced(client, 5)
    broker.knobs.hold_end = asyncio.Event()
    async with client.subscribe("t", "s") as subscription:
        first = await anext(subscription)
        assert len(subscription._stream.held.ready) == 4
        assert await client.subscriptions.skip_all("t", "s") == 5
        async with asyncio.timeout(5):
            while (
                subscription._stream.held.ready
            ):  # until the client has heard of it; the stream is still there
                await asyncio.sleep(0)
        assert await subscription.receive_many(timeout=timedelta(milliseconds=50)) == []
        broker.knobs.hold_end.set()
        await broker.wait(lambda: len(broker.opens) == 2)
        await first.ack()
        async with client.producer("t") as producer:
            await producer.send(b"after")
        assert (await anext(subscription)).payload == b"after"


async def test_batch_behind_draining_is_not_handed_out(broker: FakeBroker, client: postdate.Client) -> None:
    await client.subscriptions.create("t", "s")
    broker.knobs.hold_end = asyncio.Event()
    async with client.subscribe("t", "s") as subscription:
        (stream,) = broker.streams
        late = consumer_pb2.SubscribeResponse(batch=consumer_pb2.Batch())
        late.batch.deliveries.add(message={"payload": b"late"}, delivery_attempt=1)
        draining = consumer_pb2.SubscribeResponse(draining=consumer_pb2.Draining(grace_ms=1000))
        for frame in (draining, late, None):
            stream.put_nowait(frame)
        assert await subscription.receive_many(timeout=timedelta(milliseconds=50)) == []
        broker.knobs.hold_end.set()
        async with client.producer("t") as producer:
            await producer.send(b"next")
        assert (await anext(subscription)).payload == b"next"
    assert len(broker.opens) == 2


async def test_nack_that_comes_after_a_seek_fails_nobody(broker: FakeBroker, client: postdate.Client) -> None:
    ids = await produced(client, 1)
    async with client.subscribe("t", "s", permits=1) as subscription:
        message = await anext(subscription)
        broker.knobs.fail_ids[0] = status("FAILED_PRECONDITION", "LEASE_LOST", "not yours any more")
        with pytest.raises(KeyError):
            async with message.processing():
                await client.subscriptions.seek("t", "s", ids[0])
                assert (await anext(subscription)).id == ids[0]
                raise KeyError
        await broker.wait(lambda: any(frame.HasField("nack") for frame in broker.frames))
        await subscription.wait_confirmed()  # and neither does this raise


async def test_ack_of_what_was_skipped_meanwhile_fails_nobody(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await produced(client, 3)
    gone = status("NOT_FOUND", "NOT_FOUND", "it lies before the start of the subscription")
    broker.knobs.fail_ids |= {0: gone, 1: gone}
    async with client.subscribe("t", "s") as subscription:
        one, two, three = [await anext(subscription) for _ in range(3)]
        async with one.processing():
            await client.subscriptions.skip_all("t", "s")
        subscription.ack_nowait(two)
        await subscription.wait_confirmed()
        broker.knobs.fail_ids[2] = gone
        with pytest.raises(postdate.NotFound):
            await three.nack()
    await client.subscriptions.seek("t", "s", EARLIEST)
    pulled = await client.receive("t", "s", max_messages=3)
    await pulled.ack()


async def test_error_that_is_no_utf8_does_not_stop_the_consumer(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await produced(client, 1)
    async with client.subscribe("t", "s") as subscription:
        message = await anext(subscription)
        with pytest.raises(OSError, match="cannot read"):
            async with message.processing():
                raise OSError("cannot read b\udcff")
        again = await anext(subscription)
        await again.ack()
        with pytest.raises(UnicodeEncodeError):
            await again.nack(reason="\udcff")
    assert [frame.nack.reason for frame in broker.frames if frame.HasField("nack")] == [
        "OSError: cannot read b?"
    ]


async def test_paused_subscription_says_so_and_delivers_when_it_is_resumed(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await produced(client, 1)
    assert (await client.subscriptions.pause("t", "s")).paused
    assert (await client.stats("t"))[0].subscriptions[0].paused
    async with client.subscribe("t", "s") as subscription:
        assert await subscription.receive_many(timeout=timedelta(milliseconds=50)) == []
        assert not (await client.subscriptions.resume("t", "s")).paused
        await (await anext(subscription)).ack()


async def dead(client: postdate.Client, count: int) -> list[postdate.DeadLetter]:
    await produced(client, count)
    async with client.subscribe("t", "s") as subscription:
        for message in await subscription.receive_many(count):
            await message.nack(dead_letter=True, reason="no use")
    return [letter async for letter in client.dead_letters.list("t", "s")]


async def test_dead_letters_are_listed_page_by_page(broker: FakeBroker, client: postdate.Client) -> None:
    letters = await dead(client, 5)
    assert [letter.id for letter in letters] == [(8, entry_id) for entry_id in range(5)]
    assert [request.page_token for request in broker.unary[-3:]] == ["", "2", "4"]
    first = letters[0]
    assert (first.original_id, first.dead_letter_topic, first.attempts) == ((7, 0), DEAD_LETTERS, 3)
    assert (first.reason, first.key, first.properties, first.payload) == ("no use", "k", {"a": "b"}, None)
    assert (first.payload_bytes, first.time.tzinfo) == (8, UTC)
    full = [letter async for letter in client.dead_letters.list("t", "s", payloads=True)]
    assert full[0].payload == b"given up"
    assert (await client.stats("t"))[0].subscriptions[0].dead_letter_messages == 5


async def test_what_is_owed_is_listed_page_by_page(broker: FakeBroker, client: postdate.Client) -> None:
    times: dict[str, int] = {"publish_time_ms": 1_700_000_000_000, "deliver_at_ms": 1_700_000_001_000}
    broker.owed = [
        consumer_pb2.OwedMessage(id=message_pb2.MessageId(ledger_id=7, entry_id=at), state=state, **times)  # type: ignore[arg-type]
        for at, state in enumerate((1, 2, 3))
    ]
    broker.owed[1].MergeFrom(consumer_pb2.OwedMessage(consumer_name="w", lease_end_ms=1_700_000_002_000))
    broker.owed[2].MergeFrom(
        consumer_pb2.OwedMessage(attempts=2, last_reason="no stock", next_attempt_ms=1_700_000_003_000)
    )
    states = (postdate.OwedState.LEASED, postdate.OwedState.RETRYING)
    ready, leased, retrying = [each async for each in client.subscriptions.owed("t", "s", *states)]
    assert [list(request.states) for request in broker.unary] == [[2, 3], [2, 3]]
    assert [each.state.name for each in (ready, leased, retrying)] == ["READY", "LEASED", "RETRYING"]
    assert (ready.id, ready.lease_end, ready.next_attempt, ready.payload) == ((7, 0), None, None, None)
    assert (leased.consumer_name, leased.lease_end) == ("w", ready.publish_time + timedelta(seconds=2))
    assert (retrying.attempts, retrying.last_reason) == (2, "no stock")
    assert retrying.next_attempt == ready.publish_time + timedelta(seconds=3)
    assert len([each async for each in client.subscriptions.owed("t", "s", limit=1, payloads=True)]) == 1


async def test_search_for_dead_letters_names_a_reason_and_times(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await dead(client, 1)
    start = datetime(2026, 11, 27, tzinfo=UTC)
    async for _ in client.dead_letters.list("t", "s", reason="stock", start=start):
        pass
    asked = broker.unary[-1]
    assert (asked.reason, asked.dead_letter_time.end_ms) == ("stock", 0)
    assert asked.dead_letter_time.start_ms == start.timestamp() * 1000


async def test_iteration_that_ends_early_asks_for_no_more(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await dead(client, 5)
    broker.unary.clear()
    async for _ in client.dead_letters.list("t", "s"):
        break
    assert len(broker.unary) == 1


async def test_change_is_not_repeated_where_it_may_have_happened(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await produced(client, 3)
    for call in (
        lambda: client.subscriptions.skip_all("t", "s"),
        lambda: client.subscriptions.seek("t", "s", LATEST),
        lambda: client.dead_letters.requeue("t", "s", all=True),
        lambda: client.dead_letters.purge("t", "s", all=True),
        lambda: client.topics.create("new"),
        lambda: client.topics.update("new", max_produce_rate=7),
        lambda: client.subscriptions.create("new", "s"),
        lambda: client.subscriptions.update("new", "s", max_delivery_attempts=7),
        lambda: client.subscriptions.pause("new", "s"),
        lambda: client.subscriptions.resume("new", "s"),
        client.backups.create,
    ):
        asked = len(broker.unary)
        broker.knobs.change_status = grpc.StatusCode.UNAVAILABLE
        with pytest.raises(postdate.Disconnected, match="may have happened or not"):
            await call()
        assert len(broker.unary) == asked + 1


async def test_dead_letters_are_requeued_and_purged(broker: FakeBroker, client: postdate.Client) -> None:
    letters = await dead(client, 4)
    unknown = postdate.MessageId(9, 9)
    changed = await client.dead_letters.requeue(
        "t", "s", [letters[1].id, unknown, letters[1].id], deliver_after=timedelta(hours=1)
    )
    assert changed.count == 1
    assert isinstance(changed.failures[unknown], postdate.NotFound)
    assert (
        broker.topic("t").deliveries[-1].deliver_at_ms
        > 3_500_000 + broker.topic("t").deliveries[0].deliver_at_ms
    )
    assert await client.dead_letters.purge("t", "s", [letters[0].id]) == postdate.DeadLetterChange(1)
    assert (await client.dead_letters.purge("t", "s", all=True)).count == 2
    assert broker.unary[-1].all and not broker.unary[-1].entries
    assert [letter async for letter in client.dead_letters.list("t", "s")] == []


async def test_neither_ids_nor_all_is_a_mistake(broker: FakeBroker, client: postdate.Client) -> None:
    some = postdate.MessageId(1, 1)
    for arguments in ({}, {"ids": [some], "all": True}):
        wrong: Any = arguments
        with pytest.raises(ValueError, match="one of the two"):
            await client.dead_letters.requeue("t", "s", **wrong)
        with pytest.raises(ValueError, match="one of the two"):
            await client.dead_letters.purge("t", "s", **wrong)
    assert broker.unary == []


@pytest.mark.slow
async def test_very_many_ids_go_in_several_requests(broker: FakeBroker, client: postdate.Client) -> None:
    await client.subscriptions.create("t", "s")
    ids = [postdate.MessageId(8, entry_id) for entry_id in range(10_001)]
    changed = await client.dead_letters.purge("t", "s", ids)
    assert (changed.count, len(changed.failures)) == (0, 10_001)
    assert [len(request.entries[0].entry_ids) for request in broker.unary[1:]] == [10_000, 1]
    assert len({request.request_id for request in broker.unary[1:]}) == 2


async def test_repeat_after_a_broken_call_is_the_same_request(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await dead(client, 2)
    broker.unary.clear()
    broker.knobs.unary_errors.append(status("UNAVAILABLE", "RECOVERING", "soon", retry_ms=5))
    assert (await client.dead_letters.requeue("t", "s", all=True)).count == 2
    assert len(broker.unary) == 2
    assert len({request.request_id for request in broker.unary}) == 1


async def test_dead_letter_has_no_delay(broker: FakeBroker, client: postdate.Client) -> None:
    await produced(client, 1)
    async with client.subscribe("t", "s") as subscription:
        message = await anext(subscription)
        with pytest.raises(ValueError, match="delay or dead_letter"):
            await message.nack(timedelta(1), dead_letter=True)
        await message.ack()
