"""Values of the calls of a topic's schedule. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, overload

import numpy as np

from broker.delayed.due_rows import DueRows, Key
from broker.model import TIME_MS_MAX, Int64Column, Position, UInt32Column, UInt64Column
from broker.topics.schedule_frames import schedule_key_of


class ChangeResult(IntEnum):
    """Result of a change of one message. Numbers as on the wire."""

    DONE = 1
    ALREADY_DELIVERED = 2
    NOT_FOUND = 3
    ALREADY_CANCELLED = 4


class ScheduledState(IntEnum):
    """State of a pending message. Numbers as on the wire."""

    WAITING = 1  # its time has not come
    DUE = 2  # it has, and no subscription was sent the message yet
    RETURNED = 3  # not pending: a subscription was sent it, got it back and has not settled it


class DueRange(NamedTuple):
    """Due times from `start_ms` on, and before `end_ms`."""

    start_ms: int = 0
    end_ms: int = TIME_MS_MAX + 1


class Scheduled(NamedTuple):
    """A pending message. A tuple, as a page has a thousand of them."""

    position: Position
    schedule_key: str  # empty: none
    deliver_at_ms: int  # as of now
    publish_time_ms: int
    state: ScheduledState
    revision: int  # how often it was moved
    frame: bytes  # of the message, as it is stored; see `Batch.frames`


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledColumns(Sequence[Scheduled]):
    """Pending messages of one state, as columns: those of a page are mostly written to the wire and never looked at."""

    entries: DueRows
    publish_time_ms: Int64Column
    schedule_hashes: UInt64Column  # 0: no key
    revisions: UInt32Column
    state: ScheduledState
    frames: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.frames)

    @overload
    def __getitem__(self, place: int) -> Scheduled: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Scheduled]: ...
    def __getitem__(self, place: int | slice) -> Scheduled | Sequence[Scheduled]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        frame = self.frames[place]
        return Scheduled(
            position=Position(int(self.entries.ledger_ids[place]), int(self.entries.entry_ids[place])),
            schedule_key=schedule_key_of(frame) if self.schedule_hashes[place] else "",
            deliver_at_ms=int(self.entries.deliver_at_ms[place]),
            publish_time_ms=int(self.publish_time_ms[place]),
            state=self.state,
            revision=int(self.revisions[place]),
            frame=frame,
        )


@dataclass(frozen=True, slots=True)
class ScheduledPage:
    """Pending messages in due order; nothing between them is missing."""

    scheduled: Sequence[Scheduled]
    next: Key | None  # where the next page begins; None: this is the last one


@dataclass(frozen=True, slots=True)
class ScheduledCounts:
    """Messages whose time has not come, by due time."""

    bars: Sequence[tuple[int, int]]  # (start_ms, messages) of those that hold any, rising
    before: int  # due before the range
    after: int  # due at or after its end
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody gets the message."""


@dataclass(frozen=True, slots=True)
class Move:
    """Another due time; exactly one is set."""

    deliver_at_ms: int | None = None
    deliver_after_ms: int | None = None  # counted from when it is decided
    shift_ms: int | None = None  # added to the effective time


Change = Cancel | Move


class Outcome(NamedTuple):
    """Outcome of a change of one message, or of a dry run."""

    position: Position | None  # None: a key that names nothing
    schedule_key: str  # empty: none, or not looked up because ids were given
    result: ChangeResult
    deliver_at_ms: int  # of a message that is pending now; 0: it is not
    delivered_to: tuple[str, ...] = ()  # subscriptions that were sent it, or may have been


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeColumns(Sequence[Outcome]):
    """Outcomes of entries, as columns: thousands of them are mostly written to the wire and never looked at."""

    ledger_ids: Int64Column
    entry_ids: UInt32Column
    results: Int64Column  # numbers of ChangeResult
    deliver_at_ms: Int64Column
    delivered_to: dict[int, tuple[str, ...]]  # by place

    def __len__(self) -> int:
        return len(self.results)

    @overload
    def __getitem__(self, place: int) -> Outcome: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Outcome]: ...
    def __getitem__(self, place: int | slice) -> Outcome | Sequence[Outcome]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        return Outcome(
            Position(int(self.ledger_ids[place]), int(self.entry_ids[place])),
            "",
            ChangeResult(int(self.results[place])),
            int(self.deliver_at_ms[place]),
            self.delivered_to.get(place % len(self), ()),
        )

    def found(self) -> OutcomeColumns:
        """Those of entries that were found."""
        places = np.flatnonzero(self.results != ChangeResult.NOT_FOUND)
        if len(places) == len(self):
            return self
        told = {
            new: self.delivered_to[old] for new, old in enumerate(places.tolist()) if old in self.delivered_to
        }
        return OutcomeColumns(
            self.ledger_ids[places],
            self.entry_ids[places],
            self.results[places],
            self.deliver_at_ms[places],
            told,
        )
