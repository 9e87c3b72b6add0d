"""Rewritten ledgers take the place of what they were made of, and nobody notices but the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from broker.errors import Fenced, InvalidRequest, LimitReached, NotFound, Refused, Unavailable
from broker.folder import compaction_leases
from broker.folder.compaction_values import Lease
from broker.jobs import rewrite as module
from broker.model import Position
from broker.storage.compaction_inputs import LedgerOutput, Outputs
from broker.storage.records import Seeked
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.control import position_of_time, seek
from broker.topics.generations import Refusal
from broker.topics.message_look import look_at
from broker.topics.schedule_values import Cancel, ChangeResult, Move
from tests.harness import DATA_DIR, EARLIEST, LATEST, Inbox, Node, Outgoing
from tests.moving import moves
from tests.unit.folder.compaction_world import (
    LATER_MS,
    TOPIC,
    begin,
    compact,
    config,
    fill,
    generations,
    ledger_ids,
    payload,
    receive_all,
    run,
    work,
)


def disk_bytes(node: Node) -> int:
    return sum(len(content) for path, content in node.vfs.snapshot().items() if "/ledgers/" in path)


async def _receive(inbox: Inbox) -> set[Position]:
    """Acknowledge and return what came since."""
    received = {each.position for each in inbox.poll()}
    await inbox.ack(received)
    return received


@pytest.mark.slow
def test_what_is_live_survives_under_its_id():
    async def scenario(node: Node) -> Node:
        pending, _, inbox = await fill(node, 5)
        before = disk_bytes(node)
        committed = await compact(node)
        assert committed.refused == {}
        assert list(committed.ledger_ids) == [position.ledger_id for position in pending]
        await node.checkpoint()
        await node.checkpoint()
        assert disk_bytes(node) < before / 2
        assert inbox.poll() == []
        await asyncio.sleep(LATER_MS / 1000 + 1)
        received = inbox.poll()
        assert sorted(each.position for each in received)[:5] == pending
        assert [each.payload for each in received if each.position in pending] == [
            payload(ledger, 3) for ledger in range(5)
        ]
        assert all(each.sent_ms >= each.deliver_at_ms for each in received)
        await inbox.ack(each.position for each in received)
        assert node.topic(TOPIC).subscription("billing").unsettled_count() == 0
        return node

    run(scenario)


@pytest.mark.slow
def test_it_survives_a_stop_and_a_crash():
    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 3)
        await compact(node)
        crashed = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert generations(crashed) == generations(node)
        assert set(list(generations(crashed).values())[:3]) == {1}
        await crashed.stop()
        again = Node(crashed.vfs, node.clock, node.config).open()
        assert list(generations(again).values())[:3] == [1, 1, 1]
        inbox = await again.subscribe(TOPIC, "billing")
        await asyncio.sleep(LATER_MS / 1000 + 1)
        assert set(pending) < {each.position for each in inbox.poll()}
        return again

    run(scenario)


@pytest.mark.slow
def test_a_second_time_what_was_delivered_since_goes_too():
    async def scenario(node: Node) -> Node:
        pending, _, inbox = await fill(node, 2, kept=(2, 5), delay_ms=LATER_MS)
        with moves(node.broker, "postdate_compacted_ledgers"):
            await compact(node)
            await node.checkpoint()
        assert node.broker.counters.compacted_ledgers == 2
        await asyncio.sleep(LATER_MS / 1000 + 1)
        received = inbox.poll()
        await inbox.ack(each.position for each in received if each.position.entry_id != 5)
        await node.checkpoint()
        committed = await compact(node)
        assert committed.refused == {}
        assert list(generations(node).values())[:2] == [2, 2]
        sparse = [ledger.sparse for ledger in node.topic(TOPIC).log if ledger.sparse]
        assert [each.present_count for each in sparse] == [1, 1]
        inbox.detach()
        again = await receive_all(node, "billing")
        assert [each.position for each in again.received] == [p for p in pending if p.entry_id == 5]
        return node

    run(scenario)


@pytest.mark.slow
def test_a_subscription_from_the_beginning_gets_what_survived():
    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 3, delay_ms=LATER_MS)
        await compact(node)
        early = await receive_all(node, "late-comer")
        assert early.received == []
        assert early.subscription.unsettled_count() == len(pending) + 1
        early.detach()
        crashed = node.crash(CrashPolicy.KEEP_ALL).open()
        subscription = crashed.topic(TOPIC).subscription("late-comer")
        assert subscription.unsettled_count() == len(pending) + 1
        inbox = crashed.attach(crashed.topic(TOPIC), subscription)
        await asyncio.sleep(LATER_MS / 1000 + 1)
        assert sorted(each.position for each in inbox.poll())[: len(pending)] == pending
        return crashed

    run(scenario)


def test_what_did_not_survive_is_no_message_any_more():
    async def scenario(node: Node) -> Node:
        pending, done, _ = await fill(node, 1, delay_ms=LATER_MS)
        await compact(node)
        topic = node.topic(TOPIC)
        assert (await look_at(topic, pending[0], 1)).position == pending[0]
        for position in done:
            with pytest.raises(NotFound):
                await look_at(topic, position, 1)
        return node

    run(scenario)


@pytest.mark.slow
def test_a_seek_back_gets_what_survived():
    async def scenario(node: Node) -> Node:
        pending, _, inbox = await fill(node, 3, delay_ms=LATER_MS)
        await compact(node)
        topic = node.topic(TOPIC)
        await seek(topic, inbox.subscription, Position(0, 0))
        again = await receive_all(node, "billing")
        assert again.received == []
        assert again.subscription.unsettled_count() == len(pending) + 1
        await asyncio.sleep(LATER_MS / 1000 + 1)
        assert sorted(each.position for each in again.poll())[: len(pending)] == pending
        return node

    run(scenario)


def test_positions_of_publish_times_are_found_over_gaps():
    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 3)
        topic = node.topic(TOPIC)
        times = [topic.ledgers.facts[position.ledger_id].first_publish_ms for position in pending]
        await compact(node)
        for position, time_ms in zip(pending, times, strict=True):
            assert (await position_of_time(topic, time_ms)).ledger_id <= position.ledger_id
            assert await position_of_time(topic, time_ms) <= position
        return node

    run(scenario)


@pytest.mark.slow
def test_cancelled_and_moved_ones_are_folded_in():
    async def scenario(node: Node) -> Node:
        pending, _, inbox = await fill(node, 2, kept=(1, 4, 7), delay_ms=LATER_MS)
        schedule = node.topic(TOPIC).schedule
        await schedule.change([pending[0]], Cancel(), dry_run=False)
        await schedule.change([pending[1]], Move(shift_ms=LATER_MS), dry_run=False)
        await node.checkpoint()
        await compact(node)
        await node.checkpoint()
        sparse = [ledger.sparse for ledger in node.topic(TOPIC).log if ledger.sparse]
        assert [each.present_count for each in sparse] == [2, 3]
        found = await schedule.get(pending[1])
        assert found.revision == 1
        with pytest.raises(NotFound):
            await schedule.get(pending[0])
        (outcome,) = await schedule.change([pending[2]], Move(shift_ms=2 * LATER_MS), dry_run=False)
        assert outcome.result.name == "DONE"
        await schedule.change([pending[3]], Cancel(), dry_run=False)
        await asyncio.sleep(LATER_MS / 1000 + 10)
        assert await _receive(inbox) & set(pending) == {pending[4], pending[5]}
        await asyncio.sleep(LATER_MS / 1000)
        assert await _receive(inbox) == {pending[1]}
        await asyncio.sleep(LATER_MS / 1000)
        assert await _receive(inbox) == {pending[2]}
        assert inbox.subscription.unsettled_count() == 0
        return node

    run(scenario)


@pytest.mark.slow
def test_what_is_changed_while_the_job_works_holds():
    async def scenario(node: Node) -> Node:
        pending, _, inbox = await fill(node, 1, kept=(1, 4, 7), delay_ms=LATER_MS)
        lease = await begin(node)
        outputs = await work(node, lease)
        schedule = node.topic(TOPIC).schedule
        await schedule.change([pending[0]], Cancel(), dry_run=False)
        await schedule.change([pending[1]], Move(shift_ms=LATER_MS), dry_run=False)
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert committed.refused == {}
        assert (await schedule.get(pending[1])).revision == 1
        await asyncio.sleep(LATER_MS / 1000 + 10)
        assert await _receive(inbox) & set(pending) == {pending[2]}
        await asyncio.sleep(LATER_MS / 1000)
        assert await _receive(inbox) == {pending[1]}
        return node

    run(scenario)


def test_acks_meanwhile_are_kept():
    async def scenario(node: Node) -> Node:
        pending, _, inbox = await fill(node, 1, kept=(1, 4), delay_ms=LATER_MS)
        lease = await begin(node)
        outputs = await work(node, lease)
        await asyncio.sleep(1)
        lease_left = node.broker.compactions.leases()
        assert lease_left == [lease]
        await node.topic(TOPIC).schedule.change([pending[0]], Move(deliver_after_ms=0), dry_run=False)
        (first,) = await inbox.wait(1)
        await inbox.ack([first.position])
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert committed.refused == {}
        assert inbox.subscription.unsettled_count() == 2
        return node

    run(scenario)


# -- refusals --------------------------------------------------------------------------------------------------


async def _seek_back(node: Node, pending: list[Position]) -> None:
    subscription = node.topic(TOPIC).subscription("billing")
    await seek(node.topic(TOPIC), subscription, Position(0, 0))


async def _new_from_the_beginning(node: Node, pending: list[Position]) -> None:
    await node.create_subscription(TOPIC, "new", position=EARLIEST)


@pytest.mark.parametrize("meanwhile", [_seek_back, _new_from_the_beginning])
def test_a_rewind_meanwhile_is_refused(meanwhile: Callable[[Node, list[Position]], Awaitable[None]]):
    async def scenario(node: Node) -> Node:
        pending, done, inbox = await fill(node, 2)
        lease = await begin(node)
        outputs = await work(node, lease)
        await meanwhile(node, pending)
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert set(committed.refused.values()) == {Refusal.OWED}
        assert committed.ledger_ids == ()
        assert set(generations(node).values()) == {0}
        inbox.detach()
        names = [each.name for each in node.topic(TOPIC).subscriptions.values()]
        again = await receive_all(node, names[-1])
        assert sorted(each.position for each in again.received) == done
        assert [path for path in node.vfs.snapshot() if ".1." in path or "staging/" in path] == []
        return node

    run(scenario)


def test_a_rewind_in_the_last_moment_is_refused_by_apply():
    async def scenario(node: Node) -> Node:
        _, done, inbox = await fill(node, 2)
        lease = await begin(node)
        outputs = await work(node, lease)
        desk = node.broker.compactions
        topic = node.topic(TOPIC)
        submit = topic.submit_record

        def submit_after_a_seek(record: Any, apply: Any = None) -> Any:
            # Submitted just before and not applied yet: the desk has looked, and only apply can know.
            submit(seeked)
            return submit(record, apply)

        seeked = Seeked(topic.topic_id, inbox.subscription.subscription_id, Position(0, 0))
        topic.submit_record = submit_after_a_seek  # type: ignore[method-assign]
        committed = await desk.commit(lease.compaction_id, lease.epoch, outputs)
        topic.submit_record = submit  # type: ignore[method-assign]
        assert committed.ledger_ids == ()
        assert set(committed.refused.values()) == {Refusal.OWED}
        again = await receive_all(node, "billing")
        assert sorted(each.position for each in again.received) == done
        crashed = node.crash(CrashPolicy.KEEP_ALL).open()
        assert set(generations(crashed).values()) == {0}
        return crashed

    run(scenario)


def test_a_move_of_what_nobody_was_sent_is_refused():
    """Due before every subscription's start, so settled by all, and yet it can be moved."""

    async def scenario(node: Node) -> Node:
        positions = await node.produce(
            TOPIC, [Outgoing(b"early", deliver_after_ms=500), *[Outgoing(b"x")] * 9]
        )
        await asyncio.sleep(1)
        await node.create_subscription(TOPIC, "billing", position=EARLIEST)
        subscription = node.topic(TOPIC).subscription("billing")
        await node.produce(TOPIC, [Outgoing(b"last", deliver_after_ms=LATER_MS)])
        await seek(node.topic(TOPIC), subscription, node.topic(TOPIC).latest_position())
        await asyncio.sleep(3)
        await node.checkpoint()
        lease = await begin(node, ledgers=[positions[0].ledger_id])
        outputs = await work(node, lease)
        (outcome,) = await node.topic(TOPIC).schedule.change(
            [positions[0]], Move(deliver_after_ms=LATER_MS), dry_run=False
        )
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert outcome.result is ChangeResult.DONE
        assert committed.refused == {positions[0].ledger_id: Refusal.MOVED}
        return node

    run(scenario)


