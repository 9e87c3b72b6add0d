"""Cancels, moves and replacements tried on a broker among everything else, and held against the reference.

The broker answers what became of each message; the model says whether that can be so, and from then on expects just
that: a cancelled message goes to nobody, a moved one comes once to each subscription and not before its new time (P5),
nothing else is lost (P3), keys are unique, and what is shown and counted is what the model holds.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import numpy as np

from broker.errors import AlreadyExists
from broker.jobs.verify import verify_data_dir
from broker.model import CANCELLED_MS, START, Position
from broker.policy import SubscriptionPolicy
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import Latency, SimLoop
from broker.topics import control
from broker.topics.schedule_values import (
    Cancel,
    Change,
    ChangeResult,
    DueRange,
    Move,
    Outcome,
)
from broker.topics.topic import Topic
from tests.harness import DATA_DIR, EARLIEST, LATEST, Inbox, Node, Outgoing, positions_of
from tests.model.schedule_checks import MARGIN_MS, NEAR_MS, TOPIC, ScheduleChecks
from tests.model.schedule_state import (
    HOUR_MS,
    LEASE_MS,
    Asked,
    ScheduledMessage,
    SubscriptionModel,
    new_due_ms,
    schedule_config,
    topic_policy,
)
from tests.reference import cancel, honors_delay
from tests.stepping import change_next

KEYS = ("a-1", "a-2", "b-1")
ROUTES = ("", "x", "y", "z")
KINDS = (
    (SubscriptionType.SHARED, None),
    (SubscriptionType.SHARED, None),
    (SubscriptionType.KEY_SHARED, None),
    (SubscriptionType.EXCLUSIVE, None),
    (SubscriptionType.EXCLUSIVE, True),
    (SubscriptionType.FAILOVER, True),
)
DONE, DELIVERED = ChangeResult.DONE, ChangeResult.ALREADY_DELIVERED
MISSING, CANCELLED = ChangeResult.NOT_FOUND, ChangeResult.ALREADY_CANCELLED


class ScheduleMachine(ScheduleChecks):
    """One broker after another, each on the disk that the one before left."""

    def begin(self, seed: int, latency_ms: float, *, in_memory: bool) -> None:
        self.loop = SimLoop(seed, latency=Latency(max_ms=latency_ms, slow_every=0))
        self.clock = SimClock(self.loop)
        self.node = Node(MemVfs(), self.clock, schedule_config(), rng=random.Random(seed))
        self.in_memory = in_memory
        self.messages: dict[Position, ScheduledMessage] = {}
        self.subscriptions: list[SubscriptionModel] = []
        self.inboxes: list[tuple[SubscriptionModel, Inbox]] = []
        self.highest_ms = 0
        self.leapt_from_ms = 0  # not 0: the clock leapt from there, and the broker had no rest since
        self.seen: Counter[str] = Counter()
        """Situations that this walk has met, for tests of the tests."""
        self.run(self.open())
        self.run(self.node.broker.registry.create_topic(TOPIC, topic_policy(in_memory=in_memory)))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def open(self) -> None:
        self.node.open()

    @property
    def topic(self) -> Topic:
        return self.node.topic(TOPIC)

    # -- producers -------------------------------------------------------------------------------------------------

    def produce(self, delays_ms: Sequence[int], ttl_ms: int, keyed: int, replace: bool) -> None:
        """`keyed`: a number whose bits say which of the messages have a schedule key, and which."""
        self.collect()
        number = len(self.messages)
        wanted = []
        free = list(KEYS)
        for index, delay_ms in enumerate(delays_ms):
            is_keyed = delay_ms and free and keyed >> index & 1
            schedule_key = free.pop((keyed >> 4) % len(free)) if is_keyed else ""
            wanted.append(
                Outgoing(
                    f"{number + index}".encode(),
                    deliver_after_ms=delay_ms,
                    ttl_ms=ttl_ms,
                    key=ROUTES[(number + index) % len(ROUTES)],
                    schedule_key=schedule_key,
                )
            )
        asked = {each.schedule_key for each in wanted if each.schedule_key}
        before = self._holders(asked)
        try:
            accepted = self.run(self._submitted(wanted, replace))
        except AlreadyExists as refusal:
            self.note_times()
            assert not replace, "a replacement was refused"
            holder = Position(refusal.facts["ledger_id"], refusal.facts["entry_id"])
            assert holder in before, f"refused because of {holder}, which holds no key"
            self.seen["taken"] += 1
            return
        self.note_times()
        certain = {p for p in before if self.messages[p].due_ms > self.highest_ms}
        assert replace or not certain, f"{certain} wait under a key that was given again"
        for position in before:
            self._replaced(position, certain)
        positions = positions_of(accepted.ids)
        for position, outgoing in zip(positions, wanted, strict=True):
            assert position not in self.messages, "an id was given twice"
            due_ms = accepted.publish_time_ms + outgoing.deliver_after_ms if outgoing.deliver_after_ms else 0
            message = self.messages[position] = ScheduledMessage(
                position,
                outgoing.payload,
                accepted.publish_time_ms,
                due_ms,
                ttl_ms,
                outgoing.key,
                first_ms=due_ms,
                schedule_key=outgoing.schedule_key,
            )
            for model in self.subscriptions:
                model.add(position, message)

    def _holders(self, keys: Iterable[str]) -> set[Position]:
        """Return the messages that may hold one of some keys."""
        now_ms, wanted = self.clock.now_ms(), set(keys)
        # The index takes what is due a little later, and has perhaps not noticed that the clock leapt.
        now_ms = min(now_ms, self.leapt_from_ms or now_ms) - NEAR_MS
        return {
            position
            for position, message in self.messages.items()
            if message.schedule_key in wanted and message.cancelled_ns is None and message.due_ms > now_ms
        }

    def _replaced(self, position: Position, certain: set[Position]) -> None:
        """A message held a key when another one was stored with it: it is cancelled, or its time had come."""
        times = self.run(self._times([position]))
        if position in certain or times[position] == CANCELLED_MS:
            assert times[position] == CANCELLED_MS, f"{position} was replaced, and waits"
            self._cancel(position, self.clock.monotonic_ns())
            self.seen["replaced"] += 1

    async def _submitted(self, wanted: list[Outgoing], replace: bool) -> Any:
        accepted = await self.node.submit(TOPIC, wanted, replace=replace)
        await accepted.durable
        return accepted

    async def _times(self, positions: Iterable[Position]) -> dict[Position, int]:
        """Return the effective times of the log; CANCELLED_MS for what is gone, as nobody is owed it."""
        found = {}
        for position in positions:
            if self.topic.log.entry_count(position.ledger_id) is None:
                found[position] = CANCELLED_MS
                continue
            ids = np.array([position.entry_id], dtype=np.uint32)
            time_ms = int((await self.topic.log.times_of(position.ledger_id, ids))[0])
            is_gone = self.topic.log.entry_count(position.ledger_id) is None  # while it was read
            found[position] = CANCELLED_MS if is_gone else time_ms
        return found

    # -- subscriptions ---------------------------------------------------------------------------------------------

    def create_subscription(self, kind: int, earliest: bool) -> None:
        if len(self.subscriptions) >= 4:
            return
        self.collect()
        type_, honor_delay = KINDS[kind % len(KINDS)]
        is_first = not self.topic.subscriptions.had_any
        self.run(
            self.node.create_subscription(
                TOPIC,
                name := f"s{self.loop.now_us()}",
                type_=type_,
                position=EARLIEST if earliest else LATEST,
                policy=SubscriptionPolicy(honor_delay=honor_delay),
            )
        )
        model = SubscriptionModel(name, type_, honors_delay(type_, honor_delay))
        if earliest or is_first:
            self._begin(model, START)
        self.subscriptions.append(model)

    def _begin(self, model: SubscriptionModel, start: Position) -> None:
        model.seek(start, {p: self.messages[p] for p in self._stored()})

    def delete_subscription(self, pick: int) -> None:
        if len(self.subscriptions) < 2:
            return
        self.collect()
        model = self.subscriptions.pop(pick % len(self.subscriptions))
        self.run(self.topic.subscriptions.delete(model.name))
        self.inboxes = [each for each in self.inboxes if each[0] is not model]

    def attach(self, pick: int, permits: int) -> None:
        if not self.subscriptions or len(self.inboxes) > 5:
            return
        model = self.subscriptions[pick % len(self.subscriptions)]
        if model.type == SubscriptionType.EXCLUSIVE and any(of is model for of, _ in self.inboxes):
            return
        self.run(self._attach_to(model, permits))

    async def _attach_to(self, model: SubscriptionModel, permits: int) -> None:
        found = self.topic.subscription(model.name)
        inbox = self.node.attach(self.topic, found, permits=permits, lease_ms=LEASE_MS)
        self.inboxes.append((model, inbox))

    def detach(self, pick: int) -> None:
        if not self.inboxes:
            return
        self.collect()
        model, inbox = self.inboxes.pop(pick % len(self.inboxes))
        self.run(_detach(inbox))
        for delivered in inbox.poll():
            self.check_delivered(model, inbox, delivered)
        for entry in model.open.values():
            if entry.holder is inbox:
                entry.give_back()
        self.pause(MARGIN_MS)  # what it held is given back, durably

    def acknowledge(self, pick: int, subset: int) -> None:
        self.collect()
        if not self.inboxes:
            return
        model, inbox = self.inboxes[pick % len(self.inboxes)]
        out = sorted(position for position, entry in model.open.items() if entry.holder is not None)
        chosen = [p for index, p in enumerate(out) if subset >> index % 12 & 1]
        assert self.run(inbox.ack(chosen)) == []
        for position in chosen:
            model.settle(position, self.clock.monotonic_ns())

    def nack(self, pick: int, subset: int) -> None:
        self.collect()
        if not self.inboxes:
            return
        model, inbox = self.inboxes[pick % len(self.inboxes)]
        held = sorted(position for position, entry in model.open.items() if entry.holder is inbox)
        chosen = [p for index, p in enumerate(held) if subset >> index % 12 & 1]
        if chosen:
            asked_ms = self.clock.now_ms()
            failures = self.run(inbox.nack(chosen, 50))
            assert failures == [], failures
            for position in chosen:
                model.open[position].give_back(durable=True)
                model.open[position].wait(asked_ms + 50, self.clock.now_ms() + 50, durable=True)
        self.collect()

    def seek(self, pick: int, where: str) -> None:
        if not self.subscriptions:
            return
        model = self.subscriptions[pick % len(self.subscriptions)]
        known = sorted(self._stored())
        self.collect()
        start = self.topic.latest_position()
        if where == "earliest":
            start = START
        elif where == "id" and known:
            start = control.position_of_id(self.topic, known[pick % len(known)])
        self.run(control.seek(self.topic, self.topic.subscription(model.name), start))
        self.collect()  # what was sent before
        self.note_times()
        for of, inbox in self.inboxes:
            if of is model:
                self.run(_detach(inbox))
        self.inboxes = [each for each in self.inboxes if each[0] is not model]
        self._begin(model, start)
        model.unknown_ms = self.highest_ms

    def pause_or_resume(self, pick: int) -> None:
        if self.subscriptions:
            model = self.subscriptions[pick % len(self.subscriptions)]
            self._set_paused(model, model.paused_ns is None)

    def _set_paused(self, model: SubscriptionModel, is_paused: bool) -> None:
        found = self.topic.subscription(model.name)
        model.paused_ns = None
        self.run(control.pause(self.topic, found, paused=is_paused))
        self.collect()
        model.paused_ns = self.clock.monotonic_ns() if is_paused else None

    # -- changes ---------------------------------------------------------------------------------------------------

    def change(self, kind: str, value_ms: int, subset: int, by_key: bool, dry_run: bool) -> None:
        """Cancel or move some messages by id or key; now and then one that was never there."""
        self.collect()
        if by_key:
            keys = [key for index, key in enumerate(KEYS) if subset >> index & 1]
            self._change_keys(keys, kind, value_ms, dry_run)
            return
        chosen = self._chosen(subset)
        if not subset % 5:
            chosen.append(Position(900_000, 7))
        if chosen:
            asked = self._asked(kind, value_ms, chosen)
            outcomes = self.run(self.topic.schedule.change(chosen, self._change(asked), dry_run=dry_run))
            assert [outcome.position for outcome in outcomes] == chosen
            self.take_in(asked, outcomes, dry_run)

    def _chosen(self, subset: int) -> list[Position]:
        """Mostly messages that wait."""
        waiting = sorted(p for p, m in self.messages.items() if m.due_ms and m.cancelled_ns is None)
        some = waiting[-14:] if subset % 3 else sorted(self.messages)[-24:]
        return [p for index, p in enumerate(some) if subset >> index % 12 & 1]

    def _asked(self, kind: str, value_ms: int, positions: Sequence[Position]) -> Asked:
        if kind == "first":  # back to where it was
            first_ms = [self.messages[p].first_ms for p in positions if p in self.messages]
            kind, value_ms = "at", max(first_ms, default=0) or self.clock.now_ms()
        elif kind == "at":
            value_ms += self.clock.now_ms()
        return Asked(kind, value_ms, self.clock.now_ms(), tuple(positions))

    def _change(self, asked: Asked) -> Change:
        match asked.kind:
            case "cancel":
                return Cancel()
            case "at":
                return Move(deliver_at_ms=asked.value_ms)
            case "after":
                return Move(deliver_after_ms=asked.value_ms)
        return Move(shift_ms=asked.value_ms)

    def _change_keys(self, keys: list[str], kind: str, value_ms: int, dry_run: bool) -> None:
        asked = self._asked(kind, value_ms, [])
        may_hold = self._holders(keys)
        outcomes = self.run(self.topic.schedule.change(keys, self._change(asked), dry_run=dry_run))
        assert [outcome.schedule_key for outcome in outcomes] == keys
        self.note_times()
        held = [p for p in may_hold if self.messages[p].due_ms > self.highest_ms]
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome.result is DONE:
                assert outcome.position in may_hold, f"{key} named {outcome.position}"
                assert self.messages[outcome.position].schedule_key == key
            else:
                assert not any(self.messages[p].schedule_key == key for p in held), f"{key} was not found"
                self._check_had(key, outcome)
        self.take_in(asked, [outcome for outcome in outcomes if outcome.result is DONE], dry_run)

    def _check_had(self, key: str, outcome: Outcome) -> None:
        """Nobody holds a key: what is told is so of the last message that was stored with it, whatever is gone."""
        had = [p for p, message in self.messages.items() if message.schedule_key == key]
        assert outcome.position == max(had, default=None), f"{key} named {outcome.position}"
        if outcome.position is None:
            assert outcome.result is MISSING and not outcome.delivered_to, outcome
            return
        message = self.messages[outcome.position]
        log = self.topic.log
        is_gone = (
            outcome.position.ledger_id in log.under_way.going
            or log.entry_count(outcome.position.ledger_id) is None
        )
        is_cancelled = message.cancelled_ns is not None
        assert is_cancelled == (outcome.result is CANCELLED), outcome
        assert not is_gone or outcome.result is not MISSING, outcome
        assert bool(outcome.delivered_to) == (outcome.result is DELIVERED and not is_gone), outcome

    def change_matching(
        self, kind: str, value_ms: int, low_ms: int, width_ms: int, prefix: str, limit: int, dry_run: bool
    ) -> None:
        """Step after step, with time in between."""
        self.collect()
        asked = self._asked(kind, value_ms, [])
        start_ms = self.clock.now_ms() + low_ms
        due = DueRange(start_ms, start_ms + width_ms) if width_ms else DueRange()
        before = {
            p
            for p, m in self.messages.items()
            if due.start_ms <= m.due_ms < due.end_ms
            and m.cancelled_ns is None
            and m.schedule_key.startswith(prefix)
        }
        met: list[Position] = []
        change, start, first_lsn = self._change(asked), (0, 0, 0), self.topic.applied_lsn + 1
        matched = self.run(self.topic.schedule.count_matching(due, prefix))
        while start is not None:
            outcomes, start = self.run(
                change_next(
                    self.topic,
                    due,
                    prefix,
                    change,
                    start=start,
                    limit=limit,
                    moved_before_lsn=first_lsn,
                    dry_run=dry_run,
                )
            )
            assert len(outcomes) <= limit
            for outcome in outcomes:
                assert outcome.position in before, f"{outcome} does not match"
                met.append(outcome.position)
            self.take_in(asked, outcomes, dry_run)
            if start is not None:
                self.pause(3)
        assert len(met) == len(set(met)), "met twice"
        self._check_matched(before, set(met), matched)

    def _check_matched(self, before: set[Position], met: set[Position], matched: int) -> None:
        missed = before - met
        assert all(self.messages[p].due_ms <= self.highest_ms for p in missed), (
            f"{missed} match, and were not met"
        )
        assert len(met) <= matched <= len(before), (
            f"{matched} matched, {len(met)} were met, {len(before)} could"
        )

    def take_in(self, asked: Asked, outcomes: Sequence[Outcome], dry_run: bool) -> None:
        """Hold what became of messages against the model, and remember it."""
        end_ms = self.clock.now_ms()
        self.note_times()
        # Consumers may have got some while the call ran: before it was decided, or moved ones after it.
        arrived = self._arrived()
        was_sent = {(model.name, each.position) for model, _, each in arrived}
        confirmed_ns = self.clock.monotonic_ns()
        for outcome in outcomes:
            assert outcome.position is not None
            message = self.messages.get(outcome.position)
            self.seen[outcome.result.name] += 1
            if message is None:
                assert outcome.result is MISSING, outcome
                continue
            self._check_outcome(outcome, message, was_sent)
            if outcome.result is DONE and not dry_run:
                self._changed(asked, outcome, message, confirmed_ns, end_ms)
        for model, inbox, delivered in arrived:
            self.check_delivered(model, inbox, delivered)

    def _changed(
        self, asked: Asked, outcome: Outcome, message: ScheduledMessage, confirmed_ns: int, end_ms: int
    ) -> None:
        assert outcome.position is not None
        if asked.kind == "cancel":
            self._cancel(outcome.position, confirmed_ns)
            self.seen["cancelled"] += 1
            return
        due_ms = new_due_ms(asked, message, outcome, self.highest_ms, end_ms)
        if due_ms != message.due_ms:
            message.move(due_ms)
            self.seen["moved"] += 1
        self.note_times()

    def _cancel(self, position: Position, confirmed_ns: int) -> None:
        cancel(self.messages[position], position, self.subscriptions, confirmed_ns)

    def _check_outcome(
        self, outcome: Outcome, message: ScheduledMessage, sent_now: set[tuple[str, Position]]
    ) -> None:
        position = outcome.position
        assert position is not None
        log = self.topic.log
        is_gone = position.ledger_id in log.under_way.going or log.entry_count(position.ledger_id) is None
        evidence = {m.name for m in self.subscriptions if self._may_have_been_sent(m, position, sent_now)}
        match outcome.result:
            case ChangeResult.DONE:
                assert message.due_ms and message.cancelled_ns is None, f"{outcome} of {message}"
                sent = {
                    m.name
                    for m in self.subscriptions
                    if m.honors_delay and position in m.entries and m.entries[position].sent_count
                }
                assert not sent or message.is_doubtful, f"done, and {sent} were sent {position}"
            case ChangeResult.ALREADY_DELIVERED:
                assert outcome.delivered_to, outcome
                assert set(outcome.delivered_to) <= evidence, f"{outcome}, not {evidence}"
            case ChangeResult.ALREADY_CANCELLED:
                assert message.cancelled_ns is not None, f"{outcome} of {message}"
            case ChangeResult.NOT_FOUND:
                assert is_gone or not message.due_ms, f"{outcome} of {message}"

    # -- time and the disk -----------------------------------------------------------------------------------------

    def step_clock(self, ms: int) -> None:
        self.note_times()
        self.leapt_from_ms = self.leapt_from_ms or self.clock.now_ms()
        self.clock.step(ms)

    def checkpoint(self) -> None:
        self.run(self.node.checkpoint())

    def restart(self, reconnect: bool) -> None:
        self.collect()
        self.run(self.node.stop())
        arrived = self._arrived()
        for model, inbox, delivered in arrived:
            self.check_delivered(model, inbox, delivered)
        report = verify_data_dir(
            self.node.vfs.crashed(self.node.vfs.op_count, CrashPolicy.KEEP_ALL), DATA_DIR
        )
        assert report.problems == [], report.problems
        self._next_life(
            Node(self.node.vfs, self.clock, schedule_config(), rng=self.node._rng), reconnect, cleanly=True
        )

    def crash(self, policy: CrashPolicy, seed: int, reconnect: bool) -> None:
        self.collect()
        self._next_life(self.node.crash(policy, random.Random(seed)), reconnect)

    def crash_while_changing(
        self, kind: str, value_ms: int, subset: int, wait_ms: float, policy: CrashPolicy, seed: int
    ) -> None:
        """Whatever was changed is either wholly so or not at all."""
        self.collect()
        chosen = [p for p in self._chosen(subset) if self.messages[p].due_ms]
        if not chosen:
            return
        asked = self._asked("cancel" if kind == "cancel" else "at", value_ms, chosen)
        task = self.loop.create_task(self.topic.schedule.change(chosen, self._change(asked), dry_run=False))
        self.run(asyncio.sleep(wait_ms / 1000))
        if task.done():
            self.take_in(asked, task.result(), False)
        arrived = self._arrived()
        node = self.node.crash(policy, random.Random(seed))
        task.cancel()
        is_done = task.done() and not task.cancelled()
        self._next_life(node, True, lambda: None if is_done else self._resolve(asked))
        for model, _, delivered in arrived:  # to consumers of the life before
            self._check_sent(model, delivered)
            model.entries[delivered.position].sent_count += 1

    def _resolve(self, asked: Asked) -> None:
        """After a crash: was it changed?"""
        times = self.run(self._times(asked.positions))
        changed, same = set(), set()
        for position in asked.positions:
            message, found = self.messages[position], times[position]
            before = message.due_ms if message.cancelled_ns is None else CANCELLED_MS
            if found == before or self.topic.log.entry_count(position.ledger_id) is None:
                entries = [model.entries.get(position) for model in self.subscriptions]
                was_delivered = any(entry is not None and entry.sent_count for entry in entries)
                if before != CANCELLED_MS and found != asked.value_ms and not was_delivered:
                    same.add(position)
                continue
            if asked.kind == "cancel":
                assert found == CANCELLED_MS
                self._cancel(position, self.clock.monotonic_ns())
            else:
                assert asked.value_ms <= found <= max(asked.value_ms, self.highest_ms + 1)
                message.move(found)
            changed.add(position)
        doubtful = {
            p for p in same if self.messages[p].due_ms <= self.highest_ms
        }  # perhaps delivered by then
        assert not changed or not same - doubtful, f"{changed} were changed, {same} were not"
        self.seen["resolved" if changed else "not resolved"] += 1

    def _next_life(self, node: Node, reconnect: bool, resolve: Any = None, *, cleanly: bool = False) -> None:
        assert self.node.failures == [], self.node.failures
        self.node = node
        disconnected, self.inboxes = self.inboxes, []
        self.note_times()
        self.run(self.open())
        now_ms = self.clock.now_ms()
        for model in self.subscriptions:
            # An index that stood later than the clock does comes back only with a checkpoint.
            for position, entry in model.open.items():
                is_early = self.messages[position].due_ms > now_ms
                self.messages[position].is_doubtful |= entry.sent_count > 0 and is_early
                entry.end_life(self.clock.monotonic_ns(), cleanly=cleanly)
            model.unknown_ms = max(model.unknown_ms, self.highest_ms)
        if resolve is not None:
            resolve()
        for model, inbox in disconnected if reconnect else ():
            self.run(self._attach_to(model, inbox.permits))

    def finish(self) -> None:
        """In the end everything that is owed comes, in this life and in the next."""
        for model in self.subscriptions:
            if model.paused_ns is not None:
                self._set_paused(model, False)
        self.pause(MARGIN_MS)
        self.note_times()
        self.clock.step(max(0, self.highest_ms - self.clock.now_ms()) + 40 * HOUR_MS)
        self.pause(5 * MARGIN_MS)
        self.restart(reconnect=False)
        for model in self.subscriptions:
            self.run(self._attach_to(model, 1000))
        self.pause(5 * MARGIN_MS)
        for model in self.subscriptions:
            rest = [entry.message for entry in model.open.values() if entry.holder is None]
            lost = [each for each in rest if not (each.may_have_expired or each.may_have_expired_before)]
            assert not lost, f"P3: {lost} never came to {model}"
        assert self.loop.unhandled == [], self.loop.unhandled

    def close(self) -> None:
        self.node.abandon()
        self.loop.cancel_leftovers()
        self.loop.close()


async def _detach(inbox: Inbox) -> None:
    inbox.detach()
