"""The connection to one broker: a channel, its calls, and how they fail and retry.

Nothing outside this module and `_status` knows gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message as Proto

from postdate._backoff import Backoff
from postdate._status import connection_broke, error_from_rpc
from postdate.credentials import Credentials
from postdate.errors import Closed, Disconnected, PostdateError, TlsFailed, Unavailable
from postdate_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    producer_pb2,
    producer_pb2_grpc,
    schedule_pb2_grpc,
)

_log = logging.getLogger("postdate")

_CALL_TIMEOUT_S = 30.0
_CONNECT_S = 5.0  # one attempt to connect
_ANSWER_BYTES_MAX = 64 * 1024 * 1024

_NOTHING_DONE = {"RECOVERING", "DRAINING", "INDEX_NOT_BUILT", "SCHEDULE_KEYS_UNAVAILABLE"}
"""Reasons why the broker is unavailable to a request that it has not begun with. Others may come
after a part of the work."""

_NOT_SENT = "failed to connect to all addresses"
"""Text of gRPC for a call that found no connection. It had no server, so it may be made again."""

_open_channels: Counter[int] = Counter()
"""Number of open channels by process: what a child inherits stands under its parent's number."""

_GRPC_THREADS = ("event_engine", "lifeguard", "grpc_global_tim")
"""The threads of gRPC's core, as Linux names them."""
_GRPC_END_S = 1.0

_closed_at = -_GRPC_END_S  # when the last channel was closed

_EOF: Any = vars(grpc.aio)["EOF"]  # which its type stubs leave out

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _ANSWER_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # the broker knows its limit and says it better
    # A silent peer is noticed within 30 s. The broker tolerates pings every 5 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Left alone, a channel waits up to two minutes after a refused connection; callers of this
    # SDK back off themselves. The "minimum" is in truth the time one attempt may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", round(_CONNECT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # One connection a client: otherwise equal channels of a process share one and its flow control.
    ("grpc.use_local_subchannel_pool", 1),
)

RequestT = TypeVar("RequestT", bound=Proto)
ResponseT = TypeVar("ResponseT", bound=Proto)
RowT = TypeVar("RowT")
RequestT_contra = TypeVar("RequestT_contra", bound=Proto, contravariant=True)
ResponseT_co = TypeVar("ResponseT_co", bound=Proto, covariant=True)


