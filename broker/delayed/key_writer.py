"""Seals and merges of schedule keys: the work in a thread, in steps.

A seal writes a run of what was in memory; a merge writes one run of several, whose blocks it reads as it goes. Both
make one sorted stream and leave out what waits no longer, as the caller says: that is handed to those who remember
settled keys (`settled_keys`), whose own runs are written and merged here as well. A step works on a few thousand
entries; between steps the thread is free for others. Memory is bounded by the rows of a seal, or by some blocks of each
source, and 16 bytes for each 1,024 entries of the new run.

Invariants:
  KEYWRITER-1  An entry is left out only if the caller said that it does not hold its key, or if it is there twice; of
      settled ones also if a younger one has its hash.
  KEYWRITER-2  Entries are in order, each once.
  KEYWRITER-3  A run that is handed back was read back whole: it holds count and checksum of what it was given.
  KEYWRITER-4  Nobody has been told of the file yet: a writer that fails leaves nothing, or a file for the owner to
      remove.
  KEYWRITER-5  One thread at a time works on a seal or merge, also when it is cancelled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from enum import IntEnum
from functools import partial
from typing import TypeVar

import numpy as np

from broker.model import Array, UInt32Column
from broker.runs.merging import MergeRuns
from broker.runtime.steps import run_step
from broker.storage.key_run import (
    NO_KEYS,
    Fences,
    KeyColumns,
    KeyRunHeader,
    KeyRunKind,
    Stamp,
    join_keys,
    newest_of_each,
    sort_keys,
)
from broker.storage.key_run_files import KeyRunReader, KeyRunWriter, KeyStorage, create_key_run


class Standing(IntEnum):
    """State of an entry that was stored with a key."""

    UNKNOWN = 0  # its ledger is gone, or a compaction left it out
    HOLDS = 1  # its key
    DELIVERED = 2  # its time has come
    CANCELLED = 3


REMEMBERED = ((Standing.DELIVERED, KeyRunKind.DELIVERED), (Standing.CANCELLED, KeyRunKind.CANCELLED))

Standings = Callable[[int, UInt32Column], Awaitable[Array]]
"""ledger_id and rising entry ids -> the `Standing` of each."""

Note = Callable[[KeyRunKind, KeyColumns], Awaitable[None]]
"""Takes settled entries that a seal or merge leaves out."""

STEP_BLOCKS = 8  # of each source at a time

_STEP_ENTRIES = 16_384
_OF_HOLDERS = Stamp()

T = TypeVar("T")


class KeyWriter:
    """Writes new runs; the owner decides what, and puts them to use."""

    def __init__(
        self,
        storage: KeyStorage,
        executor: Executor | None,
        standings: Standings | None = None,
        note: Note | None = None,
    ) -> None:
        """Without `standings` all entries are settled: each is kept, but for those with a younger one of their hash."""
        self._storage = storage
        self._executor = executor
        self._standings = standings
        self._note = note

    async def seal(self, run_id: int, rows: KeyColumns, stamp: Stamp = _OF_HOLDERS) -> KeyRunHeader | None:
        """Write a run of rows in any order; None if none of them is kept. Raises OSError, PostdateError."""
        keys = await self._in_thread(lambda: sort_keys(rows))
        parts = [keys.part(slice(at, at + _STEP_ENTRIES)) for at in range(0, len(keys), _STEP_ENTRIES)]
        work = _Work(self._storage, run_id, stamp)
        try:
            for part in parts:
                await self._append(work, part)
            return await self._finished(work)
        finally:
            await self._in_thread(work.close)

    async def merge(
        self, run_id: int, sources: Sequence[KeyRunHeader], stamp: Stamp = _OF_HOLDERS
    ) -> KeyRunHeader | None:
        """Write one run of several; None if no entry is kept. Raises OSError, PostdateError."""
        work = _Work(self._storage, run_id, stamp)
        merge = _KeyMerge(self._storage, sources)
        try:
            await self._in_thread(merge.open)
            while not merge.is_done:
                await self._append(work, await self._in_thread(merge.step))
            return await self._finished(work)
        finally:
            await self._in_thread(partial(_close_both, merge, work))

    async def _append(self, work: _Work, keys: KeyColumns) -> None:
        """Write those of some sorted entries that are kept (KEYWRITER-1)."""
        if self._standings is None:
            await self._in_thread(lambda: work.append(newest_of_each(keys)))
            return
        question = await self._in_thread(partial(_Question, keys))
        answers = [await self._standings(ledger_id, ids) for ledger_id, ids in question.ledgers]
        await self._in_thread(lambda: work.append(question.of(answers, Standing.HOLDS)))
        if self._note is None:
            return
        for standing, kind in REMEMBERED:
            settled = await self._in_thread(
                partial(lambda standing: newest_of_each(question.of(answers, standing)), standing)
            )
            await self._note(kind, settled)

    async def _finished(self, work: _Work) -> KeyRunHeader | None:
        if work.is_empty:
            return None
        while await self._in_thread(work.check):
            pass
        return await self._in_thread(work.finish)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await run_step(self._executor, work)  # KEYWRITER-5


class _Question:
    """Some entries, and what to ask about them: rising entry ids by ledger."""

    def __init__(self, keys: KeyColumns) -> None:
        self._keys = keys
        self._order = _by_position(keys)
        ledger_ids, entry_ids = keys.ledger_ids[self._order], keys.entry_ids[self._order]
        starts = np.flatnonzero(ledger_ids[1:] != ledger_ids[:-1]) + 1
        ids = ledger_ids[np.concatenate(([0], starts))].tolist()
        self.ledgers: list[tuple[int, UInt32Column]] = list(
            zip(ids, np.split(entry_ids, starts), strict=True)
        )

    def of(self, answers: Sequence[Array], standing: Standing) -> KeyColumns:
        """The entries of one standing; an answer for each ledger."""
        is_so = np.empty(len(self._keys), dtype=np.bool_)
        is_so[self._order] = np.concatenate(answers) == standing
        return self._keys if is_so.all() else self._keys.part(is_so)


class _Work:
    """A run in the making, whose file is made with its first entry. Every method blocks."""

    def __init__(self, storage: KeyStorage, run_id: int, stamp: Stamp) -> None:
        self._storage = storage
        self._run_id = run_id
        self._stamp = stamp
        self._writer: KeyRunWriter | None = None

    @property
    def is_empty(self) -> bool:
        return self._writer is None

    def append(self, keys: KeyColumns) -> None:
        if not len(keys):
            return
        if self._writer is None:
            self._writer = create_key_run(self._storage, self._run_id, self._stamp)
        self._writer.append(keys)

    def check(self) -> bool:
        assert self._writer is not None
        return self._writer.check()

    def finish(self) -> KeyRunHeader:
        assert self._writer is not None
        return self._writer.finish()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.abort()  # nothing after `finish`


class _KeyMerge:
    """The entries of several runs as one sorted stream. Every method blocks."""

    def __init__(self, storage: KeyStorage, sources: Sequence[KeyRunHeader]) -> None:
        self._storage = storage
        self._headers = sources
        self._open = contextlib.ExitStack()
        self._readers: list[KeyRunReader] = []
        self._fences: list[Fences] = []
        self._next = [0] * len(sources)  # block
        self._runs = MergeRuns(len(sources), NO_KEYS)

    @property
    def is_done(self) -> bool:
        return self._runs.is_done

    def open(self) -> None:
        for header in self._headers:
            reader = self._storage.open_reader(header.run_id)
            self._readers.append(self._open.enter_context(contextlib.closing(reader)))
            self._fences.append(reader.read_fences(header))

    def step(self) -> KeyColumns:
        """The entries that follow."""
        for run in self._runs.wanted():
            first, count = self._next[run], len(self._fences[run])
            end = self._next[run] = min(first + STEP_BLOCKS, count)
            keys = self._readers[run].read_blocks(self._headers[run], self._fences[run], first, end)
            self._runs.feed(run, keys, is_last=end == count)
        return sort_keys(join_keys(self._runs.step()))

    def close(self) -> None:
        self._open.close()


def _by_position(keys: KeyColumns) -> Array:
    """The rows in the order of their positions."""
    offsets = keys.ledger_ids - keys.ledger_ids.min()
    if int(offsets.max()) < 1 << 31:
        # Both in one number: sorting numbers is five times faster than sorting rows of them.
        return np.argsort((offsets << 32) | keys.entry_ids)
    return np.lexsort((keys.entry_ids, keys.ledger_ids))


def _close_both(merge: _KeyMerge, work: _Work) -> None:
    merge.close()
    work.close()
