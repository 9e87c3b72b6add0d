"""Requests about the schedule, checked and turned into values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, cast

from broker.config import BrokerConfig
from broker.errors import InvalidRequest
from broker.model import (
    DELIVER_AT_MS_MAX,
    DELIVER_AT_MS_MIN,
    ENTRY_ID_MAX,
    LEDGER_ID_MAX,
    TIME_MS_MAX,
    Position,
)
from broker.settings import KIB
from broker.topics.refusals import wrong_unit
from broker.topics.schedule_values import DueRange, Move
from postdate_api.v1 import message_pb2, schedule_pb2

_OUTCOME_BYTES = 64
"""Bytes that one message adds to an answer, its key and the names of subscriptions aside."""
_ID_BYTES_MAX = 32
"""No id takes more on the wire, also alone in its set."""
_REST_BYTES_MAX = 64 * KIB
"""Nothing else of a request takes more, by far."""


@dataclass(frozen=True, slots=True)
class Named:
    """Messages that are chosen by name: in the order of the request, each as often as it comes."""

    names: Sequence[Position] | Sequence[str]
    are_possible: bool
    """True if messages can have all of these names; most requests hold thousands, and none that cannot be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what one request may name, and hold."""

    names_max: int
    key_bytes_max: int

    @classmethod
    def of(cls, config: BrokerConfig) -> Limits:
        # The answer repeats every key, and an answer that its client cannot take is worse than a request refused.
        answer = config.frame_bytes_max // (config.tuning.schedule_key_bytes_max + _OUTCOME_BYTES)
        return cls(
            max(1, min(config.tuning.schedule_names_max, answer)), config.tuning.schedule_key_bytes_max
        )

    def check_size(self, raw: bytes) -> None:
        """Refuse a request that is too long to be within the limits, before it is parsed."""
        if len(raw) > self.names_max * (_ID_BYTES_MAX + self.key_bytes_max) + _REST_BYTES_MAX:
            raise InvalidRequest(
                f"The request has {len(raw)} bytes, more than {self.names_max} ids or keys take, which is the limit",
                field="selector",
                reason="TOO_MANY_ENTRIES",
                limit=self.names_max,
            )

    def check_key(self, key: str, field: str) -> None:
        """Refuse a schedule_key that no message can have."""
        if not key:
            raise InvalidRequest("schedule_key must not be empty", field=field, reason="INVALID_SCHEDULE_KEY")
        self.check_prefix(key, field)

    def check_prefix(self, prefix: str, field: str) -> None:
        """Refuse what is longer than any schedule_key."""
        size = len(prefix.encode())
        if size > self.key_bytes_max:
            raise InvalidRequest(
                f"schedule_key has {size} bytes, over the limit of {self.key_bytes_max}",
                field=field,
                reason="SCHEDULE_KEY_TOO_LARGE",
                limit=self.key_bytes_max,
            )

    def selected(self, selector: schedule_pb2.Selector) -> Named:
        """Return what a selector means."""
        if bool(selector.entries) == bool(selector.schedule_keys):
            has = "both" if selector.entries else "none"
            raise InvalidRequest(
                f"A selector has entries or schedule_keys; this one has {has}. "
                "For messages that match a filter: StartBulkChange",
                field="selector",
                reason="INVALID_SELECTOR",
            )
        return self._ids(selector.entries) if selector.entries else self._keys(selector.schedule_keys)

    def _ids(self, sets: Sequence[message_pb2.EntrySet]) -> Named:
        count = len(sets)
        if count <= self.names_max:  # else not even the sets are walked
            count = sum(len(entry_set.entry_ids) for entry_set in sets)
        self._check_count(count, "selector.entries")
        positions: list[Position] = []
        are_possible = True
        for index, entry_set in enumerate(sets):
            if not entry_set.entry_ids:
                raise InvalidRequest(
                    "An EntrySet names no entry",
                    field=f"selector.entries[{index}].entry_ids",
                    reason="EMPTY_ENTRY_SET",
                )
            entry_ids = entry_set.entry_ids[:]
            positions += map(Position._make, zip(repeat(entry_set.ledger_id), entry_ids, strict=False))
            are_possible &= is_possible(Position(entry_set.ledger_id, max(entry_ids)))
        return Named(positions, are_possible)

    def _keys(self, given: Sequence[str]) -> Named:
        self._check_count(len(given), "selector.schedule_keys")
        keys = list(given)
        for index, key in enumerate(keys):
            self.check_key(key, f"selector.schedule_keys[{index}]")
        return Named(keys, are_possible=True)

    def _check_count(self, count: int, field: str) -> None:
        if count > self.names_max:
            raise InvalidRequest(
                f"The request names {count} messages, over the limit of {self.names_max}",
                field=field,
                reason="TOO_MANY_ENTRIES",
                limit=self.names_max,
            )


def is_possible(name: Position | str) -> bool:
    """Return whether a message can have this name."""
    return isinstance(name, str) or (name.ledger_id <= LEDGER_ID_MAX and name.entry_id <= ENTRY_ID_MAX)


def due_range(due: schedule_pb2.TimeRange, field: str) -> DueRange:
    """A range of due times, with open ends filled in."""
    for name, ms in (("start_ms", due.start_ms), ("end_ms", due.end_ms)):
        if not 0 <= ms <= TIME_MS_MAX:
            raise InvalidRequest(
                f"{name} is between 0 and {TIME_MS_MAX}", field=f"{field}.{name}", reason="INVALID_TIME_RANGE"
            )
    if due.end_ms and due.end_ms <= due.start_ms:
        raise InvalidRequest("The range ends before it begins", field=field, reason="INVALID_TIME_RANGE")
    return DueRange(due.start_ms, due.end_ms or TIME_MS_MAX + 1)


def move_of(
    request: schedule_pb2.RescheduleRequest | schedule_pb2.StartBulkChangeRequest,
    now_ms: int,
    of: Literal["time", "change"] = "time",
) -> Move:
    """The new time that a request gives, in a oneof of that name."""
    match request.WhichOneof(cast("Any", of)):
        case "deliver_at_ms":
            # 0 means unset all over this API. Taken for a time it would be "at once", for every message selected.
            if not DELIVER_AT_MS_MIN <= request.deliver_at_ms <= DELIVER_AT_MS_MAX:
                raise wrong_unit(request.deliver_at_ms, "deliver_at_ms")
            return Move(deliver_at_ms=request.deliver_at_ms)
        case "deliver_after_ms":
            if not 0 <= request.deliver_after_ms <= DELIVER_AT_MS_MAX - now_ms:
                raise InvalidRequest(
                    "deliver_after_ms must not be negative or end after the year 9999; it is in milliseconds",
                    field="deliver_after_ms",
                    reason="INVALID_DELIVER_AFTER_MS",
                )
            return Move(deliver_after_ms=request.deliver_after_ms)
        case "shift_ms":
            if abs(request.shift_ms) > TIME_MS_MAX:
                raise InvalidRequest(
                    f"shift_ms is between -{TIME_MS_MAX} and {TIME_MS_MAX}",
                    field="shift_ms",
                    reason="INVALID_SHIFT_MS",
                )
            return Move(shift_ms=request.shift_ms)
        case _:
            raise InvalidRequest(
                "The request has no new time: set deliver_at_ms, deliver_after_ms or shift_ms",
                field="time",
                reason="TIME_EXPECTED",
            )