class UnaryMethod(Protocol[RequestT_contra, ResponseT_co]):
    def __call__(
        self,
        request: RequestT_contra,
        /,
        *,
        timeout: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> Awaitable[ResponseT_co]: ...


class Stream(Generic[RequestT, ResponseT]):
    """One bidirectional call, with typed errors and an end that can be told from a cancellation."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._abort_cause = ""
        self._companions: set[asyncio.Task[None]] = set()

    async def wait_connected(self) -> None:
        """Return once there is a connection to write to; until then nothing has left."""
        await self._guard(self._call.wait_for_connection)

    async def write(self, request: RequestT) -> bool:
        """Send one frame. False if the call has ended; `read` says why."""
        try:
            await self._guard(self._call.write, request)
        except (asyncio.InvalidStateError, PostdateError):
            return False
        return True

    async def read(self) -> ResponseT | None:
        """The next frame; None once the broker has ended the call well."""
        response = await self._guard(self._call.read)
        return None if response is _EOF else response

    async def half_close(self) -> None:
        """Say that no more will be written."""
        try:
            await self._guard(self._call.done_writing)
        except (asyncio.InvalidStateError, PostdateError):
            return  # it has ended already

    def abort(self, cause: str = "closed") -> None:
        """End the call at once: whoever reads gets `Disconnected` with this cause."""
        self._abort_cause = self._abort_cause or cause
        self._call.cancel()

    def accompany(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task that is part of this call: `end` ends it, and its failure ends the call."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._companions.add(task)
        task.add_done_callback(self._companion_done)

    async def end(self) -> None:
        """End the call, if it has not ended, and its companions."""
        self.abort()
        for task in self._companions:
            task.cancel()
        if self._companions:
            await asyncio.wait(self._companions)

    def _companion_done(self, task: asyncio.Task[None]) -> None:
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            _log.error("a task of a stream failed; this is a bug", exc_info=fault)
            self.abort(f"{task.get_name()} failed: {fault!r}")

    async def _guard(self, operation: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        try:
            return await operation(*args)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            # gRPC raises this also where a call was cancelled by `abort`, not the task that waits.
            task = asyncio.current_task()
            if self._abort_cause and not (task and task.cancelling()):
                raise Disconnected(self._abort_cause) from None
            raise


class Rpc:
    """The calls of one broker."""

    def __init__(
        self,
        address: str,
        *,
        retry_for: timedelta,
        rng: random.Random,
        credentials: Credentials | None = None,
    ) -> None:
        if any(count for pid, count in _open_channels.items() if pid != os.getpid()):
            raise RuntimeError(
                "the process forked while a client of Postdate was open, and gRPC does not survive that: "
                "close clients before a fork, or connect in the children only"
            )
        self.address = address
        self.retry_for_s: float = retry_for.total_seconds()
        self._rng = rng
        self.credentials: Credentials = credentials or Credentials(address)
        self._channel = self.credentials.open_channel(_CHANNEL_OPTIONS)
        _open_channels[os.getpid()] += 1
        self._closed = False
        self._producer: Any = _stub(producer_pb2_grpc.ProducerServiceStub, self._channel)
        self.consumer: Any = _stub(consumer_pb2_grpc.ConsumerServiceStub, self._channel)
        self.admin: Any = _stub(admin_pb2_grpc.AdminServiceStub, self._channel)
        self.schedule: Any = _stub(schedule_pb2_grpc.ScheduleServiceStub, self._channel)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def backoff(self) -> Backoff:
        return Backoff(self._rng)

    def open_produce(self) -> Stream[producer_pb2.ProduceRequest, producer_pb2.ProduceResponse]:
        self._check_open()
        return Stream(self._producer.ProduceStream(metadata=self.credentials.metadata()))

    def open_subscribe(self) -> Stream[consumer_pb2.SubscribeRequest, consumer_pb2.SubscribeResponse]:
        self._check_open()
        return Stream(self.consumer.Subscribe(metadata=self.credentials.metadata()))

    async def call(
        self, method: UnaryMethod[RequestT, ResponseT], request: RequestT, *, wait_s: float = 0.0
    ) -> ResponseT:
        """One unary call, tried again while the broker is unavailable, up to `retry_for`.

        For calls that may be repeated: those that change nothing, an acknowledgement, and a pull, as messages that
        were handed to a lost answer come back when their lease ends.
        """
        return await self._call(method, request, wait_s, once=False)

    async def call_once(
        self, method: UnaryMethod[RequestT, ResponseT], request: RequestT, *, wait_s: float = 0.0
    ) -> ResponseT:
        """One unary call that is not made again where the first one may have had its effect.

        Up to `retry_for` it waits for a connection, and for a broker that says that it has done nothing.
        If the connection breaks later: `Disconnected`. For every change: a broker that restarted has forgotten the
        request id, and a repeat would delete what somebody has made meanwhile, or meet its own effect.
        """
        return await self._call(method, request, wait_s, once=True)

    async def rows(
        self,
        method: UnaryMethod[Any, Any],
        request: Any,
        read: Callable[[Any], Sequence[RowT]],
        *,
        page_size: int,
        limit: int | None = None,
    ) -> AsyncIterator[RowT]:
        """The rows that `read` finds in each page of a call that lists, as the iteration goes on; at most `limit`."""
        if limit is not None and limit < 0:
            raise ValueError("limit is negative")
        left = limit
        while left is None or left > 0:
            request.page_size = page_size if left is None else min(page_size, left)
            response = await self.call(method, request)
            rows = read(response)[:left]
            for row in rows:
                yield row
            if left is not None:
                left -= len(rows)
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token

    async def _call(
        self, method: UnaryMethod[RequestT, ResponseT], request: RequestT, wait_s: float, *, once: bool
    ) -> ResponseT:
        self._check_open()
        backoff = self.backoff()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.retry_for_s
        while True:
            self._check_open()
            if once:
                await self._connected(give_up_at)
            try:
                metadata = self.credentials.metadata()
                return await method(request, timeout=_CALL_TIMEOUT_S + wait_s, metadata=metadata)
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                nothing_done = error.reason in _NOTHING_DONE or error.message.startswith(_NOT_SENT)
                if once and connection_broke(error) and not nothing_done:
                    raise _in_doubt(error) from rpc_error
                pause_s = backoff.next_within(give_up_at - loop.time(), error.retry_after)
                if not isinstance(error, Unavailable) or pause_s is None:
                    raise error from rpc_error
            await asyncio.sleep(pause_s)

    async def _connected(self, give_up_at: float) -> None:
        """Return once there is a connection: until then a request surely was not sent."""
        ready, failing = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
        loop = asyncio.get_running_loop()
        while (state := self._channel.get_state(try_to_connect=True)) is not ready:
            if state is failing:
                await self._check_trust()
            # An attempt under way is awaited; gRPC ends it in time.
            until = give_up_at if state is failing else max(give_up_at, loop.time() + _CONNECT_S)
            try:
                async with asyncio.timeout_at(until):
                    await self._channel.wait_for_state_change(state)
            except TimeoutError:
                raise Unavailable(f"no connection to {self.address}", code="UNAVAILABLE") from None
            self._check_open()

    async def _check_trust(self) -> None:
        """Raise `TlsFailed` if that is why there is no connection: the channel tells calls alone."""
        if not self.credentials.is_encrypted:
            return
        try:
            await self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=_CONNECT_S)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if isinstance(error, TlsFailed):
                raise error from rpc_error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._channel.close(None)
        finally:  # also if it is cancelled: there is no second try, and a child would take this channel for open
            _open_channels[os.getpid()] -= 1
            # gRPC's thread goes with the last channel that somebody can reach, and no process with it can fork.
            self._producer = self.consumer = self.admin = self.schedule = _NoStub()
            del self._channel
            global _closed_at  # noqa: PLW0603
            _closed_at = time.monotonic()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the client of {self.address} is closed")


class _NoStub:
    """In the place of a stub of a closed client: whoever looks a method up is told by the call that it is closed."""

    def __getattr__(self, method: str) -> None:
        return None


def _await_end_of_grpc() -> None:
    """Before a fork: wait until gRPC, which ends some milliseconds after its last channel, holds no lock.

    A child that is forked meanwhile would wait for that lock for ever with its first channel. Other users of gRPC in
    this process keep its threads, so the wait ends with `_GRPC_END_S` after the last channel of ours.
    """
    if _open_channels[os.getpid()]:
        return  # a client of the child refuses
    while time.monotonic() < _closed_at + _GRPC_END_S and _has_grpc_threads():
        time.sleep(0.001)


def _has_grpc_threads() -> bool:
    try:
        return any(
            Path(thread, "comm").read_text().strip() in _GRPC_THREADS for thread in threads_of_process()
        )
    except OSError:  # one of them has just ended
        return True


def threads_of_process() -> list[Path]:
    """The threads of this process; none where the system is not Linux."""
    folder = Path("/proc/self/task")
    return list(folder.iterdir()) if folder.exists() else []


os.register_at_fork(before=_await_end_of_grpc)


def _in_doubt(error: PostdateError) -> Disconnected:
    return Disconnected(
        f"the connection broke before the answer came, so it may have happened or not: {error.message}",
        code=error.code,
        reason=error.reason,
        metadata=error.metadata,
        retry_after=error.retry_after,
    )


def _stub(kind: Callable[..., Any], channel: grpc.aio.Channel) -> Any:
    """A generated stub; the generator writes no types for it."""
    return kind(channel)
