"""A topic's log and index, changed by hand, beside the plainest model of what waits in it."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from google_crc32c import value
from pyroaring import BitMap

from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.bucket_values import BucketPolicyValues
from broker.delayed.due_rows import ROW_BYTES
from broker.delayed.memory_tracker import MemoryTracker
from broker.delayed.segment_cache import SegmentCache
from broker.delayed.tracker import ENTRY_AFTER_ALL, DelayedDeliveryTracker, Frontier
from broker.model import FLAG_DELAYED, ROW, Position
from broker.runtime.foreground import Foreground
from broker.storage.blocks import LedgerName
from broker.storage.ledger import Ledger
from broker.storage.ledger_files import OpenFiles
from broker.storage.log import TopicLog
from broker.storage.records import Produced
from broker.storage.varint import encode_varint
from broker.testing.mem_vfs import MemVfs
from broker.topics.schedule_values import DueRange
from broker.topics.scheduled import ScheduledLook
from tests.unit.delayed.gated_buckets import TOPIC_ID, GatedExecutor, new_storage

NOW = 1_700_000_000_000
EVERYTHING = DueRange()
SMALL = BucketPolicyValues(
    min_index_count=4, max_buckets=64, segment_time_step_ms=1_000, max_segment_entries=3
)


class StandingClock:
    def now_ms(self) -> int:
        return NOW

    def monotonic_ns(self) -> int:
        return 0


@dataclass
class Waiting:
    """A message of the model."""

    due_ms: int
    key: str
    frame: bytes
    revision: int = 0


class _WithArguments(Executor):
    """The gated one takes calls without arguments."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, fn, /, *arguments, **named):
        return self._executor.submit(partial(fn, *arguments, **named))


class Upkeep:
    """Counts who keeps files."""

    def __init__(self) -> None:
        self.keepers = 0

    @contextmanager
    def keep_files(self):
        self.keepers += 1
        try:
            yield
        finally:
            self.keepers -= 1


