"""Makes the golden files: one of each on-disk format, from values that never change.

    PYTHONPATH=.:clients/python python -m tests.golden.make

Files of a released version are never made again: a change of a format gets a new version, new files beside the old
ones, and a decoder that reads both.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import google_crc32c
import numpy as np
from pyroaring import BitMap

from broker.model import FLAG_DELAYED, ROW, Int64Column, Position, RowColumn
from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.storage.amendments import Amendments, AmendmentsImage, encode_amendments
from broker.storage.blocks import BLOCK_ROWS, TIME, BlockChecksums, LedgerCapture, LedgerName, SparseSizes
from broker.storage.bucket_builder import SnapshotBuilder
from broker.storage.bucket_snapshot import LedgerSpan, encode_metadata
from broker.storage.bulk import (
    BulkDefinition,
    BulkEnd,
    BulkImage,
    BulkKind,
    BulkProgress,
    BulkStanding,
    BulkStep,
)
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.compacted import CompactedLedger, LedgersCompacted
from broker.storage.frame import encode_group
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.manifest import (
    BrokerImage,
    CursorImage,
    LedgerImage,
    LedgerTimes,
    SubscriptionImage,
    TopicImage,
    encode_broker,
    encode_cursor,
    encode_topic,
)
from broker.storage.producers_file import ProducerImage, ProducersImage
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
)
from broker.storage.recurring import RecurringImage, RecurringStanding, RecurringStep
from broker.storage.recurring_values import Definition, OverdueRuns, RecurringProgress, RecurringRule
from broker.storage.segment import encode_header
from broker.storage.sparse import as_bitmap, encode_present

FOLDER = Path(__file__).parent
NOW_MS = 1_750_000_000_000
FIRST_LSN = 0x1234
SEALED = LedgerName("sealed-v1", topic_id=3, ledger_id=11, generation=0)
UNSEALED = LedgerName("unsealed-v1", topic_id=3, ledger_id=12, generation=2)
SEALED_COUNT = BLOCK_ROWS + 4  # a whole block and a partial one
UNSEALED_COUNT = 5
SPARSE = LedgerName("sparse-v2", topic_id=3, ledger_id=11, generation=1, sparse=True)
SPARSE_IDS = np.array([1, 7, 8, 9, 70, 4097], np.uint32)  # what is left of the sealed one

Columns = tuple[Int64Column, RowColumn, bytes]


def columns(count: int, first: int = 0, data_offset: int = 0) -> Columns:
    """Entries: every third is not delayed, every fifth expires, every seventh has keys."""
    ids = np.arange(first, first + count)
    frames = [b"\x12\x06\x0a\x04" + bytes([i % 251, i % 241, i % 239, i % 233]) for i in ids.tolist()]
    times = np.where(ids % 3 == 0, 0, NOW_MS + ids * 1000).astype(TIME)
    rows = np.zeros(count, ROW)
    rows["publish_time_ms"] = NOW_MS + ids // 10
    rows["expire_at_ms"] = np.where(ids % 5 == 0, NOW_MS + 86_400_000, 0)
    rows["schedule_hash"] = np.where(ids % 7 == 0, 0xFEDC_BA98_7654_3210, 0)
    rows["offset"] = np.arange(count) * 8 + data_offset
    rows["length"] = 8
    rows["crc"] = [google_crc32c.value(frame) for frame in frames]
    rows["key_hash"] = np.where(ids % 7 == 0, 0x89AB_CDEF, 0)
    rows["flags"] = np.where(times > 0, FLAG_DELAYED, 0)
    return times, rows, b"".join(frames)


def records() -> list[Record]:
    """Types 2 to 8."""
    times, rows, frames = columns(3)
    rows["publish_time_ms"] = NOW_MS
    subscription = SubscriptionImage(
        subscription_id=2,
        name="billing",
        type=3,
        create_time_ms=NOW_MS + 2,
        start=Position(11, 4),
        policy=SubscriptionPolicy(
            lease_ms=30_000,
            initial_backoff_ms=100,
            max_backoff_ms=60_000,
            backoff_multiplier=1.5,
            honor_delay=True,
        ),
        mark=Position(11, 4),
    )
    return [
        TopicCreated(
            3,
            "orders",
            NOW_MS + 1,
            TopicPolicy(
                tracker=2,
                tick_ms=500,
                max_delay_ms=86_400_000,
                default_ttl_ms=1,
                ledger_max_age_ms=3_600_000,
                ledger_max_bytes=1 << 28,
                ledger_max_entries=50_000,
            ),
        ),
        SubscriptionCreated(3, subscription),
        Produced(3, 13, 0, NOW_MS, times, rows, frames),
        Settled(3, 2, SettleReason.ACKED, {11: BitMap([4, 5, 9]), 13: BitMap([0])}),
        GivenBack(3, 2, ReturnReason.NACKED, NOW_MS + 5_000, {13: BitMap([1, 2])}, "größer als 5"),
        Settled(3, 2, SettleReason.EXPIRED, {(1 << 48) - 1: BitMap([0, (1 << 32) - 1])}),
        GivenBack(3, 2, ReturnReason.LEASE_EXPIRED, 0, {13: BitMap(range(100_000))}),
        GivenBack(3, 2, ReturnReason.RELEASED, 0, {13: BitMap([7])}),
        SubscriptionDeleted(3, 2),
        TopicDeleted(3),
    ]


def later_records() -> list[Record]:
    """Types 9 to 20, but for LOG_BLANK, which no file has; and a batch with sequence ids."""
    times, rows, frames = columns(3)
    numbered = Sequences("übung", 3, np.array([0, 7, (1 << 64) - 1], np.uint64), "q")
    produced = Produced(3, 13, 3, NOW_MS, times, rows, frames)
    old_ms = np.array([NOW_MS + 7, NOW_MS + 8], np.int64)
    changed = Changed(np.array([4, (1 << 32) - 1], np.uint32), old_ms)
    cancelled = Cancelled(3, {11: changed, (1 << 48) - 1: changed})
    moved = Moved(3, {11: replace(changed, new_ms=old_ms + 3_600_000)})
    cron = Definition(RecurringRule(cron="30 2 * * *", zone="Europe/Berlin"), b"\x0a\x01x", NOW_MS)
    delay = BulkDefinition(BulkKind.DELAY, NOW_MS + 60_000, key_prefix="shop-3/", request_id="r-1", total=70)
    return [
        replace(produced, sequences=numbered),
        cancelled,
        moved,
        Seeked(3, 2, Position(11, 8)),
        TopicPolicyChanged(3, TopicPolicy(tick_ms=500, default_ttl_ms=1)),
        SubscriptionChanged(3, 2, SubscriptionPolicy(lease_ms=30_000, backoff_multiplier=1.5), paused=True),
        LedgersDropped(3, (11, (1 << 48) - 1), NOW_MS),
        Transferred(produced, Settled(7, 1, SettleReason.DEAD_LETTERED, {9: BitMap([1, 5])}), 2),
        Replaced(produced, cancelled),
        LedgersCompacted(3, 0x1230, (CompactedLedger(11, 0, 1, 24, 40, BitMap([1, 7, 8]), NOW_MS),), True),
        Recurred(
            3,
            (
                RecurringStep("cron", RecurringProgress(NOW_MS, NOW_MS + 7, NOW_MS + 9), cron, place=2),
                RecurringStep("gone", RecurringProgress(0), deleted=True),
            ),
            produced,
            cancelled,
        ),
        BulkStepped(3, BulkStep(8, delay, BulkProgress((NOW_MS + 7, 11, 5), 50, 40, 39)), moved),
        BulkStepped(3, BulkStep(7, None, None, BulkEnd.FAILED, NOW_MS + 9, "WHY", "why", (1, 2))),
    ]


SEGMENTS = {"segment-v1.seg": (records, 2), "later-types-v1.seg": (later_records, 1)}
"""Golden segments: their records, and in how many groups. A new type of record gets a segment of its own."""


def segment(name: str) -> bytes:
    """The groups, then what a torn one behind them would leave: a record without its COMMIT."""
    make_records, group_count = SEGMENTS[name]
    data = encode_header(FIRST_LSN)
    encoded = [b"".join(bytes(part) for part in record.encode()) for record in make_records()]
    framed = [
        (int(record.type), [body], len(body)) for record, body in zip(make_records(), encoded, strict=True)
    ]
    per_group = len(framed) // group_count
    for low in range(0, len(framed), per_group):
        data += b"".join(encode_group(FIRST_LSN, len(data), framed[low : low + per_group])[0])
    torn = b"".join(encode_group(FIRST_LSN, len(data), [(8, [b"torn"], 4)])[0])
    return data + torn[:20]


def ledger(name: LedgerName, count: int, *, sealed: bool) -> dict[str, bytes]:
    times, rows, frames = columns(count)
    footers = [b"", b""]
    if sealed:
        for index, column in enumerate((times, rows)):
            checksums = BlockChecksums(column.itemsize)
            checksums.extend(column)
            footers[index] = checksums.encode_footer()
    contents = {"data": frames, "times": times.tobytes() + footers[0], "rows": rows.tobytes() + footers[1]}
    return {name.path(kind): name.header(kind).encode() + content for kind, content in contents.items()}


def capture(name: LedgerName, count: int, *, sealed: bool) -> LedgerCapture:
    """Return the capture of such a ledger."""
    times, rows, frames = columns(count)
    crcs: list[tuple[int, ...]] = []
    for column in (times, rows):
        checksums = BlockChecksums(column.itemsize)
        checksums.extend(column)
        crcs.append(() if sealed else checksums.crcs())
    ids = (name.topic_id, name.ledger_id, name.generation)
    return LedgerCapture(*ids, count, len(frames), sealed, times_crcs=crcs[0], rows_crcs=crcs[1])


def sparse() -> tuple[dict[str, bytes], LedgerCapture]:
    """A generation with a few entries of the sealed ledger, and what a manifest says of it."""
    times, rows, _ = columns(SEALED_COUNT)
    dense = columns(SEALED_COUNT)[2]
    starts = SPARSE_IDS.astype(np.int64) * 8
    frames = b"".join(dense[start : start + 8] for start in starts.tolist())
    times, rows = times[SPARSE_IDS], rows[SPARSE_IDS]
    rows["offset"] = np.arange(len(rows)) * 8
    footers = []
    for column in (times, rows):
        checksums = BlockChecksums(column.itemsize)
        checksums.extend(column)
        footers.append(checksums.encode_footer())
    section = encode_present(as_bitmap(SPARSE_IDS), SEALED_COUNT)
    contents = {
        "data": frames,
        "times": times.tobytes() + footers[0] + section,
        "rows": rows.tobytes() + footers[1],
    }
    files = {SPARSE.path(kind): SPARSE.header(kind).encode() + content for kind, content in contents.items()}
    sizes = SparseSizes(len(rows), len(section))
    return files, LedgerCapture(3, 11, 1, SEALED_COUNT, len(frames), True, sparse=sizes)


def broker_image() -> BrokerImage:
    return BrokerImage(
        broker_id="6f9619ff-8b86-4011-b42d-00cf4fc964ff",
        checkpoint_lsn=0x1233,
        topics={3: "orders", 7: "übung"},
        next_topic_id=8,
        next_ledger_id=(1 << 48) - 1,
        last_alive_ms=NOW_MS,
    )


def topic_image() -> TopicImage:
    ledgers = []
    for name, count, sealed in ((SEALED, SEALED_COUNT, True), (UNSEALED, UNSEALED_COUNT, False)):
        ledgers.append(LedgerImage(capture(name, count, sealed=sealed), LedgerFacts(NOW_MS)))
    billing = SubscriptionImage(
        subscription_id=2,
        name="billing",
        type=3,
        create_time_ms=NOW_MS + 2,
        start=Position(11, 4),
        policy=SubscriptionPolicy(
            lease_ms=30_000,
            initial_backoff_ms=100,
            max_backoff_ms=60_000,
            backoff_multiplier=1.5,
            honor_delay=True,
        ),
        cursor_file="2.1234",
        mark=Position(11, 8),
    )
    audit = SubscriptionImage(
        3, "audit", 1, NOW_MS + 3, Position(0, 0), SubscriptionPolicy(), "", Position(12, 5)
    )
    return TopicImage(
        topic_id=3,
        name="orders",
        create_time_ms=NOW_MS + 1,
        policy=TopicPolicy(tick_ms=500, ledger_max_entries=50_000),
        applied_lsn=0x1233,
        ledgers=tuple(ledgers),
        subscriptions=(billing, audit),
        next_subscription_id=4,
        indexed_through=Position(11, 17),
        index_lsn=0x1200,
        frontier_ms=NOW_MS + 12,
    )


def cursor_image() -> CursorImage:
    return CursorImage(
        topic_id=3,
        subscription_id=2,
        settled={11: BitMap([9, *range(100, 4000)]), 12: BitMap([0, 4])},
        attempts={11: [BitMap([8, 10]), BitMap([10])], 12: [BitMap(), BitMap([1])]},
        waiting={
            11: LedgerTimes(BitMap([8]), bytes(8)),
            12: LedgerTimes(BitMap([1, 3]), np.array([NOW_MS + 9, NOW_MS], "<i8").tobytes()),
        },
        reasons={Position(12, 1): "größer als 5", Position(11, 8): "boom"},
    )


def bucket_rows(scattered: bool) -> tuple[Int64Column, Int64Column]:
    """Times and ordinals in due order: scattered ones, or 100 each millisecond in the order of arrival."""
    ordinals = np.arange(1000)
    if not scattered:
        return NOW_MS + ordinals // 100, ordinals
    times = NOW_MS + ordinals * 7_919_113 % 10_000_019
    order = np.argsort(times, kind="stable")
    return times[order], ordinals[order]


def bucket(*, scattered: bool) -> bytes:
    """A snapshot over the ends of two ledgers; one of scattered times as a merge leaves it, with a hole."""
    spans = (LedgerSpan(11, 4000, 4100), LedgerSpan((1 << 48) - 1, (1 << 32) - 900, 1 << 32))
    builder = SnapshotBuilder(spans, time_step_ms=300_000, min_entries=100, max_entries=400)
    segments = builder.add(*bucket_rows(scattered)) + builder.end()
    metadata = builder.metadata(3, 6, Position(11, 4000), Position((1 << 48) - 1, 1 << 32))
    if not scattered:
        return encode_metadata(metadata, builder.bitmaps) + b"".join(segments)
    beginning = encode_metadata(replace(metadata, segments_at=1024), builder.bitmaps)
    return beginning.ljust(1024, b"\0") + b"".join(segments)


def amendments() -> bytes:
    moved = [5, 9, (1 << 32) - 1]
    columns = Amendments(
        cancelled=BitMap([9, *range(100, 4000)]),
        entry_ids=np.array(moved, np.uint32),
        deliver_at_ms=np.array([NOW_MS + 7, NOW_MS, (1 << 53) - 1]),
        revisions=np.array([1, 2, (1 << 32) - 1], np.uint32),
        lsns=np.array([0x1235, 0x1236, (1 << 63) - 1], np.uint64),
        left_out=BitMap(range(200, 300)),
    )
    return encode_amendments(AmendmentsImage(3, (1 << 48) - 1, columns))


def producers_image() -> ProducersImage:
    """One that has forgotten everything, and one with three runs."""
    runs = ProducerImage(
        name="übung",
        highest_sequence_id=(1 << 64) - 1,
        floor=17,
        sequence_ids=np.array([17, 5_000, (1 << 64) - 2], dtype="<u8").tobytes(),
        counts=np.array([1_000, 1, 2], dtype="<u4").tobytes(),
        ledger_ids=np.array([11, 12, (1 << 48) - 1], dtype="<u8").tobytes(),
        entry_ids=np.array([4, 0, 999_999], dtype="<u4").tobytes(),
        publish_times_ms=np.array([NOW_MS, NOW_MS + 1, NOW_MS], dtype="<i8").tobytes(),
    )
    return ProducersImage(3, (ProducerImage("orders-7", 40, 41, b"", b"", b"", b"", b""), runs))


def recurring_image() -> RecurringImage:
    """A cron that waits for its next time, an interval that is paused, a list that is done."""
    cron = Definition(
        RecurringRule(cron="30 2 * * *", zone="Europe/Berlin"),
        b"\x0a\x01x",
        NOW_MS,
        NOW_MS + 86_400_000,
        5_000,
        OverdueRuns.NONE,
    )
    interval = Definition(RecurringRule(interval_ms=60_000), b"", paused=True)
    listed = Definition(RecurringRule(times_ms=(NOW_MS, NOW_MS + 1)), b"", overdue=OverdueRuns.ONE)
    return RecurringImage(
        3,
        {
            "cron": RecurringStanding(
                cron, RecurringProgress(NOW_MS, NOW_MS + 7, NOW_MS + 9, Position(12, 4))
            ),
            "interval": RecurringStanding(interval, RecurringProgress(NOW_MS + 5)),
            "übung": RecurringStanding(listed, RecurringProgress(NOW_MS, NOW_MS + 1, NOW_MS + 1)),
        },
    )


def bulk_image() -> BulkImage:
    """A cancel that is done, a move that failed, one by a delay at work, a shift that waits."""
    done = BulkDefinition(BulkKind.CANCEL, key_prefix="shop-3/", principal="ops", begin_ms=NOW_MS, total=9)
    at_work = BulkDefinition(
        BulkKind.DELAY, NOW_MS + 60_000, NOW_MS, NOW_MS + 86_400_000, "übung", True, "r-1", "ops", NOW_MS, 70
    )
    return BulkImage(
        3,
        12,
        {
            7: BulkStanding(done, BulkProgress((NOW_MS, 12, 4), 9, 8, 7), 77, BulkEnd.DONE, NOW_MS + 9),
            8: BulkStanding(
                BulkDefinition(BulkKind.MOVE, NOW_MS),
                end=BulkEnd.FAILED,
                end_ms=5,
                failure_reason="WHY",
                failure="why",
            ),
            10: BulkStanding(at_work, BulkProgress((NOW_MS + 7, 13, 0), 50, 40, 39), 80),
            12: BulkStanding(BulkDefinition(BulkKind.SHIFT, -60_000)),
        },
    )


def build() -> dict[str, bytes]:
    """Every golden file by its path below this folder."""
    return {
        **{name: segment(name) for name in SEGMENTS},
        "broker-v1.manifest": encode_broker(broker_image()),
        "topic-v1.manifest": encode_topic(topic_image()),
        "cursor-v1": encode_cursor(cursor_image()),
        "uniform-v1.bucket": bucket(scattered=False),
        "scattered-v1.bucket": bucket(scattered=True),
        "ledger-v1.amend": amendments(),
        "producers-v1": producers_image().encode(),
        "recurring-v1": recurring_image().encode(),
        "bulk-v1": bulk_image().encode(),
        **ledger(SEALED, SEALED_COUNT, sealed=True),
        **ledger(UNSEALED, UNSEALED_COUNT, sealed=False),
        **sparse()[0],
    }


def main() -> None:
    for name, content in build().items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        print(f"{len(content):8} {path}")


if __name__ == "__main__":
    main()
