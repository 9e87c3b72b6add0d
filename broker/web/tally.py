"""How many messages are due when, over topics.

Counted from the index's metadata, whatever the number of messages. That knows of pieces of the index how much they
hold: where one spans several bars and there is not much in it, the index itself is read, so that a bar which shows a
message leads to one.
"""

from __future__ import annotations

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


@dataclass(slots=True)
class Tally:
    """Messages whose time has not come, by topic and due time."""

    bars: dict[str, Sequence[tuple[int, int]]] = field(default_factory=dict)  # of topics that have any
    before: int = 0
    after: int = 0
    is_exact: bool = True
    not_indexed: int = 0  # topics whose index is being built

    @property
    def within(self) -> int:
        return sum(messages for bars in self.bars.values() for _, messages in bars)


async def tally(topics: Iterable[Topic], due: DueRange, width_ms: int, clock: Clock) -> Tally:
    """Count in bars of a width, from the start of the range on; at most 10,000 of them."""
    found = Tally()
    budget = YieldBudget(clock)
    room = _READ_ENTRIES_MAX
    for topic in topics:
        if not topic.index.scheduled_count():
            await budget.spent()
            continue
        try:
            counts = await topic.schedule.count(due, width_ms)
        except Unavailable:
            found.not_indexed += 1
            continue
        bars, is_exact = counts.bars, counts.is_exact
        within = max(_READ_ENTRIES_MIN, sum(messages for _, messages in bars))
        if not is_exact and within <= room:
            room -= within
            times = await topic.schedule.times(due, 2 * within)
            if times is not None:
                starts, messages = np.unique((times - due.start_ms) // width_ms, return_counts=True)
                bars = list(zip((starts * width_ms + due.start_ms).tolist(), messages.tolist(), strict=True))
                is_exact = True
        if bars:
            found.bars[topic.name] = bars
        found.before += counts.before
        found.after += counts.after
        found.is_exact &= is_exact
        await budget.spent()
    return found
