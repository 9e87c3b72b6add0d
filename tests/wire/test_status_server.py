"""Behaviour that all calls share: a broker that drains or has failed, bugs that stay inside, health and reflection."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from benchmarks.http2 import END_HEADERS, HEADERS, SETTINGS, connected, frame, message
from benchmarks.http2 import call as http2_call
from broker.errors import Fenced
from broker.rpc import consumer as consumer_rpc
from broker.rpc import producer as producer_rpc
from broker.runtime.vfs import WriteFailed
from broker.server import Server
from broker.storage.local_group_log import LocalGroupLog
from postdate_api.v1 import admin_pb2, consumer_pb2
from tests.configs import broker_config
from tests.moving import moves
from tests.wire.conftest import (
    LIMIT_SECONDS,
    Refusal,
    Serve,
    Wire,
    batch,
    eventually,
    ids_of,
    refused,
    sets,
    within,
)

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
INTERNAL = grpc.StatusCode.INTERNAL
SERVICES = tuple(f"postdate.v1.{each}Service" for each in ("Producer", "Consumer", "Admin", "Schedule"))


async def subscribe_refused(wire: Wire) -> Refusal:
    stream = wire.stream()
    await stream.send(open=consumer_pb2.Open(topic="t", subscription="s"))
    return await stream.refusal()


# What takes on new work. Everything else may go on while the broker drains.
NEW_WORK: dict[str, Callable[[Wire], Awaitable[Refusal]]] = {
    "Produce": lambda wire: refused(wire.producer.Produce(batch("t", b"x"))),
    "Subscribe": subscribe_refused,
    "Receive": lambda wire: refused(wire.receive("t")),
    "CreateTopic": lambda wire: refused(wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="n"))),
    "DeleteTopic": lambda wire: refused(wire.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="t"))),
    "CreateSubscription": lambda wire: refused(
        wire.admin.CreateSubscription(admin_pb2.CreateSubscriptionRequest(topic="t", name="n"))
    ),
    "DeleteSubscription": lambda wire: refused(
        wire.admin.DeleteSubscription(admin_pb2.DeleteSubscriptionRequest(topic="t", name="s"))
    ),
}


# -- draining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", NEW_WORK.values(), ids=NEW_WORK.keys())
async def test_draining_broker_refuses_new_work(wire: Wire, call: Callable[[Wire], Awaitable[Refusal]]):
    await wire.produce("t", b"x")
    await wire.create_subscription("t")
    wire.broker.drain()
    refusal = await call(wire)
    assert (refusal.code, refusal.reason) == (UNAVAILABLE, "DRAINING")
    assert refusal.retry_ms


async def test_draining_broker_answers_on_an_open_produce_stream(wire: Wire):
    call = wire.producer.ProduceStream()
    await within(call.write(batch("t", b"1", request_id=1)))
    assert not (await within(call.read())).HasField("error")
    wire.broker.drain()
    await within(call.write(batch("t", b"2", request_id=2)))
    answer = await within(call.read())
    assert answer.request_id == 2
    refusal = Refusal.of(answer.error)
    assert (refusal.code, refusal.reason, bool(refusal.retry_ms)) == (UNAVAILABLE, "DRAINING", True)


async def test_consumers_are_told_of_the_drain_and_their_acks_still_count(serve: Serve, tmp_path: Any):
    wire = await serve(drain_grace_ms=5_000, data_dir=str(tmp_path / "d"))
    ids = await wire.produce("t", b"1", b"2")
    stream = await wire.subscribe("t")
    await stream.deliveries(2)
    stopping = asyncio.ensure_future(wire.stop())
    draining = await stream.frame("draining")
    assert draining.grace_ms == 5_000
    assert await stream.ack(ids[:1]) == []
    assert await wire.ack("t", ids[1:]) == []
    assert await stream.close() is grpc.StatusCode.OK
    await within(stopping, 3.0)  # all streams have ended: the grace is not waited for
    again = await serve(data_dir=str(tmp_path / "d"))
    last = await again.produce("t", b"3")
    stream = await again.subscribe("t")
    assert ids_of(await stream.deliveries(1)) == last


async def test_streams_that_do_not_end_are_cut_after_the_grace(serve: Serve):
    wire = await serve(drain_grace_ms=100)
    stream = await wire.subscribe("t")
    call = wire.producer.ProduceStream()
    await within(call.write(batch("t", b"1")))
    await within(call.read())
    await within(wire.stop(), 3.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await stream.read() is not None:
            pass
    assert caught.value.code() in (UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_consumer_that_opens_its_stream_before_the_drain_and_its_subscription_after_is_refused(
    wire: Wire,
):
    stream = wire.stream()
    await stream.call.wait_for_connection()
    wire.broker.drain()
    await stream.send(open=consumer_pb2.Open(topic="t", subscription="s"))
    assert (await stream.refusal()).reason == "DRAINING"


async def test_waiting_receive_ends_when_the_broker_stops(serve: Serve):
    wire = await serve(drain_grace_ms=100)
    waiting = asyncio.ensure_future(wire.receive("t", wait_ms=60_000))
    await eventually(lambda: "t" in wire.broker.registry.by_name)
    await within(wire.stop(), 3.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await waiting
    assert caught.value.code() in (UNAVAILABLE, grpc.StatusCode.CANCELLED)


# -- a journal that has failed -----------------------------------------------------------------------------------------


def break_disk(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the disk takes nothing."""

    def failing(*_: Any) -> Any:
        raise WriteFailed(errno.EIO, "Input/output error", "/secret/path")

    monkeypatch.setattr(LocalGroupLog, "append", failing)


