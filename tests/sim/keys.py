"""Promises of KEY_SHARED, checked at each hand-out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.facts import Fact, Message, SubscriptionModel
from tests.sim.world import Violation, World

if TYPE_CHECKING:
    from tests.sim.traffic import SimConsumer


def check_key(
    world: World, subscription: SubscriptionModel, consumer: SimConsumer, message: Message, fact: Fact
) -> None:
    """One key is with one consumer at a time; what was lost comes before what is new; what is new comes in its order."""
    key = message.ask.key
    if not key:
        world.count["handed out without a key"] += 1
        return
    world.count["handed out with a key"] += 1
    now_ns = world.wall.monotonic_ns()
    where = f"{subscription} {message.position}"
    is_first = not fact.handout_count
    for other, its in subscription.open.items():
        if other is message or other.ask.key != key or its.acking or its.perhaps_acked:
            continue
        if its.holder is not None and its.holder is not consumer and now_ns < its.deadline_ns:
            raise Violation(
                "one consumer a key",
                f"{where} goes to {consumer.consumer_id}; {its.holder.consumer_id} holds {other.position}",
            )
        if is_first and _was_lost(world, other, its):
            raise Violation("key order", f"{where} is new, and goes before {other.position}, which was lost")
    if is_first and not message.due_ms:
        last = subscription.last_of_key.get(key)
        # After a read that failed, what had been taken comes first, wherever it was.
        if last is not None and last > message.position and not consumer.life.has_met_fault:
            raise Violation("key order", f"{where} follows {last} of its key")
        subscription.last_of_key[key] = message.position


def _was_lost(world: World, message: Message, fact: Fact) -> bool:
    """Return whether a message certainly came back unasked, and may be sent again."""
    wall, now_us = world.wall, world.loop.now_us()
    if fact.holder is not None:
        ended_us = fact.deadline_ns // 1000
        lost_us = ended_us + world.slack_us  # the broker has had time to notice
    elif fact.lost_us is not None:
        ended_us = lost_us = fact.lost_us
    else:
        return False
    is_sure = lost_us <= now_us and wall.disturbed_us < lost_us and not world.writing_failed
    # If the clock had stepped back before, what was early when it was lost waits for its time, outside the order.
    since_ms = 0 if wall.is_frozen else (now_us - ended_us) // 1000
    was_early = message.due_ms > wall.now_ms() - since_ms
    expired = bool(message.expire_ms) and wall.reached(message.expire_ms, message.accepted_us)
    return is_sure and not was_early and not expired
