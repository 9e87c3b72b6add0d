"""The messages that a consumer was sent, as they are taken: one by one, many at a time, by a runner's handlers.

    ConsumerStream (ready) -> Inbox -> iteration, receive_many, Runner
                              Inbox -> PartitionedInbox -> the same of all partitions of a topic

Permits are given back as messages are taken, so what waits here never exceeds them (PERMITS-1), and a limit ends it
(PERMITS-2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

from postdate._consumer_stream import ConsumerStream
from postdate._runner import Source
from postdate.errors import Closed, PostdateError
from postdate.message import Message
from postdate.model import MessageId, SubscriptionType

PERMITS = 1000
_PERMITS_A_HANDLER = 4


def run_permits(kind: SubscriptionType, concurrency: int) -> int:
    """Permits of a `run`, unless they were given."""
    # More would starve other workers; but keys have one worker, and a hot one must not hold up the others.
    return PERMITS if kind is SubscriptionType.KEY_SHARED else _PERMITS_A_HANDLER * concurrency


async def take_within(
    source: Source, take: Callable[[int], list[Message]], max_messages: int, timeout: timedelta | None
) -> list[Message]:
    """Take what is there; wait for the first. An empty list: the time is up, or the subscription ended."""
    give_up_at = None if timeout is None else asyncio.get_running_loop().time() + timeout.total_seconds()
    while not (messages := take(max_messages)) and not source.is_stopped:
        try:
            async with asyncio.timeout_at(give_up_at):
                await source.wait_change()
        except TimeoutError:
            return []
    return messages


class Inbox:
    """See the module's description. A `RunSource`."""

    def __init__(self, stream: ConsumerStream) -> None:
        self.stop_asked: bool = False  # by `stop`, and not because the limit was reached
        self.yield_due: bool = False
        """Its taker must let the loop turn before it takes more."""
        self._stream = stream
        self._held = stream.held
        self._ready = stream.held.ready
        self._permits = stream.permits
        self._is_terminated = False  # by SIGTERM
        self._was_told = False  # that there will be no more

    # -- taking ----------------------------------------------------------------------------------------------

    def begin(self, permits: int) -> bool:
        """Ask for messages, if that was left to how they are taken; whether it was."""
        is_first = self._permits.begin(permits)
        if is_first:
            self._stream.wake()
        return is_first

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Message:
        if self.yield_due:
            # A consumer that never waits must not keep the link from sending and receiving.
            self.yield_due = False
            await asyncio.sleep(0)
        held, message = self._held, None
        if held.clock() < held.sound_until:  # looked at here first: a call costs more
            message = next(self._ready.current, None)
        if message is None:
            message = await self._first()
        permits = self._permits
        permits.taken += 1
        if permits.left is not None:
            self._spend(1)
        if permits.taken * 2 >= permits.most:
            self._give_back()
            self.yield_due = True
        return message

    async def _first(self) -> Message:
        """Take one, once there is one."""
        self.begin(PERMITS)
        while not self._has_ready():
            stream = self._stream
            if stream.is_stopped:
                raise StopAsyncIteration
            if stream.error is not None:
                raise stream.error
            await stream.wait_change()
        [message] = self._ready.take(1)
        return message

    def take(self, max_messages: int) -> list[Message]:
        """Take what is there; raises what ended the subscription for good, once there is nothing."""
        if not self._has_ready():
            if self._stream.error is not None and not self._stream.is_stopped:
                raise self._stream.error
            return []
        messages = self._ready.take(max_messages)
        permits = self._permits
        permits.taken += len(messages)
        if permits.left is not None:
            self._spend(len(messages))
        if permits.taken * 2 >= permits.most:
            self._give_back()
            self.yield_due = True
        return messages

    async def note_asked(self, timeout: timedelta | None) -> None:
        """Raise Closed for who asks again with a timeout after SIGTERM."""
        if self._is_terminated:
            await asyncio.sleep(0)  # `stop` comes first
            if self._was_told and timeout is not None:  # it takes the time to be up, and would ask for ever
                raise Closed("SIGTERM stopped the subscription")
            self._was_told = True

    def note_sigterm(self) -> None:
        """Note that SIGTERM came, and that `stop` will be called on the loop."""
        self._is_terminated = True
        self.yield_due = True  # or a consumer that never waits would take more before the loop gets to it

    def _has_ready(self) -> bool:
        """Tell whether there is a message whose lease holds; what has lost it is dropped and paid back."""
        if self._ready and self._held.clock() >= self._held.sound_until:
            self._permits.lose(self._held.drop_lost())
            self._give_back()
        has_ready = bool(self._ready)
        if not has_ready:
            self._ready.clear()  # or what brought the last of them would be kept until others come
        return has_ready

    def _give_back(self) -> None:
        if self._permits.give_back():
            self._stream.wake()

    def _spend(self, count: int) -> None:
        """Count what was taken against the limit; the last of it ends the iteration (PERMITS-2)."""
        permits = self._permits
        assert permits.left is not None
        permits.left -= count
        if permits.left <= 0:
            self._stream.end_taking()

    async def kept(self) -> list[MessageId]:
        """For `postdate.testing`: all whose leases are kept, once all is confirmed and everything has arrived.

        A nack that nobody awaits, as at the end of `Message.processing`, is one of those that are confirmed.
        """
        stream = self._stream
        if not stream.settlements.is_connected:
            return []
        is_first = self.begin(PERMITS)  # what comes due while a test sets its clock forward has to arrive
        await stream.settlements.all_confirmed()
        try:
            if is_first:
                await stream.hear()  # it goes before the permits, and the next one behind them
            await stream.hear()
        except PostdateError:
            return []
        return self._held.kept()

    # -- what a runner asks ----------------------------------------------------------------------------------

    @property
    def permits_max(self) -> int:
        """Messages that the broker sends ahead of what was taken; 0: not known yet."""
        return self._permits.most

    @property
    def effective_type(self) -> SubscriptionType:
        return self._stream.kind

    @property
    def is_stopped(self) -> bool:
        return self._stream.is_stopped

    def stop(self) -> None:
        self.stop_asked = True
        self.finish()

    def finish(self) -> None:
        """Take no more, as `stop` does, without having been asked to."""
        self._stream.stop()

    def connection_of(self, message: Message) -> int:
        return self._stream.connection

    def holds(self, message: Message) -> bool:
        return self._stream.settlements.is_connected and message.held_until > self._held.clock()

    def hand_back(self, messages: Iterable[Message]) -> None:
        self._stream.hand_back(messages)

    async def wait_change(self) -> None:
        await self._stream.wait_change()

    def note_change(self) -> None:
        self._stream.changed.set()


