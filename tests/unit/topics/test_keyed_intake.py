"""A schedule key is taken while a message with it waits: refused, replaced, freed, and never by a mere hash."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from broker.errors import AlreadyExists, InvalidRequest, OutOfRange, PostdateError, Unavailable
from broker.jobs.verify import verify_data_dir
from broker.model import KeySpans, Position, UInt64Column
from broker.runtime.vfs import Vfs, replace_file
from broker.storage import schedule_hash
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.dump import dump_file
from broker.storage.layout import Layout
from broker.storage.log import RecordsUnderWay, TopicLog
from broker.storage.manifest import decode_topic, encode_topic
from broker.storage.named_files import read_named
from broker.storage.records import Replaced
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import DATA_DIR, Node, Outgoing, positions_of, small_config
from tests.moving import moves

MINUTE_MS = 60_000
hash_keys = schedule_hash.hash_keys


def run(scenario: Callable[[Node], Awaitable[Node | None]], **changes: Any) -> None:
    """Run a scenario on a node; what is on the disk at its end must be clean."""

    async def whole(_: SimLoop, clock: SimClock) -> Node:
        node = Node(MemVfs(), clock, small_config(**{"ledger_max_entries": 20, **changes})).open()
        node = await scenario(node) or node
        await node.stop()
        return node

    node = run_sim(whole, seed=3)
    assert node.failures == []
    assert verify_data_dir(node.vfs, DATA_DIR).problems == []


@pytest.fixture
def few_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of 4 bits: nearly every key meets another one with its hash."""

    whole = schedule_hash.hash_spans

    def hashed(keys: KeySpans) -> UInt64Column:
        hashes = whole(keys)
        return np.where(hashes == 0, hashes, hashes % np.uint64(16) + np.uint64(1))

    monkeypatch.setattr(schedule_hash, "hash_spans", hashed)


def message(key: str, after_ms: int = MINUTE_MS, **options: Any) -> Outgoing:
    return Outgoing(f"of {key}".encode(), deliver_after_ms=after_ms, schedule_key=key, **options)


async def send(
    node: Node, *keys: str, replace: bool = False, after_ms: int = MINUTE_MS, **options: Any
) -> list[Position]:
    return await node.produce("t", [message(key, after_ms, **options) for key in keys], replace=replace)


async def find(node: Node, *keys: str) -> list[Position | None]:
    return await node.topic("t").keys.find(keys)


def restarted(node: Node) -> Node:
    return node.crash(CrashPolicy.LOSE_UNSYNCED).open()


def test_a_taken_key_is_refused_and_its_holder_named() -> None:
    async def scenario(node: Node) -> None:
        first, second = await send(node, "a", "b")
        due_ms = int((await node.topic("t").log.times_of(1, np.array([1], np.uint32)))[0])
        with pytest.raises(AlreadyExists) as refused:
            await send(node, "c", "d", "b")
        assert (refused.value.reason, refused.value.field) == (
            "SCHEDULE_KEY_TAKEN",
            "messages[2].schedule_key",
        )
        assert refused.value.facts == {"ledger_id": 1, "entry_id": 1, "deliver_at_ms": due_ms}
        assert await find(node, "a", "b", "c", "a") == [
            first,
            second,
            None,
            first,
        ]  # nothing of it was stored
        assert node.topic("t").log.end == Position(1, 2)

    run(scenario)


def test_a_key_twice_in_a_batch_names_the_second_message() -> None:
    async def scenario(node: Node) -> None:
        await send(node, "z")
        with pytest.raises(InvalidRequest) as refused:
            await send(node, "a", "b", "a", "b", replace=True)
        assert refused.value.reason == "SCHEDULE_KEY_REPEATED"
        assert refused.value.field == "messages[2].schedule_key"

    run(scenario)


