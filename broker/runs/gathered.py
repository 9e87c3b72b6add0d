"""Rows that are in no run yet: what was added since the last seal, and what a seal is writing.

Who has runs gathers rows here, and says by a *mark* how far he has come: whatever orders his rows as they are added.

Invariants:
  GATHERED-1  A seal freezes in one step, and there is at most one frozen part. One that failed is thawed: its rows
      stand before those added since, as if it had never been frozen.
  GATHERED-2  `sealed_mark` is the end of what is in runs. What lies between it and `mark` is in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, Self, TypeVar


class Memory(Protocol):
    """Rows in memory, in whatever form their kind has."""

    def __len__(self) -> int: ...

    def prepend(self, older: Self, /) -> None:
        """Take back rows that were frozen and could not be sealed."""


M = TypeVar("M", bound=Memory)
Mark = TypeVar("Mark")


class Gathered(Generic[M, Mark]):
    """See the module's description."""

    def __init__(self, new: Callable[[], M], start: Mark) -> None:
        self._new = new
        self._start = start
        self.clear()

    def clear(self) -> None:
        """Forget all rows; a seal that is under way finds nothing of its own any more."""
        self.recent = self._new()
        self.frozen: M | None = None
        self.mark = self.sealed_mark = self._start
        self._since_ms: int | None = None  # when the first recent row was met

    def restore(self, mark: Mark) -> None:
        """Everything up to a mark is in runs."""
        self.mark = self.sealed_mark = mark

    def drop_recent(self) -> None:
        """Forget what was added since the last freeze: nobody needs it."""
        self.recent, self._since_ms = self._new(), None

    @property
    def durable_mark(self) -> Mark:
        """Mark for an image: everything before it is in runs, or there was nothing to seal."""
        return self.sealed_mark if self.count else self.mark

    @property
    def count(self) -> int:
        """Return how many rows are in memory only."""
        return sum(map(len, self.parts()))

    def parts(self) -> list[M]:
        """The parts in memory, in the order in which they were added."""
        return [self.recent] if self.frozen is None else [self.frozen, self.recent]

    def waited_ms(self, now_ms: int) -> int:
        """Return how long the first recent row has waited, by a clock that may step: counted from the first look."""
        if self._since_ms is None or self._since_ms > now_ms:
            self._since_ms = now_ms
        return now_ms - self._since_ms

    @contextlib.contextmanager
    def freeze(self) -> Iterator[M]:
        """Hold what is there still while a seal writes it, until `sealed`; it is thawed if that is never said."""
        assert self.frozen is None
        frozen = self.frozen = self.recent
        self.drop_recent()
        try:
            yield frozen
        finally:
            if self.frozen is frozen:
                self.recent.prepend(frozen)
                self.frozen = None

    def sealed(self, mark: Mark) -> None:
        """The frozen part is in a run, or nobody needs it; `mark` is of the moment when it was frozen."""
        self.frozen = None
        self.sealed_mark = mark
