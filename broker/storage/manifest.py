"""The manifests: which files there are, and what recovery resumes from.

`broker.manifest` is the root, `topics/<topic_id>/manifest` one topic's, `topics/<topic_id>/cursors/<file>` one
subscription's settled entries. All three have the same frame:

    magic 4 (PDMB, PDMT, PDMC), version 1, zero 3, length 4, crc32c 4, protobuf message (manifest.proto)

The crc covers version, length and message. Files are replaced whole (`replace_file`), so that a crash leaves
the old content or the new. Pure: bytes in, dataclasses out; any bytes give a value or `Corrupt`. A value is one
that the broker can run on: ids, times and settings are in their ranges, so nothing fails later on.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TypeVar

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError, Message
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import ENTRY_ID_MAX, EXPIRE_MS_MAX, LEDGER_ID_MAX, START, Int64Column, Position
from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.storage.blocks import LedgerCapture, SparseSizes, block_count
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.policy import (
    subscription_policy_from_record,
    subscription_policy_to_record,
    topic_policy_from_record,
    topic_policy_to_record,
)
from broker.storage.v1 import manifest_pb2 as pb

MAGIC_BROKER = b"PDMB"
MAGIC_TOPIC = b"PDMT"
MAGIC_CURSOR = b"PDMC"
_NAMES = {
    MAGIC_BROKER: "broker manifest",
    MAGIC_TOPIC: "topic manifest",
    MAGIC_CURSOR: "cursor",
    b"PDMP": "file of producers",
    b"PDMI": "file of compaction inputs",
    b"PDMR": "file of recurring schedules",
    b"PDMK": "file of bulk changes",
}
"""All that is framed as manifests are, as errors call it."""
VERSION = 1
CONTENT_BYTES_MAX = 1 << 30
FRAME_BYTES = 16
ID_MAX = (1 << 63) - 1  # of topics, subscriptions and records (lsn): no counter gets there
SUBSCRIPTION_TYPES = range(1, 5)  # SubscriptionType of the API, without UNSPECIFIED

_TIME = np.dtype("<i8")
PRESENT_BYTES_MIN = 40  # the trailer, and the least bitmap
_DATA_BYTES_MAX = (1 << 33) - 1  # offset and length of the last row are 32 bits wide
_ATTEMPT_DIGITS_MAX = 32
REASON_BYTES_MAX = 1024
"""Of what a nack gives as its reason."""

_FRAME = struct.Struct("<4sB3sII")
_CURSOR_FILE = re.compile(r"[0-9]+\.[0-9a-f]+")

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


_PRODUCERS_FILE = re.compile(r"producers\.[0-9a-f]+")
_RECURRING_FILE = re.compile(r"recurring\.[0-9a-f]+")
_BULK_FILE = re.compile(r"bulk\.[0-9a-f]+")
_AMENDMENTS_FILE = re.compile(r"([0-9]+)\.[0-9a-f]+\.amend")


@dataclass(frozen=True, slots=True)
class BrokerImage:
    """The root: what the broker is made of."""

    broker_id: str
    checkpoint_lsn: int
    topics: dict[int, str]
    next_topic_id: int
    next_ledger_id: int
    last_alive_ms: int
    shard: str = (
        ""  # of a cluster, whose log goes on after `checkpoint_lsn`; empty: there is a journal in the folder
    )
    epoch: int = 0  # of the group that holds `checkpoint_lsn`


@dataclass(frozen=True, slots=True)
class LedgerImage:
    """A ledger in the manifest; its files are cut to the lengths of its capture."""

    capture: LedgerCapture
    facts: LedgerFacts
    amendments_file: str = ""  # in `ledgers/`; empty: none

    @property
    def ledger_id(self) -> int:
        return self.capture.ledger_id


@dataclass(frozen=True, slots=True)
class SubscriptionImage:
    """A subscription in the manifest."""

    subscription_id: int
    name: str
    type: int
    create_time_ms: int
    start: Position
    policy: SubscriptionPolicy = field(default_factory=SubscriptionPolicy)
    cursor_file: str = ""
    mark: Position = START
    paused: bool = False


@dataclass(frozen=True, slots=True)
class TopicImage:
    """One topic's manifest."""

    topic_id: int
    name: str
    create_time_ms: int
    policy: TopicPolicy
    applied_lsn: int
    ledgers: tuple[LedgerImage, ...] = ()
    subscriptions: tuple[SubscriptionImage, ...] = ()
    next_subscription_id: int = 1
    indexed_through: Position = START
    index_lsn: int = 0
    frontier_ms: int = 0
    bucket_ids: tuple[int, ...] = ()  # in the order of the log
    next_bucket_id: int = 1
    producers_file: str = ""  # in `cursors/`; empty: none
    recurring_file: str = ""  # the same
    bulk_file: str = ""  # the same
    log_end: Position = START  # where the log ended, if its last ledger is gone
    key_run_ids: tuple[int, ...] = ()
    next_key_run_id: int = 1
    keys_through: Position | None = (
        None  # rows from here on may have keys that are in no run; None: no row has
    )
    gone_ledgers: tuple[tuple[int, int], ...] = ()
    """(ledger_id, last_due_ms) of ledgers that went as their rest was cancelled: buckets may hold rows of them."""


