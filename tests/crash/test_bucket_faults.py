"""Snapshots that are missing, cut or rotten, and disks that fail while buckets are written, read and removed.

A bucket can always be made again from the ledgers. So what cannot be used leads to a rebuild, counted and logged,
and what cannot be written stays in memory: nothing is lost, nothing comes early or twice, and writing goes on.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import random
from collections.abc import Callable
from functools import cache

import pytest

from broker.delayed.index_pump import IndexPump
from broker.delayed.tracker import Frontier
from broker.errors import Corrupt
from broker.model import Position
from broker.storage.bucket_snapshot import HEADER_BYTES, decode_metadata
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.crash.bucket_history import (
    QUICK,
    attach_all,
    bucket_config,
    check_arrived,
    check_named_is_found,
    check_verify,
    named_and_found,
    upkeep_of,
)
from tests.depth import DAY, at_depth, deep_but, every_pair, sampled
from tests.harness import EARLIEST, Inbox, Node, Outgoing
from tests.moving import moves

BUCKETS = "data/topics/1/buckets"
SLOW_CHECKPOINTS = bucket_config(checkpoint_interval_ms=3_600_000)
SEEDS = [4, 7, 12, *range(100, 140)][: at_depth(change=1, deep=43)]
BATCHES = at_depth(change=500, deep=1_500)
FIRST_MS, STEP_MS, COUNT = 5_000, 50, 60
LASTING_SECONDS = 35
"""After so long, a failure that lasts has led to a rebuild."""


# -- snapshots that cannot be used ---------------------------------------------------------------------------------


async def produce_pending(node: Node) -> dict[Position, int]:
    """Sixty messages of the next seconds, and when each is due."""
    due_ms: dict[Position, int] = {}
    for first in range(0, COUNT, 5):
        now_ms = node.clock.now_ms()
        delays = [FIRST_MS + STEP_MS * ((first + i) * 7 % COUNT) for i in range(5)]
        batch = [Outgoing(b"%d" % d, deliver_at_ms=now_ms + d) for d in delays]
        positions = await node.produce("orders", batch)
        due_ms.update(zip(positions, (now_ms + d for d in delays), strict=True))
        await asyncio.sleep(0.02)
    return due_ms


@cache
def pending_disk() -> tuple[MemVfs, int, dict[Position, int]]:
    """A disk after a clean stop, with sixty messages pending, in two buckets or more; and the time then."""

    async def scenario(_: SimLoop, clock: SimClock) -> tuple[MemVfs, int, dict[Position, int]]:
        node = Node(MemVfs(), clock, SLOW_CHECKPOINTS).open()
        await node.create_subscription("orders", "all", position=EARLIEST)
        await node.create_subscription("orders", "second", position=EARLIEST)
        due_ms = await produce_pending(node)
        await asyncio.sleep(1)
        await node.stop()
        return node.vfs, clock.now_ms(), due_ms

    vfs, now_ms, due_ms = run_sim(scenario, 2, latency=QUICK)
    assert len(named_and_found(vfs)[1][0]) >= 2
    return vfs, now_ms, due_ms


def bucket_paths(vfs: MemVfs) -> list[str]:
    return [path for path in vfs.snapshot() if path.startswith(f"{BUCKETS}/")]


def remove(vfs: MemVfs, path: str) -> None:
    vfs.remove(path)


def cut(vfs: MemVfs, path: str) -> None:
    vfs.open(path).truncate(vfs.open(path).size() - 1)


def empty(vfs: MemVfs, path: str) -> None:
    vfs.open(path).truncate(0)


def lengthen(vfs: MemVfs, path: str) -> None:
    vfs.open(path).truncate(vfs.open(path).size() + 100)


def flip(vfs: MemVfs, path: str, offset: int) -> None:
    file = vfs.open(path)
    (byte,) = file.pread(1, offset)
    file.pwrite([bytes([byte ^ 0x10])], offset)


def flip_header(vfs: MemVfs, path: str) -> None:
    flip(vfs, path, 9)


def flip_metadata(vfs: MemVfs, path: str) -> None:
    flip(vfs, path, HEADER_BYTES + 20)


def segments_at(vfs: MemVfs, path: str) -> int:
    return decode_metadata(vfs.snapshot()[path], path).segments_at


def flip_first_segment(vfs: MemVfs, path: str) -> None:
    flip(vfs, path, segments_at(vfs, path))


def flip_last_segment(vfs: MemVfs, path: str) -> None:
    flip(vfs, path, vfs.open(path).size() - 1)


def exchange(vfs: MemVfs, path: str) -> None:
    """Another bucket lies under its name."""
    other = next(each for each in bucket_paths(vfs) if each != path)
    content = vfs.snapshot()[other]
    empty(vfs, path)
    vfs.open(path).pwrite([content], 0)


Damage = Callable[[MemVfs, str], None]
AT_START: list[Damage] = [remove, cut, empty, lengthen, flip_header, flip_metadata, exchange]
IN_SEGMENTS: list[Damage] = [flip_first_segment, flip_last_segment]


def copy_of(vfs: MemVfs) -> MemVfs:
    return vfs.crashed(vfs.op_count, CrashPolicy.KEEP_ALL)


async def deliver_all(node: Node, due_ms: dict[Position, int], opened_ms: int) -> None:
    inboxes = attach_all(node)
    await asyncio.sleep((FIRST_MS + STEP_MS * COUNT) / 1000 + 2)
    for inbox in inboxes:
        check_arrived(inbox, due_ms, opened_ms)
    assert node.failures == []


async def check_next_start(node: Node, *, rebuilds: int = 0) -> None:
    """Check that the next start needs no other rebuild."""
    await node.stop()
    check_named_is_found(copy_of(node.vfs))
    check_verify(node.vfs)
    again = Node(copy_of(node.vfs), node.clock, node.config).open()
    await asyncio.sleep(0.2)
    assert again.topic("orders").index.rebuilds == rebuilds


@pytest.mark.parametrize(
    ("damage", "which"),  # `which`: the first bucket, the last
    deep_but(zip(AT_START, itertools.cycle([0, -1]), strict=False), itertools.product(AT_START, [0, -1])),
)
def test_a_bucket_that_is_damaged_at_the_start_is_made_again_loudly(damage, which, caplog):
    vfs, now_ms, due_ms = pending_disk()
    vfs = copy_of(vfs)
    damage(vfs, bucket_paths(vfs)[which])

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(vfs, clock, SLOW_CHECKPOINTS).open()
        with moves(node.broker, "postdate_index_rebuilds"):
            await asyncio.sleep(2)
        assert node.topic("orders").index.rebuilds == 1
        assert node.topic("orders").index.tracker.count() == COUNT
        await node.checkpoint()
        await asyncio.sleep(0.5)
        (named, found) = named_and_found(copy_of(vfs))[1]
        assert named == found, "what cannot be used is gone once a manifest without it is durable"
        check_verify(vfs)
        await deliver_all(node, due_ms, now_ms)
        await check_next_start(node)

    with caplog.at_level(logging.ERROR):
        run_sim(scenario, 3, start_ms=now_ms, latency=QUICK)
    assert [r.message for r in caplog.records].count(
        "Buckets cannot be used; rebuilding the delayed index from the ledgers"
    ) == 1


@pytest.mark.parametrize(
    ("which", "damage", "when"),  # `which`: the first bucket, the last
    every_pair([0, -1], [*IN_SEGMENTS, remove, cut, empty], ["before the start", "while it runs"]),
)
def test_a_segment_that_cannot_be_read_is_met_when_it_is_loaded(damage, which, when, caplog):
    vfs, now_ms, due_ms = pending_disk()
    vfs = copy_of(vfs)
    is_met_at_start = when == "before the start" and damage not in IN_SEGMENTS

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        if when == "before the start":
            damage(vfs, bucket_paths(vfs)[which])
        node = Node(vfs, clock, SLOW_CHECKPOINTS).open()
        await asyncio.sleep(0.5)
        if when == "while it runs":
            damage(vfs, f"{BUCKETS}/{upkeep_of(node).image().bucket_ids[which]}.bucket")
        await deliver_all(node, due_ms, now_ms)
        assert node.topic("orders").index.rebuilds == 1
        await check_next_start(node)

    with caplog.at_level(logging.WARNING):
        run_sim(scenario, 3, start_ms=now_ms, latency=QUICK)
    sentence = "Buckets cannot be used" if is_met_at_start else "A bucket cannot be read"
    assert sum(r.message.startswith(sentence) for r in caplog.records) == 1
    named = [r for r in caplog.records if r.message == "The delayed index of a topic is rebuilt"]
    assert len(named) == 1 and "orders" in str(vars(named[0]))


@pytest.mark.parametrize(
    ("which", "kind", "when", "failing_seconds"),  # None: for good
    every_pair([0, -1], ["open", "read"], ["before the start", "while it runs"], [20, None]),
)
def test_a_bucket_on_a_bad_sector_costs_a_wait_and_at_last_a_rebuild(failing_seconds, when, kind, which):
    """The fault stays, on this file alone. What passes within the wait costs no rebuild."""
    vfs, now_ms, due_ms = pending_disk()
    vfs = copy_of(vfs)

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        bad = Fault(kind, bucket_paths(vfs)[which], onward=True)
        if when == "before the start":
            vfs.faults.add(bad)
        node = Node(vfs, clock, SLOW_CHECKPOINTS).open()
        await asyncio.sleep(0.5)
        if when == "while it runs":
            bad.glob = f"{BUCKETS}/{upkeep_of(node).image().bucket_ids[which]}.bucket"
            vfs.faults.add(bad)
        inboxes = attach_all(node)
        if failing_seconds is not None:
            await asyncio.sleep(failing_seconds)
            assert bad.hit_count >= failing_seconds / 2 or when == "while it runs", "it is tried again"
            vfs.faults.clear()
        await asyncio.sleep(60)
        for inbox in inboxes:
            found = inbox.poll()
            assert {each.position for each in found} == set(due_ms)
            assert all(each.sent_ms >= due_ms[each.position] for each in found)
        is_met = bad.hit_count > 0
        assert is_met or (when, kind) == ("while it runs", "open")  # it may be open already
        assert node.topic("orders").index.rebuilds == int(is_met and failing_seconds is None)
        assert node.failures == []
        later = await node.produce("orders", [Outgoing(b"later", deliver_after_ms=2_000)])
        for inbox in inboxes:
            assert [each.position for each in await inbox.wait(1, seconds=5)] == later, "the index goes on"

    run_sim(scenario, 3, start_ms=now_ms, latency=QUICK)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_produced_and_due_while_the_index_is_built_again_is_delivered_once(seed):
    """Messages that are late for the index (due at once, or before they are indexed) meet a load that fails."""

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        rng = loop.rng("delays")
        # No merges: they would meet most of the faults, and only try again.
        config = bucket_config(max_buckets=1_000, ledger_max_entries=500, checkpoint_interval_ms=3_600_000)
        node = Node(MemVfs(), clock, config).open()
        await node.create_subscription("orders", "all", position=EARLIEST)
        inbox = await node.subscribe("orders", "all", lease_ms=3_600_000, permits=10_000)
        due_ms: dict[Position, int] = {}
        upkeep, planned = upkeep_of(node), []
        load = upkeep.load

        async def load_or_fail(now_ms: int) -> None:
            if planned:
                raise planned.pop()
            await load(now_ms)

        upkeep.load = load_or_fail  # type: ignore[method-assign]
        for number in range(BATCHES):
            now_ms = clock.now_ms()
            delays = [rng.choice((1, 2, 3, 5, 4_000 + rng.randrange(4_000))) for _ in range(4)]
            accepted = await node.submit("orders", [Outgoing(b".", deliver_at_ms=now_ms + d) for d in delays])
            (ids,) = accepted.ids
            due_ms.update(
                (Position(ids.ledger_id, ids.first_entry_id + i), now_ms + d) for i, d in enumerate(delays)
            )
            await asyncio.sleep(rng.choice((0.001, 0.003, 0.02)))
            if number % 12 == 5 and not planned:
                planned.append(Corrupt("a bucket is damaged"))
        planned.clear()
        await asyncio.sleep(12)
        assert node.topic("orders").index.rebuilds >= 1 or seed >= 100
        check_arrived(inbox, due_ms, 0)
        assert node.failures == []

    run_sim(scenario, seed, latency=QUICK)


def test_what_lies_before_the_frontier_and_is_due_is_taken_before_the_index_is_built_again():
    """After the clock went back, messages lie in near before the frontier; one comes due while a load fails."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, bucket_config(clock_recheck_ms=100)).open()
        await node.create_subscription("orders", "all", position=EARLIEST)
        inbox = await node.subscribe("orders", "all", lease_ms=3_600_000)
        await node.produce("orders", [Outgoing(b"first", deliver_after_ms=5_000)])
        clock.step(6_000)
        await inbox.wait(1, seconds=1)
        clock.step(-6_000)
        due_ms = clock.now_ms() + 2_000
        (second,) = await node.produce("orders", [Outgoing(b"second", deliver_at_ms=due_ms)])
        pump = node.topic("orders").index
        needs_load = pump.tracker.needs_load
        faults = [Corrupt("a bucket is damaged")]

        async def load(now_ms: int) -> None:
            await asyncio.sleep((due_ms - now_ms) / 1000)
            raise faults.pop()

        pump.upkeep.load = load  # type: ignore[union-attr,method-assign]
        pump.tracker.needs_load = lambda now_ms: (  # type: ignore[method-assign]
            needs_load(now_ms) if not faults else now_ms >= due_ms - 500
        )
        await asyncio.sleep(4)
        assert pump.rebuilds == 1
        assert [each.position for each in inbox.poll()] == [second]

    run_sim(scenario, 3, latency=QUICK)


