"""Findings of the checks, and their texts."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from broker.errors import Corrupt, MissingFile, WrongSize
from broker.model import Array, Int64Column, Position

NAMED_MAX = 10
"""Entries that one finding names; all are counted."""


class Severity(enum.StrEnum):
    """Severity of a finding."""

    ERROR = "error"  # a fault: a broker that works, and a disk that keeps what it was given, never leaves one
    INCOMPLETE = "incomplete"  # something could not be looked at, so nothing is known of it
    WARNING = "warning"  # no fault, and worth knowing: what compacting would save, what a crash left


class Kind(enum.StrEnum):
    """Kind of a finding."""

    LOST = "lost"  # pending, and no bucket holds it
    DUPLICATE = "duplicate"  # held more than once under its current time
    WRONG_TIME = "wrong_time"  # held under a time that it never had
    EXTRA = "extra"  # held, but no delayed row before indexed_through backs it
    MISSING_LEDGER = "missing_ledger"  # entries of a ledger that the topic does not have
    BITMAP = "bitmap_mismatch"  # a bucket's bitmaps and its segments hold different entries
    SEGMENT = "bad_segment"  # a segment's order, or what the metadata says about it
    BUCKET = "bad_bucket"  # count, checksum or spans of a bucket
    MISSING_FILE = "missing_file"  # a manifest names it, and it is not there
    SIZE = "size_mismatch"  # a file has another length than what names it says
    CHECKSUM = "bad_checksum"  # bytes that are not what was written: reported by whoever reads
    ROWS = "bad_rows"  # rows and stored messages are whole, and contradict each other
    STATE = "bad_state"  # manifests, cursors, amendments or journal contradict each other
    NOT_CHECKED = "not_checked"  # the disk, the listing or a task failed
    UNCONFIRMED = "unconfirmed"  # found once, and not when read a second time
    ORPHAN = "orphan_file"  # no manifest names it
    STALE = "stale_entries"  # much of what buckets hold is of no use any more
    PINNED = "pinned_ledger"  # few live entries keep the bytes of many

    @property
    def severity(self) -> Severity:
        return _SEVERITIES.get(self, Severity.ERROR)

    @classmethod
    def of(cls, error: Corrupt) -> Kind:
        """Return the kind of finding for an error of reading a file."""
        if isinstance(error, MissingFile):
            return cls.MISSING_FILE
        return cls.SIZE if isinstance(error, WrongSize) else cls.CHECKSUM


_SEVERITIES = {
    Kind.NOT_CHECKED: Severity.INCOMPLETE,
    Kind.UNCONFIRMED: Severity.WARNING,
    Kind.ORPHAN: Severity.WARNING,
    Kind.STALE: Severity.WARNING,
    Kind.PINNED: Severity.WARNING,
}

_DATES_END_MS = 253_402_300_800_000
"""The year 10000, which dates do not reach; delivery times do."""


class Suspect(NamedTuple):
    """One entry that a finding names."""

    entry_id: int
    expected_ms: int | None  # its effective time; None if it has none or is not there
    found_ms: int | None  # the time in a bucket that is wrong; None if there is none
    bucket_ids: tuple[int, ...] = ()  # that hold it


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing in one ledger, bucket, segment or file.

    `count` is how many entries it concerns, `suspects` the first of them. Facts that do not apply are None.
    """

    kind: Kind
    what: str
    count: int = 1
    ledger_id: int | None = None
    bucket_id: int | None = None
    segment: int | None = None
    suspects: tuple[Suspect, ...] = ()

    def __str__(self) -> str:
        places = (("bucket", self.bucket_id), ("segment", self.segment), ("ledger", self.ledger_id))
        where = ", ".join(f"{what} {number}" for what, number in places if number is not None)
        named = ", ".join(map(_describe, self.suspects))
        if named and self.count > len(self.suspects):
            named += f" and {self.count - len(self.suspects)} more"
        return f"{self.kind}: {where + ': ' if where else ''}{self.what}{': ' + named if named else ''}"


def time_text(time_ms: int) -> str:
    """A time in milliseconds, as files have it, and in UTC, for people."""
    if not 0 <= time_ms < _DATES_END_MS:
        return str(time_ms)
    at = datetime(1970, 1, 1) + timedelta(milliseconds=time_ms)
    return f"{time_ms} = {at.isoformat(timespec='milliseconds')}Z"


def _describe(suspect: Suspect) -> str:
    facts = []
    if suspect.expected_ms is not None:
        facts.append(f"due {time_text(suspect.expected_ms)}")
    if suspect.found_ms is not None:
        facts.append(f"indexed for {time_text(suspect.found_ms)}")
    if suspect.bucket_ids:
        facts.append(f"in {'bucket' if len(suspect.bucket_ids) == 1 else 'buckets'} ")
        facts[-1] += " and ".join(map(str, suspect.bucket_ids))
    return f"entry {suspect.entry_id}" + (f" ({', '.join(facts)})" if facts else "")


@dataclass(frozen=True, slots=True)
class IndexState:
    """State of the whole index in the manifest, of one moment."""

    indexed_through: Position  # the end of what buckets cover
    index_lsn: int  # moves up to this record are in buckets
    frontier_ms: int  # entries at or before it may be missing
    gone_ledger_ids: frozenset[int] = frozenset()
    """Ledgers that went as their rest was cancelled: what buckets hold of them is stale."""


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Counts of what was checked. `stale` and `settled` are no faults: compaction would drop these."""

    entries: int = 0  # index entries in the buckets
    pending: int = 0  # entries that the buckets owe
    stale: int = 0  # index entries of what was moved or cancelled since, or of a deleted ledger
    settled: int = 0  # entries held although every subscription has settled them

    def __add__(self, other: LedgerCounts) -> LedgerCounts:
        return LedgerCounts(
            self.entries + other.entries,
            self.pending + other.pending,
            self.stale + other.stale,
            self.settled + other.settled,
        )

    @property
    def stale_ratio(self) -> float:
        return self.stale / self.entries if self.entries else 0.0


def int64_column(values: Any) -> Int64Column:
    """Any column as int64; what does not hold integers is empty. Values beyond int64 wrap: they fit nothing."""
    column: Array = np.asarray(values)
    if column.dtype.kind not in "iu":
        return np.empty(0, dtype=np.int64)
    return column.reshape(-1).astype(np.int64, copy=False)
