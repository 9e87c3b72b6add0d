"""Spans of the broker, as a receiver of OpenTelemetry gets them over HTTP."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

import aiohttp
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from broker.observe import otel_spans
from broker.observe.span_settings import traced
from broker.subscriptions import handout
from postdate_api.v1 import admin_pb2, producer_pb2
from tests.moving import moves, shown
from tests.span_receiver import Receiver, attributes_of
from tests.wire.conftest import Message, Wire, batch, eventually, refused, within

TRACE, PARENT = "ab" * 16, "cd" * 8
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
Traced = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def spans_to(monkeypatch: pytest.MonkeyPatch) -> Traced:
    """Spans are sent to a URL within a block, and all that were made are sent at its end."""

    @contextmanager
    def sent(url: str, *, shard: int | None = None, **variables: str) -> Iterator[None]:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, **variables}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with traced(variables, shard=shard):
            yield

    return sent


async def test_batch_of_a_call_is_a_child_of_the_span_that_its_metadata_names(
    wire: Wire, receiver: Receiver, spans_to: Traced
):
    began_ns = time.time_ns()
    with spans_to(receiver.url):
        request = batch("orders", b"one", Message(payload=b"two", traceparent=f"00-{TRACE}-{'ef' * 8}-01"))
        await within(wire.producer.Produce(request, metadata=(("traceparent", SAMPLED),)))
    [span] = receiver.spans("Produce")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.kind == Span.SPAN_KIND_SERVER
    assert [link.span_id.hex() for link in span.links] == ["ef" * 8]
    found = attributes_of(span)
    assert found.pop("messaging.message.envelope.size") > len("onetwo")
    assert found == {
        "messaging.system": "postdate",
        "messaging.operation.name": "Produce",
        "messaging.destination.name": "orders",
        "messaging.batch.message_count": 2,
    }
    [submitted] = span.events
    assert submitted.name == "submitted"
    times = [began_ns, span.start_time_unix_nano, submitted.time_unix_nano, span.end_time_unix_nano]
    assert times == sorted(times)


async def test_batches_of_a_stream_are_children_of_their_messages_spans(
    wire: Wire, receiver: Receiver, spans_to: Traced
):
    with spans_to(receiver.url):
        # What the stream was opened by, perhaps days ago, is no parent of a batch.
        stream = wire.producer.ProduceStream(metadata=(("traceparent", f"00-{'11' * 16}-{'22' * 8}-01"),))
        for request_id, traceparent in enumerate((SAMPLED, "", "")):
            message = Message(payload=b"x", traceparent=traceparent)
            await within(stream.write(batch("orders", message, request_id=request_id)))
            await within(stream.read())
        refused_batch = producer_pb2.ProduceRequest(topic="orders", messages=[Message(ttl_ms=-1)])
        await within(stream.write(refused_batch))
        answer = await within(stream.read())
        assert answer.HasField("error")
        stream.cancel()
    child, root, other, failed = receiver.spans("Produce")
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE, PARENT)
    assert not root.parent_span_id and not other.parent_span_id
    assert len({child.trace_id, root.trace_id, other.trace_id}) == 3
    assert "11" * 16 not in {span.trace_id.hex() for span in receiver.spans()}
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert failed.status.message == attributes_of(failed)["error.type"] != ""
    assert not failed.events


async def test_calls_over_http_are_in_the_trace_of_their_header(
    wire: Wire, receiver: Receiver, spans_to: Traced
):
    own = f"00-{'11' * 16}-{'22' * 8}-01"
    url = f"http://{wire.server.http_address}/v1"

    async def post(call: str, body: str, traceparent: str) -> None:
        headers = {"Content-Type": "application/json", "traceparent": traceparent}
        async with session.post(f"{url}/{call}", data=body, headers=headers) as response:
            assert response.status == 200, await response.text()

    await wire.create_subscription("orders", "billing")
    async with aiohttp.ClientSession() as session:
        with spans_to(receiver.url):
            messages = f'{{"topic":"orders","messages":[{{}},{{"traceparent":"{own}"}}]}}'
            await within(post("produce", messages, SAMPLED))
            await within(post("list-scheduled", '{"topic":"orders"}', SAMPLED))
            no_trace, no_span = SAMPLED.replace(TRACE, "0" * 32), SAMPLED.replace(PARENT, "0" * 16)
            for malformed in ("nonsense", "ff" + SAMPLED[2:], SAMPLED + "\xe9", no_trace, no_span):
                await within(post("produce", '{"topic":"orders","messages":[{}]}', malformed))
            stream = await wire.subscribe("orders", "billing")
            received = await stream.deliveries(7)
    produced, *others = receiver.spans("Produce")
    [listed] = receiver.spans("ListScheduled")
    assert [each.parent_span_id.hex() for each in (produced, listed)] == [PARENT] * 2
    assert [link.span_id.hex() for link in produced.links] == ["22" * 8]
    assert [each.parent_span_id for each in others] == [b""] * 5
    # A message that says nothing itself is in the trace of the request that brought it.
    assert [each.message.traceparent for each in received] == [SAMPLED, own, *[""] * 5]
    linked = [span.links[0].span_id.hex() for span in receiver.spans("deliver orders")]
    assert linked == [PARENT, "22" * 8]


async def test_sampling_is_the_callers(wire: Wire, receiver: Receiver, spans_to: Traced):
    with spans_to(receiver.url):
        stream = await wire.subscribe("orders")
        await wire.produce("orders", Message(payload=b"not sampled", traceparent=NOT_SAMPLED))
        request = batch("orders", Message(payload=b"sampled", traceparent=SAMPLED))
        await within(wire.producer.Produce(request, metadata=(("traceparent", NOT_SAMPLED),)))
        await stream.deliveries(2)
    assert not receiver.spans("Produce")
    assert len(receiver.spans("deliver orders")) == 1


async def test_nothing_is_sampled_by_the_standard_variable(wire: Wire, receiver: Receiver, spans_to: Traced):
    with spans_to(receiver.url, OTEL_TRACES_SAMPLER="always_off"):
        await wire.produce("orders", Message(payload=b"x", traceparent=SAMPLED))
    assert not receiver.spans()


@pytest.mark.parametrize(
    "traceparent",
    [
        "nonsense",
        "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        SAMPLED.upper(),
        SAMPLED + "-",
        "ff" + SAMPLED[2:],
    ],
)
async def test_malformed_traceparent_is_none(
    wire: Wire, receiver: Receiver, spans_to: Traced, traceparent: str
):
    with spans_to(receiver.url):
        stream = await wire.subscribe("orders")
        request = batch("orders", Message(payload=b"x", traceparent=traceparent))
        await within(wire.producer.Produce(request, metadata=(("traceparent", traceparent),)))
        await stream.deliveries(1)
    [span] = receiver.spans()
    assert span.name == "Produce"
    assert not span.parent_span_id and not span.links


async def test_hand_out_of_a_traced_message_links_to_its_producer(
    wire: Wire, receiver: Receiver, spans_to: Traced
):
    inner = Message(payload=b"x", traceparent=f"00-{'11' * 16}-{'22' * 8}-01").SerializeToString()
    with spans_to(receiver.url):
        await wire.create_subscription("orders", "billing")
        # The payload of the second one holds what looks like the field.
        ids = await wire.produce("orders", Message(payload=b"x", traceparent=SAMPLED), inner, b"plain")
        stream = await wire.subscribe("orders", "billing")
        await stream.deliveries(3)
    [span] = receiver.spans("deliver orders")
    assert not span.parent_span_id
    assert span.trace_id.hex() != TRACE
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in span.links] == [(TRACE, PARENT)]
    found = attributes_of(span)
    assert found.pop("postdate.lateness_ms") >= 0
    assert found == {
        "messaging.system": "postdate",
        "messaging.operation.name": "deliver",
        "messaging.destination.name": "orders",
        "messaging.destination.subscription.name": "billing",
        "messaging.message.id": "{}:{}".format(*ids[0]),
        "postdate.delivery_attempt": 1,
    }


async def test_one_hand_out_has_so_many_spans_at_most(
    wire: Wire, receiver: Receiver, spans_to: Traced, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(handout, "_SPANS_MAX", 3)
    with spans_to(receiver.url):
        await wire.create_subscription("orders")
        await wire.produce("orders", *[Message(payload=b"x", traceparent=SAMPLED)] * 50)
        stream = await wire.subscribe("orders")
        await stream.deliveries(50)
    assert len(receiver.spans("deliver orders")) == 3


async def test_calls_are_spans_and_waits_are_none(wire: Wire, receiver: Receiver, spans_to: Traced):
    with spans_to(receiver.url):
        await wire.create_subscription("orders")
        assert not (await wire.receive("orders", wait_ms=50)).deliveries
        unknown = admin_pb2.GetTopicRequest(name="nowhere")
        call = wire.admin.GetTopic(unknown, metadata=(("traceparent", SAMPLED),))
        await refused(call)
    created, failed = receiver.spans()
    assert created.name == "CreateSubscription"
    assert attributes_of(created)["messaging.destination.name"] == "orders"
    assert created.status.code == created.status.STATUS_CODE_UNSET
    assert failed.name == "GetTopic"
    assert failed.parent_span_id.hex() == PARENT
    assert attributes_of(failed)["messaging.destination.name"] == "nowhere"
    assert attributes_of(failed)["error.type"] == "TOPIC_NOT_FOUND"


async def test_each_process_says_which_one_it_is(wire: Wire, receiver: Receiver, spans_to: Traced):
    with spans_to(receiver.url, shard=3):
        await wire.produce("orders", b"x")
    [found] = receiver.resources()
    assert found["service.name"] == "postdate-broker"
    assert found["postdate.shard"] == 3
    first = found["service.instance.id"]
    receiver.requests.clear()
    named = "service.instance.id=here,deployment.environment=test"
    with spans_to(receiver.url, OTEL_SERVICE_NAME="mine", OTEL_RESOURCE_ATTRIBUTES=named):
        await wire.produce("orders", b"x")
    [found] = receiver.resources()
    assert found["service.name"] == "mine"
    assert found["service.instance.id"] == "here" != first
    assert found["deployment.environment"] == "test"
    assert "postdate.shard" not in found


async def test_spans_that_are_sent_are_counted(wire: Wire, receiver: Receiver, spans_to: Traced):
    with spans_to(receiver.url, OTEL_BSP_SCHEDULE_DELAY="10"), moves(wire.broker, "postdate_spans"):
        await wire.produce("orders", b"x")
        await eventually(lambda: value(wire, "sent") == 1)


def value(wire: Wire, result: str) -> float:
    [sample] = [each for each in shown(wire.broker)["postdate_spans"] if f"'{result}'" in each]
    return float(sample.split("value=")[1].split(",")[0])


async def test_a_receiver_that_is_gone_costs_no_call(wire: Wire, spans_to: Traced):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with spans_to(url, OTEL_BSP_SCHEDULE_DELAY="10", OTEL_EXPORTER_OTLP_TIMEOUT="1"):
            for _ in range(20):
                assert await wire.produce("orders", b"x")
            await eventually(lambda: value(wire, "failed") > 0)
            assert await wire.produce("orders", b"x")
            assert value(wire, "sent") == 0


async def test_a_flood_to_a_receiver_that_hangs_is_bounded_and_so_is_the_end(wire: Wire, spans_to: Traced):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        limits = {"OTEL_BSP_MAX_QUEUE_SIZE": "64", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16"}
        with ExitStack() as block:
            block.enter_context(spans_to(url, **limits))
            stream = wire.producer.ProduceStream()
            for request_id in range(500):
                await within(stream.write(batch("orders", b"x", request_id=request_id)))
                answer = await within(stream.read())
                assert answer.request_id == request_id and not answer.HasField("error")
            stream.cancel()
            # One batch is on its way, and the queue is full.
            assert 500 - 64 - 16 <= value(wire, "dropped") <= 500 - 64
            began = time.monotonic()
            await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), block.close)
            assert time.monotonic() - began < otel_spans.SHUT_DOWN_SECONDS + 2
    assert await wire.produce("orders", b"x")


async def test_a_span_that_cannot_be_made_fails_no_call(
    wire: Wire, receiver: Receiver, spans_to: Traced, monkeypatch: pytest.MonkeyPatch
):
    with spans_to(receiver.url):
        monkeypatch.setattr(otel_spans, "_origins", lambda _: 1 / 0)
        assert await wire.produce("orders", b"x")
        assert value(wire, "failed") == 1
    assert not receiver.spans()
