"""`postdate.dead_letters` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from postdate import dead_letters as _dead_letters
from postdate.dead_letters import DeadLetter, DeadLetterChange
from postdate.model import MessageId
from postdate.sync._portal import Portal


class DeadLetters:
    """`client.dead_letters`."""

    def __init__(self, inner: _dead_letters.DeadLetters, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    def list(
        self,
        topic: str,
        subscription: str,
        *,
        reason: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        limit: int | None = None,
        payloads: bool = False,
    ) -> Iterator[DeadLetter]:
        """Dead letters of the subscription, oldest first, page by page as the iteration goes on; at most `limit`.

        Those whose `reason` or `last_reason` contains this text, upper or lower case, and that were given up from
        `start` on and before `end`.
        """
        return self._portal.iterate(
            self._inner.list(
                topic, subscription, reason=reason, start=start, end=end, limit=limit, payloads=payloads
            )
        )

    def requeue(
        self,
        topic: str,
        subscription: str,
        ids: Iterable[MessageId] = (),
        *,
        all: bool = False,
        deliver_after: timedelta | None = None,
    ) -> DeadLetterChange:
        """Send these dead letters, or all, to this subscription again; no other one gets them.

        They are new messages with new ids, counted from the first attempt, and due after `deliver_after`.
        What may have happened is not repeated: `Disconnected`.
        """
        return self._portal.run(
            self._inner.requeue(topic, subscription, ids, all=all, deliver_after=deliver_after)
        )

    def purge(
        self, topic: str, subscription: str, ids: Iterable[MessageId] = (), *, all: bool = False
    ) -> DeadLetterChange:
        """Drop these dead letters of the subscription, or all, for good; `Disconnected` as in `requeue`."""
        return self._portal.run(self._inner.purge(topic, subscription, ids, all=all))
