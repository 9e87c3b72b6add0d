"""Schedule keys over the wire: refusals name message and holder, and a message that replaces is the only one left."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

import postdate
from postdate_api.v1 import producer_pb2
from tests.wire.conftest import Ahead, Message, Refusal, Serve, Wire, batch, eventually, refused, within
from tests.wire.test_reclaim import metric

LATER_MS = 600_000


def keyed(key: str, payload: bytes = b"x", after_ms: int = LATER_MS) -> Message:
    return Message(payload=payload, schedule_key=key, deliver_after_ms=after_ms)


async def test_a_taken_key_is_refused_with_its_holder(wire: Wire) -> None:
    ids = await wire.produce("t", keyed("a"), keyed("b"))
    refusal = await refused(wire.producer.Produce(batch("t", keyed("c"), keyed("b"))))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "SCHEDULE_KEY_TAKEN")
    assert refusal.fields == ("messages[1].schedule_key",)
    named = refusal.metadata["ledger_id"], refusal.metadata["entry_id"]
    assert named == (str(ids[1][0]), str(ids[1][1])) and int(refusal.metadata["deliver_at_ms"]) > 0
    await wire.produce("t", keyed("c"))  # nothing of that batch was stored


async def test_replace_leaves_one_message(wire: Wire) -> None:
    stream = await wire.subscribe("t")
    await wire.produce("t", keyed("a", b"old", 700))
    await wire.produce("t", keyed("a", b"new", 400), replace=True)
    assert [each.message.payload for each in await stream.deliveries(1)] == [b"new"]
    await stream.stays_quiet(0.6)


async def test_on_a_stream_a_refusal_leaves_the_others_alone(wire: Wire) -> None:
    requests = [
        batch("t", keyed("a"), request_id=1),
        batch("t", keyed("a"), request_id=2),
        batch("t", Message(payload=b"plain"), request_id=3),
        batch("t", keyed("a"), request_id=4, replace=True),
    ]
    call = wire.producer.ProduceStream()
    for request in requests:
        await within(call.write(request))
    answers: list[producer_pb2.ProduceResponse] = [await within(call.read()) for _ in requests]
    await call.done_writing()
    assert [each.request_id for each in answers] == [1, 2, 3, 4]
    assert [each.HasField("error") for each in answers] == [False, True, False, False]
    assert Refusal.of(answers[1].error).reason == "SCHEDULE_KEY_TAKEN"


async def test_keys_outlive_a_restart(serve: Serve, tmp_path: Path) -> None:
    data_dir = str(tmp_path / "data")
    wire = await serve(data_dir=data_dir)
    await wire.produce("t", keyed("a"), keyed("b"))
    await wire.stop()
    wire = await serve(data_dir=data_dir)
    assert (await refused(wire.producer.Produce(batch("t", keyed("b"))))).reason == "SCHEDULE_KEY_TAKEN"
    await wire.produce("t", keyed("b"), replace=True)


async def test_the_sdk_tells_each_sender_of_its_own_key(wire: Wire) -> None:
    later = timedelta(minutes=10)
    async with (
        postdate.connect(wire.server.grpc_address) as client,
        client.producer("t", linger=timedelta(milliseconds=50)) as producer,
    ):
        first = await producer.send(b"1", schedule_key="a", deliver_after=later)
        sends = [
            producer.send(b"2", schedule_key="a", deliver_after=later),
            producer.send(b"3", schedule_key="c", deliver_after=later),
            producer.send(b"4", schedule_key="a", deliver_after=later, replace=True),
            producer.send(b"5", schedule_key="b", deliver_after=later, replace=True),
            producer.send(b"6"),
        ]
        results = await within(asyncio.gather(*sends, return_exceptions=True))
        assert isinstance(results[0], postdate.AlreadyExists) and results[0].field == "schedule_key"
        assert [isinstance(each, postdate.Receipt) for each in results[1:]] == [True] * 4
        with pytest.raises(postdate.AlreadyExists):
            await producer.send_many([postdate.OutgoingMessage(b"7", schedule_key="a", deliver_after=later)])
        receipts = await producer.send_many(
            [postdate.OutgoingMessage(b"8", schedule_key="a", deliver_after=later)], replace=True
        )
        assert receipts[0].id > first.id


async def test_the_sdk_sends_a_key_twice_in_two_batches(wire: Wire) -> None:
    async with (
        postdate.connect(wire.server.grpc_address) as client,
        client.producer("t", linger=timedelta(milliseconds=50)) as producer,
    ):
        later = timedelta(minutes=10)
        sends = [producer.send(b"x", schedule_key="a", deliver_after=later, replace=True) for _ in range(5)]
        receipts = await within(asyncio.gather(*sends))
        assert len({receipt.id for receipt in receipts}) == 5


async def test_a_key_is_remembered_when_its_message_is_gone(
    serve: Serve, ahead: Ahead, tmp_path: Path
) -> None:
    """The SDK is told what became of the message, over a restart, and for as long as the settings say."""
    settings = {
        "data_dir": str(tmp_path / "data"),
        "ledger_max_entries": 1,
        "reclaim_interval_ms": 20,
        "checkpoint_interval_ms": 20,
        "seal_after_ms": 1_000,
        "clock_recheck_ms": 20,
    }
    result = postdate.ChangeResult
    wire = await serve(**settings)
    async with (
        postdate.connect(wire.server.grpc_address) as client,
        client.subscribe("t", "s") as subscription,
        client.producer("t") as producer,
    ):
        soon, later = timedelta(milliseconds=100), timedelta(hours=1)
        paid = await producer.send(b"x", schedule_key="delivered", deliver_after=soon)
        void = await producer.send(b"x", schedule_key="cancelled", deliver_after=later)
        again = await producer.send(b"x", schedule_key="waits", deliver_after=48 * later)
        assert (await client.schedule.cancel("t", schedule_key="cancelled")).done
        message = await within(anext(subscription))
        await message.ack()
        await eventually(lambda: wire.broker.counters.removed_ledgers == 2)
    await wire.stop()

    wire = await serve(**settings)
    ended = [
        ("delivered", result.ALREADY_DELIVERED, paid.id),
        ("cancelled", result.ALREADY_CANCELLED, void.id),
    ]
    async with postdate.connect(wire.server.grpc_address) as client:
        for key, expected, message_id in ended:
            for outcome in (
                await client.schedule.cancel("t", schedule_key=key),
                await client.schedule.move("t", schedule_key=key, deliver_after=later),
            ):
                assert (outcome.result, outcome.id, outcome.delivered_to) == (expected, message_id, ())
        never = await client.schedule.cancel("t", schedule_key="never")
        assert (never.result, never.id) == (result.NOT_FOUND, None)
        assert await metric(wire, 'postdate_settled_schedule_keys{topic="t"}') >= 2
        ahead.step(31 * 3_600_000)  # a day, and a fourth of it
        for key, _, _ in ended:
            outcome = await client.schedule.cancel("t", schedule_key=key)
            assert (outcome.result, outcome.id) == (result.NOT_FOUND, None)
        assert (await client.schedule.cancel("t", schedule_key="waits")).id == again.id
