"""Turns a produce request's bytes into a `Batch`, once: checked, in columns, with the messages as they came.

The request is parsed with `messages` as bytes, which is wire-compatible with `repeated Message`; the messages
themselves are read in bulk (`wire.py`). The typed parser is asked where only it can tell: for messages with text
(invalid UTF-8 must not reach a consumer's parser) and for messages that are not in plain form, which it rewrites. It is
also asked where it costs less: for small requests, whose messages are plain if it writes them as they came. Side by
side, all of these are one message with each field repeated, and so the parser gives columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from broker.config import TRACEPARENT_BYTES_MAX, BrokerConfig, check_name
from broker.errors import InvalidRequest
from broker.model import (
    DELIVER_AT_MS_MAX,
    DELIVER_AT_MS_MIN,
    Batch,
    Int64Column,
    KeySpans,
    UInt32Column,
    UInt64Column,
)
from broker.rpc.field_counts import CHEAP_BYTES, OTHERS_MAX, has_more_fields, inside, too_many_fields
from broker.rpc.wire import Fields, find_frames, scan_messages
from broker.settings import KIB
from broker.storage import schedule_hash
from broker.storage.message_fields import FRAME_HEAD, tag_of
from broker.storage.varint import encode_varint
from broker.topics.refusals import wrong_unit
from postdate_api.v1 import message_pb2, producer_pb2

PRODUCER_NAME_BYTES_MAX = 255

_FEW_MESSAGES = 16
"""Up to so many messages, the typed parser costs less than the NumPy calls that many share."""
_TYPED_MESSAGES = 128
_TYPED_BYTES = 128 * KIB
"""Up to so many in so many bytes, or in so many bytes where none has a field with a limit, it costs less if they turn
out to be plain, and need not be written anew."""
_PLAIN_FIELDS = len(message_pb2.Message.DESCRIPTOR.fields) - 1  # apart from properties
_OF_PROPERTY = 3  # the property, its name, its value
_INSIDE_MESSAGE = inside(message_pb2.Message.DESCRIPTOR)
_NAMES = frozenset(message_pb2.Message.DESCRIPTOR.fields_by_name)
_WITHOUT_LIMIT = frozenset(
    ("payload", "deliver_at_ms", "deliver_after_ms", "ttl_ms", "sequence_id", "event_time_ms")
)
"""Fields without a limit of their own; a payload that fits with the rest of its message fits, too."""


def _zeros(dtype: Any) -> Any:
    """A column of few messages that have nothing there, one for all of them."""
    zeros = np.zeros(_FEW_MESSAGES, dtype)
    zeros.flags.writeable = False
    return zeros


_NO_KEY_HASHES = _zeros(np.uint32)
_NO_SCHEDULE_HASHES = _zeros(np.uint64)
_TOPIC_HEAD = bytes((tag_of("topic", producer_pb2.ProduceRequest),))


def _envelope_class() -> Any:
    """ProduceRequest with `repeated bytes messages`. In a pool of its own: the name is nobody else's business."""
    file = descriptor_pb2.FileDescriptorProto(
        name="envelope.proto", package="postdate.broker", syntax="proto3"
    )
    message = file.message_type.add()
    producer_pb2.ProduceRequest.DESCRIPTOR.CopyToProto(message)
    message.name = "ProduceEnvelope"
    [messages] = (field for field in message.field if field.name == "messages")
    messages.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    messages.ClearField("type_name")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("postdate.broker.ProduceEnvelope"))


ProduceEnvelope = _envelope_class()


def _columns_class() -> Any:
    """Message with each field repeated: messages side by side are one of these."""
    file = descriptor_pb2.FileDescriptorProto(
        name="columns.proto", package="postdate.broker", syntax="proto3"
    )
    message = file.message_type.add()
    message_pb2.Message.DESCRIPTOR.CopyToProto(message)
    message.name = "MessageColumns"
    del message.nested_type[:]
    for field in message.field:
        field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
        if field.type_name:
            field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
            field.ClearField("type_name")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("postdate.broker.MessageColumns"))


MessageColumns = _columns_class()


@dataclass(frozen=True, slots=True)
class DecodedProduce:
    """One produce request."""

    topic: str
    request_id: int
    batch: Batch
    replace: bool = False  # messages that wait under the schedule keys of these give way to them


def read_envelope(raw: bytes) -> Any:
    """A request with its messages as they came, which costs little; raises InvalidRequest."""
    try:
        return ProduceEnvelope.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest("The request is not a ProduceRequest", reason="MALFORMED_REQUEST") from error


