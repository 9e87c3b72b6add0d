"""Hook of tracing in calls and in the sending of messages, set by `postdate.otel`. Without it the hook costs one look.

The one in their processing is `message.tracing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from postdate.model import Receipt


class SendTracing(Protocol):
    """A listener that is told of messages that are sent."""

    def sent(self, topic: str, payload_bytes: int, schedule_key: str, answer: asyncio.Future[Receipt]) -> str:
        """One message is about to leave; returns the traceparent that it is to have unless it has one."""
        ...

    def sending_many(self, topic: str, count: int) -> AbstractContextManager[str]:
        """Around the sending of a list, whose messages are to have this traceparent unless they have one."""
        ...

    def current(self) -> str:
        """Return the traceparent of the span in which the caller is; empty in none."""
        ...


tracing: SendTracing | None = None


def sending_many(topic: str, messages: Sequence[object]) -> AbstractContextManager[str]:
    """As `SendTracing.sending_many`; without tracing there is no traceparent."""
    return nullcontext("") if tracing is None else tracing.sending_many(topic, len(messages))


def current_traceparent() -> str:
    """Return the traceparent of the caller's span; empty without tracing, or in none."""
    return "" if tracing is None else tracing.current()


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata by which a call goes on with the caller's trace."""
    current = current_traceparent()
    return (("traceparent", current),) if current else ()
