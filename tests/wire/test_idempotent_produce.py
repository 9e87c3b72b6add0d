"""Sequence ids: a repeat is answered with the ids of the first and stored once, whatever happened in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from postdate_api.v1 import admin_pb2, producer_pb2
from tests.wire.conftest import Message, Refusal, Serve, Stream, Wire, batch, now_ms, refused, within

Answer = producer_pb2.ProduceResponse


def asked(
    *sequence_ids: int, topic: str = "t", producer: str = "p", **fields: Any
) -> producer_pb2.ProduceRequest:
    messages = [Message(payload=f"{producer}/{each}".encode(), sequence_id=each) for each in sequence_ids]
    return batch(topic, *messages, producer_name=producer, **fields)


async def send(wire: Wire, *sequence_ids: int, **fields: Any) -> Answer:
    answer: Answer = await within(wire.producer.Produce(asked(*sequence_ids, **fields)))
    return answer


def ranges(answer: Answer) -> list[tuple[int, int, bool]]:
    """First entry, count and whether it is a repeat, of each range of an answer from one ledger."""
    return [(each.first_entry_id, each.count, each.duplicate) for each in answer.ids]


async def payloads(wire: Wire, count: int, topic: str = "t") -> list[bytes]:
    """Return a consumer's payloads: so many, and no more."""
    stream = await wire.subscribe(topic)
    found = [each.message.payload for each in await stream.deliveries(count)]
    await stream.stays_quiet()
    return sorted(found)


def sent(*sequence_ids: int, producer: str = "p") -> list[bytes]:
    return sorted(f"{producer}/{each}".encode() for each in sequence_ids)


async def policy(wire: Wire, topic: str = "t", **fields: Any) -> None:
    """Set what is given of a topic that there is, or make one with it."""
    request = admin_pb2.TopicPolicy(**fields)
    if topic in await wire.topic_names():
        mask = FieldMask(paths=list(fields))
        await within(
            wire.admin.UpdateTopic(admin_pb2.UpdateTopicRequest(name=topic, policy=request, update_mask=mask))
        )
    else:
        await within(wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name=topic, policy=request)))


# -- repeats -----------------------------------------------------------------------------------------------------------


async def test_a_repeat_is_answered_with_the_first_ids_and_time_and_stored_once(wire: Wire):
    first = await send(wire, 1, 2, 3, request_id=7)
    assert ranges(first) == [(0, 3, False)]
    again = await send(wire, 1, 2, 3, request_id=8)
    assert ranges(again) == [(0, 3, True)]
    assert again.ids[0].ledger_id == first.ids[0].ledger_id
    assert (again.request_id, again.publish_time_ms) == (8, first.publish_time_ms)
    assert ranges(await send(wire, 4)) == [(3, 1, False)]
    assert await payloads(wire, 4) == sent(1, 2, 3, 4)


async def test_a_repeat_on_the_same_stream_and_on_another_one(wire: Wire):
    async def stream_of(*requests: producer_pb2.ProduceRequest) -> Sequence[Answer]:
        call = wire.producer.ProduceStream()
        for request in requests:
            await within(call.write(request))
        answers = [await within(call.read()) for _ in requests]
        await call.done_writing()
        return answers

    first, same = await stream_of(asked(1, 2), asked(1, 2))
    (other,) = await stream_of(asked(1, 2))
    assert [ranges(each) for each in (first, same, other)] == [
        [(0, 2, False)],
        [(0, 2, True)],
        [(0, 2, True)],
    ]
    assert await payloads(wire, 2) == sent(1, 2)


async def test_a_repeat_that_is_in_flight_with_the_first_is_stored_once(wire: Wire):
    answers = await asyncio.gather(*(send(wire, 1, 2, 3) for _ in range(20)))
    assert sorted(ranges(each) for each in answers) == [[(0, 3, False)], *[[(0, 3, True)]] * 19]
    assert len({each.publish_time_ms for each in answers}) == 1
    assert await payloads(wire, 3) == sent(1, 2, 3)


async def test_batches_with_other_boundaries_store_what_is_new(wire: Wire):
    await send(wire, 1, 2, 3)
    await wire.produce("t", b"p/99")  # another producer's, so that ids are not consecutive
    await send(wire, 4)
    answer = await send(wire, 2, 3, 4, 5, 6)
    assert ranges(answer) == [(1, 2, True), (4, 1, True), (5, 2, False)]
    assert ranges(await send(wire, 1, 7)) == [(0, 1, True), (7, 1, False)]
    assert await payloads(wire, 8) == sent(1, 2, 3, 4, 5, 6, 7, 99)


