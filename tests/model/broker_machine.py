"""The calls, clock steps, restarts and crashes that are tried on a broker, and the checks against the reference.

What consumers get is held against the model at once (P2 never early, P3 nothing settled comes back, P4 nothing twice
without a cause). Whenever the broker had time to come to rest, everything owed must be there (P1, P3), and the counts
must be right.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from broker.errors import Unavailable
from broker.model import START, Position
from broker.policy import SubscriptionPolicy
from broker.subscriptions import requests
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import Latency, SimLoop
from broker.topics.intake import Accepted
from tests.harness import (
    EARLIEST,
    LATEST,
    Delivered,
    Inbox,
    Node,
    Outgoing,
    entries_of,
    positions_of,
    refused_ids,
)
from tests.model.broker_state import InFlight, SubscriptionModel, model_config
from tests.model.control_rules import ControlRules, check_counts
from tests.reference import Message, honors_delay

HOUR_MS = 3_600_000
BACKOFF_MS = 100
MARGIN_MS = 600
"""Time that a broker at rest has had at least: longer than every latency and recheck of the clock together."""

TOPICS = ("orders", "audit")
DELAYS = (0, 0, 1, 3, 10, 25, 60, 120, 250, 400, 3_000, HOUR_MS)
TTLS = (0, 0, 0, 1, 2_000, HOUR_MS)
NACKS = (0, 0, 1, 50, 2_000)
PAUSES = (0, 1, 4, 15, MARGIN_MS)
CLOCK_STEPS = (-HOUR_MS, -1_000, -30, -2, 2, 30, 1_000, HOUR_MS)
TYPES = (
    SubscriptionType.SHARED,
    SubscriptionType.SHARED,
    SubscriptionType.KEY_SHARED,
    SubscriptionType.KEY_SHARED,
    SubscriptionType.EXCLUSIVE,
    SubscriptionType.FAILOVER,
)
KEYS = ("", "a", "b", "c")
# Permits and leases. Few permits and short leases together would send the same few messages again and again.
LIMITS = ((1, HOUR_MS), (2, HOUR_MS), (1000, HOUR_MS), (1000, 400))

PICK = st.integers(0, 1 << 12)
PAUSES_MS = st.sampled_from(PAUSES)


class BrokerMachine(ControlRules, RuleBasedStateMachine):
    """One broker after another, each on the disk that the one before left."""

    @initialize(seed=PICK, latency_ms=st.sampled_from([1.0, 8.0, 40.0]))
    def begin(self, seed: int, latency_ms: float) -> None:
        self.loop = SimLoop(seed, latency=Latency(max_ms=latency_ms, slow_every=0))
        self.clock = SimClock(self.loop)
        self.node = Node(MemVfs(), self.clock, model_config(BACKOFF_MS), rng=random.Random(seed))
        self.messages: dict[Position, Message] = {}
        self.subscriptions: list[SubscriptionModel] = []
        self.inboxes: list[tuple[SubscriptionModel, Inbox]] = []
        self.in_flight: list[InFlight] = []
        self.background: list[asyncio.Task[None]] = []
        self.highest_ms = 0  # that the clock ever showed
        self.lived_twice_ms = 0  # up to when the clock stepped back over
        self.run(self.open())
        self.create_subscription(0, SubscriptionType.SHARED, LATEST, None, 0)
        self.attach(0, (1000, HOUR_MS), 0)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def open(self) -> None:
        self.node.open()

    # -- rules: producers and topics -------------------------------------------------------------------------------

    @rule(
        topic=st.sampled_from(TOPICS),
        delays_ms=st.lists(st.sampled_from(DELAYS), min_size=1, max_size=5),
        ttl_ms=st.sampled_from(TTLS),
        answered=st.booleans(),
        pause_ms=PAUSES_MS,
    )
    def produce(self, topic: str, delays_ms: list[int], ttl_ms: int, answered: bool, pause_ms: int) -> None:
        number = len(self.messages)
        batch = [
            Outgoing(
                f"{number + index}".encode(),
                deliver_after_ms=delay_ms,
                ttl_ms=ttl_ms,
                key=KEYS[(number + index) % len(KEYS)],
            )
            for index, delay_ms in enumerate(delays_ms)
        ]
        accepted: Accepted = self.run(self.node.submit(topic, batch))
        positions = positions_of(accepted.ids)
        for position, outgoing in zip(positions, batch, strict=True):
            assert position not in self.messages, "an id was given twice"
            publish_ms, after_ms = accepted.publish_time_ms, outgoing.deliver_after_ms
            due_ms = publish_ms + after_ms if after_ms else 0
            message = Message(position, outgoing.payload, publish_ms, due_ms, ttl_ms, outgoing.key)
            self.messages[position] = message
            for subscription in self.of_topic(topic):
                subscription.add(position, message)
        self.in_flight.append(InFlight(accepted.durable, positions, None, topic))
        if answered:
            self.run(wait_for(accepted.durable))
        self.pause(pause_ms)

    @rule(
        topic=st.integers(0, 1),
        type_=st.sampled_from(TYPES),
        position=st.sampled_from([EARLIEST, LATEST]),
        honor_delay=st.sampled_from([None, True]),
        pause_ms=PAUSES_MS,
    )
    def create_subscription(
        self, topic: int, type_: int, position: int, honor_delay: bool | None, pause_ms: int
    ) -> None:
        if len(self.subscriptions) >= 5:
            return
        name = TOPICS[topic]
        found = self.node.broker.registry.by_name.get(name)
        is_first = found is None or not found.subscriptions.had_any
        made = self.run(
            self.node.create_subscription(
                name,
                f"s{self.loop.now_us()}",
                type_=type_,
                position=position,
                policy=SubscriptionPolicy(honor_delay=honor_delay),
            )
        )
        model = SubscriptionModel(made.name, type_, honors_delay(type_, honor_delay), topic=name)
        if is_first or position == EARLIEST:
            model.seek(START, self.messages_in(name))
        self.subscriptions.append(model)
        self.pause(pause_ms)

    @precondition(lambda self: len(self.subscriptions) > 2)
    @rule(pick=PICK, pause_ms=PAUSES_MS)
    def delete_subscription(self, pick: int, pause_ms: int) -> None:
        model = self.subscriptions.pop(pick % len(self.subscriptions))
        self.run(self.node.topic(model.topic).subscriptions.delete(model.name))
        for of, inbox in self.inboxes:
            assert (of is model) == (inbox.consumer.closed_because is not None)
        self.inboxes = [each for each in self.inboxes if each[0] is not model]
        self.in_flight = [each for each in self.in_flight if each.acked_on is not model]
        self.pause(pause_ms)

    # -- rules: consumers ------------------------------------------------------------------------------------------

    @rule(
        pick=PICK,
        limits=st.sampled_from(LIMITS),
        pause_ms=PAUSES_MS,
    )
    def attach(self, pick: int, limits: tuple[int, int], pause_ms: int) -> None:
        model = self.subscriptions[pick % len(self.subscriptions)]
        if (model.type == SubscriptionType.EXCLUSIVE and any(of is model for of, _ in self.inboxes)) or len(
            self.inboxes
        ) > 5:
            return
        self.run(self.attach_to(model, permits=limits[0], lease_ms=limits[1]))
        self.pause(pause_ms)

    async def attach_to(self, model: SubscriptionModel, **options: int) -> None:
        topic = self.node.topic(model.topic)
        inbox = self.node.attach(topic, topic.subscription(model.name), **options)
        self.inboxes.append((model, inbox))

    @precondition(lambda self: self.inboxes)
    @rule(pick=PICK, hands_back=st.booleans(), pause_ms=PAUSES_MS)
    def detach(self, pick: int, hands_back: bool, pause_ms: int) -> None:
        self.collect()
        model, inbox = self.inboxes.pop(pick % len(self.inboxes))
        self.run(self.detach_from(inbox, hands_back=hands_back))
        for delivered in inbox.poll():  # sent in the last moment
            self.check_delivered(model, inbox, delivered)
        for entry in model.open.values():
            if entry.holder is inbox and hands_back:
                entry.hand_back(self.clock.monotonic_ns())
            elif entry.holder is inbox:
                entry.give_back(certain=not entry.acking)
        self.pause(pause_ms)

    async def detach_from(self, inbox: Inbox, *, hands_back: bool) -> None:
        inbox.detach(hands_back=hands_back)

    @rule(pick=PICK, subset=PICK, answered=st.booleans(), pause_ms=PAUSES_MS)
    def acknowledge(self, pick: int, subset: int, answered: bool, pause_ms: int) -> None:
        """Anything ever sent, also long ago, to somebody else, or to a broker that crashed."""
        model = self.subscriptions[pick % len(self.subscriptions)]
        chosen = [p for index, p in enumerate(sorted(model.seen)) if subset >> index % 12 & 1]
        if not chosen:
            self.pause(pause_ms)
            return
        subscription = self.node.topic(model.topic).subscription(model.name)
        work = self.loop.create_task(acknowledge(subscription, chosen, self.clock))
        for position in chosen:
            if entry := model.entries.get(position):
                entry.acking += 1
        self.in_flight.append(InFlight(work, chosen, model, model.topic))
        if answered:
            self.run(wait_for(work))
        self.pause(pause_ms)

    @precondition(lambda self: self.inboxes)
    @rule(pick=PICK, subset=PICK, after_ms=st.sampled_from(NACKS), pause_ms=PAUSES_MS)
    def nack(self, pick: int, subset: int, after_ms: int, pause_ms: int) -> None:
        self.collect()
        model, inbox = self.inboxes[pick % len(self.inboxes)]
        held = sorted(position for position, entry in model.open.items() if entry.holder is inbox)
        chosen = [p for index, p in enumerate(held) if subset >> index % 12 & 1]
        if not chosen:
            self.pause(pause_ms)
            return
        now_ms = self.clock.now_ms()
        failed = {failure.position for failure in self.run(inbox.nack(chosen, after_ms))}
        now_ns = self.clock.monotonic_ns()
        for position in chosen:
            entry = model.entries[position]
            if position in failed:
                assert not entry.is_held(now_ns) or entry.acking or entry.is_settled
                continue
            low_ms = after_ms or backoff_ms(entry.returns_low) // 2
            high_ms = after_ms or backoff_ms(entry.returns_high)
            entry.give_back(durable=True)
            entry.wait(now_ms + low_ms, now_ms + high_ms, durable=True)
        self.pause(pause_ms)

    # -- rules: time and the disk ----------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 5, 20, 100, 700, 4_000]))
    def advance(self, ms: int) -> None:
        self.pause(ms)

    @rule(ms=st.sampled_from(CLOCK_STEPS), pause_ms=PAUSES_MS)
    def step_clock(self, ms: int, pause_ms: int) -> None:
        self.note_times()
        self.clock.step(ms)
        self.pause(pause_ms)

    @rule(answered=st.booleans(), pause_ms=PAUSES_MS)
    def checkpoint(self, answered: bool, pause_ms: int) -> None:
        work = self.loop.create_task(self.node.checkpoint())
        self.background.append(work)
        if answered:
            self.run(wait_for(work))
        self.pause(pause_ms)

    @rule(
        down_ms=st.just(0) | st.sampled_from(CLOCK_STEPS),
        reconnect=st.sampled_from([True, True, False]),
        pause_ms=PAUSES_MS,
    )
    def restart(self, down_ms: int, reconnect: bool, pause_ms: int) -> None:
        self.collect()
        self.run(self.node.stop())
        for each in self.in_flight:  # a graceful stop answers everybody, if only to refuse
            self.run(wait_for(each.future))
        self.resolve()
        self.note_times()
        self.clock.step(down_ms)
        node = Node(self.node.vfs, self.clock, self.node.config, rng=random.Random(1))
        self.reopen(node, reconnect, cleanly=True)
        self.pause(pause_ms)

    @rule(
        policy=st.sampled_from(CrashPolicy),
        seed=PICK,
        down_ms=st.just(0) | st.sampled_from(CLOCK_STEPS),
        reconnect=st.sampled_from([True, True, False]),
        pause_ms=PAUSES_MS,
    )
    def crash(self, policy: CrashPolicy, seed: int, down_ms: int, reconnect: bool, pause_ms: int) -> None:
        self.collect()
        self.resolve()
        node = self.node.crash(policy, random.Random(seed))
        self.note_times()
        self.clock.step(down_ms)
        self.reopen(node, reconnect, cleanly=False)
        self.pause(pause_ms)

    def reopen(self, node: Node, reconnect: bool, *, cleanly: bool) -> None:
        assert self.node.failures == []
        for task in self.background:
            task.cancel()
        for each in self.in_flight:
            each.future.add_done_callback(forget)
        self.node = node
        disconnected, self.inboxes = self.inboxes, []
        for model in self.subscriptions:
            for entry in model.open.values():
                entry.end_life(self.clock.monotonic_ns(), cleanly=cleanly)
        self.run(self.open())
        self.resolve_crashed()
        for model, inbox in disconnected if reconnect else ():
            self.run(self.attach_to(model, permits=inbox.permits, lease_ms=inbox.consumer.lease_ms))

    def resolve_crashed(self) -> None:
        """Settle what was in flight: stored or settled now, or not; from here on it must stay so."""
        for each in self.in_flight:
            if (model := each.acked_on) is not None:
                cursor = self.node.topic(model.topic).subscription(model.name).cursor
                for position in each.positions:
                    if entry := model.entries.get(position):
                        entry.perhaps_acked = False
                    if cursor.is_settled(position) or self.is_gone(each.topic, position):
                        model.settle(position, self.clock.monotonic_ns())
            elif not self.is_stored(each.topic, each.positions[0]):
                for position in each.positions:
                    del self.messages[position]
                    for model in self.subscriptions:
                        model.forget(position)
        self.in_flight.clear()

    def is_stored(self, topic: str, position: Position) -> bool:
        found = self.node.broker.registry.by_name.get(topic)
        count = found.log.entry_count(position.ledger_id) if found else None
        return (count is not None and count > position.entry_id) or self.is_gone(topic, position)

    def is_gone(self, topic: str, position: Position) -> bool:
        """Return whether the broker has dropped the message: then it was stored, and everybody has settled it."""
        found = self.node.broker.registry.by_name.get(topic)
        if found is None or found.log.entry_count(position.ledger_id) is not None:
            return False
        return position < found.log.end

    # -- checks ----------------------------------------------------------------------------------------------------

    def pause(self, ms: int) -> None:
        """Let time pass, and look at what came of it."""
        self.run(asyncio.sleep(ms / 1000))
        self.collect()
        if ms >= MARGIN_MS:
            self.run(asyncio.sleep(MARGIN_MS / 1000))
            while self.collect():  # those with few permits get one more, and one more
                self.run(asyncio.sleep(MARGIN_MS / 1000))
            self.check_rest()

    def collect(self) -> bool:
        """Hold what consumers got against the model; whether anything came but ends of leases."""
        self.resolve()
        self.note_times()
        is_fresh = False
        arrived = [(model, inbox, each) for model, inbox in self.inboxes for each in inbox.poll()]
        # In the order in which they were sent: consumers of one subscription may hold a message in turn.
        for model, inbox, delivered in sorted(arrived, key=lambda each: each[2].sent_ns):
            entry = model.entries.get(delivered.position)
            is_fresh |= entry is None or entry.holder is None
            self.check_delivered(model, inbox, delivered)
        return is_fresh

    def check_delivered(self, model: SubscriptionModel, inbox: Inbox, found: Delivered) -> None:
        entry = model.entries.get(found.position)
        assert entry is not None, "a message of nowhere, or from before the start"
        assert found.payload == entry.message.content
        model.check_sent(entry, found.sent_ms, found.sent_ns, found.deliver_at_ms)
        if entry.is_settled:
            return  # since it was sent
        if model.type == SubscriptionType.KEY_SHARED and found.position not in model.seen:
            model.check_key_order(entry)
        model.send(entry, inbox, found.attempt, found.sent_ms, found.sent_ns, inbox.consumer.lease_ms)
        model.seen.add(found.position)

    def check_rest(self) -> None:
        """The broker had time: whatever is owed to somebody who is there has been sent (P3)."""
        assert self.node.failures == []
        by_ms, by_ns = self.clock.now_ms() - MARGIN_MS, self.clock.monotonic_ns() - MARGIN_MS * 1_000_000
        for model in self.subscriptions:
            for entry in model.open.values():
                entry.make_durable()
            self.check_count(model)
            if any(of is model for of, _ in self.inboxes) and model.paused_ns is None:
                held_keys = model.held_keys()
                missing = [
                    position
                    for position, entry in model.open.items()
                    if entry.message.key not in held_keys and model.must_have_come(entry, by_ms, by_ns)
                ]
                assert not missing, f"P3: {missing} of {model} did not come at {self.clock.now_ms()}"
        for model in self.subscriptions:  # last: time passes meanwhile
            check_counts(self, model)

    def check_count(self, model: SubscriptionModel) -> None:
        certain = sum(not (each.acking or each.message.may_have_expired) for each in model.open.values())
        unsettled = self.node.topic(model.topic).subscription(model.name).unsettled_count()
        assert certain <= unsettled <= len(model.open), (
            f"{unsettled} unsettled, {certain} to {len(model.open)} owed"
        )

    def note_times(self) -> None:
        """Note expiry and ends of waits, which a clock that steps back does not undo."""
        now_ms = self.clock.now_ms()
        if now_ms < self.highest_ms:
            self.lived_twice_ms = self.highest_ms
        self.highest_ms = max(self.highest_ms, now_ms)
        for message in self.messages.values():
            message.note_time(now_ms)
        for model in self.subscriptions:
            for entry in model.open.values():
                entry.note_time(now_ms)

    def resolve(self) -> None:
        """Take note of what was answered."""
        for each in self.in_flight:
            if each.future.done() and each.acked_on is not None:
                for position in each.positions:
                    if entry := each.acked_on.entries.get(position):
                        entry.acking -= 1
                for position, confirmed_ns in self.acknowledged(each).items():
                    each.acked_on.settle(position, confirmed_ns)
        self.in_flight = [each for each in self.in_flight if not each.future.done()]

    def acknowledged(self, each: InFlight) -> dict[Position, int]:
        if isinstance(each.future.exception(), Unavailable):
            assert self.node.broker.not_ready_because == "draining", "refused without a cause"
            return {}
        failed, confirmed_ns = each.future.result()
        return dict.fromkeys(set(each.positions) - failed, confirmed_ns)

    def of_topic(self, topic: str) -> list[SubscriptionModel]:
        return [model for model in self.subscriptions if model.topic == topic]

    def messages_in(self, topic: str) -> dict[Position, Message]:
        found = self.node.topic(topic)
        return {p: m for p, m in self.messages.items() if found.log.entry_count(p.ledger_id) is not None}

    def teardown(self) -> None:
        """In the end everything comes: to those who are there, and to the consumers of the next life."""
        if not hasattr(self, "node"):
            return
        try:
            for model in self.subscriptions:
                self.set_paused(model, paused=False)
            self.pause(MARGIN_MS)
            self.note_times()
            self.clock.step(30 * HOUR_MS)
            self.pause(5 * MARGIN_MS)
            self.restart(0, False, 0)
            for model in self.subscriptions:
                self.run(self.attach_to(model, permits=1000, lease_ms=24 * HOUR_MS))
            self.pause(5 * MARGIN_MS)
            for model in self.subscriptions:
                unaccounted = [each.message for each in model.open.values() if each.holder is None]
                assert all(message.may_have_expired for message in unaccounted)
        finally:
            self.close()
        assert self.loop.unhandled == [], self.loop.unhandled

    def close(self) -> None:
        self.node.abandon()
        self.loop.cancel_leftovers()
        self.loop.close()


async def acknowledge(
    subscription: Subscription, positions: list[Position], clock: SimClock
) -> tuple[set[Position], int]:
    """Return what was refused, and when the rest was confirmed."""
    confirmation = await requests.acknowledge(subscription, entries_of(positions))
    return {refused.position for refused in refused_ids(confirmation.failures)}, clock.monotonic_ns()


def backoff_ms(returned_count: int) -> int:
    """The longest wait of what came back so often; jitter takes off at most one half."""
    return min(BACKOFF_MS << returned_count, model_config(BACKOFF_MS).max_backoff_ms)


def forget(future: asyncio.Future[Any]) -> None:
    """A broker that crashed answers nobody, or refuses; neither is looked at."""
    _ = future.cancelled() or future.exception()


async def wait_for(future: asyncio.Future[Any]) -> None:
    await asyncio.wait([future])
