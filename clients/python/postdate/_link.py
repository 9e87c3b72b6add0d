"""A consumer's connection to its subscription, made again whenever it breaks.

    open -> opened -> batches, confirmations, heartbeats -> draining | broken -> open ...

The link knows the protocol and nothing of iteration or leases; `Peer` is what it serves.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Protocol

from postdate._connection import Stream
from postdate._deliveries import Deliveries
from postdate._rpc import Rpc
from postdate._status import connection_broke
from postdate.errors import (
    Closed,
    Disconnected,
    FailedPrecondition,
    Internal,
    PostdateError,
    TlsFailed,
    Unauthenticated,
    Unavailable,
)
from postdate_api.v1 import consumer_pb2

_END_GRACE_S = 5.0
_SILENCE_HEARTBEATS = 3  # so many missed ones, and the connection is taken for dead
_SILENCE_MIN_S = 5.0
_LOOK_S = 3.0  # between two questions whether another node owns the topic now
_OLD_EPOCH = "the broker lost the topic to another one"
# After a broken connection the broker may take the old consumer for attached a little longer.
_TAKEN_PATIENCE_S = 30.0
_log = logging.getLogger("postdate")

SubscribeCall = Stream[consumer_pb2.SubscribeRequest, consumer_pb2.SubscribeResponse | Deliveries]


class Peer(Protocol):
    """The subscription behind a link."""

    def open_frame(self) -> consumer_pb2.SubscribeRequest:
        """The first frame of a new connection, with its permits."""
        ...

    def next_frame(self) -> consumer_pb2.SubscribeRequest | None:
        """The next frame to send, if there is one."""

    def opened(self, opened: consumer_pb2.Opened) -> None: ...

    def arrived(self, deliveries: Deliveries) -> None: ...

    def confirmed(self, confirmed: consumer_pb2.Confirmed) -> None: ...

    def draining(self) -> None:
        """The broker takes back what was not taken yet, and is about to end the connection."""

    def disconnected(self, error: PostdateError) -> None:
        """The connection is gone; there may be another."""

    def failed(self, error: PostdateError) -> None:
        """There will be no other connection."""


class Link:
    """Runs one connection after another until it is closed or told that it is no use."""

    def __init__(self, rpc: Rpc, topic: str, peer: Peer) -> None:
        self._rpc = rpc
        self._topic = topic
        self._peer = peer
        self._backoff = rpc.backoff()
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._closing = False
        self._draining = False
        self._opened_once = False
        self._was_opened = False  # this connection, or the last one
        self._last_frame_at = 0.0
        self._epoch = 0  # of this connection
        self._call: SubscribeCall | None = None
        self._task = self._loop.create_task(self._run(), name="postdate-subscribe")
        self._task.add_done_callback(self._ended)

    def wake(self) -> None:
        """There is something to send."""
        if not self._work.is_set():
            self._work.set()

    async def close(self) -> None:
        """Half-close; the broker confirms what it has and ends the call."""
        self._closing = True
        self._work.set()
        if self._call is None:
            await self.abort()  # it may wait to try again
        done, _ = await asyncio.wait({self._task}, timeout=_END_GRACE_S)
        if not done:
            await self.abort()

    async def abort(self) -> None:
        self._closing = True
        if self._call is not None:
            self._call.abort()
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        give_up_at = self._loop.time() + self._rpc.retry_for_s
        while not self._closing:
            error: PostdateError = Unavailable("the broker ended the stream")
            try:
                self._call = await self._rpc.open_subscribe(self._topic)
                await self._converse(self._call)
            except PostdateError as raised:
                error = raised
            finally:
                self._call = None
            self._rpc.owner(self._topic).doubt(error)
            if self._closing:
                return
            if self._draining:
                error = Unavailable("the broker is draining")
                give_up_at = self._loop.time() + self._rpc.retry_for_s
            # A subscription that was open once is waited for as long as it takes: consumers are
            # long-lived, and the broker keeps what is theirs. The first time, somebody waits.
            left_s = math.inf if self._opened_once else give_up_at - self._loop.time()
            pause_s = self._backoff.next_within(left_s, error.retry_after)
            if pause_s is None or self._hopeless(error):
                self._peer.failed(error)
                return
            _log.debug("subscription disconnected", extra={"cause": error.message, "pause_s": pause_s})
            if not self._opened_once:
                self._rpc.tell_absence(error)
            self._peer.disconnected(Disconnected(f"the connection broke: {error.message}"))
            await asyncio.sleep(pause_s)

    def _hopeless(self, error: PostdateError) -> bool:
        if connection_broke(error):
            return False
        if isinstance(error, TlsFailed):
            return not self._opened_once  # a certificate that ran out is renewed, and workers need no restart
        if self._opened_once and isinstance(error, FailedPrecondition):
            return self._loop.time() - self._last_frame_at > _TAKEN_PATIENCE_S
        if isinstance(error, Unauthenticated):
            # A token that was good and has run out is followed by another, where there is a source of them.
            return not (self._was_opened and self._rpc.credentials.can_renew)
        return True

    async def _converse(self, call: SubscribeCall) -> None:
        self._draining = self._was_opened = False
        self._last_frame_at = self._loop.time()
        if self._rpc.owner(self._topic).is_watched:
            call.accompany(self._look_around(), "postdate-subscribe-look")
        try:
            await self._open(call)
            while (response := await call.read()) is not None:
                self._last_frame_at = self._loop.time()
                if self._epoch and self._epoch < self._rpc.owner(self._topic).epoch:
                    raise Disconnected(_OLD_EPOCH)  # what is on its way from there does not count
                self._dispatch(response)
                del response  # or what it brought would be kept until others come
        finally:
            await call.end()

    async def _open(self, call: SubscribeCall) -> None:
        if not await call.write(self._peer.open_frame()):
            await call.read()  # raises what ended the call
            raise Disconnected("the broker ended the stream before it began")
        first = await call.read()
        if first is None or isinstance(first, Deliveries) or not first.HasField("opened"):
            raise Internal("the broker's first frame is not `opened`")
        if not self._rpc.owner(self._topic).believes(first.opened.epoch):
            raise Disconnected(_OLD_EPOCH)
        self._epoch = first.opened.epoch
        self._last_frame_at = self._loop.time()
        self._opened_once = self._was_opened = True
        self._rpc.heard()
        self._backoff.succeeded()
        self._peer.opened(first.opened)
        silence_s = max(_SILENCE_MIN_S, first.opened.heartbeat_ms / 1000 * _SILENCE_HEARTBEATS)
        call.accompany(self._write(call), "postdate-subscribe-writer")
        call.accompany(self._watch(call, silence_s), "postdate-subscribe-watch")

    def _dispatch(self, response: consumer_pb2.SubscribeResponse | Deliveries) -> None:
        if isinstance(response, Deliveries):
            if not self._draining:  # sent before the broker changed its mind; it will be sent anew
                self._peer.arrived(response)
            return
        kind = response.WhichOneof("frame")
        if kind == "confirmed":
            self._peer.confirmed(response.confirmed)
        elif kind == "draining":
            self._draining = True
            self._peer.draining()
            self._work.set()
        # A heartbeat has done its work by arriving. Frames of a later version are not for us.

    async def _write(self, call: SubscribeCall) -> None:
        while True:
            while (frame := self._peer.next_frame()) is not None:
                if not await call.write(frame):
                    return
            if self._closing or self._draining:
                # The broker ends the call once it has confirmed everything; `_run` goes on from there.
                await call.half_close()
                return
            self._work.clear()
            await self._work.wait()

    async def _watch(self, call: SubscribeCall, silence_s: float) -> None:
        while True:
            left_s = self._last_frame_at + silence_s - self._loop.time()
            if left_s <= 0:
                call.abort(f"the broker was silent for {silence_s:.0f} s")
                return
            await asyncio.sleep(left_s)

    async def _look_around(self) -> None:
        """Ask others while the broker is silent: they know of a later owner long before this one is taken for dead."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._last_frame_at + _LOOK_S <= self._loop.time():
                await self._rpc.owner(self._topic).look()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            if not self._closing:  # the client closed the channel under us: nobody may wait for more
                self._peer.failed(Closed("the client is closed"))
            return
        fault = task.exception()
        if fault is not None:
            _log.error("the subscription's task failed; this is a bug", exc_info=fault)
            self._peer.failed(Internal(f"the subscription's task failed: {fault!r}"))