def test_a_message_that_replaces_takes_the_place_in_one_record() -> None:
    async def scenario(node: Node) -> None:
        inbox = await node.subscribe("t", "s")
        old = await send(node, "a", "b")
        new = await send(node, "c", "a", replace=True)
        assert await find(node, "a", "b", "c") == [new[1], old[1], new[0]]
        await asyncio.sleep(2 * MINUTE_MS / 1000)
        assert {each.position for each in inbox.poll()} == {old[1], *new}

    run(scenario)


def test_a_key_is_free_once_its_message_is_due() -> None:
    async def scenario(node: Node) -> None:
        (old,) = await send(node, "a", after_ms=1_000)
        await asyncio.sleep(2)
        assert await find(node, "a") == [old]  # due, and nothing newer has it
        (new,) = await send(node, "a")
        assert await find(node, "a") == [new]

    run(scenario, seal_after_ms=MINUTE_MS)


def test_an_undelayed_message_takes_no_key_but_respects_one() -> None:
    async def scenario(node: Node) -> None:
        await send(node, "a", "b")
        with pytest.raises(AlreadyExists):
            await send(node, "a", after_ms=0)
        await send(node, "a", after_ms=0, replace=True)
        assert await find(node, "a") == [None]
        await send(node, "c", after_ms=0)
        await send(node, "c", after_ms=0)
        (new,) = await send(node, "c")
        assert await find(node, "c") == [new]

    run(scenario)


def test_a_batch_that_is_refused_for_its_times_holds_no_key() -> None:
    async def scenario(node: Node) -> None:
        with pytest.raises(OutOfRange):
            await send(node, "a", after_ms=2 * MINUTE_MS)
        await send(node, "a")

    run(scenario, max_delay_ms=MINUTE_MS)


def test_a_repeat_is_answered_before_keys_are_looked_at() -> None:
    async def scenario(node: Node) -> None:
        first = [message(key, sequence_id=number) for number, key in enumerate("ab", 1)]
        more = [*first, message("c", sequence_id=3)]
        positions = await node.produce("t", first, "p")
        accepted = await node.submit("t", first, "p")
        assert positions_of(accepted.ids) == positions and accepted.ids[0].duplicate
        accepted = await node.submit("t", more, "p")
        await accepted.durable
        assert positions_of(accepted.ids)[:2] == positions
        with pytest.raises(
            AlreadyExists
        ) as refused:  # message 2 is new, and its place is that in the request
            await node.produce("t", [*more, message("a", sequence_id=4)][1:], "p")
        assert refused.value.field == "messages[2].schedule_key"

    run(scenario)


def test_of_batches_under_way_one_gets_the_key() -> None:
    async def scenario(node: Node) -> None:
        await send(node, "z")
        results = await asyncio.gather(*(send(node, "a", f"b{i}") for i in range(8)), return_exceptions=True)
        assert [isinstance(each, AlreadyExists) for each in results].count(True) == 7
        ids = await asyncio.gather(*(send(node, "a", replace=True) for _ in range(8)))
        assert await find(node, "a") == [max(positions[0] for positions in ids)]
        amendments = node.topic("t").log.amendments[1]
        assert len(amendments.cancelled) == 8  # the first one, and seven that were replaced in turn

    run(scenario)


@pytest.mark.usefixtures("few_hashes")
def test_who_looks_for_long_does_not_overlook_what_came_meanwhile_intake_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(node: Node) -> None:
        (value,) = schedule_hash.hash_keys([b"a"]).tolist()
        names = [f"other-{number}" for number in range(100)]
        others = [name for name in names if schedule_hash.hash_keys([name.encode()])[0] == value]
        await send(node, others[0])  # it has to be read before "a" is known to be free
        reads, seconds = TopicLog.read, iter((0, 5, 0, 0, 0))

        async def slow(*arguments: Any) -> Any:
            await asyncio.sleep(next(seconds))
            return await reads(*arguments)

        monkeypatch.setattr(TopicLog, "read", slow)
        results = await asyncio.gather(send(node, "a"), send(node, "a"), return_exceptions=True)
        monkeypatch.setattr(TopicLog, "read", reads)
        assert [isinstance(each, AlreadyExists) for each in results] == [False, True]

    run(scenario)


