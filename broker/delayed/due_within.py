"""Counts of the entries that come due within some durations, from an index's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.delayed.tracker import DelayedDeliveryTracker


def due_within(tracker: DelayedDeliveryTracker, now_ms: int, durations_ms: Sequence[int]) -> Iterator[int]:
    """Count the entries due by `now_ms` plus each duration. Reads nothing: see `Histogram.is_exact`.

    Counting takes up to a millisecond where many are pending, so each count is found when it is asked for.
    """
    stats = tracker.stats()
    next_ms, last_ms = stats.next_due_ms, stats.last_due_ms
    if next_ms is None or last_ms is None:
        yield from (0 for _ in durations_ms)
        return
    for duration_ms in durations_ms:
        end_ms = now_ms + duration_ms + 1
        # Most topics lie on one side of most ends: then there is nothing to count.
        if next_ms >= end_ms:
            yield 0
        elif last_ms < end_ms:
            yield stats.count
        else:
            yield tracker.histogram(end_ms, end_ms, 1).before
