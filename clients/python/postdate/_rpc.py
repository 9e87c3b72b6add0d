"""The connection to one broker, or to the owner among several: a channel, its calls, and how they fail and retry.

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
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import grpc
import grpc.aio
from google.protobuf.message import Message as Proto

from postdate._backoff import Backoff
from postdate._routes import Routes
from postdate._status import connection_broke, error_from_rpc
from postdate.credentials import Credentials, split_addresses
from postdate.errors import (
    Closed,
    DeadlineExceeded,
    Disconnected,
    PostdateError,
    TlsFailed,
    Unavailable,
    Unsupported,
)
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
_ASK_S = 2.0  # one node for its cluster
_LOOK_S = 3.0  # without an answer, before another node is asked whether it knows a later owner
_BACKOFF_S = 0.5  # the longest between attempts to reach an owner: somebody takes over within seconds
_DIRECT = (
    "postdate-direct",
    "1",
)  # asks a node that is not the owner to say so instead of passing the call on
_ANSWER_BYTES_MAX = 64 * 1024 * 1024

_NOTHING_DONE = {"RECOVERING", "DRAINING", "INDEX_NOT_BUILT", "SCHEDULE_KEYS_UNAVAILABLE", "NOT_OWNER"}
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

_MOVED = "another node owns the shard now"

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


class Connection:
    """A channel to one node, and what it carries."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self.epoch = 0  # of the owner, when it was found
        self.channel: Any = credentials.open_channel(_CHANNEL_OPTIONS, address)
        self.streams: WeakSet[Stream[Any, Any]] = WeakSet()
        self.left: asyncio.Event = asyncio.Event()
        """Set once another node is known to own the shard."""
        self.producer: Any = _stub(producer_pb2_grpc.ProducerServiceStub, self.channel)
        self.consumer: Any = _stub(consumer_pb2_grpc.ConsumerServiceStub, self.channel)
        self.admin: Any = _stub(admin_pb2_grpc.AdminServiceStub, self.channel)
        self.schedule: Any = _stub(schedule_pb2_grpc.ScheduleServiceStub, self.channel)

    def leave(self) -> None:
        """End all streams and calls: nothing that this node says counts any more."""
        self.left.set()
        for stream in tuple(self.streams):
            stream.abort(_MOVED)


class Service:
    """The methods of one service, on whichever connection there is when one is called."""

    def __init__(self, rpc: Rpc, name: str) -> None:
        self._rpc = rpc
        self._name = name

    def __getattr__(self, method: str) -> Any:
        def call(request: Any, /, **how: Any) -> Any:
            return getattr(getattr(self._rpc.connection, self._name), method)(request, **how)

        return call


