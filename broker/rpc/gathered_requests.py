"""Requests of a produce stream that gather while earlier ones are on their way to the disk, to be taken together.

To decode, plan, write and apply a request costs about as much for ten messages as for a hundred. So small requests of
one stream that need no look at each become one batch: one record, whose ids are parts of one range. A request that
comes while fewer than `_UNDER_WAY` of its stream are on their way never waits.

Invariants:
  TOGETHER-1  Requests are taken in the order in which they came, each once.
  TOGETHER-2  A stream holds less than `_REQUESTS_MAX` requests and `_STREAM_BYTES_MAX`, and then one request more; all
      streams `bytes_max`, and then one request more each. It is not read while it may hold no more. What was taken
      counts until it is submitted and in the queue of answers, for which it may have to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from broker.config import BrokerConfig
from broker.rpc.decode import ProduceEnvelope, read_envelope
from broker.rpc.field_counts import check_field_count
from broker.runtime.signal import Signal
from broker.settings import KIB, MIB
from broker.topics.intake import Accepted

_UNDER_WAY = 2
"""Whoever has fewer on their way may wait for each. What comes beyond that gathers while one record is written: more
records at once would hold fewer requests each."""
_REQUESTS_MAX = 16
_STREAM_BYTES_MAX = 64 * KIB
ALL_BYTES_MAX = 16 * MIB


class GatheredBytes:
    """Bytes that all streams hold together."""

    def __init__(self, bytes_max: int = ALL_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.held = 0


class GatheredRequests:
    """Those of one stream; see the module's description."""

    def __init__(self, of_all: GatheredBytes) -> None:
        self.turn = asyncio.Lock()
        """Held from `take` until what was taken is submitted (TOGETHER-1)."""
        self._of_all = of_all
        self._requests: list[bytes] = []
        self._count = 0  # with those that were taken
        self._size = 0  # of these
        self._under_way = 0  # requests
        self._released = Signal()

    @property
    def may_wait(self) -> bool:
        """Return whether what has gathered, if anything, is to wait for more."""
        return not self._requests or not (
            self._under_way < _UNDER_WAY
            or self._count >= _REQUESTS_MAX
            or self._size >= _STREAM_BYTES_MAX
            or self._of_all.held >= self._of_all.bytes_max
        )

    def add(self, request: bytes) -> None:
        """Add a request. Unless all `may_wait`, they are to be taken before another one is read."""
        self._requests.append(request)
        self._hold(1, len(request))

    @contextmanager
    def taken(self) -> Iterator[list[bytes]]:
        """Take what has gathered; for whoever holds the turn."""
        taken, self._requests = self._requests, []
        count, size = self._count, self._size
        try:
            yield taken
        finally:
            self._hold(-count, -size)

    def close(self) -> None:
        """Let go of what nobody answers any more."""
        self._requests.clear()
        self._hold(-self._count, -self._size)

    def submitted(self, accepted: Accepted | None, count: int = 1) -> None:
        """Note the record of so many requests, which is on its way to the disk; None: it was refused."""
        if accepted is not None and not accepted.durable.done():
            self._under_way += count
            accepted.durable.add_done_callback(partial(self._stored, count))

    async def wait_released(self) -> None:
        """Return once what has gathered may wait no longer, for a record is stored."""
        while self.may_wait:  # which a record that was stored before this was called may have changed already
            self._released.clear()
            await self._released.wait()

    def _hold(self, count: int, size: int) -> None:
        self._count += count
        self._size += size
        self._of_all.held += size

    def _stored(self, count: int, _: asyncio.Future[None]) -> None:
        self._under_way -= count
        if not self.may_wait:
            self._released.set()


@dataclass(frozen=True, slots=True)
class RequestsTogether:
    """Several requests as one: its bytes, its envelope, and what each of them was."""

    raw: bytes
    envelope: Any
    of_each: Sequence[Any]  # envelopes
    counts: Sequence[int]  # of messages


def put_together(requests: Sequence[bytes], config: BrokerConfig) -> RequestsTogether | None:
    """Return requests as one with the messages of all, in order; None if one of them is to be looked at by itself.

    Raises InvalidRequest for what is no request, or has too many fields.
    """
    for raw in requests:
        check_field_count(ProduceEnvelope.DESCRIPTOR, raw, config)
    of_each = [read_envelope(raw) for raw in requests]
    topic = of_each[0].topic
    for envelope in of_each:
        if envelope.topic != topic or envelope.producer_name or envelope.replace or not envelope.messages:
            return None
    # Side by side, requests are one with the messages of all.
    together, counts, count = ProduceEnvelope(), [], 0
    for raw in requests:
        together.MergeFromString(raw)
        counts.append(len(together.messages) - count)
        count += counts[-1]
    together.ClearField("request_id")
    together.ClearField("join_answers")
    return RequestsTogether(together.SerializeToString(), together, of_each, counts)
