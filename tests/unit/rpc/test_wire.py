"""Fields of many messages at once: what the typed parser would say, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.model import Int64Column
from broker.rpc.wire import Fields, find_frames, scan_messages
from broker.storage.varint import encode_varint
from postdate_api.v1 import message_pb2

INT64_MAX = (1 << 63) - 1
SCALARS = {0x20: "deliver_at_ms", 0x28: "deliver_after_ms", 0x38: "ttl_ms", 0x40: "sequence_ids"}


def varint(value: int, width: int = 0) -> bytes:
    """A varint of at least so many bytes; protobuf allows padding, up to ten."""
    octets = encode_varint(value & ((1 << 64) - 1))
    padding = width - len(octets)
    return (
        octets if padding <= 0 else octets[:-1] + bytes([octets[-1] | 0x80]) + b"\x80" * (padding - 1) + b"\0"
    )


def text(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + varint(len(content)) + content


def scan(messages: Sequence[bytes], fields_max: int = 20) -> Fields | None:
    ends = np.cumsum([len(message) for message in messages], dtype=np.int64)
    starts = ends - np.array([len(message) for message in messages], dtype=np.int64)
    return scan_messages(b"".join(messages), starts, ends, fields_max)


def heads_and_lengths(messages: Sequence[bytes]) -> tuple[Int64Column, Int64Column]:
    lengths = np.array([len(message) for message in messages], dtype=np.int64)
    return np.array([1 + len(varint(len(message))) for message in messages], dtype=np.int64), lengths


numbers = st.sampled_from([0, 1, -1, 127, 128, 1 << 53, INT64_MAX, -INT64_MAX - 1]) | st.integers(
    -INT64_MAX - 1, INT64_MAX
)


@given(
    messages=st.lists(
        st.lists(st.tuples(st.sampled_from([*SCALARS, 0x48]), numbers, st.integers(1, 10)), max_size=4),
        min_size=1,
        max_size=5,
    )
)
def test_numbers_of_every_width_are_read_and_the_last_one_counts(messages: list[list[tuple[int, int, int]]]):
    raw = [b"".join(bytes([tag]) + varint(value, width) for tag, value, width in each) for each in messages]
    fields = scan(raw)
    assert fields is not None and not fields.has_text
    for tag, name in SCALARS.items():
        wanted = [dict(field[:2] for field in each).get(tag, 0) for each in messages]
        assert getattr(fields, name).tolist() == wanted
        typed = [message_pb2.Message.FromString(each) for each in raw]
        if name != "sequence_ids":
            assert [getattr(message, name) for message in typed] == wanted


def test_texts_are_found_where_they_are():
    fields = scan(
        [
            text(0x0A, b"12345") + text(0x12, b"key"),
            b"",
            text(0x1A, b"abcd")
            + text(0x1A, b"")
            + text(0x32, b"later")
            + text(0x12, b"one")
            + text(0x12, b"two"),
        ]
    )
    assert fields is not None and fields.has_text
    assert fields.payload_bytes.tolist() == [5, 0, 0]
    assert fields.keys == {0: b"key", 2: b"two"}
    keys = fields.schedule_keys
    assert keys is not None and keys.places().tolist() == [2] and keys.key(2) == b"later"
    assert fields.property_counts.tolist() == [0, 0, 2]
    assert fields.property_bytes.tolist() == [0, 0, 4]


def test_an_empty_key_is_none():
    fields = scan([text(0x12, b""), text(0x12, b"a") + text(0x12, b""), text(0x12, b"") + text(0x12, b"a")])
    assert fields is not None
    assert fields.keys == {2: b"a"}
    fields = scan([text(0x32, b""), text(0x32, b"a") + text(0x32, b""), text(0x32, b"") + text(0x32, b"a")])
    assert fields is not None and fields.schedule_keys is not None
    assert fields.schedule_keys.places().tolist() == [2] and fields.schedule_keys.key(2) == b"a"
    fields = scan([text(0x32, b"a") + text(0x32, b"")])
    assert fields is not None and fields.schedule_keys is None


@pytest.mark.parametrize(
    "message",
    {
        "tag of two bytes": b"\x82\x01\x00",
        "unknown number": b"\x58\x01",
        "field number 0": b"\x00\x01",
        "number as text": text(0x22, b"1"),
        "text as number": b"\x08\x01",
        "fixed64": b"\x21" + bytes(8),
        "group": b"\x0b\x0c",
        "fixed32": b"\x25" + bytes(4),
        "tag and nothing else": b"\x20",
        "varint without an end": b"\x20" + b"\x80" * 11,
        "varint of more than 64 bits": b"\x20" + b"\xff" * 9 + b"\x02",
        "varint that leads out": b"\x20\x80",
        "two payloads": text(0x0A, b"a") + text(0x0A, b"b"),
        "two payloads, one empty": text(0x0A, b"") + text(0x0A, b"b"),
        "length that leads out": b"\x0a\x02x",
        "negative length": b"\x0a" + varint(-1),
        "length beyond all": b"\x0a" + varint((1 << 63) - 1),
    }.items(),
    ids=lambda case: case[0],
)
@pytest.mark.parametrize("place", ["alone", "first", "last", "behind another field"])
def test_what_is_not_plain_is_left_to_the_typed_parser(message: tuple[str, bytes], place: str):
    plain, odd = b"\x20\x05", message[1]
    messages = {
        "alone": [odd],
        "first": [odd, plain],
        "last": [plain * 10, odd],
        "behind another field": [plain, plain + odd, plain],
    }[place]
    assert scan(messages) is None


def test_more_fields_than_a_plain_message_has_are_left_to_the_typed_parser():
    assert scan([b"\x20\x05" * 3], 3) is not None
    assert scan([b"\x20\x05" * 4], 3) is None


@given(
    prefix=st.binary(max_size=5),
    messages=st.lists(st.integers(0, 300).map(bytes), min_size=1, max_size=5),
    suffix=st.binary(max_size=5),
)
def test_frames_that_lie_side_by_side_are_found(prefix: bytes, messages: list[bytes], suffix: bytes):
    frames = b"".join(text(0x12, message) for message in messages)
    assert find_frames(prefix + frames + suffix, len(prefix), *heads_and_lengths(messages)) == frames


@pytest.mark.parametrize(
    "raw",
    {
        "another tag": text(0x12, b"one") + text(0x1A, b"two"),
        "another length": text(0x12, b"one") + text(0x12, b"tw") + b"o",
        "something between": text(0x12, b"one") + b"\x20\x01" + text(0x12, b"two"),
        "padded length": text(0x12, b"one") + b"\x12\x83\x00two",
        "cut": text(0x12, b"one") + text(0x12, b"two")[:-1],
        "nothing": b"",
    }.items(),
    ids=lambda case: case[0],
)
def test_frames_that_lie_otherwise_are_not_found(raw: tuple[str, bytes]):
    assert find_frames(raw[1], 0, *heads_and_lengths([b"one", b"two"])) is None
