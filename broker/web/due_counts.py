"""Counts of the messages that are due, by time and over topics.

Counted from the index's metadata, whatever the number of messages. That knows of pieces of the index how much they
hold: where one spans several bars and there is not much in it, the index itself is read, so that a bar which shows a
message leads to one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from broker.errors import Unavailable
from broker.runtime.clock import Clock
from broker.runtime.supervise import YieldBudget
from broker.topics.schedule_values import DueRange
from broker.topics.topic import Topic

_READ_ENTRIES_MAX = 200_000
"""Entries of the index that are read for one page; a topic counts for some even if it has fewer."""
_READ_ENTRIES_MIN = 500
_TOPICS_COUNTED_EACH_TIME = 100
_KEPT_MAX = 32
_KEPT_NS_MIN = 2 * 10**9


@dataclass(slots=True)
class DueCounts:
    """Messages whose time has not come, by topic and due time."""

    bars: dict[str, Sequence[tuple[int, int]]] = field(default_factory=dict)  # of topics that have any
    before: int = 0
    after: int = 0
    is_exact: bool = True  # the bars
    is_outside_exact: bool = True  # what lies before and after
    not_indexed: int = 0  # topics whose index is being built

    @property
    def within(self) -> int:
        return sum(messages for bars in self.bars.values() for _, messages in bars)


class DueCountCache:
    """Counts over many topics, kept for a moment: to count thousands of topics takes a second, so not at every look."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[DueRange, int, frozenset[str]], tuple[int, DueCounts]] = OrderedDict()
        self._counting = asyncio.Lock()

    async def of(self, topics: Sequence[Topic], due: DueRange, width_ms: int) -> DueCounts:
        """As `count_due`; of many topics perhaps as it was some seconds ago."""
        if sum(topic.index.scheduled_count() > 0 for topic in topics) <= _TOPICS_COUNTED_EACH_TIME:
            return await count_due(topics, due, width_ms, self._clock)
        async with self._counting:
            key = (due, width_ms, frozenset(topic.name for topic in topics))
            until_ns, counts = self._kept.get(key, (0, None))
            began_ns = self._clock.monotonic_ns()
            if counts is None or began_ns >= until_ns:
                counts = await count_due(topics, due, width_ms, self._clock)
                ended_ns = self._clock.monotonic_ns()
                # Whoever looks again and again takes a tenth of the loop's time at most.
                self._kept[key] = (ended_ns + max(_KEPT_NS_MIN, 10 * (ended_ns - began_ns)), counts)
                self._kept.move_to_end(key)
                while len(self._kept) > _KEPT_MAX:
                    self._kept.popitem(last=False)
            return counts


async def count_due(topics: Iterable[Topic], due: DueRange, width_ms: int, clock: Clock) -> DueCounts:
    """Count in bars of a width, from the start of the range on; at most 10,000 of them."""
    due_counts = DueCounts()
    budget = YieldBudget(clock)
    room = _READ_ENTRIES_MAX
    for topic in topics:
        scheduled, next_ms = topic.index.scheduled_count(), topic.index.next_due_ms()
        if not scheduled or next_ms is None or next_ms >= due.end_ms:
            due_counts.after += scheduled
            await budget.spent()
            continue
        try:
            counts = await topic.schedule.count(due, width_ms)
        except Unavailable:
            due_counts.not_indexed += 1
            continue
        bars, before, after, is_exact = counts.bars, counts.before, counts.after, counts.is_exact
        is_outside_exact = is_exact
        within = max(_READ_ENTRIES_MIN, sum(messages for _, messages in bars))
        if not is_exact and within <= room:
            room -= within
            times = await topic.schedule.times(due, 2 * within)
            if times is not None:
                starts, messages = np.unique((times - due.start_ms) // width_ms, return_counts=True)
                bars = list(zip((starts * width_ms + due.start_ms).tolist(), messages.tolist(), strict=True))
                is_exact = True
                before, after, is_outside_exact = _outside(topic, due, before, len(times))
        if bars:
            due_counts.bars[topic.name] = bars
        due_counts.before += before
        due_counts.after += after
        due_counts.is_exact &= is_exact
        due_counts.is_outside_exact &= is_outside_exact
        await budget.spent()
    return due_counts


def _outside(topic: Topic, due: DueRange, before: int, within: int) -> tuple[int, int, bool]:
    """Count what is due before and after a range in which there are exactly `within`, and whether that is exact.

    The three add up to what is scheduled. `before` is the estimate; it counts where there is something on both sides.
    """
    outside = max(0, topic.index.scheduled_count() - within)
    next_ms, last_ms = topic.index.next_due_ms(), topic.index.last_due_ms()
    if next_ms is None or next_ms >= due.start_ms:
        return 0, outside, topic.index.is_exact
    if last_ms is not None and last_ms < due.end_ms:
        return outside, 0, topic.index.is_exact
    before = min(before, outside)
    return before, outside - before, not outside