@dataclass(frozen=True, slots=True)
class LedgerTimes:
    """Entries of one ledger that came back, and the times before which they are not sent again."""

    entries: BitMap
    content: bytes  # a time each in milliseconds, int64, little-endian, in the order of the ids

    @property
    def column(self) -> Int64Column:
        """The times, aligned with the rising ids."""
        return np.frombuffer(self.content, _TIME)


@dataclass(frozen=True, slots=True)
class CursorImage:
    """Cursor file of a subscription: entries settled beyond the mark, attempts, and redelivery times."""

    topic_id: int
    subscription_id: int
    settled: dict[int, BitMap]
    attempts: dict[int, list[BitMap]]
    waiting: dict[int, LedgerTimes]
    dead_letters: dict[int, BitMap] = field(default_factory=dict)  # entries of the dead-letter topic
    reasons: dict[Position, str] = field(default_factory=dict)  # of the last nack, oldest first


def encode_broker(image: BrokerImage) -> bytes:
    topics = [pb.TopicEntry(topic_id=topic_id, name=name) for topic_id, name in sorted(image.topics.items())]
    message = pb.BrokerManifest(
        broker_id=image.broker_id,
        checkpoint_lsn=image.checkpoint_lsn,
        topics=topics,
        next_topic_id=image.next_topic_id,
        next_ledger_id=image.next_ledger_id,
        last_alive_ms=image.last_alive_ms,
        shard=image.shard,
        epoch=image.epoch,
    )
    return frame_message(MAGIC_BROKER, message)


def decode_broker(content: bytes, path: str) -> BrokerImage:
    return decode_framed(MAGIC_BROKER, content, path, pb.BrokerManifest(), _broker_image)


def _broker_image(message: pb.BrokerManifest) -> BrokerImage:
    check(bool(message.broker_id), "broker_id is empty")
    check_id(message.next_topic_id, "next_topic_id")
    check_id(message.next_ledger_id, "next_ledger_id", LEDGER_ID_MAX + 1)
    for entry in message.topics:
        check_id(entry.topic_id, "topic_id", message.next_topic_id - 1)
        check(bool(entry.name), "a topic has no name")
    topics = {entry.topic_id: entry.name for entry in message.topics}
    check(len(topics) == len(message.topics) == len(set(topics.values())), "a topic is named twice")
    return BrokerImage(
        broker_id=message.broker_id,
        checkpoint_lsn=checked_lsn(message.checkpoint_lsn),
        topics=topics,
        next_topic_id=message.next_topic_id,
        next_ledger_id=message.next_ledger_id,
        last_alive_ms=checked_time(message.last_alive_ms),
        shard=message.shard,
        epoch=message.epoch,
    )


def encode_topic(image: TopicImage) -> bytes:
    message = pb.TopicManifest(
        topic_id=image.topic_id,
        name=image.name,
        create_time_ms=image.create_time_ms,
        policy=topic_policy_to_record(image.policy),
        applied_lsn=image.applied_lsn,
        ledgers=[_ledger_to_entry(ledger) for ledger in image.ledgers],
        subscriptions=[subscription_to_entry(subscription) for subscription in image.subscriptions],
        next_subscription_id=image.next_subscription_id,
        indexed_through=position_to_record(image.indexed_through),
        index_lsn=image.index_lsn,
        frontier_ms=image.frontier_ms,
        bucket_ids=image.bucket_ids,
        next_bucket_id=image.next_bucket_id
        if image.next_bucket_id > 1
        else 0,  # as before there were buckets
        producers_file=image.producers_file,
        recurring_file=image.recurring_file,
        bulk_file=image.bulk_file,
        log_end=position_to_record(image.log_end) if image.log_end > START else None,
        key_run_ids=image.key_run_ids,
        next_key_run_id=image.next_key_run_id if image.next_key_run_id > 1 else 0,
        keys_through=None if image.keys_through is None else position_to_record(image.keys_through),
        gone_ledgers=[
            pb.GoneLedger(ledger_id=ledger_id, last_due_ms=due_ms) for ledger_id, due_ms in image.gone_ledgers
        ],
    )
    return frame_message(MAGIC_TOPIC, message)


