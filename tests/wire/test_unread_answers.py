"""Clients that ask and do not read: what waits for them is bounded, in frames and in bytes, and others go on."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.http2 import END_HEADERS, HEADERS, WINDOW_BYTES, connected, frame, message
from benchmarks.http2 import call as http2_call
from broker.rpc import calls as rpc_calls
from broker.rpc import unread_room
from broker.rpc.reception import CallKind, Reception
from broker.rpc.status import FAILURE_BYTES_MAX
from broker.settings import MIB
from broker.subscriptions import requests
from broker.subscriptions.subscription import Subscription
from postdate_api.v1 import consumer_pb2, consumer_pb2_grpc, message_pb2
from tests.depth import at_depth
from tests.wire.conftest import LIMIT_SECONDS, Stream, Wire, eventually, refused, within

IDS = 10_000
FRAMES = 400
UNKNOWN = [message_pb2.EntrySet(ledger_id=1 << 40, entry_ids=range(IDS))]
"""Each of these becomes a failure in the answer: 1.4 MB of them for 20 KB."""


async def flood(stream: Stream, frames: int = FRAMES) -> int:
    """Ack and never read, until the broker reads no more; how many were taken."""
    ack = consumer_pb2.SubscribeRequest(ack=consumer_pb2.Ack(request_id=9, entries=UNKNOWN))
    for taken in range(frames):
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(stream.call.write(ack))), 1.0)
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return taken
    return frames


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def room_of(wire: Wire) -> unread_room.UnreadRoom:
    return wire.server._consumer._unread.large


async def test_answers_that_are_not_read_are_bounded(wire: Wire):
    await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    before = resident_bytes()
    await flood(stream)
    assert 0 < room_of(wire).held <= 4 * MIB
    assert resident_bytes() - before < 150 * MIB  # without a bound: 560 MiB of answers
    stream.cancel()
    await eventually(lambda: room_of(wire).held == 0 and not room_of(wire).streams)


async def test_others_go_on_while_clients_do_not_read(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    """The idle clients' answers fill the room of all: small frames pass, and for large ones the idle are ended."""
    room_of(wire).bytes_max = 6 * MIB
    monkeypatch.setattr(unread_room, "STALLED_SECONDS", LIMIT_SECONDS)  # until all have been heard
    ids = await wire.produce("t", *(b"%d" % i for i in range(10)))
    idle = [await wire.subscribe("t", permits=0) for _ in range(4)]
    await asyncio.gather(*(flood(each, 20) for each in idle))
    assert room_of(wire).held > 3 * MIB
    assert room_of(wire).held <= 6 * MIB
    monkeypatch.setattr(unread_room, "STALLED_SECONDS", 1.0)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(wire.server.grpc_address, options=options) as channel:
        good = Stream(consumer_pb2_grpc.ConsumerServiceStub(channel).Subscribe())
        await good.open("t", "s")
        await good.deliveries(10)
        assert await good.ack(ids) == []
        await good.send(ack=consumer_pb2.Ack(request_id=1, entries=UNKNOWN))
        assert len((await good.frame("confirmed")).failures) == IDS


async def test_a_client_that_reads_late_gets_every_answer(wire: Wire):
    await wire.produce("t", b"x")
    stream = await wire.subscribe("t", permits=0)
    count = at_depth(change=10, deep=30)  # 14 MB of answers are more than one stream may have waiting
    writes = asyncio.ensure_future(_ack_often(stream, count))
    answers = [await stream.frame("confirmed") for _ in range(count)]
    await within(writes)
    assert [each.request_id for each in answers] == list(range(count))
    assert {len(each.failures) for each in answers} == {IDS}


async def _ack_often(stream: Stream, count: int) -> None:
    for number in range(count):
        await stream.send(ack=consumer_pb2.Ack(request_id=number, entries=UNKNOWN))


