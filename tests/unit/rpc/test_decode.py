"""A produce request's bytes as columns: what the typed parser says of them, and never another exception."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import google_crc32c
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from broker.config import TRACEPARENT_BYTES_MAX, BrokerConfig
from broker.errors import InvalidRequest
from broker.model import DELIVER_AT_MS_MAX, DELIVER_AT_MS_MIN
from broker.rpc import decode
from broker.rpc.decode import PRODUCER_NAME_BYTES_MAX, DecodedProduce, decode_produce, read_envelope
from broker.storage.schedule_hash import hash_keys
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2
from tests.configs import broker_config
from tests.unit.rpc.test_wire import text, varint

CONFIG = broker_config(
    payload_bytes_max=200,
    key_bytes_max=6,
    schedule_key_bytes_max=6,
    properties_count_max=2,
    properties_bytes_max=16,
    batch_messages_max=50,
)
PLENTY = BrokerConfig()
MANY = 17
"""So many messages are read in bulk if they are not plain; fewer, one by one."""


@pytest.fixture(autouse=True, scope="module", params=[0, 128 << 10], ids=["bulk", "typed"])
def _typed_bytes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to read many plain messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_TYPED_BYTES", request.param)
        yield


BEFORE_THE_MESSAGES = {*("INVALID_NAME", "EMPTY_BATCH", "TOO_MANY_MESSAGES", "PRODUCER_NAME_TOO_LARGE")}
"""Reasons to refuse a request without a look at its messages."""


class Refusal(NamedTuple):
    """An answer of `decode_produce`; the field is one of those that would do."""

    kind: type[Exception]
    reason: str
    fields: frozenset[str] = frozenset({""})


def refusal(request: Any, config: BrokerConfig) -> Refusal | None:
    """Return the refusal of a request that the typed parser takes, in the order of the checks."""
    messages = request.messages
    if not request.topic.isalnum() or not request.topic.isascii():
        return Refusal(InvalidRequest, "INVALID_NAME", frozenset({"topic"}))
    if not 0 < len(messages) <= config.tuning.batch_messages_max:
        reason = "TOO_MANY_MESSAGES" if messages else "EMPTY_BATCH"
        return Refusal(InvalidRequest, reason, frozenset({"messages"}))
    if len(request.producer_name.encode()) > PRODUCER_NAME_BYTES_MAX:
        return Refusal(InvalidRequest, "PRODUCER_NAME_TOO_LARGE", frozenset({"producer_name"}))
    for name, size, limit in (
        ("payload", lambda m: len(m.payload), config.payload_bytes_max),
        ("properties", lambda m: len(m.properties), config.tuning.properties_count_max),
        ("properties", property_bytes, config.tuning.properties_bytes_max),
        ("traceparent", lambda m: len(m.traceparent.encode()), TRACEPARENT_BYTES_MAX),
        ("key", lambda m: len(m.key.encode()), config.tuning.key_bytes_max),
        ("schedule_key", lambda m: len(m.schedule_key.encode()), config.tuning.schedule_key_bytes_max),
    ):
        over = frozenset(f"messages[{i}].{name}" for i, m in enumerate(messages) if size(m) > limit)
        if over:
            return Refusal(InvalidRequest, f"{name.upper()}_TOO_LARGE", over)
    times = [message.deliver_at_ms for message in messages]
    wrong = (i for i, ms in enumerate(times) if 0 < ms < DELIVER_AT_MS_MIN or ms > DELIVER_AT_MS_MAX)
    odd = frozenset(f"messages[{i}].deliver_at_ms" for i in wrong)
    return Refusal(InvalidRequest, "INVALID_DELIVER_AT_MS", odd) if odd else None


def property_bytes(message: Any) -> int:
    return sum(len((name + value).encode()) for name, value in message.properties.items())


def check(raw: bytes, config: BrokerConfig = CONFIG) -> DecodedProduce | None:
    """Decode, and compare with what the typed parser says."""
    try:
        request: Any = producer_pb2.ProduceRequest.FromString(raw)
    except DecodeError:
        request = None
    wanted = refusal(request, config) if request is not None else None
    try:
        decoded = decode_produce(raw, config)
    except InvalidRequest as error:
        refused = error
    else:
        assert request is not None and wanted is None
        check_columns(decoded, request)
        return decoded
    if request is None:
        assert refused.reason in {"MALFORMED_REQUEST", *BEFORE_THE_MESSAGES}
    else:
        assert wanted is not None, f"{refused.reason}: {refused}"
        assert (type(refused), refused.reason) == wanted[:2]
        assert getattr(refused, "field", "") in wanted.fields
    return None


def check_columns(decoded: DecodedProduce, request: Any) -> None:
    batch, messages = decoded.batch, list(request.messages)
    request.DiscardUnknownFields()  # of these nothing is promised
    assert (decoded.topic, decoded.request_id) == (request.topic, request.request_id)
    assert batch.deliver_at_ms.tolist() == [m.deliver_at_ms for m in messages]
    assert batch.deliver_after_ms.tolist() == [m.deliver_after_ms for m in messages]
    assert batch.ttl_ms.tolist() == [m.ttl_ms for m in messages]
    assert batch.key_hashes.tolist() == [
        google_crc32c.value(m.key.encode()) or 1 if m.key else 0 for m in messages
    ]
    keys = {i: m.schedule_key.encode() for i, m in enumerate(messages) if m.schedule_key}
    assert (batch.schedule_keys is None) == (not keys)
    if batch.schedule_keys is not None:
        places = batch.schedule_keys.places().tolist()
        assert {place: batch.schedule_keys.key(place) for place in places} == keys
    hashes = dict(zip(keys, hash_keys(keys.values()).tolist(), strict=True))
    assert batch.schedule_hashes.tolist() == [hashes.get(i, 0) for i in range(len(messages))]
    assert decoded.replace == request.replace
    sequence_ids = [m.sequence_id for m in messages]
    assert batch.producer_name == request.producer_name
    if request.producer_name and any(sequence_ids):
        assert batch.sequence_ids is not None and batch.sequence_ids.tolist() == sequence_ids
    else:
        assert batch.sequence_ids is None
    frames, at = [], 0
    for length in batch.lengths.tolist():
        frames.append(batch.frames[at : at + length])
        at += length
    assert at == len(batch.frames) and batch.count == len(messages)
    assert batch.crcs.tolist() == [google_crc32c.value(frame) for frame in frames]
    # A frame is the field `Delivery.message` and nothing else.
    assert [stored_message(frame) for frame in frames] == messages
    bodies = decode.ProduceEnvelope.FromString(batch.frames).messages
    # Clients take as many payloads as messages for one of each.
    assert all(len(decode.MessageColumns.FromString(each).payload) < 2 for each in bodies)


def stored_message(frame: bytes) -> Any:
    delivery = consumer_pb2.Delivery.FromString(frame)
    assert [field.name for field, _ in delivery.ListFields()] == ["message"]
    delivery.DiscardUnknownFields()  # a property with unknown fields is one to this parser
    return delivery.message


def request_of(*messages: bytes, topic: bytes = b"t") -> bytes:
    return text(0x0A, topic) + b"".join(text(0x12, message) for message in messages)


# -- any messages --------------------------------------------------------------------------------------------

words = st.sampled_from(["", "a", "b", "köy", "sixsix", "seven77"])
numbers = st.sampled_from([0, 1, 127, 128, 1 << 41, (1 << 53) - 1, 1 << 53, (1 << 63) - 1, -1, -(1 << 63)])
delivery_times = st.sampled_from(
    [0, 0, DELIVER_AT_MS_MIN, 1 << 41, DELIVER_AT_MS_MAX, -1, -(1 << 63), 1 << 40]
)
typed_messages = st.builds(
    message_pb2.Message,
    payload=st.sampled_from([0, 1, 3, 120, 127, 128, 200]).map(bytes) | st.binary(max_size=9),
    key=words,
    properties=st.dictionaries(words, words, max_size=2),
    deliver_at_ms=delivery_times,
    deliver_after_ms=numbers,
    ttl_ms=numbers,
    sequence_id=st.sampled_from([0, 1, 1 << 63, (1 << 64) - 1]),
    event_time_ms=numbers,
    traceparent=words | st.just("t" * 256),
)
widths = st.integers(1, 10)
small_widths = st.integers(1, 5)  # a length has 31 bits


def padded_text(tag: int, content: bytes, width: int) -> bytes:
    return bytes([tag]) + varint(len(content), width) + content


octets = st.sampled_from([b"", b"a", "ö".encode(), b"\xff", b"sixsix", b"seven77"])
plain_fields = st.one_of(
    st.builds(
        lambda tag, value, width: bytes([tag]) + varint(value, width),
        st.sampled_from([0x20, 0x28, 0x38, 0x40, 0x48]),
        numbers,
        widths,
    ),
    st.builds(padded_text, st.sampled_from([0x0A, 0x0A, 0x12, 0x52]), octets, small_widths),
    st.builds(lambda name, value: text(0x1A, text(0x0A, name) + text(0x12, value)), octets, octets),
)
odd_fields = st.sampled_from(
    [
        text(0x32, b""),  # an empty schedule_key
        text(0x32, b"later"),
        text(0x32, b"\xff"),
        text(0x32, b"\xff") + text(0x32, b"later"),
        b"\x58\x05",  # unknown, of each wire type
        b"\x59" + bytes(8),
        text(0x5A, b"??"),
        b"\x5b\x08\x01\x5c",
        b"\x5d" + bytes(4),
        b"\xfa\x01\x01?",  # of a greater number
        b"\x0d" + bytes(4),  # a payload of another wire type
        b"\xa0\x80\x00\x07",  # deliver_at_ms under a padded tag
        text(0x1A, text(0x0A, b"a") + b"\x28\x01"),  # a property with an unknown field
        text(0x1A, b"\x0a\x05"),  # a property that is cut
        b"\x20",
        b"\x00\x01",
        b"\x0c",
    ]
)


def raw_messages(odd: bool) -> st.SearchStrategy[bytes]:
    fields = st.one_of(plain_fields, plain_fields, odd_fields) if odd else plain_fields
    return st.lists(fields, max_size=5).map(b"".join)


counts = st.sampled_from([1, 2, 16, MANY, 40])


def cycled(some: list[bytes], count: int) -> list[bytes]:
    return [some[i % len(some)] for i in range(count)]


@given(
    some=st.lists(typed_messages, min_size=1, max_size=4),
    count=counts,
    producer=st.sampled_from(["", "p", "ü" * 127]),
)
def test_columns_and_frames_are_those_of_the_typed_messages(some: list[Any], count: int, producer: str):
    messages = [some[i % len(some)] for i in range(count)]
    request = producer_pb2.ProduceRequest(topic="t", messages=messages, request_id=9, producer_name=producer)
    raw = request.SerializeToString()
    assert check(raw, PLENTY) is not None
    check(raw)


@given(some=st.lists(raw_messages(odd=False), min_size=1, max_size=4), count=counts)
@example(some=[text(0x0A, b"a") + text(0x0A, b"b"), b""], count=MANY)  # as many payloads as messages
def test_fields_in_any_order_repeated_and_padded_are_read_as_typed(some: list[bytes], count: int):
    check(request_of(*cycled(some, count)))
    check(request_of(*cycled(some, count)), PLENTY)


@given(some=st.lists(raw_messages(odd=True), min_size=1, max_size=4), count=counts)
def test_unknown_fields_and_broken_ones_are_read_as_typed(some: list[bytes], count: int):
    check(request_of(*cycled(some, count)))


envelopes = st.lists(
    st.sampled_from(
        [
            text(0x0A, b"t"),
            text(0x0A, b"topic"),
            text(0x0A, b""),
            text(0x0A, b"\xff"),
            text(0x1A, b"producer"),
            text(0x1A, b"p" * 256),
            b"\x20\x07",
            b"\x28\x00",
            b"\x28\x01",
            text(0x7A, b"unknown"),
            b"\x12\x81\x00\x50",  # a message with a padded length, which is cut
            b"\x12\x83\x00\x0a\x01x",
            text(0x12, b"\x40\x01"),
        ]
    ),
    max_size=4,
).map(b"".join)


@given(
    before=envelopes,
    between=envelopes,
    after=envelopes,
    some=raw_messages(odd=False),
    count=st.sampled_from([0, 1, MANY, 51]),
)
def test_the_other_fields_may_lie_anywhere(
    before: bytes, between: bytes, after: bytes, some: bytes, count: int
):
    check(before + text(0x12, some) * count + between + text(0x12, some) + after)


def test_bytes_that_look_like_the_messages_are_not_taken_for_them():
    # They lay where the messages lie behind a topic, and were stored under the crcs of others: the topic's log was
    # damaged for every subscription.
    def messages(letter: bytes) -> bytes:
        return b"".join(text(0x12, text(0x0A, letter + b"%02d" % i)) for i in range(MANY))

    unknown = text(0x7A, b"?" + messages(b"F"))
    assert unknown[3:] == messages(b"F")  # where they lie behind a topic of one letter
    for raw in (
        unknown + text(0x0A, b"t") + messages(b"R"),
        text(0x0A, b"?" + messages(b"F")) + text(0x0A, b"t") + messages(b"R"),
    ):
        decoded = check(raw)
        assert decoded is not None
        assert decoded.batch.frames == messages(b"R")


@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("tag", [0x12, 0x32, 0x52])
def test_text_that_is_not_utf_8_is_refused(tag: int, count: int):
    good = text(0x0A, b"x")
    with pytest.raises(InvalidRequest) as caught:
        decode_produce(request_of(*[good] * (count - 1), text(tag, b"\xc3\x28")), PLENTY)
    assert caught.value.reason == "MALFORMED_REQUEST"


@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("last", [b"x", b""])
@pytest.mark.parametrize("tag", [0x12, 0x32, 0x52])
def test_text_that_is_not_utf_8_is_refused_also_where_another_one_counts(tag: int, last: bytes, count: int):
    with pytest.raises(InvalidRequest) as caught:
        decode_produce(request_of(*[b""] * (count - 1), text(tag, b"\xff\xfe") + text(tag, last)), PLENTY)
    assert caught.value.reason == "MALFORMED_REQUEST"


@pytest.mark.parametrize("count", [1, MANY])
def test_a_property_that_is_not_utf_8_is_refused(count: int):
    for entry in (text(0x0A, b"\xff"), text(0x12, b"\xff")):
        with pytest.raises(InvalidRequest) as caught:
            decode_produce(request_of(*[b""] * (count - 1), text(0x1A, entry)), PLENTY)
        assert caught.value.reason == "MALFORMED_REQUEST"


@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (text(0x0A, bytes(201)), "PAYLOAD_TOO_LARGE"),
        (text(0x0A, bytes(20_000)), "PAYLOAD_TOO_LARGE"),
        (text(0x12, b"1234567"), "KEY_TOO_LARGE"),
        (text(0x32, b"1234567"), "SCHEDULE_KEY_TOO_LARGE"),
        (b"".join(text(0x1A, text(0x0A, name)) for name in (b"a", b"b", b"c")), "PROPERTIES_TOO_LARGE"),
        (text(0x1A, text(0x0A, b"a") + text(0x12, bytes(16))), "PROPERTIES_TOO_LARGE"),
        (text(0x52, bytes(257)), "TRACEPARENT_TOO_LARGE"),
        (text(0x52, bytes(5_000_000)), "TRACEPARENT_TOO_LARGE"),
    ],
    ids=[
        *("payload", "huge payload", "key", "schedule_key", "properties", "property"),
        *("traceparent", "huge traceparent"),
    ],
)
def test_what_is_over_a_limit_is_named(count: int, message: bytes, reason: str):
    with pytest.raises(InvalidRequest) as caught:
        decode_produce(request_of(*[b""] * (count - 1), message), CONFIG)
    assert caught.value.reason == reason
    assert caught.value.field == f"messages[{count - 1}].{reason.removesuffix('_TOO_LARGE').lower()}"
    assert "limit" in caught.value.facts


@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (text(0x12, bytes(1025)), "KEY_TOO_LARGE"),
        (text(0x32, bytes(1025)), "SCHEDULE_KEY_TOO_LARGE"),
        (text(0x1A, text(0x0A, b"a") + text(0x12, bytes(17_000))), "PROPERTIES_TOO_LARGE"),
        (b"".join(text(0x1A, text(0x0A, b"%02d" % i)) for i in range(65)), "PROPERTIES_TOO_LARGE"),
        (text(0x52, bytes(257)), "TRACEPARENT_TOO_LARGE"),
    ],
    ids=["key", "schedule_key", "property", "properties", "traceparent"],
)
def test_other_fields_are_bounded_where_payloads_may_be_longer(count: int, message: bytes, reason: str):
    with pytest.raises(InvalidRequest) as caught:
        decode_produce(request_of(*[text(0x0A, b"x")] * (count - 1), message), PLENTY)
    assert caught.value.reason == reason


@pytest.mark.parametrize("count", [1, MANY])
def test_fields_that_nobody_knows_are_not_stored(count: int):
    message = message_pb2.Message(payload=b"x", deliver_after_ms=5).SerializeToString()
    batch = decode_produce(request_of(*[message + b"\x98\x06\x01"] * count), PLENTY).batch
    assert batch.frames == text(0x12, message) * count


@pytest.mark.parametrize("count", [1, MANY])
def test_a_limit_itself_is_not_over_it(count: int):
    entries = text(0x1A, text(0x0A, b"a") + text(0x12, bytes(7))) + text(
        0x1A, text(0x0A, b"b") + text(0x12, bytes(7))
    )
    message = text(0x0A, bytes(200)) + text(0x12, b"sixsix") + entries + text(0x52, bytes(256))
    assert check(request_of(*[message] * count)) is not None


OVERLONG = {
    "six payloads": text(0x0A, bytes(1 << 20)) * 6,
    "many keys": text(0x12, bytes(25_000)) * 200 + text(0x12, b"k"),
    "one property again and again": text(0x1A, text(0x0A, b"a") + text(0x12, bytes(65_000))) * 80
    + text(0x1A, text(0x0A, b"a")),
    "two traceparents, the last one fits": text(0x52, bytes(5_000_000)) + text(0x52, b"00"),
    "an unknown field": text(0x7A, bytes(5_000_000)),
    "unknown fields": text(0x7A, bytes(25_000)) * 200,
    "an unknown field in a property": text(0x1A, text(0x0A, b"a") + text(0x1A, bytes(5_000_000))),
    "a group that is unknown": b"\x7b" + text(0x0A, bytes(5_000_000)) + b"\x7c",
}
"""Messages that are within the limits for whoever reads them, and far over them as they came."""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, MANY, 50])
@pytest.mark.parametrize("message", OVERLONG.values(), ids=OVERLONG.keys())
def test_no_stored_message_is_longer_than_the_limits_allow(count: int, message: bytes):
    raw = request_of(*[text(0x0A, b"x")] * (count - 1), message)
    request = producer_pb2.ProduceRequest.FromString(raw)
    request.DiscardUnknownFields()
    batch = decode_produce(raw, PLENTY).batch
    assert batch.count == count
    assert int(batch.lengths.max()) <= PLENTY.message_bytes_max < 1.1 * (1 << 20)
    assert stored_message(batch.frames[-int(batch.lengths[-1]) :]) == request.messages[-1]


@pytest.mark.parametrize("count", [1, MANY])
def test_of_properties_with_one_name_only_the_last_counts(count: int):
    entry = text(0x1A, text(0x0A, b"a"))
    assert check(request_of(*[entry * 5] * count)) is not None


@pytest.mark.parametrize("count", [1, MANY])
def test_an_empty_key_on_the_wire_is_no_key(count: int):
    message = text(0x12, b"a") + text(0x12, b"") + text(0x32, b"")
    decoded = check(request_of(*[message] * count))
    assert decoded is not None
    assert not decoded.batch.key_hashes.any()


# -- any bytes -----------------------------------------------------------------------------------------------

SOUND = [
    producer_pb2.ProduceRequest(
        topic="t",
        request_id=300,
        messages=[
            message_pb2.Message(
                payload=b"x" * i, key="k", properties={"a": "b"}, deliver_at_ms=i << 40, ttl_ms=-i
            )
            for i in range(count)
        ],
    ).SerializeToString()
    for count in (2, MANY)
]


@given(raw=st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(raw: bytes):
    check(raw)
    check(text(0x0A, b"t") + raw)


@given(some=st.lists(st.binary(max_size=12), min_size=1, max_size=3))
def test_any_bytes_as_messages_are_decoded_or_refused(some: list[bytes]):
    check(request_of(*cycled(some, MANY)))


@given(
    sound=st.sampled_from(SOUND),
    at=st.floats(0, 1, exclude_max=True),
    cut=st.integers(0, 3),
    put=st.binary(max_size=3),
)
def test_a_request_that_was_changed_anywhere_is_decoded_or_refused(
    sound: bytes, at: float, cut: int, put: bytes
):
    place = int(at * len(sound))
    check(sound[:place] + put + sound[place + cut :])


def test_the_request_id_is_read_from_what_will_be_refused():
    assert read_envelope(SOUND[0]).request_id == 300
    assert read_envelope(text(0x0A, b"/") + b"\x20\x05").request_id == 5


def test_a_message_with_more_fields_than_it_can_mean_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
):
    """Properties, and what is in them: 16 MiB of empty ones take seconds to parse, and much memory."""
    monkeypatch.setattr(decode, "_parse_typed", None)
    for inside in (text(0x1A, b"") * 150_000, text(0x1A, text(0x0A, b"") * 150_000), b"\x20\x01" * 150_000):
        for count in (1, MANY):
            with pytest.raises(InvalidRequest) as caught:
                decode_produce(request_of(*[b""] * (count - 1), inside), CONFIG)
            assert (caught.value.reason, caught.value.field) == ("TOO_MANY_FIELDS", f"messages[{count - 1}]")


def test_as_many_properties_as_a_message_may_have_pass():
    properties = {f"{n}": "v" * 100 for n in range(PLENTY.tuning.properties_count_max)}
    message = message_pb2.Message(payload=bytes(1000), properties=properties).SerializeToString()
    for count in (1, 60):
        batch = decode_produce(request_of(*[message + b"\x98\x06\x01"] * count), PLENTY).batch
        assert batch.count == count


def test_a_message_that_is_too_large_is_refused_before_it_is_written_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("broker.rpc.decode._write_frames", lambda _: pytest.fail("it is written anew"))
    message = message_pb2.Message(payload=bytes(CONFIG.payload_bytes_max + 1))
    with pytest.raises(InvalidRequest) as refused:
        decode_produce(request_of(message.SerializeToString()), CONFIG)
    assert refused.value.reason == "PAYLOAD_TOO_LARGE"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b"\x28\x05\x28\x06", b""),
        (b"\x2a\x02\x05\x06", b""),
        (b"\x2a\x01\x05", b"\x28\x07"),
        (b"\x28\x05", b""),
    ],
    ids=["twice and never", "packed and never", "packed", "once and never"],
)
def test_the_time_of_a_message_is_its_own(first: bytes, second: bytes):
    """Fields of many messages are read as those of one: each must have its own, and exactly one, for that."""
    decoded = check(request_of(*[text(0x0A, b"payload") + each for each in (first, second)] * MANY), PLENTY)
    assert decoded is not None


def test_a_request_with_unknown_fields_has_the_frames_of_its_messages():
    message = text(0x0A, b"payload")
    assert check(request_of(*[message] * MANY) + b"\xa0\x06\x01", PLENTY) is not None
    assert check(b"\xa0\x06\x01" + request_of(*[message] * MANY), PLENTY) is not None


@pytest.mark.parametrize("size", [4_095, 4_096, 4_097, 1 << 14])
def test_checksums_of_long_messages_are_those_of_their_frames(size: int):
    message = message_pb2.Message()
    message.payload = bytes(size - len(text(0x0A, bytes(size))) + size)
    assert check(request_of(*[message.SerializeToString(), text(0x0A, b"short")] * MANY), PLENTY) is not None
