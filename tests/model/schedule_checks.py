"""Checks of a broker while cancels and moves are tried on it; see `schedule_machine`."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from broker.errors import NotFound
from broker.model import Position
from broker.topics.schedule_values import Cancel, ChangeResult, DueRange, Scheduled, ScheduledState
from tests.harness import Delivered, Inbox, Node
from tests.model.schedule_state import ScheduledMessage, SubscriptionModel

TOPIC = "orders"
MARGIN_MS = 700
"""Time that a broker at rest has had at least: longer than every latency and recheck of the clock together."""
NEAR_MS = 400


class ScheduleChecks:
    """Checks of the `ScheduleMachine`, whose attributes these are."""

    node: Node
    clock: Any
    run: Any
    topic: Any
    messages: dict[Position, ScheduledMessage]
    subscriptions: list[SubscriptionModel]
    inboxes: list[tuple[SubscriptionModel, Inbox]]
    highest_ms: int
    leapt_from_ms: int
    seen: Counter[str]

    def pause(self, ms: int) -> None:
        """Let time pass, and look at what came of it."""
        self.run(asyncio.sleep(ms / 1000))
        self.collect()
        if ms >= MARGIN_MS:
            self.run(asyncio.sleep(MARGIN_MS / 1000))
            while self.collect():  # those with few permits get one more, and one more
                self.run(asyncio.sleep(MARGIN_MS / 1000))
            self.leapt_from_ms = 0
            self.check_rest()

    def note_times(self) -> None:
        self.highest_ms = max(self.highest_ms, self.clock.now_ms())
        for message in self.messages.values():
            message.note_time(self.highest_ms)
        for model in self.subscriptions:
            for entry in model.open.values():
                entry.note_time(self.clock.now_ms())

    def _arrived(self) -> list[tuple[SubscriptionModel, Inbox, Delivered]]:
        arrived = [(model, inbox, each) for model, inbox in self.inboxes for each in inbox.poll()]
        return sorted(arrived, key=lambda each: each[2].sent_ns)

    def collect(self) -> bool:
        """Hold what consumers got against the model; whether there was any."""
        self.note_times()
        arrived = self._arrived()
        for model, inbox, delivered in arrived:
            self.check_delivered(model, inbox, delivered)
        return bool(arrived)

    def check_delivered(self, model: SubscriptionModel, inbox: Inbox, found: Delivered) -> None:
        self._check_sent(model, found)
        if (entry := model.open.get(found.position)) is not None:
            model.send(entry, inbox, found.attempt, found.sent_ms, found.sent_ns, inbox.consumer.lease_ms)
        else:  # it was cancelled since
            model.entries[found.position].sent_count += 1

    def _check_sent(self, model: SubscriptionModel, found: Delivered) -> None:
        entry = model.entries.get(found.position)
        assert entry is not None, "a message of nowhere, or from before the start"
        assert found.payload == entry.message.content
        model.check_sent(entry, found.sent_ms, found.sent_ns, found.deliver_at_ms)

    def check_rest(self) -> None:
        """The broker had time: whatever is owed to somebody who is there has been sent (P3)."""
        assert self.node.failures == [], self.node.failures
        by_ms, by_ns = self.clock.now_ms() - MARGIN_MS, self.clock.monotonic_ns() - MARGIN_MS * 1_000_000
        for model in self.subscriptions:
            for entry in model.open.values():
                entry.make_durable()
            if any(of is model for of, _ in self.inboxes) and model.paused_ns is None:
                held_keys = model.held_keys()
                missing = [
                    entry
                    for entry in model.open.values()
                    if entry.message.key not in held_keys and model.must_have_come(entry, by_ms, by_ns)
                ]
                assert not missing, f"P3: {missing} of {model} at {self.clock.now_ms()}"
        self.run(self._check_shown())
        self.collect()
        if self.highest_ms <= self.clock.now_ms():
            self._check_counts()
        self.run(self._check_index())

    async def _check_shown(self) -> None:
        """Page, get, keys and count are what the model says."""
        schedule = self.topic.schedule
        shown: list[Scheduled] = []
        at = None
        # What is due waits until the index takes it, which a slow disk may hold up.
        taken_ms = min(self.clock.now_ms() - NEAR_MS, self.topic.index.tracker.frontier.deliver_at_ms)
        while True:
            page = await schedule.page(DueRange(), "", at, 3)
            shown += page.scheduled
            at = page.next
            if at is None:
                break
        self.note_times()
        now_ms = self.clock.now_ms()
        live = {p: m for p, m in self.messages.items() if m.due_ms and m.cancelled_ns is None}
        # A ledger may go although a message of it is being moved, if nobody is owed it.
        stored = self._stored().union(*(model.open for model in self.subscriptions))
        certain = {p for p, m in live.items() if m.due_ms > self.highest_ms and p in stored}
        possible = {p for p, m in live.items() if m.due_ms > taken_ms}
        found = [each.position for each in shown]
        assert len(found) == len(set(found)), "shown twice"
        assert certain <= set(found) <= possible, (
            f"shown {found}, not {sorted(certain)} to {sorted(possible)}"
        )
        for each in shown:
            message = live[each.position]
            assert each.deliver_at_ms == message.due_ms
            assert each.revision == message.revision, f"{each} {message}"
            assert each.schedule_key == message.schedule_key
        keys = [(each.deliver_at_ms, each.position) for each in shown]
        assert keys == sorted(keys)
        counts = await schedule.count(DueRange(), 0)
        if counts.is_exact:
            self.seen["exact"] += 1
            total = sum(count for _, count in counts.bars) + counts.before + counts.after
            soon = sum(m.due_ms <= self.clock.now_ms() for m in live.values() if m.due_ms > now_ms)
            assert len(certain) - soon <= total <= len(possible), f"{total} counted, {len(certain)} wait"
        await self._check_gets(certain, possible)

    async def _check_gets(self, certain: set[Position], possible: set[Position]) -> None:
        schedule = self.topic.schedule
        for position, message in sorted(self.messages.items())[-20:]:
            was_going = position.ledger_id in self.topic.log.under_way.going
            try:
                found = await schedule.get(position)
            except NotFound:
                self.collect()
                is_certain = position in certain and message.due_ms > self.highest_ms
                assert not is_certain, f"{position} waits, and is not found"
                is_owed = message.due_ms and message.cancelled_ns is None and position in self._stored()
                if is_owed and not was_going and position.ledger_id not in self.topic.log.under_way.going:
                    evidence = any(self._may_have_been_sent(m, position, set()) for m in self.subscriptions)
                    assert evidence, f"{position} is due, nobody was sent it, and it is not found"
                continue
            assert message.due_ms and message.cancelled_ns is None, f"{position} is not pending"
            assert found.deliver_at_ms == message.due_ms
            if found.state is ScheduledState.WAITING:
                assert position in possible
                continue
            dry = await schedule.change([position], Cancel(), dry_run=True)
            if dry[0].result is ChangeResult.NOT_FOUND:  # its ledger went, or is about to, since it was shown
                log = self.topic.log
                is_there = log.entry_count(position.ledger_id) is not None
                assert was_going or position.ledger_id in log.under_way.going or not is_there
                continue
            if dry[0].result is ChangeResult.ALREADY_DELIVERED:  # since it was shown
                self.collect()
                sent = {m.name for m in self.subscriptions if self._may_have_been_sent(m, position, set())}
                assert set(dry[0].delivered_to) <= sent
                continue
            assert dry[0].result is ChangeResult.DONE, (
                f"{position} is shown as due, and cannot be cancelled: {dry[0]}"
            )
            self.seen["due"] += 1

    def _check_counts(self) -> None:
        """Counts of subscriptions, where nothing is in doubt."""
        if not self.topic.counts.is_exact:
            self.seen["inexact"] += 1
            return
        now_ms = self.clock.now_ms()
        times = [m.due_ms for m in self.messages.values() if m.cancelled_ns is None]
        if any(abs(due_ms - now_ms) < NEAR_MS for due_ms in times):
            return
        for model in self.subscriptions:
            owed = [entry.message for entry in model.open.values()]
            if any(each.may_have_expired or each.may_have_expired_before for each in owed):
                continue
            counts = self.topic.subscription_counts(self.topic.subscription(model.name))
            waiting = sum(model.honors_delay and each.due_ms > now_ms for each in owed)
            leased = sum(entry.holder is not None for entry in model.open.values())
            expected = (waiting, len(owed) - waiting - leased, leased)
            if not model.honors_delay:
                expected = (0, len(owed) - leased, leased)
            found = (counts.scheduled, counts.ready, counts.leased)
            self.seen["counted"] += 1
            assert found == expected, f"(scheduled, ready, leased) is {found}, not {expected}, of {model}"

    async def _check_index(self) -> None:
        check = await self.node.broker.verify_topic(TOPIC)
        assert check.findings == [], check.findings

    def _may_have_been_sent(
        self, model: SubscriptionModel, position: Position, sent_now: set[tuple[str, Position]]
    ) -> bool:
        message, entry = self.messages[position], model.entries.get(position)
        if not model.honors_delay or entry is None or message.due_ms > self.highest_ms:
            return False
        is_acked = entry.is_settled and not message.is_cancelled
        known = entry.sent_count > 0 or is_acked or (model.name, position) in sent_now
        return known or message.may_have_expired or message.due_ms <= model.unknown_ms

    def _stored(self) -> set[Position]:
        return {p for p in self.messages if self.topic.log.entry_count(p.ledger_id) is not None}