async def test_failed_journal_is_unavailable_for_good(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    ids = await wire.produce("t", b"x")
    await wire.create_subscription("t")
    stream = await wire.subscribe("t", "other", initial_position=2)
    break_disk(wire, monkeypatch)
    monkeypatch.setattr(wire.server, "_fail", lambda error: None)
    for _ in range(2):
        refusal = await refused(wire.producer.Produce(batch("t", b"not stored")))
        assert (refusal.code, refusal.reason) == (UNAVAILABLE, "STORAGE_FAILED")
        assert refusal.retry_ms
        assert "secret" not in refusal.message and "rrno" not in refusal.message
    monkeypatch.undo()  # a disk that is well again changes nothing: what was lost is not known
    for name, call in NEW_WORK.items():
        refusal = await call(wire)
        assert (refusal.code, refusal.reason, name) == (UNAVAILABLE, "STORAGE_FAILED", name)
    settling = consumer_pb2.AcknowledgeRequest(topic="t", subscription="s", entries=sets(ids))
    assert (await refused(wire.consumer.Acknowledge(settling))).reason == "STORAGE_FAILED"
    await stream.send(ack=consumer_pb2.Ack(entries=sets(ids)))
    assert (await stream.refusal()).reason == "STORAGE_FAILED"


async def test_failed_journal_is_told_on_the_produce_stream_and_stops_the_broker(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    call = wire.producer.ProduceStream()
    await within(call.write(batch("t", b"1", request_id=1)))
    await within(call.read())
    break_disk(wire, monkeypatch)
    await within(call.write(batch("t", b"2", request_id=2)))
    refusal = Refusal.of((await within(call.read())).error)
    assert (refusal.code, refusal.reason) == (UNAVAILABLE, "STORAGE_FAILED")
    assert wire.server._stop.is_set()


async def test_failed_broker_stops_without_waiting_for_consumers_that_have_left(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    wire = await serve(drain_grace_ms=60_000)
    await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    await stream.delivery()
    break_disk(wire, monkeypatch)
    await refused(wire.producer.Produce(batch("t", b"x")))
    stopping = asyncio.ensure_future(wire.stop())
    await stream.frame("draining")
    stream.cancel()  # what it held cannot be given back any more
    await within(stopping, LIMIT_SECONDS)


# -- bugs --------------------------------------------------------------------------------------------------------------

SECRET = "payload of somebody"


def bug(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError(SECRET)


async def async_bug(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError(SECRET)


def is_sealed(refusal: Refusal, caplog: pytest.LogCaptureFixture) -> None:
    assert (refusal.code, refusal.reason) == (INTERNAL, "INTERNAL")
    error_id = refusal.metadata["error_id"]
    assert error_id in refusal.message
    assert SECRET not in refusal.message and "ZeroDivision" not in refusal.message
    assert any(error_id in str(vars(record)) for record in caplog.records), "the log has the id"


async def test_bug_while_accepting_a_batch_stays_inside(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(producer_rpc, "decode_produce", bug)
    is_sealed(await refused(wire.producer.Produce(batch("t", b"x"))), caplog)
    call = wire.producer.ProduceStream()
    await within(call.write(batch("t", b"x", request_id=5)))
    answer = await within(call.read())
    assert answer.request_id == 5
    is_sealed(Refusal.of(answer.error), caplog)


async def test_bug_after_a_batch_was_stored_stays_inside(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(wire.server, "_fail", lambda error: None)
    await wire.produce("t", b"x")
    call = wire.producer.ProduceStream()
    monkeypatch.setattr(wire.broker.registry.topic("t"), "apply", bug)
    refusal, _ = await asyncio.gather(
        refused(wire.producer.Produce(batch("t", b"x"))), within(call.write(batch("t", b"y")))
    )
    streamed = Refusal.of((await within(call.read())).error)
    for each in (refusal, streamed):
        assert SECRET not in each.message and "ZeroDivision" not in each.message
        assert each.reason in ("INTERNAL", "STORAGE_FAILED")
    assert INTERNAL in (refusal.code, streamed.code)


async def test_bug_while_answering_a_stream_stays_inside(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    call = wire.producer.ProduceStream()
    await within(call.write(batch("t", b"x")))
    await within(call.read())
    monkeypatch.setattr(producer_rpc, "_answer", bug)
    await within(call.write(batch("t", b"x")))
    refusal = await refused(call.read())
    assert (refusal.code, refusal.reason) == (INTERNAL, "INTERNAL")
    assert SECRET not in refusal.message


async def test_bug_in_an_admin_call_stays_inside(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(wire.broker.registry, "create_topic", async_bug)
    is_sealed(await refused(wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="t"))), caplog)


@pytest.mark.parametrize("what", ["open", "frame", "ack", "batch"])
async def test_bug_on_a_subscribe_stream_stays_inside(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
):
    ids = await wire.produce("t", b"x")
    stream = wire.stream()
    if what == "open":
        monkeypatch.setattr(consumer_rpc.ConsumerService, "_resolve", async_bug)
        await stream.send(open=consumer_pb2.Open(topic="t", subscription="s"))
    else:
        await stream.open("t", "s", permits=0)
        if what == "frame":
            monkeypatch.setattr("broker.rpc.session.parse", bug)
        elif what == "ack":
            monkeypatch.setattr("broker.subscriptions.requests.acknowledge", async_bug)
        else:
            monkeypatch.setattr("broker.rpc.session.encode_batch_response", bug)
        await stream.send(ack=consumer_pb2.Ack(entries=sets(ids)))
        if what == "batch":
            await stream.send(permits=consumer_pb2.Permits(messages=1))
            await wire.produce("t", b"y")
    is_sealed(await stream.refusal(), caplog)


async def test_clients_that_vanish_leave_no_errors_in_the_log(wire: Wire, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    ids = await wire.produce("t", *[bytes(100_000)] * 50)
    for i in range(10):
        stream = await wire.subscribe("t", f"s{i % 3}")
        await stream.send(ack=consumer_pb2.Ack(entries=sets(ids)))
        stream.cancel()
        call = wire.producer.ProduceStream()
        await within(call.write(batch("u", bytes(1_000))))
        call.cancel()
        receiving = wire.consumer.Receive(
            consumer_pb2.ReceiveRequest(topic="v", subscription="s", wait_ms=60_000)
        )
        await asyncio.sleep(0.005)
        receiving.cancel()
    topics = wire.broker.registry.topics.values()
    await eventually(lambda: not any(s.consumers for topic in topics for s in topic.subscriptions.values()))
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("service", ["Subscribe", "ProduceStream"])
@pytest.mark.parametrize("raised", [grpc.aio.InternalError, grpc.aio.BaseError])
async def test_write_on_a_stream_that_is_no_more_is_no_bug(
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    service: str,
    raised: type[Exception],
):
    def gone(*_: Any) -> bytes:
        raise raised('Failed "execute_batch"')  # what gRPC's write raises then, or a class below it

    caplog.set_level(logging.WARNING)
    if service == "Subscribe":
        monkeypatch.setattr("broker.rpc.session.encode_batch_response", gone)
        await wire.produce("t", b"x")
        read = (await wire.subscribe("t")).read()
    else:
        monkeypatch.setattr(producer_rpc, "_answer", gone)
        call = wire.producer.ProduceStream()
        await within(call.write(batch("t", b"x")))
        read = call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(read)
    assert caught.value.code() is not INTERNAL
    assert [record.getMessage() for record in caplog.records] == []


async def test_streams_that_are_cut_in_the_middle_of_a_write_leave_no_errors_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
):
    wire = await serve(drain_grace_ms=0)
    await wire.subscribe("t", permits=1000)  # and does not read
    for _ in range(30):
        await wire.produce("t", *[bytes(100_000)] * 10)
    caplog.set_level(logging.WARNING)
    await within(wire.stop())
    await asyncio.sleep(0.05)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [message for message in told if "grace" not in message] == []


# -- health, reflection, HTTP ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", *SERVICES])
async def test_health_follows_the_broker(serve: Serve, service: str):
    wire = await serve(drain_grace_ms=2_000)
    health = health_pb2_grpc.HealthStub(wire.channel)
    request = health_pb2.HealthCheckRequest(service=service)
    assert (await within(health.Check(request))).status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(request)
    assert (await within(watch.read())).status == health_pb2.HealthCheckResponse.SERVING
    stream = await wire.subscribe("t")
    await wire.produce("t", b"keeps the broker draining")
    await stream.delivery()
    stopping = asyncio.ensure_future(wire.stop())
    assert (await within(watch.read())).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await within(health.Check(request))).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()
    await stream.frame("draining")
    await stream.close()
    await within(stopping)


async def test_a_client_that_does_not_read_keeps_health_from_nobody(serve: Serve):
    """One that gives no window for an answer: others hear of the end, and it does not delay the broker's."""
    wire = await serve()
    health = health_pb2_grpc.HealthStub(wire.channel)
    request = health_pb2.HealthCheckRequest()
    no_window = (4).to_bytes(2, "big") + bytes(4)
    async with connected(wire.server.grpc_address) as raw:
        await raw.send(frame(SETTINGS, body=no_window))
        for number in range(1, 21, 2):
            await raw.send(frame(HEADERS, END_HEADERS, number, http2_call("/grpc.health.v1.Health/Watch")))
            await raw.send(message(number, request.SerializeToString(), ends=True))
        await eventually(lambda: len(wire.server._health._watchers) == 10)
        watch = health.Watch(request)
        assert (await within(watch.read())).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.ensure_future(wire.stop())
        assert (await within(watch.read())).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        await within(stopping, 5.0)
    assert not wire.server._health._watchers


async def test_health_of_a_service_that_is_none_is_not_found(wire: Wire):
    health = health_pb2_grpc.HealthStub(wire.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(health.Check(health_pb2.HealthCheckRequest(service="nothing")))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def reflected(
    wire: Wire, version: str = "v1", **request: str
) -> reflection_pb2.ServerReflectionResponse:
    call = wire.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )()
    with suppress(
        grpc.aio.AioRpcError
    ):  # a call that is refused meanwhile takes no message, and reading tells why
        await within(call.write(reflection_pb2.ServerReflectionRequest(**request)))
    answer = await within(call.read())
    call.cancel()
    return answer


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_the_services(wire: Wire, version: str):
    answer = await reflected(wire, version, list_services="")
    listed = {each.name for each in answer.list_services_response.service}
    reflections = {f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")}
    assert {*SERVICES, "grpc.health.v1.Health", *reflections} <= listed
    for service in listed:
        answer = await reflected(wire, version, file_containing_symbol=service)
        files = map(FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
        waiting, pool = {each.name: each for each in files}, DescriptorPool()
        while waiting:  # they come in any order
            ready = [each for each in waiting.values() if not waiting.keys() & set(each.dependency)]
            assert ready, f"{service}: a file is missing, or two need each other"
            for each in ready:
                pool.Add(waiting.pop(each.name))
        described = pool.FindServiceByName(service)
        assert described.methods


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_can_be_switched_off(serve: Serve, version: str):
    wire = await serve(reflection="off")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflected(wire, version, list_services="")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_refusals_are_counted_by_reason(wire: Wire):
    await refused(wire.producer.Produce(batch("a/b", b"x")))
    call = wire.producer.ProduceStream()
    await within(call.write(batch("a/b", b"x")))
    await within(call.read())
    text = (await wire.server._http._render_metrics()).decode()
    [line] = [line for line in text.splitlines() if "INVALID_NAME" in line]
    assert line.startswith("postdate_") and line.endswith(" 2.0")


async def test_port_that_is_taken_is_refused(serve: Serve, tmp_path: Any):
    wire = await serve()
    other = Server(
        broker_config(
            data_dir=str(tmp_path / "other"),
            grpc_address=wire.server.grpc_address,
            http_address="127.0.0.1:0",
        )
    )
    with pytest.raises(Fenced) as caught:
        await other.start()
    assert caught.value.reason == "ADDRESS_IN_USE"
    assert wire.server.grpc_address in str(caught.value) and "\n" not in str(caught.value)


async def test_a_refused_request_is_counted_by_its_reason(wire: Wire):
    with moves(wire.broker, "postdate_refused_requests"):
        request = admin_pb2.GetTopicRequest(name="not-there")
        assert (await refused(wire.admin.GetTopic(request))).reason == "TOPIC_NOT_FOUND"
    assert wire.broker.counters.refusals["TOPIC_NOT_FOUND"] == 1
