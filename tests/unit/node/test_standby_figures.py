"""Figures of a standby: how far it is behind, and how far its clock is from the owner's."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.cluster.group_head import GroupKind, Head, LogEntry, Shard
from broker.node.standby import CAUGHT_UP_MS, SKEW_MAX_MS, SKEW_TOLD_MS, Standby

SHARD = Shard(b"c" * 16, 0, 1)


class Follower:
    """A stand-in that hands out what a test stores."""

    def __init__(self) -> None:
        self.apply: Any = None
        self.note_end: Any = None
        self.competes_last = False

    async def run(self, apply: Any, note_end: Any) -> None:
        self.apply, self.note_end = apply, note_end


class World:
    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.applied = 0
        broker = SimpleNamespace(clock=SimpleNamespace(now_ms=lambda: self.now_ms), follow=self._follow)
        self.follower = Follower()
        self.standby = Standby(cast(Any, broker), cast(Any, None), SHARD, cast(Any, self.follower))

    async def _follow(self, *_: Any) -> None:
        self.applied += 1

    async def come(self, wall_ms: int, kind: GroupKind = GroupKind.HEARTBEAT) -> None:
        """Have a group come that its owner began to store at a time of its own clock."""
        head = Head(kind, SHARD, 1, self.applied + 1, wall_ms, wall_ms + 4_000, b"n" * 8, "a")
        await self.follower.apply(LogEntry(head, cast(Any, None), 100))


async def following() -> World:
    world = World()
    await world.standby.run()
    return world


async def test_a_standby_is_behind_by_the_age_of_its_last_group_until_it_has_read_all() -> None:
    world = await following()
    await world.come(world.now_ms - 60_000)
    assert world.standby.lag_ms == 60_000
    world.now_ms += 500
    assert world.standby.lag_ms == 60_500
    world.follower.note_end(True)
    assert world.standby.lag_ms == 0
    await world.come(world.now_ms - CAUGHT_UP_MS - 1)
    assert world.standby.lag_ms == CAUGHT_UP_MS + 1


async def test_the_skew_is_the_least_age_of_groups_that_were_waited_for() -> None:
    world = await following()
    for age_ms in (90_000, 60_000, 30_000):
        await world.come(world.now_ms - age_ms)
    assert world.standby.skew_ms == 0, "groups of the past say nothing of clocks"
    for age_ms in (260, 70, 400):
        world.follower.note_end(True)
        await world.come(world.now_ms - age_ms)
    assert world.standby.skew_ms == 70
    for _ in range(100):
        world.follower.note_end(True)
        await world.come(world.now_ms + 3_000)
    assert world.standby.skew_ms == -3_000
    for _ in range(100):
        world.follower.note_end(True)
        await world.come(world.now_ms - 200)
    assert world.standby.skew_ms == 200, "a clock that was set is forgotten with the last hundred groups"


async def test_a_clock_that_is_far_off_has_its_node_take_over_last_until_it_is_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    world = await following()

    async def come(ages_ms: Iterable[int]) -> None:
        for age_ms in ages_ms:
            world.follower.note_end(True)
            await world.come(world.now_ms - age_ms)

    await come(9 * [SKEW_MAX_MS + 1])
    assert not world.follower.competes_last, "a few groups may only have been slow to come"
    await come([SKEW_MAX_MS + 1, 60_000])
    assert world.follower.competes_last
    await come([SKEW_MAX_MS])
    assert world.follower.competes_last, "a bound that was passed holds until the skew is well below it"
    await come([SKEW_MAX_MS * 4 // 5])
    assert not world.follower.competes_last
    await come([SKEW_TOLD_MS, SKEW_TOLD_MS * 4 // 5 + 1])
    await come(100 * [-SKEW_MAX_MS - 1])
    assert world.follower.competes_last
    await come(100 * [40])
    assert not world.follower.competes_last
    levels = [record.levelname for record in caplog.records]
    assert levels == ["ERROR", "WARNING", "ERROR", "INFO"], "told when it changes, and not with each group"


async def test_another_owner_has_another_clock() -> None:
    world = await following()
    world.follower.note_end(True)
    await world.come(world.now_ms + 3_000)
    world.follower.note_end(True)
    await world.come(world.now_ms - 90, GroupKind.TAKE_OVER)
    assert world.standby.skew_ms == 90


async def test_another_owner_has_not_told_of_a_clock_that_is_far_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await following()

    async def come(count: int) -> None:
        for _ in range(count):
            world.follower.note_end(True)
            await world.come(world.now_ms + 3_000)

    await come(10)
    assert world.follower.competes_last
    await world.come(world.now_ms, GroupKind.TAKE_OVER)
    assert not world.follower.competes_last
    await come(10)
    assert world.follower.competes_last
    assert [record.levelname for record in caplog.records] == 2 * ["ERROR"], "told of each owner"
