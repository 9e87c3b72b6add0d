"""Snapshots as local files: what `finish` returned for is durable, and what is not whole is never taken for whole."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from pyroaring import BitMap

from broker.errors import Corrupt, Unavailable
from broker.model import Int64Column, Position
from broker.runs.storage import WRITE_BYTES
from broker.runtime.vfs import LocalVfs
from broker.storage.bucket_builder import SnapshotBuilder
from broker.storage.bucket_files import (
    BucketStorage,
    SnapshotFileWriter,
    SnapshotReader,
    bucket_storage,
    create_bucket,
    save_bucket,
)
from broker.storage.bucket_snapshot import BucketMetadata, LedgerSpan, Ordinals, decode_entries
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from tests.run_files import run_ids

TOPIC_ID = 3
SPANS = (LedgerSpan(4, 10, 700), LedgerSpan(5, 0, 900))
ROW_COUNT = 500


def rows() -> tuple[Int64Column, Int64Column]:
    ordinals = np.arange(0, 1590, 3)[:ROW_COUNT]
    times = 1_750_000_000_000 + ordinals * 7919 % 100_003
    order = np.argsort(times, kind="stable")
    return times[order], ordinals[order]


class Made:
    """A snapshot in the making, whole in memory."""

    def __init__(self, bucket_id: int = 8, row_count: int = ROW_COUNT) -> None:
        self.builder = SnapshotBuilder(SPANS, time_step_ms=1000, min_entries=40, max_entries=100)
        times, ordinals = rows()
        self.segments = self.builder.add(times[:row_count], ordinals[:row_count]) + self.builder.end()
        self.bitmaps = self.builder.bitmaps
        self.metadata = self.builder.metadata(TOPIC_ID, bucket_id, Position(4, 10), Position(5, 900))
        self.reserve = self.builder.reserve_bytes(ROW_COUNT)

    def write(self, writer: SnapshotFileWriter) -> BucketMetadata:
        for segment in self.segments:
            writer.append(segment)
        return writer.finish(self.metadata, self.bitmaps)


def storage_of(vfs: MemVfs) -> BucketStorage:
    return bucket_storage(vfs, "buckets", TOPIC_ID)


def disk() -> MemVfs:
    vfs = MemVfs()
    vfs.make_dir("buckets")
    vfs.sync_dir("")
    return vfs


async def segment_of(storage: BucketStorage, metadata: BucketMetadata, index: int) -> bytes:
    (data,) = await storage.read(
        metadata.bucket_id, lambda each: each.read_segments(metadata, index, index + 1)
    )
    return data


async def check_whole(storage: BucketStorage, made: Made) -> BucketMetadata:
    metadata = await storage.read(made.metadata.bucket_id, SnapshotReader.read_metadata)
    assert (metadata.count, metadata.checksum) == (ROW_COUNT, made.metadata.checksum)
    assert (metadata.spans, metadata.start, metadata.end) == (SPANS, Position(4, 10), Position(5, 900))
    assert await storage.read(metadata.bucket_id, SnapshotReader.read_bitmaps) == made.bitmaps
    count = len(metadata.segments)
    assert [await segment_of(storage, metadata, index) for index in range(count)] == made.segments
    assert (
        await storage.read(metadata.bucket_id, lambda each: each.read_segments(metadata, 1, count - 1))
        == made.segments[1:-1]
    )
    assert await storage.read(metadata.bucket_id, lambda each: each.read_segments(metadata, 2, 2)) == []
    ordinals = Ordinals(metadata.spans)
    entries = [decode_entries(metadata, ordinals, i, segment) for i, segment in enumerate(made.segments)]
    assert np.concatenate([times for times, _, _ in entries]).tolist() == rows()[0].tolist()
    return metadata


async def test_a_snapshot_whose_metadata_is_known_is_written_without_a_hole() -> None:
    vfs, made = disk(), Made()
    storage = storage_of(vfs)
    written = save_bucket(storage, 8, made.metadata, made.bitmaps, made.segments)
    metadata = await check_whole(storage, made)
    assert written.segments_at == metadata.segments_at < made.reserve
    assert vfs.open("buckets/8.bucket").size() == metadata.file_bytes == written.file_bytes


async def test_a_snapshot_is_written_segment_by_segment() -> None:
    vfs, made = disk(), Made()
    storage = storage_of(vfs)
    metadata = made.write(create_bucket(storage, 8, made.reserve))
    assert metadata.segments_at % 4096 == 0 and metadata.segments_at >= made.reserve
    await check_whole(storage, made)


async def test_segments_are_gathered_into_large_writes() -> None:
    vfs, made = disk(), Made()
    writer = create_bucket(storage_of(vfs), 8, made.reserve)
    segment = bytes(WRITE_BYTES // 10)
    for _ in range(25):
        writer.append(segment)
    assert [op.kind for op in vfs.ops].count("write") == 2
    writer.abort()


async def test_local_files(tmp_path: object) -> None:
    made = Made()
    storage = bucket_storage(LocalVfs(), str(tmp_path), TOPIC_ID)
    made.write(create_bucket(storage, 8, made.reserve))
    await check_whole(storage, made)
    with pytest.raises(FileExistsError):
        create_bucket(storage, 8, made.reserve)
    await storage.delete(8)
    assert LocalVfs().list_dir(str(tmp_path)) == []


async def test_bitmaps_can_be_read_one_by_one() -> None:
    made = Made()
    storage = storage_of(disk())
    save_bucket(storage, 8, made.metadata, made.bitmaps, made.segments)
    for span in SPANS:
        assert (
            await storage.read(8, partial(SnapshotReader.read_bitmap, ledger_id=span.ledger_id))
            == made.bitmaps[span.ledger_id]
        )
    assert await storage.read(8, partial(SnapshotReader.read_bitmap, ledger_id=99)) == BitMap()


@pytest.mark.slow
async def test_metadata_longer_than_the_first_read() -> None:
    spans = tuple(LedgerSpan(1 + i * 1_000_000_007, 0, 1) for i in range(2000))
    builder = SnapshotBuilder(spans, time_step_ms=1)
    segments = builder.add(np.arange(2000), np.arange(2000)) + builder.end()
    storage = storage_of(disk())
    metadata = builder.metadata(TOPIC_ID, 1, Position(1, 0), Position(spans[-1].ledger_id, 1))
    save_bucket(storage, 1, metadata, builder.bitmaps, segments)
    assert (await storage.read(1, SnapshotReader.read_metadata)).spans == spans
    assert await storage.read(1, SnapshotReader.read_bitmaps) == builder.bitmaps


async def test_snapshots_are_removed_by_id() -> None:
    vfs = disk()
    storage = storage_of(vfs)
    for bucket_id in (10, 9, 1):
        made = Made(bucket_id)
        save_bucket(storage, bucket_id, made.metadata, made.bitmaps, made.segments)
    for name in ("x.bucket", "07.bucket", "7.bucket.new", "0.bucket", "-3.bucket", "7"):
        vfs.open(f"buckets/{name}", create=True)
    names = vfs.list_dir("buckets")
    await storage.delete(9)
    await storage.delete(9)  # nothing is there any more
    assert vfs.list_dir("buckets") == [name for name in names if name != "9.bucket"]


# Writers that fail


async def test_an_id_is_never_written_twice() -> None:
    vfs, made = disk(), Made()
    storage = storage_of(vfs)
    save_bucket(storage, 8, made.metadata, made.bitmaps, made.segments)
    before = vfs.snapshot()
    for _ in range(2):
        with pytest.raises(FileExistsError):
            create_bucket(storage, 8, made.reserve)
        with pytest.raises(FileExistsError):
            save_bucket(storage, 8, made.metadata, made.bitmaps, made.segments)
    assert vfs.snapshot() == before


async def test_an_aborted_snapshot_leaves_nothing_and_a_finished_one_cannot_be_aborted() -> None:
    vfs, made = disk(), Made()
    storage = storage_of(vfs)
    writer = create_bucket(storage, 8, made.reserve)
    writer.append(made.segments[0])
    writer.abort()
    writer.abort()
    assert vfs.snapshot() == {}
    writer = create_bucket(storage, 8, made.reserve)
    made.write(writer)
    writer.abort()
    await check_whole(storage, made)


@pytest.mark.parametrize("kind", ["create", "write", "sync", "sync_dir"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
async def test_a_disk_that_fails_leaves_nothing_and_the_next_attempt_succeeds(kind: str, error: int) -> None:
    vfs, made = disk(), Made()
    storage = storage_of(vfs)
    fault = vfs.faults.add(Fault(kind, "*buckets*", error=error))
    with pytest.raises(Unavailable):
        save_bucket(storage, 8, made.metadata, made.bitmaps, made.segments)
    assert fault.hit_count == 1
    assert vfs.snapshot() == {}
    made = Made(9)
    save_bucket(storage, 9, made.metadata, made.bitmaps, made.segments)
    await check_whole(storage, made)


async def test_segments_that_are_not_those_of_the_metadata_are_our_own_mistake() -> None:
    vfs, made = disk(), Made()
    with pytest.raises(AssertionError):
        save_bucket(storage_of(vfs), 8, made.metadata, made.bitmaps, made.segments[:-1])
    assert vfs.snapshot() == {}


# Damage


async def test_a_missing_snapshot_is_corrupt() -> None:
    storage = storage_of(disk())
    for read in (
        storage.read(8, SnapshotReader.read_metadata),
        storage.read(8, SnapshotReader.read_bitmaps),
        storage.read(8, partial(SnapshotReader.read_bitmap, ledger_id=4)),
    ):
        with pytest.raises(Corrupt) as caught:
            await read
        assert caught.value.path == "buckets/8.bucket"
    with pytest.raises(Corrupt):
        await segment_of(storage, replace(Made().metadata, segments_at=500), 0)


async def test_a_snapshot_that_is_longer_or_in_anothers_place_is_corrupt() -> None:
    vfs, made = disk(), Made()
    storage = storage_of(vfs)
    metadata = save_bucket(storage, 8, made.metadata, made.bitmaps, made.segments)
    vfs.rename("buckets/8.bucket", "buckets/9.bucket")
    with pytest.raises(Corrupt, match="in the place of"):
        await storage.read(9, SnapshotReader.read_metadata)
    with pytest.raises(Corrupt, match="in the place of"):
        await bucket_storage(vfs, "buckets", 4).read(9, SnapshotReader.read_metadata)
    vfs.rename("buckets/9.bucket", "buckets/8.bucket")
    vfs.open("buckets/8.bucket").pwrite([b"\0"], metadata.file_bytes)
    with pytest.raises(Corrupt, match="bytes where"):
        await storage.read(8, SnapshotReader.read_metadata)


async def read_all(storage: BucketStorage) -> None:
    metadata = await storage.read(8, SnapshotReader.read_metadata)
    await storage.read(8, SnapshotReader.read_bitmaps)
    await storage.read(
        metadata.bucket_id, lambda each: each.read_segments(metadata, 0, len(metadata.segments))
    )


@pytest.mark.slow
async def test_every_changed_byte_and_every_truncation_is_found() -> None:
    made = Made(row_count=60)
    whole = disk()
    save_bucket(storage_of(whole), 8, made.metadata, made.bitmaps, made.segments)
    content = whole.snapshot()["buckets/8.bucket"]
    for at in range(len(content)):
        changed = content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        for damaged in (changed, content[:at]):
            vfs = disk()
            vfs.open("buckets/8.bucket", create=True).pwrite([damaged], 0)
            with pytest.raises(Corrupt):
                await read_all(storage_of(vfs))


async def test_a_disk_that_does_not_read_is_not_taken_for_damage() -> None:
    vfs, made = disk(), Made()
    storage = storage_of(vfs)
    metadata = save_bucket(storage, 8, made.metadata, made.bitmaps, made.segments)
    vfs.faults.add(Fault("read", onward=True))
    for read in (
        storage.read(8, SnapshotReader.read_metadata),
        storage.read(8, SnapshotReader.read_bitmaps),
        segment_of(storage, metadata, 0),
    ):
        with pytest.raises(Unavailable):
            await read


# Crashes


@pytest.mark.slow
async def test_after_a_crash_what_was_finished_is_whole_and_what_is_not_whole_is_found_out() -> None:
    vfs = disk()
    durable_at: dict[int, int] = {}
    for bucket_id in (8, 9):
        made, storage = Made(bucket_id), storage_of(vfs)
        if bucket_id == 8:
            made.write(create_bucket(storage, 8, made.reserve))
        else:
            save_bucket(storage, 9, made.metadata, made.bitmaps, made.segments)
        durable_at[bucket_id] = vfs.op_count
    for state in vfs.crash_states(policies=[*CrashPolicy], seeds=range(3)):
        there = state.vfs if state.vfs.exists("buckets") else disk()
        found = storage_of(there)
        for bucket_id in (8, 9):
            # A disk may keep what nobody waited for, so this may succeed earlier too; it is never wrong.
            try:
                await check_whole(found, Made(bucket_id))
            except Corrupt:
                assert state.at < durable_at[bucket_id]
        for bucket_id in run_ids(there, "buckets"):
            await found.delete(bucket_id)
        assert there.list_dir("buckets") == []