class PendingWorld:
    """Also stands for the index pump: rows and moves reach the index when somebody waits for that."""

    def __init__(self, kind: str, policy: BucketPolicyValues = SMALL, lead_ms: int = 2_000) -> None:
        self.executor = GatedExecutor()
        self.vfs = MemVfs()
        self.storage = new_storage(self.vfs, self.executor)
        self.vfs.make_dir("ledgers")
        self.files = OpenFiles(self.vfs)
        self.log = TopicLog(self._open_ledger)
        self.tracker: DelayedDeliveryTracker
        frontier = Frontier(NOW, *ENTRY_AFTER_ALL)
        self.kept = Upkeep()
        self.upkeep: Any = None
        if kind == "memory":
            self.tracker = MemoryTracker(self._read_times, frontier, tick_ms=1_000)
        else:
            self.upkeep = self.kept
            self.tracker = BucketTracker(
                self.storage,
                frontier,
                executor=self.executor,
                amendments_of=self.log.amendments_of,
                policy=policy,
                lead_ms=lead_ms,
                looked=SegmentCache(4 * ROW_BYTES),
            )
        self.rebuilds = 0
        self.is_exact = True
        self.waiting: dict[Position, Waiting] = {}
        self.lsn = 1
        self.now_ms = NOW
        self.due: set[Position] = set()
        self.look = ScheduledLook(
            self.log,
            lambda: self,
            StandingClock(),
            lambda position, _: position in self.due,
            Foreground(lambda: False),
        )
        self.unindexed: list[tuple[int, np.ndarray, np.ndarray]] = []

    # -- what the pump offers --------------------------------------------------------------------------------

    async def caught_up(self) -> None:
        for rows in self.unindexed:
            self.tracker.add(*rows)
        self.unindexed = []

    async def wait_built(self) -> None:
        pass

    # -- what happens to a topic -----------------------------------------------------------------------------

    def add(self, ledger_id: int, messages: list[tuple[int, str]], payload: bytes = b"") -> None:
        """Append messages: (due_ms, schedule_key)."""
        first = self.log.entry_count(ledger_id) or 0
        ledger_bytes = self.log.last.data_bytes if first and self.log.last is not None else 0
        frames = [frame_of(key, payload) for _, key in messages]
        times = np.array([due_ms for due_ms, _ in messages], dtype=np.int64)
        rows = np.zeros(len(messages), dtype=ROW)
        rows["publish_time_ms"], rows["flags"] = NOW - 5, FLAG_DELAYED
        rows["length"] = [len(frame) for frame in frames]
        rows["offset"] = ledger_bytes + np.cumsum(rows["length"]) - rows["length"]
        rows["crc"] = [value(frame) for frame in frames]
        rows["schedule_hash"] = [len(key) for _, key in messages]
        self.log.append(Produced(TOPIC_ID, ledger_id, first, NOW, times, rows, b"".join(frames)))
        entry_ids = np.arange(first, first + len(messages), dtype=np.uint32)
        self.unindexed.append((ledger_id, entry_ids, times))
        for entry_id, (due_ms, key), frame in zip(entry_ids.tolist(), messages, frames, strict=True):
            self.waiting[Position(ledger_id, entry_id)] = Waiting(due_ms, key, frame)
        self.lsn += 1

    def _indexed(self, position: Position) -> bool:
        return not any(
            position.ledger_id == ledger_id and position.entry_id in ids
            for ledger_id, ids, _ in self.unindexed
        )

    def cancel(self, position: Position) -> None:
        message = self.waiting.pop(position)
        self.log.cancel({position.ledger_id: BitMap([position.entry_id])})
        self._remove(position, message.due_ms)
        self.lsn += 1

    def move(self, position: Position, due_ms: int) -> None:
        message = self.waiting[position]
        entry_ids = np.array([position.entry_id], dtype=np.uint32)
        times = np.array([due_ms], dtype=np.int64)
        self.lsn += 1
        self.log.amendments.move(position.ledger_id, entry_ids, times, self.lsn)
        self._remove(position, message.due_ms)
        self.unindexed.append((position.ledger_id, entry_ids, times))
        message.due_ms, message.revision = due_ms, message.revision + 1

    def _remove(self, position: Position, due_ms: int) -> None:
        if not self._indexed(position):
            self._flush()
        self.tracker.remove(
            position.ledger_id,
            np.array([position.entry_id], dtype=np.uint32),
            np.array([due_ms], dtype=np.int64),
        )

    def _flush(self) -> None:
        for rows in self.unindexed:
            self.tracker.add(*rows)
        self.unindexed = []

    async def take(self, now_ms: int) -> None:
        """Everything up to a time comes due."""
        self.now_ms = max(self.now_ms, now_ms)
        await self.caught_up()
        while True:
            while self.tracker.needs_load(now_ms):
                await self.tracker.load(now_ms)
            if self.tracker.take_due(now_ms, 3) is None:
                break
        frontier_ms = self.tracker.frontier.deliver_at_ms
        self.waiting = {
            position: message for position, message in self.waiting.items() if message.due_ms > frontier_ms
        }

    async def seal(self) -> None:
        await self.caught_up()
        if isinstance(self.tracker, BucketTracker):
            assert await self.tracker.buckets.seal()

    async def merge(self) -> None:
        if isinstance(self.tracker, BucketTracker):
            assert await self.tracker.buckets.merge()

    async def flush_ledgers(self) -> None:
        for ledger in self.log:
            await ledger.flush()

    def drop(self, ledger_id: int) -> None:
        self._flush()
        self.log.drop(ledger_id)
        self.tracker.discard_ledger(ledger_id)
        self.waiting = {
            position: message for position, message in self.waiting.items() if position.ledger_id != ledger_id
        }

    def places(self, due: DueRange = EVERYTHING, prefix: str = "") -> list[tuple[int, int, int]]:
        """Of what waits, in due order."""
        return sorted(
            (message.due_ms, *position)
            for position, message in self.waiting.items()
            if due.start_ms <= message.due_ms < due.end_ms and message.key.startswith(prefix)
        )

    # -- parts -----------------------------------------------------------------------------------------------

    def _open_ledger(self, ledger_id: int) -> Ledger:
        return Ledger(
            LedgerName("ledgers", TOPIC_ID, ledger_id, 0), self.files, _WithArguments(self.executor)
        )

    async def _read_times(self, ledger_id: int, entry_ids: np.ndarray) -> np.ndarray:
        if self.log.entry_count(ledger_id) is None:
            return np.zeros(len(entry_ids), dtype=np.int64)
        return await self.log.times_of(ledger_id, entry_ids)


def frame_of(key: str, payload: bytes = b"") -> bytes:
    text = key.encode()
    body = b"\x0a" + encode_varint(len(payload)) + payload
    body += b"\x20" + encode_varint(NOW)
    if text:
        body += b"\x32" + encode_varint(len(text)) + text
    return b"\x12" + encode_varint(len(body)) + body
