"""Packs the rows of ledgers that take no more entries, of every topic, a while after they are whole.

    Ledger.persist       a ledger is whole: sealed, and on disk with its footers
    (later, by itself)   its rows are packed into a file beside it, which is synced, and takes the place of `rows` here
    the next checkpoint  its manifest names the packed file; once that is durable, the file of rows goes

Until a manifest names the packed file, nobody needs it after a crash: recovery removes it, and it is made again. From
then on nobody needs the other one. Nothing of it is in the journal: nodes of a cluster pack by themselves.

Invariants:
  LEDGERPACK-1  The file that a durable manifest names is there, whole, until another manifest is durable.
  LEDGERPACK-2  A ledger that goes while it is packed, or gets another generation, leaves no file.
  LEDGERPACK-3  Packing leaves all of `disk_reserve_bytes` free, or waits: produce is never refused for it. It
      begins with no ledger of a topic whose files are kept, as its rows would stay beside what they were packed into.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from broker.errors import LimitReached, PostdateError
from broker.folder.tree_copy import check_room
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.steps import run_step
from broker.runtime.supervise import YieldBudget
from broker.runtime.vfs import Vfs
from broker.storage.blocks import LedgerCapture, file_lengths
from broker.storage.layout import Layout
from broker.storage.ledger import Ledger
from broker.storage.packed_writer import Packing, pack_rows
from broker.topics.registry import Registry
from broker.topics.topic import Topic

log = get_logger(__name__)

_LOOK_SECONDS = 15.0
_RETRY_SECONDS = 600.0


class LedgerPacking:
    """See the module's description."""

    def __init__(
        self,
        registry: Registry,
        layout: Layout,
        vfs: Vfs,
        clock: Clock,
        *,
        moving: asyncio.Lock,
        rows_min: int,
        reserve_bytes: int,
        index_executor: Executor,
        changed: Callable[[Topic], None],
    ) -> None:
        """`moving` is held by who moves files of generations; of fewer rows than `rows_min` nothing is gained."""
        self._registry = registry
        self._layout = layout
        self._vfs = vfs
        self._clock = clock
        self._moving = moving
        self._rows_min = rows_min
        self._reserve_bytes = reserve_bytes
        self._index_executor = index_executor
        self._changed = changed
        self._budget = YieldBudget(clock)
        self._failed_ns: dict[int, int] = {}
        """Ledgers that could not be packed, and when that was tried."""

    async def run(self) -> None:
        """Pack what is to be packed, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._look()
            except LimitReached as error:  # and so it would be for each of what may be very many ledgers
                log.warning(
                    "Rows are not packed because too little of the disk is free; retrying", error=str(error)
                )
                await asyncio.sleep(_RETRY_SECONDS)

    async def _look(self) -> None:
        oldest_ns = self._clock.monotonic_ns() - int(_RETRY_SECONDS * 1e9)
        self._failed_ns = {
            ledger_id: at_ns for ledger_id, at_ns in self._failed_ns.items() if at_ns > oldest_ns
        }
        for topic in list(self._registry.topics.values()):
            for ledger in list(topic.log):
                await self._budget.spent()
                if ledger.name.ledger_id not in self._failed_ns and self._is_wanted(topic, ledger):
                    await self._attempt(topic, ledger)

    def _is_wanted(self, topic: Topic, ledger: Ledger) -> bool:
        """Return whether a ledger is there, and may be packed now."""
        is_there = not topic.deleted and topic.log.find(ledger.name.ledger_id) is ledger
        return is_there and ledger.is_whole and not ledger.packed_bytes and ledger.row_count >= self._rows_min

    async def _attempt(self, topic: Topic, ledger: Ledger) -> None:
        try:
            async with self._moving:  # LEDGERPACK-2
                # Where a lease or a long list keeps files, rows would lie there twice until it ends.
                if self._is_wanted(topic, ledger) and not topic.log.keeps_files:
                    await self._pack(topic, ledger)
        except LimitReached:
            raise
        except (OSError, PostdateError) as error:
            self._failed_ns[ledger.name.ledger_id] = self._clock.monotonic_ns()
            log.warning(
                "The rows of a ledger could not be packed; they stay as they are; retrying",
                topic=topic.name,
                ledger_id=ledger.name.ledger_id,
                error=str(error),
            )

    async def _pack(self, topic: Topic, ledger: Ledger) -> None:
        capture, folder = ledger.capture(), self._layout.ledgers(topic.topic_id)
        check_room(self._vfs, folder, file_lengths(capture)["rows"], self._reserve_bytes)
        steps = pack_rows(self._vfs, folder, capture)
        packed: LedgerCapture | None = None
        is_wanted = True
        try:
            while is_wanted and packed is None:
                packed = await run_step(self._index_executor, partial(_advance, steps))
                is_wanted = self._is_wanted(topic, ledger)
            if packed is not None and is_wanted:
                topic.ledgers.put_packed(packed)
                self._changed(topic)
        finally:
            if packed is None or not is_wanted:
                path = capture.name(folder)._replace(packed=True).path("rows")
                await run_step(self._index_executor, partial(self._give_up, steps, path))

    def _give_up(self, steps: Packing, path: str) -> None:
        steps.close()
        with contextlib.suppress(OSError):
            self._vfs.remove(path)


def _advance(steps: Packing) -> LedgerCapture | None:
    """Take one step; returns what has come of the last one."""
    try:
        next(steps)
    except StopIteration as end:
        packed: LedgerCapture = end.value
        return packed
    return None
