"""The calls, clock steps, restarts and crashes that are tried on a broker, and the checks against the plainest model.

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
from broker.model import Position
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
from tests.model.control_rules import ControlRules, check_counts
from tests.model.plain import InFlight, Message, Out, SubscriptionModel, model_config

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
            due_ms = accepted.publish_time_ms + outgoing.deliver_after_ms
            self.messages[position] = Message(
                outgoing.payload,
                due_ms if outgoing.deliver_after_ms else 0,
                due_ms + ttl_ms if ttl_ms else 0,
                publish_ms=accepted.publish_time_ms,
                key=outgoing.key,
            )
        for subscription in self.of_topic(topic):
            subscription.owed.update(positions)
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
        stored = self.positions_in(name) if is_first or position == EARLIEST else set()
        honors_delay = type_ in (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED) or bool(honor_delay)
        model = SubscriptionModel(name, made.name, made.subscription_id, type_, honors_delay, stored)
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
        for position, out in list(model.out.items()):
            if out.inbox is inbox and hands_back:
                model.hand_back(position)
            elif out.inbox is inbox:
                model.give_back(position, (0, 0), durable=False)
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
        model.settling.update(chosen)
        self.in_flight.append(InFlight(work, chosen, model, model.topic))
        if answered:
            self.run(wait_for(work))
        self.pause(pause_ms)

    @precondition(lambda self: self.inboxes)
    @rule(pick=PICK, subset=PICK, after_ms=st.sampled_from(NACKS), pause_ms=PAUSES_MS)
    def nack(self, pick: int, subset: int, after_ms: int, pause_ms: int) -> None:
        self.collect()
        model, inbox = self.inboxes[pick % len(self.inboxes)]
        held = sorted(position for position, out in model.out.items() if out.inbox is inbox)
        chosen = [p for index, p in enumerate(held) if subset >> index % 12 & 1]
        if not chosen:
            self.pause(pause_ms)
            return
        now_ms = self.clock.now_ms()
        failed = {failure.position for failure in self.run(inbox.nack(chosen, after_ms))}
        for position in set(chosen) - failed:
            low, high = model.returned.get(position, (0, 0))
            delays_ms = (after_ms, after_ms) if after_ms else (backoff_ms(low) // 2, backoff_ms(high))
            model.give_back(position, (now_ms + delays_ms[0], now_ms + delays_ms[1]), durable=True)
        now_ns = self.clock.monotonic_ns()
        for position in failed & model.out.keys():
            assert model.out[position].deadline_ns <= now_ns or position in model.settling
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
        for model in self.subscriptions:
            model.make_durable()
        self.note_times()
        self.clock.step(down_ms)
        self.reopen(Node(self.node.vfs, self.clock, self.node.config, rng=random.Random(1)), reconnect)
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
        self.reopen(node, reconnect)
        self.pause(pause_ms)

    def reopen(self, node: Node, reconnect: bool) -> None:
        assert self.node.failures == []
        for task in self.background:
            task.cancel()
        for each in self.in_flight:
            each.future.add_done_callback(forget)
        self.node = node
        disconnected, self.inboxes = self.inboxes, []
        now_ns = self.clock.monotonic_ns()
        for model in self.subscriptions:
            for position, out in list(model.out.items()):
                if out.deadline_ns <= now_ns:  # perhaps it was given back before the end
                    model.give_back(position, (0, 0), durable=False)
            model.out.clear()
            model.not_durable.clear()  # some of it is, some is not
        self.run(self.open())
        self.resolve_crashed()
        for model, inbox in disconnected if reconnect else ():
            self.run(self.attach_to(model, permits=inbox.permits, lease_ms=inbox.consumer.lease_ms))

    def resolve_crashed(self) -> None:
        """Settle what was in flight: stored or settled now, or not; from here on it must stay so."""
        for each in self.in_flight:
            if each.acked_on is not None:
                topic = self.node.topic(each.acked_on.topic)
                cursor = topic.subscription(each.acked_on.name).cursor
                for position in each.positions:
                    each.acked_on.settling.discard(position)
                    if cursor.is_settled(position) or self.is_gone(each.topic, position):
                        each.acked_on.settle(position, self.clock.monotonic_ns())
            elif not self.is_stored(each.topic, each.positions[0]):
                for position in each.positions:
                    del self.messages[position]
                    for model in self.subscriptions:
                        model.owed.discard(position)
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
            is_fresh |= delivered.position not in model.out
            self.check_delivered(model, inbox, delivered)
        return is_fresh

    def check_delivered(self, model: SubscriptionModel, inbox: Inbox, found: Delivered) -> None:
        position = found.position
        assert position in model.owed, "a message of nowhere, or from before the start"
        message = self.messages[position]
        assert found.payload == message.payload
        if (confirmed_ns := model.settled.get(position)) is not None:
            assert found.sent_ns <= confirmed_ns, "P3: a settled message came back"
            return
        assert model.paused_ns is None or found.sent_ns <= model.paused_ns, "sent while it was paused"
        if model.honors_delay:
            assert found.sent_ms >= message.deliver_at_ms, "P2: early"
        assert not message.expire_at_ms or found.sent_ms < message.expire_at_ms, "expired, and delivered"
        if (out := model.out.get(position)) is not None:
            assert out.deadline_ns <= found.sent_ns, "P4: sent twice at once"
            model.give_back(position, (0, 0), durable=False)  # by the end of the lease
        if model.type == SubscriptionType.KEY_SHARED:
            self.check_key(model, inbox, found)
        assert found.sent_ms >= model.not_before.get(position, (0, 0))[0], "a returned message came too soon"
        low, high = model.returned.get(position, (0, 0))
        assert low <= found.attempt - 1 <= high, f"attempt {found.attempt}, returned {low} to {high} times"
        model.returned[position] = (found.attempt - 1, found.attempt - 1)
        model.not_durable = [each for each in model.not_durable if each != position]
        model.out[position] = Out(inbox, found.sent_ns + inbox.consumer.lease_ms * 1_000_000)
        model.seen.add(position)

    def check_key(self, model: SubscriptionModel, inbox: Inbox, found: Delivered) -> None:
        """A key is with one consumer at a time, and what is sent for the first time and at once is in its order."""
        message = self.messages[found.position]
        for position, out in model.out.items():
            held = (
                out.inbox is not inbox and out.deadline_ns > found.sent_ns and position not in model.settling
            )
            assert not (held and message.key and self.messages[position].key == message.key), (
                "one key, two consumers"
            )
        if message.key and not message.deliver_at_ms and found.position not in model.seen:
            last = model.last_of_key.get(message.key)
            assert last is None or last < found.position, f"{found.position} after {last} of its key"
            model.last_of_key[message.key] = found.position

    def check_rest(self) -> None:
        """The broker had time: whatever is owed to somebody who is there has been sent (P3)."""
        assert self.node.failures == []
        for model in self.subscriptions:
            model.make_durable()
            self.check_count(model)
            if any(of is model for of, _ in self.inboxes) and model.paused_ns is None:
                missing = [position for position in model.owed if self.is_due(model, position)]
                assert not missing, f"P3: {missing} of {model} did not come at {self.clock.now_ms()}"
        for model in self.subscriptions:  # last: time passes meanwhile
            check_counts(self, model)

    def check_count(self, model: SubscriptionModel) -> None:
        owed = model.owed - model.settled.keys()
        certain = {p for p in owed - model.settling if not self.messages[p].may_have_expired}
        unsettled = self.node.topic(model.topic).subscription(model.name).unsettled_count()
        assert len(certain) <= unsettled <= len(owed), (
            f"{unsettled} unsettled, {len(certain)} to {len(owed)} owed"
        )

    def is_due(self, model: SubscriptionModel, position: Position) -> bool:
        """Return whether a message should have been sent a while ago, and no consumer holds it."""
        message = self.messages[position]
        before_ms = self.clock.now_ms() - MARGIN_MS
        if position in model.settled or position in model.settling or message.may_have_expired:
            return False
        out = model.out.get(position)
        if out is not None and out.deadline_ns > self.clock.monotonic_ns() - MARGIN_MS * 1_000_000:
            return False
        if model.type == SubscriptionType.KEY_SHARED and any(
            self.messages[p].key == message.key != "" for p in model.out
        ):
            return False  # its key is with somebody, and may be another's next
        not_before_ms = model.not_before.get(position, (0, 0))[1]
        return max(not_before_ms, message.deliver_at_ms if model.honors_delay else 0) <= before_ms

    def note_times(self) -> None:
        """Note expiry and ends of waits, which a clock that steps back does not undo."""
        now_ms = self.clock.now_ms()
        if now_ms < self.highest_ms:
            self.lived_twice_ms = self.highest_ms
        self.highest_ms = max(self.highest_ms, now_ms)
        for message in self.messages.values():
            if message.expire_at_ms and message.expire_at_ms <= now_ms:
                message.may_have_expired = True
        for model in self.subscriptions:
            for position, (at_least_ms, at_most_ms) in model.not_before.items():
                if at_least_ms <= now_ms:
                    model.not_before[position] = (0, at_most_ms)

    def resolve(self) -> None:
        """Take note of what was answered."""
        for each in self.in_flight:
            if each.future.done() and each.acked_on is not None:
                each.acked_on.settling.difference_update(each.positions)
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

    def positions_in(self, topic: str) -> set[Position]:
        found = self.node.topic(topic)
        return {p for p in self.messages if found.log.entry_count(p.ledger_id) is not None}

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
                unaccounted = model.owed - model.settled.keys() - model.out.keys()
                assert all(self.messages[position].may_have_expired for position in unaccounted)
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
