"""State that the `ScheduleMachine` keeps beside the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from broker.model import Position
from broker.policy import TRACKER_MEMORY, TopicPolicy
from broker.topics.schedule_values import Outcome
from tests.harness import small_config
from tests.reference import Message, Subscription

HOUR_MS = 3_600_000
LEASE_MS = 1_000 * HOUR_MS
"""Longer than any walk: only a restart, a nack or a consumer that leaves ends a lease."""


@dataclass(slots=True)
class ScheduledMessage(Message):
    """A message that may be scheduled."""

    first_ms: int = 0  # as it was produced
    schedule_key: str = ""
    is_doubtful: bool = False  # the clock stepped back over its time, and then the broker was killed


@dataclass(slots=True)
class SubscriptionModel(Subscription[Position]):
    unknown_ms: int = 0  # of what was due by then nobody knows what was sent


@dataclass(frozen=True, slots=True)
class Asked:
    """A change that was asked for, and when."""

    kind: str  # cancel, at, after, shift
    value_ms: int
    start_ms: int
    positions: tuple[Position, ...]


def new_due_ms(asked: Asked, message: Message, outcome: Outcome, highest_ms: int, end_ms: int) -> int:
    """Return the due time of a moved message; checks that it is the requested one."""
    low = high = asked.value_ms
    if asked.kind == "shift":
        low = high = message.due_ms + asked.value_ms
    elif asked.kind == "after":
        low, high = asked.start_ms + asked.value_ms, end_ms + asked.value_ms
        low, high = min(low, high), max(low, high)  # the clock steps back
    found = outcome.deliver_at_ms
    # A new time lies behind the frontier, and that is no later than the clock ever was.
    assert low <= found <= max(high, highest_ms + 1), f"moved to {found}, not {low} to {high}"
    return found


def schedule_config() -> Any:
    """Everything small, so that few messages cross every border."""
    return small_config(
        ledger_max_entries=5,
        reclaim_interval_ms=70,
        clock_recheck_ms=100,
        initial_backoff_ms=50,
        max_backoff_ms=50,
        read_batch_entries=3,
        due_batch_entries=2,
        replay_entries_max=4,
        tick_ms=20,
        seal_after_ms=200,
    )


def topic_policy(*, in_memory: bool) -> TopicPolicy:
    return replace(TopicPolicy(), tracker=TRACKER_MEMORY) if in_memory else TopicPolicy()
