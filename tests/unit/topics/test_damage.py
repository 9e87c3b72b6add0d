"""One damaged message costs one message: the others are delivered, and it is set aside for good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from broker.model import Position, UInt32Column, bitmap_of
from broker.observe.metrics import SubscriptionCounters
from broker.policy import SubscriptionPolicy
from broker.rpc.dead_letters import _letter
from broker.storage.blocks import HEADER_BYTES
from broker.storage.log import TopicLog
from broker.subscriptions import damage as damage_module
from broker.subscriptions import requests
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.dead_letter_list import letters_after
from broker.topics.schedule_values import DueRange
from tests.depth import every_pair
from tests.harness import EARLIEST, Delivered, Inbox, Node, Outgoing, small_config
from tests.moving import moves

LETTERS = SubscriptionPolicy(max_delivery_attempts=3, initial_backoff_ms=0)
PLACED = SubscriptionPolicy(max_delivery_attempts=0, dead_letter_topic="dead")
NONE = SubscriptionPolicy(max_delivery_attempts=0)
TYPES = (
    SubscriptionType.SHARED,
    SubscriptionType.KEY_SHARED,
    SubscriptionType.EXCLUSIVE,
    SubscriptionType.FAILOVER,
)
BILLING = "billing"


def on_disk(scenario: Callable[[Node], Coroutine[None, None, None]]) -> None:
    """Run on a broker whose ledgers are large, and written to their files at once."""

    async def run(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(ledger_max_entries=1000)).open()
        await scenario(node)
        assert node.failures == []

    run_sim(run, 1)


def flip(vfs: MemVfs, path: str, at: int, bit: int = 3) -> None:
    """Turn one bit of a file over, behind the broker's back."""
    file = vfs.open(path)
    file.pwrite([bytes([file.pread(1, at)[0] ^ 1 << bit])], at)
    file.close()


async def damage(node: Node, position: Position, topic: str = "orders") -> None:
    """Flip a bit in the stored form of a message."""
    ledger = node.topic(topic).log.find(position.ledger_id)
    assert ledger is not None
    await node.checkpoint()
    rows = await ledger.read_rows(position.entry_id, 1)
    flip(
        node.vfs,
        ledger.name.path("data"),
        HEADER_BYTES + int(rows["offset"][0]) + int(rows["length"][0]) // 2,
    )


async def damage_rows(node: Node, ledger_id: int) -> str:
    ledger = node.topic("orders").log.find(ledger_id)
    assert ledger is not None
    path = ledger.name.path("rows")
    flip(node.vfs, path, HEADER_BYTES + 4)
    return path


def messages(count: int, deliver_after_ms: int = 0) -> list[Outgoing]:
    return [Outgoing(b"%d" % n, key=f"k{n % 3}", deliver_after_ms=deliver_after_ms) for n in range(count)]


def ids(found: list[Delivered]) -> set[Position]:
    return {each.position for each in found}


def counters(node: Node) -> SubscriptionCounters:
    return node.topic("orders").subscription(BILLING).counters


async def settled(subscription: Subscription) -> None:
    """Wait until everything is."""
    async with asyncio.timeout(60):
        while subscription.unsettled_count():
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_", "policy", "delay_ms"), every_pair(TYPES, [LETTERS, PLACED, NONE], [0, 500])
)
def test_a_damaged_message_is_set_aside_and_the_others_are_delivered(
    type_: int, policy: SubscriptionPolicy, delay_ms: int
) -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, type_=type_, policy=policy)
        positions = await node.produce("orders", messages(40, deliver_after_ms=delay_ms))
        bad = {positions[7], positions[8], positions[39]}
        for each in bad:
            await damage(node, each)
        with moves(node.broker, "postdate_damaged_messages"):
            inbox = await node.subscribe("orders", BILLING)
            found = await inbox.wait(37, seconds=30)
            assert ids(found) == set(positions) - bad
            await inbox.ack(ids(found))
            await settled(inbox.subscription)
        assert counters(node).damaged_messages == 3
        assert counters(node).unreadable_messages == 0
        is_lettered = policy is not NONE
        assert counters(node).dead_lettered_messages == (3 if is_lettered else 0)
        if is_lettered:
            await _check_letters(node, bad)
        # It is durable: the next life is owed nothing.
        await node.stop()
        again = Node(node.vfs, node.clock, node.config).open()
        assert again.topic("orders").subscription(BILLING).unsettled_count() == 0
        await again.stop()

    on_disk(scenario)


async def _check_letters(node: Node, bad: set[Position]) -> None:
    subscription = node.topic("orders").subscription(BILLING)
    office = node.broker.dead_letters
    held = office.still_held(subscription)
    assert sum(map(len, held.values())) == len(bad)
    # There is nothing to send again, and an empty message is not sent in its place.
    assert await office.requeue(subscription, None, 0) == {}
    assert office.still_held(subscription) == held
    assert await office.purge(subscription, None) == held


