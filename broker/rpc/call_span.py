"""Facts of a call for its span, gathered while it is served and told once it is answered."""

from __future__ import annotations

from collections.abc import Iterator

from broker.errors import PostdateError
from broker.model import Batch
from broker.observe import spans
from broker.observe.spans import SpanFacts, Tracing
from broker.rpc.call_metadata import metadata_value
from broker.rpc.status import Context
from broker.storage.traceparents import find_traceparents

LOOKED_AT_MAX = 16
"""Messages of a batch whose traceparents its span knows."""


class CallSpan:
    """A call, or a batch of a stream."""

    def __init__(self, tracing: Tracing, name: str, parent: str) -> None:
        self._tracing = tracing
        self._name = name
        self._parent = parent
        self._began_ns = tracing.now_ns()
        self._submitted_ns = 0
        self._attributes: dict[str, str | int] = {"messaging.operation.name": name}
        self._of_messages: list[str] = []

    def note_topic(self, topic: str) -> None:
        if topic:
            self._attributes["messaging.destination.name"] = topic

    def note_batch(self, batch: Batch) -> None:
        self._attributes["messaging.batch.message_count"] = batch.count
        self._attributes["messaging.message.envelope.size"] = len(batch.frames)
        found = find_traceparents(_first_frames(batch), sampled=False, looks_max=LOOKED_AT_MAX)
        self._of_messages = [traceparent for _, traceparent in found]

    def note_submitted(self) -> None:
        """The batch is decided, and on its way to the disk."""
        self._submitted_ns = self._tracing.now_ns()

    def end(self, refusal: Exception | None = None) -> None:
        """Tell it."""
        error = ""
        if refusal is not None:
            error = refusal.reason if isinstance(refusal, PostdateError) else "INTERNAL"
        self._tracing.answered(
            SpanFacts(
                self._name,
                self._began_ns,
                self._submitted_ns,
                self._parent,
                self._of_messages,
                self._attributes,
                error,
            )
        )


def begin_span(name: str, context: Context | None) -> CallSpan | None:
    """Begin the span of a call, under the caller's if its metadata names one; None: nobody asks for spans."""
    if (tracing := spans.tracing) is None:
        return None
    return CallSpan(tracing, name, "" if context is None else metadata_value(context, "traceparent"))


def _first_frames(batch: Batch) -> Iterator[bytes]:
    at = 0
    for length in batch.lengths[:LOOKED_AT_MAX].tolist():
        yield batch.frames[at : at + length]
        at += length
