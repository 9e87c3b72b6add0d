"""A list of messages as the wire has it, written field by field over the whole list and not message by message.

    for each message:  0x12 length | payload | key | properties | times | ...

The bytes are those that protobuf writes for the same messages. A field that no message of a list has costs one look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import Any, TypeVar, cast

from postdate._time import DURATION_MS_MAX, duration_ms, epoch_ms
from postdate.model import OutgoingMessage
from postdate_api.v1 import message_pb2, producer_pb2

_days = attrgetter("days")
_HEADS_MAX = 4_096
_VARINT, _LENGTH = 0, 2  # wire types

Column = Iterable[bytes]
T = TypeVar("T")


def _tags(kind: Any, **wire_types: int) -> dict[str, bytes]:
    """Tags of all fields of a message; LookupError at import if the proto has others."""
    numbers = {field.name: field.number for field in kind.DESCRIPTOR.fields}
    if numbers.keys() != wire_types.keys():
        raise LookupError(f"the fields of {kind.DESCRIPTOR.full_name} are {', '.join(numbers)}")
    return {name: bytes((number << 3 | wire_types[name],)) for name, number in numbers.items()}


_TAGS = _tags(
    message_pb2.Message,
    payload=_LENGTH,
    key=_LENGTH,
    properties=_LENGTH,
    deliver_at_ms=_VARINT,
    deliver_after_ms=_VARINT,
    schedule_key=_LENGTH,
    ttl_ms=_VARINT,
    sequence_id=_VARINT,
    event_time_ms=_VARINT,
    traceparent=_LENGTH,
)
_PROPERTY = _tags(message_pb2.Message.PropertiesEntry, key=_LENGTH, value=_LENGTH)
_SEQUENCE_LEADS = [_TAGS["sequence_id"] + bytes((low | 0x80,)) for low in range(0x80)]
_MESSAGES = bytes((producer_pb2.ProduceRequest.DESCRIPTOR.fields_by_name["messages"].number << 3 | _LENGTH,))


def _varint(value: int) -> bytes:
    low = value & 0x7F | 0x80
    if value < 0x80:
        # As protobuf does: a negative number is that of 64 bits.
        return bytes((value,)) if value >= 0 else _varint(value + (1 << 64))
    if value < 1 << 14:
        return bytes((low, value >> 7))
    if value < 1 << 21:
        return bytes((low, value >> 7 & 0x7F | 0x80, value >> 14))
    if value < 1 << 28:
        return bytes((low, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21))
    middle = (value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21 & 0x7F | 0x80)
    return bytes((low, *middle)) + _varint(value >> 28)


class _Heads(dict[int, bytes]):
    """Tag and length that stand before a content, by its length. Those of short ones are kept."""

    def __init__(self, tag: bytes, empty: bytes | None = b"") -> None:
        self._tag = tag
        if empty is not None:
            self[0] = empty

    def __missing__(self, length: int) -> bytes:
        head = self._tag + _varint(length)
        if length < _HEADS_MAX:
            self[length] = head
        return head


_FRAME_HEADS = _Heads(_MESSAGES, empty=None)
_PAYLOAD_HEADS = _Heads(_TAGS["payload"])
_KEY_HEADS = _Heads(_TAGS["key"])
_SCHEDULE_KEY_HEADS = _Heads(_TAGS["schedule_key"])
_TRACEPARENT_HEADS = _Heads(_TAGS["traceparent"])
_PROPERTIES_HEADS = _Heads(_TAGS["properties"], empty=None)
_NAME_HEADS = _Heads(_PROPERTY["key"], empty=None)
_VALUE_HEADS = _Heads(_PROPERTY["value"], empty=None)


def encode_message(
    payload: bytes,
    *,
    key: str,
    properties: Mapping[str, str] | None,
    deliver_at: datetime | None,
    deliver_after: timedelta | None,
    schedule_key: str,
    ttl: timedelta | None,
    sequence_id: int | None,
    event_time: datetime | None,
    traceparent: str,
) -> bytes:
    """One message, for `framed`; most have little, so it is asked before anything is written."""
    body = _PAYLOAD_HEADS[len(payload)] + payload
    if key:
        body += _text("key", _KEY_HEADS, key)
    if properties:
        body += _properties(properties)
    if deliver_at is not None or deliver_after is not None:
        body += encode_times(deliver_at, deliver_after)
    if schedule_key:
        body += _text("schedule_key", _SCHEDULE_KEY_HEADS, schedule_key)
    if ttl is not None:
        body += _ttl(ttl)
    if sequence_id is not None:
        body += _TAGS["sequence_id"] + _varint(sequence_id)
    if event_time is not None:
        body += _event_time(event_time)
    if traceparent:
        body += encode_traceparent(traceparent)
    return body


def encode_traceparent(traceparent: str) -> bytes:
    """The last field of a message; nothing if it is empty."""
    return _text("traceparent", _TRACEPARENT_HEADS, traceparent)


def encode_times(deliver_at: datetime | None, deliver_after: timedelta | None) -> bytes:
    """The fields of a message that say when it is due."""
    _refuse_both(deliver_at, deliver_after)
    return _deliver_at(deliver_at) + _deliver_after(deliver_after)


def encode_payloads(
    payloads: Sequence[bytes],
    sizes: Sequence[int],
    times: bytes,
    sequence_ids: Sequence[int] | None,
    traceparent: str,
) -> bytes:
    """Messages with nothing of their own but payload, of these sizes, and number."""
    trace = encode_traceparent(traceparent)
    if sequence_ids is None:
        # All that is around a payload depends on its length alone.
        rest = times + trace
        heads: dict[int, bytes] = {}
        is_one_size = sizes.count(sizes[0]) == len(sizes)
        for size in sizes[:1] if is_one_size else set(sizes):
            head = _PAYLOAD_HEADS[size]
            heads[size] = _FRAME_HEADS[len(head) + size + len(rest)] + head
        if is_one_size:  # one separator, which costs a fifth
            [head] = heads.values()
            return b"".join((head, (rest + head).join(payloads), rest))
        parts = [rest] * (3 * len(payloads))
        parts[0::3] = map(heads.__getitem__, sizes)
        parts[1::3] = payloads
        return b"".join(parts)
    columns = [
        *_contents(_PAYLOAD_HEADS, payloads),
        repeat(times),
        _sequence_ids(sequence_ids),
        repeat(trace),
    ]
    return framed(_rows(columns))


def encode_messages(
    messages: Sequence[OutgoingMessage], sequence_ids: Sequence[int] | None, traceparent: str
) -> bytes:
    """Messages with all they have. Raises TypeError and ValueError for what cannot be sent."""
    payloads = [message.payload for message in messages]
    for payload in payloads:
        if not isinstance(payload, bytes):
            raise TypeError(f"payload must be bytes, not {type(payload).__name__}")
    columns: list[Column] = [*_contents(_PAYLOAD_HEADS, payloads)]
    columns += _texts("key", _KEY_HEADS, [message.key for message in messages])
    properties = [message.properties for message in messages]
    if any(properties):
        columns.append(map(_properties, properties))
    deliver_at = [message.deliver_at for message in messages]
    deliver_after = [message.deliver_after for message in messages]
    if deliver_at.count(None) < len(messages) and deliver_after.count(None) < len(messages):
        for at, after in zip(deliver_at, deliver_after, strict=True):
            _refuse_both(at, after)
    columns += _column(deliver_at, _deliver_at)
    columns += _delays(deliver_after)
    columns += _texts("schedule_key", _SCHEDULE_KEY_HEADS, [message.schedule_key for message in messages])
    columns += _column([message.ttl for message in messages], _ttl)
    if sequence_ids is not None:
        columns.append(_sequence_ids(sequence_ids))
    columns += _column([message.event_time for message in messages], _event_time)
    traceparents = [message.traceparent for message in messages]
    if traceparent:
        traceparents = [each or traceparent for each in traceparents]
    columns += _texts("traceparent", _TRACEPARENT_HEADS, traceparents)
    return framed(_rows(columns))


def framed(messages: Sequence[bytes]) -> bytes:
    """Encoded messages as `ProduceRequest.messages`."""
    parts = [b""] * (2 * len(messages))
    parts[0::2] = map(_FRAME_HEADS.__getitem__, map(len, messages))
    parts[1::2] = messages
    return b"".join(parts)


def _rows(columns: Sequence[Column]) -> list[bytes]:
    # Not strict: some columns repeat one value without end. The first has as many as there are messages.
    return list(map(b"".join, zip(*columns, strict=False)))


def _contents(heads: _Heads, contents: Sequence[bytes]) -> tuple[Column, Column]:
    return map(heads.__getitem__, map(len, contents)), contents


def _column(values: Sequence[T | None], encode: Callable[[T | None], bytes]) -> Sequence[Column]:
    if values.count(None) == len(values):
        return ()
    first = values[0]
    # Often all have one object, such as the delay of a whole list. It is not enough that they are equal: a local time
    # that a change of clocks repeats is, and names two moments.
    if first is values[-1] and all(map(is_, values, repeat(first))):
        return (repeat(encode(first)),)
    return (map(encode, values),)


def _delays(spans: Sequence[timedelta | None]) -> Sequence[Column]:
    """As `_column`: of delays of their own, which are common, it costs half."""
    if spans[0] is spans[-1] or set(map(type, spans)) != {timedelta}:
        return _column(spans, _deliver_after)
    delays = cast(Sequence[timedelta], spans)
    # Rounded up, as `duration_ms` does.
    delays_ms = [(span.days * 86_400 + span.seconds) * 1_000 - -span.microseconds // 1_000 for span in delays]
    if min(map(_days, delays)) < 0 or max(delays_ms) > DURATION_MS_MAX:
        return _column(spans, _deliver_after)  # which says what is wrong
    tag = _TAGS["deliver_after_ms"]
    return ([tag + _varint(delay_ms) if delay_ms else b"" for delay_ms in delays_ms],)


def _sequence_ids(sequence_ids: Sequence[int]) -> Column:
    tag = _TAGS["sequence_id"]
    first, last = sequence_ids[0], sequence_ids[-1]
    if first < 0x80 or not all(map(eq, sequence_ids, range(first, first + len(sequence_ids)))):
        return [tag + _varint(each) for each in sequence_ids]
    # They rise by one, as a producer's own do: each 128 have all but their first octet in common.
    column: list[bytes] = []
    for high in range(first >> 7, (last >> 7) + 1):
        rest = _varint(high)
        start, end = max(first - (high << 7), 0), min(last - (high << 7), 0x7F)
        column += [lead + rest for lead in _SEQUENCE_LEADS[start : end + 1]]
    return column


def _texts(field: str, heads: _Heads, texts: Sequence[str]) -> Sequence[Column]:
    if not any(texts):
        return ()
    try:
        return _contents(heads, [str.encode(text) if text else b"" for text in texts])
    except (TypeError, ValueError):
        for text in filter(None, texts):
            _check_text(field, text)
        raise


def _text(field: str, heads: _Heads, text: str) -> bytes:
    try:
        content = str.encode(text)
    except (TypeError, ValueError):
        _check_text(field, text)
        raise
    return heads[len(content)] + content


def _properties(properties: Mapping[str, str] | None) -> bytes:
    if not properties:
        return b""
    parts: list[bytes] = []
    try:
        for name, value in properties.items():
            raw_name, raw_value = str.encode(name), str.encode(value)
            name_head, value_head = _NAME_HEADS[len(raw_name)], _VALUE_HEADS[len(raw_value)]
            length = len(name_head) + len(raw_name) + len(value_head) + len(raw_value)
            parts += (_PROPERTIES_HEADS[length], name_head, raw_name, value_head, raw_value)
    except (TypeError, ValueError, AttributeError):
        check_properties(properties)
        raise
    return b"".join(parts)


def _deliver_at(moment: datetime | None) -> bytes:
    return _number(_TAGS["deliver_at_ms"], epoch_ms(moment, "deliver_at")) if moment is not None else b""


def _deliver_after(span: timedelta | None) -> bytes:
    return _number(_TAGS["deliver_after_ms"], duration_ms(span, "deliver_after")) if span is not None else b""


def _ttl(span: timedelta | None) -> bytes:
    if span is None:
        return b""
    ttl_ms = duration_ms(span, "ttl")
    if not ttl_ms:
        raise ValueError("ttl must be greater than zero; omit it to use the topic's default")
    return _number(_TAGS["ttl_ms"], ttl_ms)


def _event_time(moment: datetime | None) -> bytes:
    return _number(_TAGS["event_time_ms"], epoch_ms(moment, "event_time")) if moment is not None else b""


def _number(tag: bytes, value: int) -> bytes:
    return tag + _varint(value) if value else b""


def _refuse_both(deliver_at: datetime | None, deliver_after: timedelta | None) -> None:
    if deliver_at is not None and deliver_after is not None:
        raise ValueError("give deliver_at or deliver_after, not both")


def check_properties(properties: object) -> None:
    """Say what is wrong with properties, if anything is: looked at once something went wrong, as it costs."""
    if not isinstance(properties, Mapping):
        raise TypeError(f"properties must be a mapping of str to str, not {type(properties).__name__}")
    for name, value in cast(Mapping[object, object], properties).items():
        _check_text(f"a name in properties, {name!r},", name)
        _check_text(f"properties[{name!r}]", value)


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{field} must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} cannot be sent as UTF-8: {error}") from None