def decode_produce(raw: bytes, config: BrokerConfig, envelope: Any = None) -> DecodedProduce:
    """Check and decode one request, perhaps with its envelope read; raises InvalidRequest with the field as the proto
    names it."""
    envelope = envelope if envelope is not None else read_envelope(raw)
    check_name("topic", envelope.topic, "topic")
    count = len(envelope.messages)
    if count == 0:
        raise InvalidRequest("A batch needs at least one message", field="messages", reason="EMPTY_BATCH")
    if count > config.tuning.batch_messages_max:
        raise InvalidRequest(
            f"A batch of {count} messages is over the limit of {config.tuning.batch_messages_max}",
            field="messages",
            reason="TOO_MANY_MESSAGES",
            limit=config.tuning.batch_messages_max,
        )
    producer_name = envelope.producer_name
    if producer_name and len(producer_name.encode()) > PRODUCER_NAME_BYTES_MAX:
        raise InvalidRequest(
            f"producer_name has more than {PRODUCER_NAME_BYTES_MAX} bytes",
            field="producer_name",
            reason="PRODUCER_NAME_TOO_LARGE",
            limit=PRODUCER_NAME_BYTES_MAX,
        )
    topic, request_id = envelope.topic, envelope.request_id
    batch = _decode_messages(raw, envelope, producer_name, config)
    return DecodedProduce(topic, request_id, batch, envelope.replace)


class _Typed:
    """Messages as the typed parser has them, and fields of all of them as columns."""

    def __init__(
        self, messages: Sequence[message_pb2.Message], names: Set[str] = _NAMES, joined: bytes = b""
    ):
        self.messages = messages
        self.names = names
        """Of the fields that any of the messages has, or may have."""
        self._joined = joined  # if they are plain: their bytes, one after the other
        self._columns: Any = None

    def numbers(self, name: str, dtype: Any = np.int64) -> Any:
        """A field of all messages."""
        count = len(self.messages)
        if name not in self.names:
            return np.zeros(count, dtype)
        if count > _FEW_MESSAGES and self._joined:
            if self._columns is None:
                self._columns = MessageColumns.FromString(self._joined)
            column = getattr(self._columns, name)
            # A plain message has a field once at most, so as many as there are messages are one of each, in order.
            if len(column) == count:
                return np.array(column, dtype)
        return np.array(list(map(attrgetter(name), self.messages)), dtype)

    def counts(self, name: str, of: Callable[[Any], int]) -> Int64Column:
        """Something about a field that is counted message by message."""
        if name not in self.names:
            return np.zeros(len(self.messages), np.int64)
        return np.fromiter(map(of, self.messages), np.int64, len(self.messages))


def _parse_plain(raw: bytes, messages: list[bytes], longest: int, config: BrokerConfig) -> _Typed | None:
    """Parse messages that are plain, where that costs less than to read them in bulk; None of others."""
    if len(raw) > _TYPED_BYTES:
        return None
    is_large = len(messages) > _TYPED_MESSAGES
    try:
        # Of most requests the first message tells what all of them have.
        if is_large and not _cannot_exceed(_names(messages[0])[1], longest, config):
            return None
        joined = b"".join(messages)
        # Messages side by side are one message with the fields of all of them, unknown ones too.
        together, names = _names(joined)
    except DecodeError:
        return None
    if is_large and not _cannot_exceed(names, longest, config):
        return None
    request = _parse_typed(raw)
    is_plain = request.SerializeToString() == raw and not len(UnknownFieldSet(together))
    return _Typed(request.messages, names, joined) if is_plain else None


def _names(message: bytes) -> tuple[message_pb2.Message, set[str]]:
    """A message, and the names of the fields that it has."""
    parsed = message_pb2.Message.FromString(message)
    return parsed, {found.name for found, _ in parsed.ListFields()}


def _cannot_exceed(names: Set[str], longest: int, config: BrokerConfig) -> bool:
    """Return whether no field can be over a limit of its own: nothing in a message is longer than all of it."""
    return names <= _WITHOUT_LIMIT and longest <= config.payload_bytes_max


def _decode_messages(raw: bytes, envelope: Any, producer_name: str, config: BrokerConfig) -> Batch:
    messages = list(envelope.messages)
    decode = _decode_few if len(messages) <= _FEW_MESSAGES else _decode_many
    return decode(raw, envelope.topic, messages, producer_name, config)


