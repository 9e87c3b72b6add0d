"""The SDK and the command against a real broker in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate
from broker.rpc.request_ids import RequestIds
from broker.server import Server
from postdate import cli
from postdate._settlement import Verb
from tests.configs import broker_config
from tests.wire.conftest import Serve, Wire, within

EARLIEST = postdate.InitialPosition.EARLIEST


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address, retry_for=timedelta(seconds=5)) as connected:
        yield connected


async def take(subscription: postdate.Subscription, count: int) -> list[postdate.Message]:
    messages: list[postdate.Message] = []
    while len(messages) < count:
        messages += await within(subscription.receive_many(count - len(messages)))
    return messages


async def test_sample_of_the_contract(client: postdate.Client) -> None:
    delay = timedelta(milliseconds=80)
    async with client.producer("orders") as producer:
        receipt = await producer.send(b"close order 17", key="17", properties={"a": "b"}, deliver_after=delay)
    async with client.subscribe("orders", "billing", initial_position=EARLIEST) as subscription:
        async for message in subscription:
            async with message.processing():
                now = datetime.now(UTC)
                assert message.id == receipt.id
                assert message.deliver_at == receipt.publish_time + delay
                assert now >= message.deliver_at
                assert (message.payload, message.key, dict(message.properties)) == (
                    b"close order 17",
                    "17",
                    {"a": "b"},
                )
            break
    assert (await client.stats("orders"))[0].subscriptions[0].ready_messages == 0


async def test_a_payload_that_a_producer_wrote_twice_is_not_that_of_another_message(
    client: postdate.Client, wire: Wire
) -> None:
    messages = [b"\x0a\x01a\x0a\x01b", *(b"\x0a\x02%02d" % number for number in range(20)), b""]
    request = b"\x0a\x06orders" + b"".join(b"\x12" + bytes((len(each),)) + each for each in messages)
    await within(wire.raw("/postdate.v1.ProducerService/Produce")(request))
    async with client.subscribe("orders", "billing", initial_position=EARLIEST) as subscription:
        payloads = [message.payload for message in await take(subscription, len(messages))]
    assert payloads == [b"b", *(b"%02d" % number for number in range(20)), b""]


@pytest.mark.parametrize("limit", [10_000, 2_000], ids=["default", "lower"])
async def test_very_many_messages_are_settled_whatever_the_broker_takes_at_once(
    serve: Serve, limit: int
) -> None:
    wire = await serve(ack_entries_max=limit)
    count = 25_000
    async with (
        postdate.connect(wire.server.grpc_address) as client,
        client.producer("t") as producer,
        client.subscribe("t", "s", permits=count) as subscription,
    ):
        assert (await client.server_info()).limits.ack_entries_max == limit
        await producer.send_many([b"x"] * count)
        messages = await take(subscription, count)
        await within(
            messages[0].holder.settle(Verb("extend", lease_ms=60_000), [message.id for message in messages])
        )
        await within(messages[0].holder.settle(Verb("nack", 1), [message.id for message in messages]))
        messages = await take(subscription, count)
        await within(subscription.ack_many(messages[:20_000]))
        for message in messages[20_000:]:
            subscription.ack_nowait(message)
        await within(subscription.wait_confirmed())
        stats = (await client.stats("t"))[0].subscriptions[0]
        assert (stats.ready_messages, stats.leased_messages) == (0, 0)


async def test_every_way_to_send_arrives_in_due_order(client: postdate.Client) -> None:
    soon = datetime.now(UTC) + timedelta(milliseconds=150)
    async with client.subscribe("t", "s", initial_position=EARLIEST) as subscription:
        async with client.producer("t") as producer:
            receipts = await producer.send_many(
                [
                    postdate.OutgoingMessage(
                        b"%d" % number, deliver_at=soon + timedelta(milliseconds=50 - number)
                    )
                    for number in range(50)
                ]
            )
            await producer.send_many([b"at once"] * 3)
            await asyncio.gather(*(producer.send(b"single") for _ in range(20)))
        messages = await take(subscription, 73)
        await subscription.ack_many(messages)
    assert len({message.id for message in messages}) == 73
    delayed = [message for message in messages if message.payload.isdigit()]
    assert [message.deliver_at for message in delayed] == sorted(message.deliver_at for message in delayed)
    assert {message.id for message in delayed} == set(receipts.ids())


async def test_confirmed_acks_do_not_come_back(client: postdate.Client) -> None:
    async with client.producer("t") as producer:
        await producer.send_many([b"x"] * 100)
    async with client.subscribe("t", "s", initial_position=EARLIEST, permits=20) as subscription:
        taken = 0
        async for message in subscription:
            if taken % 2:
                subscription.ack_nowait(message)
            taken += 1
            if taken == 100:
                break
    async with client.subscribe("t", "s") as subscription:
        again = await take(subscription, 50)
        assert await subscription.receive_many(timeout=timedelta(milliseconds=100)) == []
        assert {message.attempt for message in again} == {1}  # the first consumer left in good order


async def test_nack_with_delay_and_lease(client: postdate.Client) -> None:
    async with client.producer("t") as producer:
        await producer.send(b"x")
    lease = timedelta(milliseconds=300)
    async with client.subscribe("t", "s", initial_position=EARLIEST, lease=lease) as subscription:
        (message,) = await take(subscription, 1)
        given_back = datetime.now(UTC)
        await message.nack(timedelta(milliseconds=100))
        (again,) = await take(subscription, 1)
        assert datetime.now(UTC) - given_back >= timedelta(milliseconds=100)
        async with again.processing():
            assert await subscription.receive_many(timeout=2 * lease) == []  # the lease is kept
        assert again.attempt == 2


async def test_more_than_can_be_handled_in_a_lease_is_handled_once_each(client: postdate.Client) -> None:
    lease = timedelta(milliseconds=600)
    policy = postdate.SubscriptionPolicy(
        lease=lease, max_delivery_attempts=2, initial_backoff=timedelta(milliseconds=1)
    )
    await client.topics.create("t")
    await client.subscriptions.create("t", "s", initial_position=EARLIEST, policy=policy)
    async with client.producer("t") as producer:
        await producer.send_many([b"%d" % number for number in range(40)])
    handled: list[tuple[bytes, int]] = []
    async with client.subscribe("t", "s") as subscription:
        while messages := await subscription.receive_many(1, timeout=lease):
            async with messages[0].processing() as message:
                await asyncio.sleep(0.05)  # the work; all of it takes three leases
                handled.append((message.payload, message.attempt))
    assert handled == [(b"%d" % number, 1) for number in range(40)]
    stats = (await client.stats("t"))[0].subscriptions[0]
    assert (stats.ready_messages, stats.leased_messages, stats.dead_letter_messages) == (0, 0, 0)


async def test_program_that_stopped_for_longer_than_a_lease_hands_out_what_comes_anew(
    client: postdate.Client,
) -> None:
    lease = timedelta(milliseconds=300)
    policy = postdate.SubscriptionPolicy(lease=lease, initial_backoff=timedelta(milliseconds=1))
    await client.topics.create("t")
    await client.subscriptions.create("t", "s", initial_position=EARLIEST, policy=policy)
    async with client.producer("t") as producer:
        await producer.send_many([b"x"] * 10)
    async with client.subscribe("t", "s", permits=10) as subscription:
        (first,) = await take(subscription, 1)
        async with asyncio.timeout(5):
            while len(subscription._stream.held.ready) < 9:
                await asyncio.sleep(0.001)
        await first.ack()
        timer = subscription._stream.held._timer
        assert timer is not None
        timer.cancel()  # a program that is stopped asks for no extensions
        await within(leases_end(client, subscription, 9))
        again = await take(subscription, 9)
        assert {message.attempt for message in again} == {2}
        await subscription.ack_many(again)
    stats = (await client.stats("t"))[0].subscriptions[0]
    assert (stats.ready_messages, stats.leased_messages) == (0, 0)


async def leases_end(client: postdate.Client, subscription: postdate.Subscription, count: int) -> None:
    """Wait until so many messages came back to the broker, and the consumer can know it."""
    while (await client.stats("t"))[0].subscriptions[0].ready_messages < count:
        await asyncio.sleep(0.01)
    while subscription._stream.held.clock() < subscription._stream.held.sound_until:
        await asyncio.sleep(0.01)


async def test_pulling_without_a_stream(client: postdate.Client) -> None:
    await client.topics.create("t")
    await client.subscriptions.create("t", "s", initial_position=EARLIEST)
    async with client.producer("t") as producer:
        await producer.send_many([b"x"] * 3)
    received = await client.receive("t", "s", max_messages=10, wait=timedelta(seconds=5))
    assert len(received) == 3
    await received.messages[0].extend()
    await received.messages[0].nack(timedelta(milliseconds=1))
    await received.messages[1].ack()
    await received.messages[2].ack()
    again = await client.receive("t", "s", wait=timedelta(seconds=5))
    assert again.messages[0].attempt == 2
    await again.ack()


async def test_errors_have_types_reasons_and_fields(client: postdate.Client) -> None:
    async with client.producer("t") as producer:
        with pytest.raises(postdate.InvalidRequest) as caught:
            await producer.send_many(
                [postdate.OutgoingMessage(b"ok"), postdate.OutgoingMessage(b"x", key="k" * 5000)]
            )
        assert caught.value.field == "messages[1].key"
        with pytest.raises(postdate.InvalidRequest) as caught:
            await producer.send(bytes(2 * 1024 * 1024))
        assert caught.value.field == "payload"
        results = await asyncio.gather(
            producer.send(b"a"),
            producer.send(b"bad", key="k" * 5000),
            producer.send(b"b"),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [
            postdate.Receipt,
            postdate.InvalidRequest,
            postdate.Receipt,
        ]
    async with client.producer("no/slash") as producer:
        with pytest.raises(postdate.InvalidRequest) as caught:
            await asyncio.gather(*(producer.send(b"x") for _ in range(10)))
        assert caught.value.field == "topic"
    with pytest.raises(postdate.NotFound) as missing:
        await client.topics.get("nope")
    assert missing.value.reason == "TOPIC_NOT_FOUND"
    exclusive = postdate.SubscriptionType.EXCLUSIVE
    async with client.subscribe("t", "only", type=exclusive):
        with pytest.raises(postdate.FailedPrecondition):
            async with client.subscribe("t", "only", type=exclusive):
                pass


async def test_topics_and_subscriptions_as_plain_values(client: postdate.Client) -> None:
    created = await client.topics.create("t", postdate.TopicPolicy(tick=timedelta(seconds=2)))
    assert created.effective_policy.tick == timedelta(seconds=2)
    with pytest.raises(postdate.AlreadyExists):
        await client.topics.create("t")
    made = await client.subscriptions.create(
        "t", "s", policy=postdate.SubscriptionPolicy(lease=timedelta(seconds=9))
    )
    assert made.effective_policy.lease == timedelta(seconds=9)
    assert [each async for each in client.subscriptions.list("t")] == [made]
    assert [topic.name async for topic in client.topics.list()] == ["t"]
    async with client.producer("t") as producer:
        await producer.send(b"x", deliver_after=timedelta(hours=1))
    (stats,) = await client.stats("t")
    assert stats.scheduled_messages == 1
    assert stats.next_due_time is not None
    assert (await client.server_info()).limits.payload_bytes_max == 1024 * 1024
    await client.subscriptions.delete("t", "s")
    await client.topics.delete("t")
    assert [each async for each in client.topics.list()] == []


async def test_broker_that_restarts_is_found_again(tmp_path: Path) -> None:
    server = await start(tmp_path, "127.0.0.1:0")
    address = server.grpc_address
    try:
        async with (
            postdate.connect(address) as client,
            client.producer("t") as producer,
            client.subscribe("t", "s", initial_position=EARLIEST) as subscription,
        ):
            await producer.send(b"before")
            (message,) = await take(subscription, 1)
            await within(server.stop())
            acking = asyncio.create_task(message.ack())
            sending = asyncio.create_task(producer.send(b"meanwhile"))
            server = await start(tmp_path, address)
            await within(acking, 20)
            await within(sending, 20)
            (second,) = await take(subscription, 1)
            assert second.payload == b"meanwhile"  # and `before` does not come again
            await second.ack()
            assert await subscription.receive_many(timeout=timedelta(milliseconds=100)) == []
    finally:
        await within(server.stop())


Call = Callable[[postdate.Client], Awaitable[Any]]

CHANGES: dict[str, tuple[Call, Call, list[str]]] = {
    "create a topic": (lambda c: c.topics.create("new"), lambda c: c.topics.delete("new"), ["s"]),
    "delete a topic": (lambda c: c.topics.delete("t"), lambda c: c.topics.create("t"), []),
    "create a subscription": (
        lambda c: c.subscriptions.create("t", "new"),
        lambda c: c.subscriptions.delete("t", "new"),
        ["s"],
    ),
    "delete a subscription": (
        lambda c: c.subscriptions.delete("t", "s"),
        lambda c: c.subscriptions.create("t", "s"),
        ["s"],
    ),
}
"""A change; what somebody else does after it, which works only if it was made; and the subscriptions that are left."""


@pytest.mark.parametrize(("change", "undo", "left"), CHANGES.values(), ids=CHANGES)
async def test_change_that_a_dying_broker_made_is_neither_repeated_nor_called_a_failure(
    change: Call, undo: Call, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, never = asyncio.Event(), asyncio.Event()
    once = RequestIds.once

    async def lose_answer(self: RequestIds, topic: str, request: Any, call: Any) -> Any:
        await once(self, topic, request, call)
        made.set()
        await never.wait()

    server = await start(tmp_path, "127.0.0.1:0")
    address = server.grpc_address
    try:
        async with postdate.connect(address) as client:
            await client.subscriptions.create("t", "s")
            with monkeypatch.context() as patch:
                patch.setattr(RequestIds, "once", lose_answer)
                asked = asyncio.ensure_future(change(client))
                await within(made.wait())
            await within(server.stop())
            server = await start(tmp_path, address)
            async with postdate.connect(address) as other:
                await within(undo(other))
            with pytest.raises(postdate.Disconnected, match="may have happened or not"):
                await within(asked)
            assert [each.name async for each in client.topics.list()] == ["t"]
            assert [each.name async for each in client.subscriptions.list("t")] == left
    finally:
        await within(server.stop())


async def start(folder: Path, address: str) -> Server:
    config: dict[str, Any] = {
        "data_dir": str(folder / "data"),
        "drain_grace_ms": 200,
        "disk_reserve_bytes": 0,
    }
    server = Server(broker_config(grpc_address=address, http_address="127.0.0.1:0", **config))
    await server.start()
    return server


async def test_unknown_topics_where_the_broker_makes_none(serve: Serve) -> None:
    wire = await serve(auto_create_topics=False)
    async with postdate.connect(wire.server.grpc_address, retry_for=timedelta(seconds=1)) as client:
        async with client.producer("nope") as producer:
            with pytest.raises(postdate.NotFound):
                await producer.send(b"x")
        with pytest.raises(postdate.NotFound):
            async with client.subscribe("nope", "s"):
                pass


async def test_replay_command(wire: Wire, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some.log"
    lines = [f"2024-01-02 10:{minute:02}:{second:02} line" for minute in range(5) for second in range(60)]
    path.write_text("\n".join(lines))
    arguments = ["--address", wire.server.grpc_address, "bench", "replay", str(path), "-o", "json"]
    code = await asyncio.to_thread(cli.run, arguments)
    report = json.loads(capfd.readouterr().out)
    assert code == 0
    for each in report["subscriptions"]:
        assert (each["arrived"], each["missing"], each["early"], each["out_of_order"]) == (300, 0, 0, 0)
