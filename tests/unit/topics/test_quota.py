"""Quotas: pending messages and bytes, and messages a second."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from pyroaring import BitMap

from broker.errors import LimitReached, OutOfRange
from broker.model import Position
from broker.policy import EffectiveTopicPolicy
from broker.storage.log import LogAmendments
from broker.topics.quota import Backlog, Quota, check_alone, has_quota, measure_backlog

MESSAGES_10 = EffectiveTopicPolicy(max_pending_messages=10)
BYTES_1000 = EffectiveTopicPolicy(max_pending_bytes=1_000)


@dataclass
class HandClock:
    ns: int = 5_000_000_000

    def monotonic_ns(self) -> int:
        return self.ns

    def now_ms(self) -> int:
        raise AssertionError("the wall clock is nobody's measure of time passed")


@dataclass
class Topic:
    """A log of messages of 100 bytes, what one subscription is owed of it, and what is on its way."""

    clock: HandClock = field(default_factory=HandClock)
    stored: int = 0
    owed: int = 0
    lsn: int = 1
    steps: int = 4
    submitted: int = 0
    measured: int = 0

    def __post_init__(self) -> None:
        self.quota = Quota(self.clock, self.measure)
        self.loop = asyncio.new_event_loop()

    def measure(self, lsn: int) -> Backlog:
        self.measured += 1
        return Backlog(self.owed, self.owed * 100, Position(1, self.stored), lsn, self.steps)

    def send(self, count: int, policy: EffectiveTopicPolicy = MESSAGES_10) -> None:
        self.quota.check(policy, count, count * 100, self.lsn)
        self.submitted += count
        durable = self.loop.create_future()
        self.quota.take(policy, count, count * 100, Position(1, self.submitted), durable)

    def apply(self) -> None:
        self.owed += self.submitted - self.stored
        self.stored = self.submitted
        self.lsn += 1

    def settle(self, count: int) -> None:
        self.owed -= count
        self.lsn += 1

    def is_refused(self, count: int, policy: EffectiveTopicPolicy = MESSAGES_10) -> LimitReached | None:
        try:
            self.quota.check(policy, count, count * 100, self.lsn)
        except LimitReached as refusal:
            return refusal
        return None


@pytest.fixture
def topic() -> Iterator[Topic]:
    topic = Topic()
    yield topic
    topic.loop.close()


def test_a_batch_that_would_pass_the_limit_is_refused_and_one_that_reaches_it_is_not(topic):
    topic.send(4)
    topic.apply()
    assert not topic.is_refused(6)
    refusal = topic.is_refused(7)
    assert refusal is not None
    assert refusal.reason == "PENDING_MESSAGES_EXCEEDED"
    assert refusal.facts == {"max_pending_messages": 10}
    assert refusal.retry_after_ms > 0


def test_what_is_on_its_way_counts_once(topic):
    for _ in range(2):
        topic.send(4)
    assert topic.is_refused(3)
    topic.apply()
    assert topic.is_refused(3)
    assert not topic.is_refused(2)
    topic.send(2)
    topic.apply()
    assert topic.is_refused(1)


def test_what_is_acknowledged_makes_room_at_once(topic):
    topic.send(10)
    topic.apply()
    assert topic.is_refused(1)
    topic.settle(3)
    assert topic.is_refused(4)
    topic.send(3)
    assert topic.is_refused(1)


def test_a_large_topic_is_measured_ten_times_a_second_at_most(topic):
    topic.steps = 1_000_000
    topic.send(10)
    topic.apply()
    topic.settle(5)
    for _ in range(100):
        assert topic.is_refused(1)
        topic.lsn += 1
    assert topic.measured == 1
    topic.clock.ns += 100_000_000
    topic.send(5)
    assert topic.measured == 2
    assert topic.is_refused(1)


def test_refusals_of_an_unchanged_topic_cost_no_measurement(topic):
    topic.send(10)
    for _ in range(100):
        assert topic.is_refused(1)
    assert topic.measured == 1


def test_bytes_are_limited_as_messages_are(topic):
    topic.send(9, BYTES_1000)
    topic.apply()
    refusal = topic.is_refused(2, BYTES_1000)
    assert refusal is not None
    assert (refusal.reason, refusal.facts) == ("PENDING_BYTES_EXCEEDED", {"max_pending_bytes": 1_000})
    topic.settle(1)
    topic.send(2, BYTES_1000)


def test_what_was_applied_and_dropped_with_its_ledger_does_not_count(topic):
    topic.send(10)
    (batch,) = topic.quota._in_flight
    batch.durable.set_result(None)
    topic.stored = 0  # the log is empty again
    topic.lsn += 1
    assert not topic.is_refused(10)


def test_a_batch_larger_than_a_limit_is_never_taken():
    check_alone(MESSAGES_10, 10, 1)
    for policy, messages, bytes_ in ((MESSAGES_10, 11, 1), (BYTES_1000, 1, 1_001)):
        with pytest.raises(OutOfRange) as refused:
            check_alone(policy, messages, bytes_)
        assert refused.value.reason == "BATCH_OVER_QUOTA"
    check_alone(EffectiveTopicPolicy(max_produce_rate=1), 1_000, 1)


def test_no_limit_is_no_quota():
    assert not has_quota(EffectiveTopicPolicy())
    assert not has_quota(
        EffectiveTopicPolicy(max_pending_messages=0, max_pending_bytes=0, max_produce_rate=0)
    )
    assert (
        has_quota(MESSAGES_10)
        and has_quota(BYTES_1000)
        and has_quota(EffectiveTopicPolicy(max_produce_rate=1))
    )


# -- the rate ----------------------------------------------------------------------------------------------------------

RATE_100 = EffectiveTopicPolicy(max_produce_rate=100)


def test_a_second_s_worth_is_taken_at_once_and_then_the_rate_holds(topic):
    topic.send(60, RATE_100)
    topic.send(40, RATE_100)
    refusal = topic.is_refused(1, RATE_100)
    assert refusal is not None
    assert (refusal.reason, refusal.facts) == ("PRODUCE_RATE_EXCEEDED", {"max_produce_rate": 100})
    assert refusal.retry_after_ms == 10
    topic.clock.ns += 9_000_000
    assert topic.is_refused(1, RATE_100)
    topic.clock.ns += 1_000_000
    topic.send(1, RATE_100)
    assert topic.is_refused(1, RATE_100)


def test_what_a_refusal_says_to_wait_is_enough(topic):
    topic.send(100, RATE_100)
    for count in (7, 99, 1, 33):
        refusal = topic.is_refused(count, RATE_100)
        assert refusal is not None
        topic.clock.ns += (refusal.retry_after_ms - 1) * 1_000_000
        assert topic.is_refused(count, RATE_100)
        topic.clock.ns += 1_000_000
        topic.send(count, RATE_100)


def test_a_batch_of_more_than_a_second_s_worth_waits_for_a_full_bucket_and_owes_the_rest(topic):
    topic.send(1, RATE_100)
    refusal = topic.is_refused(250, RATE_100)
    assert refusal is not None and refusal.retry_after_ms == 10
    topic.clock.ns += 10_000_000
    topic.send(250, RATE_100)
    refusal = topic.is_refused(1, RATE_100)
    assert refusal is not None and refusal.retry_after_ms == 1_510
    topic.clock.ns += 1_510_000_000
    topic.send(1, RATE_100)


def test_idle_time_is_not_saved_up_beyond_a_second(topic):
    topic.send(100, RATE_100)
    topic.clock.ns += 3_600_000_000_000
    topic.send(100, RATE_100)
    assert topic.is_refused(1, RATE_100)


def test_a_refused_batch_takes_nothing(topic):
    topic.send(50, RATE_100)
    for _ in range(10):
        assert topic.is_refused(80, RATE_100)
    topic.send(50, RATE_100)


def test_another_rate_counts_at_once(topic):
    topic.send(100, RATE_100)
    topic.clock.ns += 1_000_000_000
    assert (
        topic.is_refused(2, EffectiveTopicPolicy(max_produce_rate=1)) is None
    )  # the bucket is full: one second's worth
    topic.send(2, EffectiveTopicPolicy(max_produce_rate=1))
    refusal = topic.is_refused(1, EffectiveTopicPolicy(max_produce_rate=1))
    assert refusal is not None and refusal.retry_after_ms == 2_000


# -- the measure -------------------------------------------------------------------------------------------------------


def cancelled(count: int) -> LogAmendments:
    amendments = LogAmendments()
    amendments.cancel(1, BitMap(range(count)))
    return amendments


@dataclass
class Log:
    entry_total: int
    data_bytes: int
    ledger_count: int = 3
    amendments: LogAmendments = field(default_factory=LogAmendments)
    end: Position = Position(7, 5)


@dataclass
class BacklogSubscription:
    count: int

    def unsettled_count(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("log", "owed", "messages", "bytes_"),
    [
        (Log(0, 0), [], 0, 0),
        (Log(10, 1_000), [], 10, 1_000),
        (Log(10, 1_000, amendments=cancelled(4)), [], 6, 600),
        (Log(10, 1_000), [0], 0, 0),
        (Log(10, 1_000), [2, 7, 3], 7, 700),
        (Log(0, 0), [0, 0], 0, 0),
    ],
)
def test_the_subscription_that_is_owed_most_decides(log, owed, messages, bytes_):
    backlog = measure_backlog(log, [BacklogSubscription(each) for each in owed], 9)
    assert (backlog.messages, backlog.bytes, backlog.end, backlog.lsn) == (messages, bytes_, log.end, 9)
    assert backlog.steps == (1 + len(owed)) * 4
