"""The check of the delayed index on a topic that is at work: `VerifyTopic`.

Everything that is compared is of one moment, taken in one step on the loop: the image of the index (what the next
manifest would say), which ledgers there are and how long they are, their amendments, and what each subscription
has settled. None of it changes under the check: rows and snapshots are written once, amendments are replaced and
never changed, cursors are copied, and files that the image names stay until the check ends.

So the image is held to what a manifest is held to, and nothing else is excused:
  - What was indexed and not sealed yet lies in memory; the image's `indexed_through` stops before it.
  - What was taken lies at or before the frontier; entries up to the frontier's millisecond may be held or not.
  - What every subscription had settled at that moment may be held or not.
  - What is produced, taken, sealed, merged, acknowledged or moved after that moment is not looked at.
  - While the index is built again, and in a topic with the memory tracker, the image names nothing: there is
    nothing to compare, and the counts say so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from broker.delayed.bucket_values import BucketImage
from broker.delayed.check import CursorView, Finding, IndexState, Kind, LedgerCounts
from broker.errors import Corrupt
from broker.folder.index_check import CheckResult, CheckSteps, IndexFilesCheck, LedgerSource
from broker.model import Int64Column
from broker.storage.amendments import NONE
from broker.storage.bucket_files import BucketStorage
from broker.storage.ledger import Ledger
from broker.topics.refusals import topic_not_found
from broker.topics.topic import Topic

T = TypeVar("T")

ENTRIES_MAX = 2_000_000
"""Index entries that one pass keeps in memory, about: 12 bytes each."""

_READ_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class TopicCheck:
    """Result of a check: counts and findings."""

    buckets: int
    ledgers: int
    counts: LedgerCounts
    findings: list[Finding]


class LiveCheck:
    """Checks topics, one at a time: each has its memory and its share of the index thread."""

    def __init__(self, storage_of: Callable[[int], BucketStorage], executor: Executor) -> None:
        self._storage_of = storage_of
        self._executor = executor
        self._lock = asyncio.Lock()

    async def run(self, topic: Topic) -> TopicCheck:
        """Check a topic. Raises NotFound if it is deleted meanwhile, Unavailable and OSError of the disk."""
        async with self._lock:
            if topic.deleted:
                raise topic_not_found(topic.name)
            with _keep_files(topic) as image:  # no await up to the end of the capture
                ledgers = {ledger.name.ledger_id: _Rows(ledger, ledger.entry_count) for ledger in topic.log}
                check = IndexFilesCheck(
                    self._storage_of(topic.topic_id).open_reader,
                    IndexState(
                        image.indexed_through,
                        image.index_lsn,
                        image.frontier_ms,
                        frozenset(topic.ledgers.gone),
                    ),
                    [
                        LedgerSource(key, rows.count, rows.times, topic.log.amendments.get(key, NONE))
                        for key, rows in ledgers.items()
                    ],
                    [
                        CursorView(
                            subscription.cursor.mark,
                            {key: s.copy() for key, s in subscription.cursor.settled.items()},
                        )
                        for subscription in topic.subscriptions.values()
                    ],
                )
                findings, counts = await self._finish(
                    topic, check.steps(image.bucket_ids, ENTRIES_MAX), ledgers
                )
            findings += [
                Finding(Kind.of(rows.error), rows.error.message, ledger_id=key)
                for key, rows in ledgers.items()
                if rows.error is not None
            ]
            return TopicCheck(len(image.bucket_ids), len(ledgers), counts, findings)

    async def _finish(self, topic: Topic, steps: CheckSteps, ledgers: dict[int, _Rows]) -> CheckResult:
        while True:
            wanted = await self._in_thread(lambda: _next_step(steps))
            if topic.deleted:
                raise topic_not_found(topic.name)
            if isinstance(wanted, tuple):
                return wanted
            if wanted is not None:
                await ledgers[wanted].read()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """One step. Whoever cancels waits for it: files that are still read must not go."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


class _Rows:
    """The rows of a ledger up to the length that it had: read on the loop's behalf, handed over once."""

    def __init__(self, ledger: Ledger, count: int) -> None:
        self.count = count
        self._ledger = ledger
        self._times: Int64Column | None = None
        self.error: Corrupt | None = None

    async def read(self) -> None:
        times = np.zeros(self.count, dtype=np.int64)
        try:
            for first in range(0, self.count, _READ_ROWS):
                count = min(_READ_ROWS, self.count - first)
                times[first : first + count] = await self._ledger.read_times(first, count)
        except Corrupt as error:
            self.error = error
        self._times = times

    def times(self) -> Int64Column:
        times, self._times = self._times, None
        if self.error is not None:
            raise self.error
        assert times is not None, "read before it was asked for"
        return times


def _next_step(steps: CheckSteps) -> int | CheckResult | None:
    try:
        return next(steps)
    except StopIteration as end:
        result: CheckResult = end.value
        return result


@contextlib.contextmanager
def _keep_files(topic: Topic) -> Iterator[BucketImage]:
    upkeep = topic.index.upkeep
    with topic.log.keep_files():
        if upkeep is None:
            yield topic.index_image()
        else:
            with upkeep.keep_files() as image:
                yield image
