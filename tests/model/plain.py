"""State of the plainest model of a broker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from broker.model import Position
from tests.harness import (
    Inbox,
    small_config,
)


@dataclass(slots=True)
class Message:
    payload: bytes
    deliver_at_ms: int  # 0: at once
    expire_at_ms: int  # 0: never
    may_have_expired: bool = False
    publish_ms: int = 0
    key: str = ""

    def since_ms(self, *, honors_delay: bool) -> int:
        """Since when it may be delivered."""
        return max(self.publish_ms, self.deliver_at_ms) if honors_delay else self.publish_ms


@dataclass(slots=True)
class Out:
    """A message that a consumer holds."""

    inbox: Inbox
    deadline_ns: int


@dataclass(slots=True)
class SubscriptionModel:
    topic: str
    name: str
    id: int
    type: int
    honors_delay: bool
    owed: set[Position]  # stored since its start, settled or not
    settled: dict[Position, int] = field(default_factory=dict)  # when that was confirmed, monotonic
    settling: set[Position] = field(default_factory=set)  # acknowledged, and not answered yet
    out: dict[Position, Out] = field(default_factory=dict)
    not_before: dict[Position, tuple[int, int]] = field(default_factory=dict)  # at least, at most
    returned: dict[Position, tuple[int, int]] = field(default_factory=dict)  # how often: at least, at most
    not_durable: list[Position] = field(default_factory=list)  # returned, and perhaps not on disk yet
    seen: set[Position] = field(default_factory=set)
    last_of_key: dict[str, Position] = field(
        default_factory=dict
    )  # KEY_SHARED: the last new one, not delayed
    paused_ns: int | None = None  # since when, monotonic

    def give_back(self, position: Position, not_before: tuple[int, int], *, durable: bool) -> None:
        """It comes back; if that is not durable yet, a crash may take it for not returned."""
        self.out.pop(position, None)
        low, high = self.returned.get(position, (0, 0))
        self.returned[position] = (low + durable, high + 1)
        if not durable:
            self.not_durable.append(position)
            not_before = (0, max(not_before[1], self.not_before.get(position, (0, 0))[1]))
        self.not_before[position] = not_before

    def hand_back(self, position: Position) -> None:
        """It comes back unbegun: that counts nothing; a crash may take it for not returned."""
        self.out.pop(position, None)
        self.not_before[position] = (0, self.not_before.get(position, (0, 0))[1])

    def make_durable(self) -> None:
        """All that was returned so far is on disk by now."""
        for position in self.not_durable:
            low, high = self.returned[position]
            self.returned[position] = (min(low + 1, high), high)
        self.not_durable.clear()

    def settle(self, position: Position, confirmed_ns: int) -> None:
        self.settled.setdefault(position, confirmed_ns)
        self.settling.discard(position)
        self.out.pop(position, None)


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
