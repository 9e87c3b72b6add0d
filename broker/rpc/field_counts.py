"""Refuses requests with more elements than they can mean, on their wire form: 16 MiB of empty ones take seconds to
parse.

An element is a field at any depth, or a number of a packed field. Every request with a repeated field somewhere has a
row here, which a test checks against the services. Of a produce request the messages count as one each: whoever decodes
them counts what is in them, message by message. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from broker.config import BrokerConfig
from broker.errors import InvalidRequest
from broker.folder.compaction_leases import INPUTS_MAX
from broker.settings import KIB
from broker.storage.recurring_values import TIMES_MAX

CHEAP_BYTES = 256 * KIB
"""A request up to this size is parsed sooner than it is looked through."""
OTHERS_MAX = 64
"""Of fields that are not repeated, and some that a later version knows."""
_OF_ID = 4
"""Elements of an id that is alone in its set: the set, its ledger, the field of ids, the id."""
_PATHS_MAX = 256
_STATES_MAX = 16
_OF_OUTPUT = 16
_HIGH_BYTES = bytes(range(0x80, 0x100))
_WIDTHS = {1: 8, 5: 4, 3: 0, 4: 0}
"""Of numbers of fixed width; of the ends of a group, whose fields count as ours."""
_VARINTS = (
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_BOOL,
    FieldDescriptor.TYPE_ENUM,
)

MOST: Mapping[str, Callable[[BrokerConfig], int]] = {
    "postdate.broker.ProduceEnvelope": lambda config: config.tuning.batch_messages_max,
    "postdate.v1.SubscribeRequest": lambda config: _OF_ID * config.tuning.ack_entries_max,
    "postdate.v1.AcknowledgeRequest": lambda config: _OF_ID * config.tuning.ack_entries_max,
    "postdate.v1.NackRequest": lambda config: _OF_ID * config.tuning.ack_entries_max,
    "postdate.v1.ExtendLeaseRequest": lambda config: _OF_ID * config.tuning.ack_entries_max,
    "postdate.v1.ListOwedRequest": lambda _: _STATES_MAX,
    "postdate.v1.RequeueDeadLettersRequest": lambda config: _OF_ID * config.tuning.ack_entries_max,
    "postdate.v1.PurgeDeadLettersRequest": lambda config: _OF_ID * config.tuning.ack_entries_max,
    "postdate.v1.CancelScheduledRequest": lambda config: _OF_ID * config.tuning.schedule_names_max,
    "postdate.v1.RescheduleRequest": lambda config: _OF_ID * config.tuning.schedule_names_max,
    "postdate.v1.PutRecurringRequest": lambda config: TIMES_MAX + 3 * config.tuning.properties_count_max,
    "postdate.v1.PreviewRecurringRequest": lambda config: TIMES_MAX + 3 * config.tuning.properties_count_max,
    "postdate.v1.GetStatsRequest": lambda config: config.topics_max,
    "postdate.v1.CountScheduledRequest": lambda config: config.topics_max,
    "postdate.v1.UpdateTopicRequest": lambda _: _PATHS_MAX,
    "postdate.v1.UpdateSubscriptionRequest": lambda _: _PATHS_MAX,
    "postdate.v1.BeginCompactionRequest": lambda _: INPUTS_MAX,
    "postdate.v1.CommitCompactionRequest": lambda _: _OF_OUTPUT * INPUTS_MAX,
}
"""Number of elements that the repeated fields of a request may have."""

Inside = Mapping[int, Any]
"""By number, the fields that hold elements of their own: what is inside a message, or `None` of packed varints, or the
width of packed numbers."""


def check_field_count(kind: Any, raw: bytes, config: BrokerConfig) -> None:
    """Raise InvalidRequest if a request, of the kind that a descriptor tells, has too many elements."""
    if len(raw) <= CHEAP_BYTES:
        return
    of_repeated = MOST.get(kind.full_name)
    most = OTHERS_MAX + (of_repeated(config) if of_repeated is not None else 0)
    if has_more_fields(raw, most, inside(kind)):
        raise too_many_fields("The request", most)


def too_many_fields(what: str, most: int, field: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"{what} has more fields than the limit of {most}",
        reason="TOO_MANY_FIELDS",
        field=field,
        limit=most,
    )


@cache
def inside(kind: Any) -> Inside:
    """Return what of a message holds elements of its own."""
    shapes: dict[int, Any] = {}
    for field in kind.fields:
        if field.message_type is not None:
            shapes[field.number] = inside(field.message_type)
        elif field.is_packed:
            shapes[field.number] = None if field.type in _VARINTS else _width(field)
    return shapes


def _width(field: FieldDescriptor) -> int:
    is_short = field.type in (
        FieldDescriptor.TYPE_FLOAT,
        FieldDescriptor.TYPE_FIXED32,
        FieldDescriptor.TYPE_SFIXED32,
    )
    return 4 if is_short else 8


def has_more_fields(raw: bytes, most: int, within: Inside) -> bool:
    """Tell whether a message has more elements than that.

    Bytes that are no message count up to where they are none: the parser comes no further either.
    """
    left = most
    spans = [(0, len(raw), within)]
    while spans:
        left = _walk(raw, *spans.pop(), spans, left)
        if left < 0:
            return True
    return False


def _walk(
    raw: bytes, at: int, end: int, within: Inside, spans: list[tuple[int, int, Inside]], left: int
) -> int:
    """Return what is left when the fields of one message are taken off; messages inside of it are added to `spans`."""
    try:
        while at < end:
            left -= 1
            if left < 0:
                break
            tag, size = raw[at], raw[at + 1]
            # Bytes under a tag of one byte, which messages of a batch are: quicker than below.
            if tag & 0x87 == 2 and tag >> 3 not in within:
                if size < 0x80:
                    at += 2 + size
                    continue
                if (high := raw[at + 2]) < 0x80:
                    at += 3 + (size & 0x7F) + (high << 7)
                    continue
            tag, at = _varint(raw, at)
            wire_type = tag & 7
            if wire_type == 2:
                length, at = _varint(raw, at)
                if tag >> 3 in within:
                    left -= _elements(raw, at, length, within[tag >> 3], spans)
                at += length
            elif wire_type == 0:
                _, at = _varint(raw, at)
            elif (width := _WIDTHS.get(wire_type)) is not None:
                at += width
            else:
                break
    except IndexError:
        pass
    return left


def _elements(raw: bytes, at: int, length: int, held: Any, spans: list[tuple[int, int, Inside]]) -> int:
    """Return how many packed numbers a field has; a message is added to `spans`."""
    if held is None:
        return len(raw[at : at + length].translate(None, _HIGH_BYTES))
    if isinstance(held, int):
        return length // held
    spans.append((at, at + length, held))
    return 0


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
