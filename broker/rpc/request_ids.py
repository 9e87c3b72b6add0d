"""Request ids of changes: a change is made once for each, and a repeat gets the first answer.

Answers that were given are forgotten by age, number and bytes, the oldest first. A change that is under way is not, or
a repeat would make it a second time beside the first: where all that are remembered are under way, no more are begun.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from broker.errors import InvalidRequest, LimitReached
from broker.runtime.clock import Clock
from broker.settings import MIB

_REMEMBERED_MS = 600_000
_REMEMBERED_MAX = 10_000
_REMEMBERED_BYTES_MAX = 64 * MIB
_REQUEST_ID_MAX = 255

R = TypeVar("R", bound=Message | bytes)

_Key = tuple[str, str, str]
"""Kind of request, topic, request_id."""


@dataclass(slots=True)
class _Answer:
    """The answer to a request with a request_id, perhaps still on its way."""

    until_ms: int  # on the monotonic clock
    fingerprint: bytes  # of the request, which may name thousands of messages
    response: asyncio.Future[Any]
    response_bytes: int = 0  # once it is there


class RequestIds:
    """The request ids of the last minutes, and the answers that were given to them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answers: OrderedDict[_Key, _Answer] = OrderedDict()
        self._bytes = 0

    async def once(self, topic: str, request: Any, call: Callable[[], Awaitable[R]]) -> R:
        """Make a change once for each request_id: a repeat gets the first answer, also while that is on its way."""
        if not request.request_id:
            return await call()
        check_request_id(request.request_id)
        now_ms = self._now_ms()
        self._forget_old(now_ms)
        # Ids are a topic's own: two clients that count from 1 must not get each other's answers.
        key = (type(request).__name__, topic, request.request_id)
        known = self._answers.get(key)
        fingerprint = _fingerprint(request)
        if known is None:
            self._make_room()
            known = _Answer(now_ms + _REMEMBERED_MS, fingerprint, asyncio.ensure_future(call()))
            self._answers[key] = known
            # Not by who waits for it: everybody may have gone by then.
            known.response.add_done_callback(partial(self._note, key, known))
        elif known.fingerprint != fingerprint:
            raise InvalidRequest(
                "This request_id was used for another request", field="request_id", reason="REQUEST_ID_REUSED"
            )
        return cast("R", await asyncio.shield(known.response))

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000

    def _forget_old(self, now_ms: int) -> None:
        """Forget answers given long ago. Those on their way stay, however long that takes."""
        while self._answers and next(iter(self._answers.values())).until_ms <= now_ms:
            key, oldest = next(iter(self._answers.items()))
            if oldest.response.done():
                self._forget(key)
            else:
                oldest.until_ms = now_ms + _REMEMBERED_MS
                self._answers.move_to_end(key)

    def _make_room(self) -> None:
        """Forget the oldest answer that was given, if there are too many. Raises LimitReached."""
        if len(self._answers) < _REMEMBERED_MAX:
            return
        given = next((key for key, answer in self._answers.items() if answer.response.done()), None)
        if given is None:
            raise LimitReached(
                f"The maximum number of changes with a request_id, {_REMEMBERED_MAX}, is under way",
                reason="TOO_MANY_CALLS",
                limit=_REMEMBERED_MAX,
            )
        self._forget(given)

    def _note(self, key: _Key, answer: _Answer, response: asyncio.Future[Any]) -> None:
        """Weigh an answer that has come; what failed may be tried again."""
        failed = response.cancelled() or response.exception() is not None
        if self._answers.get(key) is not answer:
            return
        if failed:
            self._forget(key)
        else:
            answer.until_ms = self._now_ms() + _REMEMBERED_MS
            self._answers.move_to_end(key)
            self._weigh(answer, response.result())

    def _weigh(self, answer: _Answer, response: Message | bytes) -> None:
        """Count the bytes of an answer, and forget the oldest answers if they are too many."""
        answer.response_bytes = len(response) if isinstance(response, bytes) else response.ByteSize()
        self._bytes += answer.response_bytes
        if self._bytes > _REMEMBERED_BYTES_MAX:
            for key in [key for key, answer in self._answers.items() if answer.response_bytes]:
                self._forget(key)
                if self._bytes <= _REMEMBERED_BYTES_MAX:
                    return

    def _forget(self, key: _Key) -> None:
        self._bytes -= self._answers.pop(key).response_bytes


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequest for one that is too long to be kept."""
    if len(request_id) > _REQUEST_ID_MAX:
        raise InvalidRequest(
            f"request_id is at most {_REQUEST_ID_MAX} characters",
            field="request_id",
            reason="INVALID_REQUEST_ID",
        )


def _fingerprint(request: Message) -> bytes:
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()
