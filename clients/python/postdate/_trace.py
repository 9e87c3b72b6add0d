"""Hooks of tracing, if it was asked for, by `postdate.otel`. Without it each hook costs one look."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from postdate.model import Receipt
from postdate_api.v1 import message_pb2, producer_pb2

if TYPE_CHECKING:
    from postdate.message import Message


class Tracing(Protocol):
    """A listener that is told of messages that are sent and processed."""

    def sent(self, topic: str, message: message_pb2.Message, answer: asyncio.Future[Receipt]) -> None:
        """One message is about to leave; give it a traceparent unless it has one."""

    def sending_many(
        self, topic: str, requests: Sequence[producer_pb2.ProduceRequest]
    ) -> AbstractContextManager[None]:
        """Around the sending of a list, whose messages are given a traceparent unless they have one."""
        ...

    def processing(self, message: Message) -> AbstractContextManager[None]:
        """Around the processing of a message, in the context of whoever processes it."""
        ...


tracing: Tracing | None = None
