"""Runs coming and going: their ids, the seals and merges under way, and the files that no manifest names any more.

Whoever has runs keeps them himself, in the order he needs; a seal or merge is an `attempt` that takes an id, writes,
and puts what it wrote to use in one step. Belongs to the event loop.

Invariants:
  UPKEEP-1  An id is given once. Its file is in use, or in `deleted_ids`, once the attempt that took it has ended,
            however it ended.
  UPKEEP-2  A file is removed only after a manifest is durable that does not name it: its id is handed out with the
            image that leaves it out, and comes back through `remove_deleted`.
  UPKEEP-3  There is at most one seal and one merge under way; after a failure the next waits, longer each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from broker.errors import PostdateError
from broker.observe.logs import get_logger
from broker.runs.storage import Reader, RunStorage

log = get_logger(__name__)

_RETRY_MS = (1_000, 60_000)


@dataclass(frozen=True, slots=True)
class RunCounters:
    """Seals and merges since the start; only ever rises."""

    seals: int = 0
    merges: int = 0
    seal_failures: int = 0
    merge_failures: int = 0
    sealed_entries: int = 0
    merged_entries: int = 0


class RunFiles(Generic[Reader]):
    """The files of one folder: gives ids, and removes what no manifest names any more."""

    def __init__(self, storage: RunStorage[Reader], next_id: int = 1) -> None:
        self.storage = storage
        self.next_id = next_id
        self.deleted_ids: list[int] = []

    def restore(self, run_ids: Sequence[int], next_id: int) -> None:
        """Take up what a manifest says."""
        self.next_id = max(next_id, *(run_id + 1 for run_id in run_ids), 1)

    def take_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def delete(self, run_ids: Sequence[int]) -> None:
        """Runs are out of use: the next image does not name them."""
        self.deleted_ids += [run_id for run_id in run_ids if run_id not in self.deleted_ids]

    async def remove_deleted(self, run_ids: Sequence[int]) -> None:
        """Remove files that a durable manifest did not name (UPKEEP-2).

        One that cannot be removed is tried again with the next manifest.
        """
        for run_id in run_ids:
            try:
                await self.storage.delete(run_id)
            except (OSError, PostdateError) as error:
                path = self.storage.path(run_id)
                log.warning("An unused file could not be removed", path=path, error=str(error))
            else:
                self.deleted_ids = [other for other in self.deleted_ids if other != run_id]


class Retry:
    """Time of the next attempt after failures, by a clock that may step."""

    def __init__(self) -> None:
        self._failures = 0
        self._at_ms: int | None = None

    def failed(self) -> None:
        self._failures += 1
        self._at_ms = None  # counted from the next look: runs have no clock

    def succeeded(self) -> None:
        self._failures = 0

    def is_ready(self, now_ms: int) -> bool:
        if not self._failures:
            return True
        pause_ms = min(_RETRY_MS[0] << min(self._failures - 1, 10), _RETRY_MS[1])
        if self._at_ms is None or self._at_ms > now_ms + pause_ms:
            self._at_ms = now_ms + pause_ms
        return now_ms >= self._at_ms


@dataclass(slots=True)
class Attempt:
    """A seal or merge under way."""

    run_id: int
    is_used: bool = False
    """True once its file is in use."""
    has_failed: bool = False


class RunWork:
    """The seals, or the merges, of some runs (UPKEEP-3)."""

    def __init__(self, files: RunFiles[Reader], failure: str, retry: Retry | None = None) -> None:
        """`failure`: the sentence that is logged of one."""
        self.done = 0
        self.failures = 0
        self.entries = 0
        self.is_running = False
        self._files = files
        self._failure = failure
        self._retry = retry or Retry()

    def is_ready(self, now_ms: int) -> bool:
        return not self.is_running and self._retry.is_ready(now_ms)

    @contextlib.contextmanager
    def attempt(self, run_id: int | None = None) -> Iterator[Attempt]:
        """Write a run, under a new id unless it has one. A disk that fails ends it without an exception."""
        attempt = Attempt(self._files.take_id() if run_id is None else run_id)
        self.is_running = True
        try:
            yield attempt
        except (OSError, PostdateError) as error:
            attempt.has_failed = True
            self.failures += 1
            self._retry.failed()
            log.error(self._failure, path=self._files.storage.path(attempt.run_id), error=str(error))
        finally:
            self.is_running = False
            if not attempt.is_used:
                self._files.delete([attempt.run_id])  # UPKEEP-1

    def succeeded(self, entries: int) -> None:
        """Take what an attempt wrote into use."""
        self.done += 1
        self.entries += entries
        self._retry.succeeded()


def counters_of(seals: RunWork, merges: RunWork) -> RunCounters:
    return RunCounters(
        seals.done, merges.done, seals.failures, merges.failures, seals.entries, merges.entries
    )
