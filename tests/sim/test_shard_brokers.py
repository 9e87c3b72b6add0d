"""A whole broker over a log in a store: a standby has its state, and serves in its place."""

from __future__ import annotations

import asyncio
import itertools
import random

import grpc
import pytest

from broker.errors import Fenced, PostdateError, Refused, StorageFailed, Unavailable
from broker.policy import OVERDUE_EXPIRE, TopicPolicy
from broker.rpc.status import to_status
from broker.storage.bulk import BulkDefinition, BulkEnd, BulkKind
from broker.storage.recurring_values import Definition, RecurringRule
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import START_MS, SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.recurrence import occurrences
from broker.topics.schedule_values import Cancel, ChangeResult
from broker.topics.topic import Topic
from tests.crash.history import LIVES, crash_config, observe
from tests.crash.test_recurring_crash import stored
from tests.depth import at_depth
from tests.harness import Node, Outgoing
from tests.sim.bulk_model import BulkModel
from tests.sim.shard_brokers import LEASE_MS, ShardBroker, make_bucket

HOUR_MS = 3_600_000
BULK_COUNT = 30


def test_each_standby_has_the_owners_state_and_serves_after_it() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        disks = {name: MemVfs() for name in "abc"}
        owner = ShardBroker(bucket, loop, "a", disks["a"])
        taking = await owner.follow()
        for number, play in enumerate(LIVES):
            await taking
            node = await owner.own()
            standby = ShardBroker(bucket, loop, "abc"[number + 1 & 1], disks["abc"[number + 1 & 1]])
            taking = await standby.follow(rank=number)
            await play(node)
            assert await standby.agrees_with(node)
            owner.kill()
            owner = standby
        await taking
        final = await owner.own()
        assert await observe(final) == await observe(node)
        await owner.stop()

    run_sim(scenario, seed=3)


def test_an_owner_that_resigns_is_followed_at_once() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        first, second = ShardBroker(bucket, loop, "a", MemVfs()), ShardBroker(bucket, loop, "b", MemVfs())
        await (await first.follow())
        node = await first.own()
        await node.produce("orders", [Outgoing(b"1")])
        taking = await second.follow(rank=1)
        await second.reach(node.broker.journal.durable_lsn)
        began = loop.time()
        await first.stop(resigns_to="b")
        await taking
        assert loop.time() - began < 1
        assert second.log.epoch == 2
        inbox = await (await second.own()).subscribe("orders", "all")
        await second.node.produce("orders", [Outgoing(b"2")])
        assert [message.payload for message in await inbox.wait(2)] == [b"1", b"2"]
        await second.stop()

    run_sim(scenario, seed=1)


def test_what_was_out_at_an_owner_that_is_lost_comes_again_with_the_number_that_it_had() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        first, second = ShardBroker(bucket, loop, "a", MemVfs()), ShardBroker(bucket, loop, "b", MemVfs())
        await (await first.follow())
        node = await first.own()
        inbox = await node.subscribe("orders", "all")
        nacked, done, _ = await node.produce(
            "orders", [Outgoing(b"nacked"), Outgoing(b"done"), Outgoing(b"out")]
        )
        await inbox.wait(3)
        await inbox.nack([nacked], after_ms=10)
        await inbox.ack([done])
        assert [message.attempt for message in await inbox.wait(1)] == [2]
        taking = await second.follow(rank=1)
        await second.reach(node.broker.journal.durable_lsn)
        first.kill()
        await taking
        inbox = await (await second.own()).subscribe("orders", "all")
        again = {message.payload: message.attempt for message in await inbox.wait(2)}
        assert again == {b"nacked": 2, b"out": 1}
        await second.stop()

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("seed", range(at_depth(change=1, deep=200)))
def test_a_recurring_schedule_goes_on_at_each_owner_with_no_occurrence_left_out_or_twice(seed: int) -> None:
    rng = random.Random(seed)
    definitions = {
        "interval": Definition(RecurringRule(interval_ms=3_000), b""),
        "cron": Definition(RecurringRule(cron="*/7 * * * * *", zone="Europe/Berlin"), b"", jitter_ms=4_000),
    }

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket(seed)
        disks = {name: MemVfs() for name in "abc"}
        owner = ShardBroker(bucket, loop, "a", disks["a"])
        await (await owner.follow())
        node = await owner.own()
        await node.create_subscription("orders", "all")
        for name, definition in definitions.items():
            await node.broker.recurring.put(node.topic("orders"), name, definition)
        for number in range(6):
            standby = ShardBroker(bucket, loop, "bca"[number % 3], disks["bca"[number % 3]])
            taking = await standby.follow(rank=number)
            await asyncio.sleep(rng.uniform(0, 9))
            match rng.choice(("killed", "killed as it stores", "cut off", "resigned")):
                case "killed":
                    owner.kill()
                case "killed as it stores":
                    before = node.broker.counters.recurring_stored
                    while node.broker.counters.recurring_stored == before:
                        await asyncio.sleep(0.0005)
                    owner.kill()
                case "cut off":
                    owner.store.is_cut = True
                    await taking
                    owner.kill()
                case "resigned":
                    await standby.reach(node.broker.journal.durable_lsn)
                    await owner.stop(resigns_to=standby.name)
            await taking
            owner, node = standby, await standby.own()
        await asyncio.sleep(10)
        messages = await stored(node.topic("orders"))
        for name, definition in definitions.items():
            times = messages[name]
            expected = itertools.islice(occurrences(definition, times[0] - 1), len(times))
            assert times == list(expected), name
            assert times[-1] > owner.clock.now_ms() - definition.jitter_ms - 1_000, name
            assert times[0] < START_MS + 10_000, name
        await owner.stop()

    run_sim(scenario, seed=seed)


