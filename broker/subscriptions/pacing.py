"""Pacing of a subscription: how many messages its policy lets it hand out now. Pure: callers pass the times in.

Invariants:
  PACING-1  In no span of time are more messages handed out than the burst, one, and what the rate makes of the span.
  PACING-2  The rate is reached while there are messages: a dispatcher that comes late finds what has gathered, up to
      the burst, and no fraction of a message is lost.
"""

from __future__ import annotations

import sys

from broker.policy import EffectiveSubscriptionPolicy
from broker.runtime.token_bucket import TokenBucket

UNLIMITED = sys.maxsize

_LOOKS_PER_SECOND = 100
"""Of a dispatcher that is held back: what gathers meanwhile goes together, so that a high rate costs few looks."""


class Pacing:
    """Pacing of one subscription: a bucket of tokens for its rate, and a bound on what is leased.

    What may be handed out is found by `look`, which the dispatcher does before each step, and holds until the next
    one. The bucket outlives dispatchers, but not a restart of the broker.
    """

    __slots__ = ("_bucket", "held_through_ms", "next_ns", "room")

    def __init__(self) -> None:
        self.room = 0
        """Messages that may be handed out until the next look."""
        self.next_ns: int | None = None
        """Monotonic time from which the rate lets the next ones go; None if it does not hold them back."""
        self.held_through_ms = 0
        """Through when messages are held back, or were last: what was due by then and goes later was held back."""
        self._bucket = TokenBucket()

    def look(self, policy: EffectiveSubscriptionPolicy, leased_count: int, now_ns: int, now_ms: int) -> None:
        """Find out what may be handed out now. `leased_count` matters where the policy bounds it."""
        self.next_ns = None
        self.room = UNLIMITED
        bucket = self._bucket
        if policy.max_delivery_rate or bucket.has_rate:
            bucket.adopt(policy.max_delivery_rate, _burst(policy), now_ns)
        if bucket.has_rate:
            self.room = self._gathered(now_ns)
        if policy.max_leased_messages and leased_count >= policy.max_leased_messages:
            self.room, self.next_ns = 0, None
            self.held_through_ms = UNLIMITED  # until a lease ends
            return
        if policy.max_leased_messages:
            self.room = min(self.room, policy.max_leased_messages - leased_count)
        if self.next_ns is None:
            self.held_through_ms = min(self.held_through_ms, now_ms)
        else:
            self.held_through_ms = now_ms + -(-(self.next_ns - now_ns) // 1_000_000)

    def forget(self) -> None:
        """Another policy holds: nothing is handed out before the next look."""
        self.room = 0

    def handed_out(self, count: int, now_ns: int) -> None:
        """Some messages were handed out, no more than there was room for."""
        self.room -= count
        if self._bucket.has_rate:
            self._bucket.take(count, now_ns)

    def holds(self, now_ms: int) -> bool:
        """Return whether messages are held back, if there are any."""
        return self.held_through_ms > now_ms

    @property
    def waits_for_leases(self) -> bool:
        """Return whether the end of a lease would let messages go."""
        return self.held_through_ms == UNLIMITED

    def _gathered(self, now_ns: int) -> int:
        """Messages for which there are tokens; 0, and `next_ns`, while there are fewer than are worth a look."""
        wanted = max(1, self._bucket.gathered_in(1_000_000_000 // _LOOKS_PER_SECOND))
        if wait_ns := self._bucket.wait_ns(wanted, now_ns):
            self.next_ns = now_ns + wait_ns
            return 0
        return self._bucket.count(now_ns)


def _burst(policy: EffectiveSubscriptionPolicy) -> int:
    """The messages that may go at once."""
    rate = policy.max_delivery_rate
    # Less than what gathers between two looks, twice, could not be kept up.
    return max(1, int(rate * 2 / _LOOKS_PER_SECOND), policy.max_delivery_burst or int(rate / 10))
