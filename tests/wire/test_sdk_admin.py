"""Work of operators and demanding producers through SDK and command, against a real broker in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate
from broker.server import Server
from postdate import cli
from tests.configs import broker_config
from tests.wire.conftest import Wire, within

EARLIEST, LATEST = postdate.InitialPosition.EARLIEST, postdate.InitialPosition.LATEST
EXCLUSIVE, KEY_SHARED = postdate.SubscriptionType.EXCLUSIVE, postdate.SubscriptionType.KEY_SHARED
QUIET = timedelta(milliseconds=150)


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address, retry_for=timedelta(seconds=5)) as connected:
        yield connected


async def produced(client: postdate.Client, count: int, topic: str = "t") -> list[postdate.MessageId]:
    async with client.producer(topic) as producer:
        return (await producer.send_many([b"%d" % number for number in range(count)])).ids()


async def take(subscription: postdate.Subscription, count: int) -> list[postdate.Message]:
    messages: list[postdate.Message] = []
    while len(messages) < count:
        messages += await within(subscription.receive_many(count - len(messages)))
    return messages


async def counts(client: postdate.Client) -> postdate.SubscriptionStats:
    """Of the only subscription of the topic t."""
    return (await client.stats("t"))[0].subscriptions[0]


# -- settings ------------------------------------------------------------------------------------------------


async def test_topic_settings_change_one_by_one(client: postdate.Client) -> None:
    created = await client.topics.create("t", postdate.TopicPolicy(max_delay=timedelta(days=1)))
    assert created.effective_policy.dedup_window
    updated = await client.topics.update(
        "t", max_produce_rate=7, dedup_window=timedelta(0), overdue_action=postdate.OverdueAction.EXPIRE
    )
    assert updated.policy == postdate.TopicPolicy(
        max_delay=timedelta(days=1),
        max_produce_rate=7,
        dedup_window=timedelta(0),
        overdue_action=postdate.OverdueAction.EXPIRE,
    )
    assert updated.effective_policy.dedup_window == timedelta(0)
    updated = await client.topics.update("t", dedup_window=None, max_delay=None)
    assert updated.effective_policy == postdate.TopicPolicy(
        **{
            name: getattr(created.effective_policy, name)
            for name in created.effective_policy.__slots__
            if name not in {"max_delay", "max_produce_rate", "overdue_action"}
        },
        max_delay=updated.effective_policy.max_delay,
        max_produce_rate=7,
        overdue_action=postdate.OverdueAction.EXPIRE,
    )
    assert await client.topics.get("t") == updated
    with pytest.raises(postdate.InvalidRequest) as caught:
        await client.topics.update("t", tick=timedelta(0))
    assert (caught.value.reason, caught.value.field) == ("INVALID_POLICY", "policy.tick_ms")


async def test_subscription_settings_change_one_by_one(client: postdate.Client) -> None:
    await client.topics.create("t")
    policy = postdate.SubscriptionPolicy(lease=timedelta(seconds=9), dead_letter_topic="lost")
    created = await client.subscriptions.create("t", "s", type=KEY_SHARED, policy=policy)
    assert created.type is KEY_SHARED
    updated = await client.subscriptions.update("t", "s", max_delivery_attempts=3, dead_letter_topic=None)
    assert updated.policy == postdate.SubscriptionPolicy(lease=timedelta(seconds=9), max_delivery_attempts=3)
    assert updated.effective_policy.max_delivery_attempts == 3
    assert await client.subscriptions.get("t", "s") == updated


async def test_pending_limit_set_later_refuses_and_says_when_to_try_again(client: postdate.Client) -> None:
    await produced(client, 5)
    await client.topics.update("t", max_pending_messages=5)
    async with client.producer("t") as producer:
        with pytest.raises(postdate.LimitReached) as caught:
            await producer.send(b"x")
    assert caught.value.reason == "PENDING_MESSAGES_EXCEEDED"
    assert caught.value.retry_after is not None
    await client.topics.update("t", max_pending_messages=0)
    await produced(client, 1)


# -- seek, skip, pause ---------------------------------------------------------------------------------------


async def test_seek_brings_back_what_it_says_to_a_consumer_that_stays(client: postdate.Client) -> None:
    ids = await produced(client, 6)
    await client.subscriptions.create("t", "other", initial_position=EARLIEST)
    async with client.subscribe("t", "s", initial_position=EARLIEST) as subscription:
        await subscription.ack_many(await take(subscription, 6))
        assert await client.subscriptions.seek("t", "s", ids[4]) == ids[4]
        again = await take(subscription, 2)
        assert sorted(message.id for message in again) == ids[4:]
        await subscription.ack_many(again)
        publish_time = again[0].publish_time
        assert await client.subscriptions.seek("t", "s", publish_time) == ids[0]
        await subscription.ack_many(await take(subscription, 6))
        assert await client.subscriptions.seek("t", "s", LATEST) > ids[5]
        assert await subscription.receive_many(timeout=QUIET) == []
        await produced(client, 1)
        await subscription.ack_many(await take(subscription, 1))
    other, mine = (await client.stats("t"))[0].subscriptions
    assert (other.ready_messages, mine.ready_messages) == (7, 0)


async def test_confirmed_work_is_neither_lost_nor_repeated_over_streams_that_end(
    client: postdate.Client,
) -> None:
    """An update ends the stream of an EXCLUSIVE consumer again and again in the middle of its work."""
    total = 600
    ids = await produced(client, total)
    confirmed: list[postdate.MessageId] = []
    async with client.subscribe(
        "t", "s", type=EXCLUSIVE, initial_position=EARLIEST, permits=20
    ) as subscription:

        async def disturb() -> None:
            for number in range(4):
                reached = (number + 1) * total // 5
                while len(confirmed) < reached:
                    await asyncio.sleep(0.001)
                await client.subscriptions.update("t", "s", honor_delay=number % 2 == 0)

        disturbing = asyncio.create_task(disturb())
        while len(confirmed) < total:
            message = await within(anext(subscription))
            await message.ack()
            confirmed.append(message.id)
        await disturbing
        assert await subscription.receive_many(timeout=QUIET) == []
    assert sorted(confirmed) == ids
    assert (await counts(client)).ready_messages == 0


async def test_skip_while_a_message_is_worked_on_ends_no_consumer(client: postdate.Client) -> None:
    await produced(client, 3)
    async with client.subscribe("t", "s", initial_position=EARLIEST, permits=2) as subscription:
        message = await within(anext(subscription))
        async with message.processing():
            async with client.producer("t") as producer:
                await producer.send(b"later", deliver_after=timedelta(hours=1))
            assert await client.subscriptions.skip_all("t", "s") == 4
        with pytest.raises(KeyError):
            async with message.processing():
                raise KeyError
        await produced(client, 1)
        (after,) = await take(subscription, 1)
        assert after.attempt == 1
        await after.ack()
    found = await counts(client)
    assert (found.ready_messages, found.leased_messages, found.scheduled_messages) == (0, 0, 0)


async def test_paused_subscription_keeps_its_consumer_and_delivers_nothing(client: postdate.Client) -> None:
    await produced(client, 1)
    async with client.subscribe("t", "s", initial_position=EARLIEST) as subscription:
        first = await within(anext(subscription))
        assert (await client.subscriptions.pause("t", "s")).paused
        await produced(client, 1)
        await first.ack()
        assert await subscription.receive_many(timeout=QUIET) == []
        found = await counts(client)
        assert (found.paused, found.consumers, found.ready_messages) == (True, 1, 1)
        assert found.oldest_ready_age > timedelta(0)
        assert not (await client.subscriptions.resume("t", "s")).paused
        await (await within(anext(subscription))).ack()


async def test_key_shared_keeps_a_key_with_one_consumer_and_in_order(client: postdate.Client) -> None:
    async with (
        client.subscribe("t", "s", type=KEY_SHARED, initial_position=EARLIEST) as one,
        client.subscribe("t", "s", type=KEY_SHARED) as two,
    ):
        async with client.producer("t") as producer:
            await producer.send_many(
                [postdate.OutgoingMessage(b"%d" % number, key=f"k{number % 20}") for number in range(200)]
            )
        taken: dict[postdate.Subscription, list[postdate.Message]] = {one: [], two: []}
        while sum(map(len, taken.values())) < 200:
            for subscription in taken:
                came = await within(subscription.receive_many(timeout=timedelta(milliseconds=20)))
                taken[subscription] += came
                await subscription.ack_many(came)
    keys = [{message.key for message in messages} for messages in taken.values()]
    assert keys[0] and keys[1] and not keys[0] & keys[1]
    for messages in taken.values():
        for key in {message.key for message in messages}:
            numbers = [int(message.payload) for message in messages if message.key == key]
            assert numbers == sorted(numbers)


# -- dead letters --------------------------------------------------------------------------------------------


async def test_dead_letters_are_listed_requeued_and_purged(client: postdate.Client) -> None:
    await client.topics.create("t")
    await client.subscriptions.create("t", "s", policy=postdate.SubscriptionPolicy(max_delivery_attempts=2))
    await client.subscriptions.create("t", "other")
    async with client.producer("t") as producer:
        await producer.send(b"bad", key="k", properties={"a": "b"})
        ids = (await producer.send_many([b"unwanted"] * 120)).ids()
    async with client.subscribe("t", "s") as subscription:
        for message in await take(subscription, 121):
            if message.payload == b"bad":
                await message.nack(timedelta(0))
            else:
                await message.nack(dead_letter=True, reason="no use")
        (again,) = await take(subscription, 1)
        assert again.attempt == 2
        await again.nack(timedelta(0))
        letters = [letter async for letter in client.dead_letters.list("t", "s", payloads=True)]
        assert len(letters) == 121
        (bad,) = [letter for letter in letters if letter.payload == b"bad"]
        assert (bad.attempts, bad.reason, bad.key, bad.properties) == (
            2,
            "max_delivery_attempts",
            "k",
            {"a": "b"},
        )
        assert (bad.dead_letter_topic, bad.payload_bytes) == ("t~s~dead-letters", 3)
        assert datetime.now(UTC) - bad.time < timedelta(minutes=1)
        unwanted = [letter for letter in letters if letter is not bad]
        assert {letter.reason for letter in unwanted} == {"no use"}
        assert [letter.original_id for letter in unwanted] == ids
        assert (await client.stats("t"))[0].subscriptions[1].dead_letter_messages == 121

        changed = await client.dead_letters.requeue("t", "s", [bad.id, postdate.MessageId(bad.id[0], 9_999)])
        assert (changed.count, len(changed.failures)) == (1, 1)
        (fresh,) = await take(subscription, 1)
        assert (fresh.payload, fresh.key, dict(fresh.properties), fresh.attempt) == (
            b"bad",
            "k",
            {"a": "b"},
            1,
        )
        await fresh.ack()
        assert (await client.dead_letters.purge("t", "s", [unwanted[0].id])).count == 1
        delay = timedelta(milliseconds=200)
        asked_at = datetime.now(UTC)
        assert (await client.dead_letters.requeue("t", "s", all=True, deliver_after=delay)).count == 119
        later = await take(subscription, 119)
        assert datetime.now(UTC) - asked_at >= delay
        await subscription.ack_many(later)
    assert [letter async for letter in client.dead_letters.list("t", "s")] == []
    other, mine = (await client.stats("t"))[0].subscriptions
    assert (other.ready_messages, mine.ready_messages, mine.dead_letter_messages) == (121, 0, 0)


# -- idempotent produce --------------------------------------------------------------------------------------


class Cutter:
    """A connection to the broker that can lose what it answers: requests arrive, and nobody hears of it."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.partition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.deaf = False

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, back]
        for source, sink, hears in ((reader, back, True), (there, writer, False)):
            task = asyncio.create_task(self._copy(source, sink, hears))
            self._tasks.add(task)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, hears: bool) -> None:
        try:
            while block := await source.read(65_536):
                if hears or not self.deaf:
                    sink.write(block)
        except OSError:
            return
        finally:
            sink.transport.abort()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("ways", ["send", "send_many"])