def decode_topic(content: bytes, path: str) -> TopicImage:
    return decode_framed(MAGIC_TOPIC, content, path, pb.TopicManifest(), _topic_image)


def _topic_image(message: pb.TopicManifest) -> TopicImage:
    check_id(message.topic_id, "topic_id")
    check(bool(message.name), "the topic has no name")
    check_id(message.next_subscription_id, "next_subscription_id")
    ledgers = tuple(_ledger_from_entry(entry, message.topic_id) for entry in message.ledgers)
    check_rising([(ledger.ledger_id, ledger.capture.generation) for ledger in ledgers], "ledgers")
    check(len({ledger.ledger_id for ledger in ledgers}) == len(ledgers), "a ledger is named twice")
    check(all(ledger.capture.sealed for ledger in ledgers[:-1]), "a ledger before the last is not sealed")
    log_end = position_from_record(message.log_end)
    lies_behind = log_end.ledger_id > (ledgers[-1].ledger_id if ledgers else 0)
    check(lies_behind or log_end == START, "the log ends in or before a ledger that is there")
    subscriptions = tuple(subscription_from_entry(entry) for entry in message.subscriptions)
    for subscription in subscriptions:
        check_id(subscription.subscription_id, "subscription_id", message.next_subscription_id - 1)
    next_bucket_id = message.next_bucket_id or 1  # manifests from before there were buckets have none
    check_id(next_bucket_id, "next_bucket_id")
    for bucket_id in message.bucket_ids:
        check_id(bucket_id, "bucket_id", next_bucket_id - 1)
    check(len(set(message.bucket_ids)) == len(message.bucket_ids), "a bucket is named twice")
    next_key_run_id = message.next_key_run_id or 1  # manifests from before there were schedule keys have none
    check_id(next_key_run_id, "next_key_run_id")
    for run_id in message.key_run_ids:
        check_id(run_id, "key_run_id", next_key_run_id - 1)
    check(len(set(message.key_run_ids)) == len(message.key_run_ids), "a run of schedule keys is named twice")
    named = not message.producers_file or _PRODUCERS_FILE.fullmatch(message.producers_file) is not None
    check(named, f"producers file {message.producers_file[:100]!r}")
    named = not message.recurring_file or _RECURRING_FILE.fullmatch(message.recurring_file) is not None
    check(named, f"file of recurring schedules {message.recurring_file[:100]!r}")
    named = not message.bulk_file or _BULK_FILE.fullmatch(message.bulk_file) is not None
    check(named, f"file of bulk changes {message.bulk_file[:100]!r}")
    for what in ("subscription_id", "name"):
        distinct = {getattr(subscription, what) for subscription in subscriptions}
        check(len(distinct) == len(subscriptions), f"two subscriptions have one {what}")
    return TopicImage(
        topic_id=message.topic_id,
        name=message.name,
        create_time_ms=checked_time(message.create_time_ms),
        policy=topic_policy_from_record(message.policy),
        applied_lsn=checked_lsn(message.applied_lsn),
        ledgers=ledgers,
        subscriptions=subscriptions,
        next_subscription_id=message.next_subscription_id,
        indexed_through=position_from_record(message.indexed_through),
        index_lsn=checked_lsn(message.index_lsn),
        frontier_ms=checked_time(message.frontier_ms),
        bucket_ids=tuple(message.bucket_ids),
        next_bucket_id=next_bucket_id,
        producers_file=message.producers_file,
        recurring_file=message.recurring_file,
        bulk_file=message.bulk_file,
        log_end=log_end,
        key_run_ids=tuple(message.key_run_ids),
        next_key_run_id=next_key_run_id,
        keys_through=position_from_record(message.keys_through) if message.HasField("keys_through") else None,
        gone_ledgers=_gone_ledgers(message),
    )


