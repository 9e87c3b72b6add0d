"""Sequence ids of a topic's producers: durable, changed by `apply` alone. Pure.

A producer's ids are kept as runs: consecutive sequence ids that have consecutive entry ids and one publish time. A
producer that sends one message at a time has a run a millisecond at worst; one that sends batches has a run a batch.

Invariants:
  PRODUCER-1  Runs rise and do not overlap; every sequence id stored at or above `floor` lies in one of them.
  PRODUCER-2  `floor` and `highest` never go back, and `highest` was stored.
  PRODUCER-3  What `apply` does follows from the record and the state before it: what is forgotten is decided by the
      record.
  PRODUCER-4  Where memory is short, what has expired goes without a record. A crash may bring it back; the next
      record of that producer takes it away again, because its floor is not below what went.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from broker.model import Int64Column, UInt64Column
from broker.storage.manifest import TopicImage
from broker.storage.producers_file import SEQUENCE_ID_MAX, ProducerImage, ProducersImage
from broker.storage.records import Produced, Record, Replaced, Sequences
from broker.topics.component import Capture, NewFile, not_applied

RUN_BYTES = 80
"""Memory of a run, measured: 32 bytes of columns, twice (what is durable, what is on its way), and slack."""
PRODUCER_BYTES = 2_048
"""Memory of a producer besides, measured in the same way: its name, its objects and the first few runs."""

_CHUNK = 1_024
_COMPACT_FROM = 32
_RUNS_INCLUDED = 8  # in PRODUCER_BYTES: the least that arrays allocate


class KnownIds(NamedTuple):
    """For each of some sequence ids, what is remembered of it; `is_known` says whether anything is."""

    is_known: np.ndarray
    ledger_ids: Int64Column
    entry_ids: Int64Column
    publish_times_ms: Int64Column


class ProducerHistory:
    """Runs of one producer: see the module's description."""

    __slots__ = (
        "_begin",
        "_counts",
        "_entry_ids",
        "_firsts",
        "_ledger_ids",
        "_times_ms",
        "floor",
        "highest",
        "id_count",
        "last_publish_ms",
    )

    def __init__(self) -> None:
        self.floor = 0
        self.highest = 0
        self.id_count = 0  # remembered
        self.last_publish_ms = 0  # of what is remembered, or was
        # Columns of runs; those before `_begin` are forgotten. Arrays, because lists would take ten times the memory.
        self._begin = 0
        self._firsts = array("Q")
        self._counts = array("I")
        self._ledger_ids = array("Q")
        self._entry_ids = array("I")
        self._times_ms = array("q")

    @classmethod
    def restore(cls, image: ProducerImage) -> ProducerHistory:
        """As the file has it."""
        producer = cls()
        producer.floor = image.floor
        producer.highest = image.highest_sequence_id
        producer._firsts.frombytes(image.sequence_ids)
        producer._counts.frombytes(image.counts)
        producer._ledger_ids.frombytes(image.ledger_ids)
        producer._entry_ids.frombytes(image.entry_ids)
        producer._times_ms.frombytes(image.publish_times_ms)
        producer.id_count = sum(producer._counts)
        producer.last_publish_ms = max(producer._times_ms, default=0)
        return producer

    def image(self, name: str) -> ProducerImage:
        """As the file has it."""
        begin = self._begin
        return ProducerImage(
            name=name,
            highest_sequence_id=self.highest,
            floor=self.floor,
            sequence_ids=self._firsts[begin:].tobytes(),
            counts=self._counts[begin:].tobytes(),
            ledger_ids=self._ledger_ids[begin:].tobytes(),
            entry_ids=self._entry_ids[begin:].tobytes(),
            publish_times_ms=self._times_ms[begin:].tobytes(),
        )

    def copy(self) -> ProducerHistory:
        copy = ProducerHistory()
        copy.floor, copy.highest = self.floor, self.highest
        copy.id_count, copy.last_publish_ms = self.id_count, self.last_publish_ms
        begin = self._begin
        copy._firsts, copy._counts = self._firsts[begin:], self._counts[begin:]
        copy._ledger_ids, copy._entry_ids = self._ledger_ids[begin:], self._entry_ids[begin:]
        copy._times_ms = self._times_ms[begin:]
        return copy

    @property
    def run_count(self) -> int:
        return len(self._firsts) - self._begin

    @property
    def memory_bytes(self) -> int:
        return _memory_bytes(self.run_count)

    # -- changes ---------------------------------------------------------------------------------------------

    def add(
        self, sequence_ids: UInt64Column, ledger_id: int, first_entry_id: int, publish_time_ms: int
    ) -> None:
        """Remember a batch: message i has this sequence id (0: none) and entry id `first_entry_id + i`."""
        self.last_publish_ms = max(self.last_publish_ms, publish_time_ms)
        first, last = int(sequence_ids[0]), int(sequence_ids[-1])
        count = len(sequence_ids)
        if count == 1 or (first and last - first == count - 1 and np.count_nonzero(sequence_ids) == count):
            self._add_run(first, count, ledger_id, first_entry_id, publish_time_ms)
            return
        places = np.flatnonzero(sequence_ids)
        given = sequence_ids[places]
        starts = np.concatenate(([0], np.flatnonzero(_breaks(given, places)) + 1))
        counts = np.diff(starts, append=len(given))
        for run in zip(
            given[starts].tolist(), counts.tolist(), (places[starts] + first_entry_id).tolist(), strict=True
        ):
            self._add_run(run[0], run[1], ledger_id, run[2], publish_time_ms)

    def _add_run(self, first: int, count: int, ledger_id: int, entry_id: int, publish_time_ms: int) -> None:
        self.id_count += count
        at = len(self._firsts)
        if first <= self.highest:
            at = bisect_left(self._firsts, first, self._begin)
        else:
            self.highest = first + count - 1
        before = at - 1
        if (
            before >= self._begin
            and self._firsts[before] + self._counts[before] == first
            and self._ledger_ids[before] == ledger_id
            and self._entry_ids[before] + self._counts[before] == entry_id
            and self._times_ms[before] == publish_time_ms
        ):
            self._counts[before] += count
            return
        self._firsts.insert(at, first)
        self._counts.insert(at, count)
        self._ledger_ids.insert(at, ledger_id)
        self._entry_ids.insert(at, entry_id)
        self._times_ms.insert(at, publish_time_ms)

    def forget_below(self, floor: int) -> None:
        """Forget every sequence id below `floor`."""
        if floor <= self.floor:
            return
        self.floor = floor
        begin = self._begin
        end = bisect_left(self._firsts, floor, begin)  # the run before it may reach beyond the floor
        if end == begin:
            return
        last = end - 1
        cut = min(self._counts[last], floor - self._firsts[last])
        self.id_count -= cut + (sum(self._counts[begin:last]) if last > begin else 0)
        if cut < self._counts[last]:
            self._firsts[last] = floor
            self._counts[last] -= cut
            self._entry_ids[last] += cut
            end = last
        self._begin = end
        if end > _COMPACT_FROM and 8 * end > len(self._firsts):
            # Anew: an array keeps what it has allocated until it is half empty.
            self._firsts, self._counts = self._firsts[end:], self._counts[end:]
            self._ledger_ids, self._entry_ids = self._ledger_ids[end:], self._entry_ids[end:]
            self._times_ms = self._times_ms[end:]
            self._begin = 0

    # -- decisions -------------------------------------------------------------------------------------------

    def floor_at(self, now_ms: int, window_ms: int, entries_max: int) -> int:
        """Return the floor: ids older than the window, or beyond a number, are not remembered."""
        at = self._first_fresh(now_ms - window_ms)
        left = self.id_count - (sum(self._counts[self._begin : at]) if at > self._begin else 0)
        floor = self.floor
        if at > self._begin:
            floor = max(floor, self._end_of(at - 1))
        excess = left - entries_max
        if 0 < excess <= self._counts[at]:  # nearly always: one in, one out
            return max(floor, self._firsts[at] + excess)
        while excess > 0:
            counts = self._counts[at : at + _CHUNK]
            whole = sum(counts)
            if whole <= excess:
                at += len(counts)
                excess -= whole
                floor = max(floor, self._end_of(at - 1))
                continue
            ends = np.frombuffer(counts, np.uint32).cumsum()
            inside = int(np.searchsorted(ends, excess, "left"))
            before = int(ends[inside - 1]) if inside else 0
            floor = max(floor, self._firsts[at + inside] + excess - before)
            break
        return floor

    def floor_after(self, sequence_ids: UInt64Column, now_ms: int, window_ms: int, entries_max: int) -> int:
        """The floor that a record with these ids (all of them given, none remembered) states."""
        if int(sequence_ids[0]) <= self.highest:
            # They fill holes, which is rare: where they come in the order of ids, a trial tells best.
            trial = self.copy()
            trial.add(sequence_ids, 1, 0, now_ms)
            return trial.floor_at(now_ms, window_ms, entries_max)
        room = entries_max - len(sequence_ids)
        if room >= 0:
            return self.floor_at(now_ms, window_ms, room)
        return int(sequence_ids[-room - 1]) + 1

    def memory_bytes_after(self, sequence_ids: UInt64Column, floor: int, entries_max: int) -> int:
        """Return the greatest memory after a batch with these ids (0: none) and this floor."""
        places = np.flatnonzero(sequence_ids)
        added = 1 + int(np.count_nonzero(_breaks(sequence_ids[places], places)))
        begin = self._begin
        end = bisect_left(self._firsts, floor, begin)
        if end > begin and self._firsts[end - 1] + self._counts[end - 1] > floor:
            end -= 1  # its last part stays
        return _memory_bytes(len(self._firsts) - end + min(added, entries_max))

    def find(self, sequence_ids: UInt64Column) -> KnownIds:
        """Find some rising ids among the remembered."""
        low = max(self._begin, bisect_right(self._firsts, int(sequence_ids[0]), self._begin) - 1)
        high = bisect_right(self._firsts, int(sequence_ids[-1]), low)
        if high == low:
            nothing = np.zeros(len(sequence_ids), np.int64)
            return KnownIds(nothing.astype(np.bool_), nothing, nothing, nothing)
        # Slices are copies: an array that lends its memory to a view could not grow any more.
        firsts = np.frombuffer(self._firsts[low:high], np.uint64)
        counts = np.frombuffer(self._counts[low:high], np.uint32)
        runs = np.maximum(np.searchsorted(firsts, sequence_ids, "right") - 1, 0)
        inside = sequence_ids - firsts[runs]  # wraps to something great where an id lies before all runs
        entry_ids = np.frombuffer(self._entry_ids[low:high], np.uint32).astype(np.int64)[runs]
        return KnownIds(
            inside < counts[runs],
            np.frombuffer(self._ledger_ids[low:high], np.int64)[runs],
            entry_ids + inside.view(np.int64),
            np.frombuffer(self._times_ms[low:high], np.int64)[runs],
        )

    def _first_fresh(self, expired_ms: int) -> int:
        """The first run that was produced after `expired_ms`."""
        at = self._begin
        while at < len(self._times_ms) and self._times_ms[at] <= expired_ms:
            fresh = np.flatnonzero(np.frombuffer(self._times_ms[at : at + _CHUNK], np.int64) > expired_ms)
            at += int(fresh[0]) if len(fresh) else min(_CHUNK, len(self._times_ms) - at)
        return at

    def _end_of(self, run: int) -> int:
        # The greatest id of all has none after it: it is remembered for good.
        return min(self._firsts[run] + self._counts[run], SEQUENCE_ID_MAX)


