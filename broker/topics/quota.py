"""Refuses what a topic may not take (yet): too much that is pending, or too much in a second.

What is pending is what the subscription that is owed most is owed. To add that up for each batch would cost more than
the batch, so it is measured every 100 ms, and what was accepted since is added. Only what becomes owed otherwise (a
seek, dead letters) is seen a little later. Before a refusal it is measured again, unless that is dear: what was
acknowledged makes room at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from broker.errors import LimitReached, OutOfRange
from broker.model import Position
from broker.policy import EffectiveTopicPolicy
from broker.runtime.clock import Clock
from broker.runtime.token_bucket import TokenBucket
from broker.storage.log import LogAmendments

_MEASURE_INTERVAL_NS = 100_000_000
_CHEAP_STEPS = 256
_RETRY_MS = 1_000


class BacklogLog(Protocol):
    """A topic's log as the quota needs it."""

    @property
    def entry_total(self) -> int: ...
    @property
    def amendments(self) -> LogAmendments: ...
    @property
    def data_bytes(self) -> int: ...
    @property
    def ledger_count(self) -> int: ...
    @property
    def end(self) -> Position: ...


class BacklogSubscription(Protocol):
    """A subscription as the quota needs it."""

    def unsettled_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Backlog:
    """Pending messages and bytes, as applied."""

    messages: int
    bytes: int
    end: Position  # of the log
    lsn: int  # applied
    steps: int  # to find out


def measure_backlog(log: BacklogLog, subscriptions: Iterable[BacklogSubscription], lsn: int) -> Backlog:
    """Measure the subscription that is owed most; without any, the whole log is pending."""
    total, bytes_ = log.entry_total, log.data_bytes
    owed = [subscription.unsettled_count() for subscription in subscriptions]
    messages = max(owed, default=total - log.amendments.cancelled_count)
    pending_bytes = messages * bytes_ // total if total else 0  # of average size
    return Backlog(messages, pending_bytes, log.end, lsn, (1 + len(owed)) * (1 + log.ledger_count))


class _InFlight(NamedTuple):
    """A batch that was submitted."""

    durable: asyncio.Future[None]
    end: Position
    messages: int
    bytes: int


def has_quota(policy: EffectiveTopicPolicy) -> bool:
    return bool(policy.max_pending_messages or policy.max_pending_bytes or policy.max_produce_rate)


def check_alone(policy: EffectiveTopicPolicy, messages: int, bytes_: int) -> None:
    """Refuse a batch that would be too much for an empty topic: to try again would never help."""
    for name, asked in (("max_pending_messages", messages), ("max_pending_bytes", bytes_)):
        limit = getattr(policy, name)
        if limit and asked > limit:
            raise OutOfRange(
                f"The batch alone exceeds the topic's {name} of {limit}: {asked}",
                field="messages",
                reason="BATCH_OVER_QUOTA",
                **{name: limit},
            )


class Quota:
    """The limits of one topic's policy on what it takes. `check` before a batch is submitted, `take` after it."""

    def __init__(self, clock: Clock, measure: Callable[[int], Backlog]) -> None:
        self._clock = clock
        self._measure = measure
        self._backlog: Backlog | None = None
        self._measured_ns = 0
        self._in_flight: deque[_InFlight] = (
            deque()
        )  # and what was in flight when the backlog was measured last
        self._messages = 0  # in there
        self._bytes = 0
        self._bucket = TokenBucket()

    def check(self, policy: EffectiveTopicPolicy, messages: int, bytes_: int, lsn: int) -> None:
        """Raise LimitReached if a batch cannot be taken now. `lsn` is what is applied."""
        if policy.max_pending_messages or policy.max_pending_bytes:
            check_alone(policy, messages, bytes_)
            backlog = self._backlog_at(lsn, exactly=False)
            try:
                _check_pending(policy, *self._pending_with(backlog, messages, bytes_))
            except LimitReached:
                if backlog.lsn == lsn:
                    raise
                backlog = self._backlog_at(lsn, exactly=True)
                _check_pending(policy, *self._pending_with(backlog, messages, bytes_))
        if rate := policy.max_produce_rate:
            self._check_rate(rate, messages)

    def take(
        self,
        policy: EffectiveTopicPolicy,
        messages: int,
        bytes_: int,
        end: Position,
        durable: asyncio.Future[None],
    ) -> None:
        """A batch was submitted that ends at `end`."""
        if policy.max_pending_messages or policy.max_pending_bytes:
            self._in_flight.append(_InFlight(durable, end, messages, bytes_))
            self._messages += messages
            self._bytes += bytes_
        if policy.max_produce_rate:
            self._bucket.take(messages, self._clock.monotonic_ns())

    def _backlog_at(self, lsn: int, *, exactly: bool) -> Backlog:
        now_ns = self._clock.monotonic_ns()
        backlog = self._backlog
        is_stale = now_ns - self._measured_ns >= _MEASURE_INTERVAL_NS
        if backlog is not None and not is_stale and not (exactly and backlog.steps <= _CHEAP_STEPS):
            return backlog
        self._backlog = backlog = self._measure(lsn)
        self._measured_ns = now_ns
        in_flight = self._in_flight
        while in_flight and (in_flight[0].end <= backlog.end or in_flight[0].durable.done()):
            applied = in_flight.popleft()
            self._messages -= applied.messages
            self._bytes -= applied.bytes
        return backlog

    def _pending_with(self, backlog: Backlog, messages: int, bytes_: int) -> tuple[int, int]:
        return backlog.messages + self._messages + messages, backlog.bytes + self._bytes + bytes_

    def _check_rate(self, rate: int, messages: int) -> None:
        # A bucket that holds one second's worth. A batch that is larger is taken when the bucket is full, and owes the
        # rest: otherwise it could never be sent, and the rate holds all the same.
        now_ns = self._clock.monotonic_ns()
        self._bucket.adopt(rate, rate, now_ns)
        if wait_ns := self._bucket.wait_ns(min(messages, rate), now_ns):
            raise LimitReached(
                f"The topic accepts at most {rate} messages per second",
                reason="PRODUCE_RATE_EXCEEDED",
                retry_after_ms=-(-wait_ns // 1_000_000),
                max_produce_rate=rate,
            )


def _check_pending(policy: EffectiveTopicPolicy, messages: int, bytes_: int) -> None:
    """Refuse a batch with which so much would be pending."""
    if policy.max_pending_messages and messages > policy.max_pending_messages:
        raise LimitReached(
            f"With this batch {messages} messages would be pending; the topic's limit is "
            f"{policy.max_pending_messages}",
            reason="PENDING_MESSAGES_EXCEEDED",
            retry_after_ms=_RETRY_MS,
            max_pending_messages=policy.max_pending_messages,
        )
    if policy.max_pending_bytes and bytes_ > policy.max_pending_bytes:
        raise LimitReached(
            f"With this batch {bytes_} bytes of messages would be pending; the topic's limit is "
            f"{policy.max_pending_bytes}",
            reason="PENDING_BYTES_EXCEEDED",
            retry_after_ms=_RETRY_MS,
            max_pending_bytes=policy.max_pending_bytes,
        )
