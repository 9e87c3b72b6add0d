"""`postdate.testing`: three days pass when the test says so."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import postdate
import postdate.testing
from postdate._settlement import Verb
from postdate.testing.fixtures import fake_broker, sync_fake_broker  # noqa: F401 (fixtures)

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)
NOW = timedelta(0)
EARLIEST = postdate.InitialPosition.EARLIEST


@pytest.fixture
async def fake() -> AsyncIterator[postdate.testing.FakeBroker]:
    async with postdate.testing.broker() as fake:
        yield fake


@pytest.fixture
async def client(fake: postdate.testing.FakeBroker) -> AsyncIterator[postdate.Client]:
    async with fake.client() as client:
        yield client


async def send(client: postdate.Client, *payloads: bytes, **options) -> None:
    async with client.producer("t") as producer:
        for payload in payloads:
            await producer.send(payload, **options)


async def take(subscription: postdate.Subscription) -> list[bytes]:
    """Return what has arrived, without waiting."""
    messages = await subscription.receive_many(timeout=NOW)
    await subscription.ack_many(messages)
    return [message.payload for message in messages]


async def test_three_days_pass_at_once(fake, client):
    began = time.monotonic()
    async with client.subscribe("t", "s") as subscription:
        await send(client, b"later", deliver_after=3 * DAY)
        await fake.advance(3 * DAY - timedelta(minutes=1))
        assert await take(subscription) == []
        await fake.advance(timedelta(minutes=1))
        assert await take(subscription) == [b"later"]
    assert time.monotonic() - began < 5


async def test_absolute_times_follow_the_machine(fake, client):
    async with client.subscribe("t", "s") as subscription:
        await send(client, b"x", deliver_at=datetime.now(UTC) + DAY)
        assert abs(fake.now - datetime.now(UTC)) < timedelta(seconds=1)
        await fake.advance(DAY)
        assert await take(subscription) == [b"x"]
        assert abs(fake.now - datetime.now(UTC) - DAY) < timedelta(seconds=1)


async def test_all_that_comes_due_on_the_way_comes_in_order(fake, client):
    async with client.subscribe("t", "s") as subscription:
        for hours in (5, 1, 9, 3, 7):
            await send(client, b"%d" % hours, deliver_after=hours * HOUR)
        await fake.advance(8 * HOUR)
        assert await take(subscription) == [b"1", b"3", b"5", b"7"]
        await fake.advance(HOUR)
        assert await take(subscription) == [b"9"]


async def test_as_many_come_as_the_pace_allows(fake, client):
    await client.topics.create("t")
    policy = postdate.SubscriptionPolicy(max_delivery_rate=0.01, max_delivery_burst=1, lease=12 * HOUR)
    await client.subscriptions.create("t", "s", policy=policy)
    async with client.subscribe("t", "s") as subscription:
        await send(client, *(b"%d" % number for number in range(300)))
        await fake.advance(NOW)
        assert await take(subscription) == [b"0"]
        # Longer than the wait for one, and so long that an advance would not stop at each.
        await fake.advance(timedelta(seconds=250))
        assert await take(subscription) == [b"1", b"2"]
        await fake.advance(timedelta(seconds=25_000))
        assert await take(subscription) == [b"%d" % number for number in range(3, 253)]
        await client.subscriptions.update("t", "s", max_delivery_rate=0, max_leased_messages=3)
        await fake.advance(NOW)
        assert len(await take(subscription)) == 3


async def test_the_broker_knows_of_a_new_consumer_what_it_may_be_sent_before_time_passes(fake, client):
    await client.topics.create("t")
    for number in range(20):  # each is a chance
        async with client.subscribe("t", f"s{number}"):
            await fake._kept()  # how an advance begins
            (topic,) = fake._inside._topics()
            (permits,) = [
                consumer.permits
                for subscription in topic.subscriptions.values()
                for consumer in subscription.consumers
            ]
            assert permits


async def test_what_a_pace_lets_go_between_two_steps_is_not_passed_over(fake, client, monkeypatch):
    ask = fake._kept

    async def ask_slowly() -> Any:
        await asyncio.sleep(0.002)  # longer than what is left of a wait that was rounded to milliseconds
        return await ask()

    monkeypatch.setattr(fake, "_kept", ask_slowly)
    await client.topics.create("t")
    policy = postdate.SubscriptionPolicy(max_delivery_rate=0.01, max_delivery_burst=1, lease=12 * HOUR)
    await client.subscriptions.create("t", "s", policy=policy)
    async with client.subscribe("t", "s") as subscription:
        await send(client, *(b"%d" % number for number in range(100)))
        await fake.advance(timedelta(seconds=10_000))
        assert len(await take(subscription)) == 100


async def test_no_occurrence_of_a_recurring_schedule_is_missed_on_the_way(fake, client):
    schedule = postdate.RecurringSchedule(
        name="four-a-day", interval=6 * HOUR, payload=b"x", overdue=postdate.RecurringOverdue.NONE
    )
    # Longer than an advance that stops at each of 200 moments would leave to the next one.
    async with client.subscribe("t", "s") as subscription:
        await client.recurring.put("t", schedule)
        expected = await client.recurring.preview("t", schedule, count=40)
        await fake.advance(10 * DAY)
        received = await subscription.receive_many(timeout=NOW)
        assert [message.deliver_at for message in received] == [each.time for each in expected]


async def test_no_occurrence_is_missed_while_the_one_before_takes_long_to_store(fake, client, monkeypatch):
    recurring = fake._inside._broker.recurring
    wait_room = recurring._wait_room

    async def wait_long() -> None:
        await asyncio.sleep(0.7)  # longer than an advance waits for what does not change
        await wait_room()

    monkeypatch.setattr(recurring, "_wait_room", wait_long)
    schedule = postdate.RecurringSchedule(
        name="four-a-day", interval=6 * HOUR, payload=b"x", overdue=postdate.RecurringOverdue.NONE
    )
    async with client.subscribe("t", "s") as subscription:
        await client.recurring.put("t", schedule)
        expected = await client.recurring.preview("t", schedule, count=2)
        await fake.advance(12 * HOUR)
        received = await subscription.receive_many(timeout=NOW)
        assert [message.deliver_at for message in received] == [each.time for each in expected]


async def test_an_advance_does_not_wait_for_keys_that_another_consumer_holds(fake, client):
    await client.topics.create("t")
    await client.subscriptions.create("t", "s", type=postdate.SubscriptionType.KEY_SHARED)
    keys = [f"k{number}" for number in range(20)]
    async with client.producer("t") as producer, client.subscribe("t", "s") as former:
        for key in keys:
            await producer.send(b"first", key=key)
        held = await former.receive_many(20, timeout=timedelta(seconds=5))
        async with client.subscribe("t", "s") as newcomer:
            for key in keys:
                await producer.send(b"second", key=key)
            async with asyncio.timeout(10):
                await fake.advance(timedelta(seconds=10))
            assert await newcomer.receive_many(20, timeout=NOW) == []
            for message in held:
                await message.ack()
            assert await anext(newcomer)


async def test_what_expires_after_it_was_due_is_delivered_before(fake, client):
    async with client.subscribe("t", "s") as subscription:
        await send(client, b"x", deliver_after=HOUR, ttl=HOUR)
        await fake.advance(3 * DAY)
        assert await take(subscription) == [b"x"]


async def test_ttl_counts_the_time_that_passed(fake, client):
    await client.topics.create("t")
    await client.subscriptions.create("t", "s")
    await send(client, b"short", ttl=HOUR)
    await send(client, b"long", ttl=3 * HOUR)
    await fake.advance(2 * HOUR)
    async with client.subscribe("t", "s", limit=1) as subscription:
        assert [message.payload async for message in subscription] == [b"long"]


async def test_retry_comes_when_its_delay_has_passed(fake, client):
    async with client.subscribe("t", "s") as subscription:
        await send(client, b"x")
        message = await anext(subscription)
        await message.nack(6 * HOUR)
        await fake.advance(5 * HOUR)
        assert await subscription.receive_many(timeout=NOW) == []
        await fake.advance(HOUR)
        (again,) = await subscription.receive_many(timeout=NOW)
        assert again.attempt == 2


@pytest.mark.parametrize("pulled", [False, True])
async def test_an_advance_passes_after_the_nack_of_a_block_that_raised(fake, client, monkeypatch, pulled):
    """Nobody awaits that nack; here its record takes long to store."""
    async with client.subscribe("t", "s") as subscription:
        await send(client, b"x")

        async def take_one() -> list[postdate.Message]:
            return await (client.receive("t", "s") if pulled else subscription.receive_many(timeout=NOW))

        if pulled:
            await subscription.close()
        await fake.advance(timedelta(seconds=1))
        (message,) = await take_one()
        journal = fake._inside._broker.journal
        append = journal._log.append

        async def append_slowly(*group):
            await asyncio.to_thread(time.sleep, 0.2)  # the loop's own timers go by the advanced clock
            return await append(*group)

        monkeypatch.setattr(
            journal._log, "append", lambda *group: asyncio.ensure_future(append_slowly(*group))
        )
        with pytest.raises(ZeroDivisionError):
            async with message.processing():
                1 / 0  # noqa: B018
        await fake.advance(timedelta(minutes=5))
        (again,) = await take_one()
        assert again.attempt == 2


async def test_an_advance_waits_for_no_nack_of_a_loop_that_has_stopped(fake, client):
    await client.receive("t", "s")
    await send(client, b"x")
    await fake.advance(timedelta(seconds=1))

    async def nack_and_stop() -> tuple[postdate.Client, postdate.pull.PullHolder]:
        other = await postdate.connect(fake.address).__aenter__()
        (message,) = await other.receive("t", "s")
        message.holder.settle_nowait(Verb("nack"), (message.id,))
        return other, message.holder

    loop = asyncio.new_event_loop()
    other, holder = await asyncio.to_thread(loop.run_until_complete, nack_and_stop())
    try:
        assert holder._tasks
        await fake.advance(timedelta(minutes=5))
        assert await client.receive("t", "s")  # its lease has ended
    finally:
        await asyncio.to_thread(loop.run_until_complete, asyncio.wait(holder._tasks))
        await asyncio.to_thread(loop.run_until_complete, other.close())
        loop.close()


async def test_lease_of_what_was_forgotten_ends(fake, client):
    async with client.subscribe("t", "s", lease=timedelta(minutes=1)) as subscription:
        await send(client, b"x")
        await anext(subscription)
        await fake.advance(timedelta(minutes=1))
        (again,) = await subscription.receive_many(timeout=timedelta(seconds=5))
        assert again.attempt == 2


async def test_leases_that_are_kept_do_not_end(fake, client):
    async with client.subscribe("t", "s", lease=timedelta(minutes=1)) as subscription:
        await send(client, b"first", b"second")
        message = await anext(subscription)
        async with message.processing():  # the other one waits to be taken
            await fake.advance(3 * DAY)
            (second,) = await subscription.receive_many(timeout=NOW)
            assert (second.payload, second.attempt) == (b"second", 1)
            await second.ack()
            await fake.advance(timedelta(seconds=59))
            assert await subscription.receive_many(timeout=NOW) == []
    stats = (await client.stats("t"))[0].subscriptions[0]
    assert (stats.ready_messages, stats.leased_messages) == (0, 0)


async def test_pulled_messages_have_leases_too(fake, client):
    await client.topics.create("t")
    await client.subscriptions.create("t", "s")
    await send(client, b"kept", b"forgotten")
    first, _second = await client.receive("t", "s", max_messages=2, lease=timedelta(minutes=1))
    async with first.processing():
        await fake.advance(HOUR)
        again = await client.receive("t", "s", max_messages=2, wait=timedelta(seconds=5))
        assert [message.payload for message in again] == [b"forgotten"]


async def test_handlers_are_called(fake, client):
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def handle(message: postdate.Message) -> None:
        await seen.put(message.payload)

    async with client.subscribe("t", "s") as subscription:
        running = asyncio.create_task(subscription.run(handle))
        await send(client, b"x", deliver_after=3 * DAY)
        await fake.advance(3 * DAY)
        assert await asyncio.wait_for(seen.get(), 5) == b"x"
        subscription.stop()
        await running


async def test_key_shared_and_many_due_times(fake, client):
    kind = postdate.SubscriptionType.KEY_SHARED
    async with client.subscribe("t", "s", type=kind) as subscription:
        async with client.producer("t") as producer:
            await producer.send_many(
                [
                    postdate.OutgoingMessage(b"%d" % n, key=str(n % 7), deliver_after=timedelta(minutes=n))
                    for n in range(1, 501)
                ]
            )
        await fake.advance(2 * DAY)
        got: list[bytes] = []
        while found := await take(subscription):
            got += found
            await fake.advance(timedelta(milliseconds=1))
        assert sorted(map(int, got)) == list(range(1, 501))


async def test_time_does_not_go_back(fake):
    with pytest.raises(ValueError, match="by is negative"):
        await fake.advance(-HOUR)


async def test_cancel_and_move_by_the_fake_clock(fake, client):
    async with client.subscribe("t", "s") as subscription:
        await send(client, b"cancelled", deliver_after=DAY, schedule_key="a")
        await send(client, b"moved", deliver_after=DAY, schedule_key="b")
        await client.schedule.cancel("t", schedule_key="a")
        await client.schedule.move("t", schedule_key="b", deliver_at=fake.now + 2 * DAY)
        await fake.advance(DAY)
        assert await take(subscription) == []
        await fake.advance(DAY)
        assert await take(subscription) == [b"moved"]


async def test_fixture_for_asyncio(fake_broker):  # noqa: F811
    async with fake_broker.client() as client, client.subscribe("t", "s") as subscription:
        await send(client, b"x", deliver_after=DAY)
        await fake_broker.advance(DAY)
        assert await take(subscription) == [b"x"]


def test_fixture_without_asyncio(sync_fake_broker):  # noqa: F811
    with sync_fake_broker.client() as client, client.subscribe("t", "s") as subscription:
        with client.producer("t") as producer:
            producer.send(b"x", deliver_after=DAY)
        sync_fake_broker.advance(DAY)
        assert [message.payload for message in subscription.receive_many(timeout=NOW)] == [b"x"]


def test_what_is_missing_is_said():
    program = "import sys; sys.modules['numpy'] = None; import postdate.testing as t; t.start_inside()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'postdate[broker]'" in done.stderr.splitlines()[-1]


async def test_two_brokers_have_times_of_their_own():
    async with postdate.testing.broker() as first, postdate.testing.broker() as second:
        await first.advance(3 * DAY)
        assert first.now - second.now > 2 * DAY
        async with second.client() as client, client.subscribe("t", "s") as subscription:
            await send(client, b"x", deliver_after=DAY)
            await first.advance(3 * DAY)
            assert await take(subscription) == []


async def test_the_interpreter_of_the_program_is_left_as_it_is():
    def settings() -> tuple[object, ...]:
        return gc.get_threshold(), [*gc.callbacks], sys.getswitchinterval()

    before = settings()
    async with postdate.testing.broker() as fake, fake.client() as client:
        await send(client, b"x")
        assert settings() == before