class PartitionedInbox:
    """The inboxes of all partitions of a topic, taken from in turn. A `RunSource`."""

    def __init__(self, by_topic: Mapping[str, Inbox], changed: asyncio.Event, limit: int | None) -> None:
        """`changed` is the one that all of their streams set."""
        self._by_topic = by_topic
        self._inboxes = tuple(by_topic.values())
        self._changed = changed
        self._left = limit
        self._next = 0
        self._is_begun = False

    # -- taking ----------------------------------------------------------------------------------------------

    def begin(self, permits: int) -> None:
        if not self._is_begun:
            self._is_begun = True
            for inbox in self._inboxes:
                inbox.begin(share_of(permits, len(self._inboxes)))

    def __aiter__(self) -> PartitionedInbox:
        return self

    async def __anext__(self) -> Message:
        self.begin(PERMITS)
        count = len(self._inboxes)
        while True:
            for step in range(self._next, self._next + count):
                inbox = self._inboxes[step % count]
                if inbox.yield_due:
                    # A consumer that never waits must not keep the links from sending and receiving.
                    inbox.yield_due = False
                    await asyncio.sleep(0)
                    break  # and look at all again: what was empty may not be
                if taken := inbox.take(1):
                    self._next = (step + 1) % count  # PARTITIONS-3
                    self._spend(1)
                    return taken[0]
            else:
                if self.is_stopped:
                    raise StopAsyncIteration
                await self.wait_change()

    def take(self, max_messages: int) -> list[Message]:
        """Take what is there: equal parts, and of what others leave of theirs (PARTITIONS-3)."""
        most = max_messages if self._left is None else min(max_messages, self._left)
        count, messages = len(self._inboxes), list[Message]()
        while (left := most - len(messages)) > 0:
            for _ in range(count):
                inbox = self._inboxes[self._next]
                try:
                    messages += inbox.take(min(max(left // count, 1), most - len(messages)))
                except PostdateError:
                    if messages:  # which would be lost; it is raised the next time
                        break
                    raise
                self._next = (self._next + 1) % count
                if len(messages) == most:
                    break
            if most - len(messages) == left:
                break
        if messages:
            self._spend(len(messages))
        return messages

    async def note_asked(self, timeout: timedelta | None) -> None:
        await self._inboxes[0].note_asked(timeout)

    def _spend(self, count: int) -> None:
        """Count what was taken against the limit (PARTITIONS-4)."""
        if self._left is None:
            return
        self._left -= count
        if self._left <= 0:
            for inbox in self._inboxes:
                inbox.finish()

    # -- what a runner asks ----------------------------------------------------------------------------------

    @property
    def permits_max(self) -> int:
        return sum(inbox.permits_max for inbox in self._inboxes)

    @property
    def effective_type(self) -> SubscriptionType:
        return self._inboxes[0].effective_type

    @property
    def is_stopped(self) -> bool:
        return all(inbox.is_stopped for inbox in self._inboxes)

    @property
    def stop_asked(self) -> bool:
        return all(inbox.stop_asked for inbox in self._inboxes)

    def stop(self) -> None:
        for inbox in self._inboxes:
            inbox.stop()

    def connection_of(self, message: Message) -> int:
        return self._by_topic[message.topic].connection_of(message)

    def holds(self, message: Message) -> bool:
        return self._by_topic[message.topic].holds(message)

    def hand_back(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._by_topic[message.topic].hand_back((message,))

    async def wait_change(self) -> None:
        await self._inboxes[0].wait_change()  # of any of them: what they set is one event

    def note_change(self) -> None:
        self._changed.set()


def share_of(permits: int, partitions: int) -> int:
    """Return the permits of one partition (PARTITIONS-2)."""
    if permits < 1:
        raise ValueError("permits is at least 1")
    return max(1, permits // partitions)
