"""A follower far behind reads ahead: in order, so many groups and bytes at once; one that keeps up lists nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from broker.cluster.creation import encode_first
from broker.cluster.group_head import GroupKind, Head, encode_entry
from broker.cluster.group_objects import entry_name
from broker.cluster.group_reader import READ_SINGLY
from broker.cluster.lease import OwnerLease
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.object_store import StoreFailed
from broker.cluster.read_ahead import AheadLimits
from broker.storage.record_types import RecordType
from broker.testing.sim_loop import run_sim
from tests.fake_store import FakeStore
from tests.unit.cluster.object_logs import LEASE_MS, SHARD
from tests.unit.cluster.test_lease import Clocks

GET_SECONDS = 0.03
LIMITS = AheadLimits(groups=8, bytes=20_000)


class SlowStore(FakeStore):
    """A store whose reads take their time, and are counted while they do."""

    def __init__(self) -> None:
        super().__init__()
        self.reading: dict[str, int] = {}
        self.most_groups = self.most_bytes = 0
        self.failing = 0

    async def read(self, name: str) -> bytes:
        body = await super().read(name)
        self.reading[name] = len(body)
        self.most_groups = max(self.most_groups, len(self.reading))
        self.most_bytes = max(self.most_bytes, sum(self.reading.values()))
        try:
            await asyncio.sleep(GET_SECONDS)
        finally:
            del self.reading[name]
        if self.failing:
            self.failing -= 1
            raise StoreFailed("no answer")
        return body

    @property
    def lists(self) -> int:
        return sum(kind == "objects" for kind, _ in self.calls)


class Scene:
    """A log in a slow store, and one who follows it."""

    def __init__(self) -> None:
        self.store = SlowStore()
        self.store.objects_by_name[entry_name(SHARD.number, 1)] = encode_first(SHARD), 0
        self.log = ObjectGroupLog(
            self.store,
            SHARD,
            "b",
            OwnerLease(Clocks(), LEASE_MS),
            ahead=LIMITS,
        )
        self._end = 2

    def grow(self, count: int, *, records: int = 3, record_bytes: int = 10) -> None:
        for _ in range(count):
            head = Head(GroupKind.RECORDS, SHARD, 0, self._end, 5, 6, bytes(8), "a")
            body = encode_entry(head, [(RecordType.SETTLED, (bytes(record_bytes),), record_bytes)] * records)
            self.store.objects_by_name[entry_name(SHARD.number, self._end)] = body, 0
            self._end += records

    async def follow_all(self) -> list[int]:
        """Return the first lsns of the groups up to the end, as they came."""
        lsns = []
        while self.log.next_index < self._end:
            try:
                entry = await self.log.follow()
            except StoreFailed:
                continue
            if entry is not None:
                lsns.append(entry.head.first_lsn)
        assert await self.log.follow() is None
        return lsns


def run(work: Coroutine[Any, Any, None]) -> None:
    run_sim(lambda loop, clock: work, seed=1)


@pytest.mark.slow
def test_a_standby_that_was_away_for_long_reads_ahead_in_order() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.grow(1_000)
        await scene.log.open(1, 0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await scene.follow_all() == [1, *range(2, 3_002, 3)]
        assert loop.time() - began < 1_000 * GET_SECONDS / (LIMITS.groups - 1)
        assert scene.store.most_groups == LIMITS.groups
        assert scene.store.lists <= 2, "that of `open`, and one at its end"

    run(scenario())


@pytest.mark.slow
def test_one_that_falls_behind_later_lists_what_waits() -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.log.open(1, 0)
        await scene.follow_all()
        scene.grow(1_000)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert len(await scene.follow_all()) == 1_000
        assert loop.time() - began < (READ_SINGLY + 1_000 / (LIMITS.groups - 1)) * GET_SECONDS
        assert scene.store.lists <= 3

    run(scenario())


def test_one_that_keeps_up_lists_nothing() -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.log.open(1, 0)
        await scene.follow_all()
        before = scene.store.lists
        for _ in range(20):
            scene.grow(READ_SINGLY - 1)
            await scene.follow_all()
        assert scene.store.lists == before and scene.store.most_groups == 1

    run(scenario())


def test_no_more_bytes_are_read_at_once_and_a_larger_group_alone() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.grow(50, record_bytes=2_000)
        scene.grow(3, record_bytes=10_000)
        await scene.log.open(1, 0)
        await scene.follow_all()
        length = len(scene.store.objects_by_name[max(scene.store.objects_by_name)][0])
        assert length > LIMITS.bytes
        assert scene.store.most_bytes == length
        assert 1 < scene.store.most_groups <= 1 + LIMITS.bytes // 6_000, "the first group of a log is small"

    run(scenario())


def test_a_read_that_fails_is_repeated_and_nothing_is_left_out() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.grow(300)
        await scene.log.open(1, 0)
        for _ in range(3):
            await scene.log.follow()
        scene.store.failing = 5
        lsns = await scene.follow_all()
        assert lsns == list(range(lsns[0], 902, 3)) and lsns[0] == 8
        assert not scene.store.reading

    run(scenario())


def test_what_is_read_ahead_ends_with_the_follower() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.grow(300)
        await scene.log.open(1, 0)
        await scene.log.follow()
        await asyncio.sleep(GET_SECONDS / 2)
        assert scene.store.reading
        await scene.log.stop_following()
        assert not scene.store.reading
        entry = await scene.log.follow()
        assert entry is not None and entry.head.first_lsn == 2

    run(scenario())


def test_a_follow_that_is_cancelled_has_read_nothing() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.grow(20)
        await scene.log.open(1, 0)
        following = asyncio.create_task(scene.log.follow())
        await asyncio.sleep(GET_SECONDS / 2)
        following.cancel()
        await asyncio.wait([following])
        assert await scene.follow_all() == [1, *range(2, 62, 3)]

    run(scenario())
