"""`postdate.subscription` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType

from postdate import subscription as _subscription
from postdate.model import SubscriptionType
from postdate.sync._portal import Portal
from postdate.sync.message import Message


class Subscription:
    """One consumer of a subscription; made by `Client.subscribe`.

    Iterate over it, or call `receive_many`; several threads may do so at once. The broker sends no more than
    `permits` messages ahead of what was taken, and none before the first is asked for unless `permits` was
    given.

    When the connection breaks, it is made again for as long as it takes. Messages that were not taken yet are
    forgotten, because the broker gives them out anew; acks that were not confirmed are sent again; nacks and
    extensions raise `Disconnected`, because the lease is gone.

    SIGTERM ends iteration after the current message, where the block was opened in the main thread and nobody
    else handles it; once the block is left, the program ends by it. A second SIGTERM ends it at once.

    Whatever ends it, messages that were not taken yet are handed back, and that delivery of them does not count
    as an attempt. Of those that were taken and not settled it counts if an exception ends the block: the next
    one could fail at the same message for ever. `Message.release` hands such a one back uncounted.

    The leases of messages that were not taken yet, and of those inside `Message.processing`, are kept as long
    as the connection lives. A message that lost its lease all the same is not handed out.
    """

    def __init__(self, inner: _subscription.Subscription, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    @property
    def topic(self) -> str:
        return self._inner.topic

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def lease(self) -> timedelta:
        """The time that a message may be held."""
        return self._inner.lease

    @property
    def effective_type(self) -> SubscriptionType:
        """The way in which messages are shared out, as the broker says."""
        return self._inner.effective_type

    @property
    def consumer_id(self) -> str:
        """The broker's name for this consumer; another one after each reconnect."""
        return self._inner.consumer_id

    def __enter__(self) -> Subscription:
        self._portal.enter(self._inner.__aenter__())
        return self

    def open(self) -> None:
        """Begin, in place of a `with` block: for a consumer that is kept for as long as the program runs.

        Returns once the broker has answered. `close` ends it, as leaving the block would.
        """
        self._portal.enter(self._inner.open())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.leave(self._inner.__aexit__(kind, error, traceback))

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> Message:
        return Message(self._portal.next(self._inner), self._portal)

    def run(
        self,
        handler: Callable[[Message], object],
        *,
        concurrency: int = 16,
        grace: timedelta = timedelta(seconds=30),
    ) -> None:
        """Call `handler` in a thread for each message, for at most `concurrency` of them at a time, until it is told
        to stop.

        A message is acked when its handler returns and nacked when it raises, with the exception's text as the
        reason; the exception goes to the log `postdate`. A handler that settles its message itself is left alone.
        Leases are kept however long it takes. With KEY_SHARED, messages of one key run one after the other.

        `stop`, a `limit` that is reached, SIGTERM (in the main thread, if nobody else handles it) and Ctrl-C stop
        it: handlers that run have `grace` to finish and are waited for no longer then. What was not begun goes back
        to the broker and counts as no attempt, of a SHARED subscription at once, of another when it is closed. It
        returns then; interrupted by Ctrl-C, it raises `KeyboardInterrupt`. A second Ctrl-C does not wait for them.
        It raises what ends the subscription for good, such as `NotFound`.
        """
        self._portal.run_handlers(
            lambda handle: self._inner.run(handle, concurrency=concurrency, grace=grace),
            lambda message: handler(Message(message, self._portal)),
            concurrency,
        )

    def receive_many(self, max_messages: int = 1000, timeout: timedelta | None = None) -> list[Message]:
        """Take what is there, at most `max_messages`; wait up to `timeout` for the first.

        None waits as long as it takes. An empty list means that the time is up, or that the
        subscription was closed. After SIGTERM, a program that asks again with a timeout gets `Closed`.
        """
        return [
            Message(each, self._portal)
            for each in self._portal.run(self._inner.receive_many(max_messages, timeout))
        ]

    def ack_many(self, messages: Iterable[Message]) -> None:
        """Ack all of them; return when that is durable. Raises the first failure, if any."""
        self._portal.run(self._inner.ack_many([each._inner for each in messages]))

    def wait_confirmed(self) -> None:
        """Wait until everything asked for so far is durable. Raises the first failure of `ack_nowait`."""
        self._portal.run(self._inner.wait_confirmed())

    def stop(self) -> None:
        """Take no more: iteration ends, what was not taken goes back, acks still count."""
        self._portal.call(self._inner.stop)

    def close(self) -> None:
        """Take no more, wait until all acks are confirmed, and leave.

        Messages that were not settled go back to the broker, uncounted: a consumer that closes in good order has
        failed at none of them. Waits for a broker that is away up to the client's `retry_for`; what is not
        confirmed by then raises.
        """
        self._portal.leave(self._inner.close())
