"""The journal's records: each states a decision, never a request.

    type  record                body (little-endian)
    2     Produced              topic_id 8, ledger_id 8, publish_time_ms 8, first_entry_id 4, count 4,
                                frames_bytes 4, producer_bytes 4, times 8 * count, rows 44 * count, frames, producer
                                producer: floor 8, name_bytes 4, zero 4, sequence_ids 8 * count, name, and the name
                                of a producer forgotten for it; of a batch with sequence ids
    3     Settled               topic_id 8, subscription_id 8, reason 1, zero 3, ledger_count 4, sets
    4     GivenBack             topic_id 8, subscription_id 8, reason 1, zero 1, text_bytes 2, ledger_count 4,
                                not_before_ms 8, sets, text
                                set: ledger_id 8, length 4, zero 4, roaring bitmap of entry ids
    5-8   TopicCreated, TopicDeleted, SubscriptionCreated, SubscriptionDeleted: protobuf, see manifest.proto
    9-10  Cancelled, Moved      see changes.py
    11-14 Seeked, TopicPolicyChanged, SubscriptionChanged, LedgersDropped: protobuf, see manifest.proto
    15    Transferred           produced_bytes 4, settled_bytes 4, subscription_id 8, Produced, Settled
    16    Replaced              produced_bytes 4, cancelled_bytes 4, Produced, Cancelled
    17    LedgersCompacted      see compacted.py
    19    Recurred              see recurring.py
    20    BulkStepped           see bulk.py

Type 1 is the journal's own COMMIT, type 18 the LOG_BLANK that stands for a group without records. A produced batch
carries its columns exactly as the ledger stores them, so that applying it, today or in a recovery, copies bytes and
decides nothing.
Every decoder gives a record or raises `Corrupt`, whatever bytes it is given, and a record that it gives can be
applied: ids and times are in their ranges, and columns, rows and frames fit each other. Whether a batch continues
its ledger is not in the bytes; nor is every row checked here, which recovery could not afford (`verify` does).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

import numpy as np
from google.protobuf.message import DecodeError

from broker.errors import Corrupt
from broker.model import (
    ENTRY_ID_MAX,
    EXPIRE_MS_MAX,
    ROW,
    TIME_MS_MAX,
    DueSpan,
    Entries,
    Int64Column,
    Position,
    RowColumn,
    UInt64Column,
)
from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.storage.bulk import BulkStep, decode_bulk_step, encode_bulk_step
from broker.storage.changes import Cancelled, Moved, decode_cancelled, decode_moved
from broker.storage.compacted import LedgersCompacted, decode_compacted
from broker.storage.manifest import (
    ID_MAX,
    REASON_BYTES_MAX,
    SubscriptionImage,
    bitmap_from_bytes,
    check,
    check_id,
    check_ledger_id,
    check_rising,
    checked_time,
    parse_known,
    position_from_record,
    position_to_record,
    subscription_from_entry,
    subscription_to_entry,
)
from broker.storage.policy import (
    subscription_policy_from_record,
    subscription_policy_to_record,
    topic_policy_from_record,
    topic_policy_to_record,
)
from broker.storage.record_types import RecordType
from broker.storage.recurring import RecurringStep, decode_steps, encode_steps
from broker.storage.v1 import manifest_pb2 as pb

Part = bytes | memoryview | np.ndarray


class SettleReason(IntEnum):
    """Reason for which a subscription never delivers entries again."""

    ACKED = 1
    EXPIRED = 2
    DEAD_LETTERED = 3
    REQUEUED = 4
    PURGED = 5
    CANCELLED = 6
    DAMAGED = 7


class ReturnReason(IntEnum):
    """Reason for which delivered entries are delivered again."""

    NACKED = 1
    LEASE_EXPIRED = 2
    CONSUMER_LOST = 3
    RELEASED = 4  # nobody began to work on them: no attempt is counted


_PRODUCED = struct.Struct("<QQqIIII")
_SETTLED = struct.Struct("<QQB3sI")
_GIVEN_BACK = struct.Struct("<QQBBHIq")
_SET = struct.Struct("<QII")
_SEQUENCES = struct.Struct("<QII")
_TRANSFERRED = struct.Struct("<IIQ")
_REPLACED = struct.Struct("<II")
_RECURRED = struct.Struct("<II")
_BULK_STEPPED = struct.Struct("<B3sI")
_ZERO = bytes(3)
_ROW_PLACE = struct.Struct("<II")  # offset and length of a row
_ROW_PLACE_AT = 24  # in a ROW


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequence ids of a batch, and what its topic remembers and forgets of them."""

    producer_name: str
    floor: int  # below it nothing of this producer is remembered from here on
    sequence_ids: UInt64Column  # of each message; 0: none
    forgotten_name: str = ""  # a producer that gives way to this one; empty: none

    def encode(self) -> bytes:
        name = self.producer_name.encode()
        head = _SEQUENCES.pack(self.floor, len(name), 0)
        return head + self.sequence_ids.tobytes() + name + self.forgotten_name.encode()


