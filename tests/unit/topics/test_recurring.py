"""Recurring schedules of a whole broker on virtual time: what is stored and delivered when, through changes and restarts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from broker.errors import LimitReached, NotFound
from broker.policy import DELAYED_DISABLED, TopicPolicy
from broker.storage.message_fields import body_at
from broker.storage.recurring_values import Definition, OverdueRuns, RecurringRule
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import START_MS, SimClock
from broker.testing.sim_loop import Latency, SimLoop, run_sim
from broker.topics import recurring_schedules
from broker.topics.recurrence import plan_due
from broker.topics.schedule_values import Cancel, DueRange, Move
from postdate_api.v1 import message_pb2
from tests.harness import Inbox, Node, Outgoing, small_config
from tests.moving import moves

TOPIC = "orders"
MESSAGE = message_pb2.Message(
    payload=b"x", key="k", properties={"a": "b"}, ttl_ms=3_600_000
).SerializeToString()
SECONDS = Definition(RecurringRule(interval_ms=1_000), MESSAGE)
MINUTES = Definition(RecurringRule(interval_ms=60_000), MESSAGE)


def run(scenario: Callable[[Node, SimClock], Awaitable[None]], **settings: object) -> None:
    async def whole(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(lease_ms=3_600_000, **settings)).open()
        await node.create_subscription(TOPIC, "all")
        await scenario(node, clock)

    run_sim(whole, 1, latency=Latency(max_ms=1.0, slow_every=0))


async def put(node: Node, name: str, definition: Definition) -> bool:
    return await node.broker.recurring.put(node.topic(TOPIC), name, definition)


def seconds(inbox: Inbox) -> list[float]:
    """The due times of what came, in seconds since the start."""
    return [(each.deliver_at_ms - START_MS) / 1_000 for each in inbox.poll()]


async def waiting(node: Node) -> list[int]:
    times = await node.topic(TOPIC).schedule.times(DueRange(), 100)
    assert times is not None
    return [(each - START_MS) // 1_000 for each in times.tolist()]


def message_of(frame: bytes) -> message_pb2.Message:
    return message_pb2.Message.FromString(frame[body_at(frame) :])


def test_each_occurrence_is_an_ordinary_message_in_time() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        inbox = await node.subscribe(TOPIC, "all")
        assert await put(node, "report", SECONDS)
        assert not await put(node, "report", SECONDS)
        await asyncio.sleep(0.01)
        key = f"schedule/report/{START_MS + 1_000}"
        pending = await node.topic(TOPIC).schedule.get(key)
        message = message_of(pending.frame)
        assert (message.payload, message.key, message.ttl_ms) == (b"x", "k", 3_600_000)
        assert message.properties == {
            "a": "b",
            "postdate.schedule.name": "report",
            "postdate.schedule.time-ms": str(START_MS + 1_000),
        }
        await asyncio.sleep(3.5)
        arrived = inbox.poll()
        assert [each.deliver_at_ms - START_MS for each in arrived] == [1_000, 2_000, 3_000]
        assert all(each.sent_ms - each.deliver_at_ms < 5 for each in arrived)
        assert await waiting(node) == [4]

    run(scenario)


def test_changes_cancel_what_is_stored_ahead() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        inbox, recurring, topic = await node.subscribe(TOPIC, "all"), node.broker.recurring, node.topic(TOPIC)
        await put(node, "a", SECONDS)
        await asyncio.sleep(1.5)
        await recurring.pause(topic, "a", paused=True)
        assert await waiting(node) == []
        await asyncio.sleep(3)
        await recurring.pause(topic, "a", paused=False)
        await asyncio.sleep(1)
        assert seconds(inbox) == [1, 5]
        await put(node, "a", Definition(RecurringRule(interval_ms=10_000), MESSAGE))
        await asyncio.sleep(0.1)
        assert await waiting(node) == [10]
        await asyncio.sleep(6)
        await recurring.delete(topic, "a")
        with pytest.raises(NotFound, match="no recurring schedule 'a'"):
            await recurring.delete(topic, "a")
        await asyncio.sleep(20)
        assert (seconds(inbox), await waiting(node)) == ([10], [])

    run(scenario)


def test_an_occurrence_that_is_cancelled_or_moved_is_so_alone() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        inbox, topic = await node.subscribe(TOPIC, "all"), node.topic(TOPIC)
        await put(node, "a", SECONDS)
        await asyncio.sleep(0.1)
        await topic.schedule.change([f"schedule/a/{START_MS + 1_000}"], Cancel(), dry_run=False)
        await asyncio.sleep(1)
        key = f"schedule/a/{START_MS + 2_000}"
        await topic.schedule.change([key], Move(shift_ms=2_500), dry_run=False)
        await asyncio.sleep(3.6)
        assert seconds(inbox) == [3, 4, 4.5]
        await put(node, "a", MINUTES)  # also right after a cancel of what was ahead
        await asyncio.sleep(60)
        assert seconds(inbox) == [60]

    run(scenario)


def test_what_was_cancelled_or_delivered_before_its_time_does_not_come_back() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        inbox, recurring, topic = await node.subscribe(TOPIC, "all"), node.broker.recurring, node.topic(TOPIC)
        await put(node, "a", MINUTES)
        await asyncio.sleep(0.1)
        await topic.schedule.change([f"schedule/a/{START_MS + 60_000}"], Cancel(), dry_run=False)
        for paused in (True, False):
            await recurring.pause(topic, "a", paused=paused)
        await asyncio.sleep(0.1)
        assert await waiting(node) == [120]
        await topic.schedule.change(
            [f"schedule/a/{START_MS + 120_000}"], Move(shift_ms=-100_000), dry_run=False
        )
        await asyncio.sleep(30)
        assert seconds(inbox) == [20]
        await put(node, "a", replace(MINUTES, message=b""))
        await asyncio.sleep(100)
        assert (seconds(inbox), await waiting(node)) == ([], [180])
        # Other times are not held up by what was left out of the former ones.
        yearly = Definition(RecurringRule(cron="0 0 1 1 *"), MESSAGE)
        await put(node, "b", yearly)
        await asyncio.sleep(0.1)
        (key,) = [topic.recurring.get("b")]
        assert key is not None
        name = f"schedule/b/{key.progress.ahead_ms}"
        await topic.schedule.change([name], Cancel(), dry_run=False)
        await recurring.pause(topic, "b", paused=True)
        await put(node, "b", SECONDS)
        await asyncio.sleep(65)
        assert seconds(inbox)

    run(scenario)


def test_where_a_quota_has_room_for_one_message_the_late_one_comes_without_the_next() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        inbox, topic = await node.subscribe(TOPIC, "all"), node.topic(TOPIC)
        await topic.change_policy(TopicPolicy(max_pending_messages=1))
        await put(node, "a", MINUTES)
        await asyncio.sleep(125)
        assert seconds(inbox) == [60]
        await inbox.ack([each.position for each in inbox.received])
        await asyncio.sleep(5)
        assert await occurrences_of(node, inbox) == [120]

    run(scenario)


def test_pause_and_a_cancel_on_its_way_do_not_meet() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        topic = node.topic(TOPIC)
        await put(node, "a", SECONDS)
        await asyncio.sleep(0.1)
        key = f"schedule/a/{START_MS + 1_000}"
        await asyncio.gather(
            topic.schedule.change([key], Move(shift_ms=5_000), dry_run=False),
            node.broker.recurring.pause(topic, "a", paused=True),
        )
        assert await waiting(node) == []

    run(scenario)


@pytest.mark.parametrize(
    ("overdue", "expected"),
    [
        (OverdueRuns.ALL, [60, 120, 180, 240, 300, 360]),
        (OverdueRuns.ONE, [360]),
        (OverdueRuns.NONE, [360]),  # it is only late
    ],
)
def test_occurrences_missed_while_the_broker_was_down(overdue: OverdueRuns, expected: list[int]) -> None:
    """Some were stored and some were not when it went."""

    async def scenario(node: Node, clock: SimClock) -> None:
        await put(node, "a", Definition(MINUTES.rule, MESSAGE, overdue=overdue))
        await asyncio.sleep(2)
        node = node.crash(CrashPolicy.LOSE_UNSYNCED)
        await asyncio.sleep(363)  # 365: the last one was 5 s ago
        node.open()
        inbox = await node.subscribe(TOPIC, "all")
        await asyncio.sleep(1)
        assert await occurrences_of(node, inbox) == expected
        await asyncio.sleep(58)
        assert await occurrences_of(node, inbox) == [420]

    run(scenario)


async def occurrences_of(node: Node, inbox: Inbox) -> list[int]:
    """The occurrences that came, as their messages name them, in seconds since the start."""
    found = []
    for ledger_id, entry_id in [each.position for each in inbox.poll()]:
        ids = np.array([entry_id], dtype=np.uint32)
        _, _, (frame,) = await node.topic(TOPIC).log.read(ledger_id, ids, 1 << 20)
        properties = message_of(frame).properties
        found.append((int(properties["postdate.schedule.time-ms"]) - START_MS) // 1_000)
    return found


def test_a_short_restart_makes_late_and_leaves_nothing_out() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await put(node, "a", Definition(SECONDS.rule, MESSAGE, overdue=OverdueRuns.NONE))
        await asyncio.sleep(0.5)
        await node.stop()
        await asyncio.sleep(3)
        node = Node(node.vfs, clock, node.broker.config).open()
        inbox = await node.subscribe(TOPIC, "all")
        await asyncio.sleep(1)
        assert len(inbox.poll()) == 4

    run(scenario)


def test_a_clock_that_is_stepped_repeats_and_skips_nothing() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        inbox = await node.subscribe(TOPIC, "all")
        await put(node, "a", Definition(RecurringRule(interval_ms=10_000), MESSAGE))
        await asyncio.sleep(25)
        clock.step(-12_000)  # back over an occurrence that was delivered
        await asyncio.sleep(30)  # 43
        clock.step(60_000)  # forward over six
        await asyncio.sleep(10)
        assert await occurrences_of(node, inbox) == list(range(10, 111, 10))

    run(scenario)


def test_a_zone_that_changes_its_rules_moves_what_is_stored_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await put(node, "a", Definition(RecurringRule(cron="0 12 * * *", zone="Europe/Berlin"), MESSAGE))
        await asyncio.sleep(1)
        assert await waiting(node) == [11 * 3_600]
        await node.stop()
        monkeypatch.setattr("broker.topics.recurrence.zone_of", lambda name: ZoneInfo("Europe/Athens"))
        node = Node(node.vfs, clock, node.broker.config).open()
        await asyncio.sleep(1)
        assert await waiting(node) == [10 * 3_600]

    run(scenario)


def test_limits_of_producers_do_not_stop_a_schedule_but_quotas_do() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        topic, inbox = node.topic(TOPIC), await node.subscribe(TOPIC, "all")
        await topic.change_policy(
            TopicPolicy(max_delay_ms=500, delayed_delivery=DELAYED_DISABLED, max_pending_messages=3)
        )
        await put(node, "a", SECONDS)
        await asyncio.sleep(10.5)
        assert seconds(inbox) == [1, 2, 3]
        await inbox.ack([each.position for each in inbox.received])
        await asyncio.sleep(3)
        # What the quota held up comes as soon as there is room, in its order and none of it twice.
        assert await occurrences_of(node, inbox) == [4, 5, 6]

    run(scenario)


def test_a_key_that_somebody_else_took_gives_way() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        inbox = await node.subscribe(TOPIC, "all")
        taken = Outgoing(b"other", deliver_after_ms=1_500, schedule_key=f"schedule/a/{START_MS + 1_000}")
        await node.produce(TOPIC, [taken])
        await put(node, "a", SECONDS)
        await asyncio.sleep(1.7)
        assert [each.payload for each in inbox.poll()] == [b"x"]

    run(scenario)


def test_trigger_and_backfill_leave_the_times_as_they_are() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        topic, recurring, inbox = node.topic(TOPIC), node.broker.recurring, await node.subscribe(TOPIC, "all")
        await put(node, "a", Definition(MINUTES.rule, MESSAGE, paused=True))
        await asyncio.sleep(0.25)
        position, time_ms = await recurring.trigger(topic, "a")
        assert 250 <= time_ms - START_MS < 260 and len(await inbox.wait(1)) == 1
        span = START_MS - 300_000, START_MS - 60_000
        expected = [START_MS - minutes * 60_000 for minutes in (5, 4, 3, 2)]
        assert await recurring.backfill(topic, "a", *span, dry_run=True) == (expected, 0)
        assert await recurring.backfill(topic, "a", *span, dry_run=False) == (expected, 0)
        assert len(await inbox.wait(4)) == 4
        times, rest_ms = await recurring.backfill(topic, "a", 0, START_MS, dry_run=True)
        assert (len(times), rest_ms) == (1_000, 60_000_000)
        await asyncio.sleep(100)
        assert seconds(inbox) == [] and position.ledger_id == 1

    run(scenario)


def test_a_backfill_that_is_refused_on_its_way_says_where_the_rest_begins() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        topic, recurring, inbox = node.topic(TOPIC), node.broker.recurring, await node.subscribe(TOPIC, "all")
        await put(node, "a", Definition(SECONDS.rule, MESSAGE, paused=True))
        await topic.change_policy(TopicPolicy(max_pending_messages=600))
        start_ms, rest_ms = START_MS - 800_000, START_MS - 800_000 + 512_000
        times, next_ms = await recurring.backfill(topic, "a", start_ms, START_MS, dry_run=False)
        assert (len(times), times[-1], next_ms) == (512, rest_ms - 1_000, rest_ms)
        with pytest.raises(LimitReached):
            await recurring.backfill(topic, "a", next_ms, START_MS, dry_run=False)
        await topic.change_policy(TopicPolicy())
        times, next_ms = await recurring.backfill(topic, "a", next_ms, START_MS, dry_run=False)
        assert (len(times), times[0], next_ms) == (288, rest_ms, 0)
        await inbox.wait(800)
        await asyncio.sleep(1)
        assert len(inbox.received) == 800  # none of them twice

    run(scenario)


def test_the_number_of_schedules_is_limited() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        results = await asyncio.gather(
            *(put(node, f"s{number}", MINUTES) for number in range(5)), return_exceptions=True
        )
        assert results[:3] == [True] * 3
        refused = [each.reason for each in results[3:] if isinstance(each, LimitReached)]
        assert refused == ["TOO_MANY_RECURRING"] * 2
        assert not await put(node, "s0", MINUTES)
        await node.broker.recurring.delete(node.topic(TOPIC), "s0")
        assert await put(node, "s4", MINUTES)

    run(scenario, recurring_per_topic_max=3)


def test_the_schedules_of_all_topics_together_are_limited() -> None:
    async def refused(node: Node, topic: str, name: str, definition: Definition = MINUTES) -> str:
        with pytest.raises(LimitReached, match="All topics together have") as caught:
            await node.broker.recurring.put(node.topic(topic), name, definition)
        return caught.value.reason

    async def scenario(node: Node, clock: SimClock) -> None:
        await node.create_subscription("other", "all")
        other = node.topic("other")
        for number in range(2):
            await put(node, f"s{number}", MINUTES)
        await node.broker.recurring.put(other, "s", MINUTES)
        assert await refused(node, "other", "t") == "TOO_MANY_RECURRING"
        large = Definition(MINUTES.rule, message_pb2.Message(payload=bytes(996)).SerializeToString())
        assert await refused(node, TOPIC, "s0", large) == "TOO_MANY_RECURRING_BYTES"
        await node.stop()
        node = Node(node.vfs, clock, node.broker.config).open()
        assert await refused(node, "other", "t") == "TOO_MANY_RECURRING"
        await node.broker.registry.delete_topic(TOPIC)
        await node.broker.recurring.put(node.topic("other"), "t", MINUTES)
        assert not await node.broker.recurring.put(node.topic("other"), "s", large)

    run(scenario, recurring_max=3, recurring_bytes_max=1_020)


@pytest.mark.slow
def test_schedules_of_topics_that_are_deleted_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.topics.recurring_schedules._STALE_MAX", 100)

    async def scenario(node: Node, clock: SimClock) -> None:
        await put(node, "s", MINUTES)
        for _ in range(60):
            await node.create_subscription("other", "all")
            for number in range(2):
                await node.broker.recurring.put(node.topic("other"), f"s{number}", MINUTES)
            await node.broker.registry.delete_topic("other")
        recurring = node.broker.recurring
        assert len(recurring._due_ms) <= 3
        assert len(recurring._heap) <= 110
        await asyncio.sleep(120)
        assert recurring._due_ms.keys() == {(node.topic(TOPIC).topic_id, "s")}

    run(scenario, recurring_max=3)


def test_the_bytes_of_schedules_are_limited_also_of_one_that_grows() -> None:
    def of(size: int) -> Definition:
        return Definition(MINUTES.rule, message_pb2.Message(payload=bytes(size - 3)).SerializeToString())

    async def refused(node: Node, name: str, definition: Definition) -> None:
        with pytest.raises(LimitReached) as caught:
            await put(node, name, definition)
        assert caught.value.reason == "TOO_MANY_RECURRING_BYTES"

    async def scenario(node: Node, clock: SimClock) -> None:
        assert of(1_000).byte_count == 1_000
        results = await asyncio.gather(
            *(put(node, f"s{number}", of(1_000)) for number in range(5)), return_exceptions=True
        )
        assert results[:3] == [True] * 3
        refusals = [each.reason for each in results[3:] if isinstance(each, LimitReached)]
        assert refusals == ["TOO_MANY_RECURRING_BYTES"] * 2
        await refused(node, "s0", of(1_001))
        await refused(node, "times", Definition(RecurringRule(times_ms=(START_MS + 60_000,)), b""))
        await put(node, "s0", of(500))
        await node.checkpoint()
        await node.stop()
        node = Node(node.vfs, clock, node.broker.config).open()
        await refused(node, "s1", of(1_501))
        await put(node, "s1", of(1_500))
        await node.broker.recurring.pause(node.topic(TOPIC), "s1", paused=True)
        await node.broker.recurring.delete(node.topic(TOPIC), "s1")
        await put(node, "s4", of(1_500))
        await refused(node, "s5", of(10))

    run(scenario, recurring_bytes_per_topic_max=3_000)


@pytest.mark.slow
def test_schedules_survive_checkpoints_and_go_with_their_topic() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        for number in range(20):
            await put(
                node, f"s{number}", Definition(RecurringRule(interval_ms=1_000), MESSAGE, jitter_ms=500)
            )
        for _ in range(3):
            await asyncio.sleep(2)
            await node.checkpoint()
            before = {name: node.topic(TOPIC).recurring.get(name) for name in node.topic(TOPIC).recurring}
            node = node.crash(CrashPolicy.MIXED, random.Random(1)).open()
            assert {name: node.topic(TOPIC).recurring.get(name) for name in before} == before
        inbox = await node.subscribe(TOPIC, "all")
        await asyncio.sleep(3.6)
        assert sorted(await occurrences_of(node, inbox)) == sorted(20 * [*range(1, 10)])
        await node.broker.registry.delete_topic(TOPIC)
        await asyncio.sleep(3)
        assert node.failures == []

    run(scenario)


@pytest.mark.slow
def test_many_schedules_move_on_by_few_records() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await asyncio.gather(*(put(node, f"s{number}", SECONDS) for number in range(400)))
        await asyncio.sleep(1.5)
        before = node.broker.counters.journal_records
        inbox = await node.subscribe(TOPIC, "all")
        await asyncio.sleep(0.9)
        assert node.broker.journal.durable_lsn > 0 and before == node.broker.counters.journal_records
        await asyncio.sleep(0.4)
        assert len(inbox.poll()) == 800
        assert len(node.broker.recurring._heap) == 400

    run(scenario, ledger_max_entries=1_000, journal_group_bytes_max=1 << 20)


def test_what_has_come_due_waits_for_few_schedules_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = [0]  # by step of the event loop

    async def count_steps() -> None:
        while sum(planned) < 20:
            planned.append(0)
            await asyncio.sleep(0)

    counting: list[asyncio.Task[None]] = []

    def counted(*arguments: Any) -> Any:
        if not counting:
            counting.append(asyncio.create_task(count_steps()))
        planned[-1] += 1
        return plan_due(*arguments)

    async def scenario(node: Node, clock: SimClock) -> None:
        for number in range(20):
            await put(node, f"schedule-{number:02}", SECONDS)
        await asyncio.sleep(1.5)
        monkeypatch.setattr(recurring_schedules, "plan_due", counted)
        monotonic_ns = clock.monotonic_ns
        monkeypatch.setattr(clock, "monotonic_ns", lambda: monotonic_ns() + 200_000 * sum(planned))
        await asyncio.sleep(1)
        assert sum(planned) >= 20
        assert max(planned) == 3, "of 0.2 ms each"

    run(scenario)


def test_metrics_count_what_is_stored_and_what_is_left_out() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await put(node, "a", Definition(SECONDS.rule, MESSAGE, overdue=OverdueRuns.NONE))
        await asyncio.sleep(1.5)
        with moves(node.broker, "postdate_recurring_missed"):
            clock.step(300_000)
            await asyncio.sleep(2)
        assert node.broker.counters.recurring_missed == 1
        assert 60 <= node.broker.counters.recurring_stored <= 70  # of the last minute, and those since

    run(scenario)
