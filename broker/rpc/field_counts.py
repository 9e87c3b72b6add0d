"""Refuses requests with more fields than they can mean, on their wire form: 16 MiB of empty ones take seconds to parse.

Every request with a repeated field has a row here, which a test checks against the services. Fields inside of fields
are not counted: what holds them is bounded, and their owner knows how many it takes. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from broker.config import BrokerConfig
from broker.errors import InvalidRequest
from broker.settings import KIB

_CHEAP_BYTES = 256 * KIB
"""A request up to this size is parsed sooner than it is looked through."""
_OTHERS_MAX = 64
"""Of fields that are not repeated, and some that a later version knows."""
_COMPACTION_FILES_MAX = 20_000

MOST: Mapping[str, Callable[[BrokerConfig], int]] = {
    "postdate.v1.ProduceRequest": lambda config: config.batch_messages_max,
    "postdate.v1.AcknowledgeRequest": lambda config: config.ack_entries_max,
    "postdate.v1.NackRequest": lambda config: config.ack_entries_max,
    "postdate.v1.ExtendLeaseRequest": lambda config: config.ack_entries_max,
    "postdate.v1.RequeueDeadLettersRequest": lambda config: config.ack_entries_max,
    "postdate.v1.PurgeDeadLettersRequest": lambda config: config.ack_entries_max,
    "postdate.v1.GetStatsRequest": lambda config: config.topics_max,
    "postdate.v1.CountScheduledRequest": lambda config: config.topics_max,
    "postdate.v1.BeginCompactionRequest": lambda _: _COMPACTION_FILES_MAX,
    "postdate.v1.CommitCompactionRequest": lambda _: _COMPACTION_FILES_MAX,
}
"""How often the repeated fields of a request may occur."""


def check_field_count(kind: str, raw: bytes, config: BrokerConfig) -> None:
    """Raise InvalidRequest if a request of this kind, by its full name, has too many fields."""
    if len(raw) <= _CHEAP_BYTES:
        return
    most = _OTHERS_MAX + (MOST[kind](config) if kind in MOST else 0)
    if has_more_fields(raw, most):
        raise InvalidRequest(
            f"The request has more than {most} fields, which is the limit",
            reason="TOO_MANY_FIELDS",
            limit=most,
        )


def has_more_fields(raw: bytes, most: int) -> bool:
    """Whether a message has more fields than that; False also for what is no message, which the parser refuses."""
    at, end = 0, len(raw)
    try:
        for _ in range(most):
            if at >= end:
                return False
            tag, size = raw[at], raw[at + 1]
            if (
                tag & 0x87 == 2
            ):  # bytes under a tag of one byte, which messages and ids are: quicker than below
                if size < 0x80:
                    at += 2 + size
                    continue
                if (high := raw[at + 2]) < 0x80:
                    at += 3 + (size & 0x7F) + (high << 7)
                    continue
            tag, at = _varint(raw, at)
            match tag & 7:
                case 0:
                    _, at = _varint(raw, at)
                case 1:
                    at += 8
                case 2:
                    length, at = _varint(raw, at)
                    at += length
                case 5:
                    at += 4
                case 3 | 4:
                    pass  # a group: its fields count as ours
                case _:
                    return False
    except IndexError:
        return False
    return at < end


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value, shift = raw[at], 7
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    while shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError
