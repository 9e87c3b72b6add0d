"""The journal's records as bytes: they come back as they were, and any other bytes are `Corrupt`."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import ENTRY_ID_MAX, FLAG_DELAYED, LEDGER_ID_MAX, ROW, TIME_MS_MAX, Position
from broker.policy import SubscriptionPolicy
from broker.storage.bulk import BulkDefinition, BulkEnd, BulkKind, BulkProgress, BulkStep
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.compacted import CompactedLedger, LedgersCompacted
from broker.storage.dump import dump_file
from broker.storage.frame import encode_group
from broker.storage.manifest import ID_MAX, SubscriptionImage, subscription_to_entry
from broker.storage.record_types import RecordType
from broker.storage.records import (
    BulkStepped,
    GivenBack,
    LedgersDropped,
    Produced,
    Record,
    Recurred,
    Replaced,
    ReturnReason,
    Seeked,
    Sequences,
    Settled,
    SettleReason,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
    TopicCreated,
    TopicDeleted,
    TopicPolicyChanged,
    Transferred,
    decode_record,
)
from broker.storage.recurring import RecurringStep
from broker.storage.recurring_values import Definition, RecurringProgress, RecurringRule
from broker.storage.segment import encode_header
from broker.storage.v1 import manifest_pb2 as pb
from broker.testing.mem_vfs import MemVfs
from tests.golden import make
from tests.unit.storage.test_manifest import (
    bitmaps,
    ids,
    ledger_ids,
    names,
    positions,
    subscription_images,
    times,
)
from tests.unit.storage.test_policy import subscription_policies, topic_policies

TYPES = [each for each in RecordType if each not in (RecordType.COMMIT, RecordType.LOG_BLANK)]


GOLDEN = [*make.records(), *make.later_records()]


def encode(record: Record) -> bytes:
    return b"".join(bytes(part) for part in record.encode())


def decode(record_type: int, body: bytes) -> Record:
    return decode_record(record_type, memoryview(body))


def produced(count: int = 3, **changes: Any) -> Produced:
    lengths = np.arange(count) % 7 + 2
    rows = np.zeros(count, ROW)
    rows["offset"] = lengths.cumsum() - lengths + 100
    rows["length"] = lengths
    values: dict[str, Any] = {
        "topic_id": 1,
        "ledger_id": 2,
        "first_entry_id": 9,
        "publish_time_ms": 5,
        "times": np.arange(count, dtype=np.int64),
        "rows": rows,
        "frames": bytes(int(lengths.sum())),
    }
    return Produced(**{**values, **changes})


def sequences(*sequence_ids: int, **changes: Any) -> Sequences:
    values: dict[str, Any] = {
        "producer_name": "übung",
        "floor": 3,
        "sequence_ids": np.array(sequence_ids, np.uint64),
    }
    return Sequences(**{**values, **changes})


def changed(entry_ids: set[int], time_ms: int, *, moves: bool) -> Changed:
    column = np.array(sorted(entry_ids), dtype=np.uint32)
    old_ms = np.full(len(column), time_ms, dtype=np.int64)
    return Changed(column, old_ms, old_ms % TIME_MS_MAX + 1 if moves else None)


def changes(*, moves: bool) -> st.SearchStrategy[dict[int, Changed]]:
    entries = st.sets(st.integers(0, ENTRY_ID_MAX), min_size=1, max_size=5)
    of_ledger = st.builds(changed, entries, st.integers(1, TIME_MS_MAX), moves=st.just(moves))
    return st.dictionaries(ledger_ids, of_ledger, min_size=1, max_size=3)


entry_maps = st.dictionaries(ledger_ids, bitmaps, max_size=4)
STEP = RecurringStep("report", RecurringProgress(5))

BULK_STEP = BulkStep(5)
records: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        lambda count, topic_id, ledger_id, first, publish_ms, deliver_ms: produced(
            count,
            topic_id=topic_id,
            ledger_id=ledger_id,
            first_entry_id=first,
            publish_time_ms=publish_ms,
            times=np.full(count, deliver_ms, np.int64),
        ),
        st.integers(1, 50),
        ids,
        ledger_ids,
        st.integers(0, ENTRY_ID_MAX - 49),
        times,
        st.integers(0, TIME_MS_MAX),
    ),
    st.builds(
        lambda given, name, forgotten, floor: produced(
            len(given),
            sequences=sequences(*given, producer_name=name, forgotten_name=forgotten, floor=floor),
        ),
        st.lists(st.integers(1, (1 << 64) - 1), min_size=1, max_size=9, unique=True).map(
            lambda given: [0, *sorted(given)]
        ),
        st.sampled_from(["p", "ü" * 127]),
        st.sampled_from(["", "q"]),
        st.integers(0, (1 << 64) - 1),
    ),
    st.builds(Settled, ids, ids, st.sampled_from(SettleReason), entry_maps),
    st.builds(
        GivenBack,
        ids,
        ids,
        st.sampled_from(ReturnReason),
        times,
        entry_maps,
        st.sampled_from(["", "boom", "ü" * 512]),
    ),
    st.builds(TopicCreated, ids, names, times, topic_policies),
    st.builds(TopicDeleted, ids),
    st.builds(TopicPolicyChanged, ids, topic_policies),
    st.builds(
        lambda topic_id, image: SubscriptionCreated(
            topic_id, SubscriptionImage(**{**image, "cursor_file": ""})
        ),
        ids,
        ids.flatmap(subscription_images).map(
            lambda image: {name: getattr(image, name) for name in SubscriptionImage.__slots__}
        ),
    ),
    st.builds(SubscriptionDeleted, ids, ids),
    st.builds(SubscriptionChanged, ids, ids, subscription_policies, st.booleans()),
    st.builds(Seeked, ids, ids, positions),
    st.builds(
        LedgersDropped, ids, st.sets(ledger_ids, min_size=1, max_size=4).map(lambda some: tuple(sorted(some)))
    ),
    st.builds(
        lambda count, entries, only_for: Transferred(
            produced(count), Settled(2, 3, SettleReason.DEAD_LETTERED, entries), only_for
        ),
        st.integers(1, 9),
        entry_maps,
        st.one_of(st.just(0), ids),
    ),
    st.builds(Cancelled, ids, changes(moves=False)),
    st.builds(Moved, ids, changes(moves=True)),
    st.builds(
        lambda count, ledgers: Replaced(produced(count), Cancelled(1, ledgers)),
        st.integers(1, 9),
        changes(moves=False),
    ),
    st.builds(
        lambda change, definition, progress, end, forgotten: BulkStepped(
            1, BulkStep(5, definition, progress, end, 7, "WHY", "why", forgotten), change
        ),
        st.one_of(
            st.none(),
            st.builds(Cancelled, st.just(1), changes(moves=False)),
            st.builds(Moved, st.just(1), changes(moves=True)),
        ),
        st.one_of(
            st.none(),
            st.builds(
                BulkDefinition,
                st.sampled_from(BulkKind),
                st.integers(0, TIME_MS_MAX),
                st.integers(0, 5),
                st.integers(6, TIME_MS_MAX + 1),
                st.text(max_size=3),
                st.booleans(),
                st.text(max_size=3),
                st.text(max_size=3),
                st.integers(0, TIME_MS_MAX),
                st.integers(0, 9),
            ),
        ),
        st.one_of(
            st.none(),
            st.builds(
                lambda place, done: BulkProgress(place, 30, 20, done), st.just((1, 2, 3)), st.integers(0, 20)
            ),
        ),
        st.sampled_from(BulkEnd),
        st.lists(st.integers(6, 9)).map(tuple),
    ),
    st.builds(
        lambda count, ledgers, some: Recurred(
            1,
            tuple(
                RecurringStep(name, RecurringProgress(5, 6, 7) if count else RecurringProgress(5), *rest)
                for name, *rest in some
            ),
            produced(count) if count else None,
            Cancelled(1, ledgers) if ledgers else None,
        ),
        st.integers(0, 9),
        st.one_of(st.just({}), changes(moves=False)),
        st.lists(
            st.tuples(
                names,
                st.one_of(
                    st.none(), st.builds(Definition, st.just(RecurringRule(cron="* * * * *")), st.just(b""))
                ),
            ),
            min_size=1,
            unique_by=lambda step: step[0],
        ),
    ),
    st.builds(
        lambda topic_id, lsn, ledger_ids, generation, present, files_follow: LedgersCompacted(
            topic_id,
            lsn,
            tuple(
                CompactedLedger(each, generation, generation + 1, 9 if present else 0, 40, present, 7)
                for each in sorted(ledger_ids)
            ),
            files_follow,
        ),
        ids,
        ids,
        st.sets(ledger_ids, min_size=1, max_size=4),
        st.integers(0, (1 << 32) - 2),
        bitmaps,
        st.booleans(),
    ),
)


def test_every_number_has_a_record() -> None:
    assert {record.type for record in get_args(Record)} == set(TYPES)


@given(records)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    found = decode(record.type, encode(record))
    assert type(found) is type(record)
    assert encode(found) == encode(record)
    if not isinstance(found, Produced | Transferred | Cancelled | Moved | Replaced | Recurred | BulkStepped):
        assert found == record


def dumped(record: Record) -> dict[str, Any]:
    header, body = encode_header(1), encode(record)
    group = b"".join(encode_group(1, len(header), [(record.type, [body], len(body))])[0])
    vfs = MemVfs()
    vfs.open("file", create=True).pwrite([header + group], 0)
    [line] = [line for line in dump_file(vfs, "file") if line["line"] == "record"]
    return line


@given(records)
def test_a_dump_shows_the_fields_of_any_record(record: Record) -> None:
    line = dumped(record)
    assert line["record"] == type(record).__name__ and "error" not in line
    of_topic = record.produced if isinstance(record, Transferred | Replaced) else record
    assert line.get("produced", line)["topic_id"] == of_topic.topic_id
    is_bare = line.keys() == dumped(TopicDeleted(1)).keys()
    assert is_bare == isinstance(record, TopicDeleted)


def test_sequence_ids_come_back_as_they_were() -> None:
    record = produced(sequences=sequences(0, 7, (1 << 64) - 1, forgotten_name="q"))
    found = decode(RecordType.PRODUCED, encode(record))
    assert isinstance(found, Produced) and found.sequences is not None
    assert found.sequences.sequence_ids.tolist() == [0, 7, (1 << 64) - 1]
    assert (found.sequences.producer_name, found.sequences.forgotten_name) == ("übung", "q")
    assert (found.sequences.floor, found.frames) == (3, record.frames)


def test_a_batch_comes_back_as_it_was() -> None:
    record = produced(5000)
    found = decode(RecordType.PRODUCED, encode(record))
    assert isinstance(found, Produced)
    assert (found.times == record.times).all() and (found.rows == record.rows).all()
    assert found.times.dtype == np.dtype(np.int64)
    assert found.rows.dtype == ROW
    assert found.times.flags.writeable  # a copy, which does not keep the segment in memory
    assert (found.topic_id, found.ledger_id, found.first_entry_id) == (1, 2, 9)
    assert (found.publish_time_ms, found.frames) == (5, record.frames)


# Any bytes


@pytest.mark.parametrize("record_type", TYPES)
@given(body=st.binary(max_size=200))
def test_any_bytes_give_a_record_or_corrupt(record_type: int, body: bytes) -> None:
    with suppress(Corrupt):
        record = decode(record_type, body)
        assert record.type == record_type
        encode(record)


@pytest.mark.parametrize("record", GOLDEN, ids=lambda record: type(record).__name__)
@given(data=st.data())
def test_changed_bytes_give_a_record_or_corrupt(record: Record, data: st.DataObject) -> None:
    body = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    with suppress(Corrupt):
        found = decode(record.type, bytes(body))
        if isinstance(found, Produced):
            assert encode(found) == bytes(body)  # it has one form only
        if isinstance(found, Settled | GivenBack):
            # A bitmap holds offsets that CRoaring does not look at, so only the length must be the same.
            assert len(encode(found)) == len(body)
            assert encode(decode(found.type, encode(found))) == encode(found)


@pytest.mark.parametrize("record", GOLDEN, ids=lambda record: type(record).__name__)
def test_a_cut_record_is_corrupt_or_another_record(record: Record) -> None:
    body = encode(record)
    for length in range(min(len(body), 400)):
        if isinstance(record, Produced | Settled | GivenBack):
            with pytest.raises(Corrupt):
                decode(record.type, body[:length])
        else:  # a protobuf message may end after any of its fields; the journal's crc covers the length
            with suppress(Corrupt):
                decode(record.type, body[:length])


NEWER_FIELD = bytes((0xFA, 0x7F, 1, 0))
"""Field 2047 of a message, of one octet."""


def with_newer_field(message: Message) -> Iterator[bytes]:
    """Encoded messages that have a field more, one for each message in it that may have one."""
    yield message.SerializeToString() + NEWER_FIELD
    for field, content in message.ListFields():
        if field.message_type is not None:
            part = content[0] if field.is_repeated else content
            for inner in with_newer_field(part):
                changed = type(message)()
                changed.CopyFrom(message)
                target = getattr(changed, field.name)
                (target[0] if field.is_repeated else target).ParseFromString(inner)
                yield changed.SerializeToString()


FRAMED_MESSAGES = [record for record in GOLDEN if hasattr(pb, type(record).__name__)]


@pytest.mark.parametrize("record", FRAMED_MESSAGES, ids=lambda record: type(record).__name__)
def test_a_field_that_a_newer_version_decided_by_is_not_passed_over(record: Record) -> None:
    """A standby that applied the record without it would have another state than the owner, and take over with it."""
    bodies = list(with_newer_field(getattr(pb, type(record).__name__).FromString(encode(record))))
    assert bodies
    for body in bodies:
        with pytest.raises(Corrupt, match="a newer version wrote"):
            decode(record.type, body)


def test_every_record_that_protobuf_writes_is_tried_with_a_field_more() -> None:
    tried = {type(record) for record in FRAMED_MESSAGES}
    assert tried == {kind for kind in get_args(Record) if hasattr(pb, kind.__name__)}


@pytest.mark.parametrize("record_type", [1, 18, *range(21, 256)])
def test_types_that_are_not_in_use_are_corrupt(record_type: int) -> None:
    with pytest.raises(Corrupt, match="unknown type"):
        decode(record_type, b"")


def test_counts_are_believed_only_as_far_as_the_bytes_reach() -> None:
    huge = (1 << 32) - 1
    bodies = [
        (RecordType.PRODUCED, struct.pack("<QQqIIII", 1, 1, 0, 0, huge, huge, 0)),
        (RecordType.PRODUCED, struct.pack("<QQqIIII", 1, 1, 0, 0, huge, 0, 0) + bytes(52)),
        (RecordType.PRODUCED, struct.pack("<QQqIIII", 1, 1, 0, 0, 1, huge, 0) + bytes(52)),
        (RecordType.SETTLED, struct.pack("<QQB3xI", 1, 1, 1, huge)),
        (RecordType.SETTLED, struct.pack("<QQB3xIQII", 1, 1, 1, huge, 1, huge, 0) + bytes(8)),
        (RecordType.GIVEN_BACK, struct.pack("<QQB3xIq", 1, 1, 1, huge, 0)),
        # A bitmap that claims as many containers as there can be, then one that claims more.
        (RecordType.SETTLED, settled_with(struct.pack("<II", 12346, 65536))),
        (RecordType.SETTLED, settled_with(struct.pack("<II", 12346, huge))),
        (RecordType.SETTLED, settled_with(struct.pack("<HH", 12347, 65535))),
        (RecordType.TOPIC_CREATED, b"\x12\xff\xff\xff\xff\x0f"),
        (RecordType.SUBSCRIPTION_CREATED, b"\x08\x01\x12\xff\xff\xff\xff\x0f"),
    ]
    tracemalloc.start()
    for record_type, body in bodies:
        with pytest.raises(Corrupt):
            decode(record_type, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def settled_with(bitmap: bytes) -> bytes:
    return struct.pack("<QQB3xIQII", 1, 1, 1, 1, 5, len(bitmap), 0) + bitmap


# Values that no broker writes


def negative(count: int) -> Any:
    return np.full(count, -1, np.int64)


def rows_with(column: str, value: int) -> Any:
    rows = produced().rows
    rows[column][0] = value
    return rows


@pytest.mark.parametrize(
    "record",
    [
        produced(topic_id=0),
        produced(topic_id=1 << 63),
        produced(ledger_id=0),
        produced(ledger_id=LEDGER_ID_MAX + 1),
        produced(first_entry_id=ENTRY_ID_MAX - 1),
        produced(publish_time_ms=-1),
        produced(times=negative(3)),
        produced(times=np.full(3, TIME_MS_MAX + 1, np.int64)),
        produced(rows=rows_with("offset", 101)),
        produced(frames=bytes(8)),
        produced(0, rows=np.zeros(0, ROW)),
        produced(sequences=sequences(0, 0, 0)),
        produced(sequences=sequences(1, 0, 1)),
        produced(sequences=sequences(2, 1, 0)),
        produced(sequences=sequences(1, 2)),
        produced(sequences=sequences(1, 2, 3, producer_name="")),
        produced(sequences=sequences(1, 2, 3, forgotten_name="übung")),
        Settled(0, 1, SettleReason.ACKED, {}),
        Settled(1, 0, SettleReason.ACKED, {}),
        Settled(1, 1, SettleReason.ACKED, {0: BitMap([1])}),
        Settled(1, 1, SettleReason.ACKED, {LEDGER_ID_MAX + 1: BitMap([1])}),
        Settled(1, 1, 0, {}),  # type: ignore[arg-type]
        Settled(1, 1, 8, {}),  # type: ignore[arg-type]
        SubscriptionChanged(0, 1, SubscriptionPolicy(), False),
        SubscriptionChanged(1, 0, SubscriptionPolicy(), False),
        Seeked(0, 1, Position(1, 1)),
        Seeked(1, 0, Position(1, 1)),
        Seeked(1, 1, Position(LEDGER_ID_MAX + 1, 1)),
        LedgersDropped(0, (1,)),
        LedgersDropped(1, ()),
        LedgersDropped(1, (0,)),
        LedgersDropped(1, (2, 1)),
        LedgersDropped(1, (2, 2)),
        Transferred(produced(), Settled(1, 1, SettleReason.REQUEUED, {}), 0),
        Transferred(produced(), Settled(2, 1, SettleReason.REQUEUED, {}), ID_MAX + 1),
        Cancelled(0, {1: changed({1}, 5, moves=False)}),
        Cancelled(1, {}),
        Cancelled(1, {0: changed({1}, 5, moves=False)}),
        Cancelled(1, {1: changed({1}, 0, moves=False)}),
        Cancelled(1, {1: changed(set(), 5, moves=False)}),
        Cancelled(1, {1: Changed(np.array([2, 1], np.uint32), np.array([5, 5], np.int64))}),
        Cancelled(1, {1: changed({1}, 5, moves=True)}),
        Moved(1, {1: changed({1}, 5, moves=False)}),
        Moved(1, {1: changed({1}, -5, moves=True)}),
        Replaced(produced(topic_id=2), Cancelled(1, {1: changed({1}, 5, moves=False)})),
        BulkStepped(0, BULK_STEP),
        BulkStepped(2, BULK_STEP, Cancelled(1, {1: changed({1}, 5, moves=False)})),
        BulkStepped(1, replace(BULK_STEP, bulk_id=0)),
        BulkStepped(1, replace(BULK_STEP, end=4)),  # type: ignore[arg-type]
        BulkStepped(1, replace(BULK_STEP, end_ms=-1)),
        BulkStepped(1, replace(BULK_STEP, forgotten_ids=(5,))),
        BulkStepped(1, replace(BULK_STEP, forgotten_ids=(0,))),
        *(
            BulkStepped(1, replace(BULK_STEP, progress=progress))
            for progress in (
                BulkProgress((-1, 0, 0)),
                BulkProgress((TIME_MS_MAX + 2, 0, 0)),
                BulkProgress((0, LEDGER_ID_MAX + 1, 0)),
                BulkProgress((0, 0, ENTRY_ID_MAX + 2)),
                BulkProgress((0, 0, 0), 1, 2, 0),
                BulkProgress((0, 0, 0), 2, 1, 2),
            )
        ),
        *(
            BulkStepped(1, replace(BULK_STEP, definition=definition))
            for definition in (
                BulkDefinition(0),  # type: ignore[arg-type]
                BulkDefinition(BulkKind.MOVE, -1),
                BulkDefinition(BulkKind.SHIFT, -TIME_MS_MAX - 1),
                BulkDefinition(BulkKind.CANCEL, 0, 5, 5),
                BulkDefinition(BulkKind.CANCEL, 0, -1),
                BulkDefinition(BulkKind.CANCEL, 0, 0, TIME_MS_MAX + 2),
                BulkDefinition(BulkKind.CANCEL, begin_ms=-1),
                BulkDefinition(BulkKind.CANCEL, total=1 << 63),
            )
        ),
        Recurred(1, ()),
        Recurred(0, (STEP,)),
        Recurred(2, (STEP,), produced()),
        Recurred(2, (STEP,), None, Cancelled(1, {1: changed({1}, 5, moves=False)})),
        Recurred(1, (STEP, STEP)),
        Recurred(1, (replace(STEP, name=""),)),
        Recurred(1, (replace(STEP, place=1),), produced(1)),
        Recurred(1, (replace(STEP, progress=RecurringProgress(5, 6, 7)),)),
        Recurred(1, (replace(STEP, progress=RecurringProgress(6, 6, 7)),), produced()),
        Recurred(1, (replace(STEP, progress=RecurringProgress(-1)),)),
        *(
            Recurred(1, (replace(STEP, definition=definition),))
            for definition in (
                Definition(RecurringRule(), b""),
                Definition(RecurringRule(cron="* * * * *", interval_ms=1_000), b""),
                Definition(RecurringRule(interval_ms=999), b""),
                Definition(RecurringRule(times_ms=(2, 1)), b""),
                Definition(RecurringRule(interval_ms=1_000, zone=""), b""),
                Definition(RecurringRule(interval_ms=1_000), b"no message"),
                Definition(RecurringRule(interval_ms=1_000), b"", jitter_ms=-1),
                Definition(RecurringRule(interval_ms=1_000), b"", overdue=0),  # type: ignore[arg-type]
            )
        ),
        GivenBack(1, 1, ReturnReason.NACKED, -1, {}),
        GivenBack(1, 1, 0, 0, {}),  # type: ignore[arg-type]
        GivenBack(1, 1, 5, 0, {}),  # type: ignore[arg-type]
        GivenBack(1, 1, ReturnReason.NACKED, 0, {}, "r" * 1025),
        TopicDeleted(0),
        TopicDeleted(ID_MAX + 1),
        SubscriptionDeleted(0, 1),
        SubscriptionDeleted(1, 0),
        SubscriptionCreated(1, SubscriptionImage(1, "s", 1, 0, Position(0, 0), cursor_file="1.a")),
        SubscriptionCreated(1, SubscriptionImage(1, "s", 7, 0, Position(0, 0))),
        SubscriptionCreated(0, SubscriptionImage(1, "s", 1, 0, Position(0, 0))),
    ],
)
def test_a_record_with_a_value_out_of_range_is_corrupt(record: Record) -> None:
    with pytest.raises(Corrupt):
        decode(record.type, encode(record))


@pytest.mark.parametrize(
    "message",
    [
        pb.TopicCreated(topic_id=0, name="x"),
        pb.TopicCreated(topic_id=1, name=""),
        pb.TopicCreated(topic_id=1, name="x", create_time_ms=-1),
        pb.TopicCreated(topic_id=1, name="x", policy=pb.TopicPolicyRecord(tracker=9)),
        pb.TopicCreated(topic_id=1, name="x", policy=pb.TopicPolicyRecord(tick_ms=-1)),
    ],
)
def test_a_topic_with_a_value_out_of_range_is_corrupt(message: pb.TopicCreated) -> None:
    with pytest.raises(Corrupt):
        decode(RecordType.TOPIC_CREATED, message.SerializeToString())


def test_bytes_that_are_always_zero_are_looked_at() -> None:
    settled = Settled(1, 1, SettleReason.ACKED, {5: BitMap([1])})
    for record, places in (
        (produced(), (36, 39)),
        (settled, (17, 19, 36)),
        (make.records()[4], (17, 19, 44)),
    ):
        body = bytearray(encode(record))
        for place in places:
            assert body[place] == 0
            body[place] = 1
            with pytest.raises(Corrupt):
                decode(record.type, bytes(body))
            body[place] = 0
        decode(record.type, bytes(body))


def test_sets_out_of_order_or_named_twice_are_corrupt() -> None:
    one, two = (
        struct.pack("<QII", i, len(BitMap([1]).serialize()), 0) + BitMap([1]).serialize() for i in (1, 2)
    )
    head = struct.pack("<QQB3xI", 1, 1, 1, 2)
    decode(RecordType.SETTLED, head + one + two)
    for sets in (two + one, one + one, one + two + b"\0", one):
        with pytest.raises(Corrupt):
            decode(RecordType.SETTLED, head + sets)


def test_the_columns_in_the_golden_batch_are_what_they_should_be() -> None:
    times_, rows, _ = make.columns(3)
    assert ((rows["flags"] & FLAG_DELAYED != 0) == (times_ > 0)).all()
    assert subscription_to_entry(make.topic_image().subscriptions[0]).name == "billing"
