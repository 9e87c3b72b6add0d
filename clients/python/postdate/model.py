"""Plain values of the public API: ids, what is sent, what is answered."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import NamedTuple, overload


class SubscriptionType(enum.Enum):
    """The way in which a subscription's messages are shared out among its consumers."""

    SHARED = 1
    KEY_SHARED = 2
    EXCLUSIVE = 3
    FAILOVER = 4


def subscription_type(value: int) -> SubscriptionType:
    """The wire leaves SHARED unspecified."""
    return SubscriptionType(value) if value else SubscriptionType.SHARED


class InitialPosition(enum.Enum):
    """The place where a new subscription begins."""

    LATEST = 1
    EARLIEST = 2


class MessageId(NamedTuple):
    """Names a message for life. Ids of one topic order as the messages arrived."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """The id that `str` wrote."""
        ledger_id, _, entry_id = text.partition(":")
        if not (ledger_id.isdecimal() and entry_id.isdecimal()):
            raise ValueError(f"{text!r} is not a message id; one looks like 7:1234")
        return cls(int(ledger_id), int(entry_id))


@dataclass(slots=True)
class OutgoingMessage:
    """One message for `Producer.send_many`. The fields are those of `Producer.send`.

    It is not frozen because freezing doubles what building one costs, and lists of thousands are
    what it is for.
    """

    payload: bytes
    key: str = ""
    properties: Mapping[str, str] | None = None
    deliver_at: datetime | None = None
    deliver_after: timedelta | None = None
    schedule_key: str = ""
    ttl: timedelta | None = None
    event_time: datetime | None = None
    traceparent: str = ""
    sequence_id: int | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """The broker has stored the message: no crash can lose it.

    `publish_time` is the broker's own clock; a relative delay counts from it. `duplicate` says that this
    sequence id had been stored before: `id` is that message's, and nothing was stored now.
    """

    id: MessageId
    publish_time: datetime
    duplicate: bool = False


class IdRange(NamedTuple):
    """Consecutive ids in one ledger, and when the broker accepted the messages."""

    ledger_id: int
    first_entry_id: int
    id_count: int
    publish_time: datetime
    duplicate: bool


class Receipts(Sequence[Receipt]):
    """The receipts of one `send_many`, in the order of the list, kept as ranges of ids."""

    def __init__(self, ranges: Sequence[IdRange]) -> None:
        self.ranges: tuple[IdRange, ...] = tuple(ranges)
        self._ends = list(accumulate(ids.id_count for ids in self.ranges))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Receipt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Receipt]: ...
    def __getitem__(self, index: int | slice) -> Receipt | Sequence[Receipt]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError("no such receipt")
        which = bisect_right(self._ends, place)
        ids = self.ranges[which]
        offset = place - (self._ends[which] - ids.id_count)
        entry_id = ids.first_entry_id + offset
        return Receipt(MessageId(ids.ledger_id, entry_id), ids.publish_time, ids.duplicate)

    def __iter__(self) -> Iterator[Receipt]:
        for ledger_id, first, id_count, publish_time, duplicate in self.ranges:
            for entry_id in range(first, first + id_count):
                yield Receipt(MessageId(ledger_id, entry_id), publish_time, duplicate)

    def ids(self) -> list[MessageId]:
        """The ids alone, faster than receipt by receipt."""
        return [
            MessageId(ids.ledger_id, entry_id)
            for ids in self.ranges
            for entry_id in range(ids.first_entry_id, ids.first_entry_id + ids.id_count)
        ]

    def __repr__(self) -> str:
        return f"<Receipts of {len(self)} messages>"
