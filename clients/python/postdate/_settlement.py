"""Settlements of messages: those that a consumer asked for, and those that the broker has confirmed.

    add -> gathered -> frame (request_id) -> sent -> confirmed

Pure: no I/O, no clock. Acks of one turn of the loop gather in columns per ledger, so a thousand of
them make one frame of a kilobyte or two.

Invariants:
  SETTLEMENT-1  What was asked for is in exactly one of `_gathered`, `_full`, `_sent`, until it is confirmed.
  SETTLEMENT-2  An ack survives a broken connection: it goes back and is sent again, because an ack counts
      from anyone who received the message. A nack or an extension does not: the lease it was about
      is gone, and the broker gives the message back by itself.
  SETTLEMENT-3  No frame names more ids than the broker takes: what is longer leaves in several frames, and whoever
      waits for it waits for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from postdate._status import error_from_status
from postdate.errors import Closed, Disconnected, PostdateError
from postdate.model import MessageId
from postdate_api.v1 import consumer_pb2, message_pb2

IDS_MAX = 10_000  # a frame, unless the broker says that it takes fewer; its default
FAULTS_MAX = 100  # kept for whoever asks; later ones are only counted

Done = asyncio.Future[None]
# Told of the ids of an extension, as columns, and of those among them whose lease was lost.
Extended = Callable[[Mapping[int, Iterable[int]], Collection[MessageId]], None]


@dataclass(frozen=True, slots=True)
class Verb:
    """A request about messages, without the messages; requests with the same verb share a frame."""

    kind: Literal["ack", "nack", "extend"]
    redeliver_after_ms: int = 0
    dead_letter: bool = False
    reason: str = ""
    lease_ms: int = 0
    release: bool = False


ACK = Verb("ack")
RELEASE = Verb("nack", release=True)


class Waiter:
    """Somebody who waits for ids that leave in one frame, or in several."""

    __slots__ = ("_done", "_frames")

    def __init__(self, done: Done) -> None:
        self._done = done
        self._frames = 0

    def add_frame(self) -> None:
        self._frames += 1

    def settle_frame(self) -> None:
        self._frames -= 1
        if not self._frames and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: PostdateError) -> None:
        if not self._done.done():
            self._done.set_exception(error)


class SettlementIds:
    """Ids under one verb, as columns, and who waits for them."""

    __slots__ = ("barriers", "columns", "count", "verb", "waiters")

    def __init__(self, verb: Verb) -> None:
        self.verb: Verb = verb
        self.columns: dict[int, list[int]] = {}
        self.count: int = 0
        self.waiters: list[tuple[Sequence[tuple[int, int]], Waiter]] = []
        self.barriers: list[Waiter] = []

    def add(self, ids: Sequence[tuple[int, int]]) -> None:
        for ledger_id, entry_id in ids:
            try:
                self.columns[ledger_id].append(entry_id)
            except KeyError:
                self.columns[ledger_id] = [entry_id]
        self.count += len(ids)

    def wait(self, ids: Sequence[tuple[int, int]], waiter: Waiter) -> None:
        waiter.add_frame()
        self.waiters.append((ids, waiter))

    def bar(self, barrier: Waiter) -> None:
        barrier.add_frame()
        self.barriers.append(barrier)

    def split(self, ids_max: int) -> list[SettlementIds]:
        """The same in parts of at most so many ids."""
        if self.count <= ids_max:
            return [self]
        ids = [
            MessageId(ledger_id, entry_id)
            for ledger_id, entry_ids in self.columns.items()
            for entry_id in entry_ids
        ]
        parts: list[SettlementIds] = []
        for start in range(0, len(ids), ids_max):
            part = SettlementIds(self.verb)
            part.add(ids[start : start + ids_max])
            here = set(ids[start : start + ids_max])
            for waited, waiter in self.waiters:
                if some := [each for each in waited if each in here]:
                    part.wait(some, waiter)
            for barrier in self.barriers:
                part.bar(barrier)
            parts.append(part)
        for waiter in [*(waiter for _, waiter in self.waiters), *self.barriers]:
            waiter.settle_frame()  # the parts count now
        return parts

    def frame(self, request_id: int) -> consumer_pb2.SubscribeRequest:
        frame = consumer_pb2.SubscribeRequest()
        verb = self.verb
        if verb.kind == "ack":
            body: consumer_pb2.Ack | consumer_pb2.Nack | consumer_pb2.Extend = frame.ack
        elif verb.kind == "nack":
            body = frame.nack
            body.redeliver_after_ms = verb.redeliver_after_ms
            body.dead_letter = verb.dead_letter
            body.reason = verb.reason
            body.release = verb.release
        else:
            body = frame.extend
            body.lease_ms = verb.lease_ms
        body.request_id = request_id
        body.entries.extend(entry_sets(self.columns))
        return frame

    def finish(
        self, faults: dict[MessageId, PostdateError], on_fault: Callable[[PostdateError], None]
    ) -> None:
        heard: set[MessageId] = set()
        for ids, waiter in self.waiters:
            guilty = [MessageId(*each) for each in ids if each in faults] if faults else []
            heard.update(guilty)
            if guilty:
                waiter.fail(faults[guilty[0]])
            waiter.settle_frame()
        for message_id, fault in faults.items():
            # Nobody waits for this one, so it is kept for close. A nack that came too late is no fault: the
            # message comes back all the same, or is somebody else's.
            if message_id not in heard and self.verb is ACK:
                on_fault(fault)
        self._pass_barriers()

    def give_up(self, error: PostdateError) -> None:
        for _, waiter in self.waiters:
            waiter.fail(error)
        self._pass_barriers()

    def _pass_barriers(self) -> None:
        for barrier in self.barriers:
            barrier.settle_frame()


class Settlements:
    """Everything one consumer has asked for and not yet had confirmed."""

    def __init__(self, wake: Callable[[], None], extended: Extended) -> None:
        self.acks: SettlementIds = SettlementIds(ACK)
        self.faults: list[PostdateError] = []
        self.faults_count: int = 0
        self.is_connected: bool = False
        self.refusal: PostdateError | None = Closed("the subscription is closed")
        """Nothing can be asked, for this reason; None: acks can be, the rest while there is a connection."""
        self._wake = wake
        self._extended = extended
        self._ids_max = IDS_MAX
        self._gathered: dict[Verb, SettlementIds] = {}  # nacks and extensions
        self._full: deque[SettlementIds] = deque()
        self._sent: dict[int, SettlementIds] = {}
        self._next_request_id = 1

    @property
    def empty(self) -> bool:
        """Nothing is unsent or unconfirmed."""
        return not (self.acks.columns or self._gathered or self._full or self._sent)

    def open(self) -> None:
        """There is a consumer: acks may be asked for, connected or not."""
        self.refusal = None

    def check(self, verb: Verb = ACK) -> None:
        """Raise what keeps from asking for this."""
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)
        if verb is not ACK and not self.is_connected:
            raise Disconnected("the connection broke, which ended the lease")

    async def settle(self, verb: Verb, ids: Sequence[tuple[int, int]]) -> None:
        """Ask, and wait for the confirmation."""
        self.check(verb)
        done: Done = asyncio.get_running_loop().create_future()
        self.add(verb, ids, done)
        await done

    def settle_nowait(self, verb: Verb, ids: Sequence[tuple[int, int]]) -> None:
        """Ask without waiting, if there is a connection."""
        if self.is_connected:
            self.add(verb, ids)

    async def wait_confirmed(self) -> None:
        """Wait until everything asked for so far is durable, and raise the first failure that nobody waited for."""
        await self.all_confirmed()
        self.raise_faults()

    async def all_confirmed(self) -> None:
        """Wait until everything asked for so far is durable, or has failed."""
        if barriers := self.barriers(asyncio.get_running_loop().create_future):
            await asyncio.wait(barriers)

    def connected(self, ids_max: int) -> None:
        """There is a connection. Frames stay within what the broker takes (SETTLEMENT-3); 0 if it does not say."""
        self.is_connected = True
        self._ids_max = min(ids_max or IDS_MAX, IDS_MAX)
        # Acks of the connection before may have gathered under a greater limit.
        self._full = deque(part for gathered in self._full for part in gathered.split(self._ids_max))
        if self.acks.count >= self._ids_max:
            self._full += self.acks.split(self._ids_max)
            self.acks = SettlementIds(ACK)

    def add(self, verb: Verb, ids: Sequence[tuple[int, int]], done: Done | None = None) -> None:
        """Ask for `verb` on these ids; `done` is settled once the broker has confirmed it."""
        waiter = None if done is None else Waiter(done)
        start = 0
        while True:
            gathered = self._open(verb)
            end = start + self._ids_max - gathered.count
            part = ids[start:end]
            gathered.add(part)
            if waiter is not None:
                gathered.wait(part, waiter)
            if gathered.count >= self._ids_max:
                self._seal(gathered)
            start = end
            if start >= len(ids):
                break
        self._wake()

    def _open(self, verb: Verb) -> SettlementIds:
        """The request that gathers under a verb; it has room for one id at least."""
        if verb is ACK:
            return self.acks
        return self._gathered.get(verb) or self._gathered.setdefault(verb, SettlementIds(verb))

    def _seal(self, gathered: SettlementIds) -> None:
        self._full.append(gathered)
        if gathered is self.acks:
            self.acks = SettlementIds(ACK)
        else:
            del self._gathered[gathered.verb]

    def add_ack(self, ledger_id: int, entry_id: int) -> None:
        """`add(ACK, ...)` for one id that nobody waits for: the hot path of a fast consumer."""
        acks = self.acks
        try:
            acks.columns[ledger_id].append(entry_id)
        except KeyError:
            acks.columns[ledger_id] = [entry_id]
            self._wake()
        acks.count += 1
        if acks.count >= self._ids_max:
            self._seal(acks)

    def next_frame(self) -> consumer_pb2.SubscribeRequest | None:
        """The next frame to send, oldest first; None if all has been sent."""
        if self._full:
            gathered = self._full.popleft()
        elif self.acks.columns:
            gathered, self.acks = self.acks, SettlementIds(ACK)
        elif self._gathered:
            gathered = self._gathered.pop(next(iter(self._gathered)))
        else:
            return None
        request_id = self._next_request_id
        self._next_request_id += 1
        self._sent[request_id] = gathered
        return gathered.frame(request_id)

    def confirm(self, confirmed: consumer_pb2.Confirmed) -> None:
        """Settle one frame. Answers to frames of an earlier connection are nobody's any more."""
        gathered = self._sent.pop(confirmed.request_id, None)
        if gathered is None:
            return
        faults = faults_of(gathered.verb, confirmed.failures)
        if gathered.verb.kind == "extend":
            self._extended(gathered.columns, faults)
        gathered.finish(faults, self._on_fault)

    def disconnected(self, error: PostdateError) -> None:
        """Take back what was not confirmed (SETTLEMENT-2)."""
        self.is_connected = False
        left = [*self._full, *self._sent.values(), *self._gathered.values()]
        self._full.clear()
        self._sent = {}
        for gathered in left:
            if gathered.verb is ACK:
                self._full.append(gathered)
            else:
                gathered.give_up(error)
        self._gathered = {}

    def give_up(self, error: PostdateError) -> None:
        """Nothing will be confirmed any more, and nothing can be asked."""
        self.is_connected = False
        self.refusal = error
        lost = [*self._sent.values(), *self._full, self.acks, *self._gathered.values()]
        self._sent, self._gathered, self.acks = {}, {}, SettlementIds(ACK)
        self._full.clear()
        for gathered in lost:
            gathered.give_up(error)
            if gathered.verb is ACK and gathered.count > sum(len(ids) for ids, _ in gathered.waiters):
                self._on_fault(error)  # for those that nobody waits for

    def close(self, error: PostdateError) -> None:
        """The consumer has left."""
        self.give_up(error)
        self.refusal = Closed("the subscription is closed")

    def barriers(self, make: Callable[[], Done]) -> list[Done]:
        """Futures that are done when all that was asked for until now is confirmed or given up."""
        futures: list[Done] = []
        for gathered in [*self._sent.values(), *self._full, self.acks, *self._gathered.values()]:
            if gathered.columns:
                barrier = make()
                gathered.bar(Waiter(barrier))
                futures.append(barrier)
        return futures

    def take_faults(self) -> tuple[list[PostdateError], int]:
        faults, count = self.faults, self.faults_count
        self.faults, self.faults_count = [], 0
        return faults, count

    def raise_faults(self) -> None:
        """Raise the first failure that nobody waited for, once."""
        faults, count = self.take_faults()
        if faults:
            if count > 1:
                faults[0].add_note(f"{count - 1} more acks failed")
            raise faults[0]

    def _on_fault(self, fault: PostdateError) -> None:
        self.faults_count += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(fault)


def entry_sets(columns: dict[int, list[int]]) -> list[message_pb2.EntrySet]:
    return [
        message_pb2.EntrySet(ledger_id=ledger_id, entry_ids=entry_ids)
        for ledger_id, entry_ids in columns.items()
    ]


def faults_of(verb: Verb, failures: Iterable[consumer_pb2.EntryFailure]) -> dict[MessageId, PostdateError]:
    """Failures of what was asked for.

    Of an ack, NOT_FOUND did not: the subscription was moved past the message (seek, skip) while it was held here,
    and an ack asks for no more than that it does not come back. To raise would let an operator's skip end consumers
    that did nothing wrong.
    """
    faults = fault_table(failures)
    if verb.kind != "ack":
        return faults
    return {message_id: fault for message_id, fault in faults.items() if fault.reason != "NOT_FOUND"}


def fault_table(failures: Iterable[consumer_pb2.EntryFailure]) -> dict[MessageId, PostdateError]:
    return {
        MessageId(failure.id.ledger_id, failure.id.entry_id): error_from_status(failure.error)
        for failure in failures
    }