def _decode_few(raw: bytes, _: str, messages: list[bytes], producer_name: str, config: BrokerConfig) -> Batch:
    longest = max(map(len, messages))
    typed = _parse_plain(raw, messages, longest, config)
    if typed is not None and _cannot_exceed(typed.names, longest, config):
        return _read_bare(typed, messages, producer_name)
    if typed is not None:
        fields = _read_typed(typed, longest, config)
    else:
        messages, fields = _read_anew(raw, messages, config)
    _check_longest(max(map(len, messages)), config)
    frames = [_head_of(len(message)) + message for message in messages]
    lengths = np.array(list(map(len, frames)), dtype=np.uint32)
    crcs = np.array(list(map(google_crc32c.value, frames)), dtype=np.uint32)
    return _batch(b"".join(frames), lengths, crcs, fields, producer_name)


def _decode_many(
    raw: bytes, topic: str, messages: list[bytes], producer_name: str, config: BrokerConfig
) -> Batch:
    sizes = _lengths(messages)
    longest = int(sizes.max())
    schedule_hashes: UInt64Column | None = None
    if (typed := _parse_plain(raw, messages, longest, config)) is not None:
        fields = _read_typed(typed, longest, config)
        begin = len(_before_messages(topic))  # where they are in a plain request
        frames = raw[begin : begin + int((_head_bytes(sizes, longest) + sizes).sum())]
    elif (many := _read_plain(raw, topic, messages, sizes, longest, config)) is not None:
        frames, fields = many
        if fields.has_text:
            _parse_typed(raw)  # only it can tell whether texts are UTF-8
        _check_limits(fields, config)
        if fields.schedule_keys is not None:
            schedule_hashes, is_ascii = schedule_hash.hash_texts(fields.schedule_keys)
            if not is_ascii and not fields.has_text:
                _parse_typed(raw)
    else:
        messages, fields = _read_anew(raw, messages, config)
        sizes = _lengths(messages)
        longest = int(sizes.max())
        frames = _write_frames(messages)
    _check_longest(longest, config)
    lengths = (_head_bytes(sizes, longest) + sizes).astype(np.uint32)
    crcs = _crcs(messages, sizes, longest)
    return _batch(frames, lengths, crcs, fields, producer_name, schedule_hashes)


def _check_longest(longest: int, config: BrokerConfig) -> None:
    # What fits the limits and is in plain form fits; the other form was rewritten. A message that did not would be
    # stored for ever and delivered never: no client could read the frame.
    assert longest <= config.message_bytes_max


def _batch(
    frames: bytes,
    lengths: UInt32Column,
    crcs: UInt32Column,
    fields: Fields,
    producer_name: str,
    schedule_hashes: UInt64Column | None = None,
) -> Batch:
    """`schedule_hashes`: where they are known."""
    _check_unit(fields.deliver_at_ms)
    return Batch(
        frames=frames,
        lengths=lengths,
        crcs=crcs,
        deliver_at_ms=fields.deliver_at_ms,
        deliver_after_ms=fields.deliver_after_ms,
        ttl_ms=fields.ttl_ms,
        key_hashes=_key_hashes(fields),
        schedule_hashes=_schedule_hashes(fields) if schedule_hashes is None else schedule_hashes,
        producer_name=producer_name,
        sequence_ids=fields.sequence_ids.view(np.uint64)
        if producer_name and fields.sequence_ids.any()
        else None,
        schedule_keys=fields.schedule_keys,
    )


def _read_bare(plain: _Typed, messages: list[bytes], producer_name: str) -> Batch:
    """The batch of a few messages without a field that could be over a limit."""
    count = len(messages)
    frames = [_head_of(len(message)) + message for message in messages]
    deliver_at_ms = plain.numbers("deliver_at_ms")
    _check_unit(deliver_at_ms)
    has_sequence = bool(producer_name) and "sequence_id" in plain.names
    return Batch(
        frames=b"".join(frames),
        lengths=np.array(list(map(len, frames)), np.uint32),
        crcs=np.array(list(map(google_crc32c.value, frames)), np.uint32),
        deliver_at_ms=deliver_at_ms,
        deliver_after_ms=plain.numbers("deliver_after_ms"),
        ttl_ms=plain.numbers("ttl_ms"),
        key_hashes=_NO_KEY_HASHES[:count],
        schedule_hashes=_NO_SCHEDULE_HASHES[:count],
        producer_name=producer_name,
        sequence_ids=plain.numbers("sequence_id", np.uint64) if has_sequence else None,
    )


