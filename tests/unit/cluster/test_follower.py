"""Following a log and taking it over: when, and after which looks. Its histories are in tests/sim/test_shard.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.cluster.follower import CutOff, Follower, TakenOver
from broker.cluster.group_head import GroupKind, Head, LogEntry, blank, encode_entry
from broker.cluster.group_objects import entry_name, log_folder
from broker.cluster.group_reader import READ_SINGLY
from broker.cluster.lease import OwnerLease
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.object_store import StoreFailed
from broker.cluster.take_over import REST_LEASES
from tests.unit.cluster.faulty_store import FaultyStore
from tests.unit.cluster.object_logs import LEASE_MS, SHARD, create_log, object_store, open_object_log
from tests.unit.cluster.test_lease import Clocks


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultyStore]:
    async with object_store("memory", tmp_path, monkeypatch) as objects:
        faulty = FaultyStore(objects)
        await create_log(faulty, SHARD)
        yield faulty


class Standby:
    """A follower whose clock the test moves."""

    def __init__(self, store: FaultyStore, *, rank: int = 0, rest_ms: int = 0) -> None:
        self.clocks = Clocks()
        self.lease = OwnerLease(self.clocks, LEASE_MS)
        self.log = ObjectGroupLog(store, SHARD, "b", self.lease, repeat_pause_seconds=0.001)
        self.applied: list[int] = []
        self.ends: list[bool] = []
        self.waits_at = 0  # the index that it begins to apply, and does not end to until the test lets it
        self.goes_on = asyncio.Event()
        self.trimmed_below = 0
        self.base_failures = 0
        self.looks = 0
        self._rank = rank
        self._rest_ms = rest_ms
        self._running: asyncio.Task[TakenOver] | None = None

    async def start(self, from_index: int = 1) -> asyncio.Task[TakenOver]:
        await self.log.open(from_index, 0)
        follower = Follower(
            self.log,
            self.lease,
            self.clocks,
            "b",
            self._look,
            rank=self._rank,
            rest_ms=self._rest_ms,
            pause_seconds=0.001,
        )
        self._running = asyncio.create_task(follower.run(self._apply, self.ends.append))
        return self._running

    async def reach(self, index: int) -> None:
        """Wait until all below an index is applied."""
        async with asyncio.timeout(10):
            while not self.applied or self.applied[-1] < index - 1:
                await asyncio.sleep(0.001)

    async def looks_again(self) -> None:
        """Let it find nothing more in the log and decide about it, twice; or take over."""
        assert self._running is not None
        decided = len(self.ends) + 2
        async with asyncio.timeout(10):
            while len(self.ends) < decided and not self._running.done():
                await asyncio.sleep(0.001)

    async def _apply(self, entry: LogEntry) -> None:
        self.applied.append(entry.head.first_lsn)
        if entry.head.first_lsn == self.waits_at:
            self.goes_on.clear()
            await self.goes_on.wait()

    async def _look(self) -> int:
        self.looks += 1
        if self.base_failures:
            self.base_failures -= 1
            raise StoreFailed("no answer")
        return self.trimmed_below


async def test_it_takes_over_after_a_lease_of_silence_and_not_before(store: FaultyStore) -> None:
    owner = await open_object_log(store, "a")
    await owner.take_over(2, epoch=1)
    standby = Standby(store)
    running = await standby.start()
    await standby.reach(3)
    standby.clocks.move(LEASE_MS - 1)
    await standby.looks_again()
    assert not running.done()
    await owner.append(3, blank())
    await standby.reach(4)
    standby.clocks.move(LEASE_MS - 1)
    await standby.looks_again()
    assert not running.done(), "a group begins the silence anew"
    standby.clocks.move(1)
    taken = await running
    assert (taken.at_index, taken.epoch) == (4, 2)
    assert taken.until_ms > 0 and standby.lease.holds() and standby.applied == [1, 2, 3]


async def test_the_second_in_rank_waits_a_quarter_longer(store: FaultyStore) -> None:
    owner = await open_object_log(store, "a")
    await owner.take_over(2, epoch=1)
    standby = Standby(store, rank=1)
    running = await standby.start()
    await standby.reach(3)
    standby.clocks.move(LEASE_MS + LEASE_MS // 4 - 1)
    await standby.looks_again()
    assert not running.done()
    standby.clocks.move(1)
    assert (await running).at_index == 3


async def test_the_second_in_rank_leaves_a_shard_that_nobody_has_owned_to_the_first_for_a_lease_more(
    store: FaultyStore,
) -> None:
    standby = Standby(store, rank=1)
    running = await standby.start()
    await standby.reach(2)
    standby.clocks.move(2 * LEASE_MS - 1)
    await standby.looks_again()
    assert not running.done()
    standby.clocks.move(1)
    assert (await running).at_index == 2


async def test_a_suspended_machine_has_heard_nothing_and_its_wall_clock_proves_nothing(
    store: FaultyStore,
) -> None:
    standby = Standby(store)
    running = await standby.start()
    await standby.reach(2)
    standby.clocks.wall_ms += 10 * LEASE_MS
    await standby.looks_again()
    assert not running.done()
    standby.clocks.boot_ms += LEASE_MS
    assert (await running).epoch == 1


@pytest.mark.parametrize(("named", "waits"), [("b", False), ("c", True), ("", True)])
async def test_who_is_named_by_a_resignation_takes_over_at_once(
    store: FaultyStore, named: str, waits: bool
) -> None:
    owner = await open_object_log(store, "a")
    await owner.take_over(2, epoch=1)
    standby = Standby(store)
    running = await standby.start()
    await owner.resign(3, to=named)
    await standby.reach(4)
    if waits:
        await standby.looks_again()
        assert not running.done()
        standby.clocks.move(LEASE_MS)
    assert (await running).at_index == 4


async def test_whoever_finds_the_owner_alive_follows_on_and_waits_anew(store: FaultyStore) -> None:
    owner = await open_object_log(store, "a")
    await owner.take_over(2, epoch=1)
    standby = Standby(store)
    running = await standby.start()
    await standby.reach(3)
    store.hold()
    standby.clocks.move(LEASE_MS)
    while not any(b"b" in body[64:96] for _, body in store.created):
        await asyncio.sleep(0.001)  # its take-over is under way
    appending = owner.append(3, blank())
    await asyncio.sleep(0)
    await store.create_behind(
        f"shards/3/log/{3:016x}", [body for name, body in store.created if b"a" in body[64:96]][-1]
    )
    store.work()
    await appending
    await standby.reach(4)
    await standby.looks_again()
    assert not running.done(), "the lost race begins the silence anew"
    standby.clocks.move(LEASE_MS)
    assert (await running).at_index == 4


async def test_a_take_over_counts_only_after_a_look_at_the_bases(store: FaultyStore) -> None:
    owner = await open_object_log(store, "a")
    await owner.take_over(2, epoch=1)
    standby = Standby(store)
    standby.base_failures = 3
    running = await standby.start(2)
    await standby.reach(3)
    assert standby.looks == 4, "a look that failed is repeated"
    standby.clocks.move(LEASE_MS)
    await running
    assert standby.looks == 5, "once for the one it read, once for its own"


async def test_a_take_over_that_was_read_where_the_log_was_trimmed_is_not_applied(store: FaultyStore) -> None:
    owner = await open_object_log(store, "a")
    await owner.take_over(2, epoch=1)
    standby = Standby(store)
    standby.trimmed_below = 3
    with pytest.raises(CutOff, match="begins with 3"):
        await (await standby.start(2))
    assert standby.applied == []


async def test_a_take_over_of_its_own_where_the_log_was_trimmed_gives_no_lease(store: FaultyStore) -> None:
    standby = Standby(store)
    running = await standby.start(2)
    standby.trimmed_below = 9
    await standby.looks_again()
    standby.clocks.move(LEASE_MS)
    with pytest.raises(CutOff):
        await running
    assert not standby.lease.holds()


async def test_a_folder_that_is_behind_a_trim_is_told_at_once(store: FaultyStore) -> None:
    owner = await open_object_log(store, "a")
    for index in range(2, 9):
        await owner.append(index, blank())
    await owner.trim(7)
    with pytest.raises(CutOff, match="Index 3 was trimmed"):
        await (await Standby(store).start(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "opened_at", [2, 120], ids=["it has listed it since", "it was there when it was opened"]
)
async def test_a_standby_that_falls_behind_a_trim_is_told_at_once(store: FaultyStore, opened_at: int) -> None:
    owner = await open_object_log(store, "a")
    for index in range(2, opened_at + 1):
        await owner.append(index, blank())
    standby = Standby(store)
    standby.waits_at = 2
    running = await standby.start()
    await standby.reach(3)
    for index in range(opened_at + 1, 121):
        await owner.append(index, blank())
    standby.waits_at = 2 * READ_SINGLY
    standby.goes_on.set()
    await standby.reach(standby.waits_at + 1)
    await owner.trim(110)
    standby.goes_on.set()
    with pytest.raises(CutOff, match="was trimmed"):
        async with asyncio.timeout(10):
            await running
    assert standby.ends == [], "it never said that it had read all"


async def test_who_was_away_looks_for_a_trim_before_it_takes_over(store: FaultyStore) -> None:
    owner = await open_object_log(store, "a")
    await owner.take_over(2, epoch=1)
    standby = Standby(store)
    running = await standby.start()
    await standby.reach(3)
    store.failing_reads = 1_000_000
    while store.failing_reads == 1_000_000:  # a read from before could still find the next group
        await asyncio.sleep(0.001)
    for index in range(3, 12):
        await owner.append(index, blank())
    await owner.trim(9)
    standby.trimmed_below = 9
    standby.clocks.move(LEASE_MS)
    store.failing_reads = 0
    with pytest.raises(CutOff, match="Index 3 was trimmed"):
        await running
    assert entry_name(SHARD.number, 3) not in [
        info.name async for info in store.objects(log_folder(SHARD.number))
    ]


async def test_a_look_for_a_trim_that_failed_is_repeated_before_the_take_over(store: FaultyStore) -> None:
    standby = Standby(store)
    running = await standby.start()
    await standby.reach(2)
    store.failing_lists = 3
    standby.clocks.move(LEASE_MS)
    assert (await running).at_index == 2
    assert store.failing_lists == 0


async def test_a_store_that_cannot_be_read_for_a_while_is_read_again(store: FaultyStore) -> None:
    standby = Standby(store)
    running = await standby.start()
    await standby.reach(2)
    store.failing_reads = 10
    owner = await open_object_log_again(store)
    await owner.append(2, blank())
    await standby.reach(3)
    running.cancel()


async def open_object_log_again(store: FaultyStore) -> ObjectGroupLog:
    """A log whose reading the planned failures do not meet."""
    failing, store.failing_reads = store.failing_reads, 0
    log = await open_object_log(store, "a")
    store.failing_reads = failing
    return log


async def test_who_rests_takes_over_at_once_when_it_is_named(store: FaultyStore) -> None:
    owner = await open_object_log(store, "a")
    await owner.take_over(2, epoch=1)
    standby = Standby(store, rest_ms=10 * LEASE_MS)
    running = await standby.start()
    await standby.reach(3)
    standby.clocks.move((1 + REST_LEASES) * LEASE_MS - 1)
    await standby.looks_again()
    assert not running.done()
    await owner.resign(3, to="b")
    assert (await running).at_index == 4


async def test_who_rests_takes_over_if_nobody_else_does(store: FaultyStore) -> None:
    """Two standbys that had both been fenced lately left a shard without an owner for minutes."""
    standby = Standby(store, rest_ms=100 * LEASE_MS)
    running = await standby.start()
    await standby.reach(2)
    standby.clocks.move((1 + REST_LEASES) * LEASE_MS)
    assert (await running).epoch == 1


async def test_a_rest_ends(store: FaultyStore) -> None:
    standby = Standby(store, rest_ms=LEASE_MS)
    running = await standby.start()
    await standby.reach(2)
    standby.clocks.move(LEASE_MS)
    assert (await running).epoch == 1


async def test_nobody_waits_for_the_lease_of_an_owner_that_resigned(store: FaultyStore) -> None:
    owner = await open_object_log(store, "a")
    before_ms = time.time_ns() // 1_000_000
    await owner.take_over(2, epoch=1)
    assert owner.until_ms >= before_ms + LEASE_MS
    standby = Standby(store)
    running = await standby.start()
    await owner.resign(3, to="b")
    assert (await running).until_ms < before_ms + LEASE_MS


async def test_a_resignation_hides_no_ceiling_of_an_owner_before(store: FaultyStore) -> None:
    ahead_ms = 3_600_000
    first = await open_object_log(store, "a")
    await first.take_over(2, epoch=1)
    second = await open_object_log(store, "c")
    ceiling_ms = second.until_ms + ahead_ms
    head = heartbeat_of_a_clock_ahead(ceiling_ms)
    await store.create(entry_name(SHARD.number, 3), encode_entry(head, blank()))
    await second.follow()
    assert second.until_ms == ceiling_ms
    await second.take_over(4, epoch=2)
    await second.resign(5, to="b")
    running = await Standby(store).start()
    assert (await running).until_ms == ceiling_ms


def heartbeat_of_a_clock_ahead(until_ms: int) -> Head:
    """The head of a heartbeat whose writer's clock is ahead."""
    return Head(GroupKind.HEARTBEAT, SHARD, 1, 3, until_ms, until_ms, bytes(8), "a")
