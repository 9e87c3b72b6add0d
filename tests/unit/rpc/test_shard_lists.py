"""Pages of several shards, made into those of one broker."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import InvalidRequest
from broker.rpc.paging import decode_token, encode_token
from broker.rpc.shard_lists import merge_counts, merge_stats, merge_topics
from broker.rpc.stats import SUBSCRIPTIONS_MAX
from postdate_api.v1 import admin_pb2, schedule_pb2

NAMES = st.sets(st.integers(0, 60).map(lambda number: f"t{number:02}"), max_size=30)


def page_of(names: Sequence[str], size: int, token: str) -> admin_pb2.ListTopicsResponse:
    """Return the page of one shard; it may end early, as those of counts do."""
    rest = [name for name in sorted(names) if name > decode_token(token)]
    return admin_pb2.ListTopicsResponse(
        topics=[admin_pb2.Topic(name=name) for name in rest[:size]],
        next_page_token=encode_token(rest[size - 1]) if len(rest) > size else "",
    )


@pytest.mark.slow
@given(st.lists(NAMES, min_size=1, max_size=4), st.integers(1, 7), st.data())
def test_pages_of_shards_list_every_name_once_and_in_order(
    shards: list[set[str]], size: int, data: st.DataObject
) -> None:
    shards = [names - set().union(*shards[:number]) for number, names in enumerate(shards)]
    listed: list[str] = []
    token = ""
    while True:
        ends = [data.draw(st.integers(1, size)) for _ in shards]
        page = merge_topics(
            [page_of(sorted(names), end, token) for names, end in zip(shards, ends, strict=True)], size
        )
        assert len(page.topics) <= size
        listed += [topic.name for topic in page.topics]
        token = page.next_page_token
        if not token:
            break
        assert page.topics
    assert listed == sorted(set().union(*shards))


def test_a_page_of_counts_ends_before_it_fits_into_no_frame() -> None:
    many = [admin_pb2.SubscriptionStats(name=str(number)) for number in range(SUBSCRIPTIONS_MAX)]
    answers = [
        admin_pb2.GetStatsResponse(topics=[admin_pb2.TopicStats(topic=name, subscriptions=many)])
        for name in ("a", "b", "c")
    ]
    page = merge_stats(answers, 0)
    assert [stats.topic for stats in page.topics] == ["a", "b"]
    assert page.next_page_token == encode_token("b")
    assert merge_stats(answers[:1], 0).next_page_token == ""


def test_a_page_size_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        merge_topics([admin_pb2.ListTopicsResponse()], -1)


def test_counts_are_added_by_bar() -> None:
    def answer(
        *bars: tuple[int, int], before: int = 0, exact: bool = True
    ) -> schedule_pb2.CountScheduledResponse:
        return schedule_pb2.CountScheduledResponse(
            buckets=[
                schedule_pb2.ScheduledCount(start_ms=start_ms, messages=messages, bytes=10 * messages)
                for start_ms, messages in bars
            ],
            before=before,
            after=1,
            exact=exact,
        )

    merged = merge_counts([answer((5, 1), (9, 2), before=3), answer((1, 4), (9, 1), exact=False)])
    assert merged == schedule_pb2.CountScheduledResponse(
        buckets=[
            schedule_pb2.ScheduledCount(start_ms=1, messages=4, bytes=40),
            schedule_pb2.ScheduledCount(start_ms=5, messages=1, bytes=10),
            schedule_pb2.ScheduledCount(start_ms=9, messages=3, bytes=30),
        ],
        before=3,
        after=2,
        exact=False,
    )
