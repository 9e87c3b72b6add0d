"""Changes that are made once for each request_id, however often they are asked for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from broker.errors import InvalidRequest
from broker.runtime.clock import Clock

_REMEMBERED_MS = 600_000
_REMEMBERED_MAX = 10_000
_REQUEST_ID_MAX = 255

R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a request with a request_id, perhaps still on its way."""

    until_ms: int  # on the monotonic clock
    request: Message
    response: asyncio.Future[Any]


class Answers:
    """The answers given to requests with a request_id in the last minutes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answers: OrderedDict[tuple[str, str, str], _Answer] = OrderedDict()

    async def once(self, topic: str, request: Any, call: Callable[[], Awaitable[R]]) -> R:
        """Make a change once for each request_id: a repeat gets the first answer, also while that is on its way."""
        if not request.request_id:
            return await call()
        if len(request.request_id) > _REQUEST_ID_MAX:
            raise InvalidRequest(
                f"request_id is at most {_REQUEST_ID_MAX} characters",
                field="request_id",
                reason="INVALID_REQUEST_ID",
            )
        now_ms = self._clock.monotonic_ns() // 1_000_000
        while self._answers and (
            len(self._answers) >= _REMEMBERED_MAX or next(iter(self._answers.values())).until_ms <= now_ms
        ):
            self._answers.popitem(last=False)
        # Ids are a topic's own: two clients that count from 1 must not get each other's answers.
        key = (type(request).__name__, topic, request.request_id)
        known = self._answers.get(key)
        if known is None:
            known = _Answer(now_ms + _REMEMBERED_MS, request, asyncio.ensure_future(call()))
            self._answers[key] = known
        elif known.request != request:
            raise InvalidRequest(
                "This request_id was used for another request", field="request_id", reason="REQUEST_ID_REUSED"
            )
        try:
            return cast("R", await asyncio.shield(known.response))
        except Exception:
            if self._answers.get(key) is known:
                del self._answers[key]  # what failed may be tried again
            raise