def test_a_letter_of_a_damaged_message_says_so_and_where_it_came_from() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, policy=LETTERS)
        positions = await node.produce("orders", messages(3))
        await damage(node, positions[1])
        inbox = await node.subscribe("orders", BILLING)
        await inbox.ack(ids(await inbox.wait(2)))
        await settled(inbox.subscription)
        places = node.broker.dead_letters.places(inbox.subscription)
        letters = [
            _letter(topic.name, position, frame, True)
            async for topic, position, frame in letters_after(places, Position(0, 0), 10)
        ]
        (letter,) = letters
        assert letter.reason == "damaged"
        assert (letter.original_id.ledger_id, letter.original_id.entry_id) == positions[1]
        assert letter.payload_bytes == 0
        assert letter.delivery_attempts == 0
        assert not letter.message.properties

    on_disk(scenario)


def test_what_is_settled_is_not_read() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, policy=NONE)
        positions = await node.produce("orders", messages(10))
        done = {positions[4].ledger_id: bitmap_of(np.array([positions[4].entry_id], dtype=np.uint32))}
        await requests.acknowledge(node.topic("orders").subscription(BILLING), done)
        await damage(node, positions[4])
        inbox = await node.subscribe("orders", BILLING)
        assert ids(await inbox.wait(9)) == set(positions) - {positions[4]}
        assert counters(node).damaged_messages == 0

    on_disk(scenario)


def test_what_is_settled_while_it_waits_to_be_sent_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, policy=NONE)
        inbox = await node.subscribe("orders", BILLING, permits=0)
        positions = await node.produce("orders", messages(10, deliver_after_ms=500))
        await asyncio.sleep(1)  # due, and taken from the index
        await damage(node, positions[4])
        await inbox.ack(positions[3:5])
        asked: list[int] = []
        read = TopicLog.read

        async def note(log: TopicLog, ledger_id: int, entry_ids: UInt32Column, bytes_max: int) -> Any:
            asked.extend(entry_ids.tolist())
            return await read(log, ledger_id, entry_ids, bytes_max)

        monkeypatch.setattr(TopicLog, "read", note)
        inbox.consumer.grant(100, 0)
        inbox.subscription.work.set()
        left = [*positions[:3], *positions[5:]]
        assert ids(await inbox.wait(8)) == set(left)
        assert asked == [each.entry_id for each in left]

    on_disk(scenario)


def hold_reads(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Let reads of messages wait. The first event says that one does, the second lets them go on."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    read = TopicLog.read

    async def wait(log: TopicLog, ledger_id: int, entry_ids: UInt32Column, bytes_max: int) -> Any:
        begun.set()
        await go_on.wait()
        return await read(log, ledger_id, entry_ids, bytes_max)

    monkeypatch.setattr(TopicLog, "read", wait)
    return begun, go_on


@pytest.mark.parametrize("policy", [LETTERS, NONE], ids=["dead letters", "none"])
def test_a_damaged_message_that_is_settled_while_it_is_read_is_not_set_aside(
    policy: SubscriptionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, policy=policy)
        positions = await node.produce("orders", messages(10))
        await damage(node, positions[4])
        begun, go_on = hold_reads(monkeypatch)
        inbox = await node.subscribe("orders", BILLING)
        await begun.wait()
        assert await inbox.ack([positions[4]]) == []
        go_on.set()
        await inbox.ack(ids(await inbox.wait(9)))
        await settled(inbox.subscription)
        assert node.broker.dead_letters.still_held(inbox.subscription) == {}
        expected = {"acked_messages": 10, "damaged_messages": 0, "dead_lettered_messages": 0}
        assert {name: getattr(counters(node), name) for name in expected} == expected

    on_disk(scenario)


def test_a_message_that_cannot_be_read_and_is_settled_meanwhile_is_not_said_to_stay_pending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, policy=NONE)
        positions = await node.produce("orders", messages(20))
        await node.stop()
        node = Node(node.vfs, node.clock, node.config).open()
        await damage_rows(node, positions[0].ledger_id)
        begun, go_on = hold_reads(monkeypatch)
        inbox = await node.subscribe("orders", BILLING)
        await begun.wait()
        assert await inbox.ack(positions[:15]) == []
        go_on.set()
        await asyncio.sleep(0.5)  # before it is tried again
        assert counters(node).unreadable_messages == 5
        (told,) = [each for each in caplog.records if each.msg.startswith("Messages cannot be read")]
        assert told.levelname == "ERROR" and told.fields["messages"] == 5  # type: ignore[attr-defined]

    on_disk(scenario)


def test_a_message_that_is_damaged_after_it_was_sent_becomes_a_letter_without_the_others() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, policy=SubscriptionPolicy(max_delivery_attempts=1))
        positions = await node.produce("orders", messages(10))
        inbox = await node.subscribe("orders", BILLING)
        await inbox.wait(10)
        await damage(node, positions[3])
        await inbox.nack(positions)
        await settled(inbox.subscription)
        assert counters(node).dead_lettered_messages == 10

    on_disk(scenario)