def _gone_ledgers(message: pb.TopicManifest) -> tuple[tuple[int, int], ...]:
    gone = tuple((ledger.ledger_id, checked_time(ledger.last_due_ms)) for ledger in message.gone_ledgers)
    for ledger_id, _ in gone:
        check_ledger_id(ledger_id)
    check_rising([(ledger_id, 0) for ledger_id, _ in gone], "ledgers that are gone")
    return gone


def encode_cursor(image: CursorImage) -> bytes:
    message = pb.CursorFile(
        topic_id=image.topic_id,
        subscription_id=image.subscription_id,
        settled=[
            pb.LedgerBitmap(ledger_id=ledger_id, bitmap=bitmap.serialize())
            for ledger_id, bitmap in sorted(image.settled.items())
        ],
        attempts=[
            pb.AttemptBits(ledger_id=ledger_id, bit=bit, bitmap=bitmap.serialize())
            for ledger_id, bits in sorted(image.attempts.items())
            for bit, bitmap in enumerate(bits)
        ],
        waiting=[
            pb.WaitingTimes(ledger_id=ledger_id, bitmap=due.entries.serialize(), times=due.content)
            for ledger_id, due in sorted(image.waiting.items())
        ],
        dead_letters=[
            pb.LedgerBitmap(ledger_id=ledger_id, bitmap=bitmap.serialize())
            for ledger_id, bitmap in sorted(image.dead_letters.items())
        ],
        reasons=[
            pb.LastReason(ledger_id=ledger_id, entry_id=entry_id, text=text)
            for (ledger_id, entry_id), text in image.reasons.items()
        ],
    )
    return frame_message(MAGIC_CURSOR, message)


def decode_cursor(content: bytes, path: str) -> CursorImage:
    return decode_framed(MAGIC_CURSOR, content, path, pb.CursorFile(), _cursor_image)


def _cursor_image(message: pb.CursorFile) -> CursorImage:
    check_id(message.topic_id, "topic_id")
    check_id(message.subscription_id, "subscription_id")
    settled = [(entry.ledger_id, 0) for entry in message.settled]
    attempts_of = [(entry.ledger_id, entry.bit) for entry in message.attempts]
    waiting = [(entry.ledger_id, 0) for entry in message.waiting]
    for ledger_id, _ in chain(settled, attempts_of, waiting):
        check_ledger_id(ledger_id)
    check_rising(settled, "settled entries")
    check_rising(attempts_of, "attempts")
    check_rising(waiting, "waiting entries")
    dead_letters = [(entry.ledger_id, 0) for entry in message.dead_letters]
    for ledger_id, _ in dead_letters:
        check_ledger_id(ledger_id)
    check_rising(dead_letters, "dead letters")
    attempts: dict[int, list[BitMap]] = {}
    for bits in message.attempts:
        digits = attempts.setdefault(bits.ledger_id, [])
        check(bits.bit == len(digits) < _ATTEMPT_DIGITS_MAX, "a digit of the attempts is missing")
        digits.append(bitmap_from_bytes(bits.bitmap))
    return CursorImage(
        topic_id=message.topic_id,
        subscription_id=message.subscription_id,
        settled={entry.ledger_id: bitmap_from_bytes(entry.bitmap) for entry in message.settled},
        attempts=attempts,
        waiting={entry.ledger_id: _ledger_times(entry) for entry in message.waiting},
        dead_letters={entry.ledger_id: bitmap_from_bytes(entry.bitmap) for entry in message.dead_letters},
        reasons=_reasons(message),
    )


def _reasons(message: pb.CursorFile) -> dict[Position, str]:
    reasons: dict[Position, str] = {}
    for reason in message.reasons:
        check_ledger_id(reason.ledger_id)
        check(0 < len(reason.text.encode()) <= REASON_BYTES_MAX, "a reason is empty or too long")
        reasons[Position(reason.ledger_id, reason.entry_id)] = reason.text
    check(len(reasons) == len(message.reasons), "a message has two reasons")
    return reasons


def _ledger_times(entry: pb.WaitingTimes) -> LedgerTimes:
    due = LedgerTimes(bitmap_from_bytes(entry.bitmap), entry.times)
    count, byte_count = len(due.entries), len(due.content)
    check(count > 0, "no entry of a ledger waits")
    check(byte_count == count * _TIME.itemsize, f"{byte_count} bytes of times for {count} entries")
    checked_time(int(due.column.min()))
    return due


