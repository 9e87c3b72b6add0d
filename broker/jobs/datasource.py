"""A backup, or a stopped broker's data, as Spark DataFrames, for those who want to look for themselves.

    spark.dataSource.register(PostdateDataSource)
    spark.read.format("postdate").option("table", "rows").load("/backups/20261121T030000Z")

The folder of a broker with several shards, or a backup of one, is read as a whole.

Tables: `rows` (every stored message: id, times, sizes, whether it is live), `snapshots` (every index entry) and
`cursors` (what each subscription has settled beyond its mark). One partition is one ledger, one bucket or one
subscription. Payloads are not read. A file that is damaged fails the query: see `postdate-broker audit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from broker.delayed.check import CursorView, settled_by_all
from broker.folder.index_check import file_source
from broker.jobs.folder import pin_folders, reading_vfs
from broker.model import FLAG_DELAYED, ids_of
from broker.storage.amendments import NONE, decode_amendments
from broker.storage.bucket_files import bucket_storage
from broker.storage.bucket_snapshot import Ordinals, decode_entries
from broker.storage.layout import Layout
from broker.storage.ledger_files import (
    open_checked,
)
from broker.storage.manifest import (
    LedgerImage,
    SubscriptionImage,
    TopicImage,
    decode_broker,
    decode_cursor,
    decode_topic,
)
from broker.storage.named_files import read_named
from broker.storage.packed_rows import rows_column
from broker.storage.sparse_files import read_present

ROWS, SNAPSHOTS, CURSORS = "rows", "snapshots", "cursors"

SCHEMAS = {
    ROWS: (
        "topic string, ledger_id bigint, entry_id bigint, publish_time_ms bigint, deliver_at_ms bigint, "
        "expire_at_ms bigint, bytes bigint, delayed boolean, cancelled boolean, live boolean"
    ),
    SNAPSHOTS: "topic string, bucket_id bigint, segment int, deliver_at_ms bigint, ledger_id bigint, entry_id bigint",
    CURSORS: (
        "topic string, subscription string, mark_ledger_id bigint, mark_entry_id bigint, "
        "ledger_id bigint, settled_entry_id bigint"
    ),
}
_BATCH_ROWS = 65_536


@dataclass
class Part(InputPartition):
    """One ledger, bucket or subscription of a topic, in the folder of its shard."""

    folder: str
    topic_id: int
    number: int


class PostdateDataSource(DataSource):
    """`spark.read.format("postdate")`; options: `path`, `table` (default rows)."""

    @classmethod
    def name(cls) -> str:
        return "postdate"

    def schema(self) -> str:
        return SCHEMAS[self._table()]

    def reader(self, schema: StructType) -> DataSourceReader:
        path = self.options.get("path")
        if not path:
            raise ValueError("which folder? .load('/path/of/a/backup')")
        return PostdateReader(pin_folders(path), self._table())

    def _table(self) -> str:
        table = self.options.get("table", ROWS)
        if table not in SCHEMAS:
            raise ValueError(f"there is no table {table!r}: {', '.join(SCHEMAS)}")
        return table


class PostdateReader(DataSourceReader):
    """Reads one table; made in the driver, used in the executors."""

    def __init__(self, folders: Sequence[str], table: str) -> None:
        self._folders = folders
        self._table = table

    def partitions(self) -> Sequence[InputPartition]:
        return [part for folder in self._folders for part in self._parts(folder)]

    def _parts(self, folder: str) -> Iterator[Part]:
        layout = Layout(folder)
        root = decode_broker(read_named(reading_vfs(folder), layout.manifest), layout.manifest)
        for topic_id in root.topics:
            image = _read_image(folder, topic_id)
            numbers = {
                ROWS: [ledger.ledger_id for ledger in image.ledgers],
                SNAPSHOTS: list(image.bucket_ids),
                CURSORS: [subscription.subscription_id for subscription in image.subscriptions],
            }
            yield from (Part(folder, topic_id, number) for number in numbers[self._table])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part)
        folder, image = partition.folder, _read_image(partition.folder, partition.topic_id)
        if self._table == ROWS:
            ledger = next(
                image_ledger for image_ledger in image.ledgers if image_ledger.ledger_id == partition.number
            )
            return self._rows(folder, image, ledger)
        if self._table == SNAPSHOTS:
            return self._snapshot(folder, image, partition.number)
        wanted = next(cursor for cursor in image.subscriptions if cursor.subscription_id == partition.number)
        return self._cursor(folder, image, wanted)

    def _rows(self, data_dir: str, image: TopicImage, ledger: LedgerImage) -> Iterator[pa.RecordBatch]:
        vfs, folder = reading_vfs(data_dir), Layout(data_dir).ledgers(image.topic_id)
        capture = ledger.capture
        if not capture.row_count:
            return
        amendments = NONE
        if ledger.amendments_file:
            path = f"{folder}/{ledger.amendments_file}"
            amendments = decode_amendments(read_named(vfs, path), path).amendments
        every = np.arange(capture.entry_count, dtype=np.uint32)
        times = amendments.effective(every, file_source(vfs, folder, capture).read_times())
        settled = settled_by_all(
            map(_viewing(data_dir, image), image.subscriptions), ledger.ledger_id, len(every)
        )
        cancelled = np.isin(every, ids_of(amendments.cancelled))
        live = ~(np.isin(every, ids_of(settled)) | cancelled)
        rows = rows_column(capture)
        present = every
        if capture.sparse is not None:
            with contextlib.closing(open_checked(vfs, capture.name(folder), "times")) as file:
                present = ids_of(read_present(file, capture))
        with contextlib.closing(open_checked(vfs, capture.name(folder), "rows")) as file:
            for first in range(0, capture.row_count, _BATCH_ROWS):
                count = min(_BATCH_ROWS, capture.row_count - first)
                columns, ids = rows.read(file, first, count), present[first : first + count]
                yield pa.RecordBatch.from_pydict(
                    {
                        "topic": [image.name] * count,
                        "ledger_id": np.full(count, ledger.ledger_id),
                        "entry_id": ids.astype(np.int64),
                        "publish_time_ms": np.ascontiguousarray(columns["publish_time_ms"]),
                        "deliver_at_ms": times[ids],
                        "expire_at_ms": np.ascontiguousarray(columns["expire_at_ms"]),
                        "bytes": columns["length"].astype(np.int64),
                        "delayed": (columns["flags"] & FLAG_DELAYED) != 0,
                        "cancelled": cancelled[ids],
                        "live": live[ids],
                    }
                )

    def _snapshot(self, data_dir: str, image: TopicImage, bucket_id: int) -> Iterator[pa.RecordBatch]:
        folder = Layout(data_dir).buckets(image.topic_id)
        storage = bucket_storage(reading_vfs(data_dir), folder, image.topic_id)
        with contextlib.closing(storage.open_reader(bucket_id)) as reader:
            metadata = reader.read_metadata()
            ordinals = Ordinals(metadata.spans)
            for segment in range(len(metadata.segments)):
                (data,) = reader.read_segments(metadata, segment, segment + 1)
                times, ledger_ids, entry_ids = decode_entries(metadata, ordinals, segment, data)
                yield pa.RecordBatch.from_pydict(
                    {
                        "topic": [image.name] * len(times),
                        "bucket_id": np.full(len(times), bucket_id),
                        "segment": np.full(len(times), segment, dtype=np.int32),
                        "deliver_at_ms": times,
                        "ledger_id": ledger_ids,
                        "entry_id": entry_ids.astype(np.int64),
                    }
                )

    def _cursor(
        self, data_dir: str, image: TopicImage, subscription: SubscriptionImage
    ) -> Iterator[pa.RecordBatch]:
        view = _viewing(data_dir, image)(subscription)
        for ledger_id, settled in sorted(view.settled.items()):
            count = len(settled)
            yield pa.RecordBatch.from_pydict(
                {
                    "topic": [image.name] * count,
                    "subscription": [subscription.name] * count,
                    "mark_ledger_id": np.full(count, view.mark.ledger_id),
                    "mark_entry_id": np.full(count, view.mark.entry_id),
                    "ledger_id": np.full(count, ledger_id),
                    "settled_entry_id": ids_of(settled).astype(np.int64),
                }
            )


def _read_image(data_dir: str, topic_id: int) -> TopicImage:
    path = Layout(data_dir).topic_manifest(topic_id)
    return decode_topic(read_named(reading_vfs(data_dir), path), path)


def _viewing(data_dir: str, image: TopicImage) -> Callable[[SubscriptionImage], CursorView]:
    """Return what reads the cursor of a subscription."""
    vfs, folder = reading_vfs(data_dir), Layout(data_dir).cursors(image.topic_id)

    def view(subscription: SubscriptionImage) -> CursorView:
        if not subscription.cursor_file:
            return CursorView(subscription.mark, {})
        path = f"{folder}/{subscription.cursor_file}"
        return CursorView(subscription.mark, decode_cursor(read_named(vfs, path), path).settled)

    return view
