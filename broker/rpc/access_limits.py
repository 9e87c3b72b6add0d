"""The limits of the access file: how much callers may produce, what may be pending, how many topics there may be.

    [[limit]]
    name = "shops"                       # in refusals, metrics and the log
    principals = ["jwt:shop-*"]          # optional: each has the rates for itself; without: all callers together
    topics = ["orders-*"]                # optional: what goes to these topics, all together
    messages_per_second = 1000
    bytes_per_second = "10MiB"
    burst_ms = "1s"                      # optional: how much of the rates may be used at once

    [[limit]]
    name = "team-a"
    topics = ["a.*"]
    pending_messages = 5_000_000
    pending_bytes = "10GiB"
    topics_max = 100

All limits that match hold. What they say is here, and pure; what was used of them is in `limiter`. They hold for calls:
a bulk change at work and a recurring schedule that recurs have no caller.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from broker.rpc.access_grants import check_principals, matches, pattern_of, read_tables, texts_of
from broker.settings import (
    GIB,
    HOUR_MS,
    SECOND_MS,
    ConfigError,
    Setting,
    count,
    duration,
    parse_setting,
    size,
)

LIMITS_MAX = 1_000
"""Limits of a file; each is a label of a metric."""
_CACHED = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_RATES = {
    "messages_per_second": count(1, 1_000_000_000, ""),
    "bytes_per_second": size(1, 1_024 * GIB, ""),
}
_BURST = duration(1, HOUR_MS, "")
_TOTALS = {
    "pending_messages": count(1, 1 << 60, ""),
    "pending_bytes": size(1, 1 << 60, ""),
    "topics_max": count(1, 10_000_000, ""),
}
_TEXTS = {"name", "principals", "topics"}


@dataclass(frozen=True, slots=True)
class Limit:
    """One `[[limit]]`; 0 is none."""

    name: str
    principals: re.Pattern[str] | None = None
    """Each has the rates for itself; None: all callers have them together."""
    topics: re.Pattern[str] | None = None
    """None: all of them."""
    messages_per_second: int = 0
    bytes_per_second: int = 0
    burst_ms: int = SECOND_MS
    pending_messages: int = 0
    pending_bytes: int = 0
    topics_max: int = 0

    @property
    def has_rates(self) -> bool:
        return bool(self.messages_per_second or self.bytes_per_second)

    @property
    def has_totals(self) -> bool:
        """Return whether what is there of the topics has to be known."""
        return bool(self.pending_messages or self.pending_bytes or self.topics_max)

    def burst(self, per_second: int) -> int:
        """Part of a rate that may be used at once."""
        return max(1, per_second * self.burst_ms // SECOND_MS)

    def is_for(self, topic: str) -> bool:
        return self.topics is None or matches(self.topics, topic)


class AccessLimits:
    """All limits of one reading of the file; immutable."""

    def __init__(self, limits: tuple[Limit, ...] = ()) -> None:
        self.every = limits
        self.of_topic = lru_cache(_CACHED)(self._of_topic)
        self._of_principal = lru_cache(_CACHED)(self._find)

    def of(self, principal: str, topic: str) -> tuple[Limit, ...]:
        """Return those that hold for what a caller sends to a topic, in the order of the file."""
        if not self.every or not (limits := self.of_topic(topic)):
            return ()
        named = self._of_principal(principal)
        return tuple(each for each in limits if each.principals is None or each.name in named)

    def _of_topic(self, topic: str) -> tuple[Limit, ...]:
        return tuple(limit for limit in self.every if limit.is_for(topic))

    def _find(self, principal: str) -> frozenset[str]:
        """Names of the limits that name this principal."""
        return frozenset(
            each.name for each in self.every if each.principals and each.principals.fullmatch(principal)
        )


def parse_limits(text: str) -> AccessLimits:
    """Raises ConfigError that says which limit is wrong, and how."""
    tables = read_tables(text, "grant", "limit")["limit"]
    if len(tables) > LIMITS_MAX:
        raise ConfigError(f"there are {len(tables)} limits, more than {LIMITS_MAX}")
    limits = tuple(_limit(f"limit {number}", fields) for number, fields in enumerate(tables, 1))
    names = [limit.name for limit in limits]
    if repeated := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise ConfigError(f"two limits have the name {repeated!r}")
    return AccessLimits(limits)


def _limit(where: str, fields: dict[str, Any]) -> Limit:
    specs = {**_RATES, **_TOTALS, "burst_ms": _BURST}
    if unknown := sorted(fields.keys() - _TEXTS - specs.keys()):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}")
    name = fields.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must be up to 64 letters, digits, '.', '_' or '-', such as team-a")
    values: dict[str, Any] = {
        key: parse_setting(Setting(key, "", spec, 0), fields[key], where)
        for key, spec in specs.items()
        if key in fields
    }
    if values.keys() <= {"burst_ms"}:
        raise ConfigError(f"{where}: it limits nothing; set one of {', '.join([*_RATES, *_TOTALS])}")
    if "burst_ms" in values and not values.keys() & _RATES.keys():
        raise ConfigError(f"{where}: burst_ms is for rates, and there is none")
    principals = pattern_of(texts_of(where, fields, "principals")) if "principals" in fields else None
    if principals is not None:
        check_principals(where, fields["principals"])
        if totals := [key for key in _TOTALS if key in values]:
            raise ConfigError(
                f"{where}: {totals[0]} cannot be limited by principal, because it is not stored who produced a message "
                "or created a topic; put it in a limit of topics, without principals"
            )
    topics = pattern_of(texts_of(where, fields, "topics")) if "topics" in fields else None
    return Limit(name, principals, topics, **values)
