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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message as Proto

from postdate._backoff import Backoff
from postdate._connection import CONNECT_S, Connection, Stream
from postdate._deliveries import Deliveries
from postdate._owner import Owner
from postdate._routes import Routes, count_shards
from postdate._status import connection_broke, error_from_rpc
from postdate._topic_shards import shard_of, topic_of
from postdate._trace import call_metadata
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
    consumer_pb2,
    producer_pb2,
)

_log = logging.getLogger("postdate")

_TURNS_TO_SEND = 2
"""Turns of the loop after which a call that finds its connection has been given to gRPC."""
_CALL_TIMEOUT_S = 30.0
_ASK_S = 2.0  # one node for its cluster
_COUNT_S = 1.0  # for a new stream, while it is asked how many shards there are
_BACKOFF_S = 0.5  # the longest between attempts to reach an owner: somebody takes over within seconds
_DIRECT = (
    "postdate-direct",
    "1",
)  # asks a node that is not the owner to say so instead of passing the call on

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
        connection: Connection,
        timeout: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> Awaitable[ResponseT_co]: ...


class Service:
    """The methods of one service, each to be called on a connection."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        def call(*request: Any, connection: Connection, **how: Any) -> Any:
            return getattr(getattr(connection, self._name), method)(*request, **how)

        return call


class Rpc:
    """The calls of one broker, of a broker with several shards, or of the owners among the nodes of a cluster.

    With one address all calls go there, whether it is a broker, a node that passes them on, or what balances load
    between nodes; those about the topic of one of several shards go to the owner of that one, where it can be reached.
    With several addresses, or once a node has answered NOT_OWNER, owners are looked for, and again whenever they are
    in doubt: after a call that failed, at the end of a stream, and where an answer does not come.
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
        self._addresses = split_addresses(address)
        self.is_routed: bool = len(self._addresses) > 1
        """True where calls go to owners alone."""
        self._keeping: set[asyncio.Future[Any]] = set()
        self._shards = 1
        self._counting: asyncio.Task[None] | None = None
        # A socket is that of one broker, or of one shard, and no place from which others are known.
        self._is_counted = self._addresses[0].startswith("unix:")
        self._count_backoff = Backoff(rng)
        self._count_at = 0.0  # by the loop's clock: when that may be asked again
        self._is_count_late = False  # a stream has waited for it in vain
        self._was_answered = False
        self._may_tell_absence = True  # until somebody was there, or it was told
        connection = Connection(self._addresses[0], self.credentials)
        self.front: Owner = Owner(self, Routes(self._addresses, self._ask), connection)
        self._owners: dict[int, Owner] = {}
        _open_channels[os.getpid()] += 1
        self._closed = False
        self.producer: Any = Service("producer")
        self.consumer: Any = Service("consumer")
        self.admin: Any = Service("admin")
        self.schedule: Any = Service("schedule")

    @property
    def is_closed(self) -> bool:
        return self._closed

    def owner(self, topic: str) -> Owner:
        """Return the owner of a topic; the front where there is one shard, or no topic."""
        shards = self.front.routes.shards if self.is_routed else self._shards
        if shards < 2 or not topic:
            return self.front
        number = shard_of(topic, shards)
        if self.is_routed and number == 0:
            return self.front
        if number not in self._owners:
            self._owners[number] = Owner(self, Routes(self._addresses, self._ask, number))
        return self._owners[number]

    def backoff(self) -> Backoff:
        return Backoff(self._rng, longest_s=_BACKOFF_S) if self.is_routed else Backoff(self._rng)

    async def open_produce(self, topic: str) -> Stream[bytes, producer_pb2.ProduceResponse]:
        return await self._open(self.producer.ProduceStream, topic)

    async def open_subscribe(
        self, topic: str
    ) -> Stream[consumer_pb2.SubscribeRequest, consumer_pb2.SubscribeResponse | Deliveries]:
        return await self._open(self.consumer.Subscribe, topic)

    def forget_shards(self) -> None:
        """Have it asked anew how many shards there are."""
        self._is_counted = self._addresses[0].startswith("unix:")

    async def ask_over(self, connection: Connection) -> admin_pb2.GetClusterResponse:
        """Ask a node for its cluster. Raises PostdateError if it does not answer in time."""
        try:
            response: admin_pb2.GetClusterResponse = await connection.admin.GetCluster(
                admin_pb2.GetClusterRequest(), timeout=_ASK_S, metadata=self._metadata(connection)
            )
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if not isinstance(error, Unavailable | DeadlineExceeded):
                self.heard()
            if isinstance(error, Unsupported):
                return admin_pb2.GetClusterResponse()  # it is too old to be in a cluster
            if isinstance(error, DeadlineExceeded):
                raise Unavailable(f"no answer from {connection.address}", code="UNAVAILABLE") from rpc_error
            raise error from rpc_error
        self.heard()
        return response

    def heard(self) -> None:
        """A broker was there: whatever happens from now on is no absence."""
        self._may_tell_absence = False

    def tell_absence(self, error: PostdateError | None = None) -> None:
        """Warn once of a broker that was not there at the first attempt, or its callers wait without a word."""
        is_refusal = error is not None and (error.reason or not isinstance(error, Unavailable))
        if not self._may_tell_absence or self._was_answered or self._closed or is_refusal:
            return
        self._may_tell_absence = False
        why = f" ({error.message.rpartition(': ')[2].rstrip(']')})" if error is not None else ""
        _log.warning("no connection to %s%s; trying for %g s", self.address, why, self.retry_for_s)

    def keep(self, task: asyncio.Future[Any]) -> None:
        """Keep a task of this client until it is done; what it raises is for those who wait for it."""
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _open(self, method: Any, topic: str) -> Stream[Any, Any]:
        self._check_open()
        await self._count_shards(is_stream=True)
        connection = await self.owner(topic).follow(is_stream=True)
        self._check_open()
        stream = Stream[Any, Any](method(connection=connection, metadata=self._metadata(connection)))
        connection.streams.add(stream)
        return stream

    def _metadata(self, connection: Connection) -> tuple[tuple[str, str], ...]:
        metadata = self.credentials.metadata()
        return (*metadata, _DIRECT) if self._is_direct(connection) else metadata

    def _is_direct(self, connection: Connection) -> bool:
        return self.is_routed or connection is not self.front.connection

    async def _ask(self, address: str) -> admin_pb2.GetClusterResponse:
        """Ask the node at an address for its cluster."""
        here = self.front.connection
        if address == here.address:
            return await self.ask_over(here)
        try:
            connection = Connection(address, self.credentials)
        except ValueError as refusal:  # the token must not be sent there
            raise Unavailable(str(refusal), code="UNAVAILABLE") from refusal
        try:
            return await self.ask_over(connection)
        finally:
            await connection.channel.close(None)

    async def _count_shards(self, *, is_stream: bool) -> None:
        """Have it known how many shards there are. A stream waits a little, in vain but once; a call does not."""
        if self.is_routed and not self.front.routes.shards:
            await self.front.follow()
        if self._is_counted or self.is_routed:
            return
        if self._counting is None:
            if asyncio.get_running_loop().time() < self._count_at:
                return
            self._counting = asyncio.ensure_future(self._ask_for_shards())
            self.keep(self._counting)
        if is_stream and not self._is_count_late:
            _, late = await asyncio.wait({self._counting}, timeout=_COUNT_S)
            self._is_count_late = self._is_count_late or bool(late)

    async def _ask_for_shards(self) -> None:
        try:
            shards = count_shards(await self.ask_over(self.front.connection))
        except Unavailable:
            shards = 0
        except PostdateError:
            shards = 1  # whoever may not ask is passed on
        finally:
            self._counting = None
        if not shards:
            if (
                self.front.connection.is_ready
            ):  # otherwise the question was not sent, and whoever calls waits himself
                self._count_at = asyncio.get_running_loop().time() + self._count_backoff.next_s()
            return
        self._count_backoff.succeeded()
        self._is_count_late = False
        self._is_counted = True
        if shards != self._shards:
            self._shards = shards
            former, self._owners = self._owners, {}
            for owner in former.values():
                owner.leave()

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
        """The rows that `read` finds in each page of a call that lists, as the iteration goes on; at most `limit`.

        From the second page on, the next one is asked for while the rows of one are taken.
        """
        if limit is not None and limit < 0:
            raise ValueError("limit is negative")
        left, is_first = limit, True
        request.page_size = page_size if left is None else min(page_size, left)
        ahead: asyncio.Task[Any] | None = None
        try:
            while left is None or left > 0:
                response = await self._page(method, request, ahead)
                rows = read(response)[:left]
                if left is not None:
                    left -= len(rows)
                    request.page_size = min(page_size, left)
                request.page_token = response.next_page_token
                if request.page_token and left != 0 and not is_first:
                    ahead = asyncio.create_task(self.call(method, request))
                    self.keep(ahead)
                    # Whoever takes the rows of a page in one go lets nothing else run meanwhile.
                    for _ in range(_TURNS_TO_SEND):
                        await asyncio.sleep(0)
                for row in rows:
                    yield row
                if not request.page_token:
                    return
                is_first = False
        finally:
            if ahead is not None:
                ahead.cancel()

    async def _page(
        self, method: UnaryMethod[Any, Any], request: Any, ahead: asyncio.Task[Any] | None
    ) -> Any:
        """The answer to a call that lists, which may have been asked for ahead."""
        if ahead is None or (ahead.done() and (ahead.cancelled() or ahead.exception() is not None)):
            return await self.call(method, request)  # what failed while rows were taken may go well now
        await asyncio.wait({ahead})
        self._check_open()  # which ends what is on its way
        return ahead.result()

    async def _call(
        self, method: UnaryMethod[RequestT, ResponseT], request: RequestT, wait_s: float, *, once: bool
    ) -> ResponseT:
        self._check_open()
        topic = topic_of(request)
        backoff = self.backoff()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.retry_for_s
        while True:
            self._check_open()
            is_sent = False
            cause: BaseException | None = None
            owner, connection = self.front, self.front.connection
            try:
                if self.is_routed or self._was_answered:  # one call alone needs to know nothing of shards
                    await self._count_shards(is_stream=False)
                owner = self.owner(topic)
                connection = await owner.follow()
                if once:
                    await self._connected(connection, give_up_at)
                self._check_open()
                is_sent = True
                answer = await owner.answer(
                    connection,
                    method(
                        request,
                        connection=connection,
                        timeout=_CALL_TIMEOUT_S + wait_s,
                        metadata=(*self._metadata(connection), *call_metadata()),
                    ),
                )
                self._was_answered = True
                return answer
            except grpc.aio.AioRpcError as rpc_error:
                error, cause = error_from_rpc(rpc_error), rpc_error
            except PostdateError as raised:
                if self._closed or not self._is_direct(connection):
                    raise
                error, cause = raised, raised.__cause__
            if connection_broke(error):
                owner.doubt(error)
            nothing_done = not is_sent or error.reason in _NOTHING_DONE or error.message.startswith(_NOT_SENT)
            if once and connection_broke(error) and not nothing_done:
                raise _in_doubt(error) from cause
            pause_s = backoff.next_within(give_up_at - loop.time(), error.retry_after)
            if not isinstance(error, Unavailable) or pause_s is None:
                raise error from cause
            self.tell_absence(error)
            await asyncio.sleep(pause_s)

    async def _connected(self, connection: Connection, give_up_at: float) -> None:
        """Return once there is a connection: until then a request surely was not sent."""
        ready, failing = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
        loop = asyncio.get_running_loop()
        if self._is_direct(connection):
            give_up_at = min(give_up_at, loop.time() + CONNECT_S)  # another one may own the shard by then
        channel = connection.channel
        while (state := channel.get_state(try_to_connect=True)) is not ready:
            if state is failing:
                await self._check_trust(connection)
                if self.retry_for_s:
                    self.tell_absence()
            # An attempt under way is awaited; gRPC ends it in time.
            until = give_up_at if state is failing else max(give_up_at, loop.time() + CONNECT_S)
            try:
                async with asyncio.timeout_at(until):
                    await channel.wait_for_state_change(state)
            except TimeoutError:
                raise Unavailable(f"no connection to {self.address}", code="UNAVAILABLE") from None
            self._check_open()

    async def _check_trust(self, connection: Connection) -> None:
        """Raise `TlsFailed` if that is why there is no connection: the channel tells calls alone."""
        if not self.credentials.is_encrypted:
            return
        try:
            await connection.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=CONNECT_S)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if isinstance(error, TlsFailed):
                raise error from rpc_error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        owners = (self.front, *self._owners.values())
        try:
            for owner in owners:
                await owner.close()
            while self._keeping:
                task = next(iter(self._keeping))
                task.cancel()
                await asyncio.wait({task})
                self._keeping.discard(task)
        finally:  # also if it is cancelled: there is no second try, and a child would take this channel for open
            _open_channels[os.getpid()] -= 1
            # gRPC's thread goes with the last channel that somebody can reach, and no process with it can fork.
            for owner in owners:
                owner.forget()
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
