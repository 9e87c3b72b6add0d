"""Rules for seek, pause and settings of subscriptions, and their counts, held against the model.

Where the model cannot know (a call on its way, a clock that stepped back, a lease that may have ended), a count may
be what any of the possible states makes it; everywhere else it must be exact.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from broker.model import START, Position
from broker.subscriptions.subscription import Subscription
from broker.topics import control
from tests.model.broker_state import SubscriptionModel
from tests.reference import Entry

NEAR_MS = 300
"""Time around now in which a due message may or may not have been noticed: longer than every latency and recheck."""

READY, LEASED, SCHEDULED, NONE = "ready", "leased", "scheduled", "none"


class ControlRules:
    """Rules of the `BrokerMachine`, whose attributes these are."""

    subscriptions: list[SubscriptionModel]
    inboxes: list[Any]
    in_flight: list[Any]
    messages: dict[Position, Any]
    node: Any
    clock: Any
    run: Any
    collect: Any
    resolve: Any
    messages_in: Any

    @rule(
        pick=st.integers(0, 1 << 12),
        where=st.sampled_from(["earliest", "latest", "id", "id"]),
        pause_ms=st.sampled_from([0, 1, 15, 600]),
    )
    def seek(self, pick: int, where: str, pause_ms: int) -> None:
        model = self.subscriptions[pick % len(self.subscriptions)]
        topic = self.node.topic(model.topic)
        subscription = topic.subscription(model.name)
        known = sorted(self.messages_in(model.topic))
        self.collect()
        start = topic.latest_position()
        if where == "earliest":
            start = START
        elif where == "id" and known:
            start = control.position_of_id(topic, known[pick % len(known)])
        acks = [each for each in self.in_flight if each.acked_on is model]
        self.run(control.seek(topic, subscription, start))
        self.collect()  # what was sent before
        for each in acks:  # they may have come before the seek or after it
            self.run(asyncio.wait([each.future]))
        self.resolve()
        self._begin_anew(model, start, {p for each in acks for p in each.positions}, subscription)
        self.pause(pause_ms)  # type: ignore[attr-defined]

    def _begin_anew(
        self, model: SubscriptionModel, start: Position, doubtful: set[Position], subscription: Subscription
    ) -> None:
        now_ns = self.clock.monotonic_ns()
        overdue = {p for p, each in model.open.items() if each.holder and not each.is_held(now_ns)}
        for of, inbox in self.inboxes:
            assert (of is model) == inbox.consumer.ended
        for of, inbox in self.inboxes:
            if of is model:
                self.run(_detach(inbox))
                assert inbox.poll() == [], "sent after the seek to a consumer from before"
        self.inboxes = [each for each in self.inboxes if each[0] is not model]
        model.seek(start, self.messages_in(model.topic))
        for position in doubtful & model.open.keys():
            if subscription.cursor.is_settled(position):
                model.settle(position, now_ns)
        for position in overdue & model.open.keys():
            # The end of a lease may have been noted between the seek and its record.
            model.open[position].returns_high = 1

    @rule(pick=st.integers(0, 1 << 12), pause_ms=st.sampled_from([0, 1, 15, 600]))
    def pause_or_resume(self, pick: int, pause_ms: int) -> None:
        model = self.subscriptions[pick % len(self.subscriptions)]
        self.set_paused(model, paused=model.paused_ns is None)
        self.pause(pause_ms)  # type: ignore[attr-defined]

    def set_paused(self, model: SubscriptionModel, *, paused: bool) -> None:
        topic = self.node.topic(model.topic)
        self.collect()
        model.paused_ns = None
        self.run(control.pause(topic, topic.subscription(model.name), paused=paused))
        self.collect()
        model.paused_ns = self.clock.monotonic_ns() if paused else None


async def _detach(inbox: Any) -> None:
    inbox.detach()


def possible_states(machine: Any, model: SubscriptionModel, entry: Entry) -> set[str]:
    """In which states a message that is owed may be now."""
    message, now_ms = entry.message, machine.clock.now_ms()
    states: set[str] = set()
    if entry.acking or message.may_have_expired:
        states.add(NONE)
    if entry.holder is not None:
        left_ms = (entry.deadline_ns - machine.clock.monotonic_ns()) / 1e6
        return states | {LEASED} if left_ms > NEAR_MS else states | {LEASED, READY, SCHEDULED, NONE}
    due_ms = message.due_ms if model.honors_delay else 0
    if machine.highest_ms > now_ms + NEAR_MS:
        # The clock stepped back: what had come due by then may count as ready, though it is not sent, and what is
        # hidden by its place in the log may not be known until time has caught up.
        states |= {READY, SCHEDULED}
    elif max(entry.wait_low_ms, due_ms) > now_ms + NEAR_MS:
        states.add(SCHEDULED)
    elif max(entry.wait_high_ms, due_ms) <= now_ms - NEAR_MS:
        states.add(READY)
    else:
        states |= {READY, SCHEDULED}
    return states


def check_counts(machine: Any, model: SubscriptionModel) -> None:
    """Hold the counts of a subscription against the model."""
    topic = machine.node.topic(model.topic)
    machine.run(topic.counts.wait_exact(5.0))
    machine.collect()
    subscription = topic.subscription(model.name)
    states = [possible_states(machine, model, each) for each in model.open.values()]
    counts = topic.subscription_counts(subscription)
    found = {READY: counts.ready, LEASED: counts.leased, SCHEDULED: counts.scheduled}
    for name, count in found.items():
        certain = sum(each == {name} for each in states)
        possible = sum(name in each for each in states)
        assert certain <= count <= possible, f"{count} {name}, not {certain} to {possible}, of {model}"
    if all(len(each) == 1 for each in states):
        assert sum(found.values()) == len(states)
    check_age(machine, model, topic, subscription)


def check_age(machine: Any, model: SubscriptionModel, topic: Any, subscription: Subscription) -> None:
    """Hold the age of the oldest ready message against the model, where nothing is in doubt."""
    states = [(each, possible_states(machine, model, each)) for each in model.open.values()]
    age_ms = machine.run(topic.counts.find_oldest_age_ms(subscription))
    if any(len(possible) > 1 for _, possible in states):
        return
    ready = [each for each, possible in states if possible == {READY}]
    if any(each.wait_low_ms or each.wait_high_ms for each in ready):
        return
    since_ms = [each.message.since_ms(honors_delay=model.honors_delay) for each in ready]
    if ready and min(since_ms) <= machine.lived_twice_ms:
        return  # what arrived later may be older
    expected_ms = machine.clock.now_ms() - min(since_ms) if ready else 0
    assert age_ms == expected_ms, f"{age_ms} ms old, not {expected_ms}, of {model}"