async def test_a_batch_refused_before_is_taken_after_later_ones(wire: Wire):
    await send(wire, 1)
    late = asked(2)
    late.messages[0].deliver_at_ms = -1
    assert (await refused(wire.producer.Produce(late))).reason == "INVALID_DELIVER_AT_MS"
    await send(wire, 3)
    assert ranges(await send(wire, 2)) == [(2, 1, False)]
    assert ranges(await send(wire, 1, 2, 3)) == [(0, 1, True), (2, 1, True), (1, 1, True)]


async def test_the_name_of_the_producer_and_the_topic_are_part_of_it(wire: Wire):
    await send(wire, 1)
    for other in ({"producer": "q"}, {"topic": "u"}):
        assert not (await send(wire, 1, **other)).ids[0].duplicate
        assert (await send(wire, 1, **other)).ids[0].duplicate


async def test_without_a_name_or_an_id_nothing_is_looked_at(wire: Wire):
    for request in (asked(5, 1, producer=""), asked(0, 0)):
        for _ in range(2):
            answer = await within(wire.producer.Produce(request))
            assert not answer.ids[0].duplicate


async def test_five_thousand_messages_are_repeated_in_one_batch(serve: Serve):
    wire = await serve(dedup_entries=10_000)
    first = await send(wire, *range(1, 5_001))
    assert ranges(first) == [(0, 5_000, False)]
    assert ranges(await send(wire, *range(1, 5_001))) == [(0, 5_000, True)]
    halves = await send(wire, *range(2_501, 7_501))
    assert ranges(halves) == [(2_500, 2_500, True), (5_000, 2_500, False)]


async def test_a_repeat_does_not_care_for_what_has_changed_since(wire: Wire):
    request = asked(1)
    request.messages[0].deliver_after_ms = 3_600_000
    await within(wire.producer.Produce(request))
    await policy(wire, delayed_delivery=admin_pb2.DELAYED_DELIVERY_DISABLED, max_pending_messages=1)
    assert (await within(wire.producer.Produce(request))).ids[0].duplicate


# -- what is remembered ------------------------------------------------------------------------------------------------


async def test_a_repeat_after_a_restart_and_after_the_next(serve: Serve, tmp_path: Path):
    settings = {"data_dir": str(tmp_path / "d")}
    wire = await serve(**settings)
    first = await send(wire, 1, 2, 3)
    for life in range(2):
        await wire.stop()
        wire = await serve(**settings)
        again = await send(wire, 1, 2, 3)
        assert ranges(again) == [(0, 3, True)]
        assert again.publish_time_ms == first.publish_time_ms
        assert ranges(await send(wire, 3, 4 + life)) == [(2, 1, True), (3 + life, 1, False)]
    assert await payloads(wire, 5) == sent(1, 2, 3, 4, 5)