def _breaks(given: UInt64Column, places: Int64Column) -> np.ndarray:
    """For each of some ids but the first, with their places in the batch: whether it begins a run."""
    breaks: np.ndarray = (given[1:] - given[:-1] != 1) | (places[1:] - places[:-1] != 1)
    return breaks


def _memory_bytes(run_count: int) -> int:
    return PRODUCER_BYTES + RUN_BYTES * max(0, run_count - _RUNS_INCLUDED)


@dataclass(slots=True)
class DedupMemory:
    """Memory of all topics' producers, by the measured size of a range; batches on their way count."""

    producers_per_topic_max: int
    bytes_max: int
    retry_ms: int  # how often `forget_expired` is called
    used_bytes: int = 0

    @property
    def is_short(self) -> bool:
        return self.used_bytes > self.bytes_max // 2

    def has_room(self, growth_bytes: int) -> bool:
        return growth_bytes <= 0 or self.used_bytes + growth_bytes <= self.bytes_max


@dataclass(frozen=True, slots=True)
class ProducersCapture:
    """A topic's producers at one moment; the rest is for any thread."""

    topic_id: int
    by_name: dict[str, ProducerHistory]

    def image(self) -> ProducersImage:
        """The content of the file."""
        producers = tuple(producer.image(name) for name, producer in sorted(self.by_name.items()))
        return ProducersImage(self.topic_id, producers)

    def encode(self) -> bytes:
        """The file."""
        return self.image().encode()


