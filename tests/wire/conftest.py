"""A broker in this process on real ports and real files, and what the wire tests say to it.

Whatever a test awaits from the broker has a limit, so that a promise that is not kept fails and does not hang.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from broker.runtime.clock import SystemClock
from broker.server import Server
from postdate_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    message_pb2,
    producer_pb2,
    producer_pb2_grpc,
    schedule_pb2_grpc,
)
from tests.configs import broker_config

LIMIT_SECONDS = 10.0
QUIET_SECONDS = 0.15
"""Time for which nothing must come where nothing may come."""

Id = tuple[int, int]
Message = message_pb2.Message


@dataclass(frozen=True)
class Refusal:
    """A status as the contract has it: a code, one ErrorInfo, and what goes with them."""

    code: grpc.StatusCode
    reason: str
    message: str
    fields: tuple[str, ...]
    metadata: dict[str, str]
    retry_ms: int | None

    @classmethod
    def of(cls, status: status_pb2.Status) -> Refusal:
        info, bad, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        found = {
            any_.TypeName()
            for any_ in status.details
            if any_.Unpack(info) or any_.Unpack(bad) or any_.Unpack(retry)
        }
        assert "google.rpc.ErrorInfo" in found, f"no ErrorInfo: {status}"
        assert info.domain == "postdate.dev"
        return cls(
            code=next(code for code in grpc.StatusCode if code.value[0] == status.code),
            reason=info.reason,
            message=status.message,
            fields=tuple(violation.field for violation in bad.field_violations),
            metadata=dict(info.metadata),
            retry_ms=retry.retry_delay.ToMilliseconds() if "google.rpc.RetryInfo" in found else None,
        )

    @classmethod
    def of_error(cls, error: grpc.aio.AioRpcError) -> Refusal:
        trailers: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
        assert "grpc-status-details-bin" in trailers, f"{error.code()} without details: {error.details()}"
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        assert status.code == error.code().value[0]
        assert status.message == error.details()
        return cls.of(status)


async def within(awaitable: Awaitable[Any], seconds: float = LIMIT_SECONDS) -> Any:
    async with asyncio.timeout(seconds):
        return await awaitable


async def refused(awaitable: Awaitable[Any]) -> Refusal:
    """Return the refusal of a call; an answer is a failure."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        answer = await within(awaitable)
        pytest.fail(f"answered instead: {answer}")
    return Refusal.of_error(caught.value)


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds that no frame tells of."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while not holds():
            await asyncio.sleep(0.002)


