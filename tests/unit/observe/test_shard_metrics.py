"""Metrics of several processes on one page."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from broker.observe.shard_metrics import merge_metrics


def page(value: float) -> bytes:
    registry = CollectorRegistry()
    Gauge("plain", "Help with { and a space.", registry=registry).set(value)
    counter = Counter("labelled", "Help.", ["topic"], registry=registry)
    counter.labels('a "b" {c} d').inc(value)
    Histogram("seconds", "Help.", buckets=(1, 2), registry=registry).observe(value)
    return generate_latest(registry)


async def test_every_sample_keeps_its_labels_and_value_and_gains_its_shard() -> None:
    pages = {"front": page(3), "0": page(1), "1": page(2)}
    merged = list(text_string_to_metric_families((await merge_metrics(pages)).decode()))
    expected = set()
    for shard, text in pages.items():
        for family in text_string_to_metric_families(text.decode()):
            expected |= {
                (sample.name, frozenset({**sample.labels, "shard": shard}.items()), sample.value)
                for sample in family.samples
            }
    found = [
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in merged
        for sample in family.samples
    ]
    assert set(found) == expected
    assert len(found) == len(expected)


async def test_each_family_stands_together_with_its_comments_once() -> None:
    lines = (await merge_metrics({"0": page(1), "1": page(2)})).splitlines()
    comments = [line for line in lines if line.startswith(b"# ")]
    assert len(comments) == len(set(comments))
    names = [line.split(b"{")[0] for line in lines if line.startswith((b"plain", b"labelled_total"))]
    assert names == sorted(names, key=names.index), "no family begins twice"
    assert names.count(b"plain") == 2


async def test_no_pages_are_an_empty_page() -> None:
    assert await merge_metrics({}) == b""


async def test_a_large_page_lets_the_loop_run_meanwhile() -> None:
    merging = asyncio.create_task(merge_metrics({"0": b"plain 1\n" * 10_000}))
    turns = 0
    while not merging.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 10
    assert (await merging).count(b"\n") == 10_000
