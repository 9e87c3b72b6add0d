"""State that the `BrokerMachine` keeps beside the reference."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from broker.model import Position
from tests.harness import small_config
from tests.reference import Subscription


@dataclass(slots=True)
class SubscriptionModel(Subscription[Position]):
    topic: str = ""
    seen: set[Position] = field(default_factory=set)  # whatever was ever sent, also before a seek


@dataclass(slots=True)
class InFlight:
    """A call whose answer nobody waits for; a crash decides what became of it."""

    future: asyncio.Future[Any]
    positions: list[Position]
    acked_on: SubscriptionModel | None  # None: a batch of messages
    topic: str


def model_config(backoff_ms: int) -> Any:
    """Everything small, so that few messages cross every border."""
    return small_config(
        ledger_max_entries=5,
        reclaim_interval_ms=70,
        clock_recheck_ms=100,
        initial_backoff_ms=backoff_ms,
        read_batch_entries=3,
        due_batch_entries=2,
        replay_entries_max=4,
        tick_ms=20,
    )
