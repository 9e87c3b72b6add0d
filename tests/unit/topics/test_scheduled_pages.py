"""Pages of what is pending stay right whatever happens between them: against a sorted list, with both trackers."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.delayed.due_rows import DueRows
from broker.errors import Unavailable
from broker.model import Position
from broker.topics import scheduled
from broker.topics.schedule_values import DueRange, ScheduledState
from tests.unit.topics.pending_world import NOW, PendingWorld

KEYS = ("", "a", "ab", "b")
times = st.integers(NOW + 1, NOW + 9_000)
messages = st.lists(st.tuples(times, st.sampled_from(KEYS)), min_size=1, max_size=6)
steps = st.one_of(
    st.tuples(st.just("add"), messages),
    st.tuples(st.just("roll"), messages),
    st.tuples(st.just("take"), times),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(st.just("move"), st.tuples(st.integers(0, 99), times)),
    st.tuples(st.just("drop"), st.none()),
    st.tuples(st.just("seal"), st.none()),
    st.tuples(st.just("merge"), st.none()),
    st.tuples(st.just("flush"), st.none()),
)
turns = st.lists(st.lists(steps, max_size=4), min_size=1, max_size=6)
trackers = st.sampled_from(("bucket", "memory"))
ranges = st.one_of(
    st.just(DueRange()), st.tuples(times, st.integers(0, 6_000)).map(lambda r: DueRange(r[0], r[0] + r[1]))
)


class Play:
    """A world that steps happen to; notes which messages were moved."""

    def __init__(self, kind: str, *, drops_what_waits: bool = True) -> None:
        self.world = PendingWorld(kind)
        self.ledger_id = 1
        self.moved: set[Position] = set()
        self.was_moved_back = False
        self._drops_what_waits = drops_what_waits
        self._had: set[tuple[Position, int]] = set()

    @property
    def _floor_ms(self) -> int:
        return self.world.tracker.frontier.deliver_at_ms

    async def do(self, step) -> None:
        world, (what, value) = self.world, step
        if what in ("add", "roll"):
            self.ledger_id += what == "roll"
            world.add(self.ledger_id, [(max(due_ms, self._floor_ms + 1), key) for due_ms, key in value])
        elif what == "take":
            await world.take(value)
        elif what == "cancel" and world.waiting:
            world.cancel(self.pick(value))
        elif what == "move" and world.waiting:
            position = self.pick(value[0])
            self._had.add((position, world.waiting[position].due_ms))
            due_ms = max(value[1], self._floor_ms + 1)
            self.was_moved_back |= (position, due_ms) in self._had
            world.move(position, due_ms)
            self.moved.add(position)
        elif what == "drop":
            ledger_ids = [ledger.name.ledger_id for ledger in world.log][:-1]
            waits = {position.ledger_id for position in world.waiting}
            if ledger_ids and (self._drops_what_waits or ledger_ids[0] not in waits):
                world.drop(ledger_ids[0])
        elif what == "seal":
            await world.seal()
        elif what == "merge":
            await world.merge()
        elif what == "flush":
            await world.flush_ledgers()

    def pick(self, number: int) -> Position:
        held = sorted(self.world.waiting)
        return held[number % len(held)]


@pytest.mark.slow
@given(trackers, turns, ranges, st.sampled_from(("", "a", "b")), st.integers(1, 7), st.booleans())
def test_pages_hold_what_waits_at_its_place_once_and_in_order(kind, turns, due, prefix, limit, is_narrow):
    asyncio.run(_page_by_page(kind, turns, due, prefix, limit, is_narrow))


async def _page_by_page(kind, turns, due, prefix, limit, is_narrow) -> None:
    play = Play(kind)
    world = play.world
    world.add(1, [(NOW + 1_000 * (i % 8 + 1), KEYS[i % 4]) for i in range(12)])
    start, shown, stayed = None, [], None
    narrow = {"LOOKED_MAX": 3, "PAGE_BYTES_MAX": 40, "_UNASKED_BYTES": 10}
    with patch.dict(vars(scheduled), narrow) if is_narrow else nullcontext():
        for turn in [*turns, *[[]] * 60]:
            for step in turn:
                await play.do(step)
            page = await world.look.page(due, prefix, start, limit)
            expected = [place for place in world.places(due, prefix) if start is None or place >= start]
            if page.next is not None:
                assert start is None or page.next > start
                expected = [place for place in expected if place < page.next]
            assert [(each.deliver_at_ms, *each.position) for each in page.scheduled] == expected
            assert len(expected) <= limit
            for each in page.scheduled:
                message = world.waiting[each.position]
                assert (each.schedule_key, each.revision) == (message.key, message.revision)
                assert (each.frame, each.publish_time_ms) == (message.frame, NOW - 5)
                assert each.state is ScheduledState.WAITING
            shown += [each.position for each in page.scheduled]
            now = set(world.places(due, prefix))
            stayed = now if stayed is None else stayed & now
            start = page.next
            if start is None:
                break
        else:
            raise AssertionError("no page was the last one")
    once = [position for position in shown if position not in play.moved]
    assert len(once) == len(set(once))
    assert {place[1:] for place in stayed} <= {tuple(position) for position in shown}


@pytest.mark.slow
@given(trackers, turns, ranges, st.sampled_from(("", "a")), st.integers(1, 7))
def test_changes_by_filter_leave_alone_what_was_moved_meanwhile(kind, turns, due, prefix, limit):
    asyncio.run(_places_by_places(kind, turns, due, prefix, limit))


async def _places_by_places(kind, turns, due, prefix, limit) -> None:
    play = Play(kind)
    world = play.world
    world.add(1, [(NOW + 1_000 * (i % 8 + 1), KEYS[i % 4]) for i in range(12)])
    for step in turns[0]:
        await play.do(step)
    lsn, start = world.lsn, (0, 0, 0)
    play.moved.clear()
    for turn in [*turns[1:], *[[]] * 60]:
        for step in turn:
            await play.do(step)
        expected = [
            place
            for place in world.places(due, prefix)
            if place >= start and Position(*place[1:]) not in play.moved
        ]
        assert await world.look.count_matching(due, prefix) == len(world.places(due, prefix))
        found = await world.look.next_matching(due, prefix, start, limit, lsn)
        if found.end is not None:
            expected = [place for place in expected if place < found.end]
        assert _places(found.entries) == expected
        assert len(expected) <= limit
        if found.end is None:
            return
        start = found.end
    raise AssertionError("no page was the last one")


@pytest.mark.slow
@given(trackers, turns, ranges, st.one_of(st.just(0), st.integers(1, 4_000)))
def test_counts_agree_with_what_waits(kind, turns, due, width_ms):
    asyncio.run(_counted(kind, turns, due, width_ms))


async def _counted(kind, turns, due, width_ms) -> None:
    play = Play(kind, drops_what_waits=False)
    for turn in turns:
        for step in turn:
            await play.do(step)
        world = play.world
        if width_ms and (due.end_ms - due.start_ms) // width_ms > scheduled.BARS_MAX:
            due = DueRange(NOW, NOW + 10_000)
        counts = await world.look.count(due, width_ms)
        before, inside = world.places(DueRange(0, due.start_ms)), world.places(due)
        after = world.places(DueRange(due.end_ms))
        if counts.is_exact:
            bars: dict[int, int] = {}
            for time, *_ in inside:
                start_ms = time - (time - due.start_ms) % width_ms if width_ms else due.start_ms
                bars[start_ms] = bars.get(start_ms, 0) + 1
            assert dict(counts.bars) == bars
            assert (counts.before, counts.after) == (len(before), len(after))
        elif not play.was_moved_back:
            total = counts.before + sum(count for _, count in counts.bars) + counts.after
            assert total == len(before) + len(inside) + len(after)
        assert all(count > 0 for _, count in counts.bars)


def _places(columns: DueRows) -> list[tuple[int, int, int]]:
    return [columns.key(row) for row in range(len(columns))]


@pytest.mark.parametrize("kind", ["bucket", "memory"])
async def test_a_page_after_a_rebuild_within_it_is_whole(kind):
    """A memory tracker that is cleared while its ticks are read has nothing to show: the page begins again."""
    world = PendingWorld(kind)
    world.add(1, [(NOW + 5_000 + 1_000 * i, "") for i in range(4)])
    await world.seal()
    entry_ids, times = np.arange(4, dtype=np.uint32), NOW + 5_000 + 1_000 * np.arange(4)
    read_times = world.log.times_of

    async def clearing(*entries):
        if not world.rebuilds:
            world.rebuilds = 1
            world.tracker.clear()
            world.unindexed = [(1, entry_ids, times)]
        return await read_times(*entries)

    with patch.object(world.log, "times_of", clearing), patch.object(world, "wait_built", world.caught_up):
        page = await world.look.page(DueRange(), "", None, 10)
    assert [each.position.entry_id for each in page.scheduled] == [0, 1, 2, 3]


async def test_an_index_that_is_rebuilt_again_and_again_is_told():
    world = PendingWorld("memory")
    world.add(1, [(NOW + 5_000, "")])
    read_times = world.log.times_of

    async def rebuilding(*entries):
        world.rebuilds += 1
        return await read_times(*entries)

    with patch.object(world.log, "times_of", rebuilding), pytest.raises(Unavailable):
        await world.look.page(DueRange(), "", None, 10)
