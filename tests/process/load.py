"""Producers and consumers that remember what they were promised, over several lives of a broker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import defaultdict

import grpc

from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2
from tests.depth import at_depth
from tests.process.conftest import LIMIT_SECONDS, BrokerProcess

TOPIC = "load"
SUBSCRIPTIONS = ("all", "half")
PAUSE_MS = at_depth(change=60, deep=4)
UNDER_WAY = at_depth(change=600, deep=1_000)
"""With so many answers, and a delivery, a life of a broker is worth being ended."""
EARLIEST = consumer_pb2.INITIAL_POSITION_EARLIEST
Id = tuple[int, int]


def entry_sets(ids: list[Id]) -> list[message_pb2.EntrySet]:
    by_ledger: dict[int, list[int]] = defaultdict(list)
    for ledger_id, entry_id in ids:
        by_ledger[ledger_id].append(entry_id)
    return [
        message_pb2.EntrySet(ledger_id=ledger, entry_ids=entries) for ledger, entries in by_ledger.items()
    ]


class Load:
    """Log of answers, arrivals and confirmations; complaints gather in `violations`."""

    def __init__(
        self, seed: int, *, delay_ms_max: int = 800, pause_ms: int = PAUSE_MS, topic: str = TOPIC
    ) -> None:
        self.rng = random.Random(seed)
        self.topic = topic
        self.delay_ms_max = delay_ms_max
        self.pause_ms = pause_ms  # of a producer between two batches, at most
        self.answered: dict[Id, bytes] = {}
        self.batches: dict[int, int] = {}  # number -> messages
        self.answered_batches: set[int] = set()
        self.payloads: dict[Id, bytes] = {}
        self.delivered: dict[str, set[Id]] = {name: set() for name in SUBSCRIPTIONS}  # in this life
        self.ever: dict[str, set[Id]] = {name: set() for name in SUBSCRIPTIONS}
        self.acked: dict[str, set[Id]] = {
            name: set() for name in SUBSCRIPTIONS
        }  # perhaps durable: both is right
        self.confirmed: dict[str, set[Id]] = {name: set() for name in SUBSCRIPTIONS}
        self.violations: list[str] = []
        self.first_delivery = 0.0
        self.answered_before = 0
        self.drained: set[str] = set()
        self._numbers = itertools.count(1)

    def begin_life(self) -> None:
        self.delivered = {name: set() for name in SUBSCRIPTIONS}
        self.first_delivery = 0.0
        self.answered_before = len(self.answered)

    async def under_way(self, answers: int = UNDER_WAY) -> None:
        """Wait until this life has delivered something and answered so much that it matters if it ends."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while not self.first_delivery or len(self.answered) < self.answered_before + answers:
                await asyncio.sleep(0.005)

    # -- producing -----------------------------------------------------------------------------------------------------

    async def produce(self, broker: BrokerProcess) -> None:
        """Send batches until the broker goes away; an answer is a promise."""
        call = broker.producer.ProduceStream()
        sent: dict[int, list[bytes]] = {}

        async def write() -> None:
            while True:
                number = next(self._numbers)
                count = self.rng.choice((1, 1, 10, 100))
                self.batches[number] = count
                sent[number] = [b"%d.%d" % (number, i) for i in range(count)]
                messages = [self._message(payload) for payload in sent[number]]
                await call.write(
                    producer_pb2.ProduceRequest(topic=self.topic, request_id=number, messages=messages)
                )
                await asyncio.sleep(self.rng.random() * self.pause_ms / 1000)

        writer = asyncio.ensure_future(write())
        try:
            async for response in call:
                if response.HasField("error"):
                    if response.error.code != grpc.StatusCode.UNAVAILABLE.value[0]:
                        self.violations.append(f"refused: {response.error.message}")
                    continue
                [ids] = response.ids
                self.answered_batches.add(response.request_id)
                for i, payload in enumerate(sent.pop(response.request_id)):
                    self._note((ids.ledger_id, ids.first_entry_id + i), payload)
                    self.answered[ids.ledger_id, ids.first_entry_id + i] = payload
        except grpc.aio.AioRpcError:
            pass
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _message(self, payload: bytes) -> message_pb2.Message:
        delay_ms = self.rng.choice((0, 0, 1, self.rng.randrange(1, self.delay_ms_max)))
        return message_pb2.Message(payload=payload, deliver_after_ms=delay_ms)

    # -- consuming -----------------------------------------------------------------------------------------------------

    async def consume(self, broker: BrokerProcess, name: str, *, polite: bool = True) -> None:
        """Take deliveries until the broker goes away; acknowledge all of them, or some."""
        call = broker.consumer.Subscribe()
        waiting: dict[int, list[Id]] = {}
        request_ids = itertools.count(1)
        leaving = False
        with contextlib.suppress(grpc.aio.AioRpcError):
            opening = consumer_pb2.Open(
                topic=self.topic,
                subscription=name,
                initial_position=EARLIEST,
                permits=consumer_pb2.Permits(messages=1_000_000),
            )
            await call.write(consumer_pb2.SubscribeRequest(open=opening))
            async for frame in call:
                kind = frame.WhichOneof("frame")
                if kind == "batch":
                    ids = self._take(name, frame.batch.deliveries)
                    chosen = ids if name == "all" else [id_ for id_ in ids if self.rng.random() < 0.5]
                    if chosen and not leaving:
                        self.acked[name].update(chosen)
                        waiting[number := next(request_ids)] = chosen
                        ack = consumer_pb2.Ack(request_id=number, entries=entry_sets(chosen))
                        await call.write(consumer_pb2.SubscribeRequest(ack=ack))
                elif kind == "confirmed":
                    if frame.confirmed.failures:
                        self.violations.append(f"{name}: acks refused: {frame.confirmed.failures[:2]}")
                    self.confirmed[name].update(waiting.pop(frame.confirmed.request_id))
                elif kind == "draining":
                    self.drained.add(name)
                    if polite:
                        leaving = True
                        await call.done_writing()

    def _take(self, name: str, deliveries: list[consumer_pb2.Delivery]) -> list[Id]:
        self.first_delivery = self.first_delivery or time.monotonic()
        now_ms = time.time_ns() // 1_000_000
        ids = []
        for delivery in deliveries:
            id_ = (delivery.id.ledger_id, delivery.id.entry_id)
            ids.append(id_)
            self._note(id_, delivery.message.payload)
            if delivery.deliver_at_ms > now_ms:
                self.violations.append(f"{name}: {id_} is early")
            if id_ in self.confirmed[name]:
                self.violations.append(f"{name}: {id_} came back after its ack was confirmed")
            if id_ in self.delivered[name]:
                self.violations.append(
                    f"{name}: {id_} came twice in one life, attempt {delivery.delivery_attempt}"
                )
        self.delivered[name].update(ids)
        self.ever[name].update(ids)
        return ids

    def _note(self, id_: Id, payload: bytes) -> None:
        if self.payloads.setdefault(id_, payload) != payload:
            self.violations.append(f"{id_} names {self.payloads[id_]!r} and {payload!r}")

    # -- what must hold ------------------------------------------------------------------------------------------------

    def missing(self, name: str) -> set[Id]:
        """Return what was answered, was never acknowledged and was not delivered in this life."""
        return self.answered.keys() - self.acked[name] - self.delivered[name]

    def torn_batches(self, name: str) -> dict[int, int]:
        """Batches that were never answered, and of which only a part is there."""
        found: dict[int, int] = defaultdict(int)
        for id_ in self.ever[name]:
            found[int(self.payloads[id_].split(b".")[0])] += 1
        return {number: count for number, count in found.items() if count != self.batches[number]}


async def run_for(
    broker: BrokerProcess, load: Load, seconds: float, *, producers: int = 3, polite: bool = True
) -> list[asyncio.Task[None]]:
    """Load a broker, and return a while after it is at work; the tasks end by themselves once the broker goes away."""
    tasks = [asyncio.create_task(load.produce(broker)) for _ in range(producers)]
    tasks += [asyncio.create_task(load.consume(broker, name, polite=polite)) for name in SUBSCRIPTIONS]
    await load.under_way()
    async with asyncio.timeout(LIMIT_SECONDS):
        while not all(load.delivered.values()):
            await asyncio.sleep(0.005)
    await asyncio.sleep(seconds)
    return tasks
