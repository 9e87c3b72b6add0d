"""Pacing in a simulation: policies that some seeds have, and what they allow, judged at each hand-out."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.errors import NotFound, StorageFailed, Unavailable
from broker.policy import SubscriptionPolicy
from broker.subscriptions.subscription import Subscription
from broker.topics import control
from broker.topics.topic import Topic
from tests.reference import require

if TYPE_CHECKING:
    from tests.sim.facts import SubscriptionModel
    from tests.sim.world import Life, World

SHARE = 0.3
"""Of the seeds."""


@dataclass(eq=False)
class Pace:
    """One policy of a subscription, and the plainest bucket: the burst, one, and what the rate makes of the time."""

    rate: float = 0.0
    burst: int = 0
    leased: int = 0
    left: float | None = None  # None: nothing was handed out under it in this life
    at_us: int = 0
    has_bucket: bool = False
    """Something was handed out in this life, by it or one before: the broker has a bucket."""

    @property
    def is_free(self) -> bool:
        return not self.rate and not self.leased

    def take(self, count: int, held: int, now_us: int) -> bool:
        """Count a hand-out; whether the policy allows it."""
        is_allowed = not self.leased or held + count <= self.leased
        if not self.rate:
            return is_allowed
        self.left = self._level(now_us) - count
        self.at_us = now_us
        self.has_bucket = True
        return is_allowed and self.left > -1e-6

    def may_begin(self, before: Pace, now_us: int) -> None:
        """It may come into force now: with what the one before has left, or what it has itself, if it came earlier.

        Where nothing was handed out yet, it may have a bucket of its own: nobody may have looked before.
        """
        if self.rate:
            self.has_bucket |= before.has_bucket
            goes_on = before.rate and before.has_bucket
            left = min(self._capacity, before._level(now_us)) if goes_on else self._capacity
            self.left = left if self.left is None else max(left, self._level(now_us))
            self.at_us = now_us

    @property
    def _capacity(self) -> int:
        return max(1, int(self.rate / 50), self.burst or int(self.rate / 10)) + 1

    def _level(self, now_us: int) -> float:
        if self.left is None:
            return self._capacity
        return min(self._capacity, self.left + self.rate * (now_us - self.at_us) / 1e6)


def pace_of(policy: SubscriptionPolicy) -> Pace:
    return Pace(
        policy.max_delivery_rate or 0.0, policy.max_delivery_burst or 0, policy.max_leased_messages or 0
    )


def random_pace(rng: random.Random) -> dict[str, Any]:
    """Fields of a policy. The slowest one is quick enough for the end of a run."""
    return {
        "max_delivery_rate": rng.choice((None, 8.0, 40.5, 700.0)),
        "max_delivery_burst": rng.choice((None, None, 1, 30)),
        "max_leased_messages": rng.choice((None, None, 2, 7, 40)),
    }


def check_pace(world: World, subscription: SubscriptionModel, count: int) -> None:
    """Check that a policy that may be in force allows so many more."""
    if all(pace.is_free for pace in subscription.paces):
        return
    held, now_us = _held(world, subscription, certainly=True), world.loop.now_us()
    allowed = [pace.take(count, held, now_us) for pace in subscription.paces]
    for before, is_allowed, pace in zip(subscription.paces, allowed, subscription.paces[1:], strict=False):
        if is_allowed:  # by the one before, so this one may come into force later
            pace.may_begin(before, now_us)
    require(any(allowed), "pacing", f"{subscription}: {count} beside {held} by {subscription.paces}")
    world.count["handed out by a pace"] += count


def is_full(world: World, subscription: SubscriptionModel) -> bool:
    """Return whether as many may be leased as a policy allows that may be in force."""
    bounds = [pace.leased for pace in subscription.paces if pace.leased]
    return bool(bounds) and _held(world, subscription, certainly=False) >= min(bounds)


def longest_wait_us(subscription: SubscriptionModel) -> int:
    """Return how long the rate may hold a message back."""
    return max((round(1e6 / pace.rate) for pace in subscription.paces if pace.rate), default=0)


async def change_pace(
    life: Life, topic: Topic, subscription: Subscription, mine: SubscriptionModel, rng: random.Random
) -> None:
    """Set another policy; until that is answered, either may be in force."""
    if mine.changes_pace:
        return
    fields = random_pace(rng)
    given = SubscriptionPolicy(**fields)
    new = ask_pace(mine, given, life.world.loop.now_us())
    life.world.trace(f"{mine} is to have {new}")
    try:
        await control.update_policy(topic, subscription, given, set(fields))
    except (NotFound, StorageFailed, Unavailable):
        return  # the next life has the one or the other
    if not life.dead:
        answer_pace(mine, life.world.loop.now_us())
        life.world.count["paces changed"] += 1


def ask_pace(mine: SubscriptionModel, given: SubscriptionPolicy, now_us: int) -> Pace:
    """Another policy is asked for. Which one it follows may be open: one was asked for, and the broker died."""
    new = pace_of(given)
    for old in mine.paces:
        new.may_begin(old, now_us)
    mine.paces.append(new)
    mine.changes_pace = True
    return new


def answer_pace(mine: SubscriptionModel, now_us: int) -> None:
    """The policy that was asked for last is in force, from this moment or some before it."""
    *before, new = mine.paces
    for old in before:
        new.may_begin(old, now_us)
    if not all(old.is_free for old in before):
        mine.paced_us = now_us
    mine.paces = [new]
    mine.changes_pace = False


def end_paces(subscription: SubscriptionModel) -> None:
    """A life is over, and its buckets with it."""
    subscription.changes_pace = False
    for pace in subscription.paces:
        pace.left = None
        pace.has_bucket = False


def _held(world: World, subscription: SubscriptionModel, *, certainly: bool) -> int:
    now_ns = world.wall.monotonic_ns()
    return sum(
        fact.is_held(now_ns) and not (certainly and (fact.acking or fact.perhaps_acked))
        for fact in subscription.open.values()
    )
