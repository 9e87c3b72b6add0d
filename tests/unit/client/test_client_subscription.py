"""The subscription: permits, confirmed acks, leases, and what a broken connection means."""

from __future__ import annotations

import asyncio
import gc
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import postdate
from postdate._deliveries import Deliveries
from postdate_api.v1 import consumer_pb2
from tests.unit.client.fake_server import FakeBroker
from tests.unit.client.fake_values import status


async def fill(client: postdate.Client, count: int, **options: Any) -> list[postdate.MessageId]:
    async with client.producer("t") as producer:
        return (await producer.send_many([b"%d" % number for number in range(count)], **options)).ids()


def frames(broker: FakeBroker, kind: str) -> list[Any]:
    return [getattr(frame, kind) for frame in broker.frames if frame.WhichOneof("frame") == kind]


def acked(broker: FakeBroker) -> set[int]:
    return broker.topic("t").subscriptions["s"].acked


async def test_message_has_what_its_producer_sent(broker: FakeBroker, client: postdate.Client) -> None:
    when = datetime(2026, 1, 1, tzinfo=UTC)
    async with client.producer("t") as producer:
        receipt = await producer.send(
            b"x",
            key="k",
            properties={"a": "b"},
            deliver_after=timedelta(milliseconds=20),
            ttl=timedelta(hours=1),
            schedule_key="sk",
            event_time=when,
        )
    async with client.subscribe("t", "s") as subscription:
        message = await anext(subscription)
        await message.ack()
    assert (message.id, message.payload, message.key, message.topic) == (receipt.id, b"x", "k", "t")
    assert (dict(message.properties), message.schedule_key, message.event_time) == ({"a": "b"}, "sk", when)
    assert message.deliver_at - message.publish_time == timedelta(milliseconds=20)
    assert (message.attempt, message.ttl, message.traceparent) == (1, timedelta(hours=1), "")
    assert repr(message) == "<Message 7:0 of 't', attempt 1, 1 bytes>"


def deliveries_in_memory() -> set[int]:
    return {id(each) for each in gc.get_objects() if isinstance(each, Deliveries)}


@pytest.mark.slow
@pytest.mark.parametrize("by_iteration", [True, False])
async def test_what_was_taken_is_not_kept_while_nothing_comes(
    broker: FakeBroker, client: postdate.Client, by_iteration: bool
) -> None:
    of_others = deliveries_in_memory()
    await fill(client, 5)
    async with client.subscribe("t", "s") as subscription:
        for _ in range(5) if by_iteration else ():
            subscription.ack_nowait(await anext(subscription))
        while not by_iteration and len(acked(broker)) < 5:
            await subscription.ack_many(await subscription.receive_many())
        await subscription.wait_confirmed()
        assert await subscription.receive_many(timeout=timedelta(milliseconds=1)) == []
        assert deliveries_in_memory() <= of_others


