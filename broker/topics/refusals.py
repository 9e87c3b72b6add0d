"""Refusals that several calls share: missing topics and subscriptions, times in a wrong unit, delays too long."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from broker.errors import InvalidRequest, NotFound, OutOfRange
from broker.model import DELIVER_AT_MS_MIN, FEW_ROWS, Int64Column
from broker.policy import EffectiveTopicPolicy


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


def check_max_delay(
    times: Int64Column,
    now_ms: int,
    policy: EffectiveTopicPolicy,
    field: Callable[[int], str],
    message_id: Callable[[int], str] | None = None,
) -> None:
    """Raise OutOfRange for the first time beyond the topic's longest delay; `field` names it by its index.

    `message_id`: where the request does not say which message that is.
    """
    max_delay_ms = policy.max_delay_ms
    if not max_delay_ms:
        return
    last_ms = max(times.tolist(), default=0) if len(times) <= FEW_ROWS else int(times.max())
    if last_ms > now_ms + max_delay_ms:
        first = int(np.flatnonzero(times > now_ms + max_delay_ms)[0])
        of = "" if message_id is None else f" of message {message_id(first)}"
        raise OutOfRange(
            f"The delay{of} exceeds the topic's max_delay_ms: {int(times[first]) - now_ms} is more than {max_delay_ms}",
            field=field(first),
            reason="DELIVER_AT_TOO_FAR",
            max_delay_ms=max_delay_ms,
        )
