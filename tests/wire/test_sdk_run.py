"""`Subscription.run` against a real broker in this process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

import postdate
from tests.wire.conftest import Wire, eventually, within
from tests.wire.test_sdk_with_broker import start

EARLIEST = postdate.InitialPosition.EARLIEST
SOON = timedelta(milliseconds=1)


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address, retry_for=timedelta(seconds=5)) as connected:
        yield connected


async def send(client: postdate.Client, payloads: list[bytes], key: str = "") -> None:
    async with client.producer("t") as producer:
        await producer.send_many([postdate.OutgoingMessage(payload, key=key) for payload in payloads])


async def ready(client: postdate.Client) -> int:
    return (await client.stats("t"))[0].subscriptions[0].ready_messages


async def test_at_most_so_many_handlers_run_at_a_time(client: postdate.Client):
    await send(client, [b"x"] * 100)
    running = most = 0

    async def handle(message: postdate.Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(SOON.total_seconds())
        running -= 1

    async with client.subscribe("t", "s", initial_position=EARLIEST, limit=100) as subscription:
        await within(subscription.run(handle, concurrency=7))
    assert (most, running) == (7, 0)
    assert await ready(client) == 0


async def test_what_raises_comes_again_with_the_reason_kept(client: postdate.Client, caplog):
    policy = postdate.SubscriptionPolicy(max_delivery_attempts=2, initial_backoff=SOON, max_backoff=SOON)
    await client.topics.create("t")
    await client.subscriptions.create("t", "s", policy=policy)
    await send(client, [b"bad", b"good"])
    seen: list[tuple[bytes, int]] = []

    async def handle(message: postdate.Message) -> None:
        seen.append((message.payload, message.attempt))
        if message.payload == b"bad":
            raise ValueError("no such order")

    async with client.subscribe("t", "s", limit=3) as subscription:
        await within(subscription.run(handle))
    assert sorted(seen) == [(b"bad", 1), (b"bad", 2), (b"good", 1)]
    async with asyncio.timeout(5):
        while not (letters := [each async for each in client.dead_letters.list("t", "s")]):
            await asyncio.sleep(0.01)
    assert letters[0].attempts == 2
    assert "no such order" in caplog.text


async def test_handler_that_settles_is_left_alone(client: postdate.Client):
    await send(client, [b"x"])
    attempts = []

    async def handle(message: postdate.Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            await message.nack(SOON)

    async with client.subscribe("t", "s", initial_position=EARLIEST, limit=2) as subscription:
        await within(subscription.run(handle))
    assert attempts == [1, 2]


async def test_leases_are_kept_while_handlers_run(client: postdate.Client):
    await send(client, [b"x"])
    lease = timedelta(milliseconds=450)

    async def handle(message: postdate.Message) -> None:
        await asyncio.sleep(2 * lease.total_seconds())

    async with client.subscribe("t", "s", initial_position=EARLIEST, lease=lease, limit=1) as subscription:
        await within(subscription.run(handle))
    assert await ready(client) == 0
    async with client.subscribe("t", "s") as subscription:
        assert await subscription.receive_many(timeout=timedelta(milliseconds=50)) == []


async def test_messages_of_a_key_run_one_by_one_and_in_order(client: postdate.Client):
    kind = postdate.SubscriptionType.KEY_SHARED
    async with client.subscribe("t", "s", type=kind, limit=60) as subscription:
        async with client.producer("t") as producer:
            await producer.send_many(
                [postdate.OutgoingMessage(b"%d" % number, key="abc"[number % 3]) for number in range(60)]
            )
        running: set[str] = set()
        seen: dict[str, list[int]] = {key: [] for key in "abc"}
        together = 0

        async def handle(message: postdate.Message) -> None:
            nonlocal together
            assert message.key not in running
            running.add(message.key)
            together = max(together, len(running))
            await asyncio.sleep(SOON.total_seconds())
            running.remove(message.key)
            seen[message.key].append(int(message.payload))

        await within(subscription.run(handle, concurrency=16))
    assert together == 3
    assert seen == {key: list(range(start, 60, 3)) for start, key in enumerate("abc")}


async def test_hot_key_does_not_stop_others(client: postdate.Client):
    kind = postdate.SubscriptionType.KEY_SHARED
    async with client.subscribe("t", "s", type=kind) as subscription:
        await send(client, [b"hot"] * 50, key="hot")
        await send(client, [b"cold"], key="cold")
        cold = asyncio.Event()

        async def handle(message: postdate.Message) -> None:
            if message.payload == b"hot":
                await cold.wait()
            else:
                cold.set()

        running = asyncio.create_task(subscription.run(handle, concurrency=2))
        await within(cold.wait())
        subscription.stop()
        await within(running)


@pytest.mark.parametrize("how", ["stop", "cancel", "sigterm"])
async def test_stopping_lets_handlers_finish_and_gives_the_rest_back(client: postdate.Client, how: str):
    await send(client, [b"x"] * 10)
    go = asyncio.Event()
    begun = ended = 0

    async def handle(message: postdate.Message) -> None:
        nonlocal begun, ended
        begun += 1
        await go.wait()
        ended += 1

    async with client.subscribe("t", "s", initial_position=EARLIEST) as subscription:
        running = asyncio.create_task(subscription.run(handle, concurrency=3))
        await eventually(lambda: begun == 3)
        if how == "stop":
            subscription.stop()
        elif how == "cancel":
            running.cancel()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        go.set()
        if how == "cancel":
            with pytest.raises(asyncio.CancelledError):
                await within(running)
        else:
            await within(running)
    assert (begun, ended) == (3, 3)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    async with client.subscribe("t", "s", limit=7) as subscription:
        rest = [message.attempt async for message in subscription]
    assert len(rest) == 7


async def test_others_need_not_wait_for_handlers_that_finish(client: postdate.Client):
    await send(client, [b"x"] * 10)
    begun, go = asyncio.Event(), asyncio.Event()

    async def handle(message: postdate.Message) -> None:
        begun.set()
        await go.wait()

    async with client.subscribe("t", "s", initial_position=EARLIEST) as subscription:
        running = asyncio.create_task(subscription.run(handle, concurrency=1))
        await within(begun.wait())
        subscription.stop()
        async with client.subscribe("t", "s", limit=9) as other:
            assert len([await message.ack() async for message in other]) == 9
        assert not running.done()
        go.set()
        await within(running)
    assert await ready(client) == 0


async def test_handlers_that_outlast_the_grace_are_cancelled_and_nacked(client: postdate.Client):
    await send(client, [b"x"])
    begun = asyncio.Event()

    async def handle(message: postdate.Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with client.subscribe("t", "s", initial_position=EARLIEST) as subscription:
        running = asyncio.create_task(subscription.run(handle, grace=SOON))
        await within(begun.wait())
        subscription.stop()
        await within(running)
    async with client.subscribe("t", "s", limit=1) as subscription:
        assert [message.attempt async for message in subscription] == [2]


async def test_second_cancellation_cancels_the_handlers(client: postdate.Client):
    await send(client, [b"x"])
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def handle(message: postdate.Message) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with client.subscribe("t", "s", initial_position=EARLIEST) as subscription:
        running = asyncio.create_task(subscription.run(handle))
        await within(begun.wait())
        running.cancel()
        await asyncio.sleep(0.01)
        assert not cancelled.is_set()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within(running)
        assert cancelled.is_set()


async def test_handler_that_outlives_its_connection_is_not_begun_again(tmp_path: Path):
    server = await start(tmp_path, "127.0.0.1:0")
    begun: list[tuple[bytes, int]] = []
    go = asyncio.Event()

    async def handle(message: postdate.Message) -> None:
        begun.append((message.payload, message.attempt))
        if message.payload == b"long":
            await go.wait()

    try:
        async with (
            postdate.connect(server.grpc_address) as client,
            client.subscribe("t", "s", initial_position=EARLIEST) as subscription,
        ):
            await send(client, [b"long"])
            running = asyncio.create_task(subscription.run(handle))
            await eventually(lambda: len(begun) == 1)
            consumer_id = subscription.consumer_id
            address = server.grpc_address
            await within(server.stop())
            server = await start(tmp_path, address)
            async with asyncio.timeout(20):
                while subscription.consumer_id == consumer_id:
                    await asyncio.sleep(0.01)
            await send(client, [b"other"])  # comes behind what is given out anew
            await eventually(lambda: len(begun) == 2)
            go.set()
            async with asyncio.timeout(10):
                while (await client.stats("t"))[0].subscriptions[0].leased_messages:
                    await asyncio.sleep(0.01)
            subscription.stop()
            await within(running)
            assert await ready(client) == 0
    finally:
        await within(server.stop())
    assert [payload for payload, _ in begun] == [b"long", b"other"]


async def test_what_ends_the_subscription_is_raised(client: postdate.Client):
    await send(client, [b"x"])
    handled = asyncio.Event()

    async def handle(message: postdate.Message) -> None:
        handled.set()

    async with client.subscribe("t", "s", initial_position=EARLIEST) as subscription:
        running = asyncio.create_task(subscription.run(handle))
        await within(handled.wait())
        await client.topics.delete("t")
        with pytest.raises(postdate.PostdateError):
            await within(running)


async def test_plain_handler_is_no_success(client: postdate.Client, caplog):
    await send(client, [b"x"])

    def handle(message: postdate.Message) -> None: ...

    async with client.subscribe("t", "s", initial_position=EARLIEST, limit=1) as subscription:
        await within(subscription.run(handle))  # type: ignore[arg-type]
    assert "must be an `async def` function" in caplog.text


async def test_senseless_limits_are_refused(client: postdate.Client):
    async def handle(message: postdate.Message) -> None: ...

    async with client.subscribe("t", "s") as subscription:
        with pytest.raises(ValueError, match="concurrency"):
            await subscription.run(handle, concurrency=0)
        with pytest.raises(ValueError, match="grace"):
            await subscription.run(handle, grace=-SOON)


async def test_run_asks_for_four_times_its_concurrency_and_leaves_the_rest_to_others(wire: Wire):
    async with postdate.connect(wire.server.grpc_address) as client:
        async with client.producer("t") as producer:
            for number in range(100):
                await producer.send(b"%d" % number)
        held = asyncio.Event()
        begun: list[bytes] = []

        async def handle(message: postdate.Message) -> None:
            begun.append(message.payload)
            await held.wait()

        async with client.subscribe("t", "s") as first:
            work = asyncio.create_task(first.run(handle, concurrency=3))
            subscription = wire.broker.registry.topic("t").subscription("s")
            await eventually(lambda: len(begun) == 3 and subscription.states.leases.count() >= 12)
            others = await wire.subscribe("t")
            assert (
                len(await others.deliveries(100 - 12 - 2)) == 86
            )  # two more permits at most, for what was taken
            held.set()
            first.stop()
            await work


async def test_a_broken_connection_is_told_once_and_so_is_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    server = await start(tmp_path, "127.0.0.1:0")
    address = server.grpc_address
    heard: list[postdate.PostdateError | None] = []
    async with (
        postdate.connect(address) as client,
        client.subscribe("t", "s", on_connection=heard.append) as subscription,
    ):
        assert heard == []
        taking = asyncio.ensure_future(anext(subscription))
        await server.stop()
        await eventually(lambda: len(heard) == 1)
        server = await start(tmp_path, address)
        async with client.producer("t") as producer:
            await producer.send(b"x")
        message = await within(taking)
        await message.ack()
    await server.stop()
    assert isinstance(heard[0], postdate.PostdateError)
    assert heard[1:] == [None]
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    told = [each for each in told if each.startswith("subscription s of topic t")]
    assert len(told) == 2
    assert "trying again" in told[0]
    assert "connected again after" in told[1]
