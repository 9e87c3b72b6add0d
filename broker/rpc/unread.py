"""What consumers asked for and have not read the answer to: bounded in frames and bytes for a stream, in bytes for all.

    frame read --take--> at work, waits for the disk --shrink--> answered --release--> written

A frame takes room for itself and for the longest answer that it may get before any work begins. A stream without room
is not read, so that its client is held up by its own silence. The room of all streams is for large frames and for
streams with more than one: a stream may always have one small frame, whatever others do. If somebody waits for room,
streams to which nothing could be written for a while are ended: their clients do not read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from broker.runtime.clock import Clock
from broker.settings import KIB, MIB

FRAMES_MAX = 256
STREAM_BYTES_MAX = 4 * MIB
"""Of one stream, but for a single frame that is larger."""
ALL_BYTES_MAX = 64 * MIB
SMALL_BYTES = 16 * KIB
"""A frame of this size needs no room of all streams, if it is the only one of its stream."""
STALLED_SECONDS = 5.0
_LOOK_SECONDS = 0.5


class UnreadRoom:
    """The room of all streams."""

    def __init__(self, clock: Clock) -> None:
        self.held = 0
        self.streams: set[Unread] = set()
        self._clock = clock
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def now_seconds(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    async def take(self, bytes_: int) -> None:
        """Wait for room, first come, first served."""
        if not self._queue and self._fits(bytes_):
            self.held += bytes_
            return
        got: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((bytes_, got))
        try:
            while not (await asyncio.wait({got}, timeout=_LOOK_SECONDS))[0]:
                self._end_stalled()
        except asyncio.CancelledError:
            if got.done():
                self.give(bytes_)
            else:
                self._queue.remove((bytes_, got))
                self.give(0)
            raise

    def give(self, bytes_: int) -> None:
        self.held -= bytes_
        while self._queue and self._fits(self._queue[0][0]):
            first, got = self._queue.popleft()
            self.held += first
            got.set_result(None)

    def _fits(self, bytes_: int) -> bool:
        return not self.held or self.held + bytes_ <= ALL_BYTES_MAX

    def _end_stalled(self) -> None:
        late = self.now_seconds() - STALLED_SECONDS
        for stream in list(self.streams):
            if stream.counted and stream.writing_since is not None and stream.writing_since <= late:
                stream.end()


class Place:
    """The room of one frame."""

    __slots__ = ("_bytes", "_is_counted", "_stream")

    def __init__(self, stream: Unread, bytes_: int, *, is_counted: bool) -> None:
        self._stream = stream
        self._bytes = bytes_
        self._is_counted = is_counted

    def shrink(self, bytes_: int) -> None:
        """The answer is there, and takes no more than this."""
        if bytes_ < self._bytes:
            self._stream.give(self._bytes - bytes_, is_counted=self._is_counted)
            self._bytes = bytes_

    def release(self) -> None:
        """The answer was written, or never will be."""
        self.shrink(0)
        self._stream.leave(self)


class Unread:
    """What one stream holds."""

    def __init__(self, room: UnreadRoom, end: Callable[[], None]) -> None:
        self.end = end
        """Ends the stream, because its client does not read."""
        self.writing_since: float | None = None
        self.counted = 0  # bytes in the room of all
        self._room = room
        self._bytes = 0
        self._places: set[Place] = set()
        self._freed = asyncio.Event()
        room.streams.add(self)

    def __len__(self) -> int:
        """How many frames have no answer that was written."""
        return len(self._places)

    async def take(self, bytes_: int) -> Place:
        """Room for a frame and its answer."""
        while self._places and (len(self) >= FRAMES_MAX or self._bytes + bytes_ > STREAM_BYTES_MAX):
            self._freed.clear()
            await self._freed.wait()
        is_counted = bool(self._places) or bytes_ > SMALL_BYTES
        if is_counted:
            await self._room.take(bytes_)
            self.counted += bytes_
        self._bytes += bytes_
        place = Place(self, bytes_, is_counted=is_counted)
        self._places.add(place)
        return place

    def give(self, bytes_: int, *, is_counted: bool) -> None:
        self._bytes -= bytes_
        if is_counted:
            self.counted -= bytes_
            self._room.give(bytes_)
        self._freed.set()

    def leave(self, place: Place) -> None:
        self._places.discard(place)
        self._freed.set()

    def begin_write(self) -> None:
        self.writing_since = self._room.now_seconds()

    def end_write(self) -> None:
        self.writing_since = None

    def close(self) -> None:
        """The stream is over."""
        for place in list(self._places):
            place.release()
        self._room.streams.discard(self)
