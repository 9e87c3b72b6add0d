"""In every way that a program of the SDK may stop, what it has not begun counts as no attempt; what it failed at does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta

import pytest

import postdate
import postdate.sync
from broker.subscriptions.entry_states import PROMISED
from postdate import Client, Message, Subscription, SubscriptionType
from tests.depth import deep_but
from tests.wire.conftest import Wire, eventually, ids_of, one_other

COUNT = 20
BEGUN = 1
"""The first message is taken by each program, and none is settled."""


class Broken(Exception):
    pass


async def leaves_the_iterator(client: Client, subscription: Subscription) -> None:
    async with subscription:
        async for _ in subscription:
            break


async def closes(client: Client, subscription: Subscription) -> None:
    async with subscription:
        await anext(subscription)
        await subscription.close()


async def stops_and_goes_on_for_a_while(client: Client, subscription: Subscription) -> None:
    async with subscription:
        message = await anext(subscription)
        subscription.stop()
        await message.extend()


async def releases_what_it_took(client: Client, subscription: Subscription) -> None:
    with suppress(Broken):
        async with subscription:
            await (await anext(subscription)).release()
            raise Broken


async def is_stopped_in_run(client: Client, subscription: Subscription) -> None:
    async def handle(message: Message) -> None:
        subscription.stop()
        await message.release()

    async with subscription:
        await subscription.run(handle, concurrency=1)


NOTHING_COUNTS = [
    leaves_the_iterator,
    closes,
    stops_and_goes_on_for_a_while,
    releases_what_it_took,
    is_stopped_in_run,
]


async def raises(client: Client, subscription: Subscription) -> None:
    with suppress(Broken):
        async with subscription:
            async for _ in subscription:
                raise Broken


async def is_cancelled(client: Client, subscription: Subscription) -> None:
    began = asyncio.Event()

    async def work() -> None:
        async with subscription:
            async for _ in subscription:
                began.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await began.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def is_cancelled_in_run(client: Client, subscription: Subscription) -> None:
    began = asyncio.Event()

    async def handle(message: Message) -> None:
        began.set()
        await asyncio.Event().wait()

    async def work() -> None:
        async with subscription:
            await subscription.run(handle, concurrency=1, grace=timedelta(0))

    task = asyncio.create_task(work())
    await began.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def has_a_handler_that_fails_once(client: Client, subscription: Subscription) -> None:
    async def handle(message: Message) -> None:
        subscription.stop()
        raise Broken

    async with subscription:
        await subscription.run(handle, concurrency=1)


async def raises_in_a_thread(client: Client, subscription: Subscription) -> None:
    def work() -> None:
        connection = postdate.sync.connect(client.address)
        with connection as other, suppress(Broken), other.subscribe("t", "s") as inner:
            next(inner)
            raise Broken

    await asyncio.to_thread(work)


ONE_COUNTS = [raises, is_cancelled, is_cancelled_in_run, has_a_handler_that_fails_once, raises_in_a_thread]

Program = Callable[[Client, Subscription], Awaitable[None]]


TYPES = (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED, SubscriptionType.FAILOVER)
CASES = [
    (program, counted, type_)
    for program, counted in (*((each, 0) for each in NOTHING_COUNTS), *((each, BEGUN) for each in ONE_COUNTS))
    for type_ in TYPES
]


@pytest.mark.parametrize(
    ("program", "counted", "type_"),
    deep_but(one_other(CASES, SubscriptionType.SHARED), CASES),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
async def test_only_what_was_begun_and_failed_counts(
    wire: Wire, program: Program, counted: int, type_: SubscriptionType
):
    async with postdate.connect(wire.server.grpc_address) as client:
        await client.subscriptions.create("t", "s", type=type_)
        async with client.producer("t") as producer:
            for number in range(COUNT):
                await producer.send(b"%d" % number, key=f"k{number % 3}")
        await asyncio.wait_for(program(client, client.subscribe("t", "s")), 10)
    subscription = wire.broker.registry.topic("t").subscription("s")
    await eventually(lambda: not subscription.consumers and not subscription.states.count(*PROMISED))
    stream = await wire.subscribe("t")
    again = await stream.deliveries(COUNT)
    assert len(set(ids_of(again))) == COUNT
    attempts = [each.delivery_attempt for each in again]
    assert sorted(attempts) == [*([1] * (COUNT - counted)), *([2] * counted)]
