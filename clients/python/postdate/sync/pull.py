"""`postdate.pull` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from postdate import pull as _pull
from postdate.sync._portal import Portal
from postdate.sync.message import Message


class Received:
    """Messages that one `Client.receive` took; empty if nothing became ready in time."""

    def __init__(self, inner: _pull.Received, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(Message(each, self._portal) for each in self._inner.messages)

    @property
    def next_due_time(self) -> datetime | None:
        return self._inner.next_due_time

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self._inner)

    def ack(self) -> None:
        """Ack all of them with one call; return when that is durable."""
        self._portal.run(self._inner.ack())
