"""Consumers that grant permits and do not read: what waits for them is bounded, and others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from benchmarks.http2 import END_HEADERS, HEADERS, call, connected, frame, message
from broker.rpc import unread_room
from broker.settings import KIB, MIB
from postdate_api.v1 import consumer_pb2, consumer_pb2_grpc
from tests.wire.conftest import LIMIT_SECONDS, Stream, Wire, eventually, within

MESSAGE = bytes(512 * KIB)
COUNT = 4
STREAMS = 12
BOUND = 4 * MIB
"""Three messages that are being written take more: so most of the streams wait."""
RECEIVE = call("/postdate.v1.ConsumerService/Receive")
Stub = consumer_pb2_grpc.ConsumerServiceStub
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
NARROW = [
    *OWN_CONNECTION,
    ("grpc.http2.bdp_probe", 0),
]  # else a client takes in megabytes that nobody has read


def room_of(wire: Wire) -> unread_room.UnreadRoom:
    return wire.server._consumer._batch_rooms.large


@pytest.fixture(autouse=True)
def bound(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_room, "STALLED_SECONDS", 3 * LIMIT_SECONDS)  # but where it is what is tested
    room_of(wire).bytes_max = BOUND


@pytest.fixture
async def narrow(wire: Wire) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(wire.server.grpc_address, options=NARROW) as channel:
        yield Stub(channel)


async def idle_streams(wire: Wire, stub: Stub, **fields: str) -> list[Stream]:
    """Streams of one connection, each with a subscription of its own, that want everything and read nothing."""
    streams = [Stream(stub.Subscribe()) for _ in range(STREAMS)]
    for number, stream in enumerate(streams):
        await stream.open("t", f"s{number}", **fields)
    for _ in range(COUNT):
        await wire.produce("t", MESSAGE)
    await eventually(lambda: room_of(wire).waiting_bytes > 0)
    return streams


async def all_is_given_back(wire: Wire, streams: list[Stream]) -> None:
    for stream in streams:
        stream.call.cancel()
    await eventually(lambda: room_of(wire).held == 0 and not room_of(wire).streams)
    assert room_of(wire).waiting_bytes == 0


@pytest.mark.parametrize("type_", ["SHARED", "FAILOVER", "KEY_SHARED"])
async def test_messages_that_are_not_read_are_bounded(wire: Wire, narrow: Stub, type_: str):
    streams = await idle_streams(wire, narrow, type=f"SUBSCRIPTION_TYPE_{type_}")
    assert 0 < room_of(wire).held <= BOUND
    leased = sum(each.leased_messages for each in (await wire.stats("t")).subscriptions)
    assert leased * len(MESSAGE) <= BOUND, "what lacks room is with its subscription"
    reading = [asyncio.create_task(stream.deliveries(COUNT)) for stream in streams]
    while not all(task.done() for task in reading):  # whoever reads frees room for the next
        assert room_of(wire).held <= BOUND
        await asyncio.sleep(0)
    assert [len(await task) for task in reading] == [COUNT] * STREAMS
    await eventually(lambda: room_of(wire).held == 0)
    await all_is_given_back(wire, streams)


async def test_a_consumer_that_reads_gets_everything_beside_those_that_do_not(
    wire: Wire, narrow: Stub, monkeypatch: pytest.MonkeyPatch
):
    """The idle are ended for it, and what they held goes to others of their subscription."""
    idle = await idle_streams(wire, narrow)
    monkeypatch.setattr(unread_room, "STALLED_SECONDS", 0.5)
    async with grpc.aio.insecure_channel(wire.server.grpc_address, options=OWN_CONNECTION) as channel:
        stub = Stub(channel)
        good = Stream(stub.Subscribe())
        await good.open("t", "good", initial_position="INITIAL_POSITION_EARLIEST")
        assert len(await good.deliveries(COUNT)) == COUNT
        await eventually(lambda: any(stream.call.done() for stream in idle))
        number, ended = next((n, stream) for n, stream in enumerate(idle) if stream.call.done())
        assert await ended.call.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        heir = Stream(stub.Subscribe())
        await heir.open("t", f"s{number}")
        assert len(await heir.deliveries(COUNT)) == COUNT
        assert room_of(wire).held <= BOUND
    await all_is_given_back(wire, idle)


async def test_small_messages_pass_where_large_ones_fill_the_room(wire: Wire, narrow: Stub):
    idle = await idle_streams(wire, narrow)
    small = await wire.subscribe("other", "s")
    for number in range(20):
        await wire.produce("other", b"%d" % number)
        assert len(await small.deliveries(1)) == 1
    await all_is_given_back(wire, [*idle, small])


async def test_streams_that_leave_at_any_moment_give_their_room_back(wire: Wire, narrow: Stub):
    idle = await idle_streams(wire, narrow)
    for turns, stream in enumerate(idle):
        stream.call.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
    await all_is_given_back(wire, [])
    again = await wire.subscribe("t", "s0")
    assert len(await again.deliveries(COUNT)) == COUNT


async def test_room_that_came_for_a_message_that_another_consumer_took_is_given_up(wire: Wire, narrow: Stub):
    idle = await idle_streams(wire, narrow)
    waited_for = room_of(wire).waiting_bytes
    pair = [await wire.subscribe("pair"), await wire.subscribe("pair")]
    await wire.produce("pair", MESSAGE)
    await eventually(lambda: room_of(wire).waiting_bytes >= waited_for + 4 * len(MESSAGE))  # both ask for it
    for stream in idle:
        stream.call.cancel()
    reading = [asyncio.ensure_future(stream.deliveries(1)) for stream in pair]
    await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    assert sum(task.done() for task in reading) == 1
    await eventually(lambda: room_of(wire).held == 0)
    for task in reading:
        task.cancel()
    await asyncio.wait(reading)


async def test_answers_to_receive_that_are_not_read_are_bounded(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    """Many calls on a connection that gives no window; others get their messages, and it is cut for them."""
    await wire.produce("t", b"")
    await wire.create_subscription("t")
    for _ in range(STREAMS):
        await wire.produce("t", MESSAGE)
    request = consumer_pb2.ReceiveRequest(topic="t", subscription="s", wait_ms=60_000)
    async with connected(wire.server.grpc_address) as raw:
        reading = asyncio.create_task(raw.live())
        for number in range(1, 2 * STREAMS, 2):
            await raw.send(frame(HEADERS, END_HEADERS, number, RECEIVE))
            await raw.send(message(number, request.SerializeToString(), ends=True))
        await eventually(lambda: room_of(wire).waiting_bytes > 0)
        assert 0 < room_of(wire).held <= BOUND
        (counts,) = (await wire.stats("t")).subscriptions
        assert counts.leased_messages * len(MESSAGE) <= BOUND, "what lacks room is with its subscription"
        monkeypatch.setattr(unread_room, "STALLED_SECONDS", 0.5)
        answer = await within(wire.consumer.Receive(request))
        assert [len(each.message.payload) for each in answer.deliveries] == [len(MESSAGE)]
        await within(reading)  # it was cut
    await eventually(lambda: room_of(wire).held == 0 and not room_of(wire).streams)


async def test_repeated_answers_to_receive_that_are_not_read_are_bounded(wire: Wire):
    await wire.produce("t", MESSAGE)
    await wire.create_subscription("t", initial_position="INITIAL_POSITION_EARLIEST")
    request = consumer_pb2.ReceiveRequest(topic="t", subscription="s", wait_ms=60_000, attempt_id="a")
    assert (await within(wire.consumer.Receive(request))).deliveries
    async with connected(wire.server.grpc_address) as raw:
        reading = asyncio.create_task(raw.live())
        for number in range(1, 2 * STREAMS, 2):
            await raw.send(frame(HEADERS, END_HEADERS, number, RECEIVE))
            await raw.send(message(number, request.SerializeToString(), ends=True))
        await eventually(lambda: room_of(wire).waiting_bytes > 0)
        assert 0 < room_of(wire).held <= BOUND
        raw.writer.close()
        await within(reading)
    await eventually(lambda: room_of(wire).held == 0 and not room_of(wire).streams)


async def fill(wire: Wire) -> unread_room.StreamUnread:
    """Hold all room, as somebody else may, until it is closed; what answers before have is waited for."""
    other = unread_room.StreamUnread(wire.server._consumer._batch_rooms, lambda: "somebody", lambda: None)
    for room in wire.server._consumer._batch_rooms:
        room.bytes_max = BOUND
    await within(other.take(1))  # of the small room
    await within(other.take(BOUND))
    return other


async def test_a_repeated_receive_answers_what_is_held_when_there_is_room(wire: Wire):
    """While it waits, its messages are given back, and another consumer gets one of them."""
    await wire.create_subscription("t")
    small = await wire.produce("t", b"1", b"2", b"3")
    request = consumer_pb2.ReceiveRequest(topic="t", subscription="s", max_messages=2, attempt_id="a")
    first = await within(wire.consumer.Receive(request))
    assert [each.message.payload for each in first.deliveries] == [b"1", b"2"]
    other = await fill(wire)
    small_room = wire.server._consumer._batch_rooms.small
    small_room.bytes_max = 1
    repeated = asyncio.ensure_future(wire.consumer.Receive(request))
    await eventually(lambda: small_room.waiting_bytes > 0)
    assert await wire.ack("t", small[:1]) == []
    other.close()
    again = await within(repeated)
    assert [each.message.payload for each in again.deliveries] == [b"2"]
    assert again.consumer_id == first.consumer_id


async def test_repeated_receives_that_wait_for_room_are_bounded(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    await wire.create_subscription("t")
    await wire.produce("t", MESSAGE)
    request = consumer_pb2.ReceiveRequest(topic="t", subscription="s", attempt_id="a")
    assert (await within(wire.consumer.Receive(request))).deliveries
    other = await fill(wire)
    monkeypatch.setattr(unread_room, "CALLS_BYTES_MAX", 0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await within(wire.consumer.Receive(request))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    other.close()
    assert (await within(wire.consumer.Receive(request))).deliveries


@pytest.mark.parametrize("wait_ms", [0, 300])
async def test_receive_does_not_say_that_there_is_nothing_where_there_is_no_room(wire: Wire, wait_ms: int):
    await wire.create_subscription("t")
    await wire.produce("t", MESSAGE)
    request = consumer_pb2.ReceiveRequest(topic="t", subscription="s", wait_ms=wait_ms)
    other = await fill(wire)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await within(wire.consumer.Receive(request))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    other.close()
    assert (await within(wire.consumer.Receive(request))).deliveries
