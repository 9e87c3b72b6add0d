"""The part that all services share: calls arrive as bytes, are parsed here, and every failure leaves with a status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from broker.config import BrokerConfig
from broker.errors import InvalidRequest, PostdateError, Unavailable
from broker.folder.broker import Broker
from broker.observe.metrics import BrokerCounters
from broker.rpc.answer_ownership import begin_answer, refusal_as_owner
from broker.rpc.audit_trail import audited, topic_of
from broker.rpc.call_span import begin_span
from broker.rpc.caller import check_request
from broker.rpc.field_counts import check_field_count
from broker.rpc.slow_readers import ending_client
from broker.rpc.status import Context, abort
from broker.runtime.clock import Clock

STATUS_SECONDS = 1.0
"""Seconds for the status of a stream that is ended for not reading to go out, before its connection is cut."""
_UNTRACED = frozenset(("Receive", "GetCluster"))
"""Methods without a span: the length of one is that of a wait, and by the other clients find their way, unasked."""
Request = TypeVar("Request", bound=Message)

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"


class CallHost(Protocol):
    """Host of calls: a broker, or a node that passes them on to one."""

    @property
    def config(self) -> BrokerConfig: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def counters(self) -> BrokerCounters: ...


END_OF_STREAM = grpc.aio.EOF  # type: ignore[attr-defined]  # the type stubs do not know it
"""Mark that reading a stream yields once the other side has half-closed."""


def parse(kind: type[Request], raw: bytes, config: BrokerConfig) -> Request:
    """Parse a request; bytes that are none, or more than one can be, are the caller's mistake, not ours."""
    check_field_count(kind.DESCRIPTOR, raw, config)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(
            f"The request is not a {kind.DESCRIPTOR.name}, or a string in it is not UTF-8",
            reason="MALFORMED_REQUEST",
        ) from error


def unary(
    broker: Broker,
    kind: type[Request],
    call: Callable[[Request], Awaitable[Any]],
    *,
    check: Callable[[bytes], None] | None = None,
) -> Handler:
    """A unary method: see `answering`."""
    return grpc.unary_unary_rpc_method_handler(answering(broker, kind, call, check=check))


def answering(
    broker: Broker,
    kind: type[Request],
    call: Callable[[Request], Awaitable[Any]],
    *,
    check: Callable[[bytes], None] | None = None,
) -> Callable[[bytes, Context], Awaitable[bytes]]:
    """Return what serves a unary method: `call` takes the parsed request and returns a message, or bytes that are one.

    `check` sees the bytes before they are parsed. The answer is told only while the broker owns what it tells of,
    unless the call says that there is no need (`answer_ownership.py`).
    """

    name = kind.DESCRIPTOR.name.removesuffix("Request")
    is_traced = name not in _UNTRACED

    async def handle(raw: bytes, context: Context) -> bytes:
        span = begin_span(name, context) if is_traced else None
        try:
            if check is not None:
                check(raw)
            request = parse(kind, raw, broker.config)
            if span is not None:
                span.note_topic(topic_of(request))
            check_request(request)
            answer = begin_answer()
            response = await audited(broker, context, request, call)
            if answer.needs_ownership:
                broker.ownership.check()  # with no `await` from here to the frame (CLUSTER-10)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if span is not None:
                span.end(error)
            await refuse_as_owner(broker, context, error)
            raise AssertionError("abort returned") from error
        if span is not None:
            span.end()
        return response if isinstance(response, bytes) else bytes(response.SerializeToString())

    return handle


async def refuse_as_owner(broker: Broker, context: Context, error: Exception) -> None:
    """As `refuse`, with a failure that may tell of topics and messages: looked at with no `await` before it is told."""
    await refuse(broker, context, refusal_as_owner(broker.ownership, error))


async def refuse(host: CallHost, context: Context, error: Exception) -> None:
    """End a call with a failure, counted; does not return."""
    if isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError):
        await _refuse_cut(context, error)
    host.counters.refuse(error.reason if isinstance(error, PostdateError) else "INTERNAL")
    await abort(context, error)


async def refuse_unread(host: CallHost, context: Context, error: PostdateError) -> None:
    """End a stream although a message of it is still being written; returns when it no longer is.

    The status goes out behind that message. If the client does not read that far, gRPC would keep both.
    """
    telling = asyncio.create_task(refuse(host, context, error), name="end of a stream")
    try:
        if not (await asyncio.wait({telling}, timeout=STATUS_SECONDS))[0]:
            with ending_client(context):
                await asyncio.wait({telling})
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _refuse_cut(context: Context, error: Exception) -> None:
    """A read or write failed because the stream is no more: the client has vanished, or the broker that stops has cut
    it. That is no bug, and most often there is nobody left to tell. Does not return."""
    try:
        await abort(context, Unavailable("The broker closed the stream"))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from error
