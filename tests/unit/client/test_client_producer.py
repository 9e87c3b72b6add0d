"""The producer: batches behind the scenes, one answer a caller, and what a broken connection means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import postdate
from postdate_api.v1.producer_pb2 import ProduceRequest
from tests.unit.client.fake_server import FakeBroker
from tests.unit.client.fake_values import status


async def test_send_returns_the_id_and_the_brokers_time(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.producer("t") as producer:
        receipt = await producer.send(b"x")
    assert receipt.id == (7, 0)
    assert receipt.publish_time.tzinfo is UTC


async def test_every_field_reaches_the_broker(broker: FakeBroker, client: postdate.Client) -> None:
    due = datetime(2030, 1, 1, tzinfo=UTC)
    fields: dict[str, Any] = {
        "key": "k",
        "properties": {"a": "b"},
        "schedule_key": "s",
        "ttl": timedelta(hours=1),
        "event_time": datetime(2029, 1, 1, tzinfo=UTC),
        "traceparent": "00-1",
    }
    async with client.producer("t") as producer:
        await producer.send(b"one", deliver_at=due, **fields)
        await producer.send_many([postdate.OutgoingMessage(b"one", deliver_at=due, **fields)])
        await producer.send(b"two", deliver_after=timedelta(hours=1))
        await producer.send_many([b"two"], deliver_after=timedelta(hours=1))
    one, same, two, like = [delivery.message for delivery in broker.topic("t").deliveries]
    assert one == same
    assert two == like
    assert (one.key, dict(one.properties), one.schedule_key, one.ttl_ms) == ("k", {"a": "b"}, "s", 3_600_000)
    assert (one.deliver_at_ms, one.event_time_ms, one.traceparent) == (1893456000000, 1861920000000, "00-1")
    assert two.deliver_after_ms == 3_600_000


async def test_concurrent_sends_share_a_batch_in_order(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.producer("t") as producer:
        receipts = await asyncio.gather(*(producer.send(b"%d" % number) for number in range(300)))
    assert broker.requests == [300]
    assert [receipt.id.entry_id for receipt in receipts] == list(range(300))
    assert broker.payloads("t") == [b"%d" % number for number in range(300)]


async def test_what_replaces_travels_in_requests_of_its_own(
    broker: FakeBroker, client: postdate.Client
) -> None:
    async with client.producer("t") as producer:
        replaces = (False, False, True, True, False)
        await asyncio.gather(
            *(producer.send(b"x", schedule_key=f"k{i}", replace=each) for i, each in enumerate(replaces))
        )
        assert broker.requests == [2, 2, 1]
        broker.requests.clear()
        await asyncio.gather(*(producer.send(b"x", schedule_key=key) for key in "abca"))
        assert broker.requests == [3, 1]  # the broker takes a key once in one


async def test_batches_keep_both_limits(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.producer("t", batch_messages_max=4) as producer:
        await asyncio.gather(*(producer.send(b"x") for _ in range(10)))
        await producer.send_many([b"x"] * 9)
    assert broker.requests == [4, 4, 2, 4, 4, 1]
    broker.requests.clear()
    async with client.producer("t", batch_bytes_max=1000) as producer:
        await asyncio.gather(*(producer.send(bytes(400)) for _ in range(4)), producer.send(bytes(5000)))
        receipts = await producer.send_many([bytes(400)] * 3)
    assert broker.requests == [2, 2, 1, 2, 1]
    assert len(receipts) == 3


async def test_messages_gather_while_a_batch_is_on_its_way(
    broker: FakeBroker, client: postdate.Client
) -> None:
    broker.knobs.hold_answers = asyncio.Event()
    async with client.producer("t", linger=timedelta(seconds=30)) as producer:
        first = asyncio.create_task(producer.send(b"first"))
        await broker.wait(lambda: len(broker.requests) == 1)
        others = [asyncio.create_task(producer.send(b"other")) for _ in range(5)]
        await asyncio.sleep(0)
        broker.knobs.hold_answers.set()
        await asyncio.gather(first, *others)
    assert broker.requests == [1, 5]


async def test_linger_bounds_the_wait(broker: FakeBroker, client: postdate.Client) -> None:
    broker.knobs.hold_answers = asyncio.Event()
    async with client.producer("t", linger=timedelta(milliseconds=1)) as producer:
        first = asyncio.create_task(producer.send(b"first"))
        await broker.wait(lambda: len(broker.requests) == 1)
        second = asyncio.create_task(producer.send(b"second"))
        await until(lambda: len(producer_in_flight(producer)) == 2)
        broker.knobs.hold_answers.set()
        await asyncio.gather(first, second)


async def until(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not predicate():
            await asyncio.sleep(0.001)


def producer_in_flight(producer: postdate.Producer) -> Any:
    assert producer._pipeline is not None
    return producer._pipeline._in_flight


async def test_no_more_than_the_window_is_in_flight(broker: FakeBroker, client: postdate.Client) -> None:
    broker.knobs.hold_answers = asyncio.Event()
    async with client.producer("t", in_flight_max=2) as producer:
        tasks = [asyncio.create_task(producer.send_many([b"x"])) for _ in range(6)]
        await broker.wait(lambda: len(broker.requests) == 1)
        assert len(producer_in_flight(producer)) <= 2
        broker.knobs.hold_answers.set()
        await asyncio.gather(*tasks)
    assert len(broker.payloads("t")) == 6


async def test_answers_in_one_message_settle_their_batches_in_order(
    broker: FakeBroker, client: postdate.Client
) -> None:
    broker.knobs.joined = 3
    broker.knobs.produce_errors.extend([status("RESOURCE_EXHAUSTED", "QUOTA", "full")])
    async with client.producer("t") as producer:
        lists = [[b"%d" % number, b"x"] for number in range(6)]
        receipts = await asyncio.gather(*map(producer.send_many, lists), return_exceptions=True)
    assert isinstance(receipts[0], postdate.LimitReached)
    stored = [each.ids() for each in receipts[1:] if isinstance(each, postdate.Receipts)]
    assert stored == [[(7, 2 * number), (7, 2 * number + 1)] for number in range(5)]
    assert broker.requests == [2] * 6


async def test_an_answer_too_many_in_a_message_is_a_fault_of_the_broker(
    broker: FakeBroker, client: postdate.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.knobs.joined = 2
    produce = broker._produce
    monkeypatch.setattr(
        broker,
        "_produce",
        lambda request: produce(ProduceRequest(topic="t", request_id=1, messages=request.messages)),
    )
    async with client.producer("t") as producer:
        first, second = await asyncio.gather(
            *map(producer.send_many, ([b"x"], [b"y"])), return_exceptions=True
        )
    assert isinstance(first, postdate.Receipts)
    assert isinstance(second, postdate.Internal)


@pytest.mark.parametrize("named", [True, False])
async def test_one_bad_message_does_not_fail_the_others(
    broker: FakeBroker, client: postdate.Client, named: bool
) -> None:
    broker.knobs.poison, broker.knobs.poison_named = b"bad", named
    payloads = [b"a", b"b", b"bad", b"c", b"d"]
    async with client.producer("t") as producer:
        results = await asyncio.gather(*map(producer.send, payloads), return_exceptions=True)
    assert [type(result) for result in results].count(postdate.Receipt) == 4
    assert isinstance(results[2], postdate.InvalidRequest)
    assert results[2].field == ("payload" if named else "")
    assert sorted(broker.payloads("t")) == [b"a", b"b", b"c", b"d"]


async def test_refused_list_is_refused_whole(broker: FakeBroker, client: postdate.Client) -> None:
    broker.knobs.poison = b"bad"
    async with client.producer("t") as producer:
        with pytest.raises(postdate.InvalidRequest) as caught:
            await producer.send_many([b"a", b"bad"])
        assert caught.value.field == "messages[1].payload"
        assert caught.value.reason == "POISON"
    assert broker.payloads("t") == []


async def test_long_list_says_how_much_was_stored(broker: FakeBroker, client: postdate.Client) -> None:
    broker.knobs.poison = b"bad"
    async with client.producer("t", batch_messages_max=2) as producer:
        with pytest.raises(postdate.PartlyStored) as caught:
            await producer.send_many([b"a", b"b", b"c", b"bad", b"d"])
    assert caught.value.stored_count == 3
    assert isinstance(caught.value.__cause__, postdate.InvalidRequest)
    assert caught.value.__cause__.field == "messages[3].payload"  # of the list, not of its batch


async def test_unavailable_is_tried_again_in_order(broker: FakeBroker, client: postdate.Client) -> None:
    busy = status("UNAVAILABLE", "RECOVERING", "soon", retry_ms=20)
    broker.knobs.produce_errors.extend([busy, busy, busy])
    async with client.producer("t", batch_messages_max=1) as producer:
        await asyncio.gather(*(producer.send(b"%d" % number) for number in range(3)))
    assert broker.payloads("t") == [b"0", b"1", b"2"]


async def test_limits_are_raised_with_the_brokers_advice(broker: FakeBroker, client: postdate.Client) -> None:
    broker.knobs.produce_errors.append(status("RESOURCE_EXHAUSTED", "DISK_FULL", "full", retry_ms=300))
    async with client.producer("t") as producer:
        with pytest.raises(postdate.LimitReached) as caught:
            await producer.send(b"x")
    assert caught.value.retry_after == timedelta(milliseconds=300)


async def test_lost_answer_is_an_unknown_outcome_and_is_not_repeated(
    broker: FakeBroker, client: postdate.Client
) -> None:
    broker.knobs.break_produce_after = 0
    async with client.producer("t") as producer:
        with pytest.raises(postdate.Disconnected):
            await producer.send(b"once")
        await producer.send(b"again")  # on a new connection
    assert broker.payloads("t") == [b"once", b"again"]
    assert broker.produce_streams == 2


async def test_what_never_left_waits_for_the_broker() -> None:
    fake = FakeBroker()
    address = await fake.start()
    await fake.stop()
    async with postdate.connect(address) as client, client.producer("t") as producer:
        sending = asyncio.create_task(producer.send(b"patient"))
        await asyncio.sleep(0.1)  # lets an attempt or two fail; the outcome does not depend on it
        assert not sending.done()
        await fake.start(fake.port)
        receipt = await sending
    assert receipt.id == (7, 0)
    await fake.stop()


async def test_broker_that_stays_away_is_unavailable() -> None:
    retry_for = timedelta(milliseconds=100)
    async with postdate.connect("127.0.0.1:1", retry_for=retry_for) as client:
        async with client.producer("t") as producer:
            with pytest.raises(postdate.Unavailable, match="nothing was sent"):
                await producer.send(b"x")
        with pytest.raises(postdate.Unavailable):
            await client.stats()


async def test_arguments_that_make_no_sense_are_refused_before_anything_is_sent(
    broker: FakeBroker, client: postdate.Client
) -> None:
    soon, text = timedelta(1), "text"
    wrong: Any = text
    async with client.producer("t") as producer:
        good = asyncio.create_task(producer.send(b"good"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="not both"):
            await producer.send(b"x", deliver_at=datetime.now(UTC), deliver_after=soon)
        with pytest.raises(ValueError, match="time zone"):
            await producer.send(b"x", deliver_at=datetime(2030, 1, 1))
        with pytest.raises(ValueError, match="negative"):
            await producer.send(b"x", deliver_after=-soon)
        with pytest.raises(TypeError):
            await producer.send(wrong)
        with pytest.raises(TypeError):
            await producer.send_many([wrong])
        await good
    assert broker.payloads("t") == [b"good"]


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"deliver_after": timedelta.max}, ValueError, "deliver_after is too long"),
    ({"ttl": timedelta.max}, ValueError, "ttl is too long"),
    ({"ttl": timedelta(0)}, ValueError, "ttl must be greater than zero"),
    ({"properties": {"a": 1}}, TypeError, r"properties\['a'\] must be a str, not int"),
    ({"properties": {1: "a"}}, TypeError, "a name in properties, 1, must be a str, not int"),
    ({"properties": {"a": "\ud800"}}, ValueError, r"properties\['a'\] cannot be sent as UTF-8"),
    ({"properties": [("a", "b")]}, TypeError, "properties must be a mapping of str to str, not list"),
    ({"properties": 5}, TypeError, "properties must be a mapping of str to str, not int"),
    ({"key": 5}, TypeError, "key must be a str, not int"),
    ({"key": "\ud800"}, ValueError, "key cannot be sent as UTF-8"),
    ({"schedule_key": 5}, TypeError, "schedule_key must be a str, not int"),
    ({"traceparent": 5}, TypeError, "traceparent must be a str, not int"),
]


@pytest.mark.parametrize(("fields", "kind", "told"), BAD_ARGUMENTS)
async def test_bad_argument_is_named(
    broker: FakeBroker, client: postdate.Client, fields: dict[str, Any], kind: type[Exception], told: str
) -> None:
    async with client.producer("t") as producer:
        with pytest.raises(kind, match=told):
            await producer.send(b"x", **fields)
        with pytest.raises(kind, match=told):
            await producer.send_many([postdate.OutgoingMessage(b"x", **fields)])
    assert broker.requests == []


async def test_empty_list_sends_nothing(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.producer("t") as producer:
        assert len(await producer.send_many([])) == 0
    assert broker.requests == []


async def test_close_waits_for_what_was_sent(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.producer("t", linger=timedelta(seconds=30)) as producer:
        sending = [asyncio.create_task(producer.send(b"x")) for _ in range(10)]
        await asyncio.sleep(0)
    assert all(task.done() for task in sending)
    assert len(broker.payloads("t")) == 10
    with pytest.raises(postdate.Closed):
        await producer.send(b"late")


async def test_cancelled_block_does_not_wait_for_the_broker(
    broker: FakeBroker, client: postdate.Client
) -> None:
    broker.knobs.hold_answers = asyncio.Event()

    async def work() -> None:
        async with client.producer("t") as producer:
            await producer.send(b"x")

    task = asyncio.create_task(work())
    await broker.wait(lambda: bool(broker.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    broker.knobs.hold_answers.set()


async def test_abandoned_send_is_withdrawn_while_it_has_not_left() -> None:
    fake = FakeBroker()
    address = await fake.start()
    await fake.stop()
    async with postdate.connect(address) as client, client.producer("t") as producer:
        sending = asyncio.create_task(producer.send(b"withdrawn"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sending.cancel()
        await fake.start(fake.port)
        await producer.send(b"kept")
    assert fake.payloads("t") == [b"kept"]
    await fake.stop()


async def test_producer_outside_its_block_is_a_mistake(client: postdate.Client) -> None:
    with pytest.raises(RuntimeError, match="is used before `with"):
        await client.producer("t").send(b"x")
    with pytest.raises(RuntimeError, match="is used before `with"):
        await postdate.connect("127.0.0.1:1").stats()