def test_two_jobs_do_not_get_one_ledger():
    async def scenario(node: Node) -> Node:
        await fill(node, 2)
        first, second = await ledger_ids(node)
        lease = await begin(node, ledgers=[first])
        with pytest.raises(Refused, match="under way"):
            await begin(node)
        other = await begin(node, ledgers=[second])
        assert node.broker.compactions.leases() == [lease, other]
        await node.broker.compactions.abort(other.compaction_id, other.epoch)
        assert node.broker.compactions.leases() == [lease]
        await node.broker.compactions.abort(lease.compaction_id, lease.epoch)
        assert [path for path in node.vfs.snapshot() if "staging/" in path] == []
        return node

    run(scenario)


@pytest.mark.slow
def test_a_zombie_is_refused_and_its_folder_goes():
    async def scenario(node: Node) -> Node:
        await fill(node, 1)
        desk = node.broker.compactions
        zombie = await begin(node)
        outputs = await work(node, zombie)
        await asyncio.sleep(3601)
        assert desk.leases() == []
        lease = await begin(node)
        assert lease.epoch > zombie.epoch
        with pytest.raises(NotFound):
            await desk.commit(zombie.compaction_id, zombie.epoch, outputs)
        with pytest.raises(Fenced):
            await desk.commit(lease.compaction_id, zombie.epoch, outputs)
        assert any(zombie.folder in path for path in node.vfs.snapshot())
        await desk.commit(lease.compaction_id, lease.epoch, await work(node, lease))
        await asyncio.sleep(3601)
        assert not any("staging/" in path for path in node.vfs.snapshot())
        return node

    run(scenario)


