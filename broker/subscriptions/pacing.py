"""Pacing of a subscription: how many messages its policy lets it hand out now. Pure: callers pass the times in.

Invariants:
  PACING-1  In no span of time are more messages handed out than the burst, one, and what the rate makes of the span.
  PACING-2  The rate is reached while there are messages: a dispatcher that comes late finds what has gathered, up to
      the burst, and no fraction of a message is lost.
"""

from __future__ import annotations

import sys

from broker.policy import EffectiveSubscriptionPolicy

UNLIMITED = sys.maxsize

_MESSAGE = 10**18
"""A message in units of the bucket: a rate in messages per second, times 10^9, is units per nanosecond."""
_LOOKS_PER_SECOND = 100
"""Of a dispatcher that is held back: what gathers meanwhile goes together, so that a high rate costs few looks."""


class Pacing:
    """Pacing of one subscription: a bucket of tokens for its rate, and a bound on what is leased.

    What may be handed out is found by `look`, which the dispatcher does before each step, and holds until the next
    one. The bucket outlives dispatchers, but not a restart of the broker.
    """

    def __init__(self) -> None:
        self.room = 0
        """Messages that may be handed out until the next look."""
        self.next_ns: int | None = None
        """Monotonic time from which the rate lets the next ones go; None if it does not hold them back."""
        self.held_through_ms = 0
        """Through when messages are held back, or were last: what was due by then and goes later was held back."""
        self._rate = 0  # units per nanosecond
        self._burst = 0
        self._level = 0  # units
        self._settled_ns = 0

    def look(self, policy: EffectiveSubscriptionPolicy, leased_count: int, now_ns: int, now_ms: int) -> None:
        """Find out what may be handed out now. `leased_count` matters where the policy bounds it."""
        self.next_ns = None
        self.room = UNLIMITED
        if policy.max_delivery_rate or self._rate:
            self._adopt(policy, now_ns)
        if self._rate:
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
        if self._rate:
            self._settle(now_ns)
            self._level -= count * _MESSAGE

    def holds(self, now_ms: int) -> bool:
        """Return whether messages are held back, if there are any."""
        return self.held_through_ms > now_ms

    @property
    def waits_for_leases(self) -> bool:
        """Return whether the end of a lease would let messages go."""
        return self.held_through_ms == UNLIMITED

    def _adopt(self, policy: EffectiveSubscriptionPolicy, now_ns: int) -> None:
        """Count by the rate and the burst of a policy from now on; a bucket that is new is full."""
        rate, burst = _rate_and_burst(policy)
        if (rate, burst) == (self._rate, self._burst):
            return
        if self._rate:
            self._settle(now_ns)
            self._level = min(self._level, _capacity(burst))
        else:
            self._level, self._settled_ns = burst * _MESSAGE, now_ns
        self._rate, self._burst = rate, burst

    def _gathered(self, now_ns: int) -> int:
        """Messages for which there are tokens; 0, and `next_ns`, while there are fewer than are worth a look."""
        self._settle(now_ns)
        wanted = max(_MESSAGE, self._rate * (1_000_000_000 // _LOOKS_PER_SECOND) // _MESSAGE * _MESSAGE)
        if self._level >= wanted:
            return self._level // _MESSAGE
        self.next_ns = now_ns - (self._level - wanted) // self._rate  # rounded up
        return 0

    def _settle(self, now_ns: int) -> None:
        elapsed_ns = max(0, now_ns - self._settled_ns)
        self._level = min(self._level + elapsed_ns * self._rate, _capacity(self._burst))
        self._settled_ns += elapsed_ns


def _rate_and_burst(policy: EffectiveSubscriptionPolicy) -> tuple[int, int]:
    """The rate in units per nanosecond, and the messages that may go at once."""
    rate = policy.max_delivery_rate
    if not rate:
        return 0, 0
    # Less than what gathers between two looks, twice, could not be kept up.
    burst = max(1, int(rate * 2 / _LOOKS_PER_SECOND), policy.max_delivery_burst or int(rate / 10))
    return max(1, round(rate * 1e9)), burst


def _capacity(burst: int) -> int:
    """Units that a bucket holds: with a fraction of a message more than the burst, which a late look would lose."""
    return burst * _MESSAGE + _MESSAGE - 1
