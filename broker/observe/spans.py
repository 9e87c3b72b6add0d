"""Spans for OpenTelemetry: the hook that those who serve calls and hand out messages look at.

A process sets it once, as it sets up its logs, if it is asked to (`span_settings.py`). Without that the
hook costs one look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

SPAN_RESULTS = ("sent", "failed", "dropped")
"""Fates of a span: its receiver took it; it did not; the queue was full."""


class SpanFacts(NamedTuple):
    """A call, or a batch of a stream, that has been answered."""

    name: str
    began_ns: int
    submitted_ns: int
    """Time at which what it changes was given to the journal; 0: it was not."""
    parent: str
    """Traceparent of the call; empty without one."""
    of_messages: Sequence[str]
    """Traceparents of messages in it. Without `parent` one of them is the parent; the others are linked."""
    attributes: Mapping[str, str | int]
    error: str
    """Reason of its refusal; empty: it was done."""


class HandedMessage(NamedTuple):
    """A message with a sampled traceparent that was handed to a consumer."""

    traceparent: str
    message_id: str
    late_ms: int
    attempt: int


class Tracing(Protocol):
    """A listener that makes spans of what it is told."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of spans by SPAN_RESULTS."""

    def now_ns(self) -> int:
        """Return the time by which spans are dated, Unix time."""

    def answered(self, facts: SpanFacts) -> None:
        """Make a span that ends now."""

    def handed_out(self, topic: str, subscription: str, messages: Sequence[HandedMessage]) -> None:
        """Make a span for each of some messages that were handed out now."""

    def shut_down(self) -> None:
        """Send what is left, within a bounded time."""


tracing: Tracing | None = None


def counts_of_spans() -> Iterable[tuple[str, int]]:
    """Return the number of spans by SPAN_RESULTS."""
    return dict.fromkeys(SPAN_RESULTS, 0).items() if tracing is None else tracing.counts.items()
