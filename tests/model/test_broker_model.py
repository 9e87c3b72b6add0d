"""A whole broker against the plainest model: a dict of messages, and for each subscription a set of what is settled.

Hypothesis draws calls, clock steps, restarts and crashes; time between them is virtual. What consumers get is held
against the model at once (P2 never early, P3 nothing settled comes back, P4 nothing twice without a cause), and
whenever the broker had time to come to rest, everything owed must be there (P1, P3).

`MUTANTS` switches off one clause of the delivery rule at a time (architecture.md, section 6); the model must notice
each, or it would prove nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from broker.delayed import index_pump
from broker.delayed.index_pump import IndexPump
from broker.delayed.memory_tracker import MemoryTracker
from broker.model import Array, Position
from broker.storage.policy import SubscriptionPolicy
from broker.subscriptions import reader
from broker.subscriptions.cursor import Cursor
from broker.subscriptions.dispatcher import Dispatcher, Read, Taken
from broker.subscriptions.redelivery import Attempts, RedeliveryQueue
from broker.subscriptions.replay import ReplayQueue
from broker.subscriptions.subscription import EXCLUSIVE, FAILOVER, SHARED, Subscription
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import Latency, SimLoop
from broker.topics.topic import Accepted
from tests.harness import EARLIEST, LATEST, Delivered, Inbox, Node, Outgoing, positions_of, small_config

HOUR_MS = 3_600_000
BACKOFF_MS = 100
MARGIN_MS = 600
"""What a broker at rest has had at least: longer than every latency and recheck of the clock together."""

TOPICS = ("orders", "audit")
DELAYS_MS = st.sampled_from([0, 0, 1, 3, 10, 25, 60, 400, 3_000, HOUR_MS])
PAUSES_MS = st.sampled_from([0, 1, 4, 15, MARGIN_MS])
PICK = st.integers(0, 1 << 12)
STEPS_MS = st.sampled_from([-HOUR_MS, -1_000, -30, -2, 2, 30, 1_000, HOUR_MS])


def model_config() -> Any:
    """Everything small, so that few messages cross every border."""
    return small_config(
        ledger_entries_max=5,
        clock_recheck_ms=100,
        initial_backoff_ms=BACKOFF_MS,
        read_batch_entries=3,
        due_batch_entries=2,
        replay_entries_max=4,
        tick_ms=20,
    )


@dataclass(slots=True)
class Message:
    payload: bytes
    deliver_at_ms: int  # 0: at once
    expire_at_ms: int  # 0: never
    may_have_expired: bool = False


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
    settled: set[Position] = field(default_factory=set)
    settling: set[Position] = field(default_factory=set)  # acknowledged, and not answered yet
    out: dict[Position, Out] = field(default_factory=dict)
    not_before: dict[Position, tuple[int, int]] = field(default_factory=dict)  # at least, at most
    returned: dict[Position, tuple[int, int]] = field(default_factory=dict)  # how often: at least, at most
    seen: set[Position] = field(default_factory=set)

    def give_back(self, position: Position, not_before: tuple[int, int], *, durable: bool) -> None:
        """It comes back; if that is not durable yet, a crash may take it for not returned."""
        self.out.pop(position, None)
        low, high = self.returned.get(position, (0, 0))
        self.returned[position] = (low + durable, high + 1)
        if not durable:
            not_before = (0, max(not_before[1], self.not_before.get(position, (0, 0))[1]))
        self.not_before[position] = not_before

    def settle(self, position: Position) -> None:
        self.settled.add(position)
        self.settling.discard(position)
        self.out.pop(position, None)


@dataclass(slots=True)
class InFlight:
    """A call whose answer nobody waits for; a crash decides what became of it."""

    future: asyncio.Future[Any]
    positions: list[Position]
    acked_on: SubscriptionModel | None  # None: a batch of messages


class BrokerMachine(RuleBasedStateMachine):
    """One broker after another on one disk."""

    @initialize(seed=st.integers(0, 1 << 16), latency_ms=st.sampled_from([1.0, 8.0, 40.0]))
    def begin(self, seed: int, latency_ms: float) -> None:
        self.loop = SimLoop(seed, latency=Latency(max_ms=latency_ms, slow_every=0))
        self.clock = SimClock(self.loop)
        self.rng = random.Random(seed)
        self.node = Node(MemVfs(), self.clock, model_config(), rng=self.rng).open_in(self.loop)
        self.messages: dict[Position, Message] = {}
        self.subscriptions: list[SubscriptionModel] = []
        self.inboxes: list[tuple[SubscriptionModel, Inbox]] = []
        self.in_flight: list[InFlight] = []
        self.number = 0
