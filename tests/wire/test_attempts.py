"""Ways of giving a message back, and whether they count as an attempt: a table of all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker.subscriptions.consumer import Consumer
from postdate_api.v1 import admin_pb2, consumer_pb2
from tests.depth import deep_but
from tests.wire.conftest import Id, Serve, Stream, Wire, eventually, ids_of, one_other, sets, within

SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER = 1, 2, 3, 4

Leave = Callable[[Wire, Stream, list[Id]], Awaitable[None]]


async def drains_and_half_closes(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    await stream.send(drain=consumer_pb2.Drain())
    await stream.close()


async def releases(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    await stream.send(drain=consumer_pb2.Drain())
    assert await stream.nack(ids, release=True) == []


async def releases_by_a_single_call(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    await stream.send(drain=consumer_pb2.Drain())
    await stream.extend([], 0)
    request = consumer_pb2.NackRequest(
        topic="t", subscription="s", consumer_id=stream.consumer_id, entries=sets(ids), release=True
    )
    assert not (await within(wire.consumer.Nack(request))).failures


async def is_drained_by_the_broker_and_half_closes(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    _drain(wire)
    await stream.frame("draining")
    await stream.close()


async def is_drained_by_the_broker_and_cut(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    _drain(wire)
    await stream.frame("draining")
    stream.cancel()


async def gets_other_settings(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    """The broker ends the streams of a subscription that begins to honour delays."""
    request = admin_pb2.UpdateSubscriptionRequest(topic="t", name="s")
    request.policy.honor_delay = True
    request.update_mask.paths.append("honor_delay")
    await within(wire.admin.UpdateSubscription(request))
    await stream.frame("draining")


async def half_closes(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    await stream.close()


async def vanishes(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    stream.cancel()


async def drains_and_vanishes(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    await stream.send(drain=consumer_pb2.Drain())
    await stream.extend([], 0)  # the broker has heard it
    stream.cancel()


async def nacks(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    await stream.send(drain=consumer_pb2.Drain())
    assert await stream.nack(ids, redeliver_after_ms=1) == []


async def lets_the_lease_end(wire: Wire, stream: Stream, ids: list[Id]) -> None:
    await stream.send(drain=consumer_pb2.Drain())
    assert await stream.extend(ids, 20) == []


def _drain(wire: Wire) -> None:
    """Drain the streams as `stop` does; the broker goes on."""
    wire.server._consumer.drain()


NOT_COUNTED: list[Leave] = [
    drains_and_half_closes,
    releases,
    releases_by_a_single_call,
    is_drained_by_the_broker_and_half_closes,
    is_drained_by_the_broker_and_cut,
]
COUNTED: list[Leave] = [half_closes, vanishes, drains_and_vanishes, nacks, lets_the_lease_end]


def _named(value: Any) -> str:
    return value.__name__ if callable(value) else str(value)


CASES = [
    (leave, counts, type_)
    for leave, counts in (*((each, 0) for each in NOT_COUNTED), *((each, 1) for each in COUNTED))
    for type_ in (SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER)
]


@pytest.mark.parametrize(("leave", "counts", "type_"), deep_but(one_other(CASES, SHARED), CASES), ids=_named)
async def test_what_counts_as_an_attempt(wire: Wire, leave: Leave, counts: int, type_: int):
    await wire.create_subscription("t", type=type_)
    ids = await wire.produce("t", b"1", b"2", b"3")
    subscription = wire.broker.registry.topic("t").subscription("s")
    for before in range(3):
        stream = await wire.subscribe("t")
        held = await stream.deliveries(3)
        assert sorted(ids_of(held)) == sorted(ids)
        assert {each.delivery_attempt for each in held} == {1 + before * counts}
        await leave(wire, stream, ids)
        await eventually(lambda: not subscription.states.leases.count())
        stream.cancel()
        await eventually(lambda: not subscription.consumers)


async def test_other_settings_count_nothing(wire: Wire):
    await wire.create_subscription("t", type=FAILOVER)
    ids = await wire.produce("t", b"1")
    stream = await wire.subscribe("t")
    assert [each.delivery_attempt for each in await stream.deliveries(1)] == [1]
    await gets_other_settings(wire, stream, ids)
    again = await wire.subscribe("t")
    assert [each.delivery_attempt for each in await again.deliveries(1)] == [1]


async def test_a_consumer_that_drains_and_vanishes_counts_every_time(wire: Wire):
    """The end of a stream that was cut may look like a half-close, for a moment."""
    await wire.create_subscription("t")
    await wire.produce("t", b"x")
    for attempt in range(1, 101):
        stream = await wire.subscribe("t")
        assert [each.delivery_attempt for each in await stream.deliveries(1)] == [attempt]
        await stream.send(drain=consumer_pb2.Drain())
        stream.cancel()


async def test_restarts_of_the_broker_and_of_workers_wear_nothing_out(serve: Serve, tmp_path):
    folder = str(tmp_path / "data")
    wire = await serve(data_dir=folder, max_delivery_attempts=2)
    await wire.create_subscription("t")
    ids = await wire.produce("t", *(b"%d" % i for i in range(50)))
    for _ in range(3):
        polite = await wire.subscribe("t")
        assert len(await polite.deliveries(50)) == 50
        await drains_and_half_closes(wire, polite, ids)
        stream = await wire.subscribe("t")
        assert len(await stream.deliveries(50)) == 50
        await within(wire.stop())  # it cuts the stream when its grace is over
        wire = await serve(data_dir=folder, max_delivery_attempts=2)
    stream = await wire.subscribe("t")
    again = await stream.deliveries(50)
    assert sorted(ids_of(again)) == ids
    assert {each.delivery_attempt for each in again} == {1}


async def test_what_was_never_sent_counts_nothing(wire: Wire):
    await wire.create_subscription("t")
    await wire.produce("t", b"x")
    topic = wire.broker.registry.topic("t")
    subscription = topic.subscription("s")
    consumer = Consumer("c", "c", 60_000)  # its stream is busy
    consumer.grant(10, 0)
    topic.subscriptions.attach(subscription, consumer)
    await within(consumer.wakeup.wait())
    assert subscription.states.leases.count() == 1
    topic.subscriptions.detach(subscription, consumer)
    stream = await wire.subscribe("t")
    assert [each.delivery_attempt for each in await stream.deliveries(1)] == [1]
