"""What is said of topics and subscriptions that are not there."""

from __future__ import annotations

from broker.errors import NotFound


def topic_not_found(name: str) -> NotFound:
    return NotFound(f"There is no topic {name!r}", reason="TOPIC_NOT_FOUND", topic=name)


def subscription_not_found(topic: str, name: str) -> NotFound:
    return NotFound(
        f"Topic {topic!r} has no subscription {name!r}",
        reason="SUBSCRIPTION_NOT_FOUND",
        topic=topic,
        subscription=name,
    )
