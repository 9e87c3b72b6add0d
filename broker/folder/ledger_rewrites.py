"""Each node of a cluster rewrites its own ledgers, once a record has left entries of them out.

    LedgersCompacted     the entries count as cancelled, on every node, by the same record
    (later, by itself)   a node writes a generation without them, and swaps it in; its next manifest names it

Until then the old files are read: they have all that is there, and amendments hide the rest. So a record names no
files, and generations of nodes differ, as their buckets do. What is left to do follows from the amendments and the
files alone, so a crash forgets nothing: files have something that was left out, or half of what they have was
cancelled. Files of a rewrite that a crash cut short are named by nobody, and recovery removes them.

Invariants:
  REWRITE-1  Only entries go that are cancelled for good (AMENDMENT-2), and none that a record that comes meanwhile
      could want back.
  REWRITE-2  No commit of a compaction moves files meanwhile, so that no name is taken twice.
  REWRITE-3  A row with a schedule key goes once a durable manifest names what is remembered of it.
  REWRITE-4  A rewrite leaves half of `disk_reserve_bytes` free, for acknowledgements, or waits. It may take the other
      half, as it frees more than it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from pyroaring import BitMap

from broker.errors import PostdateError
from broker.folder.tree_copy import check_room
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.steps import run_step
from broker.runtime.supervise import YieldBudget
from broker.runtime.vfs import Vfs
from broker.storage.amendments import Amendments
from broker.storage.blocks import LedgerCapture, LedgerName, file_lengths
from broker.storage.layout import Layout
from broker.storage.ledger import Ledger
from broker.storage.ledger_files import open_checked
from broker.storage.sparse_files import read_present
from broker.storage.sparse_writer import open_source, remove_generation, write_generation
from broker.topics.registry import Registry
from broker.topics.topic import Topic

log = get_logger(__name__)

_LOOK_SECONDS = 10.0
_RETRY_SECONDS = 60.0


class LedgerRewrites:
    """See the module's description."""

    def __init__(
        self,
        registry: Registry,
        layout: Layout,
        vfs: Vfs,
        clock: Clock,
        *,
        moving: asyncio.Lock,
        reserve_bytes: int,
        index_executor: Executor,
        changed: Callable[[Topic], None],
        checkpoint: Callable[[], Awaitable[None]],
    ) -> None:
        """`moving` is held by who moves files of generations."""
        self._registry = registry
        self._layout = layout
        self._vfs = vfs
        self._moving = moving
        self._reserve_bytes = reserve_bytes
        self._index_executor = index_executor
        self._changed = changed
        self._checkpoint = checkpoint
        self._clock = clock
        self._budget = YieldBudget(clock)
        self._failed_ns: dict[int, int] = {}
        """Ledgers that could not be rewritten, and when that was tried."""
        self._whole: dict[int, tuple[int, int]] = {}
        """Ledgers whose files have nothing that was left out: their generation, and how much that was."""

    async def run(self) -> None:
        """Rewrite what is to be rewritten, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._look()

    async def _look(self) -> None:
        whole, self._whole = self._whole, {}
        oldest_ns = self._clock.monotonic_ns() - int(_RETRY_SECONDS * 1e9)
        self._failed_ns = {
            ledger_id: at_ns for ledger_id, at_ns in self._failed_ns.items() if at_ns > oldest_ns
        }
        for topic in list(self._registry.topics.values()):
            for ledger_id, amendments in list(topic.log.amendments.items()):
                await self._budget.spent()
                ledger = topic.log.find(ledger_id)
                if ledger is None or ledger_id in self._failed_ns:
                    continue
                there_count, gone_count = _counts(ledger, amendments)
                if not gone_count or (not amendments.left_out and 2 * gone_count < there_count):
                    continue
                state = ledger.name.generation, len(amendments.left_out)
                is_known = whole.get(ledger_id) == state and 2 * gone_count < there_count
                if is_known or await self._attempt(topic, ledger):
                    self._whole[ledger_id] = state

    async def _attempt(self, topic: Topic, ledger: Ledger) -> bool:
        """Rewrite a ledger if that is worth it; returns whether it is not."""
        try:
            async with self._moving:  # REWRITE-2
                return await self._rewrite(topic, ledger)
        except (OSError, PostdateError) as error:
            self._failed_ns[ledger.name.ledger_id] = self._clock.monotonic_ns()
            log.warning(
                "A ledger could not be rewritten; its old files stay in use; retrying",
                topic=topic.name,
                ledger_id=ledger.name.ledger_id,
                error=str(error),
            )
            return False

    async def _rewrite(self, topic: Topic, ledger: Ledger) -> bool:
        ledger_id = ledger.name.ledger_id
        amendments = self._amendments(topic, ledger)
        if amendments is None:
            return False
        capture = ledger.capture()
        there = await run_step(self._index_executor, lambda: self._read_there(topic, capture))
        gone = there & amendments.cancelled
        if there.isdisjoint(amendments.left_out) and 2 * len(gone) < len(there):
            return True
        if not await self._remember_keys(topic, ledger_id):
            return False
        if self._amendments(topic, ledger) is None:
            return False
        # What was cancelled before the keys were remembered; what came since is for another time.
        present = there - gone
        written = await self._write(topic, capture, amendments, present)
        if self._amendments(topic, ledger) is None:
            await run_step(self._index_executor, lambda: self._remove(topic, written))
            return False
        topic.ledgers.put_generation(written)
        self._changed(topic)
        log.info(
            "A ledger was rewritten",
            topic=topic.name,
            ledger_id=ledger_id,
            entries=len(present),
            left_out=len(there) - len(present),
        )
        return False

    def _amendments(self, topic: Topic, ledger: Ledger) -> Amendments | None:
        """Return the amendments of a ledger that may be rewritten now; None: it may not, or is another one."""
        ledger_id = ledger.name.ledger_id
        index = topic.index
        is_passed = not index.is_rebuilding and index.position >= (ledger_id, ledger.entry_count)
        if topic.deleted or topic.log.find(ledger_id) is not ledger or not ledger.is_whole or not is_passed:
            return None
        return topic.log.amendments.get(ledger_id)

    def _read_there(self, topic: Topic, capture: LedgerCapture) -> BitMap:
        """Return which entries the files have. Blocks."""
        if capture.sparse is None:
            return BitMap(range(capture.entry_count))
        name = capture.name(self._layout.ledgers(topic.topic_id))
        with contextlib.closing(open_checked(self._vfs, name, "times")) as file:
            return read_present(file, capture)

    async def _remember_keys(self, topic: Topic, ledger_id: int) -> bool:
        version = await topic.keys.remember(ledger_id)
        if version is None:
            return False
        if not topic.keys.is_remembered(version):
            await self._checkpoint()  # REWRITE-3
        return topic.keys.is_remembered(version)

    async def _write(
        self, topic: Topic, capture: LedgerCapture, amendments: Amendments, present: BitMap
    ) -> LedgerCapture:
        """Write a generation. Cancelled, it leaves files that the next start removes."""
        folder = self._layout.ledgers(topic.topic_id)
        target = LedgerName(folder, topic.topic_id, capture.ledger_id, capture.generation + 1, sparse=True)

        def write() -> LedgerCapture:
            # No more than there is now, whatever goes.
            check_room(self._vfs, folder, sum(file_lengths(capture).values()), self._reserve_bytes // 2)
            try:
                with open_source(self._vfs, folder, capture, amendments) as source:
                    return write_generation(self._vfs, source, present, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    remove_generation(self._vfs, target)
                raise

        return await run_step(self._index_executor, write)

    def _remove(self, topic: Topic, written: LedgerCapture) -> None:
        with contextlib.suppress(OSError):
            remove_generation(self._vfs, written.name(self._layout.ledgers(topic.topic_id)))


def _counts(ledger: Ledger, amendments: Amendments) -> tuple[int, int]:
    """Return how many entries the files have, and how many of these are cancelled: files lack nothing else."""
    there_count = ledger.entry_count if ledger.sparse is None else ledger.sparse.present_count
    return there_count, len(amendments.cancelled) - (ledger.entry_count - there_count)
