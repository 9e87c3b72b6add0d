"""Bulk changes under other changes, crashes, failing disks, downtimes and steps of the clock, on virtual time.

Each step of one changes every message that it meets and that matches, no other one, each once, and counts these. None
is lost, none goes on after its end, and where the broker is well all of them end. Nothing is delivered at a time that
it has no more, or after its cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import random
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from broker.errors import LimitReached, NotFound, StorageFailed, Unavailable
from broker.model import DELIVER_AT_MS_MAX
from broker.storage.bulk import BulkDefinition, BulkEnd, BulkKind
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.schedule_values import Cancel, Move
from broker.topics.topic import Topic
from tests.depth import at_depth, sampled
from tests.harness import Inbox, Node, Outgoing, small_config
from tests.sim.bulk_model import BulkModel

TOPIC = "orders"
SEEDS = [*sampled(range(400), at_depth(change=200, deep=1))]
STEPS = 50
KEPT = 4
KINDS = (
    "produce",
    "produce",
    "begin",
    "begin",
    "begin",
    "end",
    "change",
    "wait",
    "clock",
    "crash",
    "stop",
    "disk",
)
BEYOND = BulkDefinition(BulkKind.SHIFT, DELIVER_AT_MS_MAX)
"""No message can have its new time: it fails where it meets one."""


class BulkLife:
    """One broker through all of its lives, and what was asked of it."""

    def __init__(self, clock: SimClock, rng: random.Random, model: BulkModel) -> None:
        self.clock = clock
        self.rng = rng
        self.model = model
        config = small_config(
            ledger_max_entries=20,
            checkpoint_interval_ms=4_000,
            clock_recheck_ms=1_000,
            bulk_step_messages=rng.choice((1, 3, 10)),
            bulk_ended_kept=KEPT,
        )
        self.node = Node(MemVfs(), clock, config)
        self.inbox: Inbox | None = None
        self.produced = 0
        self.begun: dict[int, BulkDefinition] = {}
        """Those whose begin was answered."""
        self.ends: dict[int, BulkEnd] = {}
        """As a call that cancels was told."""
        self.request_ids = itertools.count()
        self.asking: set[asyncio.Task[None]] = set()
        model.before_record = self.poll

    @property
    def topic(self) -> Topic:
        return self.node.topic(TOPIC)

    def poll(self) -> None:
        """See what was delivered until now, which comes again if its acknowledgement is lost."""
        self.model.tick(self.clock)
        if self.inbox is not None and (arrived := self.inbox.poll()):
            self.model.delivered(arrived)
            self.ask(partial(self.inbox.ack, [each.position for each in arrived]))

    def ask(self, call: Callable[[], Awaitable[object]]) -> None:
        """Make a call beside others; it may fail where the broker does, or is full."""

        async def work() -> None:
            with contextlib.suppress(LimitReached, NotFound, StorageFailed, Unavailable):
                await call()

        task = asyncio.create_task(work())
        self.asking.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self.asking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    # -- lives -----------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        self.model.restarts(self.clock)
        self.node.open()
        self.inbox = await self.node.subscribe(TOPIC, "all", permits=100_000)

    async def crash(self) -> None:
        self.poll()
        for task in list(self.asking):
            task.cancel()
        self.inbox = None
        self.node = self.node.crash(self.rng.choice(tuple(CrashPolicy)), self.rng)
        await asyncio.sleep(self.rng.choice((0, 1, 30)))
        await self.serve()

    async def stop(self) -> None:
        await self.node.stop()
        self.node.vfs.faults.clear()
        self.poll()
        self.inbox = None
        await asyncio.sleep(self.rng.choice((0, 1, 30)))
        self.node = Node(self.node.vfs, self.clock, self.node.config)
        await self.serve()

    # -- calls -----------------------------------------------------------------------------------------------

    async def produce(self) -> None:
        now_ms = self.clock.now_ms()
        batch = []
        for _ in range(self.rng.randrange(1, 30)):
            self.produced += 1
            after_ms = self.rng.choice((self.rng.randrange(20_000), self.rng.randrange(50, 400) * 1_000))
            key = f"{self.rng.choice('ab')}-{self.produced}"
            batch.append(Outgoing(b"x", deliver_at_ms=now_ms + after_ms, schedule_key=key))
        await self.node.produce(TOPIC, batch)

    def definition(self) -> BulkDefinition:
        rng, now_ms = self.rng, self.clock.now_ms()
        kind = rng.choice(tuple(BulkKind))
        new_ms = {
            BulkKind.CANCEL: 0,
            BulkKind.SHIFT: rng.choice((-60_000, -5_000, 1, 5_000, 60_000)),
        }.get(kind, now_ms + rng.choice((0, 30_000, 100_000)))
        start_ms, end_ms = sorted(rng.sample(range(now_ms - 10_000, now_ms + 400_000), 2))
        filter_ = (
            {"start_ms": start_ms, "end_ms": end_ms} if rng.random() < 0.6 or kind is BulkKind.CANCEL else {}
        )
        return BulkDefinition(
            kind,
            new_ms,
            key_prefix=rng.choice(("", "a-", "b-")),
            dry_run=rng.random() < 0.2,
            request_id=rng.choice(("", f"r{next(self.request_ids)}")),
            begin_ms=now_ms,
            **filter_,
        )

    async def begin(self) -> None:
        definition = BEYOND if self.rng.random() < 0.05 else self.definition()
        bulk_id = await self.node.broker.bulk_changes.begin(self.topic, definition)
        known = self.begun.setdefault(bulk_id, definition)
        assert known is definition, "two calls began the same one"
        if definition.request_id:
            assert await self.node.broker.bulk_changes.begin(self.topic, definition) == bulk_id
        if self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.uniform(0, 0.05))
            await self.end_one(bulk_id)

    async def end(self) -> None:
        if self.begun:
            await self.end_one(self.rng.choice(sorted(self.begun)[-3:]))

    async def end_one(self, bulk_id: int) -> None:
        standing = await self.node.broker.bulk_changes.cancel(self.topic, bulk_id)
        assert standing.end and self.ends.setdefault(bulk_id, standing.end) is standing.end

    async def change(self) -> None:
        at = [position for position, each in self.model.messages.items() if not each.is_cancelled]
        if at:
            some = self.rng.sample(at, min(len(at), self.rng.randrange(1, 6)))
            to = Move(deliver_at_ms=self.clock.now_ms() + self.rng.randrange(300_000))
            await self.topic.schedule.change(some, self.rng.choice((Cancel(), to)), dry_run=False)

    async def step(self) -> None:
        rng = self.rng
        match rng.choice(KINDS):
            case "produce":
                self.ask(self.produce)
            case "begin":
                self.ask(self.begin)
            case "end":
                self.ask(self.end)
            case "change":
                self.ask(self.change)
            case "clock":
                self.model.tick(self.clock)
                self.clock.step(rng.choice((-30_000, -4_000, -300, 200, 5_000, 20_000)))
            case "crash":
                await self.crash()
            case "stop":
                await self.stop()
            case "disk":
                kind, path = rng.choice(("sync", "write", "read")), rng.choice(("*", "data/journal/*"))
                error = rng.choice((errno.EIO, errno.ENOSPC))
                self.node.vfs.faults.add(Fault(kind, path, rng.randint(1, 6), error))
        await asyncio.sleep(rng.choice((0, 0.001, 0.01, 0.1, 3)))
        self.poll()
        if self.node.failures:
            for error in self.node.failures:
                if not isinstance(error, StorageFailed | OSError):
                    raise error
            assert any(fault.hit_count for fault in self.node.vfs.faults.faults)
            await self.crash()
        self.check()

    def check(self) -> None:
        self.model.check_shown(self.topic)
        for bulk_id, definition in self.begun.items():
            told = self.model.tracks[bulk_id].standing.definition
            assert (told.kind, told.new_ms, told.request_id) == (
                definition.kind,
                definition.new_ms,
                definition.request_id,
            )
        for bulk_id, end in self.ends.items():
            assert self.model.tracks[bulk_id].standing.end is end

    async def check_all(self) -> None:
        """Once the broker is left alone."""
        self.node.vfs.faults.clear()
        await self.crash()
        async with asyncio.timeout(60):
            while self.topic.bulk.unended_ids():
                await asyncio.sleep(0.1)
        self.poll()
        self.check()
        await self.model.check_messages(self.topic)
        for track in self.model.tracks.values():
            has_failed = track.standing.end is BulkEnd.FAILED
            assert not has_failed or track.standing.definition.new_ms == BEYOND.new_ms
        await asyncio.sleep(500 + 60 * len(self.model.tracks))
        self.poll()
        left = [
            each.key for each in self.model.messages.values() if not (each.is_cancelled or each.was_delivered)
        ]
        assert not left, "not delivered"
        assert self.node.failures == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bulk_change_skips_nothing_and_doubles_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        model = BulkModel(KEPT)
        monkeypatch.setattr(Topic, "apply", model.watch(Topic.apply))
        life = BulkLife(clock, random.Random(seed), model)
        await life.serve()
        for _step in range(STEPS):
            await life.step()
        await life.check_all()

    run_sim(scenario, seed)
