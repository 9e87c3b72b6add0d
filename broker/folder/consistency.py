"""Consistency of manifests, cursors and records, which `verify` checks besides the bytes themselves.

Pure: no file, no clock, no await. Everything here takes what the decoders gave and yields sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import assert_never

import google_crc32c
import numpy as np
from pyroaring import BitMap

from broker.model import START, Position
from broker.storage.amendments import Amendments
from broker.storage.blocks import find_bad_offsets, find_bad_times
from broker.storage.changes import Cancelled, Moved
from broker.storage.compacted import LedgersCompacted
from broker.storage.manifest import BrokerImage, CursorImage, LedgerImage, SubscriptionImage, TopicImage
from broker.storage.records import (
    BulkStepped,
    GivenBack,
    LedgersDropped,
    Produced,
    Record,
    Recurred,
    Replaced,
    Seeked,
    Settled,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
    TopicCreated,
    TopicDeleted,
    TopicPolicyChanged,
    Transferred,
)


def find_cursor_problems(
    image: TopicImage, subscription: SubscriptionImage, cursor: CursorImage
) -> Iterator[str]:
    """Report what does not fit between a cursor and the log of its topic. Pure."""
    counts = {ledger.ledger_id: ledger.capture.entry_count for ledger in image.ledgers}
    end = _end_of(image)
    mark = subscription.mark
    for what, position in (("start", subscription.start), ("mark", mark)):
        if position > end or position.entry_id > counts.get(position.ledger_id, position.entry_id):
            yield f"The {what} {tuple(position)} lies beyond the log, which ends at {tuple(end)}"
    if mark < subscription.start:
        yield f"The mark {tuple(mark)} lies before the start {tuple(subscription.start)}"
    if mark.entry_id in cursor.settled.get(mark.ledger_id, ()):
        yield f"The entry at the mark {tuple(mark)} is settled, so the mark lies too low"
    sets = [("settled", ledger_id, bitmap) for ledger_id, bitmap in cursor.settled.items()]
    sets += [
        ("counted", ledger_id, digit) for ledger_id, digits in cursor.attempts.items() for digit in digits
    ]
    sets += [("waiting", ledger_id, due.entries) for ledger_id, due in cursor.waiting.items()]
    sets += [("nacked", ledger_id, BitMap([entry_id])) for ledger_id, entry_id in cursor.reasons]
    for what, ledger_id, bitmap in sets:
        if not bitmap:
            continue
        count = counts.get(ledger_id)
        if count is None:
            yield f"Entries of ledger {ledger_id} are {what}, which is not there"
        elif bitmap.max() >= count:
            yield f"Entry {bitmap.max()} of ledger {ledger_id} is {what}, which holds {count} entries"
        if (ledger_id, bitmap.min()) < mark:
            yield f"Entry {bitmap.min()} of ledger {ledger_id} is {what}, but lies below the mark {tuple(mark)}"
        if what != "settled" and not bitmap.isdisjoint(cursor.settled.get(ledger_id, BitMap())):
            yield f"Entries of ledger {ledger_id} are {what} and settled"


def find_index_problems(image: TopicImage) -> Iterator[str]:
    """Report what does not fit between the delayed index and the rest of a manifest. Pure."""
    end = _end_of(image)
    if image.indexed_through > end:
        yield f"Indexed through {tuple(image.indexed_through)}, beyond the log, which ends at {tuple(end)}"
    if image.index_lsn > image.applied_lsn:
        yield f"Moves are indexed up to lsn {image.index_lsn}, but records applied up to {image.applied_lsn}"


def _end_of(image: TopicImage) -> Position:
    """Return where the log ends, or once ended if its last ledgers were dropped."""
    last = [Position(ledger.ledger_id, ledger.capture.entry_count) for ledger in image.ledgers[-1:]]
    return max([image.log_end, *last])


def find_amendment_problems(image: TopicImage, ledger: LedgerImage, amendments: Amendments) -> Iterator[str]:
    """Report what does not fit between a ledger's amendments and its manifest. Pure."""
    cancelled, moved, lsns = amendments.cancelled, amendments.entry_ids, amendments.lsns
    for what, last in (
        ("cancelled", cancelled.max() if cancelled else -1),
        ("moved", int(moved[-1]) if len(moved) else -1),
    ):
        if last >= ledger.capture.entry_count:
            yield f"Entry {last} is {what}, but the ledger holds {ledger.capture.entry_count} entries"
    if len(lsns) and int(lsns.max()) > image.applied_lsn:
        yield f"A move has lsn {lsns.max()}, but records are applied up to {image.applied_lsn}"


