"""No request is parsed that has more fields than it can mean: for every method of every service."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from broker.config import BrokerConfig
from broker.errors import InvalidRequest
from broker.rpc.field_counts import MOST, check_field_count, has_more_fields
from broker.storage.varint import encode_varint
from postdate.v1 import admin_pb2, compaction_pb2, consumer_pb2, message_pb2, producer_pb2, schedule_pb2

MODULES = (admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2)
REQUESTS: dict[str, Any] = {
    method.input_type.full_name: method.input_type
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
CONFIG = BrokerConfig()


def is_repeated(field: Any) -> bool:
    return bool(field.label == field.LABEL_REPEATED if hasattr(field, "label") else field.is_repeated)


REPEATED = {
    name: [field.number for field in kind.fields if is_repeated(field)]
    for name, kind in REQUESTS.items()
    if any(is_repeated(field) for field in kind.fields)
}


def test_every_request_with_a_repeated_field_has_a_bound():
    assert set(MOST) == set(REPEATED)


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_16_mib_of_empty_fields_are_refused_before_they_are_parsed(name: str):
    for number in REPEATED.get(name, [15]):
        raw = bytes((number << 3 | 2, 0)) * (CONFIG.request_bytes_max // 2)
        with pytest.raises(InvalidRequest) as caught:
            check_field_count(name, raw, CONFIG)
        assert caught.value.reason == "TOO_MANY_FIELDS"


def test_as_many_messages_as_a_batch_may_have_pass():
    count = CONFIG.batch_messages_max
    messages = [message_pb2.Message(payload=bytes(100))] * count
    raw = producer_pb2.ProduceRequest(topic="t", messages=messages).SerializeToString()
    check_field_count("postdate.v1.ProduceRequest", raw, CONFIG)
    assert not has_more_fields(raw, count + 1)
    assert has_more_fields(raw, count)


def test_fields_are_counted_as_the_parser_sees_them():
    rng = random.Random(7)
    for _ in range(3_000):
        raw = rng.randbytes(rng.randrange(40))
        try:
            found = len(UnknownFieldSet(message_pb2.MessageId.FromString(b"\x7a\x00" + raw)))
        except Exception:
            continue
        known = message_pb2.MessageId.FromString(raw)
        count = found - 1 + len(known.ListFields())
        assert not has_more_fields(raw, max(count, len(raw)))


def test_fields_of_every_kind_and_length_are_counted_exactly():
    rng = random.Random(11)
    sizes = (0, 1, 127, 128, 16_383, 16_384, 70_000)

    def field() -> bytes:
        number = rng.choice((1, 2, 15, 16, 2_000)) << 3
        match rng.randrange(4):
            case 0:
                return encode_varint(number) + encode_varint(rng.getrandbits(rng.choice((1, 7, 8, 64))))
            case 1:
                return encode_varint(number | 1) + rng.randbytes(8)
            case 2:
                size = rng.choice(sizes)
                return encode_varint(number | 2) + encode_varint(size) + rng.randbytes(size)
            case _:
                return encode_varint(number | 5) + rng.randbytes(4)

    for _ in range(200):
        count = rng.randrange(1, 20)
        raw = b"".join(field() for _ in range(count))
        assert not has_more_fields(raw, count)
        assert has_more_fields(raw, count - 1)


def test_what_is_no_message_is_left_to_the_parser():
    for raw in (b"\xff" * 300, b"\x0a", b"\x0a\xff\xff\xff\xff\x0f", b"\x0f\x00"):
        assert not has_more_fields(raw, 100) or len(raw) > 100
