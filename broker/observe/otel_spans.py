"""Spans made with the SDK of OpenTelemetry, and sent over HTTP by a thread of their own.

Invariants:
  SPANS-1  A span is made whole, of what is known once it is over: a call that is cut off leaves nothing open.
  SPANS-2  At most OTEL_BSP_MAX_QUEUE_SIZE spans wait. What comes beyond that is counted and forgotten.
  SPANS-3  Nobody waits for the receiver, but the end of the process, and that for SHUT_DOWN_SECONDS at most.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from broker.observe.logs import Notice, get_logger
from broker.observe.spans import SPAN_RESULTS, HandedMessage, SpanFacts
from broker.runtime.clock import SystemClock
from broker.settings import ConfigError

log = get_logger(__name__)

SHUT_DOWN_SECONDS = 2.0

_QUEUE = "OTEL_BSP_MAX_QUEUE_SIZE"
_QUEUE_SPANS = 2_048
"""The default of that variable."""
_W3C = TraceContextTextMapPropagator()
_ROOT = Context()


class OtelSpans:
    """See the module's description."""

    def __init__(
        self, environ: Mapping[str, str], shard: int | None, exporter: SpanExporter | None = None
    ) -> None:
        """`exporter`: None for the one that the environment describes. Raises ConfigError."""
        self.counts = dict.fromkeys(SPAN_RESULTS, 0)
        self._notice = Notice(SystemClock())
        try:
            waiting_max = int(environ.get(_QUEUE) or _QUEUE_SPANS)
            counted = _CountedExporter(exporter or OTLPSpanExporter(), self.counts)
            processor = _CountedProcessor(counted, waiting_max, self.counts)
        except ValueError as error:
            raise ConfigError(f"Spans cannot be sent as the OTEL_* variables ask: {error}") from error
        own = {"service.name": "postdate-broker", "service.instance.id": str(uuid.uuid4())}
        resource: dict[str, str | int] = {**own, **({} if shard is None else {"postdate.shard": shard})}
        # What the operator says of this process wins.
        resource |= OTELResourceDetector().detect().attributes  # type: ignore[arg-type]
        # The SDK would wait at the exit of the process for as long as it takes.
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("postdate")

    def now_ns(self) -> int:
        return time.time_ns()

    def answered(self, facts: SpanFacts) -> None:
        with self._harmless():
            self._answered(facts)

    def handed_out(self, topic: str, subscription: str, messages: Sequence[HandedMessage]) -> None:
        with self._harmless():
            self._handed_out(topic, subscription, messages)

    def shut_down(self) -> None:
        # The SDK's own limit is half a minute. Its threads end with the process.
        ending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        ending.start()
        ending.join(SHUT_DOWN_SECONDS)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # what was done is done, whether it can be told or not
            self.counts["failed"] += 1
            if self._notice.is_time():
                log.error("A span could not be made", exc_info=error)

    def _answered(self, facts: SpanFacts) -> None:
        parent, links = _origins(facts)
        span = self._tracer.start_span(
            facts.name,
            context=_ROOT if parent is None else _under(parent),
            kind=SpanKind.SERVER,
            links=links,
            attributes={"messaging.system": "postdate", **facts.attributes},
            start_time=facts.began_ns,
        )
        if facts.submitted_ns:
            span.add_event("submitted", timestamp=facts.submitted_ns)
        if facts.error:
            span.set_attribute("error.type", facts.error)
            span.set_status(Status(StatusCode.ERROR, facts.error))
        span.end()

    def _handed_out(self, topic: str, subscription: str, messages: Sequence[HandedMessage]) -> None:
        for message in messages:
            origin = _origin(message.traceparent)
            if origin is None or not origin.trace_flags.sampled:
                continue
            span = self._tracer.start_span(
                f"deliver {topic}",
                context=_ROOT,
                links=[Link(origin)],
                attributes={
                    "messaging.system": "postdate",
                    "messaging.operation.name": "deliver",
                    "messaging.destination.name": topic,
                    "messaging.destination.subscription.name": subscription,
                    "messaging.message.id": message.message_id,
                    "postdate.delivery_attempt": message.attempt,
                    "postdate.lateness_ms": message.late_ms,
                },
            )
            span.end()


class _CountedExporter(SpanExporter):
    """An exporter whose spans are counted."""

    def __init__(self, exporter: SpanExporter, counts: dict[str, int]) -> None:
        self.taken = 0
        """Spans that do not wait any more."""
        self._exporter = exporter
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._counts["sent" if result is SpanExportResult.SUCCESS else "failed"] += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _CountedProcessor(BatchSpanProcessor):
    """A queue of spans that says how many it had no room for."""

    def __init__(self, exporter: _CountedExporter, waiting_max: int, counts: dict[str, int]) -> None:
        super().__init__(exporter, max_queue_size=waiting_max)
        self._counted = exporter
        self._waiting_max = waiting_max
        self._counts = counts
        self._ended = 0

    def on_end(self, span: ReadableSpan) -> None:
        if self._ended - self._counted.taken >= self._waiting_max:
            self._counts["dropped"] += 1
            return
        self._ended += 1
        super().on_end(span)


def _origins(facts: SpanFacts) -> tuple[SpanContext | None, list[Link]]:
    """Return what is the parent, and what is linked besides."""
    named = dict.fromkeys(facts.of_messages)
    origins = [found for each in named if (found := _origin(each)) is not None]
    parent = _origin(facts.parent)
    if parent is None:
        # One that is sampled, if there is one: what a batch has in common is seen by whoever looks at any of it.
        parent = next((each for each in origins if each.trace_flags.sampled), origins[0] if origins else None)
    return parent, [Link(each) for each in origins if parent is None or each.span_id != parent.span_id]


def _origin(traceparent: str) -> SpanContext | None:
    """Return the span that a traceparent names; None if it names none."""
    if not traceparent:
        return None
    context = trace.get_current_span(_W3C.extract({"traceparent": traceparent}, _ROOT)).get_span_context()
    return context if context.is_valid else None


def _under(parent: SpanContext) -> Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), _ROOT)