@pytest.mark.parametrize("seed", range(at_depth(change=1, deep=200)))
def test_a_bulk_change_goes_on_at_each_owner_and_changes_each_message_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    model = BulkModel(kept=100)
    monkeypatch.setattr(Topic, "apply", model.watch(Topic.apply))

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket(seed)
        disks = {name: MemVfs() for name in "abc"}
        config = crash_config(bulk_step_messages=2)
        owner = ShardBroker(bucket, loop, "a", disks["a"], config)
        await (await owner.follow())
        node = await owner.own()
        await node.create_subscription("orders", "all")
        due_ms = START_MS + HOUR_MS
        for prefix in "ab":
            batch = [
                Outgoing(b"x", deliver_at_ms=due_ms + 1_000 * at, schedule_key=f"{prefix}{at}")
                for at in range(BULK_COUNT)
            ]
            await node.produce("orders", batch)
        for definition in (
            BulkDefinition(BulkKind.SHIFT, 60_000, key_prefix="a"),
            BulkDefinition(BulkKind.CANCEL, key_prefix="b"),
            BulkDefinition(BulkKind.SHIFT, -60_000),
        ):
            await node.broker.bulk_changes.begin(node.topic("orders"), definition)
        halfway = 0
        for number in range(6):
            standby = ShardBroker(bucket, loop, "bca"[number % 3], disks["bca"[number % 3]], config)
            taking = await standby.follow(rank=number)
            before = steps_of(node)
            while steps_of(node) < before + 4 and node.topic("orders").bulk.unended_ids():
                await asyncio.sleep(rng.uniform(0.0005, 0.5))
            halfway += bool(node.topic("orders").bulk.unended_ids())
            match rng.choice(("killed", "cut off", "resigned")):
                case "killed":
                    owner.kill()
                case "cut off":
                    owner.store.is_cut = True
                    await taking
                    owner.kill()
                case "resigned":
                    await standby.reach(node.broker.journal.durable_lsn)
                    await owner.stop(resigns_to=standby.name)
            await taking
            owner, node = standby, await standby.own()
            model.check_shown(node.topic("orders"))
        assert halfway > 1
        async with asyncio.timeout(600):
            while node.topic("orders").bulk.unended_ids():
                await asyncio.sleep(1)
        model.check_shown(node.topic("orders"))
        await model.check_messages(node.topic("orders"))
        ended = [track.standing for track in model.tracks.values()]
        assert [each.end for each in ended] == [BulkEnd.DONE] * 3
        assert [each.progress.done for each in ended] == [BULK_COUNT] * 3
        for message in model.messages.values():
            assert message.is_cancelled == message.key.startswith("b")
            assert message.is_cancelled or message.revision == 2
        await owner.stop()

    run_sim(scenario, seed=seed)


def steps_of(node: Node) -> int:
    """Messages that the bulk changes have come past."""
    bulk = node.topic("orders").bulk
    standings = [bulk.get(bulk_id) for bulk_id in bulk.ids()]
    return sum(each.progress.examined for each in standings if each is not None)


