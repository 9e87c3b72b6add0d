"""Turns a produce request's bytes into a `Batch`, once: checked, in columns, with the messages as they came.

The request is parsed with `messages` as bytes, which is wire-compatible with `repeated Message`; the messages
themselves are read in bulk (`wire.py`). The typed parser is asked where only it can tell: for messages with text
(invalid UTF-8 must not reach a consumer's parser) and for messages that are not in plain form, which it rewrites.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from broker.storage import schedule_hash
from broker.storage.message_fields import FRAME_HEAD, tag_of
from broker.storage.octets import Octets
from broker.storage.varint import encode_varint
from broker.topics.refusals import wrong_unit
from postdate_api.v1 import message_pb2, producer_pb2

PRODUCER_NAME_BYTES_MAX = 255

_FEW = 16
"""Up to so many messages, reading them one by one costs less than the NumPy calls that many share."""
_NOT_ASCII = np.uint64(0x8080808080808080)
_PLAIN_FIELDS = len(message_pb2.Message.DESCRIPTOR.fields) - 1  # apart from properties
_OF_PROPERTY = 3  # the property, its name, its value
_INSIDE_MESSAGE = inside(message_pb2.Message.DESCRIPTOR)
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
    plain = _read_plain(raw, envelope.topic, messages, config) if len(messages) > _FEW else None
    if plain is not None:
        frames, fields = plain
        if fields.has_text or not _is_ascii(fields.schedule_keys, config.tuning.schedule_key_bytes_max):
            _parse_typed(raw)  # only it can tell whether texts are UTF-8
        _check_limits(fields, config)
        sizes = _lengths(messages)
        longest = int(sizes.max())
        lengths, crcs = (_head_bytes(sizes) + sizes).astype(np.uint32), _crcs(messages, sizes)
    else:
        if len(raw) > CHEAP_BYTES:
            _check_field_counts(messages, config)
        request = _parse_typed(raw)
        request.DiscardUnknownFields()
        fields = _read_typed(request)
        if not _is_payload(request.messages, config):
            _check_limits(fields, config)  # before it is written anew: what is refused shall cost little
        messages = [message.SerializeToString() for message in request.messages]
        longest = max(map(len, messages))
        few = [_head_of(len(message)) + message for message in messages]
        frames = b"".join(few)
        lengths = np.array(list(map(len, few)), dtype=np.uint32)
        crcs = np.array(list(map(google_crc32c.value, few)), dtype=np.uint32)
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
    heads = _head_bytes(lengths)
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
    if fields is None or int(lengths.max()) > config.message_bytes_max:
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


def _read_typed(request: producer_pb2.ProduceRequest) -> Fields:
    """Fields of messages, one by one: for few messages, and for those that are not plain."""
    messages = request.messages
    schedule_keys = [message.schedule_key.encode() for message in messages]
    # In one array: each call of NumPy costs as much as a few messages.
    payload, at, after, ttl, counts, sizes, traceparents = np.array(
        [
            (
                len(message.payload),
                message.deliver_at_ms,
                message.deliver_after_ms,
                message.ttl_ms,
                len(message.properties),
                _properties_bytes(message) if message.properties else 0,
                len(message.traceparent.encode()),
            )
            for message in messages
        ],
        dtype=np.int64,
    ).T.copy()
    return Fields(
        payload_bytes=payload,
        deliver_at_ms=at,
        deliver_after_ms=after,
        ttl_ms=ttl,
        sequence_ids=np.array([message.sequence_id for message in messages], dtype=np.uint64).view(np.int64),
        property_counts=counts,
        property_bytes=sizes,
        traceparent_bytes=traceparents,
        keys={i: message.key.encode() for i, message in enumerate(messages) if message.key},
        schedule_keys=KeySpans.of(schedule_keys) if any(schedule_keys) else None,
    )


def _properties_bytes(message: message_pb2.Message) -> int:
    return sum(len(name.encode()) + len(value.encode()) for name, value in message.properties.items())


def _is_payload(messages: Iterable[message_pb2.Message], config: BrokerConfig) -> bool:
    """Return whether nothing of any message has a limit but its payload, and none is over that."""
    return not any(
        message.properties
        or message.key
        or message.schedule_key
        or message.traceparent
        or len(message.payload) > config.payload_bytes_max
        for message in messages
    )


def _lengths(messages: Sequence[bytes]) -> Int64Column:
    return np.fromiter(map(len, messages), dtype=np.int64, count=len(messages))


def _write_frames(messages: Sequence[bytes]) -> bytes:
    """One frame after the other."""
    return bytes(ProduceEnvelope(messages=messages).SerializeToString())


def _head_bytes(lengths: Int64Column) -> Int64Column:
    """Bytes of tag and length before each message."""
    heads = 2 + (lengths >= 1 << 7)
    if int(lengths.max()) >= 1 << 14:
        heads += (lengths >= 1 << 14).astype(np.int64) + (lengths >= 1 << 21) + (lengths >= 1 << 28)
    return heads


def _parse_typed(raw: bytes) -> producer_pb2.ProduceRequest:
    try:
        return producer_pb2.ProduceRequest.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(
            "The request is not a ProduceRequest, or a text in it is not UTF-8", reason="MALFORMED_REQUEST"
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


def _crcs(messages: Sequence[bytes], lengths: Int64Column) -> UInt32Column:
    """The crc32c of each frame: of its tag and length, then of the message."""
    if int(lengths.max()) < len(_HEAD_CRCS):
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