async def test_options_reach_the_broker(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.subscribe(
        "t",
        "s",
        type=postdate.SubscriptionType.EXCLUSIVE,
        initial_position=postdate.InitialPosition.EARLIEST,
        permits=5,
        lease=timedelta(seconds=7),
        honor_delay=True,
        consumer_name="me",
    ) as subscription:
        assert subscription.lease == timedelta(seconds=7)
        assert subscription.effective_type is postdate.SubscriptionType.EXCLUSIVE
        assert subscription.consumer_id == "c1"
    opened = broker.opens[0]
    assert (opened.type, opened.initial_position, opened.permits.messages) == (3, 2, 5)
    assert (opened.lease_ms, opened.honor_delay, opened.consumer_name) == (7000, True, "me")


async def test_ack_returns_when_the_broker_has_confirmed(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 1)
    broker.knobs.hold_confirms = asyncio.Event()
    async with client.subscribe("t", "s") as subscription:
        message = await anext(subscription)
        acking = asyncio.create_task(message.ack())
        await broker.wait(lambda: len(frames(broker, "ack")) == 1)
        assert not acking.done()
        broker.knobs.hold_confirms.set()
        await acking


async def test_acks_of_one_turn_share_a_frame(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 200)
    async with client.subscribe("t", "s") as subscription:
        messages = await subscription.receive_many(200)
        await asyncio.gather(*(message.ack() for message in messages))
        assert len(frames(broker, "ack")) == 1
    assert acked(broker) == set(range(200))


async def test_permits_bound_what_is_sent_ahead_and_come_back_in_halves(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await fill(client, 100)
    async with client.subscribe("t", "s", permits=10) as subscription:
        taken = 0
        async for message in subscription:
            assert len(subscription._stream.held.ready) < 10
            subscription.ack_nowait(message)
            taken += 1
            if taken == 100:
                break
    granted = [frame.messages for frame in frames(broker, "permits")]
    assert set(granted) <= {5, 10}  # a consumer this fast may use up two halves in one turn
    assert 100 <= 10 + sum(granted) <= 110
    assert acked(broker) == set(range(100))


async def test_limit_takes_so_many_and_no_more(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 50)
    async with client.subscribe("t", "s", permits=4, limit=10) as subscription:
        taken = [message async for message in subscription]
        await subscription.ack_many(taken)
    assert len(taken) == 10
    assert broker.opens[0].permits.messages + sum(frame.messages for frame in frames(broker, "permits")) == 10
    attempts = broker.topic("t").subscriptions["s"].attempts
    assert len(attempts) == 10


async def test_receive_many_waits_for_the_first_and_no_longer_than_asked(
    broker: FakeBroker, client: postdate.Client
) -> None:
    async with client.subscribe("t", "s") as subscription:
        assert await subscription.receive_many(10, timeout=timedelta(milliseconds=20)) == []
        receiving = asyncio.create_task(subscription.receive_many(2))
        await fill(client, 3)
        assert len(await receiving) == 2
        assert len(await subscription.receive_many(10)) == 1
        with pytest.raises(ValueError, match="at least 1"):
            await subscription.receive_many(0)


async def test_several_tasks_share_a_subscription(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 100)
    taken: list[postdate.MessageId] = []
    async with client.subscribe("t", "s", permits=7, limit=100) as subscription:

        async def work() -> None:
            async for message in subscription:
                async with message.processing():
                    await asyncio.sleep(0)
                    taken.append(message.id)

        await asyncio.gather(*(work() for _ in range(5)))
    assert len(taken) == len(set(taken)) == 100
    assert acked(broker) == set(range(100))


async def test_close_confirms_every_ack(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 20)
    async with client.subscribe("t", "s") as subscription:
        for message in await subscription.receive_many(20):
            subscription.ack_nowait(message)
        assert acked(broker) == set()
    assert acked(broker) == set(range(20))
    with pytest.raises(postdate.Closed):
        subscription.ack_nowait(message)
    with pytest.raises(postdate.Closed):
        await message.ack()


async def test_failures_of_acks_are_raised_where_somebody_waits(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await fill(client, 5)
    for entry_id in (1, 2, 3):
        broker.knobs.fail_ids[entry_id] = status("NOT_FOUND", "MESSAGE_NOT_FOUND", f"no {entry_id}")
    with pytest.raises(postdate.NotFound, match="no 3"):
        async with client.subscribe("t", "s") as subscription:
            messages = await subscription.receive_many(5)
            await messages[0].ack()
            with pytest.raises(postdate.NotFound, match="no 1"):
                await messages[1].ack()
            subscription.ack_nowait(messages[2])
            with pytest.raises(postdate.NotFound, match="no 2"):
                await subscription.wait_confirmed()
            subscription.ack_nowait(messages[3])
            await messages[4].ack()


async def test_nack_comes_back_after_its_delay(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 1)
    async with client.subscribe("t", "s") as subscription:
        message = await anext(subscription)
        await message.nack(timedelta(milliseconds=30), reason="later")
        again = await anext(subscription)
        await again.ack()
    assert again.attempt == 2
    nack = frames(broker, "nack")[0]
    assert (nack.redeliver_after_ms, nack.reason, nack.dead_letter) == (30, "later", False)


async def test_no_delay_is_the_back_off_and_zero_is_at_once(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await fill(client, 2)
    async with client.subscribe("t", "s") as subscription:
        one, two = await subscription.receive_many(2)
        await one.nack()
        await two.nack(timedelta(0))
        assert [nack.redeliver_after_ms for nack in frames(broker, "nack")] == [0, 1]


async def test_processing_acks_on_success_and_nacks_on_failure(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await fill(client, 3)
    async with client.subscribe("t", "s") as subscription:
        good, bad, own = await subscription.receive_many(3)
        async with good.processing() as same:
            assert same is good
        with pytest.raises(KeyError):
            async with bad.processing():
                raise KeyError("broken")
        async with own.processing():
            await own.nack(timedelta(hours=1))
        await broker.wait(lambda: len(frames(broker, "nack")) == 2)
    assert acked(broker) == {0}
    assert {nack.reason for nack in frames(broker, "nack")} == {"KeyError: 'broken'", ""}


async def test_processing_keeps_the_lease(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 1)
    async with client.subscribe("t", "s", lease=timedelta(milliseconds=30)) as subscription:
        message = await anext(subscription)
        async with message.processing():
            await broker.wait(lambda: len(frames(broker, "extend")) >= 3)
        extended = len(frames(broker, "extend"))
    assert len(frames(broker, "extend")) <= extended + 1
    assert acked(broker) == {0}


async def test_lost_lease_has_its_type(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 1)
    broker.knobs.fail_ids[0] = status("FAILED_PRECONDITION", "LEASE_LOST", "another consumer has it")
    async with client.subscribe("t", "s") as subscription:
        message = await anext(subscription)
        with pytest.raises(postdate.LeaseLost):
            await message.extend(timedelta(seconds=9))
    assert frames(broker, "extend")[0].lease_ms == 9000


async def test_broken_connection_is_made_again_and_nothing_is_lost(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await fill(client, 60)
    seen: set[int] = set()
    breaks = [15, 40]
    async with client.subscribe("t", "s", permits=10) as subscription:
        async for message in subscription:
            seen.add(message.id.entry_id)
            subscription.ack_nowait(message)
            if breaks and len(seen) == breaks[0]:
                breaks.pop(0)
                broker.cut()
            if len(seen) == 60:
                break
    assert len(broker.opens) == 3
    assert acked(broker) == set(range(60))


async def test_each_break_and_its_end_are_a_warning_and_a_call(
    broker: FakeBroker, client: postdate.Client, caplog: pytest.LogCaptureFixture
) -> None:
    told: asyncio.Queue[postdate.PostdateError | None] = asyncio.Queue()

    def tell(error: postdate.PostdateError | None) -> None:
        told.put_nowait(error)
        raise ValueError("a program's own mistake")

    async with client.subscribe("t", "s", on_connection=tell):
        assert (told.qsize(), caplog.messages) == (0, [])
        for _ in range(2):
            broker.cut()
            async with asyncio.timeout(5):
                assert isinstance(await told.get(), postdate.Disconnected)
                assert await told.get() is None
    assert told.empty()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [bool(re.search("; trying again$", text)) for text in warnings] == [True, False, True, False]
    assert [bool(re.search(r"connected again after \d+\.\d s$", text)) for text in warnings] == [
        False,
        True,
        False,
        True,
    ]
    assert all(text.startswith("subscription s of topic t: ") for text in warnings)
    assert caplog.messages.count("on_connection failed") == 4


async def test_what_was_never_connected_does_not_break(caplog: pytest.LogCaptureFixture) -> None:
    told: list[postdate.PostdateError | None] = []
    async with postdate.connect("127.0.0.1:1", retry_for=timedelta(milliseconds=50)) as client:
        with pytest.raises(postdate.Unavailable):
            await client.subscribe("t", "s", on_connection=told.append).open()
    assert (told, [text for text in caplog.messages if "subscription s" in text]) == ([], [])


async def test_unconfirmed_ack_is_sent_again(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 2)
    async with client.subscribe("t", "s") as subscription:
        one, two = await subscription.receive_many(2)
        broker.knobs.hold_confirms = asyncio.Event()
        acking = asyncio.create_task(one.ack())
        await broker.wait(lambda: len(frames(broker, "ack")) == 1)
        nacking = asyncio.create_task(two.nack())
        broker.cut()
        await broker.wait(lambda: len(broker.opens) == 2)
        broker.knobs.hold_confirms.set()
        await acking
        with pytest.raises(postdate.Disconnected):
            await nacking
    assert len(frames(broker, "ack")) == 2
    assert 0 in acked(broker)
    assert broker.topic("t").subscriptions["s"].attempts[0] == 1  # settled before more was asked for
    assert broker.opens[1].permits.messages == 0


async def test_draining_broker_is_left_and_found_again(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 10)
    async with client.subscribe("t", "s", permits=2) as subscription:
        message = await anext(subscription)
        subscription.ack_nowait(message)
        broker.drain()
        await broker.wait(lambda: len(broker.opens) == 2)
        rest = {message.id.entry_id}
        while len(rest) < 10:
            message = await anext(subscription)
            rest.add(message.id.entry_id)
            await message.ack()
    assert acked(broker) == set(range(10))


async def test_first_connection_waits_for_the_broker_only_so_long() -> None:
    async with postdate.connect("127.0.0.1:1", retry_for=timedelta(milliseconds=50)) as client:
        with pytest.raises(postdate.Unavailable):
            async with client.subscribe("t", "s"):
                pass


async def test_refusal_to_open_is_raised_at_once(broker: FakeBroker, client: postdate.Client) -> None:
    mismatch = status("FAILED_PRECONDITION", "SUBSCRIPTION_TYPE_MISMATCH", "it is SHARED")
    broker.knobs.subscribe_errors.append(mismatch)
    with pytest.raises(postdate.FailedPrecondition, match="it is SHARED"):
        async with client.subscribe("t", "s"):
            pass
    assert len(broker.opens) == 1


async def test_certificate_that_ran_out_meanwhile_is_waited_for(
    broker: FakeBroker, client: postdate.Client
) -> None:
    """It ends what is not open yet: there somebody waits who can do something about it."""
    expired = status(
        "UNAVAILABLE", "", "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: certificate has expired"
    )
    await fill(client, 1)
    async with client.subscribe("t", "s", permits=1) as subscription:
        await anext(subscription)
        broker.knobs.subscribe_errors.extend([expired] * 2)
        broker.cut()
        async with asyncio.timeout(10):
            assert (await anext(subscription)).payload == b"0"
    assert len(broker.opens) == 4
    broker.knobs.subscribe_errors.append(expired)
    with pytest.raises(postdate.TlsFailed, match="certificate has expired"):
        async with client.subscribe("t", "s"):
            pass


async def test_recovering_broker_is_waited_for(broker: FakeBroker, client: postdate.Client) -> None:
    broker.knobs.subscribe_errors.extend([status("UNAVAILABLE", "RECOVERING", "soon", retry_ms=5)] * 2)
    async with client.subscribe("t", "s"):
        assert len(broker.opens) == 3


async def test_deleted_subscription_ends_the_iteration_with_its_error(
    broker: FakeBroker, client: postdate.Client
) -> None:
    with pytest.raises(postdate.NotFound):
        async with client.subscribe("t", "s") as subscription:
            broker.knobs.subscribe_errors.append(status("NOT_FOUND", "SUBSCRIPTION_NOT_FOUND", "gone"))
            broker.cut()
            async for _ in subscription:
                pytest.fail("there is nothing to receive")


async def test_old_consumer_that_lingers_after_a_break_is_waited_for(
    broker: FakeBroker, client: postdate.Client
) -> None:
    async with client.subscribe("t", "s", type=postdate.SubscriptionType.EXCLUSIVE) as subscription:
        broker.knobs.subscribe_errors.append(status("FAILED_PRECONDITION", "CONSUMER_EXISTS", "taken"))
        broker.cut()
        await broker.wait(lambda: len(broker.opens) == 3)
        await fill(client, 1)
        await (await anext(subscription)).ack()


async def test_silent_broker_is_taken_for_dead(
    broker: FakeBroker, client: postdate.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate._link._SILENCE_MIN_S", 0.02)
    broker.knobs.silent, broker.knobs.heartbeat_ms = True, 10
    async with client.subscribe("t", "s"):
        await broker.wait(lambda: len(broker.opens) == 2)
        broker.knobs.silent = False


async def test_stop_ends_iteration_and_acks_still_count(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 3)
    async with client.subscribe("t", "s") as subscription:
        message = await anext(subscription)
        subscription.stop()
        assert [each async for each in subscription] == []
        assert await subscription.receive_many() == []
        await message.ack()
    assert acked(broker) == {0}
    assert len(frames(broker, "drain")) >= 1


async def test_block_that_raises_still_confirms_its_acks(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 1)
    with pytest.raises(KeyError):
        async with client.subscribe("t", "s") as subscription:
            subscription.ack_nowait(await anext(subscription))
            raise KeyError
    assert acked(broker) == {0}


async def test_client_that_is_closed_first_leaves_nobody_waiting(broker: FakeBroker) -> None:
    async with (
        postdate.connect(f"127.0.0.1:{broker.port}") as client,
        client.producer("t") as producer,
        client.subscribe("t", "s") as subscription,
    ):
        receiving = asyncio.create_task(subscription.receive_many())
        broker.knobs.hold_answers = asyncio.Event()
        sending = asyncio.create_task(producer.send(b"x"))
        await broker.wait(lambda: bool(broker.requests))
        await client.close()
        with pytest.raises(postdate.Closed):
            await receiving
        with pytest.raises(postdate.Disconnected):
            await sending
        broker.knobs.hold_answers.set()


async def test_cancelled_consumer_ends_at_once(broker: FakeBroker, client: postdate.Client) -> None:
    async def work() -> None:
        async with client.subscribe("t", "s") as subscription:
            async for message in subscription:
                await message.ack()

    task = asyncio.create_task(work())
    await broker.wait(lambda: len(broker.opens) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.slow
async def test_close_while_the_broker_is_away_says_what_is_not_confirmed() -> None:
    fake = FakeBroker()
    address = await fake.start()
    async with postdate.connect(address, retry_for=timedelta(seconds=1)) as client:
        await fill(client, 1)
        with pytest.raises(postdate.Disconnected):
            async with client.subscribe("t", "s") as subscription:
                message = await anext(subscription)
                await fake.stop()
                subscription.ack_nowait(message)


async def test_pulled_messages_are_settled_by_calls(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 5)
    with pytest.raises(ValueError, match="lease is zero"):
        await client.receive("t", "s", lease=timedelta(0))
    received = await client.receive("t", "s", max_messages=4, lease=timedelta(seconds=9))
    assert len(received) == 4
    one, two, three, _ = received
    await one.ack()
    await two.nack(timedelta(milliseconds=1))
    await three.extend()
    await received.ack()
    kinds = [type(request).__name__ for request in broker.unary]
    assert kinds == [
        "ReceiveRequest",
        "AcknowledgeRequest",
        "NackRequest",
        "ExtendLeaseRequest",
        "AcknowledgeRequest",
    ]
    assert {request.consumer_id for request in broker.unary[2:4]} == {"pull"}
    assert broker.unary[0].lease_ms == 9000
    async with (await client.receive("t", "s")).messages[0].processing():
        pass
    assert acked(broker) == {0, 1, 2, 3, 4}
    empty = await client.receive("t", "s")
    assert len(empty) == 0
    assert empty.next_due_time is None
    await empty.ack()


async def test_failure_of_a_pulled_ack_is_raised(broker: FakeBroker, client: postdate.Client) -> None:
    await fill(client, 1)
    broker.knobs.fail_ids[0] = status("NOT_FOUND", "MESSAGE_NOT_FOUND", "no 0")
    received = await client.receive("t", "s")
    with pytest.raises(postdate.NotFound, match="no 0"):
        await received.ack()


async def test_frames_of_a_later_version_are_ignored(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.subscribe("t", "s") as subscription:
        for stream in broker.streams:
            stream.put_nowait(consumer_pb2.SubscribeResponse())
        await fill(client, 1)
        await (await anext(subscription)).ack()


async def test_consumer_that_first_asks_while_it_is_connected_again_gets_messages(
    broker: FakeBroker, client: postdate.Client
) -> None:
    """Permits are known by then, and the request that opened the stream had none."""
    await fill(client, 1)
    async with client.subscribe("t", "s") as subscription:
        broker.knobs.hold_opened = asyncio.Event()
        broker.cut()
        await broker.wait(lambda: len(broker.opens) == 2)
        asking = asyncio.create_task(subscription.receive_many())
        while not subscription._stream.permits.most:
            await asyncio.sleep(0)
        broker.knobs.hold_opened.set()
        async with asyncio.timeout(5):
            (message,) = await asking
        await message.ack()
