"""One subscription: what it is owed and by which ways it gets it, who holds what, and what of that is durable.

Two kinds of state, never mixed. *Durable* state (cursor, attempts, what waits for redelivery) changes only in
`apply_*`, which the journal calls in lsn order, today and in a recovery: no clock, no setting and no lease has a
part in it. *Volatile* state (consumers, leases, queues, read position, the effective policy) changes on the loop and is
lost in a crash, after which every unsettled entry is owed again.

Who is attached is the affair of `consumers`, what is decided about entries that of `decisions`; what consumers ask
for, and how they are answered, stands above all this, in `requests`.

Invariants:
  SUBSCRIPTION-1  Without consumers there is no chunk and no reader, only the cursor and the counts; and a dispatcher
      for as long as there are leases that Receive took.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from broker.delayed.due_rows import DueRows
from broker.model import Entries, Position, UInt32Column, count_entries, members, merge_entries
from broker.observe.metrics import SubscriptionCounters
from broker.policy import effective
from broker.runtime.signal import Signal
from broker.storage.alive import Absence
from broker.storage.manifest import CursorImage, SubscriptionImage, encode_cursor
from broker.storage.records import (
    GivenBack,
    ReturnReason,
    Seeked,
    Settled,
    SettleReason,
    SubscriptionChanged,
)
from broker.subscriptions.attempts import Attempts
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.consumers import Consumers
from broker.subscriptions.cursor import Cursor
from broker.subscriptions.decisions import Decisions
from broker.subscriptions.entry_states import IN_COLUMNS, EntryStates, State
from broker.subscriptions.entry_times import TimesCapture
from broker.subscriptions.pacing import Pacing
from broker.subscriptions.reader import Reader
from broker.subscriptions.reasons import MessageLogs, Reasons
from broker.subscriptions.replay import ReplayQueue
from broker.subscriptions.services import SubscriptionLog, SubscriptionServices
from broker.subscriptions.types import SubscriptionType

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CursorCapture:
    """One subscription at one moment, for a checkpoint: taken on the loop, its bytes are made in the file thread."""

    others: CursorImage  # but for what waits, which is much and in no order yet
    waiting: TimesCapture

    def image(self) -> CursorImage:
        """The content of the cursor's file. Takes a while if much waits; for any thread."""
        return replace(self.others, waiting=self.waiting.by_ledger())

    def encode(self) -> bytes:
        """The cursor's file."""
        return encode_cursor(self.image())