def test_a_commit_twice_changes_something_once():
    async def scenario(node: Node) -> Node:
        await fill(node, 1)
        desk = node.broker.compactions
        lease = await begin(node)
        outputs = await work(node, lease)
        first, second = await asyncio.gather(
            desk.commit(lease.compaction_id, lease.epoch, outputs),
            desk.commit(lease.compaction_id, lease.epoch, outputs),
        )
        third = await desk.commit(lease.compaction_id, lease.epoch, outputs)
        assert first == second
        assert (first.is_repeat, third.is_repeat) == (False, True)
        assert third.ledger_ids == first.ledger_ids
        assert next(iter(generations(node).values())) == 1
        return node

    run(scenario)


def test_a_caller_that_goes_away_leaves_a_whole_commit():
    async def scenario(node: Node) -> Node:
        await fill(node, 2)
        desk = node.broker.compactions
        lease = await begin(node)
        outputs = await work(node, lease)
        caller = asyncio.create_task(desk.commit(lease.compaction_id, lease.epoch, outputs))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(1)
        assert list(generations(node).values())[:2] == [1, 1]
        assert desk.leases() == []
        return node

    run(scenario)


@pytest.mark.parametrize("kind", ["data", "times", "rows"])
def test_damaged_outputs_are_refused(kind: str):
    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 2)
        lease = await begin(node)
        outputs = await work(node, lease)
        path = f"{DATA_DIR}/{lease.folder}/{pending[0].ledger_id}.1.{kind}"
        file = node.vfs.open(path)
        last = file.size() - 1
        file.pwrite([bytes([file.pread(1, last)[0] ^ 1])], last)
        file.close()
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert committed.refused == {pending[0].ledger_id: Refusal.DAMAGED}
        assert committed.ledger_ids == (pending[1].ledger_id,)
        return node

    run(scenario)


