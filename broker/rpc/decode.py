"""Turns a produce request's bytes into a `Batch`, once: checked, in columns, with the messages as they came.

The request is parsed with `messages` as bytes, which is wire-compatible with `repeated Message`; the messages
themselves are read in bulk (`wire.py`). The typed parser is asked where only it can tell: for messages with text
(invalid UTF-8 must not reach a consumer's parser) and for messages that are not in plain form, which it rewrites. It is
also asked where it costs less: for few messages, which are plain if it writes them as they came.
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
from broker.storage.octets import Octets
from broker.storage.varint import encode_varint
from broker.topics.refusals import wrong_unit
from postdate_api.v1 import message_pb2, producer_pb2

PRODUCER_NAME_BYTES_MAX = 255

_FEW_MESSAGES = 16
"""Up to so many messages, the typed parser costs less than the NumPy calls that many share."""
_FEW_PLAIN = 128
_FEW_PLAIN_BYTES = 128 * KIB
"""Up to so many in so many bytes, it costs less if they turn out to be plain, and need not be written anew."""
_NOT_ASCII = np.uint64(0x8080808080808080)
_PLAIN_FIELDS = len(message_pb2.Message.DESCRIPTOR.fields) - 1  # apart from properties
_OF_PROPERTY = 3  # the property, its name, its value
_INSIDE_MESSAGE = inside(message_pb2.Message.DESCRIPTOR)
_DELIVER_AT_MS, _DELIVER_AFTER_MS, _TTL_MS = map(attrgetter, ("deliver_at_ms", "deliver_after_ms", "ttl_ms"))
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


_ZEROS = _zeros(np.int64)
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


def _decode_messages(raw: bytes, envelope: Any, producer_name: str, config: BrokerConfig) -> Batch:
    messages = list(envelope.messages)
    request, is_plain = None, False
    if len(messages) <= _FEW_PLAIN and len(raw) <= _FEW_PLAIN_BYTES:
        request = _parse_typed(raw)
        request.DiscardUnknownFields()
        is_plain = request.SerializeToString() == raw
        if is_plain and len(messages) <= _FEW_MESSAGES:
            bare = _read_bare(request.messages, messages, producer_name, config)
            if bare is not None:
                return bare
    many = (
        None
        if is_plain or len(messages) <= _FEW_MESSAGES
        else _read_plain(raw, envelope.topic, messages, config)
    )
    if many is not None:
        frames, fields = many
        key_bytes_max = config.tuning.schedule_key_bytes_max
        if request is None and (fields.has_text or not _is_ascii(fields.schedule_keys, key_bytes_max)):
            _parse_typed(raw)  # only it can tell whether texts are UTF-8
        _check_limits(fields, config)
    else:
        if request is None:
            if len(raw) > CHEAP_BYTES:
                _check_field_counts(messages, config)
            request = _parse_typed(raw)
            request.DiscardUnknownFields()
        messages, fields = _read_typed(request.messages, messages if is_plain else None, config)
        frames = _write_frames(messages)
    longest = max(map(len, messages))
    if len(messages) <= _FEW_MESSAGES:
        each = [_head_of(len(message)) + message for message in messages]
        lengths = np.array(list(map(len, each)), dtype=np.uint32)
        crcs = np.array(list(map(google_crc32c.value, each)), dtype=np.uint32)
    else:
        sizes = _lengths(messages)
        lengths = (_head_bytes(sizes, longest) + sizes).astype(np.uint32)
        crcs = _crcs(messages, sizes, longest)
    _check_unit(fields.deliver_at_ms)
    # What fits the limits and is in plain form fits; the other form was rewritten. A message that did not would be
    # stored for ever and delivered never: no client could read the frame.
    assert longest <= config.message_bytes_max
    return Batch(
        frames=frames,
        lengths=lengths,
        crcs=crcs,
        deliver_at_ms=fields.deliver_at_ms,
        deliver_after_ms=fields.deliver_after_ms,
        ttl_ms=fields.ttl_ms,
        key_hashes=_key_hashes(fields),
        schedule_hashes=_schedule_hashes(fields),
        producer_name=producer_name,
        sequence_ids=fields.sequence_ids.view(np.uint64)
        if producer_name and fields.sequence_ids.any()
        else None,
        schedule_keys=fields.schedule_keys,
    )


def _read_bare(
    typed: Sequence[message_pb2.Message], messages: list[bytes], producer_name: str, config: BrokerConfig
) -> Batch | None:
    """The batch of a few plain messages; None if a field has a limit that one of them might be over."""
    names = _names_in(messages)
    # Nothing in a message is longer than all of it.
    if not names <= _WITHOUT_LIMIT or max(map(len, messages)) > config.payload_bytes_max:
        return None
    count = len(messages)
    zeros = _ZEROS[:count]

    def column(name: str, of: Callable[[Any], int]) -> Int64Column:
        return np.array(list(map(of, typed)), np.int64) if name in names else zeros

    frames = [_head_of(len(message)) + message for message in messages]
    deliver_at_ms = column("deliver_at_ms", _DELIVER_AT_MS)
    _check_unit(deliver_at_ms)
    has_sequence = bool(producer_name) and "sequence_id" in names
    return Batch(
        frames=b"".join(frames),
        lengths=np.array(list(map(len, frames)), np.uint32),
        crcs=np.array(list(map(google_crc32c.value, frames)), np.uint32),
        deliver_at_ms=deliver_at_ms,
        deliver_after_ms=column("deliver_after_ms", _DELIVER_AFTER_MS),
        ttl_ms=column("ttl_ms", _TTL_MS),
        key_hashes=_NO_KEY_HASHES[:count],
        schedule_hashes=_NO_SCHEDULE_HASHES[:count],
        producer_name=producer_name,
        sequence_ids=np.array([each.sequence_id for each in typed], np.uint64) if has_sequence else None,
    )


def _check_field_counts(messages: list[bytes], config: BrokerConfig) -> None:
    """Refuse messages with more fields than they can mean, before they are parsed."""
    most = OTHERS_MAX + _PLAIN_FIELDS + _OF_PROPERTY * config.tuning.properties_count_max
    for index, message in enumerate(messages):
        if len(message) > most and has_more_fields(message, most, _INSIDE_MESSAGE):
            raise too_many_fields("A message", most, f"messages[{index}]")


def _read_plain(
    raw: bytes, topic: str, messages: list[bytes], config: BrokerConfig
) -> tuple[bytes, Fields] | None:
    """Frames and fields of many messages, read in bulk; None if one of them is not plain, or perhaps too large."""
    lengths = _lengths(messages)
    longest = int(lengths.max())
    heads = _head_bytes(lengths, longest)
    # Where every library puts them: behind the topic. Copying them out is much cheaper than writing them anew. What
    # follows a whole field is a field; behind anything else it may only look like the messages.
    topic_bytes = topic.encode()
    prefix = _TOPIC_HEAD + encode_varint(len(topic_bytes)) + topic_bytes
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


def _is_ascii(keys: KeySpans | None, size_max: int) -> bool:
    """Return whether nothing but the keys' size can be wrong with them. Too long ones are not looked at."""
    if keys is None:
        return True
    if int((keys.ends - keys.starts).max()) > size_max:
        return False
    parts = Octets(keys.buffer).words_of(keys.starts, keys.ends)
    return not any(np.bitwise_or.reduce(words) & _NOT_ASCII for _, words in parts)