def _check_field_counts(messages: list[bytes], config: BrokerConfig) -> None:
    """Refuse messages with more fields than they can mean, before they are parsed."""
    most = OTHERS_MAX + _PLAIN_FIELDS + _OF_PROPERTY * config.tuning.properties_count_max
    for index, message in enumerate(messages):
        if len(message) > most and has_more_fields(message, most, _INSIDE_MESSAGE):
            raise too_many_fields("A message", most, f"messages[{index}]")


def _read_plain(
    raw: bytes, topic: str, messages: list[bytes], lengths: Int64Column, longest: int, config: BrokerConfig
) -> tuple[bytes, Fields] | None:
    """Frames and fields of many messages, read in bulk; None if one of them is not plain, or perhaps too large."""
    heads = _head_bytes(lengths, longest)
    # Where every library puts them: behind the topic. Copying them out is much cheaper than writing them anew. What
    # follows a whole field is a field; behind anything else it may only look like the messages.
    prefix = _before_messages(topic)
    frames = find_frames(raw, len(prefix), heads, lengths) if raw.startswith(prefix) else None
    if frames is None:
        frames = _write_frames(messages)
    ends = (heads + lengths).cumsum()
    fields = scan_messages(frames, ends - lengths, ends, _PLAIN_FIELDS + config.tuning.properties_count_max)
    # Longer than any message within the limits: fields come twice, and only the typed parser drops the first ones.
    if fields is None or longest > config.message_bytes_max:
        return None
    # A name may come twice, and the last one counts: only the typed parser can tell.
    over = fields.property_counts > config.tuning.properties_count_max
    over |= fields.property_bytes > config.tuning.properties_bytes_max
    return None if over.any() else (frames, fields)


def _before_messages(topic: str) -> bytes:
    topic_bytes = topic.encode()
    return _TOPIC_HEAD + encode_varint(len(topic_bytes)) + topic_bytes


def _read_anew(raw: bytes, messages: list[bytes], config: BrokerConfig) -> tuple[list[bytes], Fields]:
    """Messages that are not plain, as the typed parser writes them, and their fields."""
    if len(raw) > CHEAP_BYTES:
        _check_field_counts(messages, config)
    request = _parse_typed(raw)
    request.DiscardUnknownFields()
    fields = _read_typed(_Typed(request.messages), config.request_bytes_max, config)
    return [message.SerializeToString() for message in request.messages], fields


def _read_typed(typed: _Typed, longest: int, config: BrokerConfig) -> Fields:
    """Fields of messages of which the longest has so many bytes. Raises InvalidRequest for a limit."""
    messages, names = typed.messages, typed.names
    none = np.zeros(len(messages), dtype=np.int64)
    fields = Fields(
        payload_bytes=none,
        deliver_at_ms=typed.numbers("deliver_at_ms"),
        deliver_after_ms=typed.numbers("deliver_after_ms"),
        ttl_ms=typed.numbers("ttl_ms"),
        sequence_ids=typed.numbers("sequence_id", np.uint64).view(np.int64),
        property_counts=none,
        property_bytes=none,
        traceparent_bytes=none,
    )
    if not _cannot_exceed(names, longest, config):
        fields.payload_bytes = typed.counts("payload", lambda message: len(message.payload))
        fields.property_counts = typed.counts("properties", lambda message: len(message.properties))
        if longest > config.tuning.properties_bytes_max:
            fields.property_bytes = typed.counts("properties", _properties_bytes)
        fields.traceparent_bytes = typed.counts(
            "traceparent", lambda message: len(message.traceparent.encode())
        )
        if "key" in names:
            fields.keys = {i: message.key.encode() for i, message in enumerate(messages) if message.key}
        if "schedule_key" in names:
            keys = [message.schedule_key.encode() for message in messages]
            fields.schedule_keys = KeySpans.of(keys) if any(keys) else None
        _check_limits(fields, config)  # before anything is written anew: what is refused shall cost little
    return fields


def _properties_bytes(message: message_pb2.Message) -> int:
    return sum(len(name.encode()) + len(value.encode()) for name, value in message.properties.items())


def _lengths(messages: Sequence[bytes]) -> Int64Column:
    return np.fromiter(map(len, messages), dtype=np.int64, count=len(messages))


def _write_frames(messages: Sequence[bytes]) -> bytes:
    """One frame after the other."""
    return bytes(ProduceEnvelope(messages=messages).SerializeToString())


