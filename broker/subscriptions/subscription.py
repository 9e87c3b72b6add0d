"""One subscription: what it is owed, who holds what, and what its consumers say of it.

Two kinds of state, never mixed. *Durable* state (cursor, attempts, what waits for redelivery) changes only in
`apply_*`, which the journal calls in lsn order, today and in a recovery: no clock, no configuration, no lease is
looked at there. *Volatile* state (consumers, leases, queues, read position) changes on the loop and is lost in a
crash, after which every unsettled entry is owed again.

Invariants:
  D1  An entry named by a record that is not durable yet (`promised`) is neither handed out nor promised again.
  D2  An entry is in at most one of: leased, promised, queued for redelivery.
  D3  Without consumers there is no dispatcher, no chunk and no reader: only the cursor and the counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from broker.delayed.tracker import DueChunk
from broker.errors import LimitReached, Refused, Unavailable
from broker.model import (
    Entries,
    Int64Column,
    Position,
    RowColumn,
    UInt32Column,
    bitmap_of,
    common_entries,
    count_entries,
    ids_of,
    members,
    merge_entries,
    remove_entries,
    without_entries,
)
from broker.observe.metrics import SubscriptionCounters
from broker.runtime.clock import Clock
from broker.storage.manifest import CursorImage, SubscriptionImage
from broker.storage.policy import SubscriptionPolicy
from broker.storage.records import GivenBack, Record, ReturnReason, Settled, SettleReason
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.cursor import Cursor
from broker.subscriptions.leases import Leases
from broker.subscriptions.reader import ReadableLog, Reader
from broker.subscriptions.redelivery import Attempts, RedeliveryQueue, Waiting
from broker.subscriptions.replay import ReplayQueue

Mask = npt.NDArray[np.bool_]

SHARED = 1
KEY_SHARED = 2
EXCLUSIVE = 3
FAILOVER = 4
TYPE_NAMES = {SHARED: "SHARED", KEY_SHARED: "KEY_SHARED", EXCLUSIVE: "EXCLUSIVE", FAILOVER: "FAILOVER"}


class SubscriptionLog(ReadableLog, Protocol):
    """What a subscription asks of its topic's log."""

    async def times_of(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
        """Effective times of some entries; 0 where the row is not DELAYED."""

    async def read(
        self, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
    ) -> tuple[Int64Column, RowColumn, list[bytes]]:
        """Effective times and rows of entries (ids rising), and the frames of as many as fit into `bytes_max`."""

    def count_from(self, position: Position) -> int:
        """How many entries there are at or after a position."""

    @property
    def frame_bytes_average(self) -> int:
        """Bytes of a typical frame, at least 1."""


@dataclass(frozen=True, slots=True)
class DeliveryLimits:
    """What bounds the work and the memory of one subscription."""

    batch_entries: int  # handed out in one step
    batch_bytes: int
    replay_entries_max: int
    consumers_max: int


class Failure(NamedTuple):
    """Why one id of a request was not taken: `reason` is NOT_FOUND or LEASE_LOST."""

    position: Position
    reason: str


class Subscription:
    """See the module's description."""

    def __init__(
        self,
        topic_id: int,
        image: SubscriptionImage,
        cursor: CursorImage | None,
        *,
        policy: SubscriptionPolicy,
        log: SubscriptionLog,
        limits: DeliveryLimits,
        clock: Clock,
        rng: random.Random,
        submit: Callable[[Record], asyncio.Future[None]],
    ) -> None:
        self.topic_id = topic_id
        self.image = image
        self.policy = policy  # in force, every field set
        self.limits = limits
        self.log = log
        self.clock = clock
        self.counters = SubscriptionCounters()
        self._rng = rng
        self._submit = submit
        # durable
        self.cursor = Cursor(image.start, max(image.mark, image.start), cursor.settled if cursor else None)
        self.attempts = Attempts(cursor.attempts if cursor else None)
        self.waiting = Waiting()
        for not_before_ms, ledger_id, bitmap in cursor.waiting if cursor else ():
            self.waiting.put(not_before_ms, {ledger_id: bitmap})
        self.cursor_file = image.cursor_file
        self.changed = False  # since the cursor's file was written
        # volatile
        self.consumers: list[Consumer] = []
        self.leases = Leases()
        self.promised: Entries = {}
        self.redelivery = RedeliveryQueue()
        self.replay = ReplayQueue(limits.replay_entries_max)
        self.reader = Reader(log, honors_delay=self.honors_delay)
        self.work = asyncio.Event()
        self.deleted = False
        self.returning = 0
        """Records on their way to the disk that give entries back: what they name lies before what was not sent yet."""

    # -- facts -----------------------------------------------------------------------------------------------

    @property
    def subscription_id(self) -> int:
        return self.image.subscription_id

    @property
    def name(self) -> str:
        return self.image.name

    @property
    def type(self) -> int:
        return self.image.type

    @property
    def honors_delay(self) -> bool:
        """Whether no message is sent before its time."""
        return self.type in (SHARED, KEY_SHARED) or bool(self.policy.honor_delay)

    @property
    def is_attached(self) -> bool:
        """Whether there is anybody to deliver to; only then chunks are wanted."""
        return bool(self.consumers)

    def start(self) -> None:
        """Called once, after recovery and before anything is delivered."""
        self.counters = SubscriptionCounters()  # what was replayed was counted by the process before
        # What came back more than once waits for its last time. Replay has queued the first: in the process
        # before, the entry was handed out between the two, and that is not recorded.
        self.redelivery.clear()
        for not_before_ms, ledger_id, bitmap in self.waiting.items():
            self.redelivery.push(not_before_ms, {ledger_id: bitmap})

    def unsettled_count(self) -> int:
        """Messages that are owed: stored since the start, not settled, due or not."""
        return self.log.count_from(self.cursor.mark) - self.cursor.settled_beyond_mark()

    # -- durable state: called by the journal, in lsn order --------------------------------------------------

    def apply_settled(self, record: Settled) -> None:
        """Entries are done."""
        fresh = self.cursor.settle(record.entries, self.log)
        self.attempts.forget(record.entries)
        self.waiting.forget(record.entries)
        self.changed = True
        # Volatile state follows: what is settled is neither held nor queued, whoever settled it.
        self.leases.settle(record.entries)
        self.redelivery.forget(record.entries)
        remove_entries(self.promised, record.entries)
        if record.reason is SettleReason.ACKED:
            self.counters.acked_messages += count_entries(fresh)
        else:
            self.counters.expired_messages += count_entries(fresh)

    def apply_given_back(self, record: GivenBack) -> None:
        """Entries were sent and come back, not before a time."""
        self.returning = max(0, self.returning - 1)  # a recovery replays what it did not submit
        owed = without_entries(record.entries, self.cursor.settled_part(record.entries))
        self.attempts.add(owed)
        self.waiting.put(record.not_before_ms, owed)
        self.changed = True
        self.redelivery.push(record.not_before_ms, owed)
        remove_entries(self.promised, record.entries)
        self.work.set()

    def cursor_image(self) -> CursorImage:
        """What a checkpoint writes; copies, so that the loop may go on."""
        return CursorImage(
            topic_id=self.topic_id,
            subscription_id=self.subscription_id,
            settled={ledger_id: bitmap.copy() for ledger_id, bitmap in self.cursor.settled.items()},
            attempts={
                ledger_id: [d.copy() for d in digits] for ledger_id, digits in self.attempts.digits.items()
            },
            waiting=tuple(self.waiting.items()),
        )

    # -- consumers -------------------------------------------------------------------------------------------

    def attach(self, consumer: Consumer, catchup_ms: int) -> None:
        """Take in a consumer; the first one starts catch-up. `catchup_ms` is the time of the index's frontier."""
        if self.type == EXCLUSIVE and self.consumers:
            raise Refused(
                f"Subscription {self.name!r} is EXCLUSIVE and has a consumer",
                reason="CONSUMER_ALREADY_CONNECTED",
            )
        if len(self.consumers) >= self.limits.consumers_max:
            raise LimitReached(
                f"Subscription {self.name!r} has {len(self.consumers)} consumers", reason="TOO_MANY_CONSUMERS"
            )
        if not self.consumers:
            self.begin_catchup(catchup_ms)
        self.consumers.append(consumer)
        self.work.set()

    def detach(self, consumer: Consumer, *, keep_leases: bool = False) -> None:
        """Let a consumer go; unless it keeps its leases, what it holds goes to others, counted as one attempt."""
        self.consumers.remove(consumer)
        held = self.leases.held(consumer.consumer_id)
        if held and not keep_leases and not self.deleted:
            self._give_back_unasked(consumer.consumer_id, held, ReturnReason.CONSUMER_LOST)
        if not self.consumers:
            self.replay.clear()
        self.work.set()

    def begin_catchup(self, catchup_ms: int) -> None:
        """From here on, what is due by now is found by position. One step, without await."""
        self.replay.clear()
        self.reader.begin(self.cursor.mark, self.log.end, catchup_ms)
        self.work.set()

    def on_due(self, chunk: DueChunk, catchup_ms: int) -> None:
        """Take a reference to a chunk. On overflow the queue is emptied and catch-up finds what was in it."""
        if not self.honors_delay or not self.consumers:
            return
        if not self.replay.push(chunk):
            self.begin_catchup(catchup_ms)
        self.work.set()

    # -- what consumers say ----------------------------------------------------------------------------------

    async def acknowledge(self, entries: Entries) -> list[Failure]:
        """Settle entries; returns when that is durable. Failures name what can not have been sent here."""
        for consumer in self.consumers:
            consumer.starved = False
        entries, failures = self._there(entries)
        unknown = without_entries(entries, self._known(entries))
        if unknown:
            # Not out now, but perhaps before a restart or before its lease ended. Only what cannot have been sent
            # is refused: an acknowledgement that is lost would bring the message back.
            plausible = await self._plausible(unknown)
            refused = without_entries(unknown, plausible)
            failures += _failures(refused, "NOT_FOUND")
            entries = without_entries(entries, refused)
        fresh = without_entries(entries, self.cursor.settled_part(entries))
        if fresh:
            await self._settle(fresh, SettleReason.ACKED)
        return failures

    async def give_back(self, consumer_id: str, entries: Entries, redeliver_after_ms: int) -> list[Failure]:
        """Give back entries that this consumer holds; returns when that is durable."""
        held = self.leases.held_by(consumer_id, entries)
        failures = self._not_held(without_entries(entries, held))
        now_ms = self.clock.now_ms()
        waits = []
        for delay_ms, part in self._delays(held, redeliver_after_ms):
            waits.append(self._give_back(consumer_id, part, ReturnReason.NACKED, now_ms + delay_ms))
        for done in waits:
            await done
        return failures

    def extend(self, consumer_id: str, entries: Entries, lease_ms: int) -> list[Failure]:
        """Hold entries longer. Leases are not durable, so there is nothing to wait for."""
        held = self.leases.held_by(consumer_id, entries)
        if held:
            self.leases.extend(consumer_id, held, self.clock.monotonic_ns() + lease_ms * 1_000_000)
            self.work.set()
        return self._not_held(without_entries(entries, held))

    # -- used by the dispatcher ------------------------------------------------------------------------------

    def expire_leases(self) -> None:
        """Give back what is held beyond its deadline."""
        for consumer_id, entries in self.leases.expired(self.clock.monotonic_ns()):
            self.counters.lease_expired_messages += count_entries(entries)
            self._give_back_unasked(consumer_id, entries, ReturnReason.LEASE_EXPIRED)

    def expire_messages(self, entries: Entries) -> None:
        """Settle entries whose time to live has passed; nobody waits for it."""
        with contextlib.suppress(Unavailable):  # they expire again after the restart
            _forget_result(self._settle(entries, SettleReason.EXPIRED))

    def not_to_send(self, ledger_id: int, entry_ids: UInt32Column, *, also_queued: bool) -> Mask:
        """For each entry, whether it is settled, leased, promised or (`also_queued`) waiting for redelivery."""
        refused = np.zeros(len(entry_ids), dtype=np.bool_)
        if ledger_id <= self.cursor.mark.ledger_id:
            whole = ledger_id < self.cursor.mark.ledger_id
            refused |= whole or entry_ids < self.cursor.mark.entry_id
        sets = [self.cursor.settled, self.leases.leased, self.promised]
        if also_queued:
            sets.append(self.redelivery.queued)
        for entries in sets:
            bitmap = entries.get(ledger_id)
            if bitmap is not None:
                refused |= members(entry_ids, bitmap)
        return refused

    # -- decisions -------------------------------------------------------------------------------------------

    def _settle(self, entries: Entries, reason: SettleReason) -> asyncio.Future[None]:
        done = self._submit(Settled(self.topic_id, self.subscription_id, reason, entries))
        # From here on the entries are promised (D1); a crash before the record is durable takes the promise back,
        # and nobody was answered.
        self.leases.settle(entries)
        self.redelivery.forget(entries)
        merge_entries(self.promised, entries)
        return done

    def _give_back(
        self, consumer_id: str, entries: Entries, reason: ReturnReason, not_before_ms: int
    ) -> asyncio.Future[None]:
        self.leases.take_back(consumer_id, entries)
        self.counters.redelivered_messages += count_entries(entries)
        if reason is ReturnReason.NACKED:
            self.counters.nacked_messages += count_entries(entries)
        try:
            done = self._submit(
                GivenBack(self.topic_id, self.subscription_id, reason, not_before_ms, entries)
            )
        except Unavailable:
            # The broker writes no more. What came back may still be sent to others; the attempt is forgotten with
            # the process.
            self.redelivery.push(not_before_ms, entries)
            raise
        merge_entries(self.promised, entries)
        self.returning += 1
        return _forget_result(done)

    def _give_back_unasked(self, consumer_id: str, entries: Entries, reason: ReturnReason) -> None:
        """Give back at once what no consumer asked to give back; nobody waits for it."""
        with contextlib.suppress(Unavailable):
            self._give_back(consumer_id, entries, reason, 0)

    def _delays(self, held: Entries, redeliver_after_ms: int) -> Iterable[tuple[int, Entries]]:
        """How long each part waits: as asked, or the back-off for how often it was sent."""
        if not held:
            return
        if redeliver_after_ms:
            yield redeliver_after_ms, held
            return
        by_count: dict[int, Entries] = {}
        for ledger_id, bitmap in held.items():
            ids = ids_of(bitmap)
            counts = self.attempts.counts(ledger_id, ids)
            for count in {int(c) for c in set(counts.tolist())}:
                by_count.setdefault(count, {})[ledger_id] = bitmap_of(ids[counts == count])
        for count, part in sorted(by_count.items()):
            yield self._backoff_ms(count), part

    def _backoff_ms(self, sent_before: int) -> int:
        policy = self.policy
        assert policy.initial_backoff_ms is not None and policy.max_backoff_ms is not None
        assert policy.backoff_multiplier is not None
        growth = min(policy.backoff_multiplier ** min(sent_before, 64), 2.0**40)
        delay_ms = min(policy.initial_backoff_ms * growth, policy.max_backoff_ms)
        # Jitter takes off at most one half, so that what failed together does not come back together.
        return int(delay_ms * (1 - self._rng.random() / 2))

    def _known(self, entries: Entries) -> Entries:
        """The part of a set of which it is certain that it was sent here."""
        known = common_entries(entries, self.leases.leased)
        merge_entries(known, common_entries(entries, self.redelivery.queued))
        merge_entries(known, common_entries(entries, self.promised))
        merge_entries(known, self.cursor.settled_part(self._stored(entries)))
        return known

    def _stored(self, entries: Entries) -> Entries:
        """The part of a set that the log has, from the start of this subscription on."""
        stored: Entries = {}
        for ledger_id, bitmap in entries.items():
            count = self.log.entry_count(ledger_id)
            if count is None or ledger_id < self.image.start.ledger_id:
                continue
            existing = bitmap.copy()
            existing.remove_range(count, 1 << 32)
            if ledger_id == self.image.start.ledger_id:
                existing.remove_range(0, self.image.start.entry_id)
            if existing:
                stored[ledger_id] = existing
        return stored

    async def _plausible(self, entries: Entries) -> Entries:
        """The part of a set that exists, lies after the start, and is due if this subscription honours delays."""
        plausible: Entries = {}
        for ledger_id, existing in self._stored(entries).items():
            due = existing
            if self.honors_delay:
                ids = ids_of(existing)
                times = await self.log.times_of(ledger_id, ids)
                due = bitmap_of(ids[times <= self.clock.now_ms()])
            if due:
                plausible[ledger_id] = due
        return plausible

    def _not_held(self, entries: Entries) -> list[Failure]:
        if not entries:
            return []
        entries, failures = self._there(entries)
        lost = self._known(entries)
        failures += _failures(lost, "LEASE_LOST")
        return failures + _failures(without_entries(entries, lost), "NOT_FOUND")

    def _there(self, entries: Entries) -> tuple[Entries, list[Failure]]:
        """The part of a set in ledgers that there are, and failures of the rest: what is known of none costs little."""
        there = {i: bitmap for i, bitmap in entries.items() if self.log.entry_count(i) is not None}
        if len(there) == len(entries):
            return entries, []
        return there, _failures({i: b for i, b in entries.items() if i not in there}, "NOT_FOUND")


def _failures(entries: Entries, reason: str) -> list[Failure]:
    return [
        Failure(Position(ledger_id, entry_id), reason)
        for ledger_id, bitmap in sorted(entries.items())
        for entry_id in bitmap
    ]


def _forget_result(done: asyncio.Future[None]) -> asyncio.Future[None]:
    """Nobody may be waiting; a failed journal reports itself."""
    done.add_done_callback(lambda future: future.cancelled() or future.exception())
    return done
