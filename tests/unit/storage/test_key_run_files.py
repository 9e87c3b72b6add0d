"""Runs of schedule keys as local files: what `finish` returned for is durable, and nothing else is taken for whole."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from broker.errors import Corrupt, Unavailable
from broker.model import UInt64Column
from broker.runs.storage import WRITE_BYTES
from broker.runtime.vfs import LocalVfs
from broker.storage import key_run_files
from broker.storage.key_run import BLOCK_ENTRIES, Fences, KeyColumns, KeyRunHeader, encode_block
from broker.storage.key_run_files import KeyRunReader, KeyStorage, create_key_run, key_storage
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy
from tests.unit.storage.key_entries import (
    FOLDER,
    RUN_ID,
    TOPIC_ID,
    Entry,
    columns,
    disk,
    read_all,
    rows,
    scattered,
    storage_of,
    write,
)

ENTRIES = scattered(2_500)
PATH = f"{FOLDER}/{RUN_ID}.keys"


async def find(
    storage: KeyStorage, header: KeyRunHeader, fences: Fences, blocks: list[int], hashes: UInt64Column
) -> KeyColumns:
    return await storage.read(header.run_id, lambda reader: reader.find(header, fences, blocks, hashes))


async def found_in(storage: KeyStorage, hashes: list[int], run_id: int = RUN_ID) -> list[Entry]:
    header = await storage.read(run_id, KeyRunReader.read_header)
    fences = await storage.read(run_id, partial(KeyRunReader.read_fences, header=header))
    wanted = np.array(sorted(hashes), np.uint64)
    return rows(await find(storage, header, fences, fences.blocks_of(wanted), wanted))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [64, 4])
async def test_entries_are_found_by_their_hashes(bits: int) -> None:
    held, storage = scattered(3 * BLOCK_ENTRIES + 1, bits=bits), storage_of(disk())
    write(storage, held)
    values = sorted({entry[0] for entry in held})
    assert await found_in(storage, values) == held
    for wanted in ([values[0]], [values[-1]], values[1::3], [held[BLOCK_ENTRIES][0]]):
        assert await found_in(storage, wanted) == [entry for entry in held if entry[0] in set(wanted)]
    assert await found_in(storage, [values[-1] + 1, 0]) == []


async def test_local_files(tmp_path) -> None:
    storage = key_storage(LocalVfs(), str(tmp_path), TOPIC_ID)
    header = write(storage, ENTRIES)
    assert read_all(storage) == ENTRIES
    assert await storage.read(RUN_ID, KeyRunReader.read_header) == header
    assert (tmp_path / f"{RUN_ID}.keys").stat().st_size == header.file_bytes
    await storage.delete(RUN_ID)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_blocks_are_gathered_into_large_writes() -> None:
    vfs = disk()
    count = 2 * WRITE_BYTES // 14
    write(storage_of(vfs), ((i, 1 + i % 300, i) for i in range(1, count)), step=5_000)
    sizes = [len(op.data) for op in vfs.ops if op.kind == "write"]
    assert len(sizes) <= 5 and max(sizes) < 2 * WRITE_BYTES


async def test_runs_are_removed_by_id() -> None:
    vfs = disk()
    storage = storage_of(vfs)
    for run_id in (10, 9, 1):
        write(storage, ENTRIES[:3], run_id)
    for name in ("x.keys", "07.keys", "7.keys.old", "0.keys", "-3.keys", "7", "5.keys.new"):
        vfs.open(f"{FOLDER}/{name}", create=True)
    names = vfs.list_dir(FOLDER)
    for run_id in (9, 9):  # the second time nothing is there
        await storage.delete(run_id)
    assert vfs.list_dir(FOLDER) == [name for name in names if name != "9.keys"]


# Writers that fail


def test_an_id_is_never_written_twice() -> None:
    vfs = disk()
    write(storage_of(vfs), ENTRIES)
    before = vfs.snapshot()
    with pytest.raises(FileExistsError):
        write(storage_of(vfs), ENTRIES[:5])
    assert vfs.snapshot() == before


def test_an_aborted_run_leaves_nothing_and_a_finished_one_cannot_be_aborted() -> None:
    vfs = disk()
    writer = create_key_run(storage_of(vfs), RUN_ID)
    writer.append(columns(ENTRIES))
    assert list(vfs.snapshot()) == [PATH]
    writer.abort()
    writer.abort()
    assert vfs.snapshot() == {}
    writer = create_key_run(storage_of(vfs), RUN_ID)
    writer.append(columns(ENTRIES))
    while writer.check():
        pass
    writer.finish()
    writer.abort()
    assert read_all(storage_of(vfs)) == ENTRIES


@pytest.mark.parametrize("kind", ["create", "write", "read", "sync", "sync_dir"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_leaves_nothing_and_the_next_attempt_succeeds(kind: str, error: int) -> None:
    vfs = disk()
    fault = vfs.faults.add(Fault(kind, f"*{FOLDER}*", error=error))
    with pytest.raises(Unavailable) as caught:
        write(storage_of(vfs), ENTRIES)
    assert fault.hit_count == 1 and PATH in str(caught.value)
    assert vfs.snapshot() == {}
    write(storage_of(vfs), ENTRIES, 9)
    assert read_all(storage_of(vfs), 9) == ENTRIES


def test_every_write_that_is_cut_short_is_noticed() -> None:
    """The header comes last, so there are several."""
    whole = disk()
    write(storage_of(whole), ENTRIES)
    writes = [op.kind for op in whole.ops].count("write")
    assert writes == 3
    for nth in range(1, writes + 1):
        vfs = disk()
        vfs.faults.add(Fault("write", nth=nth, after_bytes=10, error=errno.ENOSPC))
        with pytest.raises(Unavailable):
            write(storage_of(vfs), ENTRIES)
        assert vfs.snapshot() == {}


def test_what_the_disk_changed_is_found_before_anybody_hears_of_the_run() -> None:
    for at in (100, 5_000, 30_000):
        vfs = disk()
        writer = create_key_run(storage_of(vfs), RUN_ID)
        for first in range(0, len(ENTRIES), 100):
            writer.append(columns(ENTRIES[first : first + 100]))
        original = vfs._change

        def change(node, op, original=original, at=at):
            data = bytearray(op.data)
            if op.kind == "write" and op.offset <= at < op.offset + len(data):
                data[at - op.offset] ^= 1
            original(node, op._replace(data=bytes(data)))

        vfs._change = change  # type: ignore[method-assign]
        with pytest.raises(Corrupt):
            while writer.check():
                pass


def test_a_run_that_does_not_hold_what_it_was_given_is_never_handed_out(monkeypatch) -> None:
    """Checksums of blocks cannot tell: they were taken of what was encoded."""

    def encode_wrong(keys: KeyColumns) -> bytes:
        return encode_block(replace(keys, entry_ids=keys.entry_ids + np.uint32(1)))

    vfs = disk()
    monkeypatch.setattr(key_run_files, "encode_block", encode_wrong)
    with pytest.raises(Corrupt, match="does not hold the entries it was given"):
        write(storage_of(vfs), ENTRIES)
    assert vfs.snapshot() == {}


# A crash


@pytest.mark.parametrize("policy", CrashPolicy)
def test_after_a_crash_what_was_finished_is_whole_and_what_is_not_whole_is_found_out(
    policy: CrashPolicy,
) -> None:
    vfs = disk()
    start = vfs.op_count
    write(storage_of(vfs), ENTRIES)
    for state in vfs.crash_states(first=start, policies=[policy], seeds=range(6)):
        assert set(state.vfs.snapshot()) <= {PATH}
        try:
            assert read_all(storage_of(state.vfs)) == ENTRIES
        except Corrupt:
            assert state.at < vfs.op_count


# Damage


async def test_a_missing_run_is_corrupt() -> None:
    vfs = disk()
    storage = storage_of(vfs)
    header = write(storage, ENTRIES)
    fences = await storage.read(RUN_ID, partial(KeyRunReader.read_fences, header=header))
    vfs.remove(PATH)
    for read in (
        storage.read(RUN_ID, KeyRunReader.read_header),
        storage.read(RUN_ID, partial(KeyRunReader.read_fences, header=header)),
        storage.read(RUN_ID, partial(KeyRunReader.read_filter, header=header)),
        find(storage, header, fences, [0], np.array([5], np.uint64)),
    ):
        with pytest.raises(Corrupt, match="missing") as caught:
            await read
        assert caught.value.path == PATH


async def test_a_run_that_is_longer_or_in_anothers_place_is_corrupt() -> None:
    vfs = disk()
    header = write(storage_of(vfs), ENTRIES)
    vfs.rename(PATH, f"{FOLDER}/9.keys")
    with pytest.raises(Corrupt, match="in the place of"):
        await storage_of(vfs).read(9, KeyRunReader.read_header)
    vfs.rename(f"{FOLDER}/9.keys", PATH)
    with pytest.raises(Corrupt, match="in the place of"):
        await storage_of(vfs, topic_id=4).read(RUN_ID, KeyRunReader.read_header)
    vfs.open(PATH).pwrite([b"\0"], header.file_bytes)
    with pytest.raises(Corrupt, match="bytes where"):
        await storage_of(vfs).read(RUN_ID, KeyRunReader.read_header)


async def test_a_disk_that_does_not_read_is_not_taken_for_damage() -> None:
    vfs = disk()
    storage = storage_of(vfs)
    header: KeyRunHeader = write(storage, ENTRIES)
    fences = await storage.read(RUN_ID, partial(KeyRunReader.read_fences, header=header))
    vfs.faults.add(Fault("read", onward=True))
    for read in (
        storage.read(RUN_ID, KeyRunReader.read_header),
        storage.read(RUN_ID, partial(KeyRunReader.read_fences, header=header)),
        storage.read(RUN_ID, partial(KeyRunReader.read_filter, header=header)),
        find(storage, header, fences, [0], np.array([5], np.uint64)),
    ):
        with pytest.raises(Unavailable):
            await read
    vfs.faults.clear()
    vfs.faults.add(Fault("open"))
    with pytest.raises(Unavailable):
        await storage.read(RUN_ID, KeyRunReader.read_header)
    vfs.faults.add(Fault("remove"))
    with pytest.raises(Unavailable):
        await storage.delete(RUN_ID)
