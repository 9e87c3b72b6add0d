"""The manifests: which files there are, and what recovery resumes from.

`broker.manifest` is the root, `topics/<topic_id>/manifest` one topic's, `topics/<topic_id>/cursors/<file>` one
subscription's settled entries. All three have the same frame:

    magic 4 (PDMB, PDMT, PDMC), version 1, zero 3, length 4, crc32c 4, protobuf message (manifest.proto)

The crc covers version, length and message. Files are replaced whole (`replace_file`), so that a crash leaves
the old content or the new. Pure: bytes in, dataclasses out; any bytes give a value or `Corrupt`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import google_crc32c
from google.protobuf.message import DecodeError, Message
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import START, Position
from broker.storage.policy import (
    SubscriptionPolicy,
    TopicPolicy,
    subscription_policy_from_record,
    subscription_policy_to_record,
    topic_policy_from_record,
    topic_policy_to_record,
)
from broker.storage.v1 import manifest_pb2 as pb

MAGIC_BROKER = b"PDMB"
MAGIC_TOPIC = b"PDMT"
MAGIC_CURSOR = b"PDMC"
VERSION = 1
CONTENT_BYTES_MAX = 1 << 30

_FRAME = struct.Struct("<4sB3xII")


@dataclass(frozen=True, slots=True)
class BrokerImage:
    """The root: what the broker is made of."""

    broker_id: str
    checkpoint_lsn: int
    topics: dict[int, str]
    next_topic_id: int
    next_ledger_id: int
    last_alive_ms: int


@dataclass(frozen=True, slots=True)
class LedgerImage:
    """What the manifest says of one ledger; files are cut to it."""

    ledger_id: int
    generation: int
    entry_count: int
    data_bytes: int
    sealed: bool
    times_crcs: tuple[int, ...]
    rows_crcs: tuple[int, ...]
    first_publish_ms: int


@dataclass(frozen=True, slots=True)
class SubscriptionImage:
    """What the manifest says of one subscription."""

    subscription_id: int
    name: str
    type: int
    create_time_ms: int
    start: Position
    policy: SubscriptionPolicy = field(default_factory=SubscriptionPolicy)
    cursor_file: str = ""
    mark: Position = START


@dataclass(frozen=True, slots=True)
class TopicImage:
    """One topic's manifest."""

    topic_id: int
    name: str
    create_time_ms: int
    policy: TopicPolicy
    applied_lsn: int
    ledgers: tuple[LedgerImage, ...]
    subscriptions: tuple[SubscriptionImage, ...]
    next_subscription_id: int
    indexed_through: Position
    index_lsn: int
    frontier_ms: int


@dataclass(frozen=True, slots=True)
class CursorImage:
    """What one subscription settled beyond its mark, how often it was sent what, and what waits to be sent again."""

    topic_id: int
    subscription_id: int
    settled: dict[int, BitMap]
    attempts: dict[int, list[BitMap]]
    waiting: tuple[tuple[int, int, BitMap], ...]  # (not_before_ms, ledger_id, entries)


def encode_broker(image: BrokerImage) -> bytes:
    topics = [pb.TopicEntry(topic_id=topic_id, name=name) for topic_id, name in sorted(image.topics.items())]
    message = pb.BrokerManifest(
        broker_id=image.broker_id,
        checkpoint_lsn=image.checkpoint_lsn,
        topics=topics,
        next_topic_id=image.next_topic_id,
        next_ledger_id=image.next_ledger_id,
        last_alive_ms=image.last_alive_ms,
    )
    return _frame(MAGIC_BROKER, message)


def decode_broker(content: bytes, path: str) -> BrokerImage:
    message = pb.BrokerManifest()
    _unframe(MAGIC_BROKER, content, path, message)
    topics = {entry.topic_id: entry.name for entry in message.topics}
    if len(topics) != len(message.topics) or len(set(topics.values())) != len(topics):
        raise Corrupt("The broker's manifest names a topic twice", path=path)
    return BrokerImage(
        broker_id=message.broker_id,
        checkpoint_lsn=message.checkpoint_lsn,
        topics=topics,
        next_topic_id=message.next_topic_id,
        next_ledger_id=message.next_ledger_id,
        last_alive_ms=message.last_alive_ms,
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
        indexed_through=_position_to_record(image.indexed_through),
        index_lsn=image.index_lsn,
        frontier_ms=image.frontier_ms,
    )
    return _frame(MAGIC_TOPIC, message)


def decode_topic(content: bytes, path: str) -> TopicImage:
    message = pb.TopicManifest()
    _unframe(MAGIC_TOPIC, content, path, message)
    return TopicImage(
        topic_id=message.topic_id,
        name=message.name,
        create_time_ms=message.create_time_ms,
        policy=topic_policy_from_record(message.policy),
        applied_lsn=message.applied_lsn,
        ledgers=tuple(_ledger_from_entry(entry) for entry in message.ledgers),
        subscriptions=tuple(subscription_from_entry(entry) for entry in message.subscriptions),
        next_subscription_id=message.next_subscription_id,
        indexed_through=_position_from_record(message.indexed_through),
        index_lsn=message.index_lsn,
        frontier_ms=message.frontier_ms,
    )


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
            pb.WaitingEntries(not_before_ms=not_before_ms, ledger_id=ledger_id, bitmap=bitmap.serialize())
            for not_before_ms, ledger_id, bitmap in image.waiting
        ],
    )
    return _frame(MAGIC_CURSOR, message)