@pytest.mark.parametrize("type_", TYPES)
def test_rows_that_are_damaged_hold_up_their_own_and_settle_nothing(type_: int) -> None:
    async def scenario(node: Node) -> None:
        node = await _restarted(node, type_)
        first = next(iter(node.topic("orders").log)).name.ledger_id
        path = await damage_rows(node, first)
        with moves(node.broker, "postdate_unreadable_messages"):
            inbox = await node.subscribe("orders", BILLING)
            found = await inbox.wait(20)
        assert {each.position.ledger_id for each in found} == {first + 1}
        await inbox.ack(ids(found))
        assert counters(node).unreadable_messages == 40
        assert counters(node).damaged_messages == 0
        flip(node.vfs, path, HEADER_BYTES + 4)  # the file is put right
        await inbox.ack(ids(await inbox.wait(40)))
        await settled(inbox.subscription)

    async def _restarted(node: Node, type_: int) -> Node:
        config = small_config(ledger_max_entries=40, max_backoff_ms=2_000)
        await node.stop()
        node = Node(MemVfs(), node.clock, config).open()
        await node.create_subscription("orders", BILLING, type_=type_, policy=NONE)
        for _ in range(3):
            await node.produce("orders", messages(20))
        await node.stop()
        return Node(node.vfs, node.clock, config).open()

    on_disk(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("max_backoff_ms", [0, 1, 5_000])
def test_what_cannot_be_read_is_looked_at_now_and_then_whatever_the_policy(
    type_: int, max_backoff_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait that a policy may hold, the shortest ones too: healthy messages behind it are delivered."""
    looks: list[int] = []
    put_off = damage_module._put_off

    def counted(subscription: Subscription, *others: Any) -> None:
        looks.append(subscription.clock.now_ms())
        assert len(looks) < 100, "nothing else gets a turn"
        put_off(subscription, *others)

    monkeypatch.setattr(damage_module, "_put_off", counted)

    async def scenario(node: Node) -> None:
        config = small_config(ledger_max_entries=40)
        await node.stop()
        node = Node(MemVfs(), node.clock, config).open()
        policy = SubscriptionPolicy(
            max_delivery_attempts=0, initial_backoff_ms=0, max_backoff_ms=max_backoff_ms
        )
        await node.create_subscription("orders", BILLING, type_=type_, policy=policy)
        for _ in range(3):
            await node.produce("orders", messages(20))
        await node.stop()
        node = Node(node.vfs, node.clock, config).open()
        first = next(iter(node.topic("orders").log)).name.ledger_id
        await damage_rows(node, first)
        inbox = await node.subscribe("orders", BILLING)
        found = await inbox.wait(20)
        assert {each.position.ledger_id for each in found} == {first + 1}
        await asyncio.sleep(20)
        rounds = len(looks) / sum(each - looks[0] < 500 for each in looks)
        assert 20_000 / max(1_000, max_backoff_ms) - 1 <= rounds <= 21
        await inbox.ack(ids(found))

    on_disk(scenario)


def test_times_that_are_damaged_do_not_stop_what_comes_after_them() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, policy=NONE)
        positions = await node.produce("orders", messages(20))
        await node.stop()
        path = node.topic("orders").log.find(positions[0].ledger_id).name.path("times")  # type: ignore[union-attr]
        node = Node(node.vfs, node.clock, node.config).open()
        flip(node.vfs, path, HEADER_BYTES + 4)
        later = await node.produce("orders", messages(5))
        inbox = await node.subscribe("orders", BILLING)
        assert ids(await inbox.wait(5)) == set(later)
        assert counters(node).unreadable_messages == 20

    on_disk(scenario)


def test_a_damaged_message_is_left_out_of_lists_and_those_around_it_are_shown() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, position=EARLIEST)
        positions = await node.produce("orders", messages(10, deliver_after_ms=100_000))
        await damage(node, positions[5])
        topic = node.topic("orders")
        await topic.index.caught_up()
        page = await topic.schedule.page(DueRange(0, 1 << 60), "", None, 100)
        assert {each.position for each in page.scheduled} == set(positions) - {positions[5]}

    on_disk(scenario)


def test_a_damaged_message_holds_its_schedule_key_and_can_be_replaced() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", BILLING, policy=NONE)
        keyed = Outgoing(b"a", deliver_after_ms=5_000, schedule_key="invoice-1")
        (position,) = await node.produce("orders", [keyed])
        await damage(node, position)
        (other,) = await node.produce("orders", [keyed], replace=True)
        inbox: Inbox = await node.subscribe("orders", BILLING)
        assert ids(await inbox.wait(1)) == {other}
        await asyncio.sleep(10)
        assert not inbox.poll()
        assert counters(node).damaged_messages == 0

    on_disk(scenario)
