"""Folders into which compaction jobs write, one a lease, below the data directory; and the way out of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from broker.errors import PostdateError
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.steps import run_step
from broker.runtime.vfs import Vfs, replace_file
from broker.storage.blocks import LedgerCapture
from broker.storage.compacted import CompactedLedger
from broker.storage.compaction_inputs import INPUTS_FILE, CompactionInputs, encode_inputs
from broker.storage.layout import Layout, remove_tree
from broker.storage.sparse_writer import remove_generation

log = get_logger(__name__)

T = TypeVar("T")


class Staging:
    """See the module's description. What blocks, does so in the file thread."""

    def __init__(
        self, layout: Layout, vfs: Vfs, clock: Clock, executor: Executor, *, cleanup_ms: int
    ) -> None:
        """`cleanup_ms`: a folder is looked after so long after its lease, for a job that still writes."""
        self._layout = layout
        self._vfs = vfs
        self._clock = clock
        self._executor = executor
        self._cleanup_ms = cleanup_ms
        self._orphaned: dict[str, int] = {}  # folders of leases that ended, and when

    def path(self, folder: str) -> str:
        return f"{self._layout.root}/{folder}"

    @property
    def has_orphans(self) -> bool:
        """Return whether there are folders of leases that have ended."""
        return bool(self._orphaned)

    async def make(self, folder: str, inputs: CompactionInputs) -> None:
        """Make a folder with the inputs for its job; raises OSError."""

        def make() -> None:
            self._vfs.make_dir(self._layout.staging)
            self._vfs.make_dir(self.path(folder))
            replace_file(self._vfs, f"{self.path(folder)}/{INPUTS_FILE}", [encode_inputs(inputs)])

        await self._in_file_thread(make)

    async def move(self, folder: str, into: str, names: Sequence[str]) -> None:
        """Move what a job wrote to its final names; raises OSError."""

        def move() -> None:
            for name in names:
                path = f"{self.path(folder)}/{name}"
                # The job has synced it; but it is the broker's word from here on.
                with contextlib.closing(self._vfs.open(path)) as file:
                    file.sync()
                self._vfs.rename(path, f"{into}/{name}")
            self._vfs.sync_dir(into)

        await self._in_file_thread(move)

    async def remove_moved(self, topic_id: int, ledgers: Sequence[CompactedLedger]) -> None:
        """Remove what was moved, and did not take its ledger's place."""
        for ledger in ledgers:
            capture = LedgerCapture(
                topic_id, ledger.ledger_id, ledger.generation, 0, 0, True, sparse=ledger.sizes
            )
            name = capture.name(self._layout.ledgers(topic_id))
            await self._in_file_thread(partial(remove_generation, self._vfs, name))

    def orphan(self, folder: str) -> None:
        """The lease of a folder has ended."""
        self._orphaned[folder] = self._clock.monotonic_ns() // 1_000_000

    async def remove(self, folder: str) -> None:
        """Remove what a job left; a job that still writes is met by `remove_old` once more."""
        path = self.path(folder)

        def remove() -> None:
            if self._vfs.exists(path):
                remove_tree(self._vfs, path)

        try:
            await self._in_file_thread(remove)
        except (OSError, PostdateError) as error:
            log.warning("A compaction's folder could not be removed", folder=folder, error=str(error))
        else:
            self._orphaned.pop(folder, None)

    async def remove_old(self) -> None:
        """Remove what is left of leases that ended some time ago."""
        now_ms = self._clock.monotonic_ns() // 1_000_000
        for folder, since_ms in list(self._orphaned.items()):
            if now_ms - since_ms >= self._cleanup_ms:
                await self.remove(folder)

    async def _in_file_thread(self, work: Callable[[], T]) -> T:
        return await run_step(self._executor, work)
