"""Room for batches that consumers have not read, bounded in bytes for all streams together.

    read from the log --fitting--> handed out --leave--> being written --release--> written

A batch takes room when it is handed out and gives it back once gRPC has taken it, so what waits for clients that do not
read is counted. Where there is no room the messages stay with their subscription, whose other consumers may take them,
and their bytes are dropped. Who waits for room, and who is ended for others, is as with answers (`unread_room.py`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import numpy as np

from broker.model import Array
from broker.rpc.unread_room import FrameRoom, StreamUnread, UnreadRooms
from broker.runtime.clock import Clock
from broker.runtime.signal import Signal
from broker.settings import MIB
from broker.subscriptions.consumer import Consumer, prefix_within

BATCHES_BYTES_MAX = 128 * MIB
"""Of the room for large batches, and for streams with more than one."""
_MESSAGE_BYTES = 128
"""Bytes of a message beside its frame."""
_COPIES = 2
"""A frame that is being written is there twice: gRPC has a copy of its own."""


def batch_rooms(clock: Clock) -> UnreadRooms:
    """Make the rooms of a broker. A stream has two batches at most, so there is no bound for one stream."""
    return UnreadRooms(
        clock, bytes_max=BATCHES_BYTES_MAX, stream_bytes_max=sys.maxsize, round_bytes=sys.maxsize
    )


class StreamRoom:
    """Room for the batches of one stream: see `BatchRoom`."""

    def __init__(
        self,
        rooms: UnreadRooms,
        peer: Callable[[], str],
        end: Callable[[], None],
        consumer: Consumer,
        work: Signal,
    ) -> None:
        """`end` ends the stream, because its client does not read; `work` wakes who hands out. See `begin`."""
        self._unread = StreamUnread(rooms, peer, end)
        self._consumer = consumer
        self._work = work
        self._place: FrameRoom | None = None  # of the batch that is not sent yet, or of the next one
        self._asking: asyncio.Task[None] | None = None
        self._is_closed = False
        consumer.room = self
        consumer.lacks_room = True

    def begin(self) -> None:
        """The stream can be ended from now on, so batches may wait for its client."""
        self._consumer.lacks_room = False
        self._work.set()

    def fitting(self, lengths: Array) -> int:
        """See `BatchRoom` of `broker.subscriptions.consumer`."""
        if self._asking is not None or self._is_closed:
            return 0
        count, bytes_ = len(lengths), _cost(lengths)
        if self._place is not None:
            self._consumer.reserves_room = False
            if bytes_ > self._place.bytes:
                count = prefix_within(lengths + np.int64(_MESSAGE_BYTES), self._place.bytes // _COPIES)
                bytes_ = _cost(lengths[:count])
            if not count:  # they are others than those it was asked for
                self.give_up()
                return self.fitting(lengths)
        else:
            self._place = self._unread.take_nowait(bytes_)
        if self._place is None:
            self._consumer.lacks_room = True
            self._asking = asyncio.create_task(self._ask(bytes_), name="room for a batch")
            return 0
        # From now on, as it may wait behind something else that its client does not read.
        self._place.answered(bytes_)
        return count

    async def _ask(self, bytes_: int) -> None:
        self._place = await self._unread.take(bytes_)
        self._asking = None
        self._consumer.reserves_room = True
        self._consumer.lacks_room = False
        self._work.set()

    def give_up(self) -> None:
        """See `BatchRoom` of `broker.subscriptions.consumer`."""
        self._consumer.reserves_room = False
        place, self._place = self._place, None
        if place is not None:
            place.release()

    def leave(self) -> FrameRoom | None:
        """The batch is about to be written; return its room."""
        place, self._place = self._place, None
        return place

    def close(self) -> None:
        """The stream is over."""
        self._is_closed = self._consumer.lacks_room = True
        if self._asking is not None:
            self._asking.cancel()
        self._unread.close()


def _cost(lengths: Array) -> int:
    return (int(lengths.sum()) + len(lengths) * _MESSAGE_BYTES) * _COPIES