def test_an_owner_that_was_cut_off_fails_with_its_next_append_and_nothing_it_said_is_lost() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        first, second = ShardBroker(bucket, loop, "a", MemVfs()), ShardBroker(bucket, loop, "b", MemVfs())
        await (await first.follow())
        node = await first.own()
        await node.create_subscription("orders", "all")
        await node.produce("orders", [Outgoing(b"1")])
        taking = await second.follow(rank=1)
        await second.reach(node.broker.journal.durable_lsn)
        first.store.is_cut = True
        unknown = await node.submit("orders", [Outgoing(b"2")])
        await taking
        assert not first.lease.holds(), "it knew before anybody could take over"
        other = await second.own()
        first.store.is_cut = False
        with pytest.raises(StorageFailed) as lost:
            await unknown.durable
        with pytest.raises(StorageFailed) as refused:
            node.broker.check_serving()
        for caught in (lost, refused):
            assert not caught.value.names_files
            status = to_status(caught.value)
            assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert status.message.startswith("Another node owns the shard now")
        failure = node.failures[0]
        assert isinstance(failure, StorageFailed) and isinstance(failure.__cause__, Fenced)
        inbox = await other.subscribe("orders", "all")
        assert [message.payload for message in await inbox.wait(1)] == [b"1"]
        first.kill()
        await second.stop()

    run_sim(scenario, seed=1)


def test_a_standby_decides_nothing() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        first, second = ShardBroker(bucket, loop, "a", MemVfs()), ShardBroker(bucket, loop, "b", MemVfs())
        await (await first.follow())
        node = await first.own()
        await node.create_subscription("orders", "all")
        await node.produce("orders", [Outgoing(b"1", ttl_ms=50), Outgoing(b"2", deliver_after_ms=100)])
        taking = await second.follow(rank=1)
        await second.reach(node.broker.journal.durable_lsn)
        await asyncio.sleep(120)  # messages come due and expire, ledgers could be reclaimed
        standby = second.node.broker
        assert standby.journal.pending_bytes == 0 and not second.node.failures
        with pytest.raises(Unavailable):
            await second.node.produce("orders", [Outgoing(b"3")])
        assert second.node.topic("orders").index.scheduled_count() == 0, "what is due is taken from its index"
        assert not taking.done()
        taking.cancel()
        await second.node.stop()
        await first.stop()

    run_sim(scenario, seed=1)


def test_a_standby_that_is_cut_off_says_how_far_it_is_behind() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        first, second = ShardBroker(bucket, loop, "a", MemVfs()), ShardBroker(bucket, loop, "b", MemVfs())
        await (await first.follow())
        node = await first.own()
        taking = await second.follow(rank=1)
        assert await second.agrees_with(node)
        assert second.standby.lag_ms == 0
        second.store.is_cut = True
        await asyncio.sleep(60)
        assert 58_000 < second.standby.lag_ms <= 61_000
        second.store.is_cut = False
        assert await second.agrees_with(node)
        await asyncio.sleep(1)
        assert second.standby.lag_ms == 0
        taking.cancel()
        await second.node.stop()
        await first.stop()

    run_sim(scenario, seed=1)


@pytest.mark.parametrize(("skew_ms", "winner"), [(-10_000, "c"), (10_000, "c"), (1_000, "b")])
def test_a_standby_far_from_the_owners_clock_takes_over_last(skew_ms: int, winner: str) -> None:
    """It is the first in rank, and the only one where no other is there."""

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, first, second = (ShardBroker(bucket, loop, name, MemVfs()) for name in "abc")
        await (await owner.follow())
        node = await owner.own()
        first.clock.step(skew_ms)
        taking = {"b": await first.follow(rank=0), "c": await second.follow(rank=1)}
        await asyncio.sleep(15)
        owner.kill()
        await asyncio.wait(taking.values(), return_when=asyncio.FIRST_COMPLETED)
        assert [name for name, task in taking.items() if task.done()] == [winner]
        if winner == "c":
            second.kill()
            await asyncio.wait_for(taking["b"], 3 * LEASE_MS / 1e3)
        else:
            taking["c"].cancel()
            await second.node.stop()
        first.kill()
        assert node.failures == []

    run_sim(scenario, seed=1)


def test_a_folder_is_of_one_shard_or_of_none() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        alone, shared = MemVfs(), MemVfs()
        node = Node(alone, clock).open()
        await node.stop()
        in_cluster = ShardBroker(make_bucket(), loop, "a", alone)
        with pytest.raises(Fenced) as caught:
            await in_cluster.follow()
        assert caught.value.reason == "DATA_DIR_OF_ANOTHER_SHARD"
        member = ShardBroker(make_bucket(), loop, "a", shared)
        await (await member.follow())
        await member.own()
        await member.stop()
        assert not shared.exists("data/journal")
        with pytest.raises(Fenced):
            Node(shared, clock).open()

    run_sim(scenario, seed=1)


def test_backups_are_refused_in_a_cluster() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        member = ShardBroker(make_bucket(), loop, "a", MemVfs())
        await (await member.follow())
        node = await member.own()
        await node.produce("orders", [Outgoing(b"1")])
        with pytest.raises(Refused) as caught:
            await node.broker.backups.create("nightly")
        assert caught.value.reason == "NOT_IN_A_CLUSTER"
        await member.stop()

    run_sim(scenario, seed=1)


