"""Hook of tracing in the sending of messages, set by `postdate.otel`. Without it the hook costs one look.

The one in their processing is `message.tracing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from postdate.model import Receipt
from postdate_api.v1 import message_pb2, producer_pb2


class SendTracing(Protocol):
    """A listener that is told of messages that are sent."""

    def sent(self, topic: str, message: message_pb2.Message, answer: asyncio.Future[Receipt]) -> None:
        """One message is about to leave; give it a traceparent unless it has one."""

    def sending_many(
        self, topic: str, requests: Sequence[producer_pb2.ProduceRequest]
    ) -> AbstractContextManager[None]:
        """Around the sending of a list, whose messages are given a traceparent unless they have one."""
        ...


tracing: SendTracing | None = None