class Subscription:
    """See the module's description."""

    def __init__(
        self,
        topic_id: int,
        image: SubscriptionImage,
        cursor: CursorImage | None,
        *,
        log: SubscriptionLog,
        services: SubscriptionServices,
    ) -> None:
        self.topic_id = topic_id
        self.topic_name = services.topic_name
        self.image = image
        self.type = SubscriptionType(image.type)
        self.policy = effective(image.policy, services.defaults)
        """In force; every field set but the dead-letter topic."""
        self.honors_delay = self.type.honors_delay(self.policy.honor_delay)
        self.limits = services.limits
        self.log = log
        self.clock = services.clock
        self.counters = SubscriptionCounters()
        self._services = services
        self.states = EntryStates(
            Cursor(image.start, max(image.mark, image.start), cursor.settled if cursor else None),
            cursor.waiting if cursor else None,
            self._lease_ended,
        )
        # durable
        self.attempts = Attempts(cursor.attempts if cursor else None)
        self.reasons = Reasons(services.reasons_memory, cursor.reasons if cursor else None)
        self.dead_letters: Entries = cursor.dead_letters if cursor else {}
        """Entries of the dead-letter topic that were given up here and may still be held."""
        self.cursor_file = image.cursor_file
        self.changed = False  # since the cursor's file was written
        # volatile
        self.work = Signal()
        self.pacing = Pacing()
        self.decisions = Decisions(
            topic_id,
            image.subscription_id,
            self.states,
            self.attempts,
            self.counters,
            self.work,
            services,
            by_key=self.type.by_key,
            policy=self.policy,
        )
        self.consumers = Consumers(
            self.states, self.decisions, self.counters, self.work, self.clock, by_key=self.type.by_key
        )
        self.logs = MessageLogs(services.topic_name, image.name, self.clock)
        self.absences: tuple[Absence, ...] = ()
        """Spans of time: entries that came due in them are held back until it is known what becomes of them."""
        self.replay = ReplayQueue(services.limits.replay_entries_max)
        self.reader = Reader(log, honors_delay=self.honors_delay)
        self.frontier_ms = 0
        """Time of the index's frontier, while there are consumers: what is due later comes in chunks."""
        self.unknown_through_ms = 0
        """Messages due by then may have been sent by the process before, or before a seek: a cancel of them is answered
        "already delivered"."""
        self.deleted = False
        self.decided: SubscriptionChanged | None = None  # the last change that was submitted, applied or not

    # -- facts -----------------------------------------------------------------------------------------------

    @property
    def subscription_id(self) -> int:
        return self.image.subscription_id

    @property
    def name(self) -> str:
        return self.image.name

    @property
    def cursor(self) -> Cursor:
        """Record of what is settled."""
        return self.states.cursor

    @property
    def paused(self) -> bool:
        """Return whether nothing is delivered until it is resumed."""
        return self.image.paused

    def start(self, unknown_through_ms: int) -> None:
        """Called once, before anything is delivered. `unknown_through_ms`: see there."""
        self.counters.clear()  # what was replayed was counted by the process before
        self.states.redelivery.queue_owed()
        self.note_unknown_through(unknown_through_ms)

    def note_unknown_through(self, unknown_through_ms: int) -> None:
        """The broker has just started, the clock was set back, or it was sought."""
        self.unknown_through_ms = unknown_through_ms

    def unsettled_count(self) -> int:
        """Messages that are owed: stored since the start, not settled, due or not."""
        return self.log.count_from(self.cursor.mark) - self.cursor.settled_beyond_mark()

    def waits_again(self, position: Position) -> bool:
        """Return whether an entry that is queued waits for a time that has not come."""
        self.states.redelivery.find_all_due(self.clock.now_ms())
        return position.entry_id not in self.states.redelivery.ready.get(position.ledger_id, ())

    # -- durable state: called by the journal, in lsn order --------------------------------------------------

    def apply(self, record: Settled | GivenBack | Seeked | SubscriptionChanged) -> None:
        """Change durable state as a record says."""
        match record:
            case Settled():
                self.apply_settled(record)
            case GivenBack():
                self.apply_given_back(record)
            case Seeked():
                self.apply_seeked(record)
            case SubscriptionChanged():
                self.apply_changed(record)

    def apply_settled(self, record: Settled) -> None:
        """Entries are done."""
        if self.states.among(record.entries, State.RETURNING):
            self.work.set()  # what waits for them to come back, in order, waits no more
        fresh = self.states.settled(record.entries, self.log)
        self.attempts.forget(record.entries)
        self.reasons.forget(record.entries)
        self.changed = True
        if record.reason is not SettleReason.CANCELLED:  # which the topic counts, once for all
            self.counters.note_settled(record.reason.name.lower(), count_entries(fresh))

    def apply_given_back(self, record: GivenBack) -> None:
        """Entries were sent and come back, not before a time."""
        owed = self.states.returned(record.not_before_ms, record.entries)
        if record.reason is not ReturnReason.RELEASED:
            self.attempts.add(owed)
        if record.text:
            self.reasons.note(owed, record.text)
        self.changed = True
        self.work.set()

    def apply_dead_letters(self, entries: Entries) -> None:
        """Note the entries of the dead-letter topic that hold what was given up here."""
        merge_entries(self.dead_letters, entries)
        self.changed = True

    def apply_not_for(self, entries: Entries) -> None:
        """Entries were stored for another subscription alone."""
        self.states.settled(entries, self.log)
        self.changed = True

    def apply_changed(self, record: SubscriptionChanged) -> None:
        """Other settings hold, or it is paused or not."""
        self.image = replace(self.image, policy=record.policy, paused=record.paused)
        # Follows from settings: volatile, never captured, and no durable state may depend on it.
        self.policy = self.decisions.policy = effective(record.policy, self._services.defaults)
        self.consumers.pause(paused=record.paused)
        self.pacing.forget()
        honors_delay = self.type.honors_delay(self.policy.honor_delay)
        if self.honors_delay != honors_delay:
            self.honors_delay = honors_delay
            self.reader.honors_delay = self.honors_delay
            self.states.park_cleared()
            self._end_streams()
        self.work.set()

    def apply_seeked(self, record: Seeked) -> None:
        """Begin elsewhere: what was settled, counted and put off is forgotten, and what is out is nobody's."""
        self.image = replace(self.image, start=record.start, mark=record.start)
        self.states.sought(record.start)
        self.attempts.clear()
        self.reasons.clear()
        self.changed = True
        self._end_streams()
        self.work.set()

    def apply_moved(self, entries: Entries) -> None:
        """Entries are due at another time: the index brings them, whatever they waited for until now."""
        if self.honors_delay:
            self.states.moved(entries)

    def apply_dropped(self, ledger_ids: Iterable[int]) -> None:
        """Ledgers are gone; every entry of them was settled here, or lay before the start."""
        self.changed |= self.states.dropped(ledger_ids, self.log)

    def capture(self, lsn: int) -> CursorCapture | None:
        """Name the cursor's file by an lsn and return its content; None if it is as it was written. One step."""
        if not self.changed:
            return None
        self.cursor_file = f"{self.subscription_id}.{lsn:x}"
        self.changed = False
        return self.capture_cursor()

    def capture_cursor(self) -> CursorCapture:
        """Capture the cursor for a checkpoint: copies, or objects that never change, so that the loop may go on."""
        self.dead_letters = self._services.dead_letter_sink.letters_held(self.topic_id, self.subscription_id)
        others = CursorImage(
            topic_id=self.topic_id,
            subscription_id=self.subscription_id,
            settled={ledger_id: bitmap.copy() for ledger_id, bitmap in self.cursor.settled.items()},
            attempts={
                ledger_id: [d.copy() for d in digits] for ledger_id, digits in self.attempts.digits.items()
            },
            waiting={},
            dead_letters={ledger_id: bitmap.copy() for ledger_id, bitmap in self.dead_letters.items()},
            reasons=self.reasons.texts.copy(),
        )
        return CursorCapture(others, self.states.redelivery.capture())

    # -- consumers -------------------------------------------------------------------------------------------

    def attach(self, consumer: Consumer, frontier_ms: int) -> None:
        """Take in a consumer; the first one starts catch-up."""
        self.consumers.check_room(self.name, self.type, self.limits.consumers_max)
        if not self.consumers:
            self.begin_catchup(frontier_ms)
        self.consumers.add(consumer, paused=self.paused)
        self.work.set()

    def detach(self, consumer: Consumer, *, keep_leases: bool = False) -> None:
        """Let a consumer go; unless it keeps its leases, what it holds goes to others."""
        self.consumers.remove(consumer)
        if not self.deleted:
            self.consumers.give_back(consumer, keep_leases=keep_leases)
        if not self.consumers:
            self.replay.clear()
            self.states.park_cleared()
            self.reader.begin(self.cursor.mark, self.log.end, 0)  # it keeps nothing; the next one begins anew
        self.work.set()

    def begin_catchup(self, frontier_ms: int) -> None:
        """From here on, what is due by now is found by position. One step, without await."""
        self.replay.clear()
        self.states.park_cleared()
        self.frontier_ms = frontier_ms
        self.reader.begin(self.cursor.mark, self.log.end, frontier_ms)
        self.work.set()

    def on_due(self, chunk: DueRows, frontier_ms: int) -> None:
        """Take a reference to a chunk. On overflow the queue is emptied and catch-up finds what was in it."""
        if not self.honors_delay or not self.consumers:
            return
        self.frontier_ms = frontier_ms
        if not self.replay.push(chunk):
            self.begin_catchup(frontier_ms)
        self.work.set()

    def _lease_ended(self, consumer_id: str) -> None:
        self.consumers.lease_ended(consumer_id)
        if self.pacing.waits_for_leases:
            self.work.set()

    def _end_streams(self) -> None:
        """Let all consumers go; who comes next is the first one, and starts catch-up."""
        self.consumers.end_all()
        self.replay.clear()
        self.reader.begin(self.cursor.mark, self.log.end, 0)

    # -- used by the dispatcher ------------------------------------------------------------------------------

    def not_to_send(
        self, ledger_id: int, entry_ids: UInt32Column, states: Iterable[State] = IN_COLUMNS
    ) -> Mask:
        """For each entry, whether it is not to be sent now: in one of the states, or about to be cancelled or moved."""
        refused = self.settled_or_in(ledger_id, entry_ids, states)
        changing = self.log.under_way.changing.get(ledger_id)
        if (
            changing is not None and self.honors_delay
        ):  # else it reads each once, and would not come back to it
            refused |= members(entry_ids, changing)
        return refused

    def settled_or_in(
        self, ledger_id: int, entry_ids: UInt32Column, states: Iterable[State] = IN_COLUMNS
    ) -> Mask:
        """For each entry, whether it is settled, or in one of the states."""
        if self.log.entry_count(ledger_id) is None:
            return np.ones(len(entry_ids), dtype=np.bool_)  # dropped, and therefore settled
        return self.states.mask(ledger_id, entry_ids, states)