async def test_frames_that_wait_for_the_disk_are_bounded(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    """However small they are, no more than so many are taken from one stream; then it goes on where it was."""
    ids = await wire.produce("t", *(b"%d" % i for i in range(unread_room.FRAMES_MAX + 50)))
    stream = await wire.subscribe("t")
    await stream.deliveries(len(ids))
    synced = asyncio.Event()
    begun: list[Any] = []
    acknowledge = requests.acknowledge

    async def slowly(subscription: Subscription, entries: Any) -> Any:
        begun.append(entries)
        await synced.wait()
        return await acknowledge(subscription, entries)

    monkeypatch.setattr(requests, "acknowledge", slowly)
    for number, (ledger_id, entry_id) in enumerate(ids):
        entries = [message_pb2.EntrySet(ledger_id=ledger_id, entry_ids=[entry_id])]
        await stream.send(ack=consumer_pb2.Ack(request_id=number, entries=entries))
    await eventually(lambda: len(begun) == unread_room.FRAMES_MAX)
    with suppress(TimeoutError):
        await stream.read(0.2)
    assert len(begun) == unread_room.FRAMES_MAX
    synced.set()
    async with asyncio.timeout(LIMIT_SECONDS):
        answers = [(await stream.frame("confirmed")).request_id for _ in ids]
    assert answers == sorted(answers)  # in the order in which they became durable


async def test_streams_that_are_ended_for_not_reading_leave_nothing(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    """Not even to read its status: what gRPC holds for such a stream goes too, and so does its place."""
    room_of(wire).bytes_max = 4 * MIB
    monkeypatch.setattr(unread_room, "STALLED_SECONDS", 0.2)
    monkeypatch.setattr(unread_room, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(rpc_calls, "STATUS_SECONDS", 0.2)
    await wire.produce("t", b"x")
    places = next(each for each in wire.server._port.interceptors if isinstance(each, Reception))._places[
        CallKind.LONG
    ]
    before = resident_bytes()
    narrow = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    channels = [grpc.aio.insecure_channel(wire.server.grpc_address, options=narrow) for _ in range(12)]
    ack = consumer_pb2.SubscribeRequest(ack=consumer_pb2.Ack(request_id=9, entries=UNKNOWN))

    async def ask(channel: grpc.aio.Channel) -> Any:
        call = consumer_pb2_grpc.ConsumerServiceStub(channel).Subscribe()
        await call.write(
            consumer_pb2.SubscribeRequest(
                open=consumer_pb2.Open(topic="t", subscription="s", type="SUBSCRIPTION_TYPE_SHARED")
            )
        )
        await call.write(ack)
        return call

    most_places = most_held = 0
    calls = await within(asyncio.gather(*(ask(each) for each in channels)))

    def have_left() -> bool:
        nonlocal most_places, most_held
        most_places = max(most_places, places._count)
        most_held = max(most_held, room_of(wire).held)
        # Nobody waits for the room of the last two; the clients hear a little later.
        return most_places > 2 >= places._count and sum(call.done() for call in calls) >= len(calls) - 2

    await eventually(have_left)
    assert most_held <= 4 * MIB
    assert len(room_of(wire).streams) <= 2
    ended = {await call.code() for call in calls if call.done()}
    assert ended <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    assert wire.broker.counters.refusals.keys() == {"ANSWERS_NOT_READ"}
    assert resident_bytes() - before < 150 * MIB
    for channel in channels:
        await channel.close(None)
    await eventually(lambda: room_of(wire).held == 0 and places._count == 0)


async def test_grpc_takes_no_answer_for_which_its_client_gave_no_window(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    """Answers that it has taken count as written: no room bounds their memory."""
    count, entries = 64, [message_pb2.EntrySet(ledger_id=1 << 40, entry_ids=range(30))]
    asked = [
        consumer_pb2.SubscribeRequest(ack=consumer_pb2.Ack(request_id=100 + number, entries=entries))
        for number in range(count)
    ]
    await wire.produce("t", b"x")
    reading = await wire.subscribe("t", permits=0)
    await reading.call.write(asked[0])
    answer_bytes = consumer_pb2.SubscribeResponse(confirmed=await reading.frame("confirmed")).ByteSize()
    answered = 0
    note_answered = unread_room.FrameRoom.answered

    def count_answered(place: unread_room.FrameRoom, length: int) -> None:
        nonlocal answered
        answered += 1
        note_answered(place, length)

    monkeypatch.setattr(unread_room.FrameRoom, "answered", count_answered)
    rooms = wire.server._consumer._unread
    opened = consumer_pb2.Open(topic="t", subscription="s", type="SUBSCRIPTION_TYPE_SHARED")
    async with connected(wire.server.grpc_address) as raw:
        await raw.send(
            frame(HEADERS, END_HEADERS, 1, http2_call("/postdate.v1.ConsumerService/Subscribe")),
            message(1, consumer_pb2.SubscribeRequest(open=opened).SerializeToString()),
            *(message(1, each.SerializeToString()) for each in asked),
        )
        await eventually(lambda: answered == count)
        for _ in range(3):  # what gRPC takes, it takes meanwhile
            await wire.produce("t", b"x")
        written = count * answer_bytes - rooms.large.held - rooms.small.held
        assert 0 < written <= WINDOW_BYTES


async def test_an_answer_that_is_being_written_counts_until_its_client_takes_it(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    """The one large answer of each of many streams is all that they hold."""
    answered = asyncio.get_running_loop().create_future()
    note_answered = unread_room.FrameRoom.answered

    def note(place: unread_room.FrameRoom, length: int) -> None:
        note_answered(place, length)
        answered.set_result(length)

    monkeypatch.setattr(unread_room.FrameRoom, "answered", note)
    await wire.create_subscription("t")
    opened = consumer_pb2.Open(topic="t", subscription="s", type="SUBSCRIPTION_TYPE_SHARED")
    async with connected(wire.server.grpc_address) as raw:
        await raw.send(
            frame(HEADERS, END_HEADERS, 1, http2_call("/postdate.v1.ConsumerService/Subscribe")),
            message(1, consumer_pb2.SubscribeRequest(open=opened).SerializeToString()),
            message(
                1, consumer_pb2.SubscribeRequest(ack=consumer_pb2.Ack(entries=UNKNOWN)).SerializeToString()
            ),
        )
        length = await within(answered)
        assert length > 10 * WINDOW_BYTES
        for _ in range(3):  # what gRPC takes, it takes meanwhile
            await wire.produce("t", b"x")
        assert room_of(wire).held == length
    await eventually(lambda: room_of(wire).held == 0)


@pytest.mark.parametrize("call", ["Acknowledge", "Nack", "ExtendLease"])
async def test_calls_whose_answers_are_not_read_are_bounded_with_the_streams(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, call: str
):
    """Many at once on a connection that gives no window; others get theirs, and the connection is cut for them."""
    room_of(wire).bytes_max = 6 * MIB
    monkeypatch.setattr(unread_room, "STALLED_SECONDS", LIMIT_SECONDS)  # until all have been sent
    await wire.produce("t", b"x")
    await wire.create_subscription("t")
    kind = getattr(consumer_pb2, f"{call}Request")
    request = kind(topic="t", subscription="s", entries=UNKNOWN)
    headers = http2_call(f"/postdate.v1.ConsumerService/{call}")
    async with connected(wire.server.grpc_address) as raw:
        reading = asyncio.create_task(raw.live())
        for number in range(1, 41, 2):
            await raw.send(frame(HEADERS, END_HEADERS, number, headers))
            await raw.send(message(number, request.SerializeToString(), ends=True))
            await asyncio.sleep(0.01)  # so that what was sent is taken in
        await eventually(lambda: room_of(wire).held > 3 * MIB)
        assert room_of(wire).held <= 6 * MIB
        assert len(room_of(wire).streams) <= 20
        monkeypatch.setattr(unread_room, "STALLED_SECONDS", 0.5)
        answer = await within(getattr(wire.consumer, call)(request))
        assert len(answer.failures) == IDS
        await within(reading)  # it was cut
    await eventually(lambda: room_of(wire).held == 0 and not room_of(wire).streams)


async def test_calls_beyond_what_may_wait_for_room_are_refused(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    """A request that waits holds memory too; small ones do not wait."""
    ids = await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    await stream.deliveries(1)
    await flood(stream, 10)
    room_of(wire).bytes_max = room_of(wire).held
    monkeypatch.setattr(unread_room, "CALLS_BYTES_MAX", 0)
    request = consumer_pb2.AcknowledgeRequest(topic="t", subscription="s", entries=UNKNOWN)
    refusal = await refused(wire.consumer.Acknowledge(request))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    assert await wire.ack("t", ids) == []
    stream.cancel()
    await eventually(lambda: room_of(wire).held == 0)
    assert len((await within(wire.consumer.Acknowledge(request))).failures) == IDS


@pytest.mark.parametrize("call", ["Acknowledge", "Nack", "ExtendLease"])
async def test_one_id_needs_little_room_whatever_the_names_are(wire: Wire, call: str):
    """Names and reasons are no ids: this answer has the room of small ones while others do not read theirs."""
    topic, subscription = "t" * 255, "s" * 255
    ids = await wire.produce("t", b"x")
    await wire.produce(topic, b"x")
    await wire.create_subscription(topic, subscription)
    stream = await wire.subscribe("t")
    await stream.deliveries(1)
    await flood(stream, 10)
    room_of(wire).bytes_max = room_of(wire).held
    entries = [message_pb2.EntrySet(ledger_id=ids[0][0], entry_ids=[1 << 20])]
    request = getattr(consumer_pb2, f"{call}Request")(topic=topic, subscription=subscription, entries=entries)
    if call == "Nack":
        request.reason = "r" * 1_000
    assert len((await within(getattr(wire.consumer, call)(request))).failures) == 1
    stream.cancel()
    await eventually(lambda: room_of(wire).held == 0)


async def test_a_call_that_waits_for_the_disk_holds_room_for_its_ids_alone(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    await wire.produce("t", b"x")
    await wire.create_subscription("t")
    may_go_on = asyncio.Event()
    acknowledge = requests.acknowledge

    async def slowly(subscription: Subscription, entries: Any) -> Any:
        await may_go_on.wait()
        return await acknowledge(subscription, entries)

    monkeypatch.setattr(requests, "acknowledge", slowly)
    some = [message_pb2.EntrySet(ledger_id=1 << 40, entry_ids=range(1 << 31, (1 << 31) + 2_000))]
    request = consumer_pb2.AcknowledgeRequest(topic="t", subscription="s", entries=some)
    assert request.ByteSize() > 10_000
    call = asyncio.ensure_future(within(wire.consumer.Acknowledge(request)))
    await eventually(lambda: room_of(wire).held == 2_000 * FAILURE_BYTES_MAX)
    may_go_on.set()
    assert len((await call).failures) == 2_000


async def test_calls_that_were_answered_or_refused_hold_nothing(wire: Wire):
    ids = await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    await stream.deliveries(1)
    assert await wire.ack("t", ids) == []
    assert len(await wire.ack("t", [(9, n) for n in range(5_000)])) == 5_000
    assert (await refused(wire.ack("none", ids))).reason == "TOPIC_NOT_FOUND"
    stream.cancel()
    await eventually(lambda: room_of(wire).held == 0 and not room_of(wire).streams)