# -- a disk that fails ---------------------------------------------------------------------------------------------

KINDS = ("create", "write", "sync", "sync_dir", "open", "read", "remove")
ERRORS = (errno.EIO, errno.ENOSPC)
OF_A_KIND = at_depth(change=1, deep=50)
"""Number of operations of a kind that fail, if there are as many."""


async def work(node: Node, fault: Fault | None) -> tuple[list[Inbox], dict[Position, int]]:
    """Seals, merges, loads and checkpoints, one of which meets the fault; everything has been delivered after it."""
    rng = random.Random(11)
    await node.create_subscription("orders", "all", position=EARLIEST)
    inboxes = [await node.subscribe("orders", "all", lease_ms=3_600_000)]
    if fault is not None:
        node.vfs.faults.add(fault)
    due_ms: dict[Position, int] = {}
    for _ in range(12):
        now_ms = node.clock.now_ms()
        delays = [rng.choice((20, rng.randrange(1, 5_000), 5_000 + rng.randrange(3_000))) for _ in range(4)]
        positions = await node.produce(
            "orders", [Outgoing(b".", deliver_at_ms=now_ms + delay) for delay in delays]
        )
        due_ms.update(zip(positions, (now_ms + delay for delay in delays), strict=True))
        await asyncio.sleep(rng.uniform(0.05, 0.2))
    await asyncio.sleep(10 + LASTING_SECONDS)
    return inboxes, due_ms