def test_a_log_that_lost_groups_is_refused() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket, disk = make_bucket(), MemVfs()
        member = ShardBroker(bucket, loop, "a", disk)
        await (await member.follow())
        await (await member.own()).produce("orders", [Outgoing(b"1")])
        await member.stop()
        last = max(name for name in bucket.objects if "/log/" in name)
        del bucket.objects[last]
        with pytest.raises(PostdateError) as caught:
            await ShardBroker(bucket, loop, "a", disk).follow()
        assert "the data directory contains lsn" in str(caught.value)

    run_sim(scenario, seed=1)


def test_a_crashed_disk_of_a_standby_goes_on_where_its_checkpoint_was() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        first, disk = ShardBroker(bucket, loop, "a", MemVfs()), MemVfs()
        await (await first.follow())
        node = await first.own()
        for number, policy in enumerate([CrashPolicy.LOSE_UNSYNCED, CrashPolicy.TORN, CrashPolicy.KEEP_ALL]):
            standby = ShardBroker(bucket, loop, "b", disk)
            taking = await standby.follow(rank=1)
            for _ in range(20):
                await node.produce("orders", [Outgoing(b"x" * 400, deliver_after_ms=50 * number)])
            if number == 1:
                await standby.node.checkpoint()
            await standby.reach(node.broker.journal.durable_lsn - 7)
            taking.cancel()
            disk = disk.crashed(disk.op_count, policy, loop.rng("crash"))
            standby.kill()
        standby = ShardBroker(bucket, loop, "b", disk)
        await standby.follow(rank=1)
        assert await standby.agrees_with(node)
        standby.kill()
        await first.stop()

    run_sim(scenario, seed=1)


def test_what_an_owner_with_a_clock_ahead_may_have_handed_out_counts_as_sent_and_comes_at_its_time() -> None:
    """Its clock was an hour ahead, and the clock of who takes over is right."""

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        first, second = ShardBroker(bucket, loop, "a", MemVfs()), ShardBroker(bucket, loop, "b", MemVfs())
        await (await first.follow())
        node = await first.own()
        due_ms = second.clock.now_ms() + HOUR_MS // 2
        inbox = await node.subscribe("orders", "all")
        keyed = [
            Outgoing(b"sent", deliver_at_ms=due_ms, schedule_key="sent"),
            Outgoing(b"pending", deliver_at_ms=due_ms + HOUR_MS, schedule_key="pending"),
        ]
        positions = await node.produce("orders", keyed)
        first.clock.step(HOUR_MS)
        assert [message.payload for message in await inbox.wait(1)] == [b"sent"]
        taking = await second.follow(rank=1)
        await second.reach(node.broker.journal.durable_lsn)
        first.kill()
        await taking
        node = await second.own()
        await asyncio.sleep(LEASE_MS / 1e3)
        schedule = node.topic("orders").schedule
        for names in (positions, ["sent", "pending"]):
            outcomes = await schedule.change(names, Cancel(), dry_run=True)
            assert [each.result for each in outcomes] == [ChangeResult.ALREADY_DELIVERED, ChangeResult.DONE]
        inbox = await node.subscribe("orders", "all")
        (message,) = await inbox.wait(1)
        assert message.payload == b"sent" and due_ms <= message.sent_ms < due_ms + 100
        await second.stop()

    run_sim(scenario, seed=1)


@pytest.mark.parametrize(("down_seconds", "expected"), [(1, [b"late"]), (3_600, [])])
def test_what_is_overdue_came_due_after_the_last_owner_may_have_been_there(
    down_seconds: float, expected: list[bytes]
) -> None:
    """In a take-over nobody is away for long: what is merely late does not expire."""

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        first = ShardBroker(bucket, loop, "a", MemVfs())
        await (await first.follow())
        node = await first.own()
        await node.create_subscription("orders", "all")
        topic = node.topic("orders")
        await topic.change_policy(TopicPolicy(overdue_action=OVERDUE_EXPIRE))
        await node.produce("orders", [Outgoing(b"late", deliver_after_ms=int(down_seconds * 500) + 4_000)])
        first.kill()
        second = ShardBroker(bucket, loop, "b", MemVfs())
        if down_seconds > 60:
            await asyncio.sleep(down_seconds)
        await (await second.follow(rank=1))
        node = await second.own()
        inbox = await node.subscribe("orders", "all")
        await asyncio.sleep(60)
        assert [message.payload for message in inbox.poll() if message.attempt == 1] == expected
        await second.stop()

    run_sim(scenario, seed=1)
