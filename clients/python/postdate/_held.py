"""Messages that a consumer holds for its application, and the keeping of their leases.

    arrived -> ready -> taken
                           -> processing -> settled

The broker sends messages ahead, and their leases run from then on. So the leases of all that waits to be taken
or is being processed are extended together, three times a lease, by one timer and one request for all.

Invariants:
  HELD-1  What is in `ready` or being processed is asked for at least every third of a lease while the connection
      lives, unless it was asked for and not answered yet.
  HELD-2  A message leaves `ready` for the application only while its lease holds, as far as one can know here: no
      extension was refused, and the local clock has not passed the lease's end. What was lost is the broker's to
      give out again, perhaps to another consumer.
  HELD-3  `sound_until` is at or before the end of every lease in `ready`.

What a stopped program reads late, from the buffers of its connection, counts from when it was read: only the answer
to the next extension tells that such a lease is lost.

A message that was taken and is not inside `Message.processing` is the application's own affair: if it is
forgotten there, its lease ends and it comes back.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice, repeat
from operator import length_hint

from postdate._deliveries import Deliveries
from postdate.message import Holder, Message
from postdate.model import MessageId

RENEWALS = 3  # a lease, so that one may be late


class Ready:
    """Messages that wait to be taken, in the order in which they came; each is made as it is taken.

    So a consumer that keeps none of them has one at a time, where Python's collector would go through thousands.
    """

    def __init__(self) -> None:
        self.current: Iterator[Message] = iter(())
        """The first of them; who takes one after the other asks it at once, as a call costs more."""
        self._left: Iterator[object] = iter(())  # knows how many of them are left
        self._later: deque[tuple[Iterator[Message], Iterator[object]]] = deque()

    def __len__(self) -> int:
        return length_hint(self._left) + sum(length_hint(left) for _, left in self._later)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.made())

    def add(self, deliveries: Deliveries, holder: Holder, held_until: float) -> None:
        places = iter(range(len(deliveries)))
        made = map(Message, repeat(deliveries), places, repeat(holder), repeat(held_until))
        self._later.append((made, places))

    def take(self, most: int) -> list[Message]:
        """Take what is there, up to so many."""
        taken = list(islice(self.current, most))
        while len(taken) < most and self._later:
            self.current, self._left = self._later.popleft()
            taken += islice(self.current, most - len(taken))
        return taken

    def made(self) -> list[Message]:
        """Make all of them, for what is to be done to each."""
        messages = self.take(len(self))
        self.replace(messages)
        return messages

    def replace(self, messages: list[Message]) -> None:
        """Have these wait in place of all others."""
        self._later.clear()
        self.current = left = iter(messages)
        self._left = left

    def clear(self) -> None:
        self.replace([])


class Held:
    """The messages of one consumer that the application has not settled."""

    def __init__(self, extend: Callable[[Sequence[MessageId]], None], clock: Callable[[], float]) -> None:
        self.ready: Ready = Ready()
        self.sound_until: float = math.inf
        self.clock = clock  # monotonic, in seconds
        self._extend = extend  # is answered by `extended`
        self._lease_s = 0.0  # 0: there is no connection, and nothing to keep
        self._processing: set[Message] = set()
        self._asked: dict[MessageId, tuple[Message, float]] = {}  # when; not answered yet
        self._timer: asyncio.TimerHandle | None = None

    def connected(self, lease: timedelta) -> None:
        self._lease_s = lease.total_seconds()

    def disconnected(self) -> None:
        """The leases went with the connection. What is in `ready` is the caller's to drop."""
        self._lease_s = 0.0
        self._processing.clear()
        self._asked.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def arrived(self, deliveries: Deliveries, holder: Holder) -> None:
        until = self.clock() + self._lease_s
        self.sound_until = min(self.sound_until, until) if self.ready else until
        self.ready.add(deliveries, holder, until)
        self._arm()

    def drop_lost(self) -> int:
        """Forget what waits in `ready` without a lease (HELD-2); returns how many."""
        now = self.clock()
        messages = self.ready.made()
        sound = [message for message in messages if message.held_until > now]
        self.ready.replace(sound)
        self._look()
        return len(messages) - len(sound)

    def keep(self, message: Message) -> None:
        """The application began to work on it; its lease is kept until `let_go`."""
        if self._lease_s:
            self._processing.add(message)
            now = self.clock()
            if message.held_until < now + self._lease_s / 2:
                # It waited in the application's hands, and may not last until the timer.
                self._ask([message], now)
            self._arm()

    def let_go(self, message: Message) -> None:
        self._processing.discard(message)

    def kept(self) -> list[MessageId]:
        """All whose leases are extended while the connection lives."""
        return [each.id for each in (*self.ready, *self._processing) if not each.is_settled]

    def extended(self, columns: Mapping[int, Iterable[int]], lost: Collection[MessageId]) -> None:
        """The broker has answered an extension of these ids: all but the lost ones have a whole lease again."""
        for ledger_id, entry_ids in columns.items():
            for entry_id in entry_ids:
                message_id = MessageId(ledger_id, entry_id)
                asked = self._asked.pop(message_id, None)
                if asked is None:
                    continue  # the application asked for this one
                message, asked_at = asked
                if message_id in lost:
                    message.held_until = -math.inf
                    self._processing.discard(message)
                else:
                    # Counted from the question: the broker took it later, so its lease lasts longer than that.
                    message.held_until = asked_at + self._lease_s
        self._look()

    def _arm(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._lease_s / RENEWALS, self._renew)

    def _renew(self) -> None:
        self._timer = None
        now = self.clock()
        # What is lost must not be asked for: the broker may have sent it here once more, and would say yes for that.
        held = [message for message in self.ready if message.held_until > now]
        held += [message for message in self._processing if not message.is_settled]
        if held:
            self._ask(held, now)
            self._arm()

    def _ask(self, messages: Iterable[Message], now: float) -> None:
        ids: list[MessageId] = []
        for message in messages:
            message_id = message.id
            if message_id not in self._asked:
                self._asked[message_id] = (message, now)
                ids.append(message_id)
        if ids:
            self._extend(ids)

    def _look(self) -> None:
        self.sound_until = min((message.held_until for message in self.ready), default=math.inf)
