"""Postdate: the broker of this checkout, through the SDK and over the raw stream."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import postdate
from benchmarks import processes
from benchmarks.client import raw
from benchmarks.client.control import check
from benchmarks.machine import commit
from benchmarks.peers.peer import Note, Peer
from benchmarks.peers.programs import ROOT
from postdate_api.v1 import message_pb2, producer_pb2

_SUBSCRIPTION = "subscription-0"
_PERMITS = 10_000


class Postdate(Peer):
    """A broker without clusters and shards, as shipped."""

    title = "Postdate"
    answer = "`fdatasync` of the journal returned"
    setup = "as shipped; SDK, and for prepared batches ProduceStream with serialized requests"
    ports_count = 2
    in_flight = 16

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._client: postdate.Client | None = None
        self._producer: postdate.Producer | None = None
        self._channel: Any = None
        self._stream: Any = None
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._unanswered: deque[asyncio.Future[bytes]] = deque()

    @classmethod
    def version(cls) -> str:
        return commit(ROOT)

    def command(self) -> list[str]:
        grpc_port, http_port = self.ports
        return [
            *(sys.executable, "-m", "broker.cli", "serve", "--data-dir", str(self.folder / "data")),
            *("--grpc-address", f"127.0.0.1:{grpc_port}", "--http-address", f"127.0.0.1:{http_port}"),
        ]

    def environment(self) -> dict[str, str]:
        return processes.environment(ROOT)

    def prepare_folder(self) -> None:
        os.makedirs(self.folder)

    async def connect(self) -> None:
        address = f"127.0.0.1:{self.ports[0]}"
        # As the other clients: it fails at once where nobody listens, and is connected again.
        async with postdate.connect(address, retry_for=timedelta(0)) as probe:
            await probe.server_info()
        client = postdate.connect(address)
        await client.open()
        self._client = client
        self._producer = client.producer(raw.TOPIC)
        self._channel = raw.connect(address)

    async def create(self) -> None:
        assert self._client is not None
        await self._client.topics.create(raw.TOPIC)
        await self._client.subscriptions.create(
            raw.TOPIC, _SUBSCRIPTION, initial_position=postdate.InitialPosition.EARLIEST
        )
        assert self._producer is not None
        await self._producer.open()

    async def produce(self, payload: bytes, due_ms: int) -> None:
        assert self._producer is not None
        await self._producer.send(payload, deliver_at=_time(due_ms))

    async def produce_batch(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> None:
        messages = [
            postdate.OutgoingMessage(payload, deliver_at=_time(due))
            for payload, due in zip(payloads, due_ms, strict=True)
        ]
        assert self._producer is not None
        stored = await self._producer.send_many(messages)
        check(len(stored) == len(payloads), "a batch was stored in part")

    async def prepare(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> bytes:
        messages = [
            message_pb2.Message(payload=payload, deliver_at_ms=due)
            for payload, due in zip(payloads, due_ms, strict=True)
        ]
        number = random.getrandbits(32)
        request = producer_pb2.ProduceRequest(
            topic=raw.TOPIC, messages=messages, request_id=number, join_answers=True
        )
        return request.SerializeToString()

    async def produce_prepared(self, prepared: bytes) -> None:
        if self._stream is None:
            self._stream = raw.produce_stream(self._channel)
            self._reader = asyncio.create_task(self._read())
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        async with self._writing:  # one write at a time
            self._unanswered.append(answered)
            await self._stream.write(prepared)
        answer = producer_pb2.ProduceResponse.FromString(await answered)
        check(not answer.HasField("error"), f"a batch was refused: {answer.error.message}")

    async def consume(self, count: int, note: Note) -> None:
        assert self._client is not None
        async with self._client.subscribe(raw.TOPIC, _SUBSCRIPTION, permits=_PERMITS) as subscription:
            while count > 0:
                messages = await subscription.receive_many(_PERMITS, timeout=timedelta(seconds=60))
                check(bool(messages), "nothing was delivered for a minute")
                note([message.payload for message in messages])
                for message in messages:
                    subscription.ack_nowait(message)
                count -= len(messages)
            await subscription.wait_confirmed()

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._channel is not None:
            await self._channel.close()
        if self._producer is not None:
            await self._producer.close()
        if self._client is not None:
            await self._client.close()

    async def _read(self) -> None:
        """Hand out answers, which come in the order of the requests."""
        try:
            while (message := await self._stream.read()) is not raw.EOF:
                for answer in raw.answers_in(message):
                    self._unanswered.popleft().set_result(answer)
            raise AssertionError("the broker ended the stream")
        except Exception as error:
            for waiting in self._unanswered:
                waiting.set_exception(error)


def _time(due_ms: int) -> datetime:
    return datetime.fromtimestamp(due_ms / 1000, UTC)
