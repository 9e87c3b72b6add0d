"""Runs of schedule keys in use: which files there are, and looks into them.

Shared by those of a topic that hold their keys (`schedule_keys`) and those that are settled (`settled_keys`): one
folder, one row of ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from broker.delayed.key_cache import KeyCache
from broker.errors import PostdateError
from broker.model import UInt64Column
from broker.runs.upkeep import RunFiles
from broker.storage.key_filter import KeyFilter, Probe
from broker.storage.key_run import NO_KEYS, Fences, KeyColumns, KeyRunHeader, join_keys
from broker.storage.key_run_files import KeyRunReader

_FIND_BLOCKS = 64  # read in one call of a thread, so that others have their turn
_FEW_WARM = 4
"""Up to so many blocks are read on the loop where they are in memory: a hop to a thread and back costs more."""
_RUN_BYTES = 600  # of a run's own objects, about


class KeyRun:
    """A run in use."""

    def __init__(self, header: KeyRunHeader) -> None:
        self.header = header
        self.run_id = header.run_id
        self.is_merging = False
        self.is_gone = False
        self.unfiltered_bytes = 0  # of the blocks that were read for want of the filter

    @property
    def block_bytes(self) -> int:
        """Of one block on average."""
        return self.header.filter_at // self.header.block_count


class KeyRuns:
    """Looks into one topic's runs, by way of what is cached of them."""

    def __init__(self, files: RunFiles[KeyRunReader], cache: KeyCache) -> None:
        self.files = files
        self.storage = files.storage
        self.cache = cache
        self.topic_id = files.storage.topic_id
        self.block_reads = 0
        self._is_closed = False

    def delete(self, run: KeyRun) -> None:
        run.is_gone = True
        self.cache.drop(self.topic_id, run.run_id)
        self.files.delete([run.run_id])

    def close(self) -> None:
        """The topic is not served any more."""
        self._is_closed = True
        self.cache.close_topic(self.topic_id)

    def memory_bytes(self, runs: Sequence[KeyRun]) -> int:
        cached = sum(self.cache.bytes_of(self.topic_id, run.run_id) for run in runs)
        return cached + _RUN_BYTES * len(runs)

    async def look(self, run: KeyRun, wanted: Probe) -> KeyColumns:
        """The entries of one run with some rising hashes; none if the run went meanwhile."""
        try:
            hashes = await self._passing(run, wanted)
            if not len(hashes):
                return NO_KEYS
            fences = await self._fences_of(run)
            blocks = fences.blocks_of(hashes)
            self.block_reads += len(blocks)
            parts = [blocks[at : at + _FIND_BLOCKS] for at in range(0, len(blocks), _FIND_BLOCKS)]
            columns = [await self._find(run, fences, part, hashes) for part in parts]
            return join_keys([NO_KEYS, *columns])
        except (OSError, PostdateError):
            if run.is_gone:  # its file was removed; what took its place is looked at next
                return NO_KEYS
            raise

    async def look_all(
        self,
        runs: Callable[[], Sequence[KeyRun]],
        wanted: Probe,
        look: Callable[[KeyRun, Probe], Awaitable[KeyColumns]],
    ) -> list[tuple[KeyRun, KeyColumns]]:
        """Look rising hashes up in all runs: when it returns, every run that exists has been asked."""
        answers: list[tuple[KeyRun, KeyColumns]] = []
        looked: set[int] = set()
        while missing := [run for run in runs() if run.run_id not in looked]:
            for run in missing:
                looked.add(run.run_id)
                answers.append((run, await look(run, wanted)))
        return answers

    async def _find(
        self, run: KeyRun, fences: Fences, blocks: Sequence[int], hashes: UInt64Column
    ) -> KeyColumns:
        if len(blocks) <= _FEW_WARM:
            reader = await self._reader_of(run)
            if reader is not None:
                found = reader.find_nowait(run.header, fences, blocks, hashes)
                if found is not None:
                    return found
        return await self.storage.read(
            run.run_id, lambda reader: reader.find(run.header, fences, blocks, hashes)
        )

    async def _reader_of(self, run: KeyRun) -> KeyRunReader | None:
        """Return the open file of a run; None if it is of no use any more."""
        if (reader := self.cache.reader_of(self.topic_id, run.run_id)) is not None:
            return reader
        opening = asyncio.ensure_future(self.storage.open(run.run_id))
        # Also if whoever waits is cancelled: nobody else would close it.
        opening.add_done_callback(partial(self._opened, run))
        await asyncio.shield(opening)
        return self.cache.reader_of(self.topic_id, run.run_id)

    def _opened(self, run: KeyRun, opening: asyncio.Future[KeyRunReader]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            return
        if run.is_gone or self._is_closed:
            opening.result().close()
        else:
            self.cache.put_reader(self.topic_id, run.run_id, opening.result())

    async def _passing(self, run: KeyRun, wanted: Probe) -> UInt64Column:
        """The hashes that may be in a run."""
        key_filter = self.cache.filter_of(self.topic_id, run.run_id)
        if key_filter is None:
            # It is read again once the blocks read for want of it weigh as much as it does: more filters than the
            # cache can hold then cost at most twice what they must.
            run.unfiltered_bytes += len(wanted.hashes) * run.block_bytes
            filter_bytes = run.header.filter_bytes
            if run.unfiltered_bytes < filter_bytes or not self.cache.takes(filter_bytes):
                return wanted.hashes
            run.unfiltered_bytes = 0
            key_filter = await self.storage.read(run.run_id, lambda reader: reader.read_filter(run.header))
            self.keep(run, key_filter)
        return wanted.hashes[key_filter.maybe(wanted)]

    async def _fences_of(self, run: KeyRun) -> Fences:
        fences = self.cache.fences_of(self.topic_id, run.run_id)
        if fences is None:
            fences = await self.storage.read(run.run_id, lambda reader: reader.read_fences(run.header))
            self.keep(run, fences)
        return fences

    def keep(self, run: KeyRun, part: KeyFilter | Fences) -> None:
        if not run.is_gone:
            self.cache.put(self.topic_id, run.run_id, part)