class Stream:
    """One Subscribe stream, frame by frame."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.consumer_id = ""
        self.ready: list[consumer_pb2.Delivery] = []
        self._reading: asyncio.Future[Any] | None = None

    async def send(self, **frame: Any) -> None:
        await within(self.call.write(consumer_pb2.SubscribeRequest(**frame)))

    async def open(
        self, topic: str, subscription: str, permits: int = 1000, **fields: Any
    ) -> consumer_pb2.Opened:
        bytes_ = fields.pop("permit_bytes", 0)
        await self.send(
            open=consumer_pb2.Open(
                topic=topic,
                subscription=subscription,
                permits=consumer_pb2.Permits(messages=permits, bytes=bytes_),
                **fields,
            )
        )
        frame = await self.read()
        assert frame.WhichOneof("frame") == "opened", frame
        opened: consumer_pb2.Opened = frame.opened
        self.consumer_id = opened.consumer_id
        return opened

    async def read(self, seconds: float = LIMIT_SECONDS) -> Any:
        """The next frame; None at the end of a stream that ended well."""
        # A read that is cancelled takes the stream with it, so one that found nothing is kept for the next.
        self._reading = self._reading or asyncio.ensure_future(self.call.read())
        frame = await within(asyncio.shield(self._reading), seconds)
        self._reading = None
        return None if frame is grpc.aio.EOF else frame  # type: ignore[attr-defined]

    async def frame(self, kind: str) -> Any:
        """The next frame that is no heartbeat; deliveries that come before another kind are kept."""
        while True:
            frame = await self.read()
            assert frame is not None, f"the stream ended while {kind} was awaited: {await self.call.code()}"
            found = frame.WhichOneof("frame")
            if found == kind:
                return getattr(frame, kind)
            if found == "batch":
                self.ready += frame.batch.deliveries
            else:
                assert found == "heartbeat", f"{found} while {kind} was awaited"

    async def deliveries(self, count: int) -> list[consumer_pb2.Delivery]:
        """The next so many deliveries."""
        while len(self.ready) < count:
            self.ready += (await self.frame("batch")).deliveries
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken

    async def delivery(self) -> consumer_pb2.Delivery:
        return (await self.deliveries(1))[0]

    async def stays_quiet(self, seconds: float = QUIET_SECONDS) -> None:
        """Nothing is delivered for a while."""
        assert not self.ready
        with pytest.raises(TimeoutError):
            pytest.fail(f"came: {await self.read(seconds)}")

    async def ack(self, ids: Iterable[Id], request_id: int = 1) -> list[consumer_pb2.EntryFailure]:
        """Acknowledge, and wait for the confirmation; the failures."""
        await self.send(ack=consumer_pb2.Ack(request_id=request_id, entries=sets(ids)))
        confirmed = await self.frame("confirmed")
        assert confirmed.request_id == request_id
        return list(confirmed.failures)

    async def nack(self, ids: Iterable[Id], **fields: Any) -> list[consumer_pb2.EntryFailure]:
        await self.send(nack=consumer_pb2.Nack(request_id=2, entries=sets(ids), **fields))
        return list((await self.frame("confirmed")).failures)

    async def extend(self, ids: Iterable[Id], lease_ms: int) -> list[consumer_pb2.EntryFailure]:
        await self.send(extend=consumer_pb2.Extend(request_id=3, entries=sets(ids), lease_ms=lease_ms))
        return list((await self.frame("confirmed")).failures)

    async def refusal(self) -> Refusal:
        """Read to the end, which must be a refusal."""

        async def read_on() -> None:
            while await self.read() is not None:
                pass

        return await refused(read_on())

    async def close(self) -> grpc.StatusCode:
        """Half-close and read to the end."""
        await within(self.call.done_writing())
        while (frame := await self.read()) is not None:
            if frame.WhichOneof("frame") == "batch":
                self.ready += frame.batch.deliveries
        code: grpc.StatusCode = await within(self.call.code())
        return code

    def cancel(self) -> None:
        """Vanish, as a killed consumer does."""
        self.call.cancel()


class Wire:
    """A broker, and a channel to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.broker = server.broker
        # A channel of its own each: gRPC shares connections between channels of one process otherwise.
        self.channel = grpc.aio.insecure_channel(
            server.grpc_address,
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)],
        )
        self.producer = producer_pb2_grpc.ProducerServiceStub(self.channel)
        self.consumer = consumer_pb2_grpc.ConsumerServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.schedule = schedule_pb2_grpc.ScheduleServiceStub(self.channel)
        self.streams: list[Stream] = []
        self._stopping: asyncio.Future[None] | None = None

    def raw(self, path: str) -> Any:
        """A unary call that takes bytes."""
        return self.channel.unary_unary(path, None, None)

    def raw_stream(self, path: str) -> Any:
        return self.channel.stream_stream(path, None, None)

    async def produce(self, topic: str, *messages: Message | bytes, **fields: Any) -> list[Id]:
        """Store messages; their ids."""
        response = await within(self.producer.Produce(batch(topic, *messages, **fields)))
        return [(r.ledger_id, r.first_entry_id + i) for r in response.ids for i in range(r.count)]

    def stream(self) -> Stream:
        self.streams.append(Stream(self.consumer.Subscribe()))
        return self.streams[-1]

    def stream_as(self, metadata: Any) -> Stream:
        """A Subscribe stream that shows something."""
        self.streams.append(Stream(self.consumer.Subscribe(metadata=metadata)))
        return self.streams[-1]

    async def subscribe(
        self, topic: str, subscription: str = "s", permits: int = 1000, **fields: Any
    ) -> Stream:
        stream = self.stream()
        await stream.open(topic, subscription, permits, **fields)
        return stream

    async def receive(
        self, topic: str, subscription: str = "s", **fields: Any
    ) -> consumer_pb2.ReceiveResponse:
        request = consumer_pb2.ReceiveRequest(topic=topic, subscription=subscription, **fields)
        response: consumer_pb2.ReceiveResponse = await within(self.consumer.Receive(request))
        return response

    async def ack(
        self, topic: str, ids: Iterable[Id], subscription: str = "s"
    ) -> list[consumer_pb2.EntryFailure]:
        request = consumer_pb2.AcknowledgeRequest(topic=topic, subscription=subscription, entries=sets(ids))
        return list((await within(self.consumer.Acknowledge(request))).failures)

    async def create_subscription(self, topic: str, name: str = "s", **fields: Any) -> None:
        request = admin_pb2.CreateSubscriptionRequest(topic=topic, name=name, **fields)
        await within(self.admin.CreateSubscription(request))

    async def stats(self, topic: str) -> admin_pb2.TopicStats:
        request = admin_pb2.GetStatsRequest(topics=[topic])
        response: admin_pb2.GetStatsResponse = await within(self.admin.GetStats(request))
        return response.topics[0]

    async def topic_names(self) -> list[str]:
        response = await within(self.admin.ListTopics(admin_pb2.ListTopicsRequest(page_size=1000)))
        return [topic.name for topic in response.topics]

    async def stop(self) -> None:
        """Stop the broker, once."""
        self._stopping = self._stopping or asyncio.ensure_future(self.server.stop())
        await asyncio.shield(self._stopping)

    async def disconnect(self) -> None:
        for stream in self.streams:
            stream.cancel()
        await self.channel.close(None)


