"""Every metric moves: a broker at work is scraped again and again, and a family that shows one value only needs a test
that names it. So none is exported that nothing writes, and no alert waits for what can never come.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.folder.scrape import take_snapshot
from broker.observe.lateness import LoopLagProbe
from broker.observe.metrics import BrokerCollector
from broker.server import Server
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.control import pause
from broker.topics.schedule_values import Cancel, Move
from tests.crash.test_background_tasks import World
from tests.harness import Outgoing

ROOT = Path(__file__).resolve().parents[2]

NAMED = {
    "postdate_auth_failures": ("tests/wire/test_access_streams.py", "auth_failures"),
    "postdate_backup_failures": ("tests/crash/test_backup.py", "backup_failures"),
    "postdate_build_info": ("tests/unit/observe/test_metrics.py", "postdate_build_info"),
    "postdate_checkpoint_failures": ("tests/unit/topics/test_counters.py", "checkpoint_failures == 1"),
    "postdate_compacted_ledgers": ("tests/unit/folder/test_compaction.py", "compacted_ledgers"),
    "postdate_damaged_messages": ("tests/unit/topics/test_damage.py", "damaged_messages == 3"),
    "postdate_disk_reserve_bytes": ("tests/crash/test_storage_faults.py", "disk_reserve_bytes"),
    "postdate_duplicate_batches": ("tests/unit/topics/test_counters.py", "duplicate_batches"),
    "postdate_early_deliveries": ("tests/unit/observe/test_metrics.py", "early_deliveries"),
    "postdate_file_retries": ("tests/crash/test_storage_faults.py", "file_retries >= 3"),
    "postdate_index_rebuilds": ("tests/crash/test_bucket_faults.py", "rebuilds == 1"),
    "postdate_recovery_seconds": ("tests/unit/observe/test_metrics.py", "recovery_seconds"),
    "postdate_refused_batches": ("tests/unit/topics/test_counters.py", "refused_batches == 1"),
    "postdate_refused_requests": ("tests/unit/observe/test_metrics.py", "refused_requests"),
    "postdate_schedule_key_rebuilds": ("tests/unit/topics/test_keyed_intake.py", "schedule_key_rebuilds"),
    "postdate_security_reloads": ("tests/wire/test_tls.py", "security_reloads"),
    "postdate_tls_certificate_expiry_timestamp_seconds": (
        "tests/unit/observe/test_metrics.py",
        "tls_expires",
    ),
    "postdate_unreadable_messages": ("tests/unit/topics/test_damage.py", "unreadable_messages == 40"),
}
"""Of what does not move here: the test that sees it move, and by what name."""


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
    node, clock = world.node, world.clock
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
    await node.produce("orders", [Outgoing(b"now", sequence_id=1)], "numbered")
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
        await world.prepare()
        world.node.open()
        seen.scrape(world)
        working = asyncio.ensure_future(world.work())
        while not working.done():
            await asyncio.wait([working], timeout=0.2)
            seen.scrape(world)
        await working
        await _the_rest(world, seen)
        world.node.abandon()

    run_sim(scenario, 1)
    still = seen.families - seen.moved
    assert still == set(NAMED), "a metric that does not move here needs a row, and one that does needs none"
    for name, (path, word) in NAMED.items():
        assert word in (ROOT / path).read_text(), f"{path} does not name {name}"
