"""What is said of topics and subscriptions that are not there, and of times that nobody means."""

from __future__ import annotations

from broker.errors import InvalidRequest, NotFound
from broker.model import DELIVER_AT_MS_MIN


def topic_not_found(name: str) -> NotFound:
    return NotFound(f"There is no topic {name!r}", reason="TOPIC_NOT_FOUND", topic=name)


def subscription_not_found(topic: str, name: str) -> NotFound:
    return NotFound(
        f"Topic {topic!r} has no subscription {name!r}",
        reason="SUBSCRIPTION_NOT_FOUND",
        topic=topic,
        subscription=name,
    )


def wrong_unit(deliver_at_ms: int, field: str) -> InvalidRequest:
    """Of a delivery time that nobody means: it counts something else than milliseconds."""
    side = "before 2001-09-09" if deliver_at_ms < DELIVER_AT_MS_MIN else "after the year 9999"
    return InvalidRequest(
        f"deliver_at_ms is {deliver_at_ms}, which is {side}: it counts milliseconds since the Unix epoch, not seconds "
        "or microseconds",
        field=field,
        reason="INVALID_DELIVER_AT_MS",
    )
