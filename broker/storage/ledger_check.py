"""Looking at the files of a ledger from outside: print them, and check them against a manifest.

Everything here blocks and changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
from google_crc32c import value

from broker.errors import Corrupt
from broker.model import ROW, Array, Int64Column, RowColumn, UInt32Column, ids_of
from broker.runtime.vfs import File, Vfs
from broker.storage.blocks import (
    BLOCK_ROWS,
    FRAME_HEAD_BYTES,
    HEADER_BYTES,
    PACKED,
    TIME,
    TRAILER_BYTES,
    EntryName,
    FileFault,
    LedgerCapture,
    LedgerProblem,
    decode_header,
    file_lengths,
    find_bad_offsets,
    find_bad_times,
    footer_bytes,
    frame_length,
    name_entry,
    peek_row_count,
    slice_frames,
    split_runs,
)
from broker.storage.ledger_files import (
    check_length,
    open_checked,
)
from broker.storage.ledger_reads import (
    CheckedColumn,
    Column,
    read_exactly,
    read_footer,
    wrong_frames,
)
from broker.storage.packed_rows import PACKED_TRAILER_BYTES, PackedColumn, peek_packed, rows_column
from broker.storage.sparse import PRESENT_TRAILER_BYTES, decode_present, peek_present
from broker.storage.sparse_files import read_present

CompareFrames = Callable[[int, list[bytes], RowColumn, Int64Column], Iterable[tuple[int, str]]]
"""Given frames from a row on, with their rows and times: which of them do not belong together, and why."""


def verify_ledger(
    vfs: Vfs,
    folder: str,
    capture: LedgerCapture,
    problems_max: int = 1000,
    *,
    blocks: Collection[int] | None = None,
    compare: CompareFrames | None = None,
) -> list[LedgerProblem]:
    """Read everything the manifest names of a ledger and say what is wrong, at most `problems_max` things.

    With `blocks`, contents are read of these blocks of rows only. `compare` is shown frames that are whole.

    Memory is bounded by a block of rows and a run of frames. Files may be longer than an unsealed capture.
    """
    if capture.entry_count == 0:
        return []  # it has no files, or none that count
    name = capture.name(folder)
    with contextlib.ExitStack() as opened:
        files: dict[str, File] = {}
        problems = []
        for kind, length in file_lengths(capture).items():
            try:
                file = open_checked(vfs, name, kind)
                opened.callback(file.close)
                check_length(file, length, capture.sealed)
                files[kind] = file
            except Corrupt as error:
                problems.append(LedgerProblem.of(error))
        all_problems = itertools.chain(problems, _find_problems(files, capture, blocks, compare))
        distinct = dict.fromkeys(
            itertools.islice(all_problems, problems_max)
        )  # a bad footer is met at every block
    return list(distinct)


def _find_problems(
    files: dict[str, File],
    capture: LedgerCapture,
    wanted: Collection[int] | None,
    compare: CompareFrames | None,
) -> Iterator[LedgerProblem]:
    """Problems in those files that are there and long enough, block by block."""
    row_count = capture.row_count
    columns: dict[str, Column] = {
        "times": CheckedColumn(TIME, row_count, None if capture.sealed else capture.times_crcs),
        "rows": rows_column(capture),
    }
    name: EntryName = name_entry
    if capture.sparse is not None:
        name = "row {}".format  # until it is known which entries are there
    if capture.sparse is not None and "times" in files:
        try:
            ids = ids_of(read_present(files["times"], capture))
            name = _name_of(ids)
        except Corrupt as error:
            yield LedgerProblem.of(error)
    data_end: int | None = 0  # None: not known, the block before is damaged
    for first in range(0, row_count, BLOCK_ROWS):
        if wanted is not None and first // BLOCK_ROWS not in wanted:
            data_end = None
            continue
        count = min(BLOCK_ROWS, row_count - first)
        blocks: dict[str, Array] = {}
        for kind, column in columns.items():
            if kind not in files:
                continue
            try:
                blocks[kind] = column.read(files[kind], first, count)
            except Corrupt as error:
                yield LedgerProblem.of(error)
        rows = blocks.get("rows")
        if rows is None:
            data_end = None
            continue
        path, place = files["rows"].path, partial(columns["rows"].place, files["rows"])
        if "times" in blocks:
            yield from find_bad_times(path, first, rows, blocks["times"], name, place)
        yield from find_bad_offsets(path, first, rows, data_end, name, place)
        data_end = int(rows["offset"][-1]) + int(rows["length"][-1])
        if "data" in files:
            yield from _find_bad_frames(
                files["data"], first, rows, blocks.get("times"), capture, compare, name
            )
    if data_end not in (None, capture.data_bytes):
        what = f"the last row ends at {data_end} of {capture.data_bytes} data bytes"
        offset = columns["rows"].place(files["rows"], row_count - 1) if row_count else HEADER_BYTES
        yield LedgerProblem(files["rows"].path, offset, what)


def _find_bad_frames(
    file: File,
    first: int,
    rows: RowColumn,
    times: Int64Column | None,
    capture: LedgerCapture,
    compare: CompareFrames | None,
    name: EntryName,
) -> Iterator[LedgerProblem]:
    starts = rows["offset"].astype(np.int64)
    ends = starts + rows["length"]
    if int(ends.max()) > capture.data_bytes or (starts[1:] < ends[:-1]).any():
        return  # said already: these offsets do not continue each other
    firsts = split_runs(starts, ends)
    for low, high in itertools.pairwise([*firsts.tolist(), len(starts)]):
        start = int(starts[low])
        part = read_exactly(file, int(ends[high - 1]) - start, HEADER_BYTES + start)
        frames = slice_frames([part], starts[low : low + 1], firsts[:1], starts[low:high], ends[low:high])
        wrong = wrong_frames(frames, rows[low:high])
        for index in wrong.tolist():
            offset = HEADER_BYTES + int(starts[low + index])
            yield LedgerProblem(
                file.path,
                offset,
                f"{name(first + low + index)}: the stored message is damaged",
                FileFault.CHECKSUM,
            )
        if compare is not None and times is not None and not len(wrong):
            for index, what in compare(first + low, frames, rows[low:high], times[low:high]):
                offset = HEADER_BYTES + int(starts[low + index])
                yield LedgerProblem(file.path, offset, f"{name(first + low + index)}: {what}")


def _name_of(ids: UInt32Column) -> EntryName:
    """Of a sparse ledger, whose rows are those of the entries that are there."""
    return lambda row: f"entry {ids[row]}"


def dump_ledger(vfs: Vfs, path: str) -> Iterator[dict[str, Any]]:
    """One file of a ledger as JSON-able lines: its header, its rows or frames, its footer.

    What follows the last whole row or frame and is no footer comes out as one line "rest". Raises Corrupt for a
    bad header, footer, or block of a sealed column; for the latter after all lines.
    """
    file = vfs.open(path)
    try:
        header = decode_header(file.pread(HEADER_BYTES, 0), path)
        yield {"line": "header", **dataclasses.asdict(header)}
        if header.kind == "data":
            end = yield from _dump_frames(file)
        elif header.kind == PACKED:
            end = yield from _dump_packed(file, header.sparse)
        else:
            end = yield from _dump_rows(file, TIME if header.kind == "times" else ROW, header.sparse)
        if end < file.size():
            yield {"line": "rest", "offset": end, "bytes": file.size() - end}
    finally:
        file.close()


def _dump_rows(file: File, dtype: np.dtype[Any], sparse: bool) -> Generator[dict[str, Any], None, int]:
    size = file.size()
    present = peek_present(file.pread(PRESENT_TRAILER_BYTES, max(HEADER_BYTES, size - PRESENT_TRAILER_BYTES)))
    number, numbers = ("place" if sparse else "entry_id"), cast("Iterator[int]", itertools.count())
    if sparse and present is not None:  # of `times`: only there it is told which ids the rows have
        size -= present.section_bytes
        section = read_exactly(file, present.section_bytes, size)
        bitmap = decode_present(section, present.entry_count, present.present_count, file.path, size)
        yield {"line": "present", "entry_count": present.entry_count, "present_count": len(bitmap)}
        number, numbers = "entry_id", iter(bitmap)
    row_count = (size - HEADER_BYTES) // dtype.itemsize
    sealed_count = peek_row_count(file.pread(TRAILER_BYTES, max(HEADER_BYTES, size - TRAILER_BYTES)))
    footer = None
    if sealed_count is not None:
        footer_offset = HEADER_BYTES + sealed_count * dtype.itemsize
        if footer_offset + footer_bytes(sealed_count) == size:
            footer = read_footer(file, dtype.itemsize, sealed_count)
            row_count = sealed_count
    bad_block: int | None = None
    for first in range(0, row_count, BLOCK_ROWS):
        count = min(BLOCK_ROWS, row_count - first)
        block = read_exactly(file, count * dtype.itemsize, HEADER_BYTES + first * dtype.itemsize)
        names = dtype.names or ("deliver_at_ms",)
        for row in np.frombuffer(block, dtype).tolist():
            fields = zip(names, row if dtype.names else (row,), strict=True)
            yield {"line": "row", number: next(numbers, None), **dict(fields)}
        if bad_block is None and footer is not None and not footer.verify(first // BLOCK_ROWS, block):
            bad_block = first
    if footer is None:
        return HEADER_BYTES + row_count * dtype.itemsize
    yield {"line": "footer", "entry_count": footer.row_count, "block_crcs": list(footer.crcs())}
    if bad_block is not None:
        offset = HEADER_BYTES + bad_block * dtype.itemsize
        raise Corrupt("rows of a ledger are damaged", path=file.path, offset=offset)
    return file.size()


def _dump_packed(file: File, sparse: bool) -> Generator[dict[str, Any], None, int]:
    size = file.size()
    row_count = peek_packed(file.pread(PACKED_TRAILER_BYTES, max(HEADER_BYTES, size - PACKED_TRAILER_BYTES)))
    if row_count is None:
        raise Corrupt("a file of packed rows does not end in its directory", path=file.path, offset=size)
    column = PackedColumn(row_count, size)
    widths = column.row_bytes(file)
    for first in range(0, row_count, BLOCK_ROWS):
        rows = column.read(file, first, min(BLOCK_ROWS, row_count - first))
        for number, row in enumerate(rows.tolist(), first):
            fields = zip(rows.dtype.names or (), row, strict=True)
            yield {"line": "row", "place" if sparse else "entry_id": number, **dict(fields)}
    yield {"line": "directory", "entry_count": row_count, "row_bytes": widths}
    return size


def _dump_frames(file: File) -> Generator[dict[str, Any], None, int]:
    size = file.size()
    start = HEADER_BYTES
    while start < size:
        head = file.pread(FRAME_HEAD_BYTES, start)
        length = frame_length(head)
        if length is None or start + length > size:
            break
        crc = value(read_exactly(file, length, start))
        yield {"line": "frame", "offset": start - HEADER_BYTES, "length": length, "crc": crc}
        start += length
    return start
