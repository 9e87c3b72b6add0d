"""A producer with a name: numbers that rise, repeats under the same numbers, and what is not repeated."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import postdate
from postdate._numbering import Numbering
from tests.unit.client.fake_server import FakeBroker
from tests.unit.client.fake_values import status


def numbers(broker: FakeBroker) -> list[int]:
    return [delivery.message.sequence_id for delivery in broker.topic("t").deliveries]


async def test_numbers_rise_by_themselves_over_all_ways_to_send(
    broker: FakeBroker, client: postdate.Client
) -> None:
    async with client.producer("t", producer_name="p") as producer:
        await asyncio.gather(*(producer.send(b"x") for _ in range(5)))
        await producer.send_many([b"x", postdate.OutgoingMessage(b"x")])
        await producer.send(b"x")
    first = numbers(broker)
    assert first == list(range(first[0], first[0] + 8))
    async with client.producer("t", producer_name="p") as producer:
        await producer.send(b"x")
    assert numbers(broker)[-1] > first[-1]
    assert set(broker.topic("t").sequences) == {"p"}


async def test_nameless_producer_sends_no_numbers(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.producer("t") as producer:
        await producer.send(b"x")
        await producer.send_many([b"x", postdate.OutgoingMessage(b"x")])
    assert numbers(broker) == [0, 0, 0]


async def test_callers_own_number_finds_the_original(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.producer("t", producer_name="p") as producer:
        first = await producer.send(b"x", sequence_id=5)
        many = await producer.send_many(
            [postdate.OutgoingMessage(b"y", sequence_id=number) for number in (4, 5, 6)]
        )
    async with client.producer("t", producer_name="p") as producer:
        again = await producer.send(b"x", sequence_id=5)
    assert (first.duplicate, again.duplicate, again.id) == (False, True, first.id)
    assert [receipt.duplicate for receipt in many] == [False, True, False]
    assert many.ids() == [(7, 1), (7, 0), (7, 2)]
    assert len(broker.payloads("t")) == 3


async def test_number_that_does_not_rise_goes_in_a_batch_of_its_own(
    broker: FakeBroker, client: postdate.Client
) -> None:
    async with client.producer("t", producer_name="p") as producer:
        receipts = await asyncio.gather(
            *(producer.send(b"%d" % number, sequence_id=number) for number in (1, 2, 2, 1, 3))
        )
    assert broker.requests == [2, 1, 2]
    assert [receipt.duplicate for receipt in receipts] == [False, False, True, True, False]


@pytest.mark.parametrize("name", ["p", None])
async def test_numbers_that_make_no_sense_are_refused_before_anything_is_sent(
    broker: FakeBroker, client: postdate.Client, name: str | None
) -> None:
    wrong: Any = "7"
    async with client.producer("t", producer_name=name) as producer:
        if name is None:
            with pytest.raises(ValueError, match="producer_name"):
                await producer.send(b"x", sequence_id=1)
            with pytest.raises(ValueError, match="producer_name"):
                await producer.send_many([postdate.OutgoingMessage(b"x", sequence_id=1)])
            return
        for number in (0, -1, 2**64):
            with pytest.raises(ValueError, match="between 1"):
                await producer.send(b"x", sequence_id=number)
        with pytest.raises(TypeError, match="must be an int, not str"):
            await producer.send(b"x", sequence_id=wrong)
        with pytest.raises(ValueError, match="or none"):
            await producer.send(b"x")
        with pytest.raises(ValueError, match="or none"):
            await producer.send_many([b"x"])
    assert broker.requests == []


def test_own_numbers_begin_at_the_clock() -> None:
    numbering = Numbering(1_000)
    assert [numbering.number(None), numbering.number(None)] == [1_001, 1_002]
    with pytest.raises(ValueError, match="or none"):
        numbering.number(5)


@pytest.mark.parametrize("stored", [True, False])
async def test_lost_answer_is_asked_for_again_and_stored_once(
    broker: FakeBroker, client: postdate.Client, stored: bool
) -> None:
    broker.knobs.break_produce_after = 0
    broker.knobs.break_produce_stored = stored
    async with client.producer("t", producer_name="p") as producer:
        one, two = await asyncio.gather(producer.send(b"one"), producer.send_many([b"two"]))
        assert (one.duplicate, two[0].duplicate) == (stored, False)
    assert broker.payloads("t") == [b"one", b"two"]
    assert broker.produce_streams == 2


async def test_all_that_was_in_flight_is_sent_again_in_its_order(
    broker: FakeBroker, client: postdate.Client
) -> None:
    broker.knobs.break_produce_after = 1
    broker.knobs.hold_answers = asyncio.Event()
    async with client.producer("t", producer_name="p", batch_messages_max=1) as producer:
        sending = [asyncio.create_task(producer.send(b"%d" % number)) for number in range(5)]
        await broker.wait(lambda: bool(broker.requests))
        broker.knobs.hold_answers.set()
        receipts = await asyncio.gather(*sending)
    assert broker.payloads("t") == [b"%d" % number for number in range(5)]
    assert [receipt.id.entry_id for receipt in receipts] == list(range(5))


async def test_topic_that_knows_no_repeats_is_sent_none(broker: FakeBroker, client: postdate.Client) -> None:
    await client.topics.create("t", postdate.TopicPolicy(dedup_window=timedelta(0)))
    broker.knobs.break_produce_after = 0
    async with client.producer("t", producer_name="p") as producer:
        with pytest.raises(postdate.Disconnected, match="does not remember sequence ids"):
            await producer.send(b"once")
        await producer.send(b"again")
    assert broker.payloads("t") == [b"once", b"again"]


@pytest.mark.parametrize(
    "refusal",
    [
        status("FAILED_PRECONDITION", "SEQUENCE_TOO_OLD", "forgotten", field="messages[0].sequence_id"),
        status("UNAVAILABLE", "RECOVERING", "in an hour", retry_ms=3_600_000),
    ],
    ids=["forgotten", "away"],
)
async def test_repeat_that_finds_no_answer_is_an_unknown_outcome(broker: FakeBroker, refusal: Any) -> None:
    broker.knobs.break_produce_after = 0
    retry_for = timedelta(seconds=10)
    async with (
        postdate.connect(f"127.0.0.1:{broker.port}", retry_for=retry_for) as client,
        client.producer("t", producer_name="p") as producer,
    ):
        sending = asyncio.create_task(producer.send(b"x"))
        await broker.wait(lambda: bool(broker.payloads("t")))
        broker.knobs.produce_errors.append(refusal)
        with pytest.raises(postdate.Disconnected) as caught:
            await sending
    assert caught.value.reason in {"SEQUENCE_TOO_OLD", "RECOVERING"}


async def test_repeat_to_a_broker_that_stays_away_is_an_unknown_outcome() -> None:
    broker = FakeBroker()
    address = await broker.start()
    async with (
        postdate.connect(address, retry_for=timedelta(milliseconds=100)) as client,
        client.producer("t", producer_name="p") as producer,
    ):
        broker.knobs.hold_answers = asyncio.Event()
        sending = asyncio.create_task(producer.send(b"x"))
        await broker.wait(lambda: bool(broker.requests))
        await broker.stop()
        with pytest.raises(postdate.Disconnected, match="before the answer came"):
            await sending


async def test_first_refusal_of_an_old_number_is_told_as_it_is(
    broker: FakeBroker, client: postdate.Client
) -> None:
    old = status("FAILED_PRECONDITION", "SEQUENCE_TOO_OLD", "forgotten", field="messages[0].sequence_id")
    broker.knobs.produce_errors.append(old)
    async with client.producer("t", producer_name="p") as producer:
        with pytest.raises(postdate.FailedPrecondition) as caught:
            await producer.send(b"x", sequence_id=1)
    assert (caught.value.reason, caught.value.field) == ("SEQUENCE_TOO_OLD", "sequence_id")


@pytest.mark.slow
async def test_no_more_is_in_flight_than_the_broker_remembers(
    broker: FakeBroker, client: postdate.Client
) -> None:
    broker.knobs.hold_answers = asyncio.Event()
    async with client.producer("t", producer_name="p", batch_messages_max=4_000) as producer:
        sending = asyncio.create_task(producer.send_many([b"x"] * 12_000))
        await broker.wait(lambda: bool(broker.requests))
        await asyncio.sleep(0.05)  # in which a third batch would leave
        assert producer._pipeline is not None
        assert [batch.count for batch in producer._pipeline._in_flight] == [4_000, 4_000]
        broker.knobs.hold_answers.set()
        assert len(await sending) == 12_000
