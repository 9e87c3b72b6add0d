"""Requests whose answers consumers have not read: bounded in frames and bytes for a stream, in bytes for all.

    frame read --take--> at work, waits for the disk --answered--> waits to be written --release--> written

A frame takes room for itself and for the longest answer that it may get before any work begins. A stream without room
is not read, so that its client is held up by its own silence. The room of all streams is for large frames and for
streams with more than one: a stream may always have one small frame, whatever others do.

While somebody waits for room, streams are ended whose oldest answer has waited too long to be written, the oldest first
and no more of them than the first in the queue needs. How long one write takes does not count: a client that reads a
little now and then keeps its answers waiting too. A stream that is ended keeps its room until its last write is over,
so that what gRPC still holds of it is counted. Written means that gRPC has taken an answer but for the last 64 KiB that
it may hold back for each stream; these are bounded by the number of streams.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from broker.runtime.clock import Clock
from broker.settings import KIB, MIB

FRAMES_MAX = 256
STREAM_BYTES_MAX = 4 * MIB
"""Of one stream, but for a single frame that is larger."""
ALL_BYTES_MAX = 64 * MIB
SMALL_BYTES = 16 * KIB
"""A frame of this size needs no room of all streams, if it is the only one of its stream."""
STALLED_SECONDS = 5.0
"""Seconds that an answer may wait to be written while others wait for room."""
_LOOK_SECONDS = 0.5


class UnreadRoom:
    """The room of all streams."""

    def __init__(self, clock: Clock) -> None:
        self.held = 0
        self.streams: set[Unread] = set()
        self._clock = clock
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def now_seconds(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    async def take(self, bytes_: int) -> None:
        """Wait for room, first come, first served."""
        if not self._queue and self._fits(bytes_):
            self.held += bytes_
            return
        got: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((bytes_, got))
        self._watch()
        try:
            await got
        except asyncio.CancelledError:
            if got.done() and not got.cancelled():
                self.give(bytes_)
            else:
                with suppress(ValueError):
                    self._queue.remove((bytes_, got))
                self.give(0)
            raise

    def give(self, bytes_: int) -> None:
        self.held -= bytes_
        while self._queue and self._fits(self._queue[0][0]):
            first, got = self._queue.popleft()
            if not got.done():  # else who waited has left, and is about to say so
                self.held += first
                got.set_result(None)

    def _fits(self, bytes_: int) -> bool:
        return not self.held or self.held + bytes_ <= ALL_BYTES_MAX

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
        missing = self.held + self._queue[0][0] - ALL_BYTES_MAX
        missing -= sum(stream.counted for stream in self.streams if stream.is_ending)
        unread = [
            (since, stream)
            for stream in self.streams
            if not stream.is_ending and stream.counted and (since := stream.unread_since) is not None
        ]
        for since, stream in sorted(unread, key=lambda pair: pair[0]):
            if since > late or missing <= 0:
                return
            missing -= stream.counted
            stream.is_ending = True
            stream.end()


class FrameRoom:
    """The room of one frame."""

    __slots__ = ("_bytes", "_is_counted", "_stream")

    def __init__(self, stream: Unread, bytes_: int, *, is_counted: bool) -> None:
        self._stream = stream
        self._bytes = bytes_
        self._is_counted = is_counted

    def answered(self, bytes_: int) -> None:
        """The answer is there, waits to be written, and takes no more than this."""
        self._shrink(bytes_)
        self._stream.note_answered(self)

    def release(self) -> None:
        """The answer was written, or never will be."""
        self._shrink(0)
        self._stream.leave(self)

    def _shrink(self, bytes_: int) -> None:
        if bytes_ < self._bytes:
            self._stream.give(self._bytes - bytes_, is_counted=self._is_counted)
            self._bytes = bytes_


class Unread:
    """Answers that one stream holds."""

    def __init__(self, room: UnreadRoom, end: Callable[[], None]) -> None:
        self.end = end
        """Ends the stream, because its client does not read."""
        self.is_ending = False
        self.counted = 0  # bytes in the room of all
        self._room = room
        self._bytes = 0
        self._places: set[FrameRoom] = set()
        self._answered: dict[FrameRoom, float] = {}  # since when; the oldest first
        self._freed = asyncio.Event()
        room.streams.add(self)

    def __len__(self) -> int:
        """Return how many frames have no answer that was written."""
        return len(self._places)

    async def take(self, bytes_: int) -> FrameRoom:
        """Room for a frame and its answer."""
        while self._places and (len(self) >= FRAMES_MAX or self._bytes + bytes_ > STREAM_BYTES_MAX):
            self._freed.clear()
            await self._freed.wait()
        is_counted = bool(self._places) or bytes_ > SMALL_BYTES
        if is_counted:
            await self._room.take(bytes_)
            self.counted += bytes_
        self._bytes += bytes_
        place = FrameRoom(self, bytes_, is_counted=is_counted)
        self._places.add(place)
        return place

    def give(self, bytes_: int, *, is_counted: bool) -> None:
        self._bytes -= bytes_
        if is_counted:
            self.counted -= bytes_
            self._room.give(bytes_)
        self._freed.set()

    def leave(self, place: FrameRoom) -> None:
        self._places.discard(place)
        self._answered.pop(place, None)
        self._freed.set()

    def note_answered(self, place: FrameRoom) -> None:
        self._answered[place] = self._room.now_seconds()

    @property
    def unread_since(self) -> float | None:
        """Since when its oldest answer waits to be written."""
        return next(iter(self._answered.values()), None)

    def close(self) -> None:
        """The stream is over."""
        for place in list(self._places):
            place.release()
        self._room.streams.discard(self)