def _head_bytes(lengths: Int64Column, longest: int) -> Int64Column:
    """Bytes of tag and length before each message."""
    heads = 2 + (lengths >= 1 << 7)
    if longest >= 1 << 14:
        heads += (lengths >= 1 << 14).astype(np.int64) + (lengths >= 1 << 21) + (lengths >= 1 << 28)
    return heads


def _parse_typed(raw: bytes) -> producer_pb2.ProduceRequest:
    try:
        return producer_pb2.ProduceRequest.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(
            "The request is not a ProduceRequest, or a string in it is not UTF-8", reason="MALFORMED_REQUEST"
        ) from error


def _check_limits(fields: Fields, config: BrokerConfig) -> None:
    for name, sizes, limit, unit in (
        ("payload", fields.payload_bytes, config.payload_bytes_max, "bytes"),
        ("properties", fields.property_counts, config.tuning.properties_count_max, "entries"),
        ("properties", fields.property_bytes, config.tuning.properties_bytes_max, "bytes"),
        ("traceparent", fields.traceparent_bytes, TRACEPARENT_BYTES_MAX, "bytes"),
    ):
        over = np.flatnonzero(sizes > limit)
        if len(over):
            raise _too_large(name, int(over[0]), int(sizes[over[0]]), limit, unit)
    for index, key in fields.keys.items():
        if len(key) > config.tuning.key_bytes_max:
            raise _too_large("key", index, len(key), config.tuning.key_bytes_max, "bytes")
    if fields.schedule_keys is not None:
        sizes, limit = (
            fields.schedule_keys.ends - fields.schedule_keys.starts,
            config.tuning.schedule_key_bytes_max,
        )
        over = np.flatnonzero(sizes > limit)
        if len(over):
            raise _too_large("schedule_key", int(over[0]), int(sizes[over[0]]), limit, "bytes")


def _check_unit(deliver_at_ms: Int64Column) -> None:
    """Refuse times that nobody means; negative ones are refused where batches are planned."""
    if not np.count_nonzero(deliver_at_ms):
        return
    early = (deliver_at_ms > 0) & (deliver_at_ms < DELIVER_AT_MS_MIN)
    wrong = np.flatnonzero(early | (deliver_at_ms > DELIVER_AT_MS_MAX))
    if len(wrong):
        raise wrong_unit(int(deliver_at_ms[wrong[0]]), f"messages[{wrong[0]}].deliver_at_ms")


def _too_large(name: str, index: int, size: int, limit: int, unit: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} has {size} {unit}, over the limit of {limit}",
        field=f"messages[{index}].{name}",
        reason=f"{name.upper()}_TOO_LARGE",
        limit=limit,
    )


def _crcs(messages: Sequence[bytes], lengths: Int64Column, longest: int) -> UInt32Column:
    """The crc32c of each frame: of its tag and length, then of the message."""
    crcs = np.fromiter(map(google_crc32c.value, messages), dtype=np.uint32, count=len(messages))
    if longest < len(_HEADS_IN_CRC):
        crcs ^= _HEADS_IN_CRC[lengths]
    else:
        crcs ^= np.array([_head_in_crc(length) for length in lengths.tolist()], dtype=np.uint32)
    return crcs


def _head_of(length: int) -> bytes:
    """Tag and length of a message."""
    return FRAME_HEAD + encode_varint(length)


def _head_in_crc(length: int) -> int:
    """Return what tag and length change in the crc32c of a message: whatever is in it, the same bits."""
    zeros = bytes(length)
    head_crc = google_crc32c.value(_head_of(length))
    return int(google_crc32c.extend(head_crc, zeros) ^ google_crc32c.value(zeros))


_HEADS_IN_CRC = np.array([_head_in_crc(length) for length in range(1 << 12)], dtype=np.uint32)
"""By length: most messages are short, and most requests hold many."""


def _key_hashes(fields: Fields) -> UInt32Column:
    hashes = np.zeros(len(fields.payload_bytes), dtype=np.uint32)
    for index, key in fields.keys.items():
        hashes[index] = google_crc32c.value(key) or 1  # 0 means none
    return hashes


def _schedule_hashes(fields: Fields) -> UInt64Column:
    if fields.schedule_keys is None:
        return np.zeros(len(fields.payload_bytes), dtype=np.uint64)
    return schedule_hash.hash_spans(fields.schedule_keys)