def test_batches_with_other_keys_do_not_wait_for_the_disk() -> None:
    async def scenario(node: Node) -> None:
        await send(node, "z")
        accepted = [await node.submit("t", [message(f"k{number}")]) for number in range(5)]
        assert not any(each.durable.done() for each in accepted)  # all of them are in one group
        await asyncio.gather(*(each.durable for each in accepted))

    run(scenario)


def test_a_holder_that_is_being_changed_is_waited_for() -> None:
    async def scenario(node: Node) -> None:
        (old,) = await send(node, "a")
        topic = node.topic("t")
        entry_ids = np.array([old.entry_id], dtype=np.uint32)
        changed = Changed(entry_ids, await topic.log.times_of(old.ledger_id, entry_ids))
        record = Cancelled(topic.topic_id, {old.ledger_id: changed})
        done = topic.submit_record(record)
        topic.log.under_way.hold(record.entries)
        (new,) = await send(node, "a")  # refused, if it had not waited
        assert done.done() and await find(node, "a") == [new]

    run(scenario)


@pytest.mark.parametrize("is_mutant", [False, True])
def test_a_message_that_gives_way_is_not_handed_out_meanwhile(
    is_mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time comes, and a consumer, between the submission of what replaces it and the moment that is applied."""
    if is_mutant:
        monkeypatch.setattr(RecordsUnderWay, "hold", lambda self, entries: None)

    async def scenario(node: Node) -> None:
        inbox = await node.subscribe("t", "s")
        await send(node, "a", after_ms=1_000)
        topic = node.topic("t")
        durable = asyncio.Event()
        submitted: list[Any] = []

        def slowly(record: Any) -> asyncio.Future[None]:
            async def wait() -> None:
                await durable.wait()
                await submit(record)

            submitted.append(record)
            return asyncio.ensure_future(wait())

        submit = topic.submit_record
        monkeypatch.setattr(topic, "submit_record", slowly)
        sending = asyncio.ensure_future(send(node, "a", replace=True))
        await asyncio.sleep(5)
        assert [type(record) for record in submitted] == [Replaced]
        assert topic.frontier_ms >= int(submitted[0].cancelled.ledgers[1].old_ms[0])  # its time has come
        durable.set()
        (new,) = await sending
        await inbox.wait(1)
        assert [each.position for each in inbox.received] == [new]

    if is_mutant:
        with pytest.raises(AssertionError):
            run(scenario)
    else:
        run(scenario)


def test_of_a_key_the_newest_that_waits_is_found_before_a_newer_one_that_is_due() -> None:
    async def scenario(node: Node) -> None:
        (first,) = await send(node, "a", after_ms=1_000)
        await asyncio.sleep(2)
        (second,) = await send(node, "a", after_ms=1_000)
        await asyncio.sleep(2)
        assert await find(node, "a") == [second]  # both are due: the newest
        topic = node.topic("t")
        entry_ids = np.array([first.entry_id], dtype=np.uint32)
        times = await topic.log.times_of(first.ledger_id, entry_ids)
        record = Moved(topic.topic_id, {first.ledger_id: Changed(entry_ids, times, times + MINUTE_MS)})
        topic.log.under_way.hold(record.entries)
        await topic.submit_record(record)
        assert await find(node, "a") == [first]  # it waits again, and is older
        assert await find(node, "a", "b", "a") == [first, None, first]

    run(scenario)


def test_of_several_batches_under_way_the_one_with_the_key_is_waited_for() -> None:
    """Hashes of batches that landed lie among those under way, and do not count (INTAKE-2)."""

    async def scenario(node: Node) -> None:
        for turn in range(6):
            accepted = [
                await node.submit("t", [message(f"k{turn}-{batch}-{number}") for number in range(20)])
                for batch in range(5)
            ]
            with pytest.raises(AlreadyExists) as refused:
                await send(node, "new", f"k{turn}-3-7")
            assert refused.value.field == "messages[1].schedule_key"
            assert accepted[3].durable.done()
            await asyncio.gather(*(each.durable for each in accepted))
            if turn:
                with pytest.raises(AlreadyExists):
                    await send(node, f"k{turn - 1}-0-0")

    run(scenario, ledger_max_entries=10_000)


@pytest.mark.slow
@pytest.mark.usefixtures("few_hashes")
def test_keys_of_one_hash_do_not_get_in_each_others_way() -> None:
    """Random histories against a dict: produce, replace, fall due, seal, merge, checkpoint, restart."""

    async def scenario(node: Node) -> Node:
        rng = random.Random(11)
        held: dict[str, tuple[Position, int]] = {}  # key -> who has it, and until when
        names = [f"key-{number}" for number in range(40)]
        for step in range(300):
            action = rng.random()
            now_ms = node.clock.now_ms()
            waiting = {key: at for key, (at, due_ms) in held.items() if due_ms > now_ms}
            if action < 0.75:
                keys = rng.sample(names, rng.randrange(1, 5))
                after_ms = rng.choice((0, 20_000, 300_000))
                is_replaced = rng.random() < 0.4
                taken = [place for place, key in enumerate(keys) if key in waiting]
                try:
                    positions = await send(node, *keys, replace=is_replaced, after_ms=after_ms)
                except AlreadyExists as error:
                    refused = error.field
                else:
                    refused = ""
                wanted = f"messages[{taken[0]}].schedule_key" if taken and not is_replaced else ""
                assert refused == wanted, step
                if refused:
                    continue
                for key, position in zip(keys, positions, strict=True):
                    held.pop(key, None)
                    if after_ms:
                        held[key] = position, now_ms + after_ms
            elif action < 0.9:
                await asyncio.sleep(rng.choice((0.5, 6, 20)))
            elif action < 0.95:
                await node.checkpoint()
            else:
                node = restarted(node)
            now_ms = node.clock.now_ms()
            found = await find(node, *names) if step % 5 == 0 else []
            for key, known in zip(names, found, strict=False):
                if key in held and held[key][1] > now_ms:
                    assert known == held[key][0], (step, key)
        return node

    run(scenario, seal_after_ms=5_000)


def test_keys_survive_a_restart_whatever_was_sealed() -> None:
    async def scenario(node: Node) -> Node:
        positions = []
        for number in range(12):
            positions += await send(node, f"k{number}")
            if number % 4 == 3:
                await asyncio.sleep(6)  # sealed
                await node.checkpoint()
        (late,) = await send(node, "late")  # in the journal only
        node = restarted(node)
        names = [f"k{number}" for number in range(12)]
        assert await find(node, *names, "late") == [*positions, late]
        for key in (*names, "late"):
            with pytest.raises(AlreadyExists):
                await send(node, key)
        assert node.topic("t").keys.stats().runs > 0
        return node

    run(scenario, seal_after_ms=5_000)


def test_rows_without_keys_are_not_read_again() -> None:
    async def scenario(node: Node) -> Node:
        await node.produce("t", [Outgoing(b"plain", deliver_after_ms=MINUTE_MS)])
        await node.checkpoint()
        node = restarted(node)
        assert not node.topic("t").keys.is_used
        (held,) = await send(node, "a")
        node = restarted(node)
        assert await find(node, "a") == [held]
        return node

    run(scenario)


def damage(vfs: Vfs, path: str) -> None:
    file = vfs.open(path)
    file.pwrite([b"\xff\xff\xff\xff"], 100)
    file.sync()
    file.close()


async def sealed(node: Node, count: int = 3) -> tuple[list[Position], str]:
    """Messages whose keys are in a run, and its file."""
    positions = await send(node, *(f"k{number}" for number in range(count)))
    await asyncio.sleep(6)
    await node.checkpoint()
    topic = node.topic("t")
    run_ids = topic.capture().image.key_run_ids
    return positions, f"{Layout(DATA_DIR).keys(topic.topic_id)}/{run_ids[0]}.keys"


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_damaged_run_is_built_again(is_missing: bool) -> None:
    async def scenario(node: Node) -> Node:
        positions, path = await sealed(node)
        if is_missing:
            node.vfs.remove(path)
            node.vfs.sync_dir(path.rpartition("/")[0])
        else:
            damage(node.vfs, path)
        problems = verify_of_copy(node)
        assert any(path in problem for problem in problems), problems
        node = restarted(node)
        with moves(node.broker, "postdate_schedule_key_rebuilds"):
            with pytest.raises(AlreadyExists):
                await send(node, "k1")
            assert await find(node, "k0", "k1", "k2") == positions
        assert node.broker.counters.schedule_key_rebuilds == 1
        await send(node, "new")
        return node

    run(scenario, seal_after_ms=5_000)


def verify_of_copy(node: Node) -> list[str]:
    """Return what `verify` reports of the state after a crash."""
    return verify_data_dir(node.vfs.crashed(node.vfs.op_count, CrashPolicy.LOSE_UNSYNCED), DATA_DIR).problems


def test_keyed_calls_wait_for_rows_that_cannot_be_read_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(node: Node) -> Node:
        await send(node, "a")
        await node.checkpoint()
        reads = TopicLog.read_rows

        async def unreadable(*_: object) -> None:
            raise Unavailable("the disk is away")

        monkeypatch.setattr(TopicLog, "read_rows", unreadable)
        node = restarted(node)
        with pytest.raises(Unavailable) as refused:
            await send(node, "a")
        assert refused.value.reason == "SCHEDULE_KEYS_UNAVAILABLE"
        await node.produce("t", [Outgoing(b"plain")])
        monkeypatch.setattr(TopicLog, "read_rows", reads)
        await asyncio.sleep(2)
        with pytest.raises(AlreadyExists):
            await send(node, "a")
        return node

    run(scenario)


def test_a_checkpoint_while_rows_are_read_names_no_later_place_keyupkeep_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(node: Node) -> Node:
        (held,) = await send(node, "a")
        await node.checkpoint()
        reads = TopicLog.read_rows

        async def endless(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(TopicLog, "read_rows", endless)
        node = restarted(node)
        await asyncio.sleep(0.1)
        await node.produce("t", [Outgoing(b"plain")])
        await node.checkpoint()
        monkeypatch.setattr(TopicLog, "read_rows", reads)
        node = restarted(node)
        assert await find(node, "a") == [held]
        return node

    run(scenario)


def test_a_checkpoint_before_the_runs_are_taken_up_forgets_none() -> None:
    async def scenario(node: Node) -> Node:
        positions, path = await sealed(node)
        await send(node, "other")  # so that there is something for a checkpoint
        node = restarted(node)
        await node.checkpoint()
        assert node.vfs.exists(path)
        node = restarted(node)
        assert await find(node, "k2", "k0") == [positions[2], positions[0]]
        return node

    run(scenario, seal_after_ms=5_000)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_due_message_that_is_moved_holds_its_key_again(is_restarted: bool) -> None:
    """No run has it any more: seals leave out what is due (KEYUPKEEP-4)."""

    async def scenario(node: Node) -> Node:
        (old,) = await send(node, "a", after_ms=3_000)
        await asyncio.sleep(8)
        topic = node.topic("t")
        assert await find(node, "a") == [None]
        entry_ids = np.array([old.entry_id], dtype=np.uint32)
        times = await topic.log.times_of(old.ledger_id, entry_ids)
        changed = Changed(entry_ids, times, times + 10 * MINUTE_MS)
        record = Moved(topic.topic_id, {old.ledger_id: changed})
        topic.log.under_way.hold(record.entries)
        await topic.submit_record(record)
        if is_restarted:
            await node.checkpoint()
            node = restarted(node)
        with pytest.raises(AlreadyExists):
            await send(node, "a")
        assert await find(node, "a") == [old]
        return node

    run(scenario, seal_after_ms=5_000)


@pytest.mark.slow
def test_seals_merges_and_dropped_ledgers_leave_no_file_behind() -> None:
    async def scenario(node: Node) -> None:
        inbox = await node.subscribe("t", "s")
        await sealed(node)
        for number in range(30):
            await send(node, f"n{number}", f"o{number}", f"p{number}", after_ms=30_000)
            await asyncio.sleep(1)
        await inbox.wait(90)
        await inbox.ack(each.position for each in inbox.received)
        await asyncio.sleep(60)
        await inbox.ack(each.position for each in inbox.poll())
        await asyncio.sleep(10)
        await node.checkpoint()
        topic = node.topic("t")
        await topic.drop_ledgers([ledger.name.ledger_id for ledger in topic.log][:-1], 0)
        await asyncio.sleep(10)
        await node.checkpoint()
        run_ids = topic.capture().image.key_run_ids
        names = node.vfs.list_dir(Layout(DATA_DIR).keys(topic.topic_id))
        assert sorted(names) == sorted(f"{run_id}.keys" for run_id in run_ids)
        assert len(run_ids) < 10

    run(scenario, seal_after_ms=5_000)


def test_keys_that_came_while_others_were_sealed_are_sealed_next() -> None:
    """However many they are: a lookup goes through all that are in memory."""

    async def scenario(node: Node) -> None:
        await send(node, "first", after_ms=600_000)
        keys = node.topic("t").keys._used.keys
        seal, sealed_counts = keys.seal, []

        async def slow_seal() -> bool:
            sealed_counts.append(keys.unsealed_count)
            sealing = asyncio.ensure_future(seal())
            await asyncio.sleep(0)  # what comes from here on is not part of it
            if len(sealed_counts) == 1:
                await send(node, *(f"meanwhile{number}" for number in range(5)), after_ms=600_000)
            return await sealing

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keys, "seal", slow_seal)
            keys_before = [f"key{number}" for number in range(3)]
            await send(node, *keys_before, after_ms=600_000)
            await asyncio.sleep(1)
        assert sealed_counts == [4, 5]
        assert not keys.unsealed_count

    run(scenario, seal_after_ms=60_000)


def test_keys_that_come_faster_than_they_are_sealed_wait() -> None:
    async def scenario(node: Node) -> None:
        await send(node, "first", after_ms=600_000)
        keys = node.topic("t").keys._used.keys
        seal, may_seal = keys.seal, asyncio.Event()

        async def send_all(names: list[str]) -> None:
            for name in names:
                await send(node, name, after_ms=600_000)

        async def held_seal() -> bool:
            await may_seal.wait()
            return await seal()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keys, "seal", held_seal)
            names = [f"key{number}" for number in range(200)]
            sending = asyncio.create_task(send_all(names))
            await asyncio.sleep(60)
            assert keys.unsealed_count == 20 * keys.limits.seal_count + 1
            may_seal.set()
            await sending
            await asyncio.sleep(5)
        assert keys.unsealed_count < keys.limits.seal_count
        assert None not in await find(node, *names)

    run(scenario, seal_after_ms=600_000)


def test_keys_that_come_faster_than_they_are_sealed_wait_for_one_seal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one begins at once, and is not waited for as well."""

    async def scenario(node: Node) -> None:
        await send(node, "first", after_ms=600_000)
        keys = node.topic("t").keys._used.keys
        write, may_write = keys._writer.seal, asyncio.Semaphore(0)

        async def held_write(*arguments: Any) -> Any:
            await may_write.acquire()
            return await write(*arguments)

        monkeypatch.setattr(keys._writer, "seal", held_write)

        async def send_all() -> None:
            for number in range(100):
                await send(node, f"key{number}", after_ms=600_000)

        sending = asyncio.create_task(send_all())
        await asyncio.sleep(60)
        end = node.topic("t").log.end
        may_write.release()
        await asyncio.sleep(60)
        assert keys.counters.seals == 1 and not sending.done()
        assert node.topic("t").log.end > end  # while the next one is written
        for _ in range(100):
            may_write.release()
        await asyncio.wait_for(sending, 60)

    run(scenario, seal_after_ms=600_000)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_who_waits_for_the_rows_is_told_that_the_topic_is_deleted_or_the_broker_stops(
    is_deleted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of batches would be stuck with it, also for its other topics."""

    async def scenario(node: Node) -> Node:
        await send(node, "a")
        await node.checkpoint()

        async def endless(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(TopicLog, "read_rows", endless)
        node = restarted(node)
        calls = [asyncio.ensure_future(call) for call in (send(node, "b"), send(node, "c"), find(node, "a"))]
        await asyncio.sleep(1)
        assert not any(call.done() for call in calls)
        if is_deleted:
            await node.broker.registry.delete_topic("t")
        else:
            await node.stop()
        refusals = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 1)
        reasons = {refusal.reason for refusal in refusals if isinstance(refusal, PostdateError)}
        assert reasons == {"TOPIC_NOT_FOUND" if is_deleted else "DRAINING"}
        return node if is_deleted else restarted(node)

    run(scenario)


def test_a_batch_that_is_refused_begins_no_lookup() -> None:
    async def scenario(node: Node) -> None:
        await node.produce("t", [Outgoing(b"plain", deliver_after_ms=MINUTE_MS)])
        topic = node.topic("t")
        await topic.change_policy(replace(topic.policies.decided, max_pending_messages=1))
        with pytest.raises(PostdateError):
            await send(node, "a")
        assert not topic.keys.is_used

    run(scenario)


def test_nothing_is_kept_of_a_topic_without_keys() -> None:
    async def scenario(node: Node) -> None:
        await node.produce("t", [Outgoing(b"plain", deliver_after_ms=MINUTE_MS)])
        topic = node.topic("t")
        assert not topic.keys.is_used and topic._keyed is None
        assert not [name for name in node.broker.supervisor.names() if "schedule keys" in name]

    run(scenario)


def test_dump_prints_a_run_and_what_is_wrong_with_it() -> None:
    async def scenario(node: Node) -> None:
        positions, path = await sealed(node)
        hashes = [f"{value:016x}" for value in hash_keys([b"k0", b"k1", b"k2"]).tolist()]
        found = sorted(zip(hashes, map(list, positions), strict=True))
        lines = list(dump_file(node.vfs, path))
        assert [(line["hash"], line["position"]) for line in lines if line["line"] == "key"] == found
        assert (lines[0]["file"], lines[1]["count"]) == ("key run", 3)
        copy = node.vfs.crashed(node.vfs.op_count, CrashPolicy.KEEP_ALL)
        damage(copy, path)
        assert [line["line"] for line in dump_file(copy, path)] == ["header", "run", "error"]

    run(scenario, seal_after_ms=5_000)


def test_verify_names_an_entry_whose_key_is_in_no_run() -> None:
    async def scenario(node: Node) -> None:
        await sealed(node)
        copy = node.vfs.crashed(node.vfs.op_count, CrashPolicy.KEEP_ALL)
        path = Layout(DATA_DIR).topic_manifest(1)
        image = decode_topic(read_named(copy, path), path)
        replace_file(copy, path, [encode_topic(replace(image, key_run_ids=()))])
        problems = verify_data_dir(copy, DATA_DIR).problems
        assert [problem.partition(" (")[0] for problem in problems] == [
            f"bad_state: No run of schedule keys names entry 1:{entry_id}, which holds one"
            for entry_id in range(3)
        ]

    run(scenario, seal_after_ms=5_000)