@pytest.mark.slow
def test_a_folder_that_cannot_be_synced_ends_writing_and_nothing_is_lost():
    """A sync of it that failed, and was passed over, would leave names in doubt that a later manifest relies on."""

    async def whole(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config()).open()
        pending, _, _ = await fill(node, 2)
        await node.produce(TOPIC, [Outgoing(b"another", deliver_after_ms=LATER_MS)] * 10)
        node.vfs.faults.add(Fault("sync_dir", "*/ledgers"))
        with pytest.raises(Unavailable, match="cannot be moved"):
            await compact(node)
        assert node.broker.journal.failed is not None and len(node.failures) == 1
        crashed = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert set(generations(crashed).values()) == {0}
        inbox = await crashed.subscribe(TOPIC, "billing")
        await asyncio.sleep(LATER_MS / 1000 + 1)
        assert set(pending) < {each.position for each in inbox.poll()}
        await crashed.stop()

    run_sim(whole, seed=1)


def test_an_output_that_lacks_something_live_is_refused():
    async def scenario(node: Node) -> Node:
        await fill(node, 2, kept=(3, 6))
        desk = node.broker.compactions
        lease = await begin(node)
        outputs = await _work_badly(node, lease)
        committed = await desk.commit(lease.compaction_id, lease.epoch, outputs)
        assert set(committed.refused.values()) == {Refusal.DAMAGED}
        return node

    run(scenario)


