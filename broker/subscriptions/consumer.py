"""One consumer: what it can still take, and what is on its way to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from broker.errors import PostdateError
from broker.model import (
    Array,
    Entries,
    Int64Column,
    RowColumn,
    UInt32Column,
    bitmap_of,
    common_entries,
    distinct_values,
)


@dataclass(frozen=True, slots=True)
class DeliveryBatch:
    """Messages handed to a consumer, in order of delivery; all columns are aligned."""

    ledger_ids: Int64Column
    entry_ids: UInt32Column
    deliver_at_ms: Int64Column  # effective times
    rows: RowColumn
    frames: list[bytes]
    attempts: UInt32Column  # 1 for a first delivery
    frames_bytes: int

    def __len__(self) -> int:
        return len(self.frames)

    def entries(self) -> Entries:
        """Return which messages these are."""
        return {
            ledger_id: bitmap_of(np.sort(self.entry_ids[self.ledger_ids == ledger_id]))
            for ledger_id in distinct_values(self.ledger_ids).tolist()
        }


class BatchRoom(Protocol):
    """Room for batches on their way to a consumer, of which all consumers have so much together."""

    def fitting(self, lengths: Array) -> int:
        """Take room for the first messages, and return for how many; if 0, the consumer lacks room until it comes."""

    def give_up(self) -> None:
        """Give back room that was taken for a batch that was not handed out."""


class Consumer:
    """A consumer attached to a subscription.

    The dispatcher puts a batch out, the stream takes it; one batch may wait while another is being sent. So a
    consumer that grants permits and does not read stops getting, and what comes due while a stream is busy gathers
    into one batch: the busier the broker, the fewer and larger its frames.
    """

    def __init__(self, consumer_id: str, name: str, lease_ms: int, heard_ns: int = 1 << 62) -> None:
        """`heard_ns`: now, if `Consumers.heard` is told of whatever it says; else it never counts as hanging."""
        self.consumer_id = consumer_id
        self.name = name
        self.lease_ms = lease_ms
        self.heard_ns = heard_ns  # when it last said something, on the monotonic clock
        self.silent = False  # a lease of its ran out, and for as long nothing was heard of it
        self.permits = 0
        self.permit_bytes = 0
        self.counts_bytes = False
        self.draining = False
        self.hands_back = False  # it leaves in good order, or because the broker asked it to
        self.paused = False  # as its subscription is
        self.ended = False  # its subscription begins elsewhere or has another rule: its client opens anew
        self.starved = False  # of permits in bytes: the next message does not fit, and it holds something
        self.room: BatchRoom | None = None  # None: it is not bounded
        self.lacks_room = False  # and asked for some
        self.reserves_room = False  # which came, and no batch has it yet
        self.polls = False  # wants to know when there is nothing for it
        self.found_nothing = False
        self.closed_because: PostdateError | None = None
        self._waiting: DeliveryBatch | None = None
        self._charged_bytes = 0  # for what waits
        self.wakeup = asyncio.Event()

    @property
    def can_take(self) -> bool:
        """Return whether anything may be handed to it now."""
        return (
            self.permits > 0
            and not self.draining
            and not self.paused
            and not self.starved
            and not self.lacks_room
            and self.closed_because is None
            and self._waiting is None
            and (not self.counts_bytes or self.permit_bytes > 0)
        )

    @property
    def has_unsent(self) -> bool:
        """Return whether a batch waits for its stream to send it."""
        return self._waiting is not None

    @property
    def is_done(self) -> bool:
        """Return whether waiting for a message is over: the consumer is closed, or polled and there is nothing."""
        return self.closed_because is not None or self.found_nothing or self.ended

    def grant(self, messages: int, bytes_: int) -> None:
        """Add permits; 0 bytes lifts the limit in bytes."""
        self.starved = False
        self.permits += messages
        if bytes_:
            self.permit_bytes += bytes_
            self.counts_bytes = True
        elif messages:
            self.counts_bytes = False
            self.permit_bytes = self._charged_bytes = 0

    def charge(self, messages: int, bytes_: int) -> None:
        """Use up permits."""
        self.permits -= messages
        self._charged_bytes = min(bytes_, self.permit_bytes)
        self.permit_bytes -= self._charged_bytes

    def deliver(self, batch: DeliveryBatch) -> None:
        """Put a batch on its way."""
        assert self._waiting is None
        self._waiting = batch
        self.wakeup.set()

    def next_nowait(self) -> DeliveryBatch | None:
        """The next batch to send; None if there is none."""
        batch, self._waiting = self._waiting, None
        return batch

    def take_back(self) -> DeliveryBatch | None:
        """Take back the batch that was not sent yet; its permits are free again."""
        if (batch := self.next_nowait()) is not None:
            self.permits += len(batch)
            self.permit_bytes += self._charged_bytes
            self.give_up_room()
        return batch

    def give_up_room(self) -> None:
        """Nothing is handed to it for now: others may need the room."""
        if self.room is not None and self._waiting is None:
            self.room.give_up()

    def waits_with(self, entries: Entries) -> bool:
        """Return whether any of these is on its way to it and not sent yet."""
        return self._waiting is not None and bool(common_entries(self._waiting.entries(), entries))

    def tell_nothing_found(self) -> None:
        """The dispatcher has looked since this consumer came, and found nothing more that may be sent now."""
        self.found_nothing = True
        self.wakeup.set()

    def end(self) -> None:
        """Tell the stream to end well. What was not sent yet was taken back before."""
        self.ended = True
        self.draining = True
        self.wakeup.set()

    def close(self, because: PostdateError) -> None:
        """Tell the stream to end; `because` says why (a deleted subscription, damage)."""
        self.closed_because = because
        self.wakeup.set()


def prefix_within(lengths: Array, bytes_max: int) -> int:
    """Return how many of the first messages fit into `bytes_max` together."""
    return int(lengths.cumsum(dtype="int64").searchsorted(bytes_max, side="right"))