def batch(topic: str, *messages: Message | bytes, **fields: Any) -> producer_pb2.ProduceRequest:
    typed = [each if isinstance(each, Message) else Message(payload=each) for each in messages]
    return producer_pb2.ProduceRequest(topic=topic, messages=typed, **fields)


def sets(ids: Iterable[Id]) -> list[message_pb2.EntrySet]:
    by_ledger: dict[int, list[int]] = {}
    for ledger_id, entry_id in ids:
        by_ledger.setdefault(ledger_id, []).append(entry_id)
    return [message_pb2.EntrySet(ledger_id=ledger_id, entry_ids=ids) for ledger_id, ids in by_ledger.items()]


def ids_of(deliveries: Iterable[consumer_pb2.Delivery]) -> list[Id]:
    return [(each.id.ledger_id, each.id.entry_id) for each in deliveries]


def failures_of(failures: Iterable[consumer_pb2.EntryFailure]) -> dict[Id, str]:
    return {(each.id.ledger_id, each.id.entry_id): Refusal.of(each.error).reason for each in failures}


def one_other(cases: Sequence[tuple[Any, ...]], type_: Any) -> list[tuple[Any, ...]]:
    """Cases of one type of subscription, which stands last in each, and of each thing that is tried one of another."""
    kept: list[tuple[Any, ...]] = []
    for number, (_, group) in enumerate(itertools.groupby(cases, key=lambda case: case[0])):
        each = list(group)
        others = [case for case in each if case[-1] != type_]
        kept += [*(case for case in each if case[-1] == type_), others[number % len(others)]]
    return kept


def now_ms() -> int:
    return time.time_ns() // 1_000_000


Serve = Callable[..., Awaitable[Wire]]


@pytest.fixture(autouse=True)
def _syncs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here crashes a machine: hundreds of brokers need not wait for its disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts a broker with some settings; all of them are stopped at the end."""
    wires: list[Wire] = []

    async def start(**settings: Any) -> Wire:
        settings.setdefault("data_dir", str(tmp_path / f"data{len(wires)}"))
        settings.setdefault("drain_grace_ms", 200)
        settings.setdefault("disk_reserve_bytes", 0)
        settings.setdefault("journal_segment_bytes", 17 << 20)  # just more than the greatest request
        server = Server(broker_config(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0", **settings))
        await server.start()
        wires.append(Wire(server))
        return wires[-1]

    yield start
    for wire in wires:
        await wire.disconnect()
        await within(wire.stop())
        shutil.rmtree(wire.server.config.data_dir, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One broker for a table of requests that leave no trace. Such tests are marked `on_shared`."""
    async with one_for_all(tmp_path_factory) as wire:
        yield wire


@asynccontextmanager
async def one_for_all(folders: pytest.TempPathFactory, **settings: Any) -> AsyncIterator[Wire]:
    """A broker for several tests."""
    folder = folders.mktemp("shared")
    addresses = {"grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}
    server = Server(broker_config(data_dir=str(folder), drain_grace_ms=0, **addresses, **settings))
    await server.start()
    wire = Wire(server)
    yield wire
    await wire.disconnect()
    await within(wire.stop())
    shutil.rmtree(folder, ignore_errors=True)


on_shared = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
async def wire(serve: Serve) -> Wire:
    """A broker with its defaults."""
    return await serve()


class Ahead:
    """Distance by which the broker's wall clock is ahead."""

    def __init__(self) -> None:
        self.ms = 0

    def step(self, ms: int) -> None:
        self.ms += ms


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    """Steps the clock of every broker of a test: what is due in an hour need not be waited for, nor come too soon."""
    found = Ahead()
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: now_ms() + found.ms)
    return found


@pytest.fixture
async def timed(serve: Serve, ahead: Ahead) -> Wire:
    """A broker that soon notices a step."""
    return await serve(clock_recheck_ms=20)
