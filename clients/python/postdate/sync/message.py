"""`postdate.message` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta

from postdate import message as _message
from postdate.model import MessageId
from postdate.sync._portal import Portal


class Message:
    """A message as its producer sent it, with its delivery on this subscription.

    Fields are decoded when they are asked for. Unless it is settled by `ack`, `nack`, `release` or
    `processing`, the message comes back when its lease ends.
    """

    def __init__(self, inner: _message.Message, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    @property
    def id(self) -> MessageId:
        return self._inner.id

    @property
    def topic(self) -> str:
        return self._inner.topic

    @property
    def subscription(self) -> str:
        return self._inner.subscription

    @property
    def payload(self) -> bytes:
        return self._inner.payload

    @property
    def key(self) -> str:
        return self._inner.key

    @property
    def properties(self) -> Mapping[str, str]:
        return self._inner.properties

    @property
    def schedule_key(self) -> str:
        return self._inner.schedule_key

    @property
    def traceparent(self) -> str:
        return self._inner.traceparent

    @property
    def publish_time(self) -> datetime:
        """Time at which the broker accepted the message, on the broker's clock."""
        return self._inner.publish_time

    @property
    def deliver_at(self) -> datetime:
        """The time before which it was not delivered; the publish time where none was asked for."""
        return self._inner.deliver_at

    @property
    def event_time(self) -> datetime | None:
        """Time of the event, as the producer gave it."""
        return self._inner.event_time

    @property
    def ttl(self) -> timedelta | None:
        return self._inner.ttl

    @property
    def attempt(self) -> int:
        """1 for the first delivery on this subscription, one more for each nack, ended lease or lost consumer.

        What was handed back unbegun does not count: released, or not taken when its consumer left.
        Deliveries are not recorded: what was out when the broker crashed comes again with the number it had.
        """
        return self._inner.attempt

    def ack(self) -> None:
        """Settle it: it never comes back on this subscription, unless a seek says so. Returns when that is durable."""
        self._portal.run(self._inner.ack())

    def ack_nowait(self) -> None:
        """As `ack`, without waiting; `Subscription.wait_confirmed` waits for all of them and raises what failed.

        This is the fast way for consumers that take message after message in one thread.
        """
        self._portal.call(self._inner.ack_nowait)

    def nack(self, delay: timedelta | None = None, *, dead_letter: bool = False, reason: str = "") -> None:
        """Give it back, to come again after `delay` (None: after the subscription's back-off, less up to half of it).

        With `dead_letter` it moves to the subscription's dead-letter topic instead. The last `reason` is kept until
        the message is settled; a dead letter shows it.
        """
        self._portal.run(self._inner.nack(delay, dead_letter=dead_letter, reason=reason))

    def release(self) -> None:
        """Hand it back unbegun: it goes out again at once, to anybody, and this delivery does not count.

        What comes back so again and again, more than ten times within ten seconds, waits a second each time.
        """
        self._portal.run(self._inner.release())

    def extend(self, lease: timedelta | None = None) -> None:
        """Hold it for `lease` from now (None: for the consumer's own lease)."""
        self._portal.run(self._inner.extend(lease))

    @contextmanager
    def processing(self) -> Generator[Message, None, None]:
        """Ack it at the end of the block, nack it if the block raises; keep the lease meanwhile.

        The exception goes on. A message that the block settled itself is left as it is. The end
        of the block waits for the confirmation; to have many acks share one, use `run`.
        """
        tracing = _message.tracing
        with (
            nullcontext() if tracing is None else tracing.processing(self._inner),
            self._portal.entered(_message.Processing(self._inner, None)),
        ):
            yield self

    def __repr__(self) -> str:
        return repr(self._inner)
