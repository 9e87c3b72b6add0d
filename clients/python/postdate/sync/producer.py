"""`postdate.producer` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType

from postdate import producer as _producer
from postdate.model import OutgoingMessage, Receipt, Receipts
from postdate.sync._portal import Portal


class Producer:
    """A producer of one topic; made by `Client.producer`.

    A lone message leaves at the end of the loop's turn in which it was sent. While earlier batches
    are on their way, later messages gather: until the batch is full, an answer comes, or `linger`
    has passed. Nothing is lost in silence: `send` returns when the message is on the broker's
    disk, and raises otherwise.

    When the connection breaks, what had not left is sent again by itself. What had left and lost
    its answer raises `Disconnected`: it may be stored, and only the caller knows whether a second
    copy would hurt.

    With a `producer_name` the broker knows a repeat by its sequence id. What lost its answer is then sent
    again too, for as long as the client's `retry_for`, and stored once; its receipt says `duplicate` if it
    had been. Sequence ids rise by themselves, or are the caller's (`sequence_id`): then a message that is sent
    again by another process is known as well. It takes a topic that remembers them (`dedup_window`), and one
    producer at a time that uses the name.

    A cancelled `send` whose batch has not left is withdrawn if it was alone in it;
    otherwise the message is sent all the same.
    """

    def __init__(self, inner: _producer.Producer, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    @property
    def topic(self) -> str:
        return self._inner.topic

    def __enter__(self) -> Producer:
        self._portal.enter(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.leave(self._inner.__aexit__(kind, error, traceback))

    def send(
        self,
        payload: bytes,
        *,
        key: str = "",
        properties: Mapping[str, str] | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        schedule_key: str = "",
        ttl: timedelta | None = None,
        event_time: datetime | None = None,
        traceparent: str = "",
        sequence_id: int | None = None,
        replace: bool = False,
    ) -> Receipt:
        """Send one message; return when the broker has it on disk.

        It is delivered no earlier than `deliver_at`, or than `deliver_after` counted from the
        moment the broker accepts it, on the broker's clock. Without either it is due at once.
        A repeat with the same `sequence_id` and `producer_name` is not stored again.

        No two messages of a topic wait under one `schedule_key`: the second one raises `AlreadyExists`, or
        takes the place of the first one in the same step, with `replace`.
        """
        return self._portal.run(
            self._inner.send(
                payload,
                key=key,
                properties=properties,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                schedule_key=schedule_key,
                ttl=ttl,
                event_time=event_time,
                traceparent=traceparent,
                sequence_id=sequence_id,
                replace=replace,
            )
        )

    def send_many(
        self,
        messages: Sequence[bytes] | Sequence[OutgoingMessage] | Sequence[bytes | OutgoingMessage],
        *,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        replace: bool = False,
    ) -> Receipts:
        """Send a list; return when all of it is on the broker's disk.

        `deliver_at` and `deliver_after` are those of the messages that are given as plain bytes; an
        `OutgoingMessage` has its own. A list within one batch (1,000 messages, 1 MiB by default) is
        stored all or none. A longer one goes in several; if only some of those are stored,
        `PartlyStored` says how many messages were and why the others are not known to be.
        With `replace` messages that wait under the schedule keys of these give way to them.
        """
        return self._portal.run(
            self._inner.send_many(
                messages, deliver_at=deliver_at, deliver_after=deliver_after, replace=replace
            )
        )

    def open(self) -> None:
        """Begin, in place of a `with` block: for a producer that is kept for as long as the program runs."""
        self._portal.enter(self._inner.open())

    def close(self) -> None:
        """Send what has gathered, wait until all is settled, and end the stream."""
        self._portal.leave(self._inner.close())