def decode_cursor(content: bytes, path: str) -> CursorImage:
    message = pb.CursorFile()
    _unframe(MAGIC_CURSOR, content, path, message)
    attempts: dict[int, list[BitMap]] = {}
    try:
        for bits in message.attempts:
            slices = attempts.setdefault(bits.ledger_id, [])
            if bits.bit != len(slices):
                raise ValueError("attempt digits are out of order")
            slices.append(BitMap.deserialize(bits.bitmap))
        return CursorImage(
            topic_id=message.topic_id,
            subscription_id=message.subscription_id,
            settled={entry.ledger_id: BitMap.deserialize(entry.bitmap) for entry in message.settled},
            attempts=attempts,
            waiting=tuple(
                (entry.not_before_ms, entry.ledger_id, BitMap.deserialize(entry.bitmap))
                for entry in message.waiting
            ),
        )
    except ValueError as error:
        raise Corrupt(f"A cursor holds a bad bitmap: {error}", path=path) from error


def subscription_to_entry(image: SubscriptionImage) -> pb.SubscriptionEntry:
    return pb.SubscriptionEntry(
        subscription_id=image.subscription_id,
        name=image.name,
        type=image.type,
        create_time_ms=image.create_time_ms,
        start=_position_to_record(image.start),
        policy=subscription_policy_to_record(image.policy),
        cursor_file=image.cursor_file,
        mark=_position_to_record(image.mark),
    )


def subscription_from_entry(entry: pb.SubscriptionEntry) -> SubscriptionImage:
    return SubscriptionImage(
        subscription_id=entry.subscription_id,
        name=entry.name,
        type=entry.type,
        create_time_ms=entry.create_time_ms,
        start=_position_from_record(entry.start),
        policy=subscription_policy_from_record(entry.policy),
        cursor_file=entry.cursor_file,
        mark=_position_from_record(entry.mark),
    )


def _ledger_to_entry(image: LedgerImage) -> pb.LedgerEntry:
    return pb.LedgerEntry(
        ledger_id=image.ledger_id,
        generation=image.generation,
        entry_count=image.entry_count,
        data_bytes=image.data_bytes,
        sealed=image.sealed,
        times_crcs=image.times_crcs,
        rows_crcs=image.rows_crcs,
        first_publish_ms=image.first_publish_ms,
    )


def _ledger_from_entry(entry: pb.LedgerEntry) -> LedgerImage:
    return LedgerImage(
        ledger_id=entry.ledger_id,
        generation=entry.generation,
        entry_count=entry.entry_count,
        data_bytes=entry.data_bytes,
        sealed=entry.sealed,
        times_crcs=tuple(entry.times_crcs),
        rows_crcs=tuple(entry.rows_crcs),
        first_publish_ms=entry.first_publish_ms,
    )


def _position_to_record(position: Position) -> pb.PositionRecord:
    return pb.PositionRecord(ledger_id=position.ledger_id, entry_id=position.entry_id)


def _position_from_record(record: pb.PositionRecord) -> Position:
    return Position(record.ledger_id, record.entry_id)


def _frame(magic: bytes, message: Message) -> bytes:
    content = message.SerializeToString(deterministic=True)
    return _FRAME.pack(magic, VERSION, len(content), _crc(VERSION, content)) + content


def _unframe(magic: bytes, framed: bytes, path: str, into: Message) -> None:
    if len(framed) < _FRAME.size:
        raise Corrupt("A manifest is too short", path=path, offset=0, advice=_ADVICE)
    found, version, length, crc = _FRAME.unpack_from(framed)
    if found != magic:
        raise Corrupt("A manifest does not begin with its magic bytes", path=path, offset=0, advice=_ADVICE)
    if version != VERSION:
        raise Corrupt(
            f"A manifest has version {version}, this broker knows {VERSION}",
            path=path,
            offset=4,
            advice="Start the version of the broker that wrote it.",
        )
    content = framed[_FRAME.size :]
    if length > CONTENT_BYTES_MAX or length != len(content) or crc != _crc(version, content):
        raise Corrupt("A manifest's checksum does not match", path=path, offset=8, advice=_ADVICE)
    try:
        into.ParseFromString(content)
    except DecodeError as error:
        raise Corrupt(f"A manifest cannot be decoded: {error}", path=path, offset=_FRAME.size) from error


def _crc(version: int, content: bytes) -> int:
    head = google_crc32c.value(struct.pack("<BI", version, len(content)))
    return int(google_crc32c.extend(head, content))


_ADVICE = "Restore the data directory from a backup."
