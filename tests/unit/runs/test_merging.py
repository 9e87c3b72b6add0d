from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.delayed.bucket_writer import NO_ROWS, Rows, merged_rows, sort_rows
from broker.runs.merging import FAN_IN, MergePlan, MergeRuns, plan_merge, size_class

COUNTS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 10**7)), max_size=40)


def rows_of(keys: list[tuple[int, int]]) -> Rows:
    times, ordinals = zip(*keys, strict=True) if keys else ((), ())
    return Rows(np.array(times, dtype=np.int64), np.array(ordinals, dtype=np.int64))


def keys_of(rows: Rows) -> list[tuple[int, int]]:
    return list(zip(rows.times.tolist(), rows.ordinals.tolist(), strict=True))


@given(
    counts=COUNTS,
    runs_max=st.integers(1, 12),
    unit=st.sampled_from([1, 2, 10, 50_000]),
    fan_in=st.integers(2, 9),
)
def test_merging_until_there_is_no_plan_keeps_every_limit_merge_1_merge_2(counts, runs_max, unit, fan_in):
    total, steps = sum(counts), 0
    while (plan := plan_merge(counts, runs_max=runs_max, unit=unit, fan_in=fan_in)) is not None:
        assert plan.start >= 0
        assert plan.start + 2 <= plan.end <= len(counts)  # MERGE-1
        before = len(counts)
        counts = [*counts[: plan.start], sum(counts[plan.start : plan.end]), *counts[plan.end :]]
        assert len(counts) < before
        steps += 1
        assert steps < 100
    assert len(counts) <= runs_max
    assert sum(counts) == total


@pytest.mark.parametrize(
    ("counts", "runs_max", "expected"),
    [
        ([], 1, None),
        ([5], 1, None),
        ([5, 5], 1, MergePlan(0, 2)),
        ([5, 5], 2, None),
        ([900, 5, 6, 900], 3, MergePlan(1, 3)),
        ([10] * 7, 64, None),
        ([10] * 8, 64, MergePlan(0, 8)),
        ([90] + [10] * 8, 64, MergePlan(1, 9)),
        ([90] * 3 + [10] * 2 + [90] * 5, 64, MergePlan(0, 10)),  # small ones in between go with them
        ([90] * 4 + [800] + [90] * 4, 64, None),
        ([10] * 20, 1, MergePlan(0, 8)),
        ([0, 0, 0], 2, MergePlan(0, 2)),
    ],
)
def test_plans(counts, runs_max, expected):
    assert plan_merge(counts, runs_max=runs_max, unit=10) == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(0, 0), (1, 0), (10, 0), (79, 0), (80, 1), (639, 1), (640, 2), (5_120, 3)]
)
def test_size_classes(count, expected):
    assert size_class(count, 10) == expected


def test_tiers_rewrite_an_entry_about_once_a_class():
    counts: list[int] = []
    rewritten = 0
    for _ in range(8**3):
        counts.append(10)
        while (plan := plan_merge(counts, runs_max=30, unit=10)) is not None:
            rewritten += sum(counts[plan.start : plan.end])
            counts = [*counts[: plan.start], sum(counts[plan.start : plan.end]), *counts[plan.end :]]
    assert counts == [10 * 8**3]
    assert rewritten == 3 * 10 * 8**3


def test_tiny_buckets_of_a_quiet_topic_stay_few():
    counts: list[int] = []
    for _ in range(500):
        counts.append(1)
        plan = plan_merge(counts, runs_max=64, unit=50_000)
        if plan is not None:
            counts = [*counts[: plan.start], sum(counts[plan.start : plan.end]), *counts[plan.end :]]
        assert len(counts) <= FAN_IN


KEYS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=40)


@given(keys=KEYS, scale=st.sampled_from([1, 1 << 40]))
def test_rows_are_sorted_once_each_and_doubles_are_told(keys, scale):
    keys = [(time * scale, ordinal * scale) for time, ordinal in keys]
    taken = sort_rows(rows_of(keys))
    assert keys_of(taken.rows) == sorted(set(keys))
    doubles = keys_of(taken.doubles) if taken.doubles is not None else []
    assert sorted(keys_of(taken.rows) + doubles) == sorted(keys)


@given(runs=st.lists(KEYS.map(lambda keys: sorted(set(keys))), min_size=1, max_size=5), cut=st.integers(1, 7))
def test_runs_become_one_stream_merge_3(runs, cut):
    merged = MergeRuns(len(runs), NO_ROWS)
    fed = [0] * len(runs)
    stream: list[tuple[int, int]] = []
    double_count = 0
    while not merged.is_done:
        for run in merged.wanted():
            part = runs[run][fed[run] : fed[run] + cut]
            fed[run] += cut
            merged.feed(run, rows_of(part), is_last=fed[run] >= len(runs[run]))
        if merged.wanted() or merged.is_done:
            continue
        taken = merged_rows(merged)
        assert len(taken.rows)
        stream += keys_of(taken.rows)
        double_count += len(taken.doubles) if taken.doubles is not None else 0
    assert stream == sorted({key for run in runs for key in run})
    assert len(stream) + double_count == sum(map(len, runs))


def test_part_that_holds_nothing_to_keep_is_followed_by_the_next():
    merged = MergeRuns(2, NO_ROWS)
    merged.feed(0, rows_of([]), is_last=False)
    merged.feed(1, rows_of([(5, 5)]), is_last=True)
    assert merged.wanted() == [0]
    merged.feed(0, rows_of([(7, 1)]), is_last=True)
    assert keys_of(merged_rows(merged).rows) == [(5, 5), (7, 1)]
    assert merged.is_done