def subscription_to_entry(image: SubscriptionImage) -> pb.SubscriptionEntry:
    return pb.SubscriptionEntry(
        subscription_id=image.subscription_id,
        name=image.name,
        type=image.type,
        create_time_ms=image.create_time_ms,
        start=position_to_record(image.start),
        policy=subscription_policy_to_record(image.policy),
        cursor_file=image.cursor_file,
        mark=position_to_record(image.mark),
        paused=image.paused,
    )


def subscription_from_entry(entry: pb.SubscriptionEntry) -> SubscriptionImage:
    """Raises ValueError for what no subscription can have."""
    check_id(entry.subscription_id, "subscription_id")
    check(bool(entry.name), "a subscription has no name")
    check(entry.type in SUBSCRIPTION_TYPES, f"subscription type {entry.type}")
    # It becomes a path, which must not leave its folder.
    named = not entry.cursor_file or _CURSOR_FILE.fullmatch(entry.cursor_file) is not None
    check(named, f"cursor file {entry.cursor_file[:100]!r}")
    return SubscriptionImage(
        subscription_id=entry.subscription_id,
        name=entry.name,
        type=entry.type,
        create_time_ms=checked_time(entry.create_time_ms),
        start=position_from_record(entry.start),
        policy=subscription_policy_from_record(entry.policy),
        cursor_file=entry.cursor_file,
        mark=position_from_record(entry.mark),
        paused=entry.paused,
    )


def _ledger_to_entry(image: LedgerImage) -> pb.LedgerEntry:
    capture, facts = image.capture, image.facts
    return pb.LedgerEntry(
        ledger_id=capture.ledger_id,
        generation=capture.generation,
        entry_count=capture.entry_count,
        data_bytes=capture.data_bytes,
        sealed=capture.sealed,
        times_crcs=capture.times_crcs,
        rows_crcs=capture.rows_crcs,
        first_publish_ms=facts.first_publish_ms,
        amendments_file=image.amendments_file,
        last_due_ms=facts.last_due_ms,
        last_expire_ms=min(facts.last_expire_ms, EXPIRE_MS_MAX),  # whatever a sum came to, it is written
        last_publish_ms=facts.last_publish_ms,
        sparse=pb.SparseRecord(**capture.sparse._asdict()) if capture.sparse else None,
        packed_bytes=capture.packed_bytes,
    )


def _ledger_from_entry(entry: pb.LedgerEntry, topic_id: int) -> LedgerImage:
    check_ledger_id(entry.ledger_id)
    check(entry.entry_count <= ENTRY_ID_MAX + 1, f"{entry.entry_count} entries in a ledger")
    check(entry.data_bytes <= _DATA_BYTES_MAX, f"{entry.data_bytes} bytes in a ledger")
    capture = LedgerCapture(
        topic_id=topic_id,
        ledger_id=entry.ledger_id,
        generation=entry.generation,
        entry_count=entry.entry_count,
        data_bytes=entry.data_bytes,
        sealed=entry.sealed,
        times_crcs=tuple(entry.times_crcs),
        rows_crcs=tuple(entry.rows_crcs),
        sparse=_sparse_sizes(entry),
        packed_bytes=entry.packed_bytes,
    )
    check(entry.sealed or not entry.packed_bytes, "the rows of a ledger are packed that takes entries")
    check((capture.data_bytes > 0) == (capture.row_count > 0), "a ledger has bytes without entries, or none")
    crc_count = 0 if capture.sealed else block_count(capture.entry_count)
    counts = (len(capture.times_crcs), len(capture.rows_crcs))
    check(counts == (crc_count, crc_count), f"{counts} block checksums where there are {crc_count}")
    named = _AMENDMENTS_FILE.fullmatch(entry.amendments_file) if entry.amendments_file else None
    check(
        not entry.amendments_file or (named is not None and named[1] == str(entry.ledger_id)),
        "an amendments file is not its ledger's",
    )
    facts = LedgerFacts(
        checked_time(entry.first_publish_ms),
        checked_time(entry.last_due_ms),
        min(checked_time(entry.last_expire_ms), EXPIRE_MS_MAX),
        checked_time(entry.last_publish_ms),
    )
    return LedgerImage(capture, facts, entry.amendments_file)


def _sparse_sizes(entry: pb.LedgerEntry) -> SparseSizes | None:
    if not entry.HasField("sparse"):
        return None
    sizes = SparseSizes(entry.sparse.present_count, entry.sparse.present_bytes)
    check(entry.sealed, "a ledger was rewritten that takes entries")
    check(sizes.present_count <= entry.entry_count, f"{sizes.present_count} entries are there of fewer")
    check(sizes.present_bytes >= PRESENT_BYTES_MIN, "a ledger does not say which entries are there")
    return sizes


