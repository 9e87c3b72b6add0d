"""Tags of the fields that are read or written by hand, from the descriptors of the protos; and a walk through the
fields of one stored message. Pure.

    tag      number << 3 | wire type, in one byte
    frame    FRAME_TAG length message

Whoever walks or writes a message by hand names all of its fields when it asks for their tags. A field that is added to
the proto and forgotten there is an error at import.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor

from broker.errors import Corrupt
from broker.storage.varint import encode_varint
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types."""
VARINT_BYTES_MAX = 10
_TAG_MAX = 0x7F
_FIXED = {
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
    FieldDescriptor.TYPE_FIXED64: FIXED64,
    FieldDescriptor.TYPE_SFIXED64: FIXED64,
    FieldDescriptor.TYPE_FLOAT: FIXED32,
    FieldDescriptor.TYPE_FIXED32: FIXED32,
    FieldDescriptor.TYPE_SFIXED32: FIXED32,
}
_WITH_LENGTH = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)


def tags_of(kind: type[Message], *names: str) -> dict[str, int]:
    """Return the tags of a message's fields by name, in the order of the names; LookupError unless all are named."""
    fields = {field.name for field in kind.DESCRIPTOR.fields}
    if fields != set(names):
        raise LookupError(
            f"Fields of {kind.DESCRIPTOR.full_name} that are read or written by hand differ from those of the proto: "
            f"{', '.join(sorted(fields.symmetric_difference(names)))}"
        )
    return {name: tag_of(name, kind) for name in names}


def message_tags(*names: str) -> dict[str, int]:
    """Return the tags of a `Message`, as `tags_of`: for rooms that know of no message of the API."""
    return tags_of(message_pb2.Message, *names)


def tag_of(name: str, *kinds: type[Message]) -> int:
    """Return the tag of a field, which is the same in all these messages; LookupError if it is not."""
    tags = {_tag(kind.DESCRIPTOR.fields_by_name[name]) for kind in kinds}
    if len(tags) != 1:
        raise LookupError(f"Field {name} has different tags")
    return tags.pop()


def _tag(field: Any) -> int:
    has_length = field.is_packed or field.type in _WITH_LENGTH
    wire_type = LENGTH if has_length else _FIXED.get(field.type, VARINT)
    tag: int = field.number << 3 | wire_type
    if tag > _TAG_MAX:
        raise LookupError(f"The tag of {field.full_name} takes more than one byte")
    return tag


FRAME_TAG = tag_of("message", consumer_pb2.Delivery)
"""First byte of a stored message: it goes from producer to consumer as it is."""
FRAME_HEAD = bytes((FRAME_TAG,))
if tag_of("messages", producer_pb2.ProduceRequest) != FRAME_TAG:
    raise LookupError("ProduceRequest.messages and Delivery.message have the same tag")

SCHEDULE_KEY_TAG = tag_of("schedule_key", message_pb2.Message)
TRACEPARENT_TAG = tag_of("traceparent", message_pb2.Message)
_KEY_TAG = tag_of("key", message_pb2.Message)
_TTL_TAG = tag_of("ttl_ms", message_pb2.Message)
_PROPERTY_HEAD = bytes((tag_of("properties", message_pb2.Message),))
PROPERTY_NAME_TAG, PROPERTY_VALUE_TAG = tags_of(message_pb2.Message.PropertiesEntry, "key", "value").values()
_NAME_HEAD = bytes((PROPERTY_NAME_TAG,))
_VALUE_HEAD = bytes((PROPERTY_VALUE_TAG,))


def property_field(name: bytes, value: bytes) -> bytes:
    """A property of a message, as its field; the last one of a name counts."""
    entry = b"".join(
        (_NAME_HEAD, encode_varint(len(name)), name, _VALUE_HEAD, encode_varint(len(value)), value)
    )
    return b"".join((_PROPERTY_HEAD, encode_varint(len(entry)), entry))


def key_and_ttl(message: bytes) -> tuple[bytes, int]:
    """The key and the ttl_ms of a message, which is walked to its end. Raises Corrupt."""
    view = memoryview(message)
    key, ttl_ms = b"", 0
    for tag, _, content, end in walk_fields(view):
        if tag == _KEY_TAG:
            key = bytes(view[content:end])
        elif tag == _TTL_TAG:
            ttl_ms, _ = varint_at(view, content)
    return key, ttl_ms


def body_at(frame: bytes) -> int:
    """Return where the message in a frame begins; raises Corrupt."""
    if frame[:1] != FRAME_HEAD:
        raise Corrupt("The tag of a stored frame is wrong")
    length, at = varint_at(frame, 1)
    if at + length != len(frame):
        raise Corrupt("The length of a stored frame is wrong")
    return at


def walk_fields(message: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Each field: its tag, where it starts, where its content starts, where it ends. Raises Corrupt."""
    at = 0
    while at < len(message):
        start = at
        tag, at = varint_at(message, at)
        wire_type = tag & 7
        content = at
        if wire_type == VARINT:
            _, at = varint_at(message, at)
        elif wire_type == LENGTH:
            length, content = varint_at(message, at)
            at = content + length
        elif wire_type in (FIXED32, FIXED64):
            at += 4 if wire_type == FIXED32 else 8
        else:
            raise Corrupt(f"A stored message has a field of the unknown wire type {wire_type}")
        if at > len(message):
            raise Corrupt("A field of a stored message is truncated")
        yield tag, start, content, at


def varint_at(octets: memoryview | bytes, at: int) -> tuple[int, int]:
    """The varint at a place, and the place after it. Raises Corrupt."""
    value = shift = 0
    while at < len(octets) and shift < 7 * VARINT_BYTES_MAX:
        octet = octets[at]
        value |= (octet & 0x7F) << shift
        at += 1
        if octet < 0x80:
            return value, at
        shift += 7
    raise Corrupt("A number in a stored message is too long")
