"""Spans of what is sent and of what becomes of it: linked, however long the delay."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import postdate
import postdate.otel
import postdate.sync
import postdate.sync.testing
import postdate.testing
from broker.observe import spans as broker_spans
from broker.observe.spans import SpanFacts

DAYS = timedelta(days=3)


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    provider = TracerProvider()
    postdate.otel.instrument(provider)
    yield provider
    postdate.otel.uninstrument()


@pytest.fixture
def spans(provider: TracerProvider) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
async def fake() -> AsyncIterator[postdate.testing.FakeBroker]:
    async with postdate.testing.broker() as fake:
        yield fake


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


async def test_processing_links_to_what_was_sent_days_before(fake, provider, spans):
    tracer = provider.get_tracer("test")
    async with fake.client() as client, client.subscribe("orders", "billing") as subscription:
        with tracer.start_as_current_span("request") as request:
            async with client.producer("orders") as producer:
                receipt = await producer.send(b"close it", deliver_after=DAYS, schedule_key="order-17")
        await fake.advance(DAYS)
        message = await anext(subscription)
        async with message.processing():
            inside = trace.get_current_span()
            with tracer.start_as_current_span("query"):
                pass
    (sent,), (processed,) = named(spans, "send orders"), named(spans, "process orders")
    assert sent.kind is SpanKind.PRODUCER
    assert sent.parent is not None
    assert sent.parent.span_id == request.get_span_context().span_id
    assert dict(sent.attributes or {}) == {
        "messaging.system": "postdate",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.id": str(receipt.id),
        "messaging.message.body.size": 8,
        "postdate.schedule_key": "order-17",
    }
    context = sent.get_span_context()
    assert message.traceparent.startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
    assert processed.kind is SpanKind.CONSUMER
    assert processed.parent is None
    assert processed.get_span_context().trace_id != context.trace_id
    assert [link.context.span_id for link in processed.links] == [context.span_id]
    assert dict(processed.attributes or {}) == {
        "messaging.system": "postdate",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.subscription.name": "billing",
        "messaging.message.id": str(receipt.id),
        "messaging.message.body.size": 8,
        "postdate.delivery_attempt": 1,
        "postdate.deliver_at": message.deliver_at.isoformat(),
    }
    assert inside.get_span_context() == processed.get_span_context()
    (query,) = named(spans, "query")
    assert query.parent is not None
    assert query.parent.span_id == processed.get_span_context().span_id


async def test_list_has_one_span_and_its_messages_link_to_it(fake, spans):
    own = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    async with fake.client() as client, client.subscribe("t", "s", limit=3) as subscription:
        async with client.producer("t") as producer:
            await producer.send_many([b"1", b"2", postdate.OutgoingMessage(b"3", traceparent=own)])
        seen: list[str] = []

        async def handle(message: postdate.Message) -> None:
            seen.append(message.traceparent)
            assert trace.get_current_span().is_recording()

        await subscription.run(handle)
    (sent,) = named(spans, "send t")
    assert (sent.attributes or {})["messaging.batch.message_count"] == 3
    links = [span.links[0].context for span in named(spans, "process t")]
    assert len(links) == 3
    assert [each.span_id for each in links].count(sent.get_span_context().span_id) == 2
    assert own in seen


async def test_failures_are_in_the_spans(fake, spans):
    async with fake.client() as client, client.subscribe("t", "s") as subscription:
        async with client.producer("t") as producer:
            await producer.send(b"x", schedule_key="k", deliver_after=DAYS)
            with pytest.raises(postdate.AlreadyExists):
                await producer.send(b"x", schedule_key="k", deliver_after=DAYS)
            with pytest.raises(postdate.InvalidRequest):
                await producer.send_many([b"x" * 2_000_000])
        await fake.advance(DAYS)
        with pytest.raises(KeyError):
            async with (await anext(subscription)).processing():
                raise KeyError("order 17")
    failed = [span for span in spans.get_finished_spans() if span.status.status_code is StatusCode.ERROR]
    assert [(span.name, (span.attributes or {})["error.type"]) for span in failed] == [
        ("send t", "AlreadyExists"),
        ("send t", "InvalidRequest"),
        ("process t", "KeyError"),
    ]
    assert [event.name for event in failed[2].events] == ["exception"]


async def test_message_of_an_untraced_producer_has_no_link(fake, spans):
    async with fake.client() as client, client.subscribe("t", "s") as subscription:
        async with client.producer("t") as producer:
            await producer.send(b"x", traceparent="nonsense")
        async with (await anext(subscription)).processing():
            pass
    (processed,) = named(spans, "process t")
    assert not processed.links


class Told:
    """A listener of the broker that keeps what it is told of calls."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.facts: list[SpanFacts] = []

    def now_ns(self) -> int:
        return 1

    def answered(self, facts: SpanFacts) -> None:
        self.facts.append(facts)

    def handed_out(self, topic: str, subscription: str, messages: object) -> None:
        """Keep nothing."""

    def shut_down(self) -> None:
        """Hold nothing."""

    def parents(self) -> list[tuple[str, str]]:
        """Return calls, and the id of the span of which each says that it was made in it."""
        return [(each.name, each.parent[36:52]) for each in self.facts]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(broker_spans, "tracing", told)
    return told


