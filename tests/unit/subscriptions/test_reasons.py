"""Reasons of nacks: within a bound, and nothing of what is settled; lines of the log within a bound."""

from __future__ import annotations

import pytest
from pyroaring import BitMap

from broker.model import Position
from broker.subscriptions import reasons
from broker.subscriptions.reasons import MessageLogs, Reasons, ReasonsMemory
from broker.testing.sim_clock import SimClock
from tests.unit.rpc.fake_schedule import HandTime


def memory_of(bytes_max: int = reasons.ALL_REASONS_BYTES_MAX) -> ReasonsMemory:
    return ReasonsMemory(SimClock(HandTime()), bytes_max)


def test_reasons_of_all_subscriptions_take_a_bounded_memory(caplog: pytest.LogCaptureFixture):
    size = reasons.REASON_OVERHEAD_BYTES + 1
    memory = memory_of(3 * size)
    one, other = Reasons(memory), Reasons(memory)
    room = memory.take(2, "a")
    assert room == 2 * size
    assert memory.take(2, "a") == 0, "what comes counts"
    one.note({1: BitMap([1, 2])}, "a")
    memory.give_back(room)
    other.note({1: BitMap([1])}, "a")
    assert memory.held_bytes == 3 * size
    assert memory.take(1, "a") == 0
    assert [vars(each)["fields"]["messages"] for each in caplog.records] == [2], "told once a minute"
    one.forget({1: BitMap([1])})
    one.note({1: BitMap([2])}, "b")
    assert memory.take(1, "a") == size
    memory.give_back(size)
    one.clear()
    assert (memory.held_bytes, one.texts, one._noted, one._bytes) == (size, {}, {}, 0)
    assert Reasons(memory, other.texts).texts == other.texts
    assert memory.held_bytes == 2 * size, "what a restart finds counts too"


def test_the_last_reason_counts_until_the_message_is_settled():
    kept = Reasons(memory_of())
    kept.note({1: BitMap([1, 2]), 2: BitMap([1])}, "a")
    kept.note({1: BitMap([2])}, "b")
    assert [kept.of(Position(*each)) for each in ((1, 1), (1, 2), (2, 1), (9, 9))] == ["a", "b", "a", ""]
    kept.forget({1: BitMap([1, 2, 3]), 7: BitMap([1])})
    assert kept.texts == {Position(2, 1): "a"}
    assert Reasons(memory_of(), kept.texts).texts == kept.texts


def test_the_oldest_of_one_nack_are_the_first_of_the_topic_in_whatever_order_it_holds_them():
    kept = Reasons(memory_of())
    kept.note({7: BitMap([2, 1]), 3: BitMap([5])}, "a")
    assert list(kept.texts) == [Position(3, 5), Position(7, 1), Position(7, 2)]


@pytest.mark.slow
def test_the_oldest_reasons_go_when_all_are_too_long():
    kept = Reasons(memory_of())
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
    kept = Reasons(memory_of(), {Position(1, 7): "older"})
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


def test_one_nack_a_minute_is_logged_and_tells_of_the_messages_since_the_last_line(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO")
    time = HandTime()
    nacks = MessageLogs("orders", "billing", SimClock(time)).nacked

    def lines() -> list[object]:
        fields = [record.__dict__["fields"] for record in caplog.records]
        caplog.clear()
        return [(each["messages"], each["first"], each["reason"]) for each in fields]

    nacks.note({3: BitMap([5]), 1: BitMap([7, 9])}, reason="boom")
    assert (
        caplog.records[0].__dict__["fields"].items() >= {"topic": "orders", "subscription": "billing"}.items()
    )
    assert lines() == [(3, Position(1, 7), "boom")]
    for _ in range(1_000):
        nacks.note({1: BitMap([7])}, reason="other")
    assert lines() == []
    time.advance(60_000)
    nacks.note({1: BitMap([8])}, reason="later")
    nacks.note({1: BitMap([8])}, reason="later")
    assert lines() == [(1_001, Position(1, 8), "later")]