class Rpc:
    """The calls of one broker, or of the owner among the nodes of a cluster.

    With one address all calls go there, whether it is a broker, a node that passes them on, or what balances load
    between nodes. With several, or once a node has answered NOT_OWNER, the owner is looked for, and again whenever
    it is in doubt: after a call that failed, at the end of a stream, and where an answer does not come.
    """

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
        addresses = split_addresses(address)
        self._routes = Routes(addresses, self._ask)
        self.is_routed: bool = len(addresses) > 1
        """True where the owner is looked for."""
        self._in_doubt = self.is_routed
        self._finding: asyncio.Task[None] | None = None
        self._looked_at = 0.0
        self._closing: set[asyncio.Future[Any]] = set()
        self.connection: Connection = Connection(addresses[0], self.credentials)
        _open_channels[os.getpid()] += 1
        self._closed = False
        self.consumer: Any = Service(self, "consumer")
        self.admin: Any = Service(self, "admin")
        self.schedule: Any = Service(self, "schedule")

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def epoch(self) -> int:
        """The highest epoch that was seen; what an owner of a lower one sends does not count."""
        return self._routes.epoch

    def backoff(self) -> Backoff:
        return Backoff(self._rng, longest_s=_BACKOFF_S) if self.is_routed else Backoff(self._rng)

    async def open_produce(self) -> Stream[producer_pb2.ProduceRequest, producer_pb2.ProduceResponse]:
        return await self._open("producer", "ProduceStream")

    async def open_subscribe(self) -> Stream[consumer_pb2.SubscribeRequest, consumer_pb2.SubscribeResponse]:
        return await self._open("consumer", "Subscribe")

    def believes(self, epoch: int) -> bool:
        """Tell whether an owner of this epoch may be believed, and remember it if so."""
        if epoch < self._routes.epoch:  # also 0: a broker without a cluster
            self._in_doubt = self.is_routed
            return False
        self._routes.epoch = max(self._routes.epoch, epoch)
        return True

    def doubt(self, error: PostdateError) -> None:
        """Note that a call or stream has failed, or that its broker cannot serve now: look for the owner again."""
        if error.reason == "NOT_OWNER" and (address := error.metadata.get("owner_address")):
            epoch = error.metadata.get("epoch", "")
            self._routes.learn((*self._routes.addresses, address), int(epoch) if epoch.isdecimal() else 0)
            self.is_routed = True
        if not self.is_routed or self._closed:
            return
        self._in_doubt = True
        if self.connection.streams:
            self._keep(asyncio.ensure_future(self.look()))

    async def look(self) -> None:
        """Ask another node whether it knows a later owner, unless that was asked just now; go there if it does."""
        loop = asyncio.get_running_loop()
        if not self.is_routed or self._closed or loop.time() < self._looked_at + _LOOK_S:
            return
        self._looked_at = loop.time()
        if await self._routes.has_moved(self.connection.address) and not self._closed:
            self._in_doubt = True
            with suppress(PostdateError):
                await self._follow()

    async def _open(self, service: str, method: str) -> Stream[Any, Any]:
        self._check_open()
        await self._follow()
        self._check_open()
        connection = self.connection
        stream = Stream[Any, Any](getattr(getattr(connection, service), method)(metadata=self._metadata()))
        connection.streams.add(stream)
        return stream

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        metadata = self.credentials.metadata()
        return (*metadata, _DIRECT) if self.is_routed else metadata

    async def _follow(self) -> None:
        """Go to the owner, if it is in doubt who that is. Raises PostdateError if nobody knows."""
        if self.is_routed and self.connection.channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._in_doubt = True  # nobody knows who will be at that address
        if not self._in_doubt:
            return
        if self._finding is None:
            self._finding = asyncio.ensure_future(self._find())
            self._keep(self._finding)
        await asyncio.shield(self._finding)

    async def _find(self) -> None:
        try:
            route = await self._routes.find()
            if self._closed:
                return
            before = self.connection
            if route.address != before.address:
                self.connection = Connection(route.address, self.credentials)
                before.leave()
                self._keep(asyncio.ensure_future(before.channel.close(None)))
            elif route.epoch > before.epoch > 0:
                before.leave()  # it lost the shard and owns it again: what it said before does not count
                before.left = asyncio.Event()
            self.connection.epoch = route.epoch
            self._in_doubt = False
        except ValueError as error:  # the token must not be sent there
            raise Unavailable(str(error), code="UNAVAILABLE") from error
        finally:
            self._finding = None

    async def _ask(self, address: str) -> admin_pb2.GetClusterResponse:
        """Ask one node for its cluster."""
        here = self.connection
        try:
            connection = here if address == here.address else Connection(address, self.credentials)
        except ValueError as refusal:  # the token must not be sent there
            raise Unavailable(str(refusal), code="UNAVAILABLE") from refusal
        try:
            response: admin_pb2.GetClusterResponse = await connection.admin.GetCluster(
                admin_pb2.GetClusterRequest(), timeout=_ASK_S, metadata=self._metadata()
            )
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if isinstance(error, Unsupported):
                return admin_pb2.GetClusterResponse()  # it is too old to be in a cluster
            if isinstance(error, DeadlineExceeded):
                raise Unavailable(f"no answer from {address}", code="UNAVAILABLE") from rpc_error
            raise error from rpc_error
        finally:
            if connection is not here:
                await connection.channel.close(None)
        return response

    def _keep(self, task: asyncio.Future[Any]) -> None:
        """Keep a task of this client until it is done; what it raises is for those who wait for it."""
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

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
            is_sent = False
            cause: BaseException | None = None
            try:
                await self._follow()
                if once:
                    await self._connected(give_up_at)
                self._check_open()
                is_sent = True
                return await self._answer(
                    method(request, timeout=_CALL_TIMEOUT_S + wait_s, metadata=self._metadata())
                )
            except grpc.aio.AioRpcError as rpc_error:
                error, cause = error_from_rpc(rpc_error), rpc_error
            except PostdateError as raised:
                if not self.is_routed or self._closed:
                    raise
                error, cause = raised, raised.__cause__
            if connection_broke(error):
                self.doubt(error)
            nothing_done = not is_sent or error.reason in _NOTHING_DONE or error.message.startswith(_NOT_SENT)
            if once and connection_broke(error) and not nothing_done:
                raise _in_doubt(error) from cause
            pause_s = backoff.next_within(give_up_at - loop.time(), error.retry_after)
            if not isinstance(error, Unavailable) or pause_s is None:
                raise error from cause
            await asyncio.sleep(pause_s)

    async def _answer(self, call: Awaitable[ResponseT]) -> ResponseT:
        """Return the answer of a call. Where the owner may be another one meanwhile, others are asked now and then."""
        if not self.is_routed:
            return await call
        connection = self.connection
        answer, left = asyncio.ensure_future(call), asyncio.ensure_future(connection.left.wait())
        try:
            while not answer.done():
                await asyncio.wait({answer, left}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if left.done() and (not answer.done() or answer.cancelled()):
                    raise Unavailable(_MOVED, code="UNAVAILABLE", reason="OWNER_UNREACHABLE")
                if not answer.done():
                    await self.look()
            return await answer
        finally:
            answer.cancel()
            left.cancel()

    async def _connected(self, give_up_at: float) -> None:
        """Return once there is a connection: until then a request surely was not sent."""
        ready, failing = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
        loop = asyncio.get_running_loop()
        if self.is_routed:
            give_up_at = min(give_up_at, loop.time() + _CONNECT_S)  # another one may own the shard by then
        channel = self.connection.channel
        while (state := channel.get_state(try_to_connect=True)) is not ready:
            if state is failing:
                await self._check_trust()
            # An attempt under way is awaited; gRPC ends it in time.
            until = give_up_at if state is failing else max(give_up_at, loop.time() + _CONNECT_S)
            try:
                async with asyncio.timeout_at(until):
                    await channel.wait_for_state_change(state)
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
            await self.connection.channel.close(None)
            for task in tuple(self._closing):
                task.cancel()
                await asyncio.wait({task})
        finally:  # also if it is cancelled: there is no second try, and a child would take this channel for open
            _open_channels[os.getpid()] -= 1
            # gRPC's thread goes with the last channel that somebody can reach, and no process with it can fork.
            del self.connection
            global _closed_at  # noqa: PLW0603
            _closed_at = time.monotonic()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the client of {self.address} is closed")


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
