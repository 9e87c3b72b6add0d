"""The ledgers of one topic as durable state: entries, amendments, what is known of each, and where the log ends.

`TopicLog` holds the ledgers and reads them; this alone changes it, as records say. What a submitted record promises
(its ids, its place in a ledger) is reserved at once in `end`, so that the next record is planned after it.

Invariants:
  LEDGERS-1  `end` is the log's end plus every batch submitted and not applied yet, in submission order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from broker.model import Position, count_entries
from broker.observe.logs import get_logger
from broker.observe.metrics import TopicCounters
from broker.storage.amendments import NONE, AmendmentsImage, encode_amendments
from broker.storage.blocks import LedgerCapture
from broker.storage.changes import Cancelled, Moved
from broker.storage.compacted import LedgersCompacted
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.log import DroppedLedger, TopicLog
from broker.storage.manifest import LedgerImage, TopicImage
from broker.storage.records import LedgersDropped, Produced, Record, Replaced, Transferred
from broker.storage.sparse import absent_of
from broker.subscriptions.cursor import Cursor
from broker.topics.component import Capture, NewFile, not_applied
from broker.topics.generations import LedgerNow, capture_of, facts_after, refusal_of
from broker.topics.plan import LedgerEnd

log = get_logger(__name__)


class Readers(Protocol):
    """The subscriptions of the topic, as far as they keep ledgers."""

    def cursors(self) -> Sequence[Cursor]: ...

    @property
    def had_any(self) -> bool:
        """Return whether there ever was a subscription."""


class Ledgers:
    """See the module's description."""

    def __init__(
        self,
        image: TopicImage,
        topic_log: TopicLog,
        readers: Readers,
        *,
        appended: Callable[[int], None],  # so many bytes
        remove_files: Callable[[DroppedLedger], Awaitable[None]],
    ) -> None:
        """`topic_log` is as the manifest says."""
        self.log = topic_log
        self.facts = {ledger.ledger_id: ledger.facts for ledger in image.ledgers}
        self.gone: dict[int, int] = dict(image.gone_ledgers)
        """See `TopicImage.gone_ledgers`."""
        self.counters = TopicCounters()
        self._topic_id = image.topic_id
        self._readers = readers
        self._appended = appended
        self._remove_files = remove_files
        self._amendments_files = {
            ledger.ledger_id: ledger.amendments_file for ledger in image.ledgers if ledger.amendments_file
        }
        self.end = self._applied_end()

    def start(self) -> None:
        """Recovery is over: nothing is on its way, and what was replayed was counted by the process before."""
        self.end = self._applied_end()
        self.counters = TopicCounters()

    # -- what is on its way ----------------------------------------------------------------------------------

    def reserve(self, record: Produced) -> None:
        """A batch was submitted."""
        begins = record.ledger_id != self.end.ledger_id
        self.end = LedgerEnd(
            ledger_id=record.ledger_id,
            entry_count=record.first_entry_id + len(record.times),
            data_bytes=(0 if begins else self.end.data_bytes) + len(record.frames),
            first_publish_ms=record.publish_time_ms if begins else self.end.first_publish_ms,
        )

    def reserve_drop(self, ledger_ids: Sequence[int]) -> None:
        """A record that lets ledgers go was submitted; the last one only while `is_idle`."""
        self.log.under_way.going.update(ledger_ids)
        if self.end.ledger_id in ledger_ids:
            self.end = replace(self.end, is_sealed=True)

    @property
    def is_idle(self) -> bool:
        """Return whether every batch that was accepted is stored."""
        return (self.end.ledger_id, self.end.entry_count) == self.log.end

    def latest_position(self) -> Position:
        """The position after every message submitted so far."""
        return Position(self.end.ledger_id, self.end.entry_count)

    def _applied_end(self) -> LedgerEnd:
        last = self.log.last
        if last is None or last.sealed:
            return LedgerEnd(*self.log.end, 0, 0, is_sealed=True)
        ledger_id = last.name.ledger_id
        return LedgerEnd(ledger_id, last.entry_count, last.data_bytes, self.facts[ledger_id].first_publish_ms)

    # -- durable state: called by the topic, in lsn order ----------------------------------------------------

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`."""
        match record:
            case Produced():
                self._append(record)
            case Replaced():
                self._append(record.produced)
                self._cancel(record.cancelled)
            case Transferred():
                if record.produced.topic_id == self._topic_id:
                    self._append(record.produced)
            case Cancelled():
                self._cancel(record)
            case Moved():
                self._move(record, lsn)
            case LedgersDropped():
                self._drop(record)
            case LedgersCompacted():
                self._swap(record)
            case _:
                not_applied(self, record)

    def _append(self, record: Produced) -> None:
        self.log.append(record)
        facts = self.facts.get(record.ledger_id)
        batch = record.publish_time_ms, record.due.last_ms, record.rows
        self.facts[record.ledger_id] = facts.after(*batch) if facts else LedgerFacts.first(*batch)
        byte_count, counters = len(record.frames), self.counters
        counters.produced_messages += len(record.times)
        counters.produced_bytes += byte_count
        counters.produced_batches += 1
        self._appended(byte_count)

    def _cancel(self, record: Cancelled) -> None:
        entries = record.entries
        self.log.cancel(entries)
        self.log.under_way.release(entries)
        self.counters.cancelled_messages += count_entries(entries)

    def _move(self, record: Moved, lsn: int) -> None:
        """The entries are due at another time; those of a ledger that is gone are nobody's."""
        for ledger_id, changed in record.ledgers.items():
            facts = self.facts.get(ledger_id)
            if facts is not None and changed.new_ms is not None:
                self.log.amendments.move(ledger_id, changed.entry_ids, changed.new_ms, lsn)
                self.facts[ledger_id] = facts.moved(changed.old_ms, changed.new_ms)
                self.counters.moved_messages += len(changed.entry_ids)
        self.log.under_way.release(record.entries)

    def _drop(self, record: LedgersDropped) -> None:
        """Forget ledgers, but for those that a record before this one made owed again: a seek, a new subscription."""
        cursors = self._readers.cursors()
        self.log.under_way.going.difference_update(record.ledger_ids)
        for ledger_id in record.ledger_ids:
            count = self.log.entry_count(ledger_id)
            if count is None or not all(cursor.has_settled(ledger_id, count) for cursor in cursors):
                continue
            self.log.drop(ledger_id, self._amendments_files.pop(ledger_id, ""))
            last_due_ms = self.facts.pop(ledger_id).last_due_ms
            if last_due_ms > record.came_due_ms:
                self.gone[ledger_id] = last_due_ms

    def _swap(self, record: LedgersCompacted) -> None:
        """Put the generations in place, but for those that may not take it; or leave out what they lack."""
        for rewritten in record.ledgers:
            ledger_id = rewritten.ledger_id
            now = self.now(ledger_id, record.amended_lsn)
            if refusal_of(now, rewritten, files_follow=record.files_follow) is not None:
                continue
            assert now.ledger is not None
            amendments = now.amendments.leave_out(absent_of(rewritten.present, now.ledger.entry_count))
            if record.files_follow:
                self.log.amendments.put(ledger_id, amendments)
            else:
                self.log.swap(now.ledger.replaced_by(capture_of(now.ledger, rewritten)), amendments)
            self.facts[ledger_id] = facts_after(
                self.facts[ledger_id], rewritten, now.amendments, record.amended_lsn
            )

    def put_generation(self, written: LedgerCapture) -> None:
        """Put files in place that lack what is cancelled for good: a node of a cluster does so by itself."""
        ledger = self.log.find(written.ledger_id)
        assert ledger is not None and written.generation > ledger.name.generation, "an older generation"
        self.log.swap(ledger.replaced_by(written), self.log.amendments[written.ledger_id])

    def put_packed(self, packed: LedgerCapture) -> None:
        """Put the packed rows of a ledger in the place of its rows: each broker does so by itself."""
        ledger = self.log.find(packed.ledger_id)
        assert ledger is not None and ledger.name.generation == packed.generation, "another generation"
        self.log.put_files(ledger.replaced_by(packed))

    def now(self, ledger_id: int, amended_lsn: int) -> LedgerNow:
        """A ledger as it is now, for `refusal_of`."""
        return LedgerNow(
            ledger=self.log.find(ledger_id),
            amendments=self.log.amendments.get(ledger_id, NONE),
            cursors=tuple(self._readers.cursors()),
            amended_lsn=amended_lsn,
            had_subscription=self._readers.had_any,
        )

    # -- checkpoints -----------------------------------------------------------------------------------------

    def capture(self, image: TopicImage) -> Capture:
        """See `Component`; the index has named its part."""
        changes = self.log.take_changes()
        files, replaced = [], []
        for ledger_id in sorted(changes.amended):
            name = f"{ledger_id}.{image.applied_lsn:x}.amend"
            before, self._amendments_files[ledger_id] = self._amendments_files.get(ledger_id, name), name
            if before != name:
                replaced.append(f"ledgers/{before}")
            amendments = AmendmentsImage(self._topic_id, ledger_id, self.log.amendments[ledger_id])
            files.append(NewFile(f"ledgers/{name}", partial(encode_amendments, amendments)))
        # Of those whose last time has come no bucket holds rows that are not due.
        self.gone = {gone_id: due_ms for gone_id, due_ms in self.gone.items() if due_ms > image.frontier_ms}
        captures = [(ledger, ledger.capture()) for ledger in self.log]
        return Capture(
            replace(
                image,
                ledgers=tuple(self._image(capture) for _, capture in captures),
                log_end=self.log.gone_end,
                gone_ledgers=tuple(sorted(self.gone.items())),
            ),
            ledgers=tuple(captured for captured in captures if captured[1].ledger_id in changes.dirty),
            files=tuple(files),
            replaced=tuple(replaced),
            durable=partial(self.durable, changes.dropped),
        )

    def _image(self, capture: LedgerCapture) -> LedgerImage:
        ledger_id = capture.ledger_id
        return LedgerImage(capture, self.facts[ledger_id], self._amendments_files.get(ledger_id, ""))

    async def durable(self, dropped: Sequence[DroppedLedger]) -> None:
        """A manifest is durable that does not name these: remove their files."""
        for index, dropped_ledger in enumerate(dropped):
            if self.log.keeps_files:
                self.log.take_back(dropped[index:])  # the next checkpoint tries again
                return
            try:
                await self._remove_files(dropped_ledger)
            except OSError as error:
                self.log.take_back([dropped_ledger])
                log.warning(
                    "A ledger's files could not be removed",
                    ledger_id=dropped_ledger.ledger.name.ledger_id,
                    error=str(error),
                )
