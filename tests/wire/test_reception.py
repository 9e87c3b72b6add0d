"""Calls that begin and do not go on: whoever they are, they keep nobody out, and nothing of them is read too soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from benchmarks.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Raw,
    call,
    connected,
    frame,
    message,
    prefixed,
)
from broker.config import BrokerConfig
from broker.model import Entries
from broker.rpc import decode, reception
from broker.rpc.access_rules import RULES, Right
from broker.subscriptions import requests
from broker.subscriptions.subscription import Subscription
from postdate_api.v1 import consumer_pb2, producer_pb2
from tests.configs import broker_config
from tests.depth import at_depth
from tests.wire.access_files import Files, bearer
from tests.wire.conftest import (
    Refusal,
    Serve,
    Wire,
    batch,
    eventually,
    on_shared,
    one_for_all,
    refused,
    within,
)
from tools.access_table import least_scope

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
PRODUCE = "/postdate.v1.ProducerService/Produce"
STREAMS_OF_CONNECTION = 250
REQUEST_BYTES = 1 << 20
CALLS_BEFORE = 200
SMALL = {"request_bytes_max": REQUEST_BYTES, "payload_bytes_max": 1 << 16}


@asynccontextmanager
async def squatting(
    wire: Wire, count: int, path: str = PRODUCE, *, begun: bytes = b"", connections: int = 1
) -> AsyncIterator[list[Raw]]:
    """Calls that sent their headers, perhaps the beginning of a message, and no more."""
    async with asyncio.timeout(30):
        raws = []
        for _ in range(connections):
            raw = Raw(*await asyncio.open_connection(*wire.server.grpc_address.rsplit(":", 1)))
            await raw.greet()
            raws.append(raw)
            for number in range(1, 2 * count, 2):
                await raw.send(frame(HEADERS, END_HEADERS, number, call(path)))
                if begun:
                    await raw.send(message(number, begun, of_bytes=REQUEST_BYTES - 100))
    try:
        yield raws
    finally:
        for raw in raws:
            raw.writer.close()


async def healthy(wire: Wire) -> None:
    check = wire.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    answer = await within(check(health_pb2.HealthCheckRequest()))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_strangers_are_refused_by_their_headers_and_take_no_place(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reception, "_SHORT_MAX", 3)
    wire = await serve(**Files(tmp_path).settings)
    async with squatting(wire, STREAMS_OF_CONNECTION, connections=4) as raws:
        for raw in raws:
            for _ in range(STREAMS_OF_CONNECTION):  # each is answered, though it never sent its message
                await raw.until(HEADERS, END_HEADERS | END_STREAM)
        await within(wire.producer.Produce(batch("orders", b"x"), metadata=bearer("shop-secret")))
        await healthy(wire)


async def test_who_has_no_right_at_all_is_refused_by_the_headers(serve: Serve, tmp_path: Path):
    wire = await serve(**Files(tmp_path).settings)
    async with connected(wire.server.grpc_address) as raw:
        headers = call(PRODUCE, [("authorization", "Bearer nobody-secret")])
        await raw.send(frame(HEADERS, END_HEADERS, 1, headers))
        refused = await raw.until(HEADERS, END_HEADERS | END_STREAM)
    assert b"grpc-status\x017" in refused, "PERMISSION_DENIED"
    assert b"token:nobody may not produce any topic" in refused


NEEDED = {
    path: {right for right in Right if least_scope(path, right)}
    for path, rule in RULES.items()
    if rule.of is not None
}
"""Methods whose requests name what they need a right on, and the rights of which one is enough."""


def test_every_method_asks_for_something_by_its_headers():
    assert [path for path, rule in RULES.items() if not rule.always and not rule.is_public] == []


async def test_who_has_none_of_the_rights_that_a_method_needs_is_refused_by_the_headers(
    serve: Serve, tmp_path: Path
):
    """Whatever else they may: without a look at the request, of which nothing was sent."""
    files = Files(tmp_path)
    rights = {right.value for right in Right}
    holders = {path: f"holder{number}" for number, path in enumerate(NEEDED)}
    others = {path: sorted(rights - {each.value for each in needed}) for path, needed in NEEDED.items()}
    files.access(
        "".join(
            f'[[grant]]\nprincipals = ["token:{holders[path]}"]\ntopics = ["*"]\nrights = {held}\n'
            for path, held in others.items()
            if held
        )
    )
    files.tokens(**{name: f"{name}-secret" for name in holders.values()})
    wire = await serve(**files.settings, reflection="on")
    ended = []
    async with connected(wire.server.grpc_address) as raw:
        for number, (path, name) in enumerate(holders.items()):
            headers = call(path, [("authorization", f"Bearer {name}-secret")])
            await raw.send(frame(HEADERS, END_HEADERS, 2 * number + 1, headers))
            ended.append(await raw.until(HEADERS, END_HEADERS | END_STREAM))
    assert len(ended) == len(NEEDED) > 0 and all(ended)


@pytest.mark.parametrize("how", ["Produce", "ProduceStream"])
async def test_messages_for_a_topic_without_a_right_are_not_looked_at(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    """Not even to say that they are wrong: the topic is read, and then the right is asked for."""
    wire = await serve(**Files(tmp_path).settings)
    monkeypatch.setattr(decode, "_decode_messages", None)
    request = batch("payroll", *[b"x"] * 2_000, request_id=5)
    if how == "Produce":
        refusal = await refused(wire.producer.Produce(request, metadata=bearer("shop-secret")))
    else:
        stream = wire.producer.ProduceStream(metadata=bearer("shop-secret"))
        await within(stream.write(request))
        answer = await within(stream.read())
        assert answer.request_id == 5
        refusal = Refusal.of(answer.error)
    assert refusal.reason == "PERMISSION_DENIED"


@pytest.mark.parametrize("path", [PRODUCE, "/postdate.v1.ProducerService/ProduceStream"])
@pytest.mark.parametrize("begun", [b"", bytes(1000)], ids=["headers only", "half a message"])
async def test_calls_that_only_begin_give_way(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, begun: bytes
):
    monkeypatch.setattr(reception, "_SHORT_MAX", 10)
    wire = await serve(streams_max=10, receiving_bytes_max=4 * REQUEST_BYTES, **SMALL)
    async with squatting(wire, 50, path, begun=begun, connections=3):
        for _ in range(5):
            await wire.produce("t", b"x")
            stream = await wire.subscribe("t", "s")
            await stream.close()
        await healthy(wire)


async def test_probes_are_answered_while_others_only_begin_theirs(serve: Serve):
    wire = await serve()
    check = "/grpc.health.v1.Health/Check"
    async with squatting(wire, STREAMS_OF_CONNECTION, check, begun=bytes(1000), connections=3):
        for _ in range(10):
            await healthy(wire)


async def test_probes_wait_for_no_turn_of_calls(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reception, "_TURN_SECONDS_MIN", 60.0)  # no call gives its turn up
    held = []
    hold = reception.Turns._hold

    def note(self: reception.Turns, place: reception.BegunCall, since: float) -> None:
        held.append(place)
        hold(self, place, since)

    monkeypatch.setattr(reception.Turns, "_hold", note)
    wire = await serve(receiving_bytes_max=2 * REQUEST_BYTES, **SMALL)
    assert reception.turns_of(wire.broker.config) == 2
    async with squatting(wire, 1, connections=3):
        await eventually(lambda: len(held) == 2)
        await healthy(wire)


@pytest.mark.parametrize("path", ["/grpc.health.v1.Health/Check", PRODUCE])
async def test_a_flood_on_more_connections_than_turns_keeps_nobody_out(serve: Serve, path: str):
    wire = await serve(receiving_bytes_max=8 * REQUEST_BYTES, **SMALL)
    connections = 2 + max(reception.turns_of(wire.broker.config), reception._PROBE_TURNS)

    async def go_on(raws: list[Raw]) -> None:
        for number in range(3, 2 * STREAMS_OF_CONNECTION, 2):
            for raw in raws:
                await raw.send(frame(HEADERS, END_HEADERS, number, call(path)))
            await asyncio.sleep(0.02)  # so that the newest call is a stranger's at any time

    wanted = at_depth(change=2, deep=4)
    async with squatting(wire, 1, path, connections=connections) as raws:
        going = asyncio.create_task(go_on(raws))
        answered = 0
        async with asyncio.timeout(30):
            while answered < wanted and not going.done():
                await healthy(wire)
                await wire.produce("t", b"x")
                answered += not going.done()
        going.cancel()
        assert answered  # on a slow machine the flood may end before all of them are


async def test_streams_take_no_place_of_calls_and_are_bounded(serve: Serve):
    wire = await serve(streams_max=2)
    streams = [await wire.subscribe("t", f"s{number}") for number in range(2)]
    third = wire.consumer.Subscribe()
    await third.write(consumer_pb2.SubscribeRequest(open=consumer_pb2.Open(topic="t", subscription="s2")))
    refusal = await refused(third.read())
    assert (refusal.code, refusal.reason) == (EXHAUSTED, "TOO_MANY_CALLS")
    assert refusal.metadata["limit"] == "2" and refusal.retry_ms
    await wire.produce("t", b"x")
    await healthy(wire)
    await streams[0].close()
    async with asyncio.timeout(10):  # a client knows that its stream has ended before its place is free
        while True:
            try:
                again = await wire.subscribe("t", "s0")
                break
            except grpc.aio.AioRpcError as error:
                if error.code() != EXHAUSTED:
                    raise
    await again.close()


async def test_calls_take_no_place_of_probes_and_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reception, "_SHORT_MAX", 2)
    wire = await serve()
    [id_] = await wire.produce("t", b"x")
    stream = await wire.subscribe("t", "s")
    synced = asyncio.Event()
    begun = 0

    async def slowly(subscription: Subscription, entries: Entries) -> requests.Confirmation:
        nonlocal begun
        begun += 1
        await synced.wait()
        return requests.Confirmation([], is_recorded=True)

    monkeypatch.setattr(requests, "acknowledge", slowly)
    acks = [asyncio.create_task(wire.ack("t", [id_])) for _ in range(2)]
    await eventually(lambda: begun == 2)
    refusal = await refused(wire.ack("t", [id_]))
    assert (refusal.code, refusal.reason) == (EXHAUSTED, "TOO_MANY_CALLS")
    await healthy(wire)
    assert await stream.delivery()
    synced.set()
    await asyncio.gather(*acks)


async def test_no_more_messages_arrive_at_once_than_fit(serve: Serve):
    """A call without a turn sends one window and has to wait; with one it sends all."""
    wire = await serve(receiving_bytes_max=2 * REQUEST_BYTES, **SMALL)
    assert reception.turns_of(wire.broker.config) == 2
    async with (
        squatting(wire, 1, begun=bytes(1000)),
        squatting(wire, 1, begun=bytes(1000)),
        connected(wire.server.grpc_address) as third,
    ):
        begin = time.monotonic()
        request = batch("t", b"x").SerializeToString()
        await third.send(frame(HEADERS, END_HEADERS, 1, call(PRODUCE)), message(1, request, ends=True))
        await third.until(DATA)  # the answer: one that had its turn for a second has given way
        assert time.monotonic() - begin < 5


async def test_a_call_without_a_turn_sends_one_window(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reception, "_TURN_SECONDS", 60.0)
    wire = await serve(request_bytes_max=256 << 20, receiving_bytes_max=448 << 20)
    window = reception.window_bytes(wire.broker.config)
    assert window == 112 << 10 and reception.turns_of(wire.broker.config) == 1
    async with (
        squatting(wire, 1, begun=bytes(1000)),
        connected(wire.server.grpc_address, is_honest=True) as raw,
        asyncio.TaskGroup() as tasks,
    ):
        living = tasks.create_task(raw.live())
        uploads = []
        for number in range(1, 9, 2):
            await raw.send(frame(HEADERS, END_HEADERS, number, call(PRODUCE)))
            uploads.append(tasks.create_task(raw.upload(number, prefixed(bytes(5 << 20)))))
        await eventually(lambda: raw.sent_bytes >= 4 * window)
        for _ in range(50):  # of the broker's pings, which come oftener where much arrives, and of time
            await healthy(wire)
        assert raw.sent_bytes < 4 * window + 4_096  # and headers
        assert not any(task.done() for task in (living, *uploads))
        for task in (living, *uploads):
            task.cancel()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow_wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    async with one_for_all(tmp_path_factory, first_message_ms=50, reflection="on") as wire:
        yield wire


@on_shared
@pytest.mark.parametrize("path", sorted(RULES))
async def test_every_method_ends_a_call_that_sends_no_message(slow_wire: Wire, path: str):
    """A method that is served otherwise would be read without limits, before anybody asked who calls."""
    silent: Any = slow_wire.channel.stream_stream(path, None, None)()
    assert (await refused(silent.read())).reason == "FIRST_MESSAGE_LATE"


async def test_call_without_a_message_is_refused(wire: Wire):
    produce = wire.channel.stream_unary(PRODUCE, None, None)

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    refusal = await refused(produce(nothing()))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")


async def test_a_stream_that_began_may_be_silent(serve: Serve):
    wire = await serve(first_message_ms=500)
    stream = await wire.subscribe("t", "s")
    produce = wire.producer.ProduceStream()
    await produce.write(batch("t", b"x"))
    assert (await within(produce.read())).ids
    await asyncio.sleep(0.6)  # longer than a first message may take: that is what is tested
    await produce.write(producer_pb2.ProduceRequest.FromString(batch("t", b"y").SerializeToString()))
    assert (await within(produce.read())).ids
    await stream.close()


def test_the_budget_bounds_the_turns():
    assert reception.turns_of(BrokerConfig()) == 64
    assert reception.turns_of(broker_config(receiving_bytes_max=1 << 20)) == 1


def test_the_budget_bounds_the_windows():
    for memory, window, calls in (
        (1 << 30, 1 << 18, 2_048),
        (16 << 20, 1 << 16, 128),
        (8 << 30, 1 << 18, 16_384),
    ):
        config = broker_config(receiving_bytes_max=memory)
        assert (reception.window_bytes(config), reception.begun_max(config)) == (window, calls)


async def test_a_request_of_empty_messages_is_refused_unparsed(wire: Wire):
    raw = b"\x12\x00" * (wire.broker.config.request_bytes_max // 2 - 100)
    assert (await refused(wire.channel.unary_unary(PRODUCE, None, None)(raw))).reason == "TOO_MANY_FIELDS"
    stream = wire.channel.stream_stream("/postdate.v1.ProducerService/ProduceStream", None, None)()
    await stream.write(raw)
    answer = producer_pb2.ProduceResponse.FromString(await within(stream.read()))
    assert (answer.error.code, answer.request_id) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], 0)


async def test_a_message_is_not_accepted_behind_hundreds_of_calls_of_other_services(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    accepted: list[str] = []
    intercept = reception.Reception.intercept_service

    async def note(self: reception.Reception, continuation: Any, details: Any) -> Any:
        accepted.append(details.method)
        return await intercept(self, continuation, details)

    monkeypatch.setattr(reception.Reception, "intercept_service", note)
    looks = [asyncio.ensure_future(wire.topic_names()) for _ in range(CALLS_BEFORE)]
    await within(wire.produce("t", b"x"))
    await within(asyncio.gather(*looks))
    assert len(accepted) == CALLS_BEFORE + 1
    assert accepted.index(PRODUCE) < CALLS_BEFORE // 4