def find_batch_problems(record: Produced) -> Iterator[str]:
    """Report what does not fit among the columns of a batch. Pure."""
    rows, first = record.rows, record.first_entry_id
    start = int(rows["offset"][0])
    for problem in find_bad_times("", first, rows, record.times):
        yield problem.what
    if (rows["publish_time_ms"] != record.publish_time_ms).any():
        yield f"A row has another publish time than its batch, {record.publish_time_ms}"
    bad_offsets = [problem.what for problem in find_bad_offsets("", first, rows, start)]
    if bad_offsets:
        yield from bad_offsets
        return
    ends = np.cumsum(rows["length"], dtype=np.int64).tolist()
    crcs = rows["crc"].tolist()
    for index, (low, high) in enumerate(pairwise([0, *ends])):
        if google_crc32c.value(bytes(record.frames[low:high])) != crcs[index]:
            yield f"entry {first + index}: the message is not the one that its row was made for"


_OfTopic = (
    Produced
    | LedgersDropped
    | LedgersCompacted
    | Settled
    | GivenBack
    | Cancelled
    | Moved
    | Seeked
    | SubscriptionCreated
    | SubscriptionDeleted
    | SubscriptionChanged
    | TopicPolicyChanged
)


@dataclass(slots=True)
class _TopicState:
    """Of one topic what records can contradict."""

    name: str
    applied_lsn: int
    ledgers: dict[int, tuple[int, int]] = field(default_factory=dict)  # (entry_count, data_bytes), rising ids
    subscriptions: dict[int, str] = field(default_factory=dict)
    gone_end: Position = START  # where the log ended, if its last ledger was dropped
    missing: dict[int, int] = field(default_factory=dict)
    """Ledgers that batches went into, by the manifest, and that it does not name: ends of these batches."""
    dropped: set[int] = field(default_factory=set)

    @property
    def end(self) -> Position:
        last = next(reversed(self.ledgers), None)
        return self.gone_end if last is None else max(self.gone_end, Position(last, self.ledgers[last][0]))


class History:
    """Follows the journal from the manifests on, and says where a record does not continue what was before. Pure.

    As in recovery, a topic takes what lies above its `applied_lsn`, and what belongs to topics or subscriptions
    that are not there (they were deleted) is passed over.
    """

    def __init__(self, root: BrokerImage, images: Sequence[TopicImage]) -> None:
        self._topics = {
            image.topic_id: _TopicState(
                image.name,
                image.applied_lsn,
                {
                    ledger.ledger_id: (ledger.capture.entry_count, ledger.capture.data_bytes)
                    for ledger in image.ledgers
                },
                {subscription.subscription_id: subscription.name for subscription in image.subscriptions},
                image.log_end,
            )
            for image in images
        }
        self._owners: dict[int, int] = {}  # topic_id by ledger_id
        self._next_ledger_id = root.next_ledger_id

    def begin(self) -> Iterator[str]:
        """Look at what the manifests say together."""
        for topic_id, topic in self._topics.items():
            for ledger_id in topic.ledgers:
                yield from self._claim(ledger_id, topic_id)

    def end(self) -> Iterator[str]:
        """Look at what all records have led to."""
        for ledger_id, topic_id in self._owners.items():
            if ledger_id >= self._next_ledger_id:
                yield f"Ledger {ledger_id} of topic {topic_id} would be given a second time"
        for topic_id, topic in self._topics.items():
            for ledger_id, count in topic.missing.items():
                yield f"A batch up to entry {count} went into ledger {ledger_id} of topic {topic_id}; it is not there"
        names = [topic.name for topic in self._topics.values()]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"Two topics are named {name!r}"

    def apply(self, lsn: int, record: Record) -> Iterator[str]:
        if isinstance(record, TopicCreated):
            self._topics.setdefault(record.topic_id, _TopicState(record.name, lsn))
            return
        if isinstance(record, Transferred | Replaced):
            yield from self.apply(lsn, record.produced)
            yield from self.apply(
                lsn, record.settled if isinstance(record, Transferred) else record.cancelled
            )
            return
        if isinstance(record, BulkStepped | Recurred):
            if record.change is not None:
                yield from self.apply(lsn, record.change)
            return
        if isinstance(record, Produced):
            self._next_ledger_id = max(self._next_ledger_id, record.ledger_id + 1)
        topic = self._topics.get(record.topic_id)
        if topic is None:
            return
        if isinstance(record, TopicDeleted):
            del self._topics[record.topic_id]
            return
        yield from self._apply(lsn, record, topic)

    def _apply(self, lsn: int, record: _OfTopic, topic: _TopicState) -> Iterator[str]:
        match record:
            case Produced():
                yield from (
                    self._produced(topic, record) if lsn > topic.applied_lsn else _contained(topic, record)
                )
            case LedgersDropped():
                yield from _dropped(topic, record, is_contained=lsn <= topic.applied_lsn)
            case _ if lsn <= topic.applied_lsn:
                pass
            case Settled() | GivenBack() | Cancelled() | Moved():
                yield from _named(topic, record)
            case SubscriptionCreated():
                yield from _created(topic, record.subscription)
            case SubscriptionDeleted():
                topic.subscriptions.pop(record.subscription_id, None)
            case Seeked() | SubscriptionChanged() | TopicPolicyChanged() | LedgersCompacted():
                pass  # nothing in them can contradict what is followed here
            case _:
                assert_never(record)

    def _produced(self, topic: _TopicState, record: Produced) -> Iterator[str]:
        start = int(record.rows["offset"][0])
        if record.ledger_id not in topic.ledgers:
            yield from self._claim(record.ledger_id, record.topic_id)
        last, _ = topic.end
        if record.ledger_id < last:
            yield f"A batch goes into ledger {record.ledger_id}, after ledger {last} has begun"
        if record.ledger_id in topic.dropped or record.ledger_id == topic.gone_end.ledger_id:
            yield f"A batch goes into ledger {record.ledger_id}, which was dropped"
        expected = topic.ledgers.get(record.ledger_id, (0, 0))
        if (record.first_entry_id, start) != expected:
            yield (
                f"A batch begins at entry {record.first_entry_id} and byte {start} of ledger {record.ledger_id}, "
                f"where entry {expected[0]} and byte {expected[1]} come next"
            )
        end = (record.first_entry_id + len(record.times), start + len(record.frames))
        topic.ledgers[record.ledger_id] = end

    def _claim(self, ledger_id: int, topic_id: int) -> Iterator[str]:
        owner = self._owners.setdefault(ledger_id, topic_id)
        if owner != topic_id:
            yield f"Ledger {ledger_id} of topic {topic_id} has the id of one of topic {owner}"


