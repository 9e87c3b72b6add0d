"""Reasons of nacks and of dead letters: the last one of each message is kept, and some are logged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property

from pyroaring import BitMap

from broker.model import (
    Entries,
    Position,
    common_entries,
    count_entries,
    merge_entries,
    remove_entries,
)
from broker.observe.logs import CountedNotice, get_logger
from broker.runtime.clock import Clock
from broker.settings import MIB

log = get_logger(__name__)

REASONS_BYTES_MAX = MIB
"""Of one subscription; the oldest reasons are forgotten first."""
ALL_REASONS_BYTES_MAX = 64 * MIB
"""Of all subscriptions of a broker; beyond it no further ones are kept."""
REASON_OVERHEAD_BYTES = 320
"""Bytes that it takes to keep a reason, beside its text."""


class ReasonsMemory:
    """Bytes of the reasons of all subscriptions.

    A nack asks for room before its record is submitted, and who applies the record does not: so what is kept is the
    same wherever that is, whatever else is kept there.
    """

    def __init__(self, clock: Clock, bytes_max: int = ALL_REASONS_BYTES_MAX) -> None:
        self.held_bytes: int = 0
        """Of those that are kept."""
        self._bytes_max = bytes_max
        self._coming_bytes = 0  # of records on their way
        self._notice = CountedNotice(clock)

    def take(self, count: int, text: str) -> int:
        """Room for the reason of so many messages that come back, to be given back once it is kept; 0: none."""
        bytes_ = min(count * _size_of(text), REASONS_BYTES_MAX)
        if self.held_bytes + self._coming_bytes + bytes_ > self._bytes_max:
            if messages := self._notice.note(count):
                log.warning(
                    "Nack reasons are discarded because they have reached the memory limit",
                    messages=messages,
                    bytes_max=self._bytes_max,
                )
            return 0
        self._coming_bytes += bytes_
        return bytes_

    def give_back(self, bytes_: int) -> None:
        self._coming_bytes -= bytes_


class Reasons:
    """The last reason of each message that came back with one and is not settled.

    Invariant:
      REASON-1  `_bytes` is what all texts take, and at most `REASONS_BYTES_MAX`; `_noted` names the messages of
          `texts`.
    """

    __slots__ = ("_bytes", "_memory", "_noted", "texts")

    def __init__(self, memory: ReasonsMemory, texts: Mapping[Position, str] | None = None) -> None:
        self._memory = memory
        self.texts: OrderedDict[Position, str] = OrderedDict()  # oldest first
        self._noted: Entries = {}
        self._bytes = 0
        for (ledger_id, entry_id), text in (texts or {}).items():
            self.note({ledger_id: BitMap([entry_id])}, text)

    def note(self, entries: Entries, text: str) -> None:
        """Messages came back for this reason. Costs what is kept, however many came back.

        The oldest of one call are the first of the topic, as those of a record that is replayed come in that order.
        """
        self.forget(entries)
        before = self._bytes
        room = REASONS_BYTES_MAX // _size_of(text)
        for ledger_id in sorted(entries):
            kept = entries[ledger_id][:room]
            if not kept:
                break
            room -= len(kept)
            self.texts.update((Position(ledger_id, entry_id), text) for entry_id in kept)
            merge_entries(self._noted, {ledger_id: kept})
            self._bytes += len(kept) * _size_of(text)
        while self._bytes > REASONS_BYTES_MAX:
            (ledger_id, entry_id), oldest = self.texts.popitem(last=False)
            remove_entries(self._noted, {ledger_id: BitMap([entry_id])})
            self._bytes -= _size_of(oldest)
        self._memory.held_bytes += self._bytes - before

    def forget(self, entries: Entries) -> None:
        """Messages are done. Costs what is found, however much is noted."""
        noted = common_entries(entries, self._noted)
        remove_entries(self._noted, noted)
        before = self._bytes
        for ledger_id, bitmap in noted.items():
            for entry_id in bitmap:
                self._bytes -= _size_of(self.texts.pop(Position(ledger_id, entry_id)))
        self._memory.held_bytes += self._bytes - before

    def clear(self) -> None:
        """Forget all."""
        self.texts.clear()
        self._noted.clear()
        self._memory.held_bytes -= self._bytes
        self._bytes = 0

    def of(self, position: Position) -> str:
        """Return the reason of a message's last nack; empty if there was none or it was forgotten."""
        return self.texts.get(position, "")


class MessageLog:
    """Line of the log about messages of one subscription: written at once, then once a minute with all since."""

    __slots__ = ("_notice", "_sentence", "_subscription", "_topic", "_write")

    def __init__(
        self, write: Callable[..., None], sentence: str, topic: str, subscription: str, clock: Clock
    ) -> None:
        self._write = write
        self._sentence = sentence
        self._topic = topic
        self._subscription = subscription
        self._notice = CountedNotice(clock)

    def note(self, entries: Entries, **fields: object) -> None:
        """It happened to some messages, for the reasons in `fields`."""
        if not (messages := self._notice.note(count_entries(entries))):
            return
        self._write(
            self._sentence,
            topic=self._topic,
            subscription=self._subscription,
            messages=messages,
            first=first_of(entries),
            **fields,
        )


class MessageLogs:
    """Lines of the log that consumers of one subscription can cause with each message, each made when it is first asked
    for: most subscriptions need none."""

    def __init__(self, topic: str, subscription: str, clock: Clock) -> None:
        self._whose = topic, subscription, clock

    @cached_property
    def nacked(self) -> MessageLog:
        return MessageLog(log.info, "Messages were nacked", *self._whose)

    @cached_property
    def dead_lettered(self) -> MessageLog:
        return MessageLog(log.info, "Messages are moved to the dead letters", *self._whose)

    @cached_property
    def kept(self) -> MessageLog:
        return MessageLog(
            log.error,
            "Dead letters could not be stored; the messages stay in their subscription and are redelivered",
            *self._whose,
        )


def first_of(entries: Entries) -> Position:
    """Return the first position of some entries."""
    return min(Position(ledger_id, bitmap.min()) for ledger_id, bitmap in entries.items())


def _size_of(text: str) -> int:
    return REASON_OVERHEAD_BYTES + len(text.encode())
