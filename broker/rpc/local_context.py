"""Calls that did not come by gRPC, served as those that did: behind the same interceptors, by the same handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from broker.rpc.calls import END_OF_STREAM, Handler
from broker.rpc.status import Context

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
Behavior: TypeAlias = Callable[[Any, Context], Awaitable[bytes]]


class LocalContext:
    """The context of a call of one message and one answer: what interceptors and handlers use of gRPC's."""

    def __init__(self, peer: str, message: bytes, metadata: Metadata) -> None:
        self._peer = peer
        self._message: list[bytes] = [message]
        self._metadata = metadata
        self._when_done: list[Callable[[Any], None]] = []
        self.status = 0
        self.details = ""
        self.trailing: Metadata = ()

    async def read(self) -> Any:
        return self._message.pop() if self._message else END_OF_STREAM

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def auth_context(self) -> dict[str, Sequence[bytes]]:
        return {}

    def time_remaining(self) -> float | None:
        return None

    def set_trailing_metadata(self, trailing: Metadata) -> None:
        self.trailing = trailing

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self.status, self.details, self.trailing = code.value[0], details, trailing_metadata
        raise grpc.aio.AbortError("the call was aborted")

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._when_done.append(callback)

    def end(self) -> None:
        """Say that its answer was taken."""
        for callback in self._when_done:
            callback(self)


async def behind(interceptors: Sequence[Any], find: Callable[[str], Handler | None], path: str) -> Behavior:
    """Return what serves a method of one message, behind the interceptors, as gRPC puts them together."""

    async def innermost(details: Any) -> Any:
        return find(details.method)

    continuation: Any = innermost
    for interceptor in reversed(interceptors):
        continuation = partial(interceptor.intercept_service, continuation)
    handler = await continuation(_Details(path))
    behavior: Behavior = handler.stream_unary  # as the reception makes of it
    return behavior


@dataclass(frozen=True, slots=True)
class _Details:
    method: str
    invocation_metadata: Metadata = ()