async def test_only_so_many_ids_are_remembered(wire: Wire):
    await policy(wire, dedup_entries=3)
    for each in (1, 2, 3, 4, 5):
        await send(wire, each)
    for each in (3, 4, 5):
        assert (await send(wire, each)).ids[0].duplicate
    refusal = await refused(wire.producer.Produce(asked(2, 3, 6)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_TOO_OLD")
    assert refusal.metadata == {"sequence_id": "2", "highest_sequence_id": "5"}
    assert ranges(await send(wire, 6)) == [(5, 1, False)]
    assert await payloads(wire, 6) == sent(1, 2, 3, 4, 5, 6)


async def test_only_for_so_long_and_across_a_restart(serve: Serve, tmp_path: Path):
    settings = {"data_dir": str(tmp_path / "d"), "dedup_window_ms": 100}
    wire = await serve(**settings)
    first = await send(wire, 1)

    async def wait_window_over() -> None:
        while now_ms() <= first.publish_time_ms + 100:
            await asyncio.sleep(0.005)

    await within(wait_window_over())
    assert (await refused(wire.producer.Produce(asked(1)))).reason == "SEQUENCE_TOO_OLD"
    await wire.stop()
    wire = await serve(**settings)
    assert (await refused(wire.producer.Produce(asked(1)))).reason == "SEQUENCE_TOO_OLD"
    assert ranges(await send(wire, 2)) == [(1, 1, False)]


async def test_only_so_many_producers(serve: Serve):
    wire = await serve(producers_per_topic_max=2)
    for name in ("a", "b"):
        await send(wire, 1, producer=name)
    refusal = await refused(wire.producer.Produce(asked(1, producer="c")))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_PRODUCERS")
    assert refusal.metadata == {"producers_per_topic_max": "2"}
    assert refusal.retry_ms is not None and 0 < refusal.retry_ms <= 600_000
    assert (await send(wire, 1, producer="a")).ids[0].duplicate
    await wire.produce("t", b"without ids", producer_name="c")
    await policy(wire, dedup_window_ms=1)

    async def taken(producer: str) -> Answer:
        while True:
            try:
                return await send(wire, 1, producer=producer)
            except grpc.aio.AioRpcError as error:
                refusal = Refusal.of_error(error)
            assert refusal.reason == "TOO_MANY_PRODUCERS"

    await within(taken("c"))
    # a was idle longest, as what it repeated was not stored.
    await policy(wire, dedup_window_ms=600_000)
    assert (await send(wire, 1, producer="b")).ids[0].duplicate
    assert (await refused(wire.producer.Produce(asked(1, producer="a")))).reason == "TOO_MANY_PRODUCERS"
    # Nothing is known of a name that was forgotten: what it repeats is stored again.
    await policy(wire, dedup_window_ms=1)
    assert not (await within(taken("a"))).ids[0].duplicate


async def test_only_so_much_memory_for_all_topics(serve: Serve):
    wire = await serve(dedup_memory_bytes_max=64 << 10)
    await send(wire, *range(2, 1_000, 2))
    refusal = await refused(wire.producer.Produce(asked(*range(2, 1_000, 2), topic="another", producer="q")))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DEDUP_MEMORY_FULL")
    assert refusal.metadata == {"dedup_memory_bytes_max": "65536"}
    assert refusal.retry_ms == 60_000
    assert all(each.duplicate for each in (await send(wire, *range(2, 1_000, 2))).ids)
    assert ranges(await send(wire, *range(1, 500), topic="another", producer="q")) == [(0, 499, False)]


async def test_switched_off_sequence_ids_are_ignored(wire: Wire):
    await send(wire, 1, 2)
    await policy(wire, dedup_window_ms=0)
    for request in (asked(1, 2), asked(2, 1)):
        assert not (await within(wire.producer.Produce(request))).ids[0].duplicate
    await policy(wire, dedup_window_ms=60_000)
    assert ranges(await send(wire, 1, 2)) == [(0, 2, True)]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["t", "fresh"])
async def test_ids_that_do_not_rise_are_refused_and_leave_nothing(wire: Wire, topic: str):
    await wire.produce("t", b"x")
    for request, at in (
        (asked(1, 1, topic=topic), 1),
        (asked(3, 0, 2, topic=topic), 2),
        (asked(*range(1, 40), 7, topic=topic), 39),
    ):
        refusal = await refused(wire.producer.Produce(request))
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "SEQUENCE_NOT_RISING",
        )
        assert refusal.fields == (f"messages[{at}].sequence_id",)
    assert await wire.topic_names() == ["t"]
    assert (await wire.stats("t")).storage_bytes < 1_000


async def test_names_have_a_limit(wire: Wire):
    refusal = await refused(wire.producer.Produce(asked(1, producer="é" * 128)))
    assert (refusal.reason, refusal.fields) == ("PRODUCER_NAME_TOO_LARGE", ("producer_name",))
    assert refusal.metadata == {"limit": "255"}
    assert await wire.topic_names() == []
    await send(wire, 1, producer="é" * 127 + "x")


async def test_the_greatest_ids_are_kept_apart(wire: Wire):
    last = (1 << 64) - 1
    assert ranges(await send(wire, last - 1, last)) == [(0, 2, False)]
    assert ranges(await send(wire, last - 1, last)) == [(0, 2, True)]
    for count in (1, 30):  # read one by one, and in bulk
        ids = range((1 << 63) - count, (1 << 63) + 1)
        assert ranges(await send(wire, *ids, producer=f"q{count}"))[0][2] is False
        assert ranges(await send(wire, *ids, producer=f"q{count}"))[0][2] is True


async def test_a_refused_batch_is_answered_in_order_on_a_stream(wire: Wire):
    call = wire.producer.ProduceStream()
    for request in (asked(1, request_id=1), asked(3, 2, request_id=2), asked(1, 2, request_id=3)):
        await within(call.write(request))
    answers = [await within(call.read()) for _ in range(3)]
    assert [each.request_id for each in answers] == [1, 2, 3]
    assert Refusal.of(answers[1].error).reason == "SEQUENCE_NOT_RISING"
    assert ranges(answers[2]) == [(0, 1, True), (1, 1, False)]


async def test_a_consumer_gets_the_fields_as_they_came(wire: Wire):
    await send(wire, 5, 6)
    stream: Stream = await wire.subscribe("t")
    assert [each.message.sequence_id for each in await stream.deliveries(2)] == [5, 6]
