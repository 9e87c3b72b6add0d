"""Looking at snapshots of buckets and at amendments from outside: print them. Blocks; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from broker.errors import Corrupt
from broker.model import members
from broker.runs.tally import Tally
from broker.runtime.vfs import File, Vfs, read_file
from broker.storage.amendments import HEADER_BYTES as AMENDMENTS_HEADER_BYTES
from broker.storage.amendments import decode_amendments
from broker.storage.bucket_snapshot import (
    HEADER_BYTES,
    BucketMetadata,
    Ordinals,
    bitmap_places,
    check_segment,
    decode_bitmap,
    decode_entries,
    decode_header,
    decode_metadata,
)

Line = dict[str, Any]

_FIRST_IDS = 10


def dump_bucket(vfs: Vfs, path: str) -> Iterator[Line]:
    """A snapshot: its header, what its metadata says, each ledger's bitmap, each segment. Not its entries.

    Every segment is decoded and compared with the metadata, one at a time. Raises Corrupt for what is damaged:
    of bitmaps, segments and sums after all lines.
    """
    file = vfs.open(path)
    try:
        header = decode_header(file.pread(HEADER_BYTES, 0), path)
        yield {
            "line": "header",
            "file": "bucket",
            "version": 1,
            **header._asdict(),
            "file_bytes": file.size(),
        }
        beginning = file.pread(HEADER_BYTES + header.metadata_bytes, 0)
        metadata = decode_metadata(beginning, path)
        yield {
            "line": "bucket",
            "topic_id": metadata.topic_id,
            "bucket_id": metadata.bucket_id,
            "start": list(metadata.start),
            "end": list(metadata.end),
            "count": metadata.count,
            "checksum": f"{metadata.checksum:016x}",
            "segment_count": len(metadata.segments),
        }
        damages: list[Corrupt] = []
        yield from _bitmap_lines(file, beginning, damages)
        yield from _segment_lines(file, metadata, damages)
        if file.size() != metadata.file_bytes:
            what = f"A snapshot has {file.size()} bytes where there are {metadata.file_bytes}"
            damages.append(Corrupt(what, path=path, offset=min(file.size(), metadata.file_bytes)))
        if damages:
            raise damages[0]
    finally:
        file.close()


def _bitmap_lines(file: File, beginning: bytes, damages: list[Corrupt]) -> Iterator[Line]:
    for ledger_id, place in bitmap_places(beginning, file.path).items():
        line = {"line": "ledger", "ledger_id": ledger_id, "first": place.span.first, "end": place.span.end}
        try:
            bitmap = decode_bitmap(file.pread(place.length, place.offset), place, file.path)
        except Corrupt as error:
            damages.append(error)
            yield {**line, "bitmap_bytes": place.length, "ok": False}
            continue
        # A slice would make a set of them all, and a few bytes of it may stand for millions.
        first_ids = [bitmap[rank] for rank in range(min(_FIRST_IDS, len(bitmap)))]
        yield {
            **line,
            "bitmap_bytes": place.length,
            "ok": True,
            "count": len(bitmap),
            "first_ids": first_ids,
        }


def _segment_lines(file: File, metadata: BucketMetadata, damages: list[Corrupt]) -> Iterator[Line]:
    segments, ordinals = metadata.segments, Ordinals(metadata.spans)
    tally = Tally()
    is_whole = True
    for index in range(len(segments)):
        offset, length = metadata.segments_at + int(segments.offsets[index]), int(segments.lengths[index])
        line = {
            "line": "segment",
            "index": index,
            "offset": offset,
            "bytes": length,
            "count": int(segments.counts[index]),
            "first_ms": int(segments.first_ms[index]),
            "last_ms": int(segments.last_ms[index]),
        }
        data = file.pread(length, offset)
        try:
            check_segment(metadata, index, data, file.path)
            times, ledger_ids, entry_ids = decode_entries(metadata, ordinals, index, data, file.path)
        except Corrupt as error:
            damages.append(error)
            is_whole = False
            yield {**line, "ok": False}
            continue
        tally.add(times, ledger_ids, entry_ids)
        yield {
            **line,
            "ok": True,
            "first_position": [int(ledger_ids[0]), int(entry_ids[0])],
            "last_position": [int(ledger_ids[-1]), int(entry_ids[-1])],
        }
    if is_whole and tally.checksum != metadata.checksum:
        what = "The checksum of a snapshot's entries does not match"
        damages.append(Corrupt(what, path=file.path, offset=HEADER_BYTES))


def dump_amendments(vfs: Vfs, path: str) -> Iterator[Line]:
    """Print the cancels of a ledger as count and first ids, and each move."""
    data = read_file(vfs, path)
    version = data[4] if len(data) >= AMENDMENTS_HEADER_BYTES else 0
    yield {"line": "header", "file": "amendments", "version": version, "file_bytes": len(data)}
    image = decode_amendments(data, path)
    amendments = image.amendments
    cancelled = amendments.cancelled
    yield {
        "line": "amendments",
        "topic_id": image.topic_id,
        "ledger_id": image.ledger_id,
        "cancelled_count": len(cancelled),
        "first_cancelled_ids": [cancelled[rank] for rank in range(min(_FIRST_IDS, len(cancelled)))],
        "moved_count": len(amendments.entry_ids),
    }
    columns = (amendments.entry_ids, amendments.deliver_at_ms, amendments.revisions, amendments.lsns)
    was_cancelled = members(amendments.entry_ids, cancelled)
    rows = zip(*(np.asarray(column).tolist() for column in (*columns, was_cancelled)), strict=True)
    for entry_id, deliver_at_ms, revision, lsn, is_cancelled in rows:
        yield {
            "line": "moved",
            "entry_id": entry_id,
            "deliver_at_ms": deliver_at_ms,
            "revision": revision,
            "lsn": lsn,
            "cancelled": is_cancelled,
        }
