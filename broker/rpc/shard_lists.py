"""Answers of all shards, made into one. Pure.

Lists are in the order of names, as those of one broker: each shard is asked for the same page, and of what they answer
the first names are kept. So a page token is what it is everywhere, the last name of the page before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from broker.rpc.paging import check_page_size, encode_token
from broker.rpc.stats import SUBSCRIPTIONS_MAX, TOPICS_MAX
from postdate_api.v1 import admin_pb2, schedule_pb2


def merge_topics(
    answers: Sequence[admin_pb2.ListTopicsResponse], page_size: int
) -> admin_pb2.ListTopicsResponse:
    """Return one page of topics; `page_size` as it was asked for."""
    kept, token = _page(answers, check_page_size(page_size), lambda topic: topic.name)
    return admin_pb2.ListTopicsResponse(topics=kept, next_page_token=token)


def merge_stats(answers: Sequence[admin_pb2.GetStatsResponse], page_size: int) -> admin_pb2.GetStatsResponse:
    """Return one page of counts; `page_size` as it was asked for."""
    count = check_page_size(page_size) if page_size else TOPICS_MAX
    kept, token = _page(answers, count, lambda stats: stats.topic)
    subscriptions = 0
    for index, stats in enumerate(kept[:-1]):
        subscriptions += len(stats.subscriptions)
        if subscriptions > SUBSCRIPTIONS_MAX:  # it must fit into a frame
            kept, token = kept[: index + 1], encode_token(stats.topic)
            break
    return admin_pb2.GetStatsResponse(topics=kept, next_page_token=token)


def merge_counts(
    answers: Sequence[schedule_pb2.CountScheduledResponse],
) -> schedule_pb2.CountScheduledResponse:
    """Return the sums of counts. Bars begin at the same times on all shards."""
    merged = schedule_pb2.CountScheduledResponse(exact=all(answer.exact for answer in answers))
    bars: dict[int, tuple[int, int]] = {}
    for answer in answers:
        merged.before += answer.before
        merged.after += answer.after
        for bar in answer.buckets:
            messages, size = bars.get(bar.start_ms, (0, 0))
            bars[bar.start_ms] = (messages + bar.messages, size + bar.bytes)
    for start_ms, (messages, size) in sorted(bars.items()):
        merged.buckets.add(start_ms=start_ms, messages=messages, bytes=size)
    return merged


def _page(answers: Sequence[Any], count: int, name_of: Callable[[Any], str]) -> tuple[list[Any], str]:
    """Return the first topics of all answers, and the token of the page behind them."""
    # Behind the end of a page that is not the last one there may be names that nobody has told yet.
    ends = [name_of(answer.topics[-1]) for answer in answers if answer.next_page_token]
    listed = sorted((topic for answer in answers for topic in answer.topics), key=name_of)
    kept = [topic for topic in listed if not ends or name_of(topic) <= min(ends)][:count]
    is_last = not ends and len(kept) == len(listed)
    return kept, "" if is_last else encode_token(name_of(kept[-1]))