async def test_answers_that_are_lost_leave_every_message_stored_once(wire: Wire, ways: str) -> None:
    cutter = Cutter(wire.server.grpc_address)
    address = await cutter.start()
    try:
        async with (
            postdate.connect(address, retry_for=timedelta(seconds=20)) as client,
            client.producer("t", producer_name="p", batch_messages_max=50) as producer,
        ):
            await producer.send(b"first")
            topic = wire.broker.registry.topic("t")
            cutter.deaf = True
            if ways == "send":
                sending = [asyncio.create_task(producer.send(b"%d" % number)) for number in range(300)]
            else:
                sending = [asyncio.create_task(producer.send_many([b"%d" % number for number in range(300)]))]
            await until(lambda: topic.log.entry_total > 50)
            cutter.cut()
            cutter.deaf = False
            answers = await within(asyncio.gather(*sending), 30)
            receipts = answers if ways == "send" else list(answers[0])
            last = await producer.send(b"last")
        assert topic.log.entry_total == 302
        assert any(receipt.duplicate for receipt in receipts) and not last.duplicate
        async with (
            postdate.connect(wire.server.grpc_address) as client,
            client.subscribe("t", "s", initial_position=EARLIEST) as subscription,
        ):
            messages = {message.id: message.payload for message in await take(subscription, 302)}
        assert [messages[receipt.id] for receipt in receipts] == [b"%d" % number for number in range(300)]
    finally:
        await cutter.stop()


