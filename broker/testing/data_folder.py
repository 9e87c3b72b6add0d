"""Writes data directories without a broker: of any size, and as damaged as a test wants them.

with FolderWriter("data") as folder:
    folder.add_topic("orders", [StoredLedger(1, times)], [StoredSubscription("billing", {1: BitMap([3])})])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import numpy as np
from google_crc32c import value
from pyroaring import BitMap

from broker.model import FLAG_DELAYED, ROW, START, Int64Column, Position, RowColumn, UInt32Column
from broker.policy import TopicPolicy
from broker.runtime.vfs import LocalVfs, Vfs
from broker.storage.amendments import NONE, Amendments, AmendmentsImage, encode_amendments
from broker.storage.blocks import (
    BLOCK_ROWS,
    HEADER_BYTES,
    TIME,
    BlockChecksums,
    LedgerCapture,
    file_lengths,
)
from broker.storage.bucket_builder import SnapshotBuilder
from broker.storage.bucket_files import bucket_storage, save_bucket
from broker.storage.bucket_snapshot import LedgerSpan
from broker.storage.layout import Layout
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.manifest import (
    BrokerImage,
    CursorImage,
    LedgerImage,
    SubscriptionImage,
    TopicImage,
    encode_broker,
    encode_cursor,
    encode_topic,
)
from broker.storage.message_fields import FRAME_HEAD
from broker.storage.packed_rows import encode_end, pack_block
from broker.storage.segment import encode_header
from broker.storage.varint import encode_varint
from postdate_api.v1.message_pb2 import Message

NOW_MS = 1_750_000_000_000
LSN = 100
TIME_STEP_MS = 300_000


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """A ledger by its rows' times."""

    ledger_id: int
    times: Int64Column  # 0: not delayed
    amendments: Amendments = NONE
    asked: Int64Column | None = None
    """The times that the messages themselves say, if these are others."""
    hollow: bool = False
    """Without rows and messages: their files have the right lengths, and holes in them."""
    packed: bool = False


@dataclass(frozen=True, slots=True)
class StoredSubscription:
    """A subscription by what it settled."""

    name: str
    settled: dict[int, BitMap] = field(default_factory=dict)
    mark: Position = START


Keys = tuple[Int64Column, Int64Column, UInt32Column]
"""Times, ledger ids and entry ids, aligned."""


