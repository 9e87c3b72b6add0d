"""Use that callers make of the limits of the access file, and what they may still have.

Rates are buckets of tokens, of each limit one, or one for each principal. What a batch takes is taken in one step from
all limits that hold for it, or from none, before it is submitted; if the topic then refuses it, that is given back.

What is pending, and how many topics there are, is added up over the topics once a second, and less often where that
would take more than a twentieth of the time. What was accepted since is added: no more than a limit allows is let in,
and what is settled makes room a little later. Before the first sum, after a start or another file, nothing is refused.

Invariants:
  LIMIT-1  A batch counts against each limit that holds for it, whole, or it was refused and counts against none.
  LIMIT-2  What is on its way to a topic, or has come to it since the sum was begun, is counted beside the sum.
  LIMIT-3  At most `_USED_MAX` uses are remembered, however many principals there are; a forgotten one begins anew.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.errors import LimitReached, OutOfRange
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCounters
from broker.rpc.access_limits import AccessLimits, Limit
from broker.runtime.clock import Clock
from broker.runtime.supervise import YieldBudget
from broker.runtime.token_bucket import TokenBucket
from broker.topics.intake import Accepted
from broker.topics.quota import measure_backlog
from broker.topics.registry import Registry

log = get_logger(__name__)

_USED_MAX = 10_000
_SUM_SECONDS = 1.0
_SUM_SHARE = 20
"""The sums take one of so many seconds at most."""
_SUM_SECONDS_MAX = 60.0
_RETRY_MS = 1_000
_LOGGED_NS = 60_000_000_000


class Shortage(NamedTuple):
    """A rate that has not gathered enough for a batch, the one that takes longest."""

    key: str
    """Its key in the access file."""
    per_second: int
    left: int
    """Messages or bytes that have gathered."""
    asked: int
    wait_ns: int


class LimitUse(NamedTuple):
    """Use of one bound of a limit."""

    limit: str
    key: str
    """Its key in the access file."""
    allowed: int
    used: int | None
    """None for rates, and before the first sum."""
    is_of_each: bool
    """True if each principal that matches has it for itself."""
    refusals: int


class Used:
    """Use of the rates of one limit: by one principal, or by all together."""

    def __init__(self) -> None:
        self.messages = TokenBucket()
        self.bytes = TokenBucket()

    def shortage(self, limit: Limit, messages: int, bytes_: int, now_ns: int) -> Shortage | None:
        """Rate that a batch has to wait for, if any. One larger than the burst is taken whole, and owes the rest."""
        found: Shortage | None = None
        for key, bucket, rate, asked in (
            ("messages_per_second", self.messages, limit.messages_per_second, messages),
            ("bytes_per_second", self.bytes, limit.bytes_per_second, bytes_),
        ):
            burst = limit.burst(rate)
            bucket.adopt(rate, burst, now_ns)
            wait_ns = bucket.wait_ns(min(asked, burst), now_ns) if rate else 0
            if wait_ns > (0 if found is None else found.wait_ns):
                found = Shortage(key, rate, max(0, bucket.count(now_ns)), asked, wait_ns)
        return found

    def take(self, messages: int, bytes_: int, now_ns: int) -> None:
        self.messages.take(messages, now_ns)
        self.bytes.take(bytes_, now_ns)


@dataclass(slots=True)
class LimitTally:
    """A total over the topics of a limit: their sum, and what is not in it yet."""

    sum: int | None = None
    """As it was added up last; None before that was done once."""
    since: int = 0
    """Taken since that sum was begun, or on its way then."""
    on_way: int = 0
    _next: int = 0
    """The `since` of the sum that is being added up."""

    def take(self, count: int) -> None:
        """So much is on its way."""
        self.since += count
        self._next += count
        self.on_way += count

    def arrive(self, count: int) -> None:
        """It is there: the topic has it."""
        self.on_way -= count

    def give_back(self, count: int) -> None:
        """It was refused, and will not be there."""
        self.on_way -= count
        self.since -= count
        self._next -= count

    def begin(self) -> None:
        """Note that what is there is about to be added up."""
        self._next = self.on_way

    def end(self, sum_: int) -> None:
        """It was added up. What came meanwhile may be in there or not, so it counts beside it."""
        self.sum, self.since = sum_, self._next

    @property
    def used(self) -> int | None:
        """Total that counts now; None before the first sum."""
        return None if self.sum is None else self.sum + self.since

    def exceeds(self, count: int, most: int) -> bool:
        """Return whether so many more would be more than allowed."""
        used = self.used
        return bool(most) and used is not None and used + count > most


@dataclass(slots=True)
class LimitTotals:
    """The totals of one limit."""

    messages: LimitTally = field(default_factory=LimitTally)
    bytes: LimitTally = field(default_factory=LimitTally)
    topics: LimitTally = field(default_factory=LimitTally)

    def bounded_by(self, limit: Limit) -> Iterator[tuple[str, LimitTally, int]]:
        """Key in the access file, tally and most allowed, of each that the limit bounds."""
        for key, tally, allowed in (
            ("pending_messages", self.messages, limit.pending_messages),
            ("pending_bytes", self.bytes, limit.pending_bytes),
            ("topics_max", self.topics, limit.topics_max),
        ):
            if allowed:
                yield key, tally, allowed

    def take(self, messages: int, bytes_: int) -> None:
        """So much is on its way."""
        self.messages.take(messages)
        self.bytes.take(bytes_)

    def arrive(self, messages: int, bytes_: int) -> None:
        """It is there."""
        self.messages.arrive(messages)
        self.bytes.arrive(bytes_)

    def give_back(self, messages: int, bytes_: int) -> None:
        """It was refused."""
        self.messages.give_back(messages)
        self.bytes.give_back(bytes_)


class TakenBatch:
    """Share of the limits that one batch took."""

    def __init__(
        self, clock: Clock, used: list[Used], totals: list[LimitTotals], messages: int, bytes_: int
    ) -> None:
        self._clock = clock
        self._used = used
        self._totals = totals
        self._messages = messages
        self._bytes = bytes_

    def refused(self) -> None:
        """Nothing of it was stored."""
        now_ns = self._clock.monotonic_ns()
        for used in self._used:
            used.take(-self._messages, -self._bytes, now_ns)
        for totals in self._totals:
            totals.give_back(self._messages, self._bytes)

    def accepted(self, accepted: Accepted) -> None:
        """It is on its way to the disk."""
        if self._totals:
            accepted.durable.add_done_callback(lambda _: self.ended())

    def ended(self) -> None:
        """It is stored, or will never be."""
        for totals in self._totals:
            totals.arrive(self._messages, self._bytes)


class Limiter:
    """See the module's description."""

    def __init__(self, limits: AccessLimits, clock: Clock, counters: BrokerCounters) -> None:
        self._clock = clock
        self._counters = counters
        self._limits = AccessLimits()
        self._used: OrderedDict[tuple[str, str], Used] = OrderedDict()
        self._totals: dict[str, LimitTotals] = {}
        self._logged_ns: dict[str, int] = {}
        self.adopt(limits)

    def adopt(self, limits: AccessLimits) -> None:
        """Count by these from now on. What was used of a limit stays used, if it still counts the same."""
        if limits is self._limits:
            return
        before = {each.name: (each.principals, each.topics) for each in self._limits.every}
        same = {each.name for each in limits.every if before.get(each.name) == (each.principals, each.topics)}
        for key in [key for key in self._used if key[0] not in same]:
            del self._used[key]
        self._totals = {
            each.name: self._totals[each.name]
            if each.name in same and each.name in self._totals
            else LimitTotals()
            for each in limits.every
            if each.has_totals
        }
        refusals = self._counters.limit_refusals
        self._counters.limit_refusals = {
            (each.name, key): refusals.get((each.name, key), 0)
            for each in limits.every
            for key, *_ in self._bounds(each)
        }
        self._logged_ns = {name: ns for name, ns in self._logged_ns.items() if name in same}
        self._limits = limits
        self._show_totals()

    def take(
        self, principal: str, topic: str, messages: int, bytes_: int, *, is_tried: bool = False
    ) -> TakenBatch | None:
        """Count a batch against all limits that hold for it; None if none does. Raises LimitReached, OutOfRange.

        `is_tried`: nobody is told of a refusal, so it is neither counted nor logged.
        """
        limits = self._limits.of(principal, topic)
        if not limits:
            return None
        now_ns = self._clock.monotonic_ns()
        used: list[Used] = []
        totals: list[LimitTotals] = []
        refusals: list[tuple[Limit, LimitReached]] = []
        for limit in limits:
            if limit.has_rates:
                used.append(spent := self._used_of(limit, principal))
                if (shortage := spent.shortage(limit, messages, bytes_, now_ns)) is not None:
                    refusals.append((limit, _rate_exceeded(limit, shortage)))
            if limit.has_totals:
                totals.append(total := self._totals[limit.name])
                if (error := _pending_exceeded(limit, total, messages, bytes_)) is not None:
                    refusals.append((limit, error))
        if refusals:  # for a shorter time than the longest, it would be refused again
            limit, error = max(refusals, key=lambda each: each[1].retry_after_ms)
            if not is_tried:
                self._note(limit, principal, topic, error)
            raise error
        for spent in used:
            spent.take(messages, bytes_, now_ns)
        for total in totals:
            total.take(messages, bytes_)
        return TakenBatch(self._clock, used, totals, messages, bytes_)

    def count(self, principal: str, topic: str, messages: int, bytes_: int) -> None:
        """Count what was stored without having been taken before: what that is too much of a rate is owed."""
        now_ns = self._clock.monotonic_ns()
        for limit in self._limits.of(principal, topic):
            if limit.has_rates:
                spent = self._used_of(limit, principal)
                spent.shortage(limit, 0, 0, now_ns)  # by the rates that hold now
                spent.take(messages, bytes_, now_ns)
            if limit.has_totals:
                total = self._totals[limit.name]
                total.take(messages, bytes_)
                total.arrive(messages, bytes_)

    def uses(self, topic: str, principal: str | None = None) -> list[LimitUse]:
        """Return the bounds of the limits that hold for a topic, in the order of the file.

        With a principal those that hold for what he sends there.
        """
        limits = self._limits.of_topic(topic) if principal is None else self._limits.of(principal, topic)
        return [
            LimitUse(
                limit.name,
                key,
                allowed,
                used,
                limit.principals is not None,
                self._counters.limit_refusals[limit.name, key],
            )
            for limit in limits
            for key, allowed, used in self._bounds(limit)
        ]

    def _bounds(self, limit: Limit) -> Iterator[tuple[str, int, int | None]]:
        for key, rate in (
            ("messages_per_second", limit.messages_per_second),
            ("bytes_per_second", limit.bytes_per_second),
        ):
            if rate:
                yield key, rate, None
        if limit.has_totals:
            for key, tally, allowed in self._totals[limit.name].bounded_by(limit):
                yield key, allowed, tally.used

    @contextmanager
    def creating(self, principal: str, topic: str, is_there: Callable[[], bool]) -> Iterator[None]:
        """Creates a topic that was not there: LimitReached where there may be no more."""
        tallies = []
        for limit in self._limits.of(principal, topic):
            if limit.topics_max:
                tallies.append(tally := self._totals[limit.name].topics)
                if tally.exceeds(1, limit.topics_max):
                    error = _topics_exceeded(limit, tally)
                    self._note(limit, principal, topic, error)
                    raise error
        for tally in tallies:
            tally.take(1)
        try:
            yield
        finally:
            for tally in tallies:
                (tally.arrive if is_there() else tally.give_back)(1)

    async def run(self, registry: Registry) -> None:
        """Add up what there is, now and then, until cancelled."""
        while True:
            started_ns = self._clock.monotonic_ns()
            if self._totals:
                await self._add_up(registry)
            seconds = (self._clock.monotonic_ns() - started_ns) / 1e9
            await asyncio.sleep(min(max(_SUM_SECONDS, seconds * _SUM_SHARE), _SUM_SECONDS_MAX))

    async def _add_up(self, registry: Registry) -> None:
        limits, totals = self._limits, dict(self._totals)
        for total in totals.values():
            for tally in (total.messages, total.bytes, total.topics):
                tally.begin()
        sums = {name: [0, 0, 0] for name in totals}
        budget = YieldBudget(self._clock)
        for topic in list(registry.topics.values()):
            held = [sums[limit.name] for limit in limits.of_topic(topic.name) if limit.name in sums]
            if held and not topic.deleted:
                backlog = measure_backlog(topic.log, topic.subscriptions.values(), topic.applied_lsn)
                for sum_ in held:
                    sum_[0] += backlog.messages
                    sum_[1] += backlog.bytes
                    sum_[2] += 1
            await budget.spent()
        for name, total in totals.items():
            for tally, count in zip((total.messages, total.bytes, total.topics), sums[name], strict=True):
                tally.end(count)
        self._show_totals()

    def _show_totals(self) -> None:
        self._counters.limit_totals = {
            (limit.name, key): (used, allowed)
            for limit in self._limits.every
            if limit.has_totals
            for key, tally, allowed in self._totals[limit.name].bounded_by(limit)
            if (used := tally.used) is not None
        }

    def _used_of(self, limit: Limit, principal: str) -> Used:
        key = limit.name, principal if limit.principals is not None else ""
        used = self._used.get(key)
        if used is None:
            used = self._used[key] = Used()
            if len(self._used) > _USED_MAX:
                self._used.popitem(last=False)
        else:
            self._used.move_to_end(key)
        return used

    def _note(self, limit: Limit, principal: str, topic: str, error: LimitReached) -> None:
        self._counters.limit_refusals[limit.name, str(error.facts["exceeded"])] += 1
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._logged_ns.get(limit.name, -_LOGGED_NS) >= _LOGGED_NS:
            self._logged_ns[limit.name] = now_ns
            log.warning(
                "A limit refuses requests; it is not logged again for a minute",
                limit=limit.name,
                why=error.message,
                principal=principal,
                topic=topic,
            )