class Producers:
    """All producers of a topic that sent sequence ids."""

    def __init__(self, image: ProducersImage | None = None, file: str = "") -> None:
        """`file`: its name in `cursors/`, of which `image` is the content."""
        self.by_name = (
            {producer.name: ProducerHistory.restore(producer) for producer in image.producers}
            if image
            else {}
        )
        self.changed = False
        """Since the file was written."""
        self._file = file
        self._lent: set[str] = set()  # to the last capture, which another thread may read: not to be changed

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`."""
        match record:
            case Produced():
                produced = record
            case Replaced():
                produced = record.produced
            case _:
                not_applied(self, record)
        if produced.sequences is not None:
            self._remember(produced, produced.sequences)

    def _remember(self, record: Produced, sequences: Sequences) -> None:
        """Remember a batch, and forget what the record says."""
        if sequences.forgotten_name:
            self.by_name.pop(sequences.forgotten_name, None)
        producer = self.by_name.get(sequences.producer_name)
        if producer is None:
            producer = self.by_name[sequences.producer_name] = ProducerHistory()
        elif sequences.producer_name in self._lent:
            producer = self.by_name[sequences.producer_name] = producer.copy()
        self._lent.discard(sequences.producer_name)
        producer.add(sequences.sequence_ids, record.ledger_id, record.first_entry_id, record.publish_time_ms)
        producer.forget_below(sequences.floor)
        self.changed = True

    def forget_expired(self, name: str, now_ms: int, window_ms: int, entries_max: int) -> ProducerHistory:
        """Forget of a producer, and return it, what is not answered from any more; see PRODUCER-4."""
        producer = self.by_name[name]
        floor = producer.floor_at(now_ms, window_ms, entries_max)
        if floor > producer.floor:
            producer = self.by_name[name] = producer.copy()
            producer.forget_below(floor)
            self._lent.discard(name)
        return producer

    def capture(self, image: TopicImage) -> Capture:
        """See `Component`."""
        if not self.changed:
            return Capture(replace(image, producers_file=self._file))
        before, self._file = self._file, f"producers.{image.applied_lsn:x}"
        self.changed = False
        return Capture(
            replace(image, producers_file=self._file),
            files=(NewFile(f"cursors/{self._file}", self.content(image.topic_id).encode),),
            replaced=(f"cursors/{before}",) if before not in ("", self._file) else (),
        )

    def content(self, topic_id: int) -> ProducersCapture:
        """Capture the producers in one short step: one is copied when it changes next."""
        self._lent = set(self.by_name)
        return ProducersCapture(topic_id, dict(self.by_name))
