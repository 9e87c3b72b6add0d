"""Promises of KEY_SHARED, checked at each hand-out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.reference import Violation
from tests.sim.facts import Fact, Message, SubscriptionModel
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.traffic import SimConsumer


def check_key(
    world: World, subscription: SubscriptionModel, consumer: SimConsumer, message: Message, fact: Fact
) -> None:
    """Check that what was lost of a key comes before what is new, and what is new in its order."""
    key = message.key
    if not key:
        world.count["handed out without a key"] += 1
        return
    world.count["handed out with a key"] += 1
    if fact.sent_count:
        return
    where = f"{subscription} {message.position}"
    for other, its in subscription.open.items():
        if other is message or other.key != key or its.acking or its.perhaps_acked:
            continue
        if _was_lost(world, other, its):
            raise Violation("key order", f"{where} is new, and goes before {other.position}, which was lost")
    if consumer.life.has_met_fault and not message.due_ms:
        # After a read that failed, what had been taken comes first, wherever it was.
        subscription.last_of_key.pop(key, None)
    had_expired = message.expire_ms and world.wall.reached(message.expire_ms, message.accepted_us)
    if had_expired and world.wall.now_ms() < message.expire_ms:
        return  # it was passed over then, and is back as the clock stepped back
    subscription.check_key_order(fact)


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
