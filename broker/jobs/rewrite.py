"""What a compaction job does under one lease: rewrites ledgers and merges buckets, into the lease's folder.

The core of every engine: no Spark, no network, no clock. It reads the files that `inputs` names, writes beside them,
reads back what it wrote, and says what it hands in. It needs no lock: its inputs never change, and nobody else writes
into its folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pyroaring import BitMap

from broker.delayed.bucket_handoff import merge_lent
from broker.delayed.bucket_storage import LocalBucketStorage, SnapshotReader, SnapshotWriter
from broker.runtime.vfs import Vfs
from broker.storage.bucket_snapshot import BucketMetadata
from broker.storage.compaction_inputs import (
    INPUTS_FILE,
    CompactionInputs,
    InputLedger,
    LedgerOutput,
    Outputs,
    decode_inputs,
)
from broker.storage.layout import Layout
from broker.storage.sparse_writer import check_generation, live_entries, open_source, write_generation

Progress = Callable[[int], None]
"""Told of each ledger that is done: its bytes before."""


def read_inputs(vfs: Vfs, folder: str) -> CompactionInputs:
    """What a lease is about; raises Corrupt, OSError."""
    path = f"{folder}/{INPUTS_FILE}"
    with contextlib.closing(vfs.open(path)) as file:
        return decode_inputs(file.pread(file.size(), 0), path)


async def rewrite(vfs: Vfs, data_dir: str, folder: str, progress: Progress = lambda _: None) -> Outputs:
    """Do all that a lease is about. Raises Corrupt for an input or output that is damaged, Unavailable, OSError.

    `folder` is the lease's, as seen from here.
    """
    inputs = read_inputs(vfs, folder)
    ledgers = []
    for each in inputs.ledgers:
        if (output := rewrite_ledger(vfs, data_dir, folder, inputs, each)) is not None:
            ledgers.append(output)
        progress(each.capture.data_bytes)
    has_bucket = inputs.buckets is not None
    if inputs.buckets is not None:
        storage = _StagedBuckets(vfs, Layout(data_dir).buckets(inputs.topic_id), folder, inputs)
        await merge_lent(storage, inputs.topic_id, inputs.buckets, inputs.frontier)
    return Outputs(tuple(ledgers), has_bucket)


def rewrite_ledger(
    vfs: Vfs, data_dir: str, folder: str, inputs: CompactionInputs, ledger: InputLedger
) -> LedgerOutput | None:
    """Write the generation of one ledger, and read it back; None if nothing of it would go.

    A task of its own on a cluster.
    """
    source_folder = Layout(data_dir).ledgers(inputs.topic_id)
    target = ledger.capture.name(folder)._replace(generation=ledger.new_generation, sparse=True)
    with open_source(vfs, source_folder, ledger.capture, ledger.amendments) as source:
        live = live_entries(source, ledger.settled, inputs.frontier[0])
        if len(live) >= ledger.capture.row_count:
            return None
        generation = write_generation(vfs, source, live, target)
    check_generation(vfs, folder, generation)
    sparse = generation.capture.sparse
    assert sparse is not None
    return LedgerOutput(
        ledger_id=ledger.capture.ledger_id,
        data_bytes=generation.capture.data_bytes,
        present_count=sparse.present_count,
        present_bytes=sparse.present_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Homes:
    data: LocalBucketStorage
    staged: LocalBucketStorage


class _StagedBuckets:
    """Reads the buckets of a topic, and writes one into the lease's folder."""

    def __init__(self, vfs: Vfs, buckets: str, folder: str, inputs: CompactionInputs) -> None:
        assert inputs.buckets is not None
        self._homes = _Homes(
            LocalBucketStorage(vfs, buckets, inputs.topic_id),
            LocalBucketStorage(vfs, folder, inputs.topic_id),
        )
        self._new_id = inputs.buckets.new_bucket_id

    def _home(self, bucket_id: int) -> LocalBucketStorage:
        return self._homes.staged if bucket_id == self._new_id else self._homes.data

    def open_writer(self, bucket_id: int, reserve_bytes: int) -> SnapshotWriter:
        return self._homes.staged.open_writer(bucket_id, reserve_bytes)

    def open_reader(self, bucket_id: int) -> SnapshotReader:
        return self._home(bucket_id).open_reader(bucket_id)

    async def create(self, bucket_id: int, reserve_bytes: int) -> SnapshotWriter:
        return await self._homes.staged.create(bucket_id, reserve_bytes)

    async def save_all(
        self,
        bucket_id: int,
        metadata: BucketMetadata,
        bitmaps: dict[int, BitMap],
        segments: Iterable[bytes],
    ) -> BucketMetadata:
        return await self._homes.staged.save_all(bucket_id, metadata, bitmaps, segments)

    async def read_metadata(self, bucket_id: int) -> BucketMetadata:
        return await self._home(bucket_id).read_metadata(bucket_id)

    async def read_bitmaps(self, bucket_id: int) -> dict[int, BitMap]:
        return await self._home(bucket_id).read_bitmaps(bucket_id)

    async def read_bitmap(self, bucket_id: int, ledger_id: int) -> BitMap:
        return await self._home(bucket_id).read_bitmap(bucket_id, ledger_id)

    async def read_segment(self, metadata: BucketMetadata, index: int) -> bytes:
        return await self._home(metadata.bucket_id).read_segment(metadata, index)

    async def read_segments(self, metadata: BucketMetadata, first: int, end: int) -> list[bytes]:
        return await self._home(metadata.bucket_id).read_segments(metadata, first, end)

    async def delete(self, bucket_id: int) -> None:
        await self._homes.staged.delete(bucket_id)

    async def list(self) -> list[int]:
        return await self._homes.data.list()