async def test_callers_own_numbers_are_known_after_a_restart_of_both(tmp_path: Path) -> None:
    receipts = []
    for _ in range(2):
        server = await start(tmp_path)
        try:
            async with (
                postdate.connect(server.grpc_address) as client,
                client.producer("t", producer_name="loader") as producer,
            ):
                receipts.append(await producer.send(b"x", sequence_id=41))
                if len(receipts) == 2:
                    assert (await producer.send(b"y", sequence_id=42)).duplicate is False
        finally:
            await within(server.stop())
    assert [receipt.duplicate for receipt in receipts] == [False, True]
    assert receipts[0].id == receipts[1].id


async def start(folder: Path) -> Server:
    config: dict[str, Any] = {
        "data_dir": str(folder / "data"),
        "drain_grace_ms": 200,
        "disk_reserve_bytes": 0,
    }
    server = Server(broker_config(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0", **config))
    await server.start()
    return server


# -- the command ---------------------------------------------------------------------------------------------


async def test_commands_of_an_operator(
    wire: Wire, client: postdate.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run(*arguments: str) -> tuple[int, Any]:
        capfd.readouterr()
        command = ["--address", wire.server.grpc_address, "-o", "json", "--no-progress", *arguments]
        code = await asyncio.to_thread(cli.run, command)
        out = capfd.readouterr().out
        return code, json.loads(out) if out else None

    await produced(client, 4)
    assert (await run("subscription", "create", "t", "s", "--from", "earliest"))[0] == 0
    code, shown = await run("topic", "update", "t", "--max-delay", "3d", "--max-buckets", "5")
    assert (code, shown["policy"]["max_delay_ms"], shown["policy"]["buckets"]["max_buckets"]) == (
        0,
        259_200_000,
        5,
    )
    code, shown = await run("topic", "update", "t", "--inherit", "max-delay", "--inherit", "max-buckets")
    assert (code, shown["policy"]["max_delay_ms"], shown["policy"]["buckets"]) == (0, None, None)
    code, shown = await run("subscription", "update", "t", "s", "--max-delivery-attempts", "5")
    assert (code, shown["effective_policy"]["max_delivery_attempts"]) == (0, 5)
    assert (await run("subscription", "pause", "t", "s"))[0] == 0
    code, shown = await run("stats", "t")
    found = shown[0]["subscriptions"][0]
    assert (code, found["paused"], found["ready_messages"], found["dead_letter_messages"]) == (0, True, 4, 0)
    assert found["oldest_ready_age_ms"] > 0
    assert (await run("subscription", "resume", "t", "s"))[0] == 0
    assert (await run("subscription", "skip-all", "t", "s", "--yes"))[1]["skipped_messages"] == 4
    code, shown = await run("subscription", "seek", "t", "s", "earliest")
    assert (code, shown["position"].partition(":")[2]) == (0, "0")
    async with client.subscribe("t", "s") as subscription:
        for message in await take(subscription, 4):
            await message.nack(dead_letter=True)
    code, letters = await run("dlq", "list", "t", "s", "--payload")
    assert (code, [letter["payload"] for letter in letters]) == (0, ["0", "1", "2", "3"])
    assert await run("dlq", "requeue", "t", "s", letters[0]["id"]) == (0, {"requeued": 1, "failed": []})
    assert (await run("dlq", "requeue", "t", "s", letters[0]["id"]))[0] == 3
    assert await run("dlq", "purge", "t", "s", letters[1]["id"], "--yes") == (0, {"purged": 1, "failed": []})
    assert await run("dlq", "requeue", "t", "s", "--all", "--yes") == (0, {"requeued": 2, "failed": []})
    assert (await run("dlq", "list", "t", "nope"))[0] == 3
    assert (await run("subscription", "seek", "t", "nope", "latest"))[0] == 3
    assert (await counts(client)).ready_messages == 3


async def test_creating_again_is_no_error_if_asked_so(
    wire: Wire, client: postdate.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    for make in (
        ["topic", "create", "t", "--tick", "2s"],
        ["subscription", "create", "t", "s", "--lease", "9s"],
    ):
        codes = []
        for arguments in (make, make, [*make[:-2], "--if-not-exists"]):
            command = ["--address", wire.server.grpc_address, *arguments]
            codes.append(await asyncio.to_thread(cli.run, command))
        assert codes == [0, 1, 0]
    with pytest.raises(postdate.AlreadyExists):
        await client.topics.create("t")
    assert (await client.topics.create("t", exist_ok=True)).policy.tick == timedelta(seconds=2)
    described = await client.subscriptions.create("t", "s", exist_ok=True)
    assert described.policy.lease == timedelta(seconds=9)
    same = await client.subscriptions.create("t", "s", type=postdate.SubscriptionType.SHARED, exist_ok=True)
    assert same == described
    with pytest.raises(postdate.FailedPrecondition, match="is SHARED, not KEY_SHARED") as caught:
        await client.subscriptions.create("t", "s", type=postdate.SubscriptionType.KEY_SHARED, exist_ok=True)
    assert caught.value.reason == "SUBSCRIPTION_TYPE_MISMATCH"


async def test_messages_are_acked_without_waiting_and_dead_letters_listed_up_to_a_limit(
    client: postdate.Client,
) -> None:
    await produced(client, 4)
    async with client.subscribe("t", "s", initial_position=EARLIEST) as subscription:
        for message in await take(subscription, 4):
            if message.payload == b"0":
                message.ack_nowait()
            else:
                await message.nack(dead_letter=True)
        await within(subscription.wait_confirmed())
    assert (await counts(client)).ready_messages == 0
    for limit, found in ((0, 0), (2, 2), (9, 3), (None, 3)):
        assert len([each async for each in client.dead_letters.list("t", "s", limit=limit)]) == found
    await produced(client, 1, "other")
    received = await client.receive("other", "s", wait=timedelta(seconds=5), initial_position=EARLIEST)
    received.messages[0].ack_nowait()
    async with asyncio.timeout(10):
        while (await client.stats("other"))[0].subscriptions[0].leased_messages:
            await asyncio.sleep(0.01)
