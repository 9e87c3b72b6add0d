"""Reasons of nacks: within a bound, and nothing of what is settled."""

from __future__ import annotations

from pyroaring import BitMap

from broker.model import Position
from broker.subscriptions import reasons
from broker.subscriptions.reasons import Reasons


def test_the_last_reason_counts_until_the_message_is_settled():
    kept = Reasons()
    kept.note({1: BitMap([1, 2]), 2: BitMap([1])}, "a")
    kept.note({1: BitMap([2])}, "b")
    assert [kept.of(Position(*each)) for each in ((1, 1), (1, 2), (2, 1), (9, 9))] == ["a", "b", "a", ""]
    kept.forget({1: BitMap([1, 2, 3]), 7: BitMap([1])})
    assert kept.texts == {Position(2, 1): "a"}
    assert Reasons(kept.texts).texts == kept.texts


def test_the_oldest_reasons_go_when_all_are_too_long():
    kept = Reasons()
    for entry_id in range(5_000):
        kept.note({1: BitMap([entry_id])}, "é" * 512)
    size = reasons.REASON_OVERHEAD_BYTES + 1024
    count = reasons.REASONS_BYTES_MAX // size
    assert list(kept.texts) == [Position(1, each) for each in range(5_000 - count, 5_000)]
    assert kept._bytes == count * size
    kept.note({1: BitMap([5_000 - count])}, "x")  # the oldest is the newest now
    assert next(iter(kept.texts)) == Position(1, 5_000 - count + 1)
    kept.forget({1: BitMap(range(5_001))})
    assert (kept.texts, kept._bytes, kept._noted) == ({}, 0, {})


def test_a_nack_of_more_messages_than_fit_is_noted_of_as_many_as_do():
    kept = Reasons({Position(1, 7): "older"})
    kept.note({2: BitMap(range(2_000)), 3: BitMap(range(1 << 20)), 4: BitMap([1])}, "boom")
    assert len(kept.texts) == reasons.REASONS_BYTES_MAX // (reasons.REASON_OVERHEAD_BYTES + 4)
    assert [kept.of(Position(*each)) for each in ((1, 7), (2, 1_999), (3, 0), (4, 1))] == [
        "",
        "boom",
        "boom",
        "",
    ]
    kept.forget({each: BitMap(range(1 << 20)) for each in (2, 3, 4)})
    assert (kept.texts, kept._bytes, kept._noted) == ({}, 0, {})
