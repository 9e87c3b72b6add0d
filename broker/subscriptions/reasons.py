"""Reasons of nacks: the last one of each message is kept, and some are logged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from pyroaring import BitMap

from broker.model import (
    Entries,
    Position,
    common_entries,
    count_entries,
    merge_entries,
    remove_entries,
)
from broker.observe.logs import Notice, get_logger
from broker.runtime.clock import Clock
from broker.settings import MIB

log = get_logger(__name__)

REASONS_BYTES_MAX = MIB
"""Of one subscription; the oldest reasons are forgotten first."""
REASON_OVERHEAD_BYTES = 320
"""Bytes that it takes to keep a reason, beside its text."""


class Reasons:
    """The last reason of each message that came back with one and is not settled.

    Invariant:
      REASON-1  `_bytes` is what all texts take, and at most `REASONS_BYTES_MAX`; `_noted` names the messages of
          `texts`.
    """

    def __init__(self, texts: Mapping[Position, str] | None = None) -> None:
        self.texts: OrderedDict[Position, str] = OrderedDict()  # oldest first
        self._noted: Entries = {}
        self._bytes = 0
        for (ledger_id, entry_id), text in (texts or {}).items():
            self.note({ledger_id: BitMap([entry_id])}, text)

    def note(self, entries: Entries, text: str) -> None:
        """Messages came back for this reason. Costs what is kept, however many came back."""
        self.forget(entries)
        room = REASONS_BYTES_MAX // _size_of(text)
        for ledger_id, bitmap in entries.items():
            kept = bitmap[:room]
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

    def forget(self, entries: Entries) -> None:
        """Messages are done. Costs what is found, however much is noted."""
        noted = common_entries(entries, self._noted)
        remove_entries(self._noted, noted)
        for ledger_id, bitmap in noted.items():
            for entry_id in bitmap:
                self._bytes -= _size_of(self.texts.pop(Position(ledger_id, entry_id)))

    def of(self, position: Position) -> str:
        """Return the reason of a message's last nack; empty if there was none or it was forgotten."""
        return self.texts.get(position, "")


class NackLog:
    """Logs nacks of one subscription that give a reason: one at once, then one a minute."""

    __slots__ = ("_messages", "_notice", "_subscription", "_topic")

    def __init__(self, topic: str, subscription: str, clock: Clock) -> None:
        self._topic = topic
        self._subscription = subscription
        self._notice = Notice(clock)
        self._messages = 0  # since the last line

    def note(self, entries: Entries, reason: str) -> None:
        """Messages were nacked for this reason."""
        self._messages += count_entries(entries)
        if not self._notice.is_time():
            return
        first = min(Position(ledger_id, bitmap.min()) for ledger_id, bitmap in entries.items())
        log.info(
            "Messages were nacked",
            topic=self._topic,
            subscription=self._subscription,
            messages=self._messages,
            first=first,
            reason=reason,
        )
        self._messages = 0


def _size_of(text: str) -> int:
    return REASON_OVERHEAD_BYTES + len(text.encode())