class FolderWriter:
    """A data directory in the making; whole once it is closed."""

    def __init__(self, path: str, vfs: Vfs | None = None, *, frontier_ms: int = NOW_MS) -> None:
        self.layout = Layout(path)
        self._vfs = vfs or LocalVfs()
        self._frontier_ms = frontier_ms
        self._topics: dict[int, str] = {}
        self._next_ledger_id = 1
        for folder in (self.layout.root, self.layout.journal, self.layout.topics):
            self._vfs.make_dir(folder)

    def add_topic(
        self,
        name: str,
        ledgers: Sequence[StoredLedger],
        subscriptions: Sequence[StoredSubscription] = (),
        *,
        ledgers_per_bucket: int = 4,
        held: Callable[[int, Keys], Keys] = lambda bucket_id, keys: keys,
    ) -> int:
        """Write a topic whose buckets hold what they owe, but for what `held` changes; returns its id."""
        topic_id = len(self._topics) + 1
        self._topics[topic_id] = name
        self.layout.make_topic_folders(self._vfs, topic_id)
        images = tuple(self._write_ledger(topic_id, ledger, ledger is ledgers[-1]) for ledger in ledgers)
        bucket_ids: list[int] = []
        for first in range(0, len(ledgers), ledgers_per_bucket):
            bucket_id = len(bucket_ids) + 1
            keys = held(bucket_id, self._owed(ledgers[first : first + ledgers_per_bucket]))
            if len(keys[0]):
                self._write_bucket(topic_id, bucket_id, keys, ledgers)
                bucket_ids.append(bucket_id)
        end = Position(ledgers[-1].ledger_id, len(ledgers[-1].times)) if ledgers else START
        image = TopicImage(
            topic_id=topic_id,
            name=name,
            create_time_ms=NOW_MS,
            policy=TopicPolicy(),
            applied_lsn=LSN,
            ledgers=images,
            subscriptions=tuple(
                self._write_subscription(topic_id, number, subscription)
                for number, subscription in enumerate(subscriptions, 1)
            ),
            next_subscription_id=len(subscriptions) + 1,
            indexed_through=end,
            index_lsn=LSN,
            frontier_ms=self._frontier_ms,
            bucket_ids=tuple(bucket_ids),
            next_bucket_id=len(bucket_ids) + 1,
        )
        self._write(self.layout.topic_manifest(topic_id), encode_topic(image))
        self._next_ledger_id = max([self._next_ledger_id, *(ledger.ledger_id + 1 for ledger in ledgers)])
        return topic_id

    def close(self) -> None:
        self._write(f"{self.layout.journal}/{LSN + 1:016x}.seg", encode_header(LSN + 1))
        next_topic_id = len(self._topics) + 1
        root = BrokerImage("audited", LSN, self._topics, next_topic_id, self._next_ledger_id, NOW_MS)
        self._write(self.layout.manifest, encode_broker(root))

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def _write_ledger(self, topic_id: int, ledger: StoredLedger, is_last: bool) -> LedgerImage:
        times = ledger.times.astype(TIME)
        asked = times if ledger.asked is None else ledger.asked
        frames = [] if ledger.hollow else [encode_frame(at, time) for at, time in enumerate(asked.tolist())]
        rows = np.zeros(0 if ledger.hollow else len(times), dtype=ROW)
        if not ledger.hollow:
            rows = _rows(times, frames)
        checksums = [BlockChecksums(dtype.itemsize) for dtype in (TIME, ROW)]
        for checksum, column in zip(checksums, (times, rows), strict=True):
            checksum.extend(column)
        amendments_file = ""
        if ledger.amendments is not NONE:
            amendments_file = f"{ledger.ledger_id}.{LSN:x}.amend"
            image = AmendmentsImage(topic_id, ledger.ledger_id, ledger.amendments)
            self._write(f"{self.layout.ledgers(topic_id)}/{amendments_file}", encode_amendments(image))
        capture = LedgerCapture(
            topic_id=topic_id,
            ledger_id=ledger.ledger_id,
            generation=0,
            entry_count=len(times),
            data_bytes=sum(map(len, frames)) or len(times) * 100,
            sealed=not is_last or ledger.hollow,
            times_crcs=checksums[0].crcs() if is_last and not ledger.hollow else (),
            rows_crcs=checksums[1].crcs() if is_last and not ledger.hollow else (),
        )
        packed = _packed(rows) if ledger.packed else b""
        capture = replace(capture, packed_bytes=HEADER_BYTES + len(packed) if packed else 0)
        name = capture.name(self.layout.ledgers(topic_id))
        footers = [checksum.encode_footer() if capture.sealed else b"" for checksum in checksums]
        contents = {
            "data": b"".join(frames),
            "times": times.tobytes() + footers[0],
            "rows": packed or rows.tobytes() + footers[1],
        }
        for kind, length in file_lengths(capture).items():
            self._write(name.path(kind), name.header(kind).encode() + contents[kind], length)
        return LedgerImage(capture, LedgerFacts(NOW_MS, int(times.max(initial=0))), amendments_file)

    def _owed(self, ledgers: Sequence[StoredLedger]) -> Keys:
        parts: list[Keys] = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint32))]
        for ledger in ledgers:
            ids = np.arange(len(ledger.times), dtype=np.uint32)
            times = ledger.amendments.effective(ids, ledger.times)
            owed = times > self._frontier_ms
            count = int(np.count_nonzero(owed))
            parts.append((times[owed], np.full(count, ledger.ledger_id, np.int64), ids[owed]))
        times, ledger_ids, entry_ids = (np.concatenate(column) for column in zip(*parts, strict=True))
        return times, ledger_ids, entry_ids

    def _write_bucket(
        self, topic_id: int, bucket_id: int, keys: Keys, ledgers: Sequence[StoredLedger]
    ) -> None:
        times, ledger_ids, entry_ids = keys
        present = set(np.unique(ledger_ids).tolist())
        counts = {ledger.ledger_id: len(ledger.times) for ledger in ledgers}
        spans = [
            LedgerSpan(i, 0, max(counts.get(i, 0), int(entry_ids[ledger_ids == i].max()) + 1))
            for i in sorted(present)
        ]
        builder = SnapshotBuilder(spans, time_step_ms=TIME_STEP_MS)
        ordinals = builder.ordinals.to_ordinals(ledger_ids, entry_ids)
        order = np.lexsort((ordinals, times))
        segments = [*builder.add(times[order], ordinals[order]), *builder.end()]
        storage = bucket_storage(self._vfs, self.layout.buckets(topic_id), topic_id)
        start, end = Position(spans[0].ledger_id, 0), Position(spans[-1].ledger_id, spans[-1].end)
        metadata = builder.metadata(topic_id, bucket_id, start, end)
        save_bucket(storage, bucket_id, metadata, builder.bitmaps, segments)

    def _write_subscription(
        self, topic_id: int, subscription_id: int, stated: StoredSubscription
    ) -> SubscriptionImage:
        cursor_file = f"{subscription_id}.{LSN:x}"
        image = CursorImage(topic_id, subscription_id, stated.settled, {}, {})
        self._write(f"{self.layout.cursors(topic_id)}/{cursor_file}", encode_cursor(image))
        return SubscriptionImage(
            subscription_id, stated.name, 1, NOW_MS, START, cursor_file=cursor_file, mark=stated.mark
        )

    def _write(self, path: str, content: bytes, length: int | None = None) -> None:
        file = self._vfs.open(path, create=True)
        try:
            file.pwrite([content], 0)
            if length is not None and length != len(content):
                file.truncate(length)
        finally:
            file.close()


def encode_frame(entry: int, deliver_at_ms: int) -> bytes:
    """A message as it is stored: a payload, and its time if it has one."""
    message = Message(payload=b"message %d" % entry, deliver_at_ms=deliver_at_ms).SerializeToString()
    return FRAME_HEAD + encode_varint(len(message)) + message


def _packed(rows: RowColumn) -> bytes:
    """Return what follows the header of a file of packed rows."""
    blocks = [pack_block(rows[first : first + BLOCK_ROWS]) for first in range(0, len(rows), BLOCK_ROWS)]
    contents = b"".join(content for _, content in blocks)
    return contents + encode_end(b"".join(item for item, _ in blocks), len(rows))


def _rows(times: Int64Column, frames: Sequence[bytes]) -> RowColumn:
    rows = np.zeros(len(times), dtype=ROW)
    rows["publish_time_ms"] = 1  # so early that any time is one of the future
    rows["length"] = np.fromiter(map(len, frames), np.uint32, len(frames))
    rows["offset"] = rows["length"].cumsum(dtype=np.int64) - rows["length"]
    rows["crc"] = np.fromiter(map(value, frames), np.uint32, len(frames))
    rows["flags"] = np.where(times > 0, FLAG_DELAYED, 0)
    return rows
