"""Counts of what comes due within the next minute, hour, day and week: one series for each, over all topics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from broker.observe.metric_help import gauge
from broker.settings import DAY_MS, HOUR_MS, MINUTE_MS

HORIZONS: tuple[tuple[str, int], ...] = (
    ("1m", MINUTE_MS),
    ("10m", 10 * MINUTE_MS),
    ("1h", HOUR_MS),
    ("1d", DAY_MS),
    ("7d", 7 * DAY_MS),
)
"""The value of the label `within`, and the milliseconds that it stands for; rising."""


def due_within_parts(counts: Iterable[tuple[str, int]]) -> Iterator[Metric | None]:
    """Sum counts by horizon; None after each of them is a pause."""
    totals = dict.fromkeys((name for name, _ in HORIZONS), 0)
    for name, count in counts:
        totals[name] += count
        yield None
    # Not "le", which Prometheus keeps for histograms.
    family = gauge("due_within_messages", ("within",))
    for name, total in totals.items():
        family.add_metric((name,), total)
    yield family
