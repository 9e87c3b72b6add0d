"""A connection to one broker: a channel, the streams that it carries, and how they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import grpc
import grpc.aio

from postdate._deliveries import read_response
from postdate._status import error_from_rpc
from postdate.credentials import Credentials
from postdate.errors import Disconnected, PostdateError, Unavailable
from postdate_api.v1 import (
    admin_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    producer_pb2,
    producer_pb2_grpc,
    schedule_pb2_grpc,
)

_log = logging.getLogger("postdate")

CONNECT_S = 5.0
"""Time of one attempt to connect."""
_ANSWER_BYTES_MAX = 64 * 1024 * 1024

_PRODUCE_STREAM = f"/{producer_pb2.DESCRIPTOR.services_by_name['ProducerService'].full_name}/ProduceStream"
_SUBSCRIBE = f"/{consumer_pb2.DESCRIPTOR.services_by_name['ConsumerService'].full_name}/Subscribe"
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
    ("grpc.min_reconnect_backoff_ms", round(CONNECT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # One connection each: otherwise equal channels of a process share one and its flow control.
    ("grpc.use_local_subchannel_pool", 1),
)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


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
        """Raises ValueError where the token must not be sent to that address."""
        self.address = address
        self.epoch = 0  # of the owner, when it was found
        self.channel: Any = credentials.open_channel(_CHANNEL_OPTIONS, address)
        self.streams: WeakSet[Stream[Any, Any]] = WeakSet()
        self.left: asyncio.Event = asyncio.Event()
        """Set once another node is known to own the shard."""
        self.producer: Any = _stub(producer_pb2_grpc.ProducerServiceStub, self.channel)
        # Batches are encoded when they are made, so this takes bytes.
        self.producer.ProduceStream = self.channel.stream_stream(
            _PRODUCE_STREAM,
            request_serializer=None,
            response_deserializer=producer_pb2.ProduceResponse.FromString,
        )
        self.consumer: Any = _stub(consumer_pb2_grpc.ConsumerServiceStub, self.channel)
        # What is delivered is read into columns.
        self.consumer.Subscribe = self.channel.stream_stream(
            _SUBSCRIBE,
            request_serializer=consumer_pb2.SubscribeRequest.SerializeToString,
            response_deserializer=read_response,
        )
        self.admin: Any = _stub(admin_pb2_grpc.AdminServiceStub, self.channel)
        self.schedule: Any = _stub(schedule_pb2_grpc.ScheduleServiceStub, self.channel)

    @property
    def is_ready(self) -> bool:
        return self.channel.get_state() is grpc.ChannelConnectivity.READY

    async def wait_ready(self) -> None:
        """Return once it is connected. Raises Unavailable when an attempt has failed."""
        while (state := self.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise Unavailable(f"no connection to {self.address}", code="UNAVAILABLE")
            await self.channel.wait_for_state_change(state)

    def leave(self, cause: str) -> None:
        """End all streams and calls: nothing that this node says counts any more."""
        self.left.set()
        for stream in tuple(self.streams):
            stream.abort(cause)


def _stub(kind: Callable[..., Any], channel: grpc.aio.Channel) -> Any:
    """A generated stub; the generator writes no types for it."""
    return kind(channel)
