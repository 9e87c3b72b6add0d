"""How many entries of an index come due within some durations, from what it has in memory."""

from __future__ import annotations

from collections.abc import Sequence

from broker.delayed.tracker import DelayedDeliveryTracker


def due_within(tracker: DelayedDeliveryTracker, now_ms: int, durations_ms: Sequence[int]) -> tuple[int, ...]:
    """Entries due by `now_ms` and each of the durations, aligned. Nothing is read for it: see `Histogram.is_exact`."""
    stats = tracker.stats()
    next_ms, last_ms = stats.next_due_ms, stats.last_due_ms
    if next_ms is None or last_ms is None:
        return (0,) * len(durations_ms)
    counts = []
    for duration_ms in durations_ms:
        end_ms = now_ms + duration_ms + 1
        # Most topics lie on one side of most ends: then there is nothing to count.
        if next_ms >= end_ms:
            counts.append(0)
        elif last_ms < end_ms:
            counts.append(stats.count)
        else:
            counts.append(tracker.histogram(end_ms, end_ms, 1).before)
    return tuple(counts)
