"""One bucket: its segments against its metadata and its bitmaps, whatever the rows say. Pure.

Segments are fed in order, decoded. They are gathered to 262,144 entries and then split by ledger, since sorting
out a segment of a few thousand entries by itself would cost more calls than entries. What is kept is 12 bytes an
entry, until the ledger it belongs to was checked; a bucket may be checked in several passes, each over a range of
ledgers, to bound that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from pyroaring import BitMap

from broker.delayed.check.findings import NAMED_MAX, Finding, Kind, Suspect, int64_column
from broker.delayed.check.ledgers import IndexedEntries, Mask
from broker.delayed.due_rows import Key, stable_order
from broker.model import (
    ENTRY_ID_MAX,
    LEDGER_ID_MAX,
    Array,
    Int64Column,
    UInt32Column,
    distinct_values,
    ids_of,
    is_among,
)
from broker.runs.tally import Tally
from broker.storage.bucket_snapshot import BucketMetadata

_GATHERED_ENTRIES = 262_144
_SPARSE = 64  # a mask is made while it has at most so many bytes for each entry in it
_SPARSE_LEAST = 1 << 20


class BucketCheck:
    """Checks one bucket, segment by segment; afterwards holds its entries by ledger, until they are taken.

    `first_ledger_id` and `last_ledger_id` say which ledgers' entries are kept and compared with bitmaps. Without
    `structure` (the second and later passes) segments and metadata are not compared again.
    """

    def __init__(
        self,
        metadata: BucketMetadata,
        *,
        first_ledger_id: int = 0,
        last_ledger_id: int = LEDGER_ID_MAX,
        structure: bool = True,
        named_max: int = NAMED_MAX,
    ) -> None:
        self.bucket_id = metadata.bucket_id
        self._metadata = metadata
        self._range = (first_ledger_id, last_ledger_id)
        self._all_ledgers = self._range == (0, LEDGER_ID_MAX)
        self._structure = structure
        self._named_max = named_max
        segments = metadata.segments
        self._named_segments = list(
            zip(
                int64_column(segments.counts).tolist(),
                int64_column(segments.first_ms).tolist(),
                int64_column(segments.first_ordinals).tolist(),
                int64_column(segments.last_ms).tolist(),
                int64_column(segments.last_ordinals).tolist(),
                strict=False,
            )
        )
        self._bases = _bases(metadata)
        self._next_segment = 0
        self._last: Key | None = None
        self._whole = True  # no segment was skipped
        self._tally = Tally()
        self._gathered: list[tuple[Int64Column, Int64Column, UInt32Column]] = []
        self._gathered_count = 0
        self._pieces: dict[int, list[IndexedEntries]] = {}

    def add_segment(self, deliver_at_ms: Any, ledger_ids: Any, entry_ids: Any) -> list[Finding]:
        """Take the next segment's entries: three aligned columns of integers."""
        index = self._next_segment
        self._next_segment += 1
        columns = [int64_column(column) for column in (deliver_at_ms, ledger_ids, entry_ids)]
        least = min(map(len, columns))
        findings = []
        if max(map(len, columns)) != least:
            lengths = ", ".join(str(len(column)) for column in columns)
            findings.append(self._segment_finding(index, f"its columns have {lengths} entries"))
            columns = [column[:least] for column in columns]
        times, ledgers, wide = columns
        known = (wide >= 0) & (wide <= ENTRY_ID_MAX)
        if not known.all():
            outside = wide[~known]
            what = f"entry ids out of range, the first is {outside[0]}"
            findings.append(self._segment_finding(index, what, len(outside)))
            times, ledgers, wide = times[known], ledgers[known], wide[known]
        entries = wide.astype(np.uint32)
        if self._structure:
            findings += self._check_segment(index, times, ledgers, entries)
        else:
            findings = []
        if not self._all_ledgers:
            wanted = (ledgers >= self._range[0]) & (ledgers <= self._range[1])
            times, ledgers, entries = times[wanted], ledgers[wanted], entries[wanted]
        self._gather(times, ledgers, entries)
        return findings

    def skip_segment(self, what: str) -> list[Finding]:
        """The next segment cannot be read. Its entries are lost, unless another bucket holds them."""
        index = self._next_segment
        self._next_segment += 1
        self._whole = False
        self._last = None
        if not self._structure:
            return []
        return [Finding(Kind.CHECKSUM, what, bucket_id=self.bucket_id, segment=index)]

    def end(self, bitmaps: Mapping[int, BitMap] | None) -> list[Finding]:
        """All segments were fed. `bitmaps` are the bucket's, by ledger; None if they cannot be read."""
        self._split()
        findings = list(self._check_totals()) if self._structure else []
        findings += self._check_spans()
        if bitmaps is not None:
            findings += self._check_bitmaps(bitmaps)
        return findings

    def take_held(self) -> dict[int, list[IndexedEntries]]:
        """Hand over the entries by ledger. Once, after `end`."""
        pieces, self._pieces = self._pieces, {}
        return pieces

    # -- segments and metadata -------------------------------------------------------------------------------

    def _check_segment(
        self, index: int, times: Int64Column, ledgers: Int64Column, entries: UInt32Column
    ) -> Iterator[Finding]:
        self._tally.add(times, ledgers, entries)
        if index >= len(self._named_segments):
            yield self._segment_finding(index, "the metadata does not name it")
        if not len(times):
            yield self._segment_finding(index, "it is empty")
            return
        misplaced = int(np.count_nonzero(_falls(times, ledgers, entries)))
        if misplaced:
            yield self._segment_finding(index, "entries are out of order", misplaced)
        first = (int(times[0]), int(ledgers[0]), int(entries[0]))
        last = (int(times[-1]), int(ledgers[-1]), int(entries[-1]))
        if self._last is not None and first < self._last:
            yield self._segment_finding(index, f"it begins with {first}, before {self._last} that it follows")
        self._last = last
        if index < len(self._named_segments):
            actual = (len(times), *self._ordinal(first), *self._ordinal(last))
            names = ("count", "first time", "first ordinal", "last time", "last ordinal")
            for name, is_, said in zip(names, actual, self._named_segments[index], strict=True):
                if is_ != said and is_ is not None:
                    yield self._segment_finding(index, f"its {name} is {is_}, the metadata says {said}")

    def _check_totals(self) -> Iterator[Finding]:
        named = len(self._named_segments)
        if self._next_segment < named:
            yield self._bucket_finding(f"{self._next_segment} segments, where the metadata names {named}")
        if any(left.ledger_id >= right.ledger_id for left, right in pairwise(self._metadata.spans)):
            yield self._bucket_finding("the spans of its ledgers are out of order")
        if not self._whole:
            return
        if self._tally.count != self._metadata.count:
            yield self._bucket_finding(
                f"it holds {self._tally.count} entries, the metadata says {self._metadata.count}"
            )
        if self._tally.checksum != self._metadata.checksum:
            yield self._bucket_finding("its entries are not those that its checksum was made of")

    def _ordinal(self, key: Key) -> tuple[int, int | None]:
        base = self._bases.get(key[1])
        return key[0], None if base is None else base + key[2]

    # -- entries by ledger, and bitmaps ----------------------------------------------------------------------

    def _gather(self, times: Int64Column, ledgers: Int64Column, entries: UInt32Column) -> None:
        self._gathered.append((times, ledgers, entries))
        self._gathered_count += len(times)
        if self._gathered_count >= _GATHERED_ENTRIES:
            self._split()

    def _split(self) -> None:
        """Sort out by ledger what was gathered."""
        if not self._gathered_count:
            self._gathered = []
            return
        times, ledgers, entries = (np.concatenate(column) for column in zip(*self._gathered, strict=True))
        self._gathered, self._gathered_count = [], 0
        if ledgers[0] != ledgers[-1] or (ledgers != ledgers[0]).any():
            order = stable_order(ledgers)
            times, ledgers, entries = times[order], ledgers[order], entries[order]
        bounds = np.flatnonzero(ledgers[1:] != ledgers[:-1]) + 1
        for low, high in pairwise([0, *bounds.tolist(), len(ledgers)]):
            pieces = self._pieces.setdefault(int(ledgers[low]), [])
            pieces.append(IndexedEntries(self.bucket_id, entries[low:high], times[low:high]))

    def _check_spans(self) -> Iterator[Finding]:
        spans = {span.ledger_id: span for span in self._metadata.spans}
        for ledger_id, pieces in sorted(self._pieces.items()):
            span = spans.get(ledger_id)
            first, end = (span.first, span.end) if span else (0, 0)
            count = 0
            for piece in pieces:
                if int(piece.entry_ids.min()) < first or int(piece.entry_ids.max()) >= end:
                    count += int(np.count_nonzero((piece.entry_ids < first) | (piece.entry_ids >= end)))
            if count:
                yield self._bucket_finding("entries lie in no span of the metadata", count, ledger_id)

    def _check_bitmaps(self, bitmaps: Mapping[int, BitMap]) -> Iterator[Finding]:
        spanned = {span.ledger_id for span in self._metadata.spans}
        for ledger_id in sorted(bitmaps.keys() | self._pieces.keys()):
            if not self._range[0] <= ledger_id <= self._range[1] and not self._all_ledgers:
                continue
            bitmap = bitmaps.get(ledger_id)
            pieces = self._pieces.get(ledger_id)
            if bitmap and ledger_id not in spanned:
                yield self._bitmap_finding(ledger_id, "no span names its ledger", [], 1)
            if bitmap is None:
                bitmap = BitMap()  # a span may hold no entry
            only_bitmap, only_segments = _compare(bitmap, pieces or [])
            if len(only_segments):
                what = "in a segment, but not in the bitmap"
                yield self._bitmap_finding(ledger_id, what, only_segments, len(only_segments))
            if len(only_bitmap) and self._whole:
                what = "in the bitmap, but in no segment"
                yield self._bitmap_finding(ledger_id, what, only_bitmap, len(only_bitmap))

    # -- findings --------------------------------------------------------------------------------------------

    def _segment_finding(self, index: int, what: str, count: int = 1) -> Finding:
        return Finding(Kind.SEGMENT, what, count, bucket_id=self.bucket_id, segment=index)

    def _bucket_finding(self, what: str, count: int = 1, ledger_id: int | None = None) -> Finding:
        return Finding(Kind.BUCKET, what, count, ledger_id=ledger_id, bucket_id=self.bucket_id)

    def _bitmap_finding(self, ledger_id: int, what: str, entry_ids: Any, count: int) -> Finding:
        named = [int(entry_id) for entry_id in entry_ids[: self._named_max]]
        suspects = tuple(Suspect(entry_id, None, None) for entry_id in named)
        return Finding(
            Kind.BITMAP, what, count, ledger_id=ledger_id, bucket_id=self.bucket_id, suspects=suspects
        )


