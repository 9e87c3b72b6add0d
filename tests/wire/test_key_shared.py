"""KEY_SHARED over gRPC: one key goes to one consumer at a time, in its order."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from broker.subscriptions.entry_states import PROMISED
from postdate_api.v1 import consumer_pb2
from tests.wire.conftest import Id, Message, Serve, Stream, Wire, eventually, ids_of, now_ms

KEY_SHARED, EARLIEST = 2, 2
KEYS = [f"key-{i}" for i in range(32)]
"""So many that all of them never go to one of two consumers, whose ids are random: of eight keys they did once in 128."""


@dataclass
class Watch:
    """Deliveries to the consumers of one subscription, and the holder of each message at any moment."""

    arrived: list[consumer_pb2.Delivery] = field(default_factory=list)
    takers: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    held: dict[str, dict[Id, str]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, who: str, delivery: consumer_pb2.Delivery) -> None:
        key, [id_] = delivery.message.key, ids_of([delivery])
        others = set(self.held[key].values()) - {who}
        assert not others, f"{who} got {key} while {others} held it"
        self.held[key][id_] = who
        self.takers[key].append(who)
        self.arrived.append(delivery)

    def done(self, deliveries: list[consumer_pb2.Delivery]) -> None:
        for delivery in deliveries:
            del self.held[delivery.message.key][ids_of([delivery])[0]]

    def by_key(self, *, delayed: bool | None = None) -> dict[str, list[str]]:
        found = defaultdict(list)
        for each in self.arrived:
            if delayed is None or bool(each.message.deliver_after_ms) == delayed:
                found[each.message.key].append(each.message.payload.decode())
        return dict(found)


@asynccontextmanager
async def consuming(stream: Stream, who: str, watch: Watch) -> AsyncIterator[asyncio.Task[None]]:
    """Take whatever comes, hold it for a moment, and acknowledge it."""

    async def consume() -> None:
        for request_id in range(1, 1 << 30):
            first = await stream.delivery()
            deliveries, stream.ready = [first, *stream.ready], []
            for delivery in deliveries:
                watch.take(who, delivery)
            await asyncio.sleep(0.005)
            # Let go of before it is acknowledged: the next one of the key may go elsewhere as soon as the broker reads.
            watch.done(deliveries)
            assert await stream.ack(ids_of(deliveries), request_id) == []
            await stream.send(permits=consumer_pb2.Permits(messages=len(deliveries)))

    task = asyncio.ensure_future(consume())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error


def message(key: str, number: int, **fields: int) -> Message:
    return Message(key=key, payload=b"%d" % number, **fields)  # type: ignore[arg-type]


async def payloads(stream: Stream, count: int) -> list[str]:
    return [each.message.payload.decode() for each in await stream.deliveries(count)]


async def owners(wire: Wire, streams: list[Stream]) -> dict[str, int]:
    """Return the stream to which each key goes now."""
    found: dict[str, int] = {}
    for key in KEYS:
        [id_] = await wire.produce("t", message(key, 0))
        waiting = [asyncio.ensure_future(stream.delivery()) for stream in streams]
        [done], others = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        found[key] = waiting.index(done)
        assert ids_of([done.result()]) == [id_]
        for other in others:
            other.cancel()
        if others:
            await asyncio.wait(others)
        await streams[found[key]].ack([id_])
    return found


async def test_delayed_and_immediate_messages_with_a_consumer_that_joins_late_come_in_order_and_to_one_at_a_time(
    wire: Wire,
):
    await wire.create_subscription("t", type=KEY_SHARED)
    watch = Watch()
    first = await wire.subscribe("t", permits=5, type=KEY_SHARED)
    async with consuming(first, "first", watch):
        start_ms = now_ms()
        for number in range(0, 40, 8):
            await wire.produce(
                "t",
                *[message(KEYS[i % 8], i, deliver_after_ms=100 + 10 * i) for i in range(number, number + 8)],
            )
            await wire.produce("t", *[message(KEYS[i % 8], 100 + i) for i in range(number, number + 8)])
        await eventually(lambda: len(watch.arrived) >= 20)
        second = await wire.subscribe("t", permits=5)
        async with consuming(second, "second", watch):
            await eventually(lambda: len(watch.arrived) == 80)
            assert now_ms() - start_ms >= 490
    for key, numbers in watch.by_key(delayed=False).items():
        assert numbers == [f"{100 + i}" for i in range(KEYS.index(key), 40, 8)]
    for key, numbers in watch.by_key(delayed=True).items():
        assert numbers == [f"{i}" for i in range(KEYS.index(key), 40, 8)]
    for takers in watch.takers.values():
        assert takers == sorted(takers), "a key came back to the first consumer"


async def test_one_consumer_gets_all_and_two_share_the_keys(wire: Wire):
    first = await wire.subscribe("t", type=KEY_SHARED)
    assert set((await owners(wire, [first])).values()) == {0}
    second = await wire.subscribe("t", type=KEY_SHARED)
    shared = await owners(wire, [first, second])
    assert set(shared.values()) == {0, 1}
    assert await owners(wire, [first, second]) == shared


async def test_a_key_moves_only_when_what_its_former_consumer_holds_is_done(wire: Wire):
    first = await wire.subscribe("t", type=KEY_SHARED)
    held = {key: (await wire.produce("t", message(key, 1)))[0] for key in KEYS}
    await first.deliveries(len(KEYS))
    second = await wire.subscribe("t", type=KEY_SHARED)
    await wire.produce("t", *[message(key, 2) for key in KEYS])
    kept = {each.message.key for each in await first.deliveries(1)}
    await second.stays_quiet()
    kept |= {each.message.key for each in first.ready}
    moved = [key for key in KEYS if key not in kept]
    assert moved
    for key in moved:
        await first.ack([held[key]])
        delivery = await second.delivery()
        assert (delivery.message.key, delivery.message.payload) == (key, b"2")
    await second.stays_quiet()


async def test_a_delayed_message_does_not_hold_up_newer_ones_of_its_key(wire: Wire):
    stream = await wire.subscribe("t", type=KEY_SHARED)
    await wire.produce("t", message("k", 1, deliver_after_ms=150), message("k", 2), message("k", 3))
    assert await payloads(stream, 3) == ["2", "3", "1"]


async def test_a_consumer_without_permits_holds_up_its_own_keys_only(wire: Wire):
    first = await wire.subscribe("t", type=KEY_SHARED)
    second = await wire.subscribe("t", permits=0, type=KEY_SHARED)
    await wire.produce("t", *[message(f"{i % 50}", i) for i in range(200)], b"last, and for anyone")
    delivered = [await first.delivery()]
    while delivered[-1].message.key:
        delivered.append(await first.delivery())
    delivered.pop()
    mine = {each.message.key for each in delivered}
    assert 0 < len(mine) < 50
    assert len(delivered) == 4 * len(mine)
    await second.send(permits=consumer_pb2.Permits(messages=1000))
    others = await second.deliveries(200 - len(delivered))
    for key in {each.message.key for each in others}:
        numbers = [int(each.message.payload) for each in others if each.message.key == key]
        assert numbers == [i for i in range(200) if f"{i % 50}" == key]
    assert mine.isdisjoint(each.message.key for each in others)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_what_a_lost_consumer_held_comes_first_and_in_order(wire: Wire, how: str):
    first = await wire.subscribe("t", permits=3, type=KEY_SHARED)
    await wire.produce("t", *[message("k", i) for i in range(6)])
    assert await payloads(first, 3) == ["0", "1", "2"]
    second = await wire.subscribe("t", permits=100, type=KEY_SHARED)
    await second.stays_quiet()
    if how == "cancel":
        first.cancel()
    else:
        await first.close()
    again = await second.deliveries(6)
    assert [each.message.payload for each in again] == [b"%d" % i for i in range(6)]
    assert [each.delivery_attempt for each in again] == [2, 2, 2, 1, 1, 1]


async def test_what_the_last_consumer_held_comes_first_for_the_next_one(wire: Wire):
    first = await wire.subscribe("t", permits=2, type=KEY_SHARED)
    await wire.produce("t", *[message("k", i) for i in range(4)])
    assert await payloads(first, 2) == ["0", "1"]
    first.cancel()
    second = await wire.subscribe("t", type=KEY_SHARED)
    third = await wire.subscribe("t", type=KEY_SHARED)
    waiting = [asyncio.ensure_future(payloads(stream, 4)) for stream in (second, third)]
    [done], [other] = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert done.result() == ["0", "1", "2", "3"]
    other.cancel()


async def test_a_consumer_that_drains_hands_its_keys_on(wire: Wire):
    first = await wire.subscribe("t", type=KEY_SHARED)
    second = await wire.subscribe("t", type=KEY_SHARED)
    assert set((await owners(wire, [first, second])).values()) == {0, 1}
    await second.send(drain=consumer_pb2.Drain())
    await eventually(
        lambda: any(each.draining for each in wire.broker.registry.topic("t").subscription("s").consumers)
    )
    await wire.produce("t", *[message(key, 1) for key in KEYS])
    assert len(await first.deliveries(len(KEYS))) == len(KEYS)
    assert await second.close() is grpc.StatusCode.OK


async def test_messages_without_a_key_go_to_whoever_can_take_them(wire: Wire):
    first = await wire.subscribe("t", permits=3, type=KEY_SHARED)
    second = await wire.subscribe("t", permits=7, type=KEY_SHARED)
    await wire.produce("t", *[b"%d" % i for i in range(10)])
    one, two = await first.deliveries(3), await second.deliveries(7)
    assert {each.message.payload for each in [*one, *two]} == {b"%d" % i for i in range(10)}


async def test_a_late_nack_of_what_is_parked_for_another_is_a_lost_lease(serve: Serve):
    wire = await serve(lease_ms=100)
    first = await wire.subscribe("t", permits=2, type=KEY_SHARED)
    ids = await wire.produce("t", *[message("k", i) for i in range(2)])
    await first.deliveries(2)
    second = await wire.subscribe("t", permits=0, type=KEY_SHARED)
    await first.send(drain=consumer_pb2.Drain())
    subscription = wire.broker.registry.topic("t").subscription("s")
    await eventually(
        lambda: not subscription.states.leases.count() and not subscription.states.count(*PROMISED)
    )
    failures = await first.nack(ids)
    assert len(failures) == 2
    assert all("LEASE_LOST" in str(each.error) for each in failures)
    await second.send(permits=consumer_pb2.Permits(messages=10))
    assert await payloads(second, 2) == ["0", "1"]
