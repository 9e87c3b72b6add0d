"""Metrics: complete, exact, bounded, well named, and rendered without holding up the loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import astuple, fields, replace

import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from broker.observe.horizons import HORIZONS
from broker.observe.lateness import LatenessHistogram
from broker.observe.metrics import (
    BROKER_COUNTERS,
    BROKER_HISTOGRAMS,
    COMPACTION_RESULTS,
    DROPPED_REASONS,
    OTHER,
    REFUSAL_REASONS_MAX,
    SUBSCRIPTION_COUNTERS,
    TOPIC_COUNTERS,
    BrokerCollector,
    BrokerCounters,
    BrokerSnapshot,
    ClusterSnapshot,
    SubscriptionCounters,
    SubscriptionSnapshot,
    TopicCounters,
    TopicSnapshot,
)
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def topic(name: str, *, produced: int = 0, next_due_ms: int | None = None) -> TopicSnapshot:
    return TopicSnapshot(name, TopicCounters(produced_messages=produced), 3, next_due_ms)


def subscription(name: str, *, delivered: int = 0, late_ms: Iterable[int] = ()) -> SubscriptionSnapshot:
    counters = SubscriptionCounters(delivered_messages=delivered)
    counters.lateness.observe_many(np.array(list(late_ms), dtype=np.int64))
    return SubscriptionSnapshot("orders", name, counters, scheduled=1, ready=2, leased=3, consumers=4)


def snapshot(
    topics: Iterable[TopicSnapshot] = (),
    subscriptions: Iterable[SubscriptionSnapshot] = (),
    counters: BrokerCounters | None = None,
) -> BrokerSnapshot:
    return BrokerSnapshot(counters or BrokerCounters(), topics, subscriptions, 7, 8)


def render(of: BrokerSnapshot, series_max: int = 1_000) -> str:
    async def scenario(loop: SimLoop, clock: SimClock) -> bytes:
        return await BrokerCollector(lambda: of, version="1.2.3", series_max=series_max).render()

    return run_sim(scenario, 1).decode()


def parse(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(name, frozenset(labels.items()))]


def test_every_metric_of_a_node_moves_with_what_it_tells() -> None:
    standby = ClusterSnapshot(False, 1, 0.0, 2, 3.0, 4.0, 5, 6, -0.07)
    owner = ClusterSnapshot(True, 11, 12.0, 0, 0.0, 14.0, 15, 16, 0.0)
    names = (
        "epoch",
        "lease_seconds_left",
        "standby_lag_records",
        "standby_lag_seconds",
        "base_age_seconds",
        "take_overs_total",
        "log_bytes",
        "clock_skew_seconds",
    )
    for node in (standby, owner):
        samples = parse(render(replace(snapshot(), cluster=node)))
        assert [value(samples, f"postdate_{name}") for name in names] == list(astuple(node)[1:])
        assert value(samples, "postdate_role", role="owner") == node.is_owner
        assert value(samples, "postdate_role", role="standby") == (not node.is_owner)


def test_counters_and_gauges_arrive_exactly() -> None:
    counters = BrokerCounters(journal_bytes=12, recovery_seconds=0.5)
    counters.journal_sync.observe(0.003)
    counters.refuse("TOPIC_NOT_FOUND")
    counters.refuse("TOPIC_NOT_FOUND")
    topics = [topic("orders", produced=2**52 + 1, next_due_ms=1_500), topic("idle")]
    samples = parse(render(snapshot(topics, [subscription("billing", delivered=9)], counters)))
    assert value(samples, "postdate_produced_messages_total", topic="orders") == 2**52 + 1
    assert value(samples, "postdate_next_due_timestamp_seconds", topic="orders") == 1.5
    assert ("postdate_next_due_timestamp_seconds", frozenset({("topic", "idle")})) not in samples
    billing = {"topic": "orders", "subscription": "billing"}
    assert value(samples, "postdate_delivered_messages_total", **billing) == 9
    assert value(samples, "postdate_early_deliveries_total", **billing) == 0
    assert [
        value(samples, f"postdate_{name}", **billing)
        for name in ("subscription_scheduled_messages", "ready_messages", "leased_messages", "consumers")
    ] == [1, 2, 3, 4]
    assert value(samples, "postdate_journal_bytes_total") == 12
    assert value(samples, "postdate_journal_sync_seconds_bucket", le="0.002") == 0
    assert value(samples, "postdate_journal_sync_seconds_bucket", le="0.005") == 1
    assert value(samples, "postdate_refused_requests_total", reason="TOPIC_NOT_FOUND") == 2
    assert (value(samples, "postdate_topics"), value(samples, "postdate_subscriptions")) == (7, 8)
    assert value(samples, "postdate_ready") == 1
    assert any(name == "postdate_build_info" and ("version", "1.2.3") in labels for name, labels in samples)
    assert value(samples, "process_resident_memory_bytes") > 0


def test_lateness_is_a_cumulative_histogram_in_seconds() -> None:
    samples = parse(render(snapshot(subscriptions=[subscription("s", late_ms=[0, 1, 2, 700, 10**8])])))
    labels = {"topic": "orders", "subscription": "s"}
    name = "postdate_delivery_lateness_seconds"
    bounds = {"0.001": 2, "0.002": 3, "0.5": 3, "1.0": 4, "3600.0": 4, "+Inf": 5}
    assert {le: value(samples, f"{name}_bucket", le=le, **labels) for le in bounds} == bounds
    assert value(samples, f"{name}_count", **labels) == 5
    assert value(samples, f"{name}_sum", **labels) == pytest.approx(100_000.703)


def test_series_are_bounded_and_the_rest_is_summed() -> None:
    topics = [topic(f"t{i}", produced=i, next_due_ms=(10 - i) * 1_000) for i in range(10)]
    subscriptions = [subscription(f"s{i}", delivered=i, late_ms=[i]) for i in range(10)]
    samples = parse(render(snapshot(topics, subscriptions), series_max=3))
    per_name: dict[str, set[str]] = {}
    for name, labels in samples:
        if "topic" in dict(labels):
            per_name.setdefault(name, set()).add(
                str(sorted(set(labels) - {("le", dict(labels).get("le", ""))}))
            )
    assert max(len(series) for name, series in per_name.items() if "dropped" not in name) == 4
    assert value(samples, "postdate_produced_messages_total", topic="t2") == 2
    assert value(samples, "postdate_produced_messages_total", topic=OTHER) == sum(range(3, 10))
    assert value(samples, "postdate_scheduled_messages", topic=OTHER) == 3 * 7
    assert value(samples, "postdate_next_due_timestamp_seconds", topic=OTHER) == 1
    other = {"topic": OTHER, "subscription": OTHER}
    assert value(samples, "postdate_delivered_messages_total", **other) == sum(range(3, 10))
    assert value(samples, "postdate_delivery_lateness_seconds_count", **other) == 7
    assert value(samples, "postdate_delivery_lateness_seconds_sum", **other) == pytest.approx(0.042)


def test_of_ages_the_greatest_stands_for_the_rest_and_pauses_are_counted() -> None:
    subscriptions = [
        replace(subscription(f"s{i}"), oldest_ready_age_ms=1_000 * (5 - i), paused=i > 1, dead_letters=i)
        for i in range(5)
    ]
    samples = parse(render(snapshot(subscriptions=subscriptions), series_max=2))
    name = "postdate_oldest_ready_age_seconds"
    assert value(samples, name, topic="orders", subscription="s1") == 4
    assert value(samples, name, topic=OTHER, subscription=OTHER) == 3
    assert value(samples, "postdate_subscription_paused", topic="orders", subscription="s1") == 0
    assert value(samples, "postdate_subscription_paused", topic=OTHER, subscription=OTHER) == 3
    assert value(samples, "postdate_dead_letter_messages", topic=OTHER, subscription=OTHER) == 9


def test_what_comes_due_is_summed_over_topics_by_horizon() -> None:
    of = replace(snapshot(), due_within=iter([("1m", 1), ("1h", 3), ("7d", 5), ("1h", 10), ("7d", 20)]))
    samples = parse(render(of))
    within = [value(samples, "postdate_due_within_messages", within=name) for name, _ in HORIZONS]
    assert within == [1, 0, 13, 0, 25]
    assert [name for name, _ in HORIZONS] == ["1m", "10m", "1h", "1d", "7d"]


def test_compactions_are_there_before_the_first_one_ends() -> None:
    counters = BrokerCounters()
    counters.note_compaction("refused")
    samples = parse(render(snapshot(counters=counters)))
    ended = {
        result: value(samples, "postdate_compactions_total", result=result) for result in COMPACTION_RESULTS
    }
    assert ended == {"committed": 0, "refused": 1, "aborted": 0, "expired": 0}


def test_a_summed_series_leaves_the_live_counters_alone() -> None:
    topics = [topic(f"t{i}", produced=1) for i in range(4)]
    for _ in range(2):
        samples = parse(render(snapshot(topics), series_max=1))
        assert value(samples, "postdate_produced_messages_total", topic=OTHER) == 3
    assert [each.counters.produced_messages for each in topics] == [1, 1, 1, 1]


def test_reasons_of_refusal_are_bounded() -> None:
    counters = BrokerCounters()
    for i in range(10 * REFUSAL_REASONS_MAX):
        counters.refuse(f"REASON_{i}")
    assert len(counters.refusals) <= REFUSAL_REASONS_MAX + 1
    assert sum(counters.refusals.values()) == 10 * REFUSAL_REASONS_MAX


def test_no_counter_is_forgotten() -> None:
    def names(counters: type) -> set[str]:
        return {each.name for each in fields(counters)}

    assert set(TOPIC_COUNTERS) == names(TopicCounters)
    assert {
        *SUBSCRIPTION_COUNTERS,
        *(name for name, _ in DROPPED_REASONS),
        "lateness",
        "paced_lateness",
    } == names(SubscriptionCounters)
    assert {*BROKER_COUNTERS, *(name for name, _ in BROKER_HISTOGRAMS)} | {
        "backup_last_ms",
        "backup_last_seconds",
        "backup_last_bytes",
        "recovery_seconds",
        "refusals",
        "index_operations",
        "compactions",
        "auth_failures",
        "security_reloads",
        "limit_refusals",
        "limit_totals",
        "tls_expires_at_seconds",
    } == names(BrokerCounters)


def families() -> list[Metric]:
    counters = BrokerCounters()
    counters.refuse("NOT_FOUND")
    of = snapshot([topic("t", next_due_ms=1)], [subscription("s", late_ms=[1])], counters)
    return list(BrokerCollector(lambda: of, version="1").collect())


def test_names_pass_the_rules_of_promtool() -> None:
    # promtool is no prerequisite of `make test`; these are the rules of its `check metrics`.
    units = re.compile(r"_(ms|s|sec|secs|us|ns|min|minutes|hours|kb|mb|gb|kib|mib|milliseconds|percent)(_|$)")
    for family in families():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert family.documentation.endswith("."), name
        assert re.fullmatch(r"(postdate|process)_[a-z0-9_]+", name), name
        assert name.endswith("_total") == (family.type == "counter"), name
        assert not units.search(name), name
        assert not re.search(r"_(counter|gauge|histogram|summary|count|sum|bucket)(_|$)", name), name
        for sample in family.samples:
            assert ("le" in sample.labels) == sample.name.endswith("_bucket"), name
            assert set(sample.labels) <= {
                "topic",
                "subscription",
                "reason",
                "le",
                "version",
                "python_version",
                "result",
                "within",
                "limit",
                "key",
            }


def test_every_family_appears_once_with_help_even_without_topics() -> None:
    helped = re.findall(r"^# HELP (\S+)", render(snapshot()), re.MULTILINE)
    assert len(helped) == len(set(helped))
    assert {"postdate_produced_messages_total", "postdate_delivery_lateness_seconds"} <= set(helped)


@pytest.mark.slow
def test_render_in_slices_equals_collect_at_once() -> None:
    of = snapshot(
        [topic(f"t{i}", produced=i) for i in range(300)],
        [subscription(f"s{i}", late_ms=[i]) for i in range(300)],
    )
    at_once = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in BrokerCollector(lambda: of, version="1.2.3").collect()
        for sample in family.samples
        if not sample.name.startswith("process_")
    }
    text = render(of)
    sliced = {key: number for key, number in parse(text).items() if not key[0].startswith("process_")}
    assert sliced == at_once
    helped = re.findall(r"^# HELP (\S+)", text, re.MULTILINE)
    assert len(helped) == len(set(helped))


@pytest.mark.slow
def test_the_loop_runs_between_slices_of_a_large_scrape() -> None:
    counts = [0]

    async def tick() -> None:
        while True:
            counts[0] += 1
            await asyncio.sleep(0)

    async def scenario(loop: SimLoop, clock: SimClock) -> int:
        of = snapshot(
            (topic(f"t{i}") for i in range(2_000)),
            (subscription(f"s{i}", late_ms=[i]) for i in range(2_000)),
        )
        task = asyncio.create_task(tick())
        text = await BrokerCollector(lambda: of, version="1").render()
        task.cancel()
        return text.count(b"\n")

    lines = run_sim(scenario, 1)
    assert lines > 40_000
    assert counts[0] > lines / 120


def test_idle_subscriptions_cost_no_histogram_lines() -> None:
    text = render(snapshot(subscriptions=[subscription("idle")]))
    assert "postdate_delivery_lateness_seconds_bucket" not in text
    assert 'postdate_ready_messages{subscription="idle",topic="orders"} 2.0' in text


def test_an_unused_histogram_has_no_buckets_in_memory() -> None:
    assert LatenessHistogram()._counts is None
