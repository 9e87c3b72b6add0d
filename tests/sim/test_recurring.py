"""Recurring schedules under random changes, crashes, downtimes and steps of the clock, on virtual time.

Each run begins up to an hour before the clocks of some zone change, and its steps of the clock lead over the change and
back. Of a schedule that nobody changes every occurrence is stored once, whatever happens. Of those that are put anew,
paused and deleted, and of one whose zone gets other rules, none is stored twice, and none at a time that no definition
of it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from broker.errors import NotFound
from broker.storage.recurring_values import Definition, OverdueRuns, RecurringRule
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import recurrence
from broker.topics.recurrence import next_after, occurrences
from tests.crash.test_recurring_crash import stored
from tests.depth import at_depth, sampled
from tests.harness import Node, small_config

TOPIC = "orders"
SEEDS = [*sampled(range(400), at_depth(change=200, deep=1))]
STEPS = 40
STEADY = {
    "interval": Definition(RecurringRule(interval_ms=3_000), b""),
    "cron": Definition(RecurringRule(cron="*/7 * * * * *", zone="Europe/Berlin"), b"", jitter_ms=4_000),
    "hours": Definition(RecurringRule(cron="0 30 2 * * *", zone="America/New_York"), b""),
    "minutes-of-an-hour": Definition(RecurringRule(cron="20 */9 2 * * *", zone="Europe/Berlin"), b""),
    "minutes-of-each-hour": Definition(RecurringRule(cron="*/11 * * * *", zone="Australia/Lord_Howe"), b""),
}
CHANGES = (  # when the clocks of these zones change, in UTC: forward, and back
    *("2026-03-29T01:00", "2026-10-25T01:00"),  # Europe/Berlin
    *("2026-03-08T07:00", "2026-11-01T06:00"),  # America/New_York
    *("2026-10-03T15:30", "2026-04-04T15:00"),  # Australia/Lord_Howe, by half an hour
)
MOVED = "Pacific/Kwajalein"
"""A zone that gets other rules at some restarts: those of one of these."""
MOVED_TO = ("Europe/Berlin", "Asia/Kolkata", "America/New_York")
RULES = (
    RecurringRule(interval_ms=1_000),
    RecurringRule(interval_ms=60_000),
    RecurringRule(cron="*/5 * * * * *"),
    RecurringRule(cron="30 * * * *", zone="Australia/Lord_Howe"),
    RecurringRule(cron="*/10 1-3 * * *", zone="Europe/Berlin"),
)


class Life:
    """One broker through all of its lives, and what was asked of it."""

    def __init__(self, clock: SimClock, rng: random.Random) -> None:
        self.clock = clock
        self.rng = rng
        change = datetime.fromisoformat(f"{rng.choice(CHANGES)}+00:00")
        clock.step(round(change.timestamp() * 1_000) - rng.randrange(3_600_000) - clock.now_ms())
        self.moved_to = MOVED_TO[0]
        config = small_config(
            ledger_max_entries=50, lease_ms=36_000_000, checkpoint_interval_ms=4_000, clock_recheck_ms=1_000
        )
        self.node = Node(MemVfs(), clock, config).open()
        self.put: dict[str, set[RecurringRule]] = {}
        self.latest_ms = 0
        """The latest time that the clock ever was set back from."""
        self.begun_anew: set[str] = set()
        """Deleted while the clock was behind that: what they stored is forgotten."""

    async def begin(self) -> None:
        await self.node.create_subscription(TOPIC, "all")
        for name, definition in STEADY.items():
            await self.node.broker.recurring.put(self.node.topic(TOPIC), name, definition)
        rules = [RecurringRule(cron="*/20 1-23/2 * * *", zone=zone) for zone in (MOVED, *MOVED_TO)]
        await self.node.broker.recurring.put(self.node.topic(TOPIC), "moved", Definition(rules[0], b""))
        self.put["moved"] = set(rules[1:])

    def zone(self, name: str) -> ZoneInfo:
        return ZoneInfo(self.moved_to if name == MOVED else name)

    async def step(self) -> None:
        rng, recurring, topic = self.rng, self.node.broker.recurring, self.node.topic(TOPIC)
        name = f"changing-{rng.randrange(3)}"
        match rng.choice(("wait", "wait", "put", "put", "pause", "delete", "clock", "crash", "stop")):
            case "put":
                rule = rng.choice(RULES)
                self.put.setdefault(name, set()).add(rule)
                overdue = rng.choice(tuple(OverdueRuns))
                await recurring.put(topic, name, Definition(rule, b"", overdue=overdue))
            case "pause":
                with contextlib.suppress(NotFound):
                    await recurring.pause(topic, name, paused=rng.random() < 0.5)
            case "delete":
                with contextlib.suppress(NotFound):
                    await recurring.delete(topic, name)
                if self.clock.now_ms() < self.latest_ms:  # what comes next may have been there before
                    self.begun_anew.add(name)
            case "clock":
                self.latest_ms = max(self.latest_ms, self.clock.now_ms())
                self.clock.step(rng.choice((-90_000, -4_000, -300, 200, 5_000, 70_000, 3_600_000)))
            case "crash":
                self.node = self.node.crash(rng.choice(tuple(CrashPolicy)), rng)
                self.moved_to = rng.choice(MOVED_TO)
                await asyncio.sleep(rng.choice((0, 1, 130)))
                self.node.open()
            case "stop":
                await self.node.stop()
                self.moved_to = rng.choice(MOVED_TO)
                await asyncio.sleep(rng.choice((0, 1, 130)))
                self.node = Node(self.node.vfs, self.clock, self.node.config).open()
        await asyncio.sleep(rng.uniform(0, 6))
        self.check_moved()

    def check_moved(self) -> None:
        """The occurrence that is stored ahead follows the rules that the zone has since the last restart."""
        state = self.node.topic(TOPIC).recurring.get("moved")
        assert state is not None
        ahead_ms = state.progress.ahead_ms
        if ahead_ms > self.clock.now_ms():
            assert next_after(state.definition, ahead_ms - 1) == ahead_ms

    async def check(self) -> None:
        """Once the clock has passed everything it ever was."""
        self.clock.step(5_000_000)
        await asyncio.sleep(10)
        topic = self.node.topic(TOPIC)
        messages = await stored(topic)
        for name, definition in STEADY.items():
            times = messages[name]
            assert times == list(itertools.islice(occurrences(definition, times[0] - 1), len(times))), name
            now_ms = self.clock.now_ms()  # by which the jitter of the last one may not be over
            following_ms = next_after(definition, times[-1])
            assert following_ms is not None and following_ms > now_ms, name
            assert times[-1] <= (next_after(definition, now_ms) or 0), name
        for name in ("hours", "minutes-of-an-hour"):  # once a day, also where the hour comes twice
            zone = ZoneInfo(STEADY[name].rule.zone)
            walls = [
                datetime.fromtimestamp(time_ms / 1_000, zone).replace(fold=0) for time_ms in messages[name]
            ]
            assert len(set(walls)) == len(walls), name
        for name, rules in self.put.items():
            times = messages.get(name, [])
            twice = [time_ms for time_ms, count in Counter(times).items() if count > 1]
            assert not twice or name in self.begun_anew, f"{name}: twice at {twice}"
            for time_ms in times:
                fits = [next_after(Definition(rule, b""), time_ms - 1) == time_ms for rule in rules]
                assert any(fits), f"{name}: {time_ms} is no time of any of its rules"
        inbox = await self.node.subscribe(TOPIC, "all", permits=100_000)
        await asyncio.sleep(5)
        arrived = inbox.poll()
        assert len({each.position for each in arrived}) == len(arrived)
        assert all(each.sent_ms >= each.deliver_at_ms for each in arrived)
        assert self.node.failures == []


@pytest.mark.parametrize("seed", SEEDS)
def test_no_occurrence_is_skipped_or_stored_twice(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        life = Life(clock, random.Random(seed))
        monkeypatch.setattr(recurrence, "zone_of", life.zone)
        await life.begin()
        for _step in range(STEPS):
            await life.step()
        await life.check()

    run_sim(scenario, seed)