def _rate_exceeded(limit: Limit, shortage: Shortage) -> LimitReached:
    unit = shortage.key.removesuffix("s_per_second")
    whose = "each of its principals" if limit.principals is not None else "all callers together"
    return LimitReached(
        f"Limit {limit.name!r} allows {whose} {_counted(shortage.per_second, unit)} per second: "
        f"this batch has {shortage.asked}, and {shortage.left} may be sent now",
        reason="LIMIT_RATE_EXCEEDED",
        retry_after_ms=-(-shortage.wait_ns // 1_000_000),
        limit=limit.name,
        exceeded=shortage.key,
        allowed=shortage.per_second,
        left=shortage.left,
    )


def _pending_exceeded(limit: Limit, totals: LimitTotals, messages: int, bytes_: int) -> LimitReached | None:
    for key, what, tally, most, asked in (
        ("pending_messages", "pending message", totals.messages, limit.pending_messages, messages),
        ("pending_bytes", "pending byte", totals.bytes, limit.pending_bytes, bytes_),
    ):
        if most and asked > most:
            raise OutOfRange(
                f"The batch alone exceeds {key} of limit {limit.name!r}, {most}: {asked}",
                field="messages",
                reason="BATCH_OVER_LIMIT",
                limit=limit.name,
                exceeded=key,
                allowed=most,
            )
        used = tally.used or 0
        if tally.exceeds(asked, most):
            return LimitReached(
                f"Limit {limit.name!r} allows its topics {_counted(most, what)}: there are {used}, "
                f"and this batch has {asked}",
                reason="LIMIT_PENDING_EXCEEDED",
                retry_after_ms=_RETRY_MS,
                limit=limit.name,
                exceeded=key,
                allowed=most,
                left=max(0, most - used),
            )
    return None


def _topics_exceeded(limit: Limit, tally: LimitTally) -> LimitReached:
    used = tally.used or 0
    return LimitReached(
        f"Limit {limit.name!r} allows {_counted(limit.topics_max, 'topic')}, and there are {used}",
        reason="LIMIT_TOPICS_EXCEEDED",
        retry_after_ms=_RETRY_MS,
        limit=limit.name,
        exceeded="topics_max",
        allowed=limit.topics_max,
        left=max(0, limit.topics_max - used),
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
