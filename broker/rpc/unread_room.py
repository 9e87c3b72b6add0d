"""Memory for what clients have not read yet: bounded in frames and bytes for a stream, in bytes for all of them.

What is said here of answers to frames holds for the answers of calls (`call_room.py`) and for batches of messages
(`batch_room.py`) too; each kind has rooms of its own.

    frame read --take--> at work, waits for the disk --answered--> waits to be written --release--> written

A frame takes room for itself and for the longest answer that it may get before any work begins. A stream without room
is not read, so that its client is held up by its own silence. All streams share two rooms: one for the small frame of a
stream that has no other, and one for large frames and for streams with more than one. So whoever waits for each answer
before the next request goes on, whatever is full of what others do not read.

Room is given out connection by connection, and a bounded amount of it in a round of the event loop: what a frame takes
is about the work that it makes, and a call of somebody else needs several rounds.

While somebody waits for room, streams are ended whose oldest answer has waited too long to be written, the oldest first
and no more of them than those in the queue need. How long one write takes does not count: a client that reads a
little now and then keeps its answers waiting too. A stream that is ended keeps its room until its last write is over,
so that what gRPC still holds of it is counted. Written means that gRPC has taken an answer, which it does when the
client's window and the kernel's buffer of the connection have room for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from broker.errors import LimitReached
from broker.rpc.fair_queue import FairQueue
from broker.runtime.clock import Clock
from broker.settings import KIB, MIB

FRAMES_MAX = 256
STREAM_BYTES_MAX = 4 * MIB
"""Of one stream, but for a single frame that is larger."""
ALL_BYTES_MAX = 64 * MIB
"""Of each of the two rooms."""
SMALL_BYTES = 16 * KIB
"""A frame of this size, if it is the only one of its stream, takes the room for small ones."""
CALLS_BYTES_MAX = 64 * MIB
"""Of requests of calls that wait for room."""
ROUND_BYTES = 2 * MIB
"""Given out in a round of the event loop, but for the last frame. Ten thousand ids that are refused take as much."""
STALLED_SECONDS = 5.0
"""Seconds that an answer may wait to be written while others wait for room."""
_LOOK_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class _WaitingFrame:
    bytes: int
    got: asyncio.Future[None]


class UnreadRoom:
    """Room of all streams for frames of one kind."""

    def __init__(self, clock: Clock, bytes_max: int | None = None, round_bytes: int | None = None) -> None:
        self.bytes_max = ALL_BYTES_MAX if bytes_max is None else bytes_max
        self.round_bytes = ROUND_BYTES if round_bytes is None else round_bytes
        self.held = 0
        self.streams: set[StreamUnread] = set()
        self._clock = clock
        self._queue = FairQueue[_WaitingFrame]()
        self._left = self.round_bytes
        self._is_counting = False
        self._timer: asyncio.TimerHandle | None = None

    def now_seconds(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    @property
    def waiting_bytes(self) -> int:
        """Return how much is waited for."""
        return sum(waiter.bytes for waiter in self._queue)

    def take_nowait(self, bytes_: int) -> bool:
        """Take room, unless there is none now or somebody waits for it."""
        if self._queue or not self._fits(bytes_):
            return False
        self._give_out(bytes_)
        return True

    async def take(self, peer: str, bytes_: int) -> None:
        """Wait for room."""
        waiter = _WaitingFrame(bytes_, asyncio.get_running_loop().create_future())
        self._queue.push(peer, waiter)
        self._watch()
        try:
            await waiter.got
        except asyncio.CancelledError:
            self._queue.remove(peer, waiter)
            self.give(bytes_ if waiter.got.done() and not waiter.got.cancelled() else 0)
            raise

    def give(self, bytes_: int) -> None:
        """Give back room that was taken."""
        self.held -= bytes_
        while self._queue and self._fits(self._queue.first().bytes):
            waiter = self._queue.pop()
            if not waiter.got.done():  # else who waited has left, and is about to say so
                self._give_out(waiter.bytes)
                waiter.got.set_result(None)

    def _fits(self, bytes_: int) -> bool:
        return self._left > 0 and (not self.held or self.held + bytes_ <= self.bytes_max)

    def _give_out(self, bytes_: int) -> None:
        self.held += bytes_
        self._left -= bytes_
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_counting = False
        self._left = self.round_bytes
        self.give(0)

    def _watch(self) -> None:
        """Look after a while whether somebody still waits."""
        if self._timer is None and self._queue:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._queue:
            self._end_stalled()
            self._watch()

    def _end_stalled(self) -> None:
        late = self.now_seconds() - STALLED_SECONDS
        missing = self.held + self.waiting_bytes - self.bytes_max
        missing -= sum(stream.counted_in(self) for stream in self.streams if stream.is_ending)
        unread = [
            (since, stream)
            for stream in self.streams
            if not stream.is_ending and stream.counted_in(self) and (since := stream.unread_since) is not None
        ]
        for since, stream in sorted(unread, key=lambda pair: pair[0]):
            if since > late or missing <= 0:
                return
            missing -= stream.counted_in(self)
            stream.is_ending = True
            stream.end()


class UnreadRooms:
    """The two rooms."""

    def __init__(
        self,
        clock: Clock,
        *,
        bytes_max: int | None = None,
        stream_bytes_max: int = STREAM_BYTES_MAX,
        round_bytes: int | None = None,
    ) -> None:
        self.large = UnreadRoom(clock, bytes_max, round_bytes)
        self.small = UnreadRoom(clock, None, round_bytes)
        self.stream_bytes_max = stream_bytes_max
        self._calls_bytes = 0  # of requests that wait

    def __iter__(self) -> Iterator[UnreadRoom]:
        return iter((self.large, self.small))

    @contextmanager
    def waiting_call(self, request_bytes: int) -> Iterator[None]:
        """Count a request that waits for room, and is not that of a stream. Raises LimitReached."""
        if self._calls_bytes + request_bytes > CALLS_BYTES_MAX:
            raise LimitReached(
                "Too many calls with large answers are under way",
                reason="TOO_MANY_CALLS",
            )
        self._calls_bytes += request_bytes
        try:
            yield
        finally:
            self._calls_bytes -= request_bytes


class FrameRoom:
    """The room of one frame."""

    __slots__ = ("_room", "_stream", "bytes")

    def __init__(self, stream: StreamUnread, room: UnreadRoom, bytes_: int) -> None:
        self._stream = stream
        self._room = room
        self.bytes = bytes_

    def answered(self, bytes_: int) -> None:
        """The answer is there, waits to be written, and takes no more than this."""
        self.shrink(bytes_)
        self._stream.note_answered(self)

    def release(self) -> None:
        """The answer was written, or never will be."""
        self.shrink(0)
        self._stream.leave(self)

    def shrink(self, bytes_: int) -> None:
        """It takes no more than this."""
        if bytes_ < self.bytes:
            self._stream.give(self._room, self.bytes - bytes_)
            self.bytes = bytes_


class StreamUnread:
    """Part of the rooms that one stream or call holds."""

    def __init__(self, rooms: UnreadRooms, peer: Callable[[], str], end: Callable[[], None]) -> None:
        """`end` ends the stream, because its client does not read."""
        self.end = end
        self.is_ending = False
        self._rooms = rooms
        self._peer = peer
        self._bytes = Counter[UnreadRoom]()
        self._places: set[FrameRoom] = set()
        self._answered: dict[FrameRoom, float] = {}  # since when; the oldest first
        self._freed = asyncio.Event()
        for room in rooms:
            room.streams.add(self)

    def __len__(self) -> int:
        """Return how many frames have no answer that was written."""
        return len(self._places)

    def counted_in(self, room: UnreadRoom) -> int:
        """Return the bytes that it has in a room."""
        return self._bytes[room]

    def take_nowait(self, bytes_: int) -> FrameRoom | None:
        """Room for a frame and its answer, if there is some now."""
        room = self._room_for(bytes_)
        if self._is_full(bytes_) or not room.take_nowait(bytes_):
            return None
        return self._enter(room, bytes_)

    async def take(self, bytes_: int) -> FrameRoom:
        """Room for a frame and its answer."""
        while self._is_full(bytes_):
            self._freed.clear()
            await self._freed.wait()
        room = self._room_for(bytes_)
        if not room.take_nowait(bytes_):
            await room.take(self._peer(), bytes_)
        return self._enter(room, bytes_)

    def _is_full(self, bytes_: int) -> bool:
        if not self._places:
            return False
        return len(self) >= FRAMES_MAX or self._bytes.total() + bytes_ > self._rooms.stream_bytes_max

    def _room_for(self, bytes_: int) -> UnreadRoom:
        return self._rooms.large if self._places or bytes_ > SMALL_BYTES else self._rooms.small

    def _enter(self, room: UnreadRoom, bytes_: int) -> FrameRoom:
        self._bytes[room] += bytes_
        place = FrameRoom(self, room, bytes_)
        self._places.add(place)
        return place

    def give(self, room: UnreadRoom, bytes_: int) -> None:
        """Give back bytes of one of its frames."""
        self._bytes[room] -= bytes_
        room.give(bytes_)
        self._freed.set()

    def leave(self, place: FrameRoom) -> None:
        """Forget a frame whose answer was written, or never will be."""
        self._places.discard(place)
        self._answered.pop(place, None)
        self._freed.set()

    def note_answered(self, place: FrameRoom) -> None:
        self._answered[place] = self._rooms.large.now_seconds()

    @property
    def unread_since(self) -> float | None:
        """Since when its oldest answer waits to be written."""
        return next(iter(self._answered.values()), None)

    def close(self) -> None:
        """The stream is over."""
        for place in list(self._places):
            place.release()
        for room in self._rooms:
            room.streams.discard(self)
