"""A consumer over raw stubs: checks what it gets, acknowledges each batch, keeps the permits up."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.client import raw
from benchmarks.client.control import check
from benchmarks.client.wire import Column, Columns, read_frame
from postdate_api.v1 import consumer_pb2, message_pb2

PERMITS = 100_000


class Consumer:
    """One Subscribe stream. Fails when a message is early or comes twice."""

    def __init__(
        self,
        channel: Any,
        subscription: str,
        *,
        topic: str = raw.TOPIC,
        permits: int = PERMITS,
        on_batch: Callable[[Columns, float], None] | None = None,
        early_fails: bool = True,
    ) -> None:
        self.delivered = 0
        self.confirmed = 0
        self.batches = 0
        self.first_at = 0.0
        self.opened = asyncio.Event()
        self._channel = channel
        self._topic = topic
        self._subscription = subscription
        self._permits = permits
        self._ungranted = 0
        self._on_batch = on_batch
        self._early_fails = early_fails
        self._seen: dict[int, npt.NDArray[np.bool_]] = {}
        self._frames: deque[consumer_pb2.SubscribeRequest] = deque()
        self._wake = asyncio.Event()
        self._unconfirmed: dict[int, int] = {}
        self._next_request_id = 1

    async def run(self, count: int, ledgers: dict[int, int] | None = None) -> float:
        """Take and acknowledge `count` messages; returns the `perf_counter` of the last confirmation.

        With `ledgers` they must be exactly the messages of these ledgers, each once.
        """
        call = raw.subscribe_stream(self._channel)
        await call.write(self._open_frame().SerializeToString())
        writer = asyncio.create_task(self._write(call))
        try:
            while self.confirmed < count:
                check(not writer.done(), "the stream cannot be written any more")
                response = await call.read()
                check(response is not raw.EOF, "the broker ended the stream")
                self._take(read_frame(response), time.time() * 1000)
            ended = time.perf_counter()
        finally:
            writer.cancel()
            call.cancel()
        check(self.delivered == count, f"{self.delivered} messages delivered, expected {count}")
        if ledgers is not None:
            self._check_complete(ledgers)
        return ended

    def _open_frame(self) -> consumer_pb2.SubscribeRequest:
        return consumer_pb2.SubscribeRequest(
            open=consumer_pb2.Open(
                topic=self._topic,
                subscription=self._subscription,
                permits=consumer_pb2.Permits(messages=self._permits),
            )
        )

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._frames:
                await call.write(self._frames.popleft().SerializeToString())

    def _take(self, frame: Columns | consumer_pb2.SubscribeResponse, now_ms: float) -> None:
        if isinstance(frame, Columns):
            self._take_batch(frame, now_ms)
            return
        match frame.WhichOneof("frame"):
            case "confirmed":
                failures = frame.confirmed.failures
                check(not failures, f"{len(failures)} acks failed: {failures[:1]}")
                self.confirmed += self._unconfirmed.pop(frame.confirmed.request_id)
            case "opened":
                self.opened.set()
            case "draining":
                check(False, "the broker drains")

    def _take_batch(self, batch: Columns, now_ms: float) -> None:
        if not self.delivered:
            self.first_at = time.perf_counter()
        count = len(batch.entry_ids)
        self.delivered += count
        self.batches += 1
        if self._early_fails:
            early_ms = batch.deliver_at_ms.max() - now_ms
            check(early_ms <= 0, f"a message is {early_ms:.3f} ms early")
        check(int(batch.attempts.max()) == 1, "a message came a second time")
        if self._on_batch is not None:
            self._on_batch(batch, now_ms)
        self._acknowledge(batch)
        self._ungranted += count
        if self._ungranted * 4 >= self._permits:
            permits = consumer_pb2.Permits(messages=self._ungranted)
            self._frames.append(consumer_pb2.SubscribeRequest(permits=permits))
            self._ungranted = 0
        self._wake.set()

    def _acknowledge(self, batch: Columns) -> None:
        ack = consumer_pb2.Ack(request_id=self._next_request_id)
        ledger_ids = batch.ledger_ids
        first = int(ledger_ids[0])
        if (ledger_ids == first).all():
            self._add(ack, first, batch.entry_ids)
        else:
            for ledger_id in np.unique(ledger_ids).tolist():
                self._add(ack, ledger_id, batch.entry_ids[ledger_ids == ledger_id])
        self._unconfirmed[self._next_request_id] = len(ledger_ids)
        self._next_request_id += 1
        self._frames.append(consumer_pb2.SubscribeRequest(ack=ack))

    def _add(self, ack: consumer_pb2.Ack, ledger_id: int, entry_ids: Column) -> None:
        ack.entries.append(message_pb2.EntrySet(ledger_id=ledger_id, entry_ids=entry_ids.tolist()))
        seen = self._seen.get(ledger_id)
        needed = int(entry_ids.max()) + 1
        if seen is None or len(seen) < needed:
            grown = np.zeros(max(1 << 20, 2 * needed), dtype=np.bool_)
            if seen is not None:
                grown[: len(seen)] = seen
            self._seen[ledger_id] = seen = grown
        check(not seen[entry_ids].any(), "a message came twice")
        seen[entry_ids] = True

    def _check_complete(self, ledgers: dict[int, int]) -> None:
        """Delivered are exactly the ids that were given out, each once."""
        check(set(self._seen) == set(ledgers), f"ledgers {sorted(self._seen)}, expected {sorted(ledgers)}")
        for ledger_id, count in ledgers.items():
            seen = self._seen[ledger_id]
            check(
                int(seen.sum()) == count == int(seen[:count].sum()),
                f"ledger {ledger_id}: {int(seen.sum())} different messages delivered, {count} stored",
            )