def _bases(metadata: BucketMetadata) -> dict[int, int]:
    """By ledger what makes an entry id an ordinal."""
    bases = {}
    total = 0
    for span in metadata.spans:
        bases[span.ledger_id] = total - span.first
        total += span.end - span.first
    return bases


def _falls(times: Int64Column, ledgers: Int64Column, entries: UInt32Column) -> Mask:
    """Return whether each row but the first lies before the row before it. Equal rows are in order: a duplicate."""
    falls: Mask = entries[1:] < entries[:-1]
    falls &= ledgers[1:] == ledgers[:-1]
    falls |= ledgers[1:] < ledgers[:-1]
    falls &= times[1:] == times[:-1]
    falls |= times[1:] < times[:-1]
    return falls


def _compare(bitmap: BitMap, pieces: list[IndexedEntries]) -> tuple[Array, Array]:
    """Return the entry ids, rising, of the bitmap alone and of the segments alone."""
    named = ids_of(bitmap)
    held = [piece.entry_ids for piece in pieces]
    count = len(named) + sum(map(len, held))
    if not count:
        return named, named
    parts = [part for part in (named, *held) if len(part)]
    lowest = min(int(part.min()) for part in parts)
    width = max(int(part.max()) for part in parts) + 1 - lowest
    if width > max(_SPARSE_LEAST, _SPARSE * count):
        together = distinct_values(np.concatenate((np.empty(0, np.uint32), *held)))
        return named[~is_among(named, together)], together[~is_among(together, named)]
    marks = np.zeros(width, dtype=np.uint8)
    for part in held:
        marks[part - np.uint32(lowest)] = 2
    marks[named - np.uint32(lowest)] += 1
    if np.count_nonzero(marks == 3) == np.count_nonzero(marks):
        return named[:0], named[:0]
    return np.flatnonzero(marks == 1) + lowest, np.flatnonzero(marks == 2) + lowest