async def _work_badly(node: Node, lease: Lease) -> Outputs:
    """A job that takes the second of two live entries for dead; its files are whole."""

    changed: Any = module
    live_entries = changed.live_entries

    def too_few(*arguments: Any) -> Any:
        live = live_entries(*arguments)
        live.discard(live.max())
        return live

    changed.live_entries = too_few
    try:
        return await work(node, lease)
    finally:
        changed.live_entries = live_entries


def test_compactions_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compaction_leases, "LEASES_MAX", 2)

    async def scenario(node: Node) -> Node:
        await fill(node, 3)
        first, second, third = await ledger_ids(node)
        leases = [await begin(node, ledgers=[each]) for each in (first, second)]
        with pytest.raises(LimitReached) as caught:
            await begin(node, ledgers=[third])
        assert caught.value.reason == "TOO_MANY_COMPACTIONS"
        ended = leases.pop()
        await node.broker.compactions.abort(ended.compaction_id, ended.epoch)
        leases.append(await begin(node, ledgers=[third]))
        for lease in leases:
            await node.broker.compactions.abort(lease.compaction_id, lease.epoch)
        return node

    run(scenario)


def test_outputs_of_nothing_leased_are_refused():
    async def scenario(node: Node) -> Node:
        await fill(node, 2)
        first, second = await ledger_ids(node)
        desk = node.broker.compactions
        lease = await begin(node, ledgers=[first])
        stranger = LedgerOutput(second, 1, 1, 40)
        for outputs in (
            Outputs((stranger,)),
            Outputs((LedgerOutput(first, 1, 1, 40),) * 2),
            Outputs(has_bucket=True),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await desk.commit(lease.compaction_id, lease.epoch, outputs)
            assert caught.value.reason == "COMPACTION_OUTPUT_INVALID"
        missing = await desk.commit(
            lease.compaction_id, lease.epoch, Outputs((LedgerOutput(first, 1, 1, 40),))
        )
        assert missing.refused == {first: Refusal.DAMAGED}
        return node

    run(scenario)


def test_a_ledger_that_went_meanwhile_is_refused():
    async def scenario(node: Node) -> Node:
        _, done, inbox = await fill(node, 2, kept=())
        gone = done[0].ledger_id
        lease = await begin(node, ledgers=[gone])
        outputs = await work(node, lease)
        await seek(node.topic(TOPIC), inbox.subscription, node.topic(TOPIC).latest_position())
        await node.topic(TOPIC).drop_ledgers([gone], 0)
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert committed.refused == {gone: Refusal.GONE}
        return node

    run(scenario)


def test_a_topic_that_went_meanwhile_is_refused():
    async def scenario(node: Node) -> Node:
        await fill(node, 2)
        lease = await begin(node)
        outputs = await work(node, lease)
        await node.broker.registry.delete_topic(TOPIC)
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert set(committed.refused.values()) == {Refusal.GONE}
        await node.produce(TOPIC, [Outgoing(b"again")])
        return node

    run(scenario)


# -- what is no candidate ----------------------------------------------------------------------------------------


def test_what_takes_entries_is_retained_or_waits_for_a_subscription_is_left_alone():
    async def scenario(node: Node) -> Node:
        await node.produce(TOPIC, [Outgoing(b"x")] * 10)
        await node.produce(TOPIC, [Outgoing(b"y")])
        await node.checkpoint()
        assert await ledger_ids(node) == []  # nobody has subscribed yet
        await node.create_subscription(TOPIC, "billing", position=LATEST)
        await asyncio.sleep(3)
        assert len(await ledger_ids(node)) == 1  # not the one that takes entries
        topic = node.topic(TOPIC)

        await topic.change_policy(replace(topic.policies.own, retention_ms=LATER_MS))
        assert await ledger_ids(node) == []
        await asyncio.sleep(LATER_MS / 1000)
        assert len(await ledger_ids(node)) == 1
        await topic.change_policy(replace(topic.policies.own, retention_ms=0, retention_bytes=1 << 20))
        assert await ledger_ids(node) == []
        with pytest.raises(Refused, match="cannot be compacted"):
            await begin(node, ledgers=[1])
        with pytest.raises(InvalidRequest):
            await begin(node, ledgers=[])
        return node

    run(scenario)


def test_reads_that_began_before_the_swap_go_on():
    """A read that waits for the file thread while the old files go finds the entry in the new ones."""

    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 1)
        log = node.topic(TOPIC).log
        old = log.find(pending[0].ledger_id)
        assert old is not None
        await compact(node)
        log._ledgers[pending[0].ledger_id], new = old, log._ledgers[pending[0].ledger_id]
        reading = asyncio.ensure_future(log.read_times(*pending[0], 1))
        old.delete(node.vfs)
        log._ledgers[pending[0].ledger_id] = new
        times = await reading
        assert times[0] > node.clock.now_ms()
        return node

    run(scenario)


def test_what_a_job_was_told_does_not_change_while_acks_come():
    """The set that a cursor keeps is emptied as its mark passes the entries; the desk must not look at that one."""

    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(TOPIC, "billing")
        first, second = [await node.produce(TOPIC, [Outgoing(b"x")] * 10) for _ in range(2)]
        await node.produce(TOPIC, [Outgoing(b"last")])
        await inbox.wait(21)
        await inbox.ack([*first[1:], *second[:5], *second[6:]])
        await asyncio.sleep(3)
        await node.checkpoint()
        lease = await begin(node)
        outputs = await work(node, lease)
        await inbox.ack(first[:1])  # the mark goes on to the sixth of the second ledger
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert committed.refused == {}
        return node

    run(scenario)