def position_to_record(position: Position) -> pb.PositionRecord:
    return pb.PositionRecord(ledger_id=position.ledger_id, entry_id=position.entry_id)


def position_from_record(record: pb.PositionRecord) -> Position:
    check(record.ledger_id <= LEDGER_ID_MAX, f"ledger_id {record.ledger_id}")
    # One more than the greatest id: a position may be the end of a ledger.
    check(record.entry_id <= ENTRY_ID_MAX + 1, f"entry_id {record.entry_id}")
    return Position(record.ledger_id, record.entry_id)


# Checks of values from disk, shared with the journal's records. Each raises ValueError, which the decoders turn
# into `Corrupt`.


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def check_known(message: Message) -> None:
    """Raise ValueError for fields that a newer version writes: who goes on without them decides otherwise."""
    size = message.ByteSize()
    message.DiscardUnknownFields()
    check(
        message.ByteSize() == size, "it has fields that a newer version wrote: start that one, or a later one"
    )


def parse_known(kind: type[_M], body: memoryview) -> _M:
    """Parse the message in `body`. Raises DecodeError, and ValueError as `check_known` does."""
    message = kind.FromString(bytes(body))
    check_known(message)
    return message


def check_id(value: int, what: str, last: int = ID_MAX) -> None:
    """Ids begin with 1."""
    check(1 <= value <= last, f"{what} {value}")


def check_ledger_id(value: int) -> None:
    check_id(value, "ledger_id", LEDGER_ID_MAX)


def check_rising(values: Sequence[tuple[int, int]], what: str) -> None:
    check(all(left < right for left, right in pairwise(values)), f"{what} are out of order")


def checked_lsn(value: int) -> int:
    check(value <= ID_MAX, f"lsn {value}")
    return value


def checked_time(value: int) -> int:
    check(value >= 0, f"time {value}")
    return value


def bitmap_from_bytes(content: bytes) -> BitMap:
    """A set of entry ids, from exactly what `serialize` wrote."""
    check(len(content) > 0, "a bitmap is missing")  # pyroaring raises IndexError for it
    bitmap = BitMap.deserialize(content)
    # It reads as far as it needs to, and leaves the rest.
    check(len(bitmap.serialize()) == len(content), "a bitmap is longer than it should be")
    return bitmap


def frame_content(magic: bytes, content: bytes) -> bytes:
    """An encoded message with the head that tells what it is, and guards it."""
    return _FRAME.pack(magic, VERSION, b"", len(content), _crc(VERSION, content)) + content


def frame_message(magic: bytes, message: Message) -> bytes:
    return frame_content(magic, message.SerializeToString(deterministic=True))


def decode_framed(magic: bytes, framed: bytes, path: str, message: _M, image_of: Callable[[_M], _T]) -> _T:
    content = _unframe(magic, framed, path)
    try:
        message.ParseFromString(content)
        check_known(message)
        return image_of(message)
    except (DecodeError, ValueError) as error:
        raise Corrupt(
            f"A {_NAMES[magic]} has impossible values: {error}",
            path=path,
            offset=FRAME_BYTES,
            advice=_ADVICE,
        ) from error


def _unframe(magic: bytes, framed: bytes, path: str) -> bytes:
    name = _NAMES[magic]
    if len(framed) < FRAME_BYTES:
        raise Corrupt(f"A {name} is too short", path=path, offset=0, advice=_ADVICE)
    first_bytes, version, zero, length, crc = _FRAME.unpack_from(framed)
    if first_bytes != magic:
        raise Corrupt(f"A {name} does not begin with its magic bytes", path=path, offset=0, advice=_ADVICE)
    if version != VERSION:
        raise Corrupt(
            f"A {name} has version {version}; this broker reads version {VERSION}",
            path=path,
            offset=4,
            advice="Start the version of the broker that wrote it.",
        )
    content = framed[FRAME_BYTES:]
    if any(zero) or length > CONTENT_BYTES_MAX or length != len(content) or crc != _crc(version, content):
        raise Corrupt(f"A {name}'s checksum does not match", path=path, offset=8, advice=_ADVICE)
    return content


def _crc(version: int, content: bytes) -> int:
    head = google_crc32c.value(struct.pack("<BI", version, len(content)))
    return int(google_crc32c.extend(head, content))


_ADVICE = "Restore the data directory from a backup."
