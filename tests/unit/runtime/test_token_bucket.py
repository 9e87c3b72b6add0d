"""Tokens that gather at a rate: never more than burst, one, and the rate; and none of them lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.runtime.token_bucket import TokenBucket

SECOND_NS = 1_000_000_000


def full(per_second: float, burst: int, now_ns: int = 0) -> TokenBucket:
    bucket = TokenBucket()
    bucket.adopt(per_second, burst, now_ns)
    return bucket


def test_a_new_bucket_is_full_and_what_is_taken_comes_back_at_the_rate() -> None:
    bucket = full(10, 5)
    assert (bucket.count(0), bucket.wait_ns(5, 0)) == (5, 0)
    bucket.take(5, 0)
    assert (bucket.count(0), bucket.wait_ns(2, 0)) == (0, SECOND_NS // 5)
    assert bucket.count(SECOND_NS // 5) == 2
    assert bucket.count(100 * SECOND_NS) == 5


def test_what_is_owed_is_made_up_for_first_and_what_is_given_back_is_there_again() -> None:
    bucket = full(10, 5)
    bucket.take(25, 0)
    assert (bucket.count(0), bucket.wait_ns(1, 0)) == (-20, 21 * SECOND_NS // 10)
    bucket.take(-25, 0)
    assert bucket.count(0) == 5


def test_another_rate_leaves_what_there_is_up_to_its_burst_and_a_rate_that_ends_forgets() -> None:
    bucket = full(10, 5)
    bucket.take(3, 0)
    bucket.adopt(1, 100, 0)
    assert bucket.count(SECOND_NS) == 3
    bucket.adopt(1, 1, SECOND_NS)
    assert bucket.count(SECOND_NS) == 1
    bucket.adopt(0, 0, SECOND_NS)
    assert not bucket.has_rate
    bucket.adopt(1, 7, SECOND_NS)
    assert bucket.count(SECOND_NS) == 7


@given(
    st.floats(0.01, 1e6),
    st.integers(1, 1_000),
    st.lists(st.tuples(st.integers(0, 10 * SECOND_NS), st.integers(1, 2_000)), min_size=1, max_size=30),
)
def test_no_span_of_time_gives_more_than_burst_one_and_rate(
    per_second: float, burst: int, asked: list[tuple[int, int]]
) -> None:
    bucket, now_ns = full(per_second, burst), 0
    taken: list[tuple[int, int]] = []
    for later_ns, wanted in asked:
        now_ns += later_ns
        count = min(wanted, max(0, bucket.count(now_ns)))
        bucket.take(count, now_ns)
        taken.append((now_ns, count))
    for start in range(len(taken)):
        for end in range(start, len(taken)):
            span_ns = taken[end][0] - taken[start][0]
            most = burst + 1 + per_second * span_ns / SECOND_NS
            assert sum(count for _, count in taken[start : end + 1]) <= most * (1 + 1e-6)


@given(st.floats(0.01, 1e6), st.integers(1, 1_000), st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_one_who_waits_as_long_as_told_finds_the_tokens_and_not_before(
    per_second: float, burst: int, late_ns: list[int]
) -> None:
    bucket, now_ns = full(per_second, burst), 0
    for late in late_ns:
        bucket.take(burst, now_ns)
        wait_ns = bucket.wait_ns(1, now_ns)
        if wait_ns:
            assert bucket.count(now_ns + wait_ns - 1) < 1 <= bucket.count(now_ns + wait_ns)
        now_ns += wait_ns + late
