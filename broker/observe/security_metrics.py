"""Metrics of who was turned away, and of the files that decide it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, Metric


def security_parts(
    auth_failures: Mapping[str, int], security_reloads: Mapping[tuple[str, str], int]
) -> Iterator[Metric]:
    """The families; the mappings are those of `BrokerCounters`."""
    turned_away = CounterMetricFamily(
        "postdate_auth_failures",
        "Calls and streams refused: credentials missing, invalid or expired, or a right denied.",
        labels=("reason",),
    )
    for reason, count in auth_failures.items():
        turned_away.add_metric((reason,), count)
    yield turned_away
    reloads = CounterMetricFamily(
        "postdate_security_reloads",
        "Reloads of certificates, keys, tokens or rights. After a failed one the old ones stay in force.",
        labels=("what", "result"),
    )
    for key, count in sorted(security_reloads.items()):
        reloads.add_metric(key, count)
    yield reloads
