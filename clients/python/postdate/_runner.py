"""Calls a handler for each message of a subscription: `Subscription.run`.

    taken -> (parked, while its key is busy) -> handled -> acked | nacked

Invariants:
  RUNNER-1  At most `concurrency` handlers run. No more messages are taken than can run, but for those that are
      parked, of which there are never more than the subscription's permits.
  RUNNER-2  With KEY_SHARED, messages of one key run one after the other, in the order in which they came.
  RUNNER-3  After a broken connection the broker gives out anew what was not acked. What is still being handled is not
      begun a second time: the handler that runs settles both. What was parked is dropped, since it comes again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Protocol

from postdate.message import Message
from postdate.model import MessageId, SubscriptionType

_log = logging.getLogger("postdate")

Handler = Callable[[Message], Awaitable[object]]
_Name = tuple[str, MessageId]  # the topic's, because two topics may give the same id


class Source(Protocol):
    """State of a subscription, and what may be done with messages that were not begun, for who runs handlers."""

    @property
    def is_stopped(self) -> bool:
        """Tell whether no more is handed out."""
        ...

    @property
    def stop_asked(self) -> bool:
        """Tell whether that is by `stop`, and not because the limit was reached."""
        ...

    @property
    def permits_max(self) -> int:
        """Return how many messages the broker sends ahead of what was taken."""
        ...

    def connection_of(self, message: Message) -> int:
        """Return the number of the connection that there is now where the message came from; it counts up."""
        ...

    def holds(self, message: Message) -> bool:
        """Tell whether its lease holds, as far as one can know here."""
        ...

    def hand_back(self, messages: Iterable[Message]) -> None:
        """Give to others what was not begun."""

    async def wait_change(self) -> None:
        """Return once messages arrived, its state changed, or `note_change` was called."""

    def note_change(self) -> None:
        """Wake who waits for a change."""


class RunSource(Source, Protocol):
    """A subscription whose messages are handled."""

    @property
    def effective_type(self) -> SubscriptionType: ...

    async def __anext__(self) -> Message: ...

    def stop(self) -> None: ...


class _Handling:
    """A handler that runs, or whose ack waits to be confirmed."""

    __slots__ = ("is_handled", "message")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.is_handled = False

    @property
    def was_given_back(self) -> bool:
        """Tell whether its handler settled it, or failed, so that it may well come again before that is over."""
        return self.message.is_settled and not self.is_handled


class Runner:
    """One `Subscription.run`."""

    def __init__(
        self, subscription: RunSource, handler: Handler, *, concurrency: int, grace: timedelta
    ) -> None:
        if concurrency < 1:
            raise ValueError("concurrency is at least 1")
        if grace < timedelta(0):
            raise ValueError("grace is negative")
        self._subscription = subscription
        self._handler = handler
        self._concurrency = concurrency
        self._grace_s = grace.total_seconds()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[_Name, _Handling] = {}  # the latest of each
        self._again: dict[_Name, Message] = {}  # came anew while their first delivery is handled (RUNNER-3)
        # Acked on a later connection than they came on, by topic: that connection, the latest one, and which.
        self._outlived: dict[str, tuple[int, set[MessageId]]] = {}
        self._parked: dict[str, deque[tuple[Message, int]]] = {}  # by key, for each key that is being handled
        self._parked_count = 0

    async def run(self) -> None:
        """Take and handle until the subscription ends, then let the handlers that run finish."""
        try:
            while True:
                await self._wait_room()
                try:
                    message = await self._subscription.__anext__()
                except StopAsyncIteration:
                    break
                self._begin(message)
            # At its limit, what was taken is handled, and in its own time.
            while self._tasks and not self._subscription.stop_asked:
                await self._subscription.wait_change()
        finally:
            self._subscription.stop()
            await self._drain()

    async def _wait_room(self) -> None:
        subscription = self._subscription
        while not subscription.is_stopped and (
            len(self._tasks) >= self._concurrency or self._parked_count >= subscription.permits_max
        ):
            await subscription.wait_change()

    def _begin(self, message: Message) -> None:
        topic, message_id = name = (message.topic, message.id)
        subscription = self._subscription
        if (outlived := self._outlived.get(topic)) is not None:
            connection, ids = outlived
            if message_id in ids and connection == subscription.connection_of(message):
                message.ack_nowait()  # sent to us before the broker heard that it is done
                return
        running = self._running.get(name)
        if running is not None and not running.was_given_back:
            if (before := self._again.get(name)) is not None:
                before.holder.let_go(before)
            self._again[name] = message
            message.holder.keep(message)
            return
        key = message.key if subscription.effective_type is SubscriptionType.KEY_SHARED else ""
        if key in self._parked:
            message.holder.keep(message)
            self._parked[key].append((message, subscription.connection_of(message)))
            self._parked_count += 1
            return
        if key:
            self._parked[key] = deque()
        task = asyncio.get_running_loop().create_task(self._work(message, key), name="postdate-handler")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def _work(self, message: Message, key: str) -> None:
        """Handle a message, and those of its key that came meanwhile."""
        following: Message | None = message
        try:
            while following is not None:
                await self._handle(following)
                following = self._next_of(key)
        finally:
            for left, connection in self._parked.pop(key, ()):
                self._parked_count -= 1
                left.holder.let_go(left)
                if connection == self._subscription.connection_of(left):
                    self._subscription.hand_back((left,))

    def _next_of(self, key: str) -> Message | None:
        subscription = self._subscription
        while (parked := self._parked.get(key)) and not subscription.stop_asked:
            message, connection = parked.popleft()
            self._parked_count -= 1
            message.holder.let_go(message)
            if connection == subscription.connection_of(message) and subscription.holds(message):
                return message
        return None

    async def _handle(self, message: Message) -> None:
        """Call the handler and settle the message; a failure of either is told to the log."""
        name = (message.topic, message.id)
        connection = self._subscription.connection_of(message)
        handling = self._running[name] = _Handling(message)
        try:
            async with message.processing():
                outcome = self._handler(message)
                if not inspect.isawaitable(outcome):
                    raise TypeError("the handler must be an `async def` function")
                await outcome
                handling.is_handled = True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            _log.warning("the handler of a message cancelled itself; it comes again: %r", message)
        except Exception as error:
            if handling.is_handled:
                _log.warning("a message was handled, but its ack failed: %r: %s", message, error)
            else:
                _log.warning("the handler of a message failed: %r", message, exc_info=error)
        finally:
            if self._running.get(name) is handling:
                del self._running[name]
                again = self._again.pop(name, None)
                if again is not None:
                    again.holder.let_go(again)
            if handling.is_handled and connection != self._subscription.connection_of(message):
                self._note_outlived(message)

    def _note_outlived(self, message: Message) -> None:
        latest = self._subscription.connection_of(message)
        outlived = self._outlived.get(message.topic)
        if outlived is None or outlived[0] != latest:
            outlived = self._outlived[message.topic] = (latest, set())
        outlived[1].add(message.id)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("a task of `run` failed; this is a bug", exc_info=fault)
        self._subscription.note_change()

    async def _drain(self) -> None:
        """Wait for the handlers that run; cancel those that take longer than the grace, or if cancelled again."""
        if not self._tasks:
            return
        try:
            _, late = await asyncio.wait(self._tasks, timeout=self._grace_s)
            if late:
                _log.warning("%d handlers did not end within the grace and are cancelled", len(late))
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
