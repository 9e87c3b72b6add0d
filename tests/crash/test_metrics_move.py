"""Every metric moves: a broker at work is scraped again and again, and a family that shows one value only needs a test
that sees it move. So none is exported that nothing writes, and no alert waits for what can never come.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
from pathlib import Path

import pytest

from broker.folder.scrape import take_snapshot
from broker.observe.lateness import LoopLagProbe
from broker.observe.metrics import BrokerCollector
from broker.server import Server
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.control import pause
from broker.topics.schedule_values import Cancel, Move
from tests.crash.test_background_tasks import World, first_life
from tests.harness import Node, Outgoing, small_config
from tests.moving import shown

ROOT = Path(__file__).resolve().parents[2]

NAMED = {
    "postdate_auth_failures": (
        "tests/wire/test_access_streams.py",
        "test_failures_are_counted_and_logged_with_limits",
    ),
    "postdate_backup_failures": (
        "tests/crash/test_backup.py",
        "test_a_disk_that_fails_fails_the_backup_only",
    ),
    "postdate_checkpoint_failures": (
        "tests/unit/topics/test_counters.py",
        "test_a_checkpoint_that_fails_is_counted",
    ),
    "postdate_compacted_ledgers": (
        "tests/unit/folder/test_compaction.py",
        "test_a_second_time_what_was_delivered_since_goes_too",
    ),
    "postdate_damaged_messages": (
        "tests/unit/topics/test_damage.py",
        "test_a_damaged_message_is_set_aside_and_the_others_are_delivered",
    ),
    "postdate_duplicate_batches": (
        "tests/unit/topics/test_counters.py",
        "test_repeats_and_refusals_are_counted",
    ),
    "postdate_early_deliveries": (
        "tests/unit/topics/test_counters.py",
        "test_a_message_that_leaves_early_is_counted",
    ),
    "postdate_file_retries": (
        "tests/crash/test_storage_faults.py",
        "test_the_last_figure_of_the_free_space_stands_while_it_cannot_be_looked_up",
    ),
    "postdate_bulk_changes_failed": (
        "tests/unit/topics/test_bulk_changes.py",
        "test_one_that_cannot_go_on_fails_with_the_reason_and_the_next_one_is_made",
    ),
    "postdate_index_rebuilds": (
        "tests/crash/test_bucket_faults.py",
        "test_a_bucket_that_is_damaged_at_the_start_is_made_again_loudly",
    ),
    "postdate_limit_refusals": (
        "tests/wire/test_limits.py",
        "test_more_than_a_principal_s_rate_is_refused_whole_with_the_limit_and_a_delay",
    ),
    "postdate_limit_used": (
        "tests/wire/test_limits.py",
        "test_what_is_pending_of_topics_is_limited_for_all_callers_together",
    ),
    "postdate_limit_allowed": (
        "tests/wire/test_limits.py",
        "test_what_is_pending_of_topics_is_limited_for_all_callers_together",
    ),
    "postdate_paced_delivery_lateness_seconds": (
        "tests/unit/topics/test_counters.py",
        "test_what_pacing_holds_back_is_shown_and_counted_apart",
    ),
    "postdate_recurring_missed": (
        "tests/unit/topics/test_recurring.py",
        "test_metrics_count_what_is_stored_and_what_is_left_out",
    ),
    "postdate_refused_batches": (
        "tests/unit/topics/test_counters.py",
        "test_repeats_and_refusals_are_counted",
    ),
    "postdate_refused_requests": (
        "tests/wire/test_status_server.py",
        "test_a_refused_request_is_counted_by_its_reason",
    ),
    "postdate_schedule_key_rebuilds": (
        "tests/unit/topics/test_keyed_intake.py",
        "test_a_damaged_run_is_built_again",
    ),
    "postdate_security_reloads": (
        "tests/wire/test_tls.py",
        "test_new_certificate_is_served_without_a_restart",
    ),
    "postdate_spans": (
        "tests/wire/test_spans.py",
        "test_spans_that_are_sent_are_counted",
    ),
    "postdate_subscription_paced": (
        "tests/unit/topics/test_counters.py",
        "test_what_pacing_holds_back_is_shown_and_counted_apart",
    ),
    "postdate_tls_certificate_expiry_timestamp_seconds": (
        "tests/wire/test_tls.py",
        "test_new_certificate_is_served_without_a_restart",
    ),
    "postdate_unreadable_messages": (
        "tests/unit/topics/test_damage.py",
        "test_rows_that_are_damaged_hold_up_their_own_and_settle_nothing",
    ),
}
"""Of what does not move here: the test that sees it move (`tests/moving.py`)."""
OF_A_START = {"postdate_build_info", "postdate_disk_reserve_bytes", "postdate_recovery_seconds"}
"""Metrics that a broker shows the same for all of its life."""


class Seen:
    """The values that each series has shown; one that comes later was 0 before."""

    def __init__(self) -> None:
        self._values: dict[str, set[float]] = {}
        self.families: set[str] = set()
        self.moved: set[str] = set()

    def scrape(self, world: World) -> None:
        is_first = not self.families
        for family in BrokerCollector(lambda: take_snapshot(world.node.broker), version="0").collect():
            if not family.name.startswith("postdate_"):
                continue
            self.families.add(family.name)
            for each in family.samples:
                series = f"{each.name}{sorted(each.labels.items())}"
                values = self._values.setdefault(series, set() if is_first else {0.0})
                values.add(each.value)
                if len(values) > 1:
                    self.moved.add(family.name)


async def _the_rest(world: World, seen: Seen) -> None:
    """Do what a broker at work does rarely."""
    node, clock = world.node, world.node.clock
    counters, office = node.broker.counters, node.broker.dead_letters
    server = object.__new__(Server)
    server.broker = node.broker
    probe = LoopLagProbe(clock, counters.loop_lag, stepped=server._note_clock_step)
    node.broker.supervisor.spawn_lasting("loop lag", probe.run())
    topic = node.topic("orders")
    billing = topic.subscription("billing")
    # Sealed, and loaded again when they are due soon; of these one is cancelled, and one moved.
    later = await node.produce("orders", [Outgoing(b"later", deliver_after_ms=20_000)] * 8)
    await topic.schedule.change(later[:1], Cancel(), dry_run=False)
    await topic.schedule.change(later[1:2], Move(deliver_after_ms=25_000), dry_run=False)
    await office.requeue(billing, None, 0)
    inbox = node.attach(topic, billing)
    await inbox.nack(
        [each.position for each in await inbox.wait(1)]
    )  # max_delivery_attempts is 1: a letter again
    await asyncio.sleep(1)
    await office.purge(billing, None)
    other = node.attach(topic, topic.subscription("later"), lease_ms=500)
    storing = asyncio.ensure_future(node.produce("orders", [Outgoing(b"now", sequence_id=1)], "numbered"))
    await asyncio.sleep(0)
    seen.scrape(world)  # its record waits for a sync
    await storing
    await other.wait(1)
    seen.scrape(world)
    await asyncio.sleep(2)  # its lease ends
    clock.step(5_000)
    await asyncio.sleep(30)
    await pause(topic, billing, paused=True)
    seen.scrape(world)
    node.broker.drain()
    seen.scrape(world)


def test_every_metric_moves_here_or_in_a_test_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        world = World(clock, monkeypatch)
        world.node.open()
        seen.scrape(world)
        working = asyncio.ensure_future(world.work())
        while not working.done():
            await asyncio.wait([working], timeout=0.2)
            seen.scrape(world)
        await working
        await _the_rest(world, seen)
        world.node.abandon()

    _, start_ms = first_life()
    run_sim(scenario, 1, start_ms=start_ms)
    still = seen.families - seen.moved
    assert still == NAMED.keys() | OF_A_START, (
        "a metric that does not move here needs a row, and one that does needs none"
    )


def test_what_stays_the_same_is_that_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        first = Node(MemVfs(), clock, small_config(disk_reserve_bytes=1)).open()
        ticks = itertools.count(clock.monotonic_ns(), 1_000_000)  # so that a start takes a while
        with monkeypatch.context() as slow:
            slow.setattr(SimClock, "monotonic_ns", lambda _: next(ticks))
            second = Node(MemVfs(), clock, small_config(disk_reserve_bytes=2)).open()
        one, other = shown(first.broker, version="1"), shown(second.broker, version="2")
        assert {name for name in OF_A_START if one[name] != other[name]} == OF_A_START

    run_sim(scenario, 1)


@pytest.mark.parametrize("metric", NAMED)
def test_a_metric_that_does_not_move_here_moves_in_its_test(metric: str) -> None:
    # It asserts so by `moves`, and nobody writes a counter by hand within the block.
    path, name = NAMED[metric]
    (test,) = (
        node
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    )
    blocks = [
        node
        for node in ast.walk(test)
        if isinstance(node, ast.With) and any(metric in _moved(item.context_expr) for item in node.items)
    ]
    assert blocks, f"{name} does not see {metric} move"
    for node in ast.walk(blocks[0]):
        assert not isinstance(node, ast.Assign | ast.AugAssign) or "counters" not in ast.unparse(node)


def _moved(call: ast.expr) -> list[object]:
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "moves":
        return []
    return [each.value for each in call.args if isinstance(each, ast.Constant)]
