"""What a consumer has said of its messages, and what the broker has confirmed.

    add -> gathered -> frame (request_id) -> sent -> confirmed

Pure: no I/O, no clock. Acks of one turn of the loop gather in columns per ledger, so a thousand of
them make one frame of a kilobyte or two.

Invariants:
  A1  What was asked for is in exactly one of `_gathered`, `_full`, `_sent`, until it is confirmed.
  A2  An ack survives a broken connection: it goes back and is sent again, because an ack counts
      from anyone who received the message. A nack or an extension does not: the lease it was about
      is gone, and the broker gives the message back by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from postdate._status import error_from_status
from postdate.errors import PostdateError
from postdate.model import MessageId
from postdate.v1 import consumer_pb2, message_pb2

IDS_MAX = 50_000  # a frame; well below the 16 MiB that the broker takes
FAULTS_MAX = 100  # kept for whoever asks; later ones are only counted

Done = asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Verb:
    """What is asked for; requests with the same verb share a frame."""

    kind: Literal["ack", "nack", "extend"]
    redeliver_after_ms: int = 0
    dead_letter: bool = False
    reason: str = ""
    lease_ms: int = 0


ACK = Verb("ack")


class Gathered:
    """Ids under one verb, as columns, and who waits for them."""

    __slots__ = ("barriers", "columns", "count", "verb", "waiters")

    def __init__(self, verb: Verb) -> None:
        self.verb = verb
        self.columns: dict[int, list[int]] = {}
        self.count = 0
        self.waiters: list[tuple[Sequence[MessageId], Done]] = []
        self.barriers: list[Done] = []

    def add(self, ids: Sequence[MessageId]) -> None:
        for ledger_id, entry_id in ids:
            self.columns.setdefault(ledger_id, []).append(entry_id)
        self.count += len(ids)

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
        for ids, done in self.waiters:
            guilty = [message_id for message_id in ids if message_id in faults] if faults else []
            heard.update(guilty)
            if not done.done():
                if guilty:
                    done.set_exception(faults[guilty[0]])
                else:
                    done.set_result(None)
        for message_id, fault in faults.items():
            if message_id not in heard:  # nobody waits for this one, so it is kept for close
                on_fault(fault)
        self._pass_barriers()

    def give_up(self, error: PostdateError) -> None:
        for _, done in self.waiters:
            if not done.done():
                done.set_exception(error)
        self._pass_barriers()

    def _pass_barriers(self) -> None:
        for barrier in self.barriers:
            if not barrier.done():
                barrier.set_result(None)


class Settlements:
    """Everything one consumer has asked for and not yet had confirmed."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.acks = Gathered(ACK)
        self.faults: list[PostdateError] = []
        self.faults_count = 0
        self._wake = wake
        self._gathered: dict[Verb, Gathered] = {}  # nacks and extensions
        self._full: deque[Gathered] = deque()
        self._sent: dict[int, Gathered] = {}
        self._next_request_id = 1

    @property
    def empty(self) -> bool:
        """Nothing is unsent or unconfirmed."""
        return not (self.acks.columns or self._gathered or self._full or self._sent)

    def add(self, verb: Verb, ids: Sequence[MessageId], done: Done | None = None) -> None:
        """Ask for `verb` on these ids; `done` is settled once the broker has confirmed it."""
        if verb is ACK:
            gathered = self.acks
        else:
            gathered = self._gathered.get(verb) or self._gathered.setdefault(verb, Gathered(verb))
        gathered.add(ids)
        if verb is ACK and gathered.count >= IDS_MAX:
            self._full.append(gathered)
            self.acks = Gathered(ACK)
        if done is not None:
            gathered.waiters.append((ids, done))
        self._wake()

    def add_ack(self, ledger_id: int, entry_id: int) -> None:
        """`add(ACK, ...)` for one id that nobody waits for: the hot path of a fast consumer."""
        acks = self.acks
        try:
            acks.columns[ledger_id].append(entry_id)
        except KeyError:
            acks.columns[ledger_id] = [entry_id]
            self._wake()
        acks.count += 1
        if acks.count >= IDS_MAX:
            self._full.append(acks)
            self.acks = Gathered(ACK)

    def next_frame(self) -> consumer_pb2.SubscribeRequest | None:
        """The next frame to send, oldest first; None if all has been sent."""
        if self._full:
            gathered = self._full.popleft()
        elif self.acks.columns:
            gathered, self.acks = self.acks, Gathered(ACK)
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
        if gathered is not None:
            gathered.finish(fault_table(confirmed.failures), self._on_fault)

    def disconnected(self, error: PostdateError) -> None:
        """Take back what was not confirmed (A2)."""
        unconfirmed, self._sent = self._sent, {}
        for gathered in [*unconfirmed.values(), *self._gathered.values()]:
            if gathered.verb is ACK:
                self._full.append(gathered)
            else:
                gathered.give_up(error)
        self._gathered = {}

    def give_up(self, error: PostdateError) -> None:
        """Nothing will be confirmed any more."""
        lost = [*self._sent.values(), *self._full, self.acks, *self._gathered.values()]
        self._sent, self._gathered, self.acks = {}, {}, Gathered(ACK)
        self._full.clear()
        for gathered in lost:
            gathered.give_up(error)
            if gathered.count > sum(len(ids) for ids, _ in gathered.waiters):
                self._on_fault(error)  # for those that nobody waits for

    def barriers(self, make: Callable[[], Done]) -> list[Done]:
        """Futures that are done when all that was asked for until now is confirmed or given up."""
        futures = []
        for gathered in [*self._sent.values(), *self._full, self.acks, *self._gathered.values()]:
            if gathered.columns:
                barrier = make()
                gathered.barriers.append(barrier)
                futures.append(barrier)
        return futures

    def take_faults(self) -> tuple[list[PostdateError], int]:
        faults, count = self.faults, self.faults_count
        self.faults, self.faults_count = [], 0
        return faults, count

    def _on_fault(self, fault: PostdateError) -> None:
        self.faults_count += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(fault)


def entry_sets(columns: dict[int, list[int]]) -> list[message_pb2.EntrySet]:
    return [
        message_pb2.EntrySet(ledger_id=ledger_id, entry_ids=entry_ids)
        for ledger_id, entry_ids in columns.items()
    ]


def fault_table(failures: Iterable[consumer_pb2.EntryFailure]) -> dict[MessageId, PostdateError]:
    return {
        MessageId(failure.id.ledger_id, failure.id.entry_id): error_from_status(failure.error)
        for failure in failures
    }