def _read_typed(
    typed: Sequence[message_pb2.Message], plain: list[bytes] | None, config: BrokerConfig
) -> tuple[list[bytes], Fields]:
    """Messages in plain form, and their fields, one by one. Raises InvalidRequest for a limit.

    `plain`: their bytes, if that is how they came.
    """
    names = _NAMES if plain is None else _names_in(plain)
    zeros = np.zeros(len(typed), dtype=np.int64)
    zeros.flags.writeable = False  # one for all fields that no message has

    def column(name: str, of: Callable[[Any], int]) -> Int64Column:
        return np.fromiter(map(of, typed), np.int64, len(typed)) if name in names else zeros

    fields = Fields(
        payload_bytes=zeros,
        deliver_at_ms=column("deliver_at_ms", _DELIVER_AT_MS),
        deliver_after_ms=column("deliver_after_ms", _DELIVER_AFTER_MS),
        ttl_ms=column("ttl_ms", _TTL_MS),
        sequence_ids=zeros,
        property_counts=zeros,
        property_bytes=zeros,
        traceparent_bytes=zeros,
    )
    if "sequence_id" in names:
        fields.sequence_ids = np.array([message.sequence_id for message in typed], np.uint64).view(np.int64)
    # Nothing in a message is longer than all of it.
    longest = max(map(len, plain)) if plain else config.request_bytes_max
    if not names <= _WITHOUT_LIMIT or longest > config.payload_bytes_max:
        fields.payload_bytes = column("payload", lambda message: len(message.payload))
        fields.property_counts = column("properties", lambda message: len(message.properties))
        if longest > config.tuning.properties_bytes_max:
            fields.property_bytes = column("properties", _properties_bytes)
        fields.traceparent_bytes = column("traceparent", lambda message: len(message.traceparent.encode()))
        if "key" in names:
            fields.keys = {i: message.key.encode() for i, message in enumerate(typed) if message.key}
        if "schedule_key" in names:
            keys = [message.schedule_key.encode() for message in typed]
            fields.schedule_keys = KeySpans.of(keys) if any(keys) else None
        _check_limits(fields, config)  # before anything is written anew: what is refused shall cost little
    return plain or [message.SerializeToString() for message in typed], fields


def _names_in(messages: Sequence[bytes]) -> Set[str]:
    """The fields that any of the messages has; they are plain, so none of them is there with its default."""
    # Messages side by side are one message with the fields of all of them.
    merged = message_pb2.Message.FromString(b"".join(messages))
    return {found.name for found, _ in merged.ListFields()}


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
    if longest < len(_HEAD_CRCS):
        heads = _HEAD_CRCS[lengths].tolist()
    else:
        heads = [_head_crc(length) for length in lengths.tolist()]
    return np.fromiter(map(google_crc32c.extend, heads, messages), dtype=np.uint32, count=len(messages))


def _head_of(length: int) -> bytes:
    """Tag and length of a message."""
    return FRAME_HEAD + encode_varint(length)


def _head_crc(length: int) -> int:
    return int(google_crc32c.value(_head_of(length)))


_HEAD_CRCS = np.array([_head_crc(length) for length in range(1 << 12)], dtype=np.int64)
"""Of tag and length, by length: most messages are short, and most requests hold many."""


def _key_hashes(fields: Fields) -> UInt32Column:
    hashes = np.zeros(len(fields.payload_bytes), dtype=np.uint32)
    for index, key in fields.keys.items():
        hashes[index] = google_crc32c.value(key) or 1  # 0 means none
    return hashes


def _schedule_hashes(fields: Fields) -> UInt64Column:
    if fields.schedule_keys is None:
        return np.zeros(len(fields.payload_bytes), dtype=np.uint64)
    return schedule_hash.hash_spans(fields.schedule_keys)
