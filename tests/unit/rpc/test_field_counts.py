"""No request is parsed that has more elements than it can mean, at any depth: for every method of every service."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from broker.config import BrokerConfig
from broker.errors import InvalidRequest
from broker.rpc.decode import ProduceEnvelope
from broker.rpc.field_counts import MOST, OTHERS_MAX, check_field_count, has_more_fields, inside
from broker.storage.varint import encode_varint
from postdate_api.v1 import admin_pb2, compaction_pb2, consumer_pb2, message_pb2, producer_pb2, schedule_pb2
from tests.depth import at_depth

MODULES = (admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2)
REQUESTS: dict[str, Any] = {
    method.input_type.full_name: method.input_type
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
del REQUESTS["postdate.v1.ProduceRequest"]  # is parsed as this, and then message by message: test_decode.py
REQUESTS[ProduceEnvelope.DESCRIPTOR.full_name] = ProduceEnvelope.DESCRIPTOR
CONFIG = BrokerConfig()


def is_repeated(field: Any) -> bool:
    return bool(field.label == field.LABEL_REPEATED if hasattr(field, "label") else field.is_repeated)


def paths(kind: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of a message and of those inside of it, with the fields that lead there."""
    for field in kind.fields:
        yield (*above, field)
        if field.message_type is not None:
            yield from paths(field.message_type, (*above, field))


REPEATED = {
    f"{kind.name}.{'.'.join(field.name for field in path)}": (kind, path)
    for kind in REQUESTS.values()
    for path in paths(kind)
    if is_repeated(path[-1])
}
SETS = {name: each for name, each in REPEATED.items() if name.endswith(".entries")}
on_repeated = pytest.mark.parametrize(("kind", "path"), REPEATED.values(), ids=REPEATED.keys())
on_all = pytest.mark.parametrize("kind", REQUESTS.values(), ids=REQUESTS.keys())


def within(path: tuple[Any, ...], inner: bytes) -> bytes:
    """Bytes that stand in place of a field's value, in a request."""
    for field in reversed(path):
        inner = encode_varint(field.number << 3 | 2) + encode_varint(len(inner)) + inner
    return inner


def is_refused(kind: Any, raw: bytes) -> bool:
    try:
        check_field_count(kind, raw, CONFIG)
    except InvalidRequest as refusal:
        return refusal.reason == "TOO_MANY_FIELDS"
    return False


def test_every_request_with_a_repeated_field_has_a_bound():
    assert set(MOST) == {kind.full_name for kind, _ in REPEATED.values()}


@on_all
def test_what_is_not_repeated_fits(kind: Any):
    assert sum(not is_repeated(path[-1]) for path in paths(kind)) < OTHERS_MAX


@on_all
def test_16_mib_of_empty_fields_are_refused_before_they_are_parsed(kind: Any):
    assert is_refused(kind, bytes((15 << 3 | 2, 0)) * (CONFIG.request_bytes_max // 2))


@pytest.mark.slow
@on_repeated
@pytest.mark.parametrize("spoilt", [b"", b"\x0f"], ids=["whole", "no message at its end"])
def test_a_request_of_elements_is_refused_wherever_they_lie(kind: Any, path: tuple[Any, ...], spoilt: bytes):
    """One by one, and packed where they can be, also if the parser would find at the end that it is no request."""
    *above, field = path
    half = at_depth(change=1 << 18, deep=CONFIG.request_bytes_max // 2 - 100)
    tag = encode_varint(field.number << 3 | 2)
    ways = [(tag + b"\x00") * half]
    if field.is_packed:
        ways = [
            encode_varint(field.number << 3) + b"\x01",
            tag + encode_varint(2 * half) + b"\x01" * (2 * half),
        ]
        ways[0] *= half
    for elements in ways:
        assert is_refused(kind, within(tuple(above), elements) + spoilt)
        assert is_refused(kind, within(tuple(above), elements + spoilt))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "path"), SETS.values(), ids=SETS.keys())
def test_as_many_ids_as_a_request_may_name_pass(kind: Any, path: tuple[Any, ...]):
    count = (
        CONFIG.tuning.schedule_names_max
        if kind.file.name.endswith("schedule.proto")
        else CONFIG.tuning.ack_entries_max
    )
    top = (1 << 64) - 1
    *above, field = path
    alone = b"".join(
        within((field,), message_pb2.EntrySet(ledger_id=top - n, entry_ids=[top]).SerializeToString())
        for n in range(count)
    )
    together = within(path, message_pb2.EntrySet(ledger_id=1, entry_ids=[top] * count).SerializeToString())
    padding = within((kind.fields[0],), b"")  # and it is looked at
    for raw in (within(tuple(above), alone), together):
        assert not is_refused(kind, raw + padding + b"\xa2\x7d" + encode_varint(1 << 18) + bytes(1 << 18))


def test_as_many_messages_as_a_batch_may_have_pass():
    count = CONFIG.tuning.batch_messages_max
    messages = [message_pb2.Message(payload=bytes(100))] * count
    raw = producer_pb2.ProduceRequest(topic="t", messages=messages).SerializeToString()
    assert not is_refused(ProduceEnvelope.DESCRIPTOR, raw)
    assert not has_more_fields(raw, count + 1, {})
    assert has_more_fields(raw, count, {})


def test_packed_numbers_of_every_width_are_counted():
    assert has_more_fields(b"\x0a\x08" + bytes(8), 8, {1: None})
    assert not has_more_fields(b"\x0a\x08" + bytes(8), 9, {1: None})
    assert has_more_fields(b"\x0a\x08" + bytes(8), 2, {1: 4})
    assert not has_more_fields(b"\x0a\x08" + bytes(8), 2, {1: 8})
    assert not has_more_fields(b"\x0a\x0a" + b"\xff" * 9 + b"\x01", 2, {1: None})


def test_fields_inside_are_counted_in_whatever_order_messages_lie():
    ids = message_pb2.EntrySet(ledger_id=1, entry_ids=range(100))
    raw = consumer_pb2.AcknowledgeRequest(topic="t", entries=[ids, ids]).SerializeToString()
    kind = inside(consumer_pb2.AcknowledgeRequest.DESCRIPTOR)
    assert not has_more_fields(raw, 1 + 2 * 103, kind)
    assert has_more_fields(raw, 2 * 103, kind)


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
        assert not has_more_fields(raw, max(count, len(raw)), {})


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
        assert not has_more_fields(raw, count, {})
        assert has_more_fields(raw, count - 1, {})


def test_what_is_no_message_is_left_to_the_parser():
    for raw in (b"\xff" * 300, b"\x0a", b"\x0a\xff\xff\xff\xff\x0f", b"\x0f\x00"):
        assert not has_more_fields(raw, 100, {}) or len(raw) > 100