@dataclass(frozen=True, slots=True)
class Produced:
    """A batch, accepted: all its ids, times and places are decided."""

    type: ClassVar[RecordType] = RecordType.PRODUCED
    topic_id: int
    ledger_id: int
    first_entry_id: int
    publish_time_ms: int
    times: Int64Column
    rows: RowColumn
    frames: bytes | memoryview
    sequences: Sequences | None = None
    due: DueSpan = field(init=False, compare=False)  # of `times`

    def __post_init__(self) -> None:
        object.__setattr__(self, "due", DueSpan.of(self.times))

    def encode(self) -> list[Part]:
        producer = self.sequences.encode() if self.sequences else b""
        header = _PRODUCED.pack(
            self.topic_id,
            self.ledger_id,
            self.publish_time_ms,
            self.first_entry_id,
            len(self.times),
            len(self.frames),
            len(producer),
        )
        return [header, self.times.tobytes(), self.rows.tobytes(), self.frames, producer]


@dataclass(frozen=True, slots=True)
class Settled:
    """Entries that one subscription is done with."""

    type: ClassVar[RecordType] = RecordType.SETTLED
    topic_id: int
    subscription_id: int
    reason: SettleReason
    entries: Entries

    def encode(self) -> list[Part]:
        head = _SETTLED.pack(self.topic_id, self.subscription_id, self.reason, _ZERO, len(self.entries))
        return [head, *_encode_sets(self.entries)]


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Entries that one subscription was sent and will be sent again, not before a time."""

    type: ClassVar[RecordType] = RecordType.GIVEN_BACK
    topic_id: int
    subscription_id: int
    reason: ReturnReason
    not_before_ms: int
    entries: Entries
    text: str = ""  # the reason that the nack gave

    def encode(self) -> list[Part]:
        text = self.text.encode()
        head = _GIVEN_BACK.pack(
            self.topic_id,
            self.subscription_id,
            self.reason,
            0,
            len(text),
            len(self.entries),
            self.not_before_ms,
        )
        return [head, *_encode_sets(self.entries), text]


@dataclass(frozen=True, slots=True)
class Transferred:
    """Messages of one topic were stored in another, and settled where they came from, in one step.

    Dead letters: `produced` in the dead-letter topic, `settled` on the subscription that gave them up. Requeued ones:
    `produced` in the topic they came from, for that subscription only, and `settled` on the one that held them. Either
    part applies to its topic as a record of its own would.
    """

    type: ClassVar[RecordType] = RecordType.TRANSFERRED
    produced: Produced
    settled: Settled
    subscription_id: int
    """Dead letters: 0. Requeued: the one subscription of the produced part's topic that gets the messages."""

    def encode(self) -> list[Part]:
        produced, settled = self.produced.encode(), self.settled.encode()
        head = _TRANSFERRED.pack(_bytes_of(produced), _bytes_of(settled), self.subscription_id)
        return [head, *produced, *settled]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A batch took the place of pending messages of its schedule keys, in one step."""

    type: ClassVar[RecordType] = RecordType.REPLACED
    produced: Produced
    cancelled: Cancelled

    @property
    def topic_id(self) -> int:
        return self.produced.topic_id

    def encode(self) -> list[Part]:
        produced, cancelled = self.produced.encode(), self.cancelled.encode()
        return [_REPLACED.pack(_bytes_of(produced), _bytes_of(cancelled)), *produced, *cancelled]


@dataclass(frozen=True, slots=True)
class Recurred:
    """Recurring schedules came so far, and these messages are their occurrences. See recurring.py.

    `produced` and `cancelled` apply as a record of their own would, and before the rest.
    """

    type: ClassVar[RecordType] = RecordType.RECURRED
    topic_id: int
    steps: tuple[RecurringStep, ...]
    produced: Produced | None = None
    cancelled: Cancelled | None = None

    @property
    def change(self) -> Produced | Replaced | Cancelled | None:
        """Return what it stores and cancels, as the record that says so alone."""
        if self.produced is None or self.cancelled is None:
            return self.produced or self.cancelled
        return Replaced(self.produced, self.cancelled)

    def encode(self) -> list[Part]:
        produced = [] if self.produced is None else self.produced.encode()
        cancelled = [] if self.cancelled is None else self.cancelled.encode()
        head = _RECURRED.pack(_bytes_of(produced), _bytes_of(cancelled))
        return [head, *produced, *cancelled, encode_steps(self.topic_id, self.steps)]


@dataclass(frozen=True, slots=True)
class BulkStepped:
    """A bulk change came so far, and these messages were cancelled or moved on its way there. See bulk.py.

    `change` applies as a record of its own would, and before the rest.
    """

    type: ClassVar[RecordType] = RecordType.BULK_STEPPED
    topic_id: int
    step: BulkStep
    change: Cancelled | Moved | None = None

    def encode(self) -> list[Part]:
        change: list[Part] = [] if self.change is None else [*self.change.encode()]
        kind = _BULK_KINDS.index(type(self.change))
        head = _BULK_STEPPED.pack(kind, _ZERO, _bytes_of(change))
        return [head, *change, encode_bulk_step(self.topic_id, self.step)]


_BULK_KINDS = (type(None), Cancelled, Moved)


@dataclass(frozen=True, slots=True)
class Seeked:
    """A subscription begins elsewhere: all that it had settled, counted and put off is forgotten."""

    type: ClassVar[RecordType] = RecordType.SEEKED
    topic_id: int
    subscription_id: int
    start: Position

    def encode(self) -> list[Part]:
        message = pb.Seeked(
            topic_id=self.topic_id, subscription_id=self.subscription_id, start=position_to_record(self.start)
        )
        return [message.SerializeToString(deterministic=True)]


@dataclass(frozen=True, slots=True)
class SubscriptionChanged:
    """Settings of a subscription from here on, all of them."""

    type: ClassVar[RecordType] = RecordType.SUBSCRIPTION_CHANGED
    topic_id: int
    subscription_id: int
    policy: SubscriptionPolicy
    paused: bool

    def encode(self) -> list[Part]:
        message = pb.SubscriptionChanged(
            topic_id=self.topic_id,
            subscription_id=self.subscription_id,
            policy=subscription_policy_to_record(self.policy),
            paused=self.paused,
        )
        return [message.SerializeToString(deterministic=True)]


@dataclass(frozen=True, slots=True)
class LedgersDropped:
    """Ledgers with nothing live are gone."""

    type: ClassVar[RecordType] = RecordType.LEDGERS_DROPPED
    topic_id: int
    ledger_ids: tuple[int, ...]
    came_due_ms: int = 0  # by this time the last one of those that were not cancelled had come due

    def encode(self) -> list[Part]:
        message = pb.LedgersDropped(
            topic_id=self.topic_id, ledger_ids=self.ledger_ids, came_due_ms=self.came_due_ms
        )
        return [message.SerializeToString(deterministic=True)]


@dataclass(frozen=True, slots=True)
class TopicCreated:
    """A topic exists from here on."""

    type: ClassVar[RecordType] = RecordType.TOPIC_CREATED
    topic_id: int
    name: str
    create_time_ms: int
    policy: TopicPolicy

    def encode(self) -> list[Part]:
        message = pb.TopicCreated(
            topic_id=self.topic_id,
            name=self.name,
            create_time_ms=self.create_time_ms,
            policy=topic_policy_to_record(self.policy),
        )
        return [message.SerializeToString(deterministic=True)]


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """A topic and everything in it is gone."""

    type: ClassVar[RecordType] = RecordType.TOPIC_DELETED
    topic_id: int

    def encode(self) -> list[Part]:
        return [pb.TopicDeleted(topic_id=self.topic_id).SerializeToString(deterministic=True)]


@dataclass(frozen=True, slots=True)
class TopicPolicyChanged:
    """Settings of a topic from here on, all of them."""

    type: ClassVar[RecordType] = RecordType.TOPIC_POLICY_CHANGED
    topic_id: int
    policy: TopicPolicy

    def encode(self) -> list[Part]:
        message = pb.TopicPolicyChanged(topic_id=self.topic_id, policy=topic_policy_to_record(self.policy))
        return [message.SerializeToString(deterministic=True)]


@dataclass(frozen=True, slots=True)
class SubscriptionCreated:
    """A subscription exists from here on; `start` is the first position it is owed."""

    type: ClassVar[RecordType] = RecordType.SUBSCRIPTION_CREATED
    topic_id: int
    subscription: SubscriptionImage

    def encode(self) -> list[Part]:
        message = pb.SubscriptionCreated(
            topic_id=self.topic_id, subscription=subscription_to_entry(self.subscription)
        )
        return [message.SerializeToString(deterministic=True)]


@dataclass(frozen=True, slots=True)
class SubscriptionDeleted:
    """A subscription is gone."""

    type: ClassVar[RecordType] = RecordType.SUBSCRIPTION_DELETED
    topic_id: int
    subscription_id: int

    def encode(self) -> list[Part]:
        message = pb.SubscriptionDeleted(topic_id=self.topic_id, subscription_id=self.subscription_id)
        return [message.SerializeToString(deterministic=True)]


Record = (
    Produced
    | Settled
    | GivenBack
    | TopicCreated
    | TopicDeleted
    | TopicPolicyChanged
    | SubscriptionCreated
    | SubscriptionDeleted
    | SubscriptionChanged
    | Seeked
    | LedgersDropped
    | Transferred
    | Cancelled
    | Moved
    | Replaced
    | LedgersCompacted
    | Recurred
    | BulkStepped
)


def decode_record(record_type: int, body: memoryview) -> Record:
    """The record in `body`; raises `Corrupt` for anything that `encode` does not write."""
    decoder = _DECODERS.get(record_type)
    if decoder is None:
        raise Corrupt(
            f"A journal record has the unknown type {record_type}: a newer version wrote it",
            advice="Start that version, or a later one.",
        )
    try:
        return decoder(body)
    except (struct.error, ValueError, DecodeError) as error:
        raise Corrupt(f"A journal record of type {record_type} cannot be decoded: {error}") from error


def _decode_produced(body: memoryview) -> Produced:
    topic_id, ledger_id, publish_ms, first, count, frames_bytes, producer_bytes = _PRODUCED.unpack_from(body)
    times_at = _PRODUCED.size
    rows_at = times_at + 8 * count
    frames_at = rows_at + ROW.itemsize * count
    producer_at = frames_at + frames_bytes
    check(producer_at + producer_bytes == len(body), "its columns do not fill it")
    check_id(topic_id, "topic_id")
    check_ledger_id(ledger_id)
    check(count > 0 and first + count <= ENTRY_ID_MAX + 1, f"{count} entries from {first} on")
    start, _ = _ROW_PLACE.unpack_from(body, rows_at + _ROW_PLACE_AT)
    last, length = _ROW_PLACE.unpack_from(body, frames_at - ROW.itemsize + _ROW_PLACE_AT)
    check(last + length - start == frames_bytes, "its rows and frames differ in length")
    times = np.frombuffer(body[times_at:rows_at], dtype=np.int64)
    # As unsigned a negative time is a great one, so that one look finds both.
    check(int(times.view(np.uint64).max()) <= TIME_MS_MAX, "one of its times is out of range")
    rows = np.frombuffer(body[rows_at:frames_at], dtype=ROW).copy()
    expiry = rows["expire_at_ms"]
    check(int(expiry.min()) >= 0 and int(expiry.max()) <= EXPIRE_MS_MAX, "an expiry out of range")
    return Produced(
        topic_id=topic_id,
        ledger_id=ledger_id,
        first_entry_id=first,
        publish_time_ms=checked_time(publish_ms),
        # Copies: a view would keep the whole journal segment in memory for as long as one column lives.
        times=times.copy(),
        rows=rows,
        frames=bytes(body[frames_at:producer_at]),
        sequences=_decode_sequences(body[producer_at:], count) if producer_bytes else None,
    )


def _decode_sequences(body: memoryview, count: int) -> Sequences:
    floor, name_bytes, zero = _SEQUENCES.unpack_from(body)
    name_at = _SEQUENCES.size + 8 * count
    check(zero == 0 and 0 < name_bytes <= len(body) - name_at, "its producer has no name")
    sequence_ids = np.frombuffer(body[_SEQUENCES.size : name_at], dtype=np.uint64).copy()
    given = sequence_ids[sequence_ids > 0]
    check(len(given) > 0 and bool((given[1:] > given[:-1]).all()), "its sequence ids do not rise")
    name, forgotten = bytes(body[name_at : name_at + name_bytes]), bytes(body[name_at + name_bytes :])
    check(name != forgotten, "its producer gives way to itself")
    return Sequences(name.decode(), floor, sequence_ids, forgotten.decode())


def _decode_settled(body: memoryview) -> Settled:
    topic_id, subscription_id, reason, zero, set_count = _SETTLED.unpack_from(body)
    _check_head(topic_id, subscription_id, zero)
    entries = _decode_sets(body[_SETTLED.size :], set_count)
    return Settled(topic_id, subscription_id, SettleReason(reason), entries)


def _decode_given_back(body: memoryview) -> GivenBack:
    topic_id, subscription_id, reason, zero, text_bytes, set_count, not_before_ms = _GIVEN_BACK.unpack_from(
        body
    )
    check(zero == 0, "a byte that is always zero is not")
    _check_head(topic_id, subscription_id, _ZERO)
    text_at = len(body) - text_bytes
    check(text_bytes <= REASON_BYTES_MAX and text_at >= _GIVEN_BACK.size, f"{text_bytes} bytes of text")
    entries = _decode_sets(body[_GIVEN_BACK.size : text_at], set_count)
    text = bytes(body[text_at:]).decode()
    return GivenBack(
        topic_id, subscription_id, ReturnReason(reason), checked_time(not_before_ms), entries, text
    )


def _decode_transferred(body: memoryview) -> Transferred:
    produced_bytes, settled_bytes, subscription_id = _TRANSFERRED.unpack_from(body)
    settled_at = _TRANSFERRED.size + produced_bytes
    check(settled_at + settled_bytes == len(body), "its parts do not fill it")
    check(subscription_id <= ID_MAX, f"subscription_id {subscription_id}")
    produced = _decode_produced(body[_TRANSFERRED.size : settled_at])
    settled = _decode_settled(body[settled_at:])
    check(produced.topic_id != settled.topic_id, "both of its parts belong to one topic")
    return Transferred(produced, settled, subscription_id)


def _decode_replaced(body: memoryview) -> Replaced:
    produced_bytes, cancelled_bytes = _REPLACED.unpack_from(body)
    cancelled_at = _REPLACED.size + produced_bytes
    check(cancelled_at + cancelled_bytes == len(body), "its parts do not fill it")
    produced = _decode_produced(body[_REPLACED.size : cancelled_at])
    cancelled = decode_cancelled(body[cancelled_at:])
    check(produced.topic_id == cancelled.topic_id, "its parts belong to two topics")
    return Replaced(produced, cancelled)


def _decode_recurred(body: memoryview) -> Recurred:
    produced_bytes, cancelled_bytes = _RECURRED.unpack_from(body)
    cancelled_at = _RECURRED.size + produced_bytes
    steps_at = cancelled_at + cancelled_bytes
    check(steps_at <= len(body), "its parts do not fit")
    produced = _decode_produced(body[_RECURRED.size : cancelled_at]) if produced_bytes else None
    cancelled = decode_cancelled(body[cancelled_at:steps_at]) if cancelled_bytes else None
    topic_id, steps = decode_steps(body[steps_at:], len(produced.times) if produced else 0)
    of_topics = {topic_id, *(part.topic_id for part in (produced, cancelled) if part)}
    check(len(of_topics) == 1, "its parts belong to two topics")
    return Recurred(topic_id, steps, produced, cancelled)


def _decode_bulk_stepped(body: memoryview) -> BulkStepped:
    kind, zero, change_bytes = _BULK_STEPPED.unpack_from(body)
    step_at = _BULK_STEPPED.size + change_bytes
    check(zero == _ZERO and kind < len(_BULK_KINDS), "a change of an unknown kind")
    check(step_at <= len(body) and bool(kind) == bool(change_bytes), "its parts do not fit")
    change: Cancelled | Moved | None = None
    if kind:
        decode = decode_cancelled if _BULK_KINDS[kind] is Cancelled else decode_moved
        change = decode(body[_BULK_STEPPED.size : step_at])
    topic_id, step = decode_bulk_step(body[step_at:])
    check(change is None or change.topic_id == topic_id, "its parts belong to two topics")
    return BulkStepped(topic_id, step, change)


def _decode_seeked(body: memoryview) -> Seeked:
    message = parse_known(pb.Seeked, body)
    check_id(message.topic_id, "topic_id")
    check_id(message.subscription_id, "subscription_id")
    return Seeked(message.topic_id, message.subscription_id, position_from_record(message.start))


def _decode_subscription_changed(body: memoryview) -> SubscriptionChanged:
    message = parse_known(pb.SubscriptionChanged, body)
    check_id(message.topic_id, "topic_id")
    check_id(message.subscription_id, "subscription_id")
    policy = subscription_policy_from_record(message.policy)
    return SubscriptionChanged(message.topic_id, message.subscription_id, policy, message.paused)


def _decode_ledgers_dropped(body: memoryview) -> LedgersDropped:
    message = parse_known(pb.LedgersDropped, body)
    check_id(message.topic_id, "topic_id")
    check(len(message.ledger_ids) > 0, "it names no ledger")
    for ledger_id in message.ledger_ids:
        check_ledger_id(ledger_id)
    check_rising([(ledger_id, 0) for ledger_id in message.ledger_ids], "ledgers")
    came_due_ms = checked_time(message.came_due_ms)
    return LedgersDropped(message.topic_id, tuple(message.ledger_ids), came_due_ms)


def _check_head(topic_id: int, subscription_id: int, zero: bytes) -> None:
    check_id(topic_id, "topic_id")
    check_id(subscription_id, "subscription_id")
    check(zero == _ZERO, "a byte that is always zero is not")


def _decode_topic_created(body: memoryview) -> TopicCreated:
    message = parse_known(pb.TopicCreated, body)
    check_id(message.topic_id, "topic_id")
    check(bool(message.name), "the topic has no name")
    policy = topic_policy_from_record(message.policy)
    return TopicCreated(message.topic_id, message.name, checked_time(message.create_time_ms), policy)


def _decode_topic_deleted(body: memoryview) -> TopicDeleted:
    message = parse_known(pb.TopicDeleted, body)
    check_id(message.topic_id, "topic_id")
    return TopicDeleted(message.topic_id)


def _decode_topic_policy_changed(body: memoryview) -> TopicPolicyChanged:
    message = parse_known(pb.TopicPolicyChanged, body)
    check_id(message.topic_id, "topic_id")
    return TopicPolicyChanged(message.topic_id, topic_policy_from_record(message.policy))


def _decode_subscription_created(body: memoryview) -> SubscriptionCreated:
    message = parse_known(pb.SubscriptionCreated, body)
    check_id(message.topic_id, "topic_id")
    subscription = subscription_from_entry(message.subscription)
    check(not subscription.cursor_file, "a subscription begins with a cursor's file")
    return SubscriptionCreated(message.topic_id, subscription)


def _decode_subscription_deleted(body: memoryview) -> SubscriptionDeleted:
    message = parse_known(pb.SubscriptionDeleted, body)
    check_id(message.topic_id, "topic_id")
    check_id(message.subscription_id, "subscription_id")
    return SubscriptionDeleted(message.topic_id, message.subscription_id)


_DECODERS: dict[int, Callable[[memoryview], Record]] = {
    RecordType.PRODUCED: _decode_produced,
    RecordType.SETTLED: _decode_settled,
    RecordType.GIVEN_BACK: _decode_given_back,
    RecordType.TOPIC_CREATED: _decode_topic_created,
    RecordType.TOPIC_DELETED: _decode_topic_deleted,
    RecordType.TOPIC_POLICY_CHANGED: _decode_topic_policy_changed,
    RecordType.SUBSCRIPTION_CREATED: _decode_subscription_created,
    RecordType.SUBSCRIPTION_DELETED: _decode_subscription_deleted,
    RecordType.SUBSCRIPTION_CHANGED: _decode_subscription_changed,
    RecordType.SEEKED: _decode_seeked,
    RecordType.LEDGERS_DROPPED: _decode_ledgers_dropped,
    RecordType.TRANSFERRED: _decode_transferred,
    RecordType.CANCELLED: decode_cancelled,
    RecordType.MOVED: decode_moved,
    RecordType.REPLACED: _decode_replaced,
    RecordType.LEDGERS_COMPACTED: decode_compacted,
    RecordType.RECURRED: _decode_recurred,
    RecordType.BULK_STEPPED: _decode_bulk_stepped,
}


def _bytes_of(parts: Sequence[Part]) -> int:
    return sum(part.nbytes if isinstance(part, memoryview | np.ndarray) else len(part) for part in parts)


def _encode_sets(entries: Entries) -> Sequence[bytes]:
    parts: list[bytes] = []
    for ledger_id in sorted(entries):
        bitmap = entries[ledger_id].serialize()
        parts += (_SET.pack(ledger_id, len(bitmap), 0), bitmap)
    return parts


def _decode_sets(body: memoryview, set_count: int) -> Entries:
    entries: Entries = {}
    at = previous = 0
    # Bounded, whatever the count says: a set takes at least its header, and unpack_from checks that it is there.
    for _ in range(set_count):
        ledger_id, length, zero = _SET.unpack_from(body, at)
        at += _SET.size
        check_ledger_id(ledger_id)
        check(
            ledger_id > previous and zero == 0 and at + length <= len(body), "a set of entries does not fit"
        )
        entries[ledger_id] = bitmap_from_bytes(bytes(body[at : at + length]))
        at += length
        previous = ledger_id
    check(at == len(body), "bytes are left over")
    return entries
