"""Metrics that a test sees move, as a scrape shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from broker.folder.broker import Broker
from broker.folder.scrape import take_snapshot
from broker.observe.metrics import BrokerCollector


@contextmanager
def moves(broker: Broker, *metrics: str) -> Iterator[None]:
    """Check that each of these metrics of a broker shows something else after the block than before it.

    A test that moves a metric of `NAMED` (tests/crash/test_metrics_move.py) calls this with its name. Within the block
    nothing writes counters by hand.
    """
    before = shown(broker)
    yield
    after = shown(broker)
    for metric in metrics:
        assert after[metric] != before[metric], f"{metric} has not moved"


def shown(broker: Broker, version: str = "0") -> dict[str, list[str]]:
    """Everything that a scrape shows of the broker's own metrics, by family."""
    collector = BrokerCollector(lambda: take_snapshot(broker), version=version)
    return {
        family.name: sorted(str(sample) for sample in family.samples)
        for family in collector.collect()
        if family.name.startswith("postdate_")
    }