@cache
def operation_counts() -> dict[str, int]:
    """Count the operations on buckets by kind while the work goes well."""
    counting = {kind: Fault(kind, f"{BUCKETS}*", nth=1 << 30) for kind in KINDS}

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, bucket_config()).open()
        for fault in counting.values():
            node.vfs.faults.add(fault)
        await work(node, None)
        assert node.topic("orders").index.rebuilds == 0

    run_sim(scenario, 3, latency=QUICK)
    return {kind: fault.seen_count for kind, fault in counting.items()}


# A change meets one of the errors with each kind, on the next day the other.
@pytest.mark.parametrize(
    ("kind", "error"),
    deep_but(
        [(kind, ERRORS[(number + DAY) % len(ERRORS)]) for number, kind in enumerate(KINDS)],
        itertools.product(KINDS, ERRORS),
    ),
)
def test_a_failure_with_a_bucket_ends_nothing_and_loses_nothing(kind, error):
    count = operation_counts()[kind]
    assert count > 3
    hits = 0
    for nth in sampled(range(1, count + 1), max(1, count // OF_A_KIND), count // 2):
        for onward in (False, True):
            fault = Fault(kind, f"{BUCKETS}*", nth=nth, error=error, after_bytes=nth % 40, onward=onward)
            try:
                run_sim(lambda _, clock, fault=fault: meet_fault(clock, fault), 3, latency=QUICK)
            except BaseException as failure:
                failure.add_note(f"{kind} number {nth} of {count} failed, {'and all after it' * onward}")
                raise
            hits += bool(fault.hit_count)
    assert hits >= min(8, 2 * OF_A_KIND, count)


async def meet_fault(clock: SimClock, fault: Fault) -> None:
    node = Node(MemVfs(), clock, bucket_config()).open()
    inboxes, due_ms = await work(node, fault)
    assert node.failures == []
    assert node.broker.journal.failed is None, "a bucket's disk error ended writing"
    reads_no_more = fault.onward and fault.kind in ("open", "read")
    check_arrived(inboxes[0], due_ms, 0, waited_ms=LASTING_SECONDS * 1000 if reads_no_more else 0)
    node.vfs.faults.clear()
    await node.produce("orders", [Outgoing(b".", deliver_after_ms=600_000)] * 12)
    await asyncio.sleep(70)  # the longest pause before another try
    await node.checkpoint()
    await asyncio.sleep(1)
    image = upkeep_of(node).image()
    assert image.bucket_ids, "a seal is tried again"
    assert not image.deleted_ids, "a removal is tried again"
    (named, found) = named_and_found(copy_of(node.vfs))[1]
    assert named == found
    check_verify(node.vfs)
    if (
        fault.kind == "sync_dir"
    ):  # no later sync of that folder vouches for a name (MEMVFS-6): a rebuild may follow
        return
    restarted = node.crash(CrashPolicy.LOSE_UNSYNCED).open(start=False)
    check_named_is_found(restarted.vfs)


def test_a_full_disk_keeps_what_cannot_be_sealed_in_memory_and_delivers_it():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, SLOW_CHECKPOINTS).open()
        await node.create_subscription("orders", "all", position=EARLIEST)
        node.vfs.faults.add(Fault("*", f"{BUCKETS}/*", error=errno.ENOSPC, onward=True))
        inbox = await node.subscribe("orders", "all", lease_ms=3_600_000)
        due_ms = await produce_pending(node)
        await asyncio.sleep(1)
        tracker = node.topic("orders").index.tracker
        assert (tracker.stats().bucket_count, tracker.count()) == (0, COUNT)
        assert node.broker.counters.index_operations["seal", "failed"] >= 1
        await asyncio.sleep(10)
        check_arrived(inbox, due_ms, 0)
        assert node.failures == []

    run_sim(scenario, 3, latency=QUICK)


# -- the watchdog --------------------------------------------------------------------------------------------------


def test_the_watchdog_rebuilds_an_index_that_keeps_what_is_due(caplog):
    """The tracker is broken on purpose: it says that a message was due long ago, and never yields it."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, SLOW_CHECKPOINTS).open()
        await node.create_subscription("orders", "all", position=EARLIEST)
        inbox = await node.subscribe("orders", "all", lease_ms=3_600_000)
        pump: IndexPump = node.topic("orders").index
        tracker = pump.tracker
        take_due, clear = tracker.take_due, tracker.clear
        tracker.take_due = lambda now_ms, limit: None  # type: ignore[method-assign]

        def mend(frontier: Frontier | None = None) -> None:
            tracker.take_due, tracker.clear = take_due, clear  # type: ignore[method-assign]
            clear(frontier)

        tracker.clear = mend  # type: ignore[method-assign]
        positions = await node.produce("orders", [Outgoing(b".", deliver_after_ms=500)] * 12)
        await asyncio.sleep(5)
        assert (pump.rebuilds, inbox.poll()) == (0, [])
        await asyncio.sleep(3)
        assert pump.rebuilds == 1
        assert sorted(each.position for each in inbox.poll()) == positions
        await asyncio.sleep(20)
        assert pump.rebuilds == 1
        assert inbox.poll() == []
        assert node.failures == []
        await check_next_start(node)

    with caplog.at_level(logging.ERROR):
        run_sim(scenario, 3, latency=QUICK)
    assert any("returned no entries although" in record.message for record in caplog.records)


@pytest.mark.parametrize("when", ["before the start", "while it runs"])
def test_an_error_that_passes_costs_a_wait_and_no_rebuild(when: str) -> None:
    vfs, now_ms, due_ms = pending_disk()
    vfs = copy_of(vfs)

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        fault = Fault("read", f"{BUCKETS}/*", onward=True)
        if when == "before the start":
            vfs.faults.add(fault)
        node = Node(vfs, clock, SLOW_CHECKPOINTS).open()
        if when == "while it runs":
            await asyncio.sleep(0.5)
            vfs.faults.add(fault)
        await asyncio.sleep(3 if when == "before the start" else 0.1)
        vfs.faults.clear()
        await deliver_all(node, due_ms, now_ms)
        assert fault.hit_count or when == "while it runs"
        assert node.topic("orders").index.rebuilds == 0
        await check_next_start(node)

    run_sim(scenario, 3, start_ms=now_ms, latency=QUICK)