def _contained(topic: _TopicState, record: Produced) -> Iterator[str]:
    """A batch that a manifest holds already must lie in the ledger that it names."""
    end = record.first_entry_id + len(record.times)
    if record.ledger_id not in topic.ledgers:
        topic.missing[record.ledger_id] = end  # until a record says that it was dropped
        return
    count, _ = topic.ledgers[record.ledger_id]
    if end > count:
        yield f"A batch up to entry {end} of ledger {record.ledger_id} is applied, but the ledger holds {count}"


def _dropped(topic: _TopicState, record: LedgersDropped, *, is_contained: bool) -> Iterator[str]:
    """Check a drop; a ledger that was owed again by then stayed, and may be dropped a second time."""
    for ledger_id in record.ledger_ids:
        if is_contained:
            topic.missing.pop(ledger_id, None)
            continue
        if ledger_id not in topic.ledgers:
            yield f"Ledger {ledger_id} is dropped, and is not there"
        topic.dropped.add(ledger_id)


def _named(topic: _TopicState, record: Settled | GivenBack | Cancelled | Moved) -> Iterator[str]:
    if isinstance(record, Settled | GivenBack) and record.subscription_id not in topic.subscriptions:
        return
    for ledger_id, bitmap in record.entries.items():
        if ledger_id not in topic.ledgers and ledger_id <= topic.end.ledger_id:
            continue  # dropped before
        count, _ = topic.ledgers.get(ledger_id, (0, 0))
        if bitmap and bitmap.max() >= count:
            yield f"Entry {bitmap.max()} of ledger {ledger_id} is named, which holds {count} entries"


def _created(topic: _TopicState, subscription: SubscriptionImage) -> Iterator[str]:
    if subscription.subscription_id in topic.subscriptions:
        yield f"Subscription {subscription.subscription_id} is created a second time"
    elif subscription.name in topic.subscriptions.values():
        yield f"A second subscription is named {subscription.name!r}"
    if subscription.start > topic.end:
        yield f"A subscription begins at {tuple(subscription.start)}, but the log ends at {tuple(topic.end)}"
    topic.subscriptions[subscription.subscription_id] = subscription.name
