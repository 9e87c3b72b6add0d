"""Leases of what the application has not settled: kept together, and what lost its lease is not handed out.

The invariants HELD-1, HELD-2 and HELD-3 of `_held`, and what they mean for a subscription.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest

import postdate
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from postdate._deliveries import Deliveries
from postdate._held import Held
from postdate.model import MessageId
from postdate_api.v1 import consumer_pb2
from tests.unit.client.fake_server import FakeBroker
from tests.unit.client.fake_values import status

LEASE = timedelta(seconds=30)
SHORT = timedelta(milliseconds=300)
LOST = status("FAILED_PRECONDITION", "LEASE_LOST", "it went back")


class Consumer:
    """A holder on virtual time, and what it asked to have extended, and when."""

    name = "s"
    topic = "t"

    def __init__(self, loop: SimLoop) -> None:
        self.asked: list[tuple[float, list[int]]] = []
        self.begin = loop.time()
        self.loop = loop
        self.held = Held(self._extend, loop.time)
        self.held.connected(LEASE)

    async def settle(self, verb: object, ids: object) -> None: ...

    def ack_nowait(self, message: postdate.Message) -> None: ...

    def settle_nowait(self, verb: object, ids: object) -> None: ...

    def keep(self, message: postdate.Message) -> None:
        self.held.keep(message)

    def let_go(self, message: postdate.Message) -> None:
        self.held.let_go(message)

    def send(self, *entry_ids: int) -> None:
        deliveries = []
        for entry_id in entry_ids:
            delivery = consumer_pb2.Delivery(delivery_attempt=1)
            delivery.id.ledger_id, delivery.id.entry_id = 7, entry_id
            deliveries.append(delivery)
        self.held.arrived(Deliveries(deliveries), self)

    def answer(self, *entry_ids: int, lost: Sequence[int] = ()) -> None:
        self.held.extended({7: entry_ids}, {MessageId(7, each) for each in lost})

    async def wait_until(self, after_s: float) -> None:
        await asyncio.sleep(self.begin + after_s - self.loop.time())

    def take(self) -> list[int]:
        """Return what the application would get: all that has a lease."""
        if self.loop.time() >= self.held.sound_until:
            self.held.drop_lost()
        return [message.id.entry_id for message in self.held.ready]

    def _extend(self, ids: Sequence[MessageId]) -> None:
        self.asked.append((round(self.loop.time() - self.begin, 3), sorted(each.entry_id for each in ids)))


def simulate(scenario: Callable[[Consumer], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: SimLoop, clock: SimClock) -> None:
        await scenario(Consumer(loop))

    run_sim(main, seed=1)


def test_all_that_is_held_is_asked_for_together_three_times_a_lease() -> None:
    async def scenario(consumer: Consumer) -> None:
        consumer.send(0, 1, 2, 3)
        taken, working = consumer.held.ready.take(1)[0], consumer.held.ready.take(1)[0]
        consumer.keep(working)
        await consumer.wait_until(5)
        consumer.send(4)
        await consumer.wait_until(11)
        consumer.answer(1, 2, 3, 4)
        consumer.let_go(working)
        assert consumer.held.ready.take(1)[0].id.entry_id == 2
        await consumer.wait_until(21)
        assert consumer.asked == [(10, [1, 2, 3, 4]), (20, [3, 4])]
        assert taken.id.entry_id == 0

    simulate(scenario)


def test_nothing_is_asked_and_no_timer_runs_while_nothing_is_held() -> None:
    async def scenario(consumer: Consumer) -> None:
        consumer.send(0)
        consumer.held.ready.clear()
        await consumer.wait_until(1000)
        assert consumer.asked == []
        consumer.send(1)  # and it begins anew
        await consumer.wait_until(1011)
        assert consumer.asked == [(1010, [1])]

    simulate(scenario)


def test_what_is_not_answered_yet_is_not_asked_for_twice() -> None:
    async def scenario(consumer: Consumer) -> None:
        consumer.send(0)
        await consumer.wait_until(15)
        consumer.send(1)
        await consumer.wait_until(25)
        assert consumer.asked == [(10, [0]), (20, [1])]

    simulate(scenario)


def test_kept_leases_last_and_others_end_by_the_local_clock() -> None:
    async def scenario(consumer: Consumer) -> None:
        consumer.send(0, 1)
        await consumer.wait_until(12)
        consumer.answer(0)  # of 1 nothing is heard
        await consumer.wait_until(29.9)
        assert consumer.take() == [0, 1]
        await consumer.wait_until(30)
        assert consumer.take() == [0]
        await consumer.wait_until(39.9)
        assert consumer.take() == [0]
        await consumer.wait_until(40)  # counted from when it was asked, not from the answer
        assert consumer.take() == []

    simulate(scenario)


def test_what_the_broker_took_back_is_not_handed_out() -> None:
    async def scenario(consumer: Consumer) -> None:
        consumer.send(0, 1, 2)
        await consumer.wait_until(11)
        consumer.answer(0, 1, 2, lost=[1])
        assert consumer.take() == [0, 2]

    simulate(scenario)


def test_lost_lease_of_what_is_being_processed_is_asked_for_no_more() -> None:
    async def scenario(consumer: Consumer) -> None:
        consumer.send(0)
        consumer.keep(consumer.held.ready.take(1)[0])
        await consumer.wait_until(11)
        consumer.answer(0, lost=[0])
        await consumer.wait_until(100)
        assert consumer.asked == [(10, [0])]

    simulate(scenario)


def test_what_waited_long_in_the_applications_hands_is_asked_for_at_once() -> None:
    async def scenario(consumer: Consumer) -> None:
        consumer.send(0)
        message = consumer.held.ready.take(1)[0]
        await consumer.wait_until(28)
        consumer.keep(message)
        assert consumer.asked == [(28, [0])]

    simulate(scenario)


def test_leases_go_with_the_connection() -> None:
    async def scenario(consumer: Consumer) -> None:
        consumer.send(0, 1)
        old, waits = consumer.held.ready
        consumer.keep(old)
        consumer.held.ready.clear()
        consumer.held.disconnected()
        consumer.keep(waits)
        await consumer.wait_until(50)
        consumer.held.connected(LEASE)
        consumer.send(2)
        await consumer.wait_until(61)
        assert consumer.asked == [(60, [2])]

    simulate(scenario)


def extensions(broker: FakeBroker) -> list[list[int]]:
    """The ids of each extension that the broker got."""
    return [
        sorted(entry_id for each in frame.extend.entries for entry_id in each.entry_ids)
        for frame in broker.frames
        if frame.HasField("extend")
    ]


async def fill(client: postdate.Client, count: int) -> None:
    async with client.producer("t") as producer:
        await producer.send_many([b"x"] * count)


async def test_one_frame_extends_what_waits_and_what_is_processed(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await fill(client, 100)
    async with client.subscribe("t", "s", permits=1000, lease=SHORT) as subscription:
        taken, working = await anext(subscription), await anext(subscription)
        async with working.processing():
            await broker.wait(lambda: len(extensions(broker)) >= 3)
        await taken.ack()
    ids = list(range(1, 100))
    assert extensions(broker)[:3] == [ids, ids, ids]


async def test_refused_extension_takes_the_message_from_the_buffer_and_pays_its_permit_back(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await fill(client, 3)
    broker.knobs.fail_ids[1] = LOST
    async with client.subscribe("t", "s", permits=3, lease=SHORT) as subscription:
        await broker.wait(lambda: extensions(broker)[-1:] == [[0, 2]])
        messages = await subscription.receive_many()
        assert [message.id.entry_id for message in messages] == [0, 2]
        await broker.wait(lambda: sum(frame.permits.messages for frame in broker.frames) == 3)


async def one(subscription: postdate.Subscription) -> list[postdate.Message]:
    return [await anext(subscription)]


@pytest.mark.parametrize("way", ["iterate", "receive_many"])
async def test_stopped_program_hands_out_nothing_that_expired_meanwhile(
    broker: FakeBroker, client: postdate.Client, way: str
) -> None:
    await fill(client, 3)
    async with client.subscribe("t", "s", permits=1000, limit=3) as subscription:
        first = await anext(subscription)
        await broker.wait(lambda: len(broker.topic("t").subscriptions["s"].held) == 3)
        subscription._stream.held.clock = lambda: monotonic() + 60  # as after so long a stop
        rest = asyncio.create_task(
            subscription.receive_many() if way == "receive_many" else one(subscription)
        )
        # The lost ones do not count against the limit, so their permits come back.
        await broker.wait(lambda: sum(frame.permits.messages for frame in broker.frames) == 2)
        assert not rest.done()
        broker.give_back("t", "s", {1, 2})
        messages = await rest
        messages += [message async for message in subscription]
        assert [(message.id.entry_id, message.attempt) for message in messages] == [(1, 2), (2, 2)]
        await subscription.ack_many([first, *messages])
