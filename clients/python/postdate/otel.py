"""Traces with OpenTelemetry: what sent a message, and what became of it days later.

postdate.otel.instrument()      # once, at the program's start; every client of the process is traced from then on

`send` and `send_many` make a span of kind PRODUCER, whose context travels with the message (`Message.traceparent`).
`Message.processing`, and so each handler of `run`, makes a span of kind CONSUMER with a link to it. A link and no
parent: the trace that sent the message ended when it was sent, and the delay may be days. Other calls, such as a
cancel, carry the traceparent of the span in which they are made, for spans of the broker.

Needs the API alone: pip install 'postdate[otel]'. Which spans are kept, and where they go, the application decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from postdate import _trace
from postdate import message as _message

try:
    from opentelemetry import trace
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as _missing:
    raise ImportError(
        f"postdate.otel needs the API of OpenTelemetry ({_missing}): pip install 'postdate[otel]'"
    ) from _missing

if TYPE_CHECKING:
    from postdate.message import Message
    from postdate.model import Receipt

__all__ = ["instrument", "uninstrument"]

_W3C = TraceContextTextMapPropagator()


def instrument(tracer_provider: TracerProvider | None = None) -> None:
    """Trace all clients of this process from now on. None is the provider that is set globally."""
    _trace.tracing = _message.tracing = _Spans(tracer_provider)


def uninstrument() -> None:
    """Trace no more. Spans that began end as usual."""
    _trace.tracing = _message.tracing = None


class _Spans:
    """Both hooks. Names and attributes are those of the semantic conventions for messaging."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer("postdate", _version(), provider)

    def sent(self, topic: str, payload_bytes: int, schedule_key: str, answer: asyncio.Future[Receipt]) -> str:
        span = self._start_send(topic)
        if span.is_recording():
            span.set_attribute("messaging.message.body.size", payload_bytes)
            if schedule_key:
                span.set_attribute("postdate.schedule_key", schedule_key)
        answer.add_done_callback(partial(_end_send, span))
        return _traceparent(span)

    @contextmanager
    def sending_many(self, topic: str, count: int) -> Generator[str, None, None]:
        span = self._start_send(topic)
        span.set_attribute("messaging.batch.message_count", count)
        try:
            yield _traceparent(span)
        except BaseException as error:
            _fail(span, error)
            raise
        finally:
            span.end()

    def current(self) -> str:
        return _traceparent(trace.get_current_span())

    @contextmanager
    def processing(self, message: Message) -> Generator[None, None, None]:
        topic, holder = message.topic, message.holder
        sender = _W3C.extract({"traceparent": message.traceparent}) if message.traceparent else None
        origin = trace.get_current_span(sender).get_span_context() if sender is not None else None
        span = self._tracer.start_span(
            f"process {topic}",
            kind=SpanKind.CONSUMER,
            links=[Link(origin)] if origin is not None and origin.is_valid else None,
            attributes={
                "messaging.system": "postdate",
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.destination.name": topic,
                "messaging.destination.subscription.name": holder.name,
                "messaging.message.id": str(message.id),
                "messaging.message.body.size": len(message.payload),
                "postdate.delivery_attempt": message.attempt,
                "postdate.deliver_at": message.deliver_at.isoformat(),
            },
        )
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            _fail(span, error)
            raise
        finally:
            span.end()

    def _start_send(self, topic: str) -> Span:
        return self._tracer.start_span(
            f"send {topic}",
            kind=SpanKind.PRODUCER,
            attributes={
                "messaging.system": "postdate",
                "messaging.operation.name": "send",
                "messaging.operation.type": "send",
                "messaging.destination.name": topic,
            },
        )


def _end_send(span: Span, answer: asyncio.Future[Receipt]) -> None:
    if answer.cancelled():
        _fail(span, asyncio.CancelledError())
    elif (error := answer.exception()) is not None:
        _fail(span, error)
    else:
        span.set_attribute("messaging.message.id", str(answer.result().id))
    span.end()


def _fail(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__qualname__)
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


def _traceparent(span: Span) -> str:
    """Empty where there is neither an SDK nor a trace from elsewhere to go on with."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def _version() -> str | None:
    try:
        return metadata.version("postdate")
    except metadata.PackageNotFoundError:
        return None