async def test_calls_go_on_with_the_span_in_which_they_are_made(fake, provider, told):
    tracer = provider.get_tracer("test")
    async with fake.client() as client:
        await client.topics.create("t")
        with tracer.start_as_current_span("request") as request:
            await client.schedule.cancel("t", schedule_key="k")
            pending = client.schedule.list("t")
        assert [each async for each in pending] == []
        postdate.otel.uninstrument()
        with tracer.start_as_current_span("request"):
            await client.schedule.cancel("t", schedule_key="k")
    span_id = f"{request.get_span_context().span_id:016x}"
    # The broker is not told that the client asked for the owner of the topic.
    assert told.parents() == [
        ("CreateTopic", ""),
        ("CancelScheduled", span_id),
        ("ListScheduled", ""),
        ("CancelScheduled", ""),
    ]


def test_sync_calls_go_on_with_the_span_of_their_thread(provider, told):
    with postdate.sync.testing.broker() as fake, fake.client() as client:
        client.topics.create("t")
        with provider.get_tracer("test").start_as_current_span("request") as request:
            client.schedule.cancel("t", schedule_key="k")
    span_id = f"{request.get_span_context().span_id:016x}"
    assert told.parents() == [("CreateTopic", ""), ("CancelScheduled", span_id)]


async def test_nothing_is_traced_unless_asked_for(fake, spans):
    postdate.otel.uninstrument()
    async with fake.client() as client, client.subscribe("t", "s") as subscription:
        async with client.producer("t") as producer:
            await producer.send(b"x")
        message = await anext(subscription)
        async with message.processing():
            pass
    assert message.traceparent == ""
    assert not spans.get_finished_spans()


def test_sync_spans_are_current_in_the_thread_of_the_caller(provider, spans):
    tracer = provider.get_tracer("test")
    handled: list[int] = []
    with (
        postdate.sync.testing.broker() as fake,
        fake.client() as client,
        client.subscribe("t", "s", limit=2) as subscription,
    ):
        with tracer.start_as_current_span("request") as request, client.producer("t") as producer:
            producer.send(b"x")
            producer.send(b"y")
        with next(subscription).processing():
            inside = trace.get_current_span().get_span_context().span_id
        subscription.run(lambda _: handled.append(trace.get_current_span().get_span_context().span_id))
    sent = named(spans, "send t")
    assert {span.parent and span.parent.span_id for span in sent} == {request.get_span_context().span_id}
    processed = [span.get_span_context().span_id for span in named(spans, "process t")]
    assert processed == [inside, *handled]
    assert [span.links[0].context.span_id for span in named(spans, "process t")] == [
        span.get_span_context().span_id for span in sent
    ]


def test_sdk_does_not_import_opentelemetry():
    program = (
        "import sys, postdate.sync; assert not [each for each in sys.modules if 'opentelemetry' in each]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_is_missing_is_said():
    program = "import sys; sys.modules['opentelemetry'] = None; import postdate.otel"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'postdate[otel]'" in done.stderr


async def test_cancelled_send_ends_its_span(fake, spans):
    async with fake.client() as client, client.producer("t") as producer:
        sending = asyncio.create_task(producer.send(b"x"))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    (sent,) = named(spans, "send t")
    assert (sent.attributes or {})["error.type"] == "CancelledError"
