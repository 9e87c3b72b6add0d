"""A producer that numbers its messages and repeats what was not answered: kill -9 stores nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import grpc

from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2
from tests.process.conftest import LIMIT_SECONDS, SMALL, BrokerProcess, Start

ROUNDS = 2
BATCHES_A_ROUND = 60
Id = tuple[int, int]


class Producer:
    """Sends rising sequence ids; after a kill it begins with what it has no answer for, and a little before that."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.next_id = 1
        self.unanswered: list[tuple[int, int]] = []  # first sequence id and count, in order
        self.answered: dict[int, Id] = {}
        self.duplicates = 0

    async def send(self, broker: BrokerProcess, batches: int, *, held_back: int = 0) -> None:
        """Send until so many batches are answered, or the broker goes away; the last ones are not sent before that."""
        call = broker.producer.ProduceStream()
        begun = [(max(1, first - 5), count + min(5, first - 1)) for first, count in self.unanswered]
        for _ in range(max(0, batches - len(begun))):
            begun.append((self.next_id, self.rng.choice((1, 1, 7, 50))))
            self.next_id += begun[-1][1]
        self.unanswered = list(begun)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            writer = asyncio.ensure_future(self._write(call, begun[: len(begun) - held_back]))
            try:
                async for answer in call:
                    self._note(answer)
                    if not self.unanswered:
                        return
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: grpc.aio.StreamStreamCall, batches: list[tuple[int, int]]) -> None:
        for first, count in batches:
            messages = [
                message_pb2.Message(payload=b"%d" % each, sequence_id=each)
                for each in range(first, first + count)
            ]
            await call.write(
                producer_pb2.ProduceRequest(topic="t", producer_name="p", request_id=first, messages=messages)
            )

    def _note(self, answer: producer_pb2.ProduceResponse) -> None:
        assert not answer.HasField("error"), answer.error
        first, count = self.unanswered.pop(0)
        assert answer.request_id == first
        ids = [(each.ledger_id, each.first_entry_id + i) for each in answer.ids for i in range(each.count)]
        assert len(ids) == count
        self.duplicates += sum(each.count for each in answer.ids if each.duplicate)
        for sequence_id, id_ in enumerate(ids, first):
            assert self.answered.setdefault(sequence_id, id_) == id_, "a repeat was given another id"


async def delivered(broker: BrokerProcess) -> dict[Id, int]:
    """Return sequence ids by message id, up to a last message without one."""
    call = broker.consumer.Subscribe()
    opening = consumer_pb2.Open(
        topic="t", subscription="s", permits=consumer_pb2.Permits(messages=1_000_000), lease_ms=60_000
    )
    await call.write(consumer_pb2.SubscribeRequest(open=opening))
    found: dict[Id, int] = {}
    async with asyncio.timeout(20):
        while 0 not in found.values():
            for each in (await call.read()).batch.deliveries:
                found[each.id.ledger_id, each.id.entry_id] = each.message.sequence_id
    call.cancel()
    return found


async def test_kill_9_and_repeats_store_every_message_once(start: Start, tmp_path: Path):
    producer = Producer(seed=4)
    settings = {"data_dir": str(tmp_path / "d"), **SMALL}
    for _ in range(ROUNDS):
        broker = await (await start(**settings)).serving()
        sending = asyncio.ensure_future(producer.send(broker, BATCHES_A_ROUND, held_back=10))
        answered = len(producer.answered)
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(producer.answered) < answered + 150:
                await asyncio.sleep(0.001)
        await broker.kill()
        await sending
    broker = await (await start(**settings)).serving()
    await producer.send(broker, 0)
    assert not producer.unanswered
    assert producer.duplicates > 0
    last = message_pb2.Message(payload=b"last")
    await broker.producer.Produce(producer_pb2.ProduceRequest(topic="t", messages=[last]))
    found = await delivered(broker)
    assert len(found) == len(producer.answered) + 1, "a message is there twice"
    assert {sequence_id: id_ for id_, sequence_id in found.items() if sequence_id} == producer.answered
    assert sorted(producer.answered) == list(range(1, producer.next_id))
