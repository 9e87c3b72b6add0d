"""Manifests and cursors as bytes: they come back as they were, and any other bytes are `Corrupt`."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import EXPIRE_MS_MAX, LEDGER_ID_MAX, START, Position
from broker.storage.blocks import LedgerCapture, block_count
from broker.storage.compaction_inputs import MAGIC_INPUTS, decode_inputs
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.manifest import (
    FRAME_BYTES,
    ID_MAX,
    MAGIC_BROKER,
    MAGIC_CURSOR,
    MAGIC_TOPIC,
    BrokerImage,
    CursorImage,
    LedgerImage,
    LedgerTimes,
    SubscriptionImage,
    TopicImage,
    bitmap_from_bytes,
    decode_broker,
    decode_cursor,
    decode_topic,
    encode_broker,
    encode_cursor,
    encode_topic,
    frame_content,
)
from broker.storage.producers_file import MAGIC_PRODUCERS, decode_producers
from broker.storage.v1 import manifest_pb2 as pb
from tests.golden import make
from tests.unit.storage.test_policy import subscription_policies, topic_policies

Decoder = Callable[[bytes, str], Any]

DECODERS: dict[bytes, Decoder] = {
    MAGIC_BROKER: decode_broker,
    MAGIC_TOPIC: decode_topic,
    MAGIC_CURSOR: decode_cursor,
}
ENCODED = {
    MAGIC_BROKER: encode_broker(make.broker_image()),
    MAGIC_TOPIC: encode_topic(make.topic_image()),
    MAGIC_CURSOR: encode_cursor(make.cursor_image()),
}

# Values


ids = st.integers(1, ID_MAX)
lsns = st.integers(0, ID_MAX)
times = st.integers(0, (1 << 63) - 1)
ledger_ids = st.integers(1, LEDGER_ID_MAX)
reasons = st.sampled_from(["r", "boom", "ü" * 512])
positions = st.builds(Position, st.integers(0, LEDGER_ID_MAX), st.integers(0, 1 << 32))
names = st.text(min_size=1, max_size=20)
entry_ids = st.integers(0, (1 << 32) - 1) | st.integers(0, 300)
entry_sets = st.sets(entry_ids, max_size=30)
bitmaps = st.builds(BitMap, entry_sets)


@st.composite
def broker_images(draw: st.DrawFn) -> BrokerImage:
    topics = draw(st.dictionaries(st.integers(1, 1 << 40), names, max_size=5))
    unique = {topic_id: f"{name}{topic_id}" for topic_id, name in topics.items()}
    return BrokerImage(
        draw(names),
        draw(lsns),
        dict(sorted(unique.items())),
        draw(st.integers(max(unique, default=0) + 1, ID_MAX)),
        draw(ledger_ids),
        draw(times),
        draw(st.sampled_from(["", "shard 0 of 1"])),
        draw(st.integers(0, (1 << 32) - 1)),
    )


@st.composite
def ledger_images(draw: st.DrawFn, topic_id: int, ledger_id: int, *, sealed: bool) -> LedgerImage:
    count = draw(st.integers(0, 20_000))
    crcs = st.lists(st.integers(0, (1 << 32) - 1), min_size=block_count(count), max_size=block_count(count))
    capture = LedgerCapture(
        topic_id,
        ledger_id,
        draw(st.integers(0, (1 << 32) - 1)),
        count,
        draw(st.integers(1, (1 << 32))) if count else 0,
        sealed,
        () if sealed else tuple(draw(crcs)),
        () if sealed else tuple(draw(crcs)),
    )
    facts = LedgerFacts(draw(times), draw(times), draw(st.integers(0, EXPIRE_MS_MAX)), draw(times))
    return LedgerImage(capture, facts)


@st.composite
def subscription_images(draw: st.DrawFn, subscription_id: int) -> SubscriptionImage:
    return SubscriptionImage(
        subscription_id,
        f"{draw(names)}{subscription_id}",
        draw(st.integers(1, 4)),
        draw(times),
        draw(positions),
        draw(subscription_policies),
        draw(st.just("") | st.from_regex(r"[0-9]{1,9}\.[0-9a-f]{1,16}", fullmatch=True)),
        draw(positions),
    )


@st.composite
def topic_images(draw: st.DrawFn) -> TopicImage:
    ledgers = sorted(draw(st.sets(st.integers(1, LEDGER_ID_MAX - 1), max_size=3)))
    subscriptions = draw(st.sets(st.integers(1, 1 << 40), max_size=3))
    topic_id = draw(ids)
    return TopicImage(
        topic_id,
        draw(names),
        draw(times),
        draw(topic_policies),
        draw(lsns),
        tuple(
            draw(ledger_images(topic_id, each, sealed=each != ledgers[-1] or draw(st.booleans())))
            for each in ledgers
        ),
        tuple(draw(subscription_images(each)) for each in subscriptions),
        draw(st.integers(max(subscriptions, default=0) + 1, ID_MAX)),
        draw(positions),
        draw(lsns),
        draw(times),
        log_end=draw(st.sampled_from([START, Position(max(ledgers, default=0) + 1, draw(entry_ids))])),
    )


def ledger_times(times_ms: dict[int, int]) -> LedgerTimes:
    column = np.array([times_ms[entry_id] for entry_id in sorted(times_ms)], "<i8")
    return LedgerTimes(BitMap(times_ms), column.tobytes())


@st.composite
def cursor_images(draw: st.DrawFn) -> CursorImage:
    waiting = draw(st.dictionaries(ledger_ids, st.dictionaries(entry_ids, times, min_size=1), max_size=3))
    return CursorImage(
        draw(ids),
        draw(ids),
        dict(sorted(draw(st.dictionaries(ledger_ids, bitmaps, max_size=3)).items())),
        draw(st.dictionaries(ledger_ids, st.lists(bitmaps, min_size=1, max_size=4), max_size=3)),
        {ledger_id: ledger_times(waiting[ledger_id]) for ledger_id in sorted(waiting)},
        reasons=draw(st.dictionaries(st.builds(Position, ledger_ids, entry_ids), reasons, max_size=3)),
    )


@pytest.mark.slow
@given(broker_images())
def test_the_root_comes_back_as_it_was(image: BrokerImage) -> None:
    assert decode_broker(encode_broker(image), "") == image


@pytest.mark.slow
@given(topic_images())
def test_a_topic_comes_back_as_it_was(image: TopicImage) -> None:
    assert decode_topic(encode_topic(image), "") == image


@pytest.mark.slow
@given(cursor_images())
def test_a_cursor_comes_back_as_it_was(image: CursorImage) -> None:
    assert decode_cursor(encode_cursor(image), "") == image


# Any bytes


def decode_any(decoder: Decoder, framed: bytes) -> None:
    with suppress(Corrupt):
        decoder(framed, "some/path")


@pytest.mark.parametrize("magic", DECODERS)
@given(content=st.binary(max_size=300))
def test_any_bytes_give_a_value_or_corrupt(magic: bytes, content: bytes) -> None:
    for framed in (content, magic + content, frame_content(magic, content)):
        decode_any(DECODERS[magic], framed)


@pytest.mark.slow
@pytest.mark.parametrize("magic", DECODERS)
@given(data=st.data())
def test_a_checksum_does_not_vouch_for_the_content(magic: bytes, data: st.DataObject) -> None:
    content = bytearray(ENCODED[magic][FRAME_BYTES:])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    decode_any(DECODERS[magic], frame_content(magic, bytes(content)))


uint64s = st.integers(0, 3) | st.integers(0, (1 << 64) - 1)
int64s = st.integers(-2, 3) | st.integers(-(1 << 63), (1 << 63) - 1)
uint32s = st.integers(0, 3) | st.integers(0, (1 << 32) - 1)
junk = st.binary(max_size=40) | bitmaps.map(BitMap.serialize)
some_positions = st.builds(pb.PositionRecord, ledger_id=uint64s, entry_id=uint64s)
ledger_entries = st.builds(
    pb.LedgerEntry,
    ledger_id=uint64s,
    entry_count=uint64s,
    data_bytes=uint64s,
    sealed=st.booleans(),
    times_crcs=st.lists(uint32s, max_size=2),
    rows_crcs=st.lists(uint32s, max_size=2),
    first_publish_ms=int64s,
)
subscription_entries = st.builds(
    pb.SubscriptionEntry,
    subscription_id=uint64s,
    name=st.text(max_size=3),
    type=uint32s,
    create_time_ms=int64s,
    start=some_positions,
    cursor_file=st.sampled_from(["", "1.a", "../x", "1/2", "x"]),
    mark=some_positions,
)
messages = {
    MAGIC_BROKER: st.builds(
        pb.BrokerManifest,
        broker_id=st.text(max_size=3),
        checkpoint_lsn=uint64s,
        topics=st.lists(st.builds(pb.TopicEntry, topic_id=uint64s, name=st.text(max_size=2)), max_size=3),
        next_topic_id=uint64s,
        next_ledger_id=uint64s,
        last_alive_ms=int64s,
    ),
    MAGIC_TOPIC: st.builds(
        pb.TopicManifest,
        topic_id=uint64s,
        name=st.text(max_size=3),
        policy=st.builds(pb.TopicPolicyRecord, tracker=uint32s, tick_ms=int64s, ledger_max_bytes=uint64s),
        applied_lsn=uint64s,
        ledgers=st.lists(ledger_entries, max_size=2),
        subscriptions=st.lists(subscription_entries, max_size=2),
        next_subscription_id=uint64s,
        indexed_through=some_positions,
        frontier_ms=int64s,
    ),
    MAGIC_CURSOR: st.builds(
        pb.CursorFile,
        topic_id=uint64s,
        subscription_id=uint64s,
        settled=st.lists(st.builds(pb.LedgerBitmap, ledger_id=uint64s, bitmap=junk), max_size=2),
        attempts=st.lists(st.builds(pb.AttemptBits, ledger_id=uint64s, bit=uint32s, bitmap=junk), max_size=2),
        waiting=st.lists(
            st.builds(pb.WaitingTimes, ledger_id=uint64s, bitmap=junk, times=st.binary(max_size=24)),
            max_size=2,
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("magic", messages)
@given(data=st.data())
def test_what_decodes_can_be_encoded_again(magic: bytes, data: st.DataObject) -> None:
    encoders: dict[bytes, Any] = {
        MAGIC_BROKER: encode_broker,
        MAGIC_TOPIC: encode_topic,
        MAGIC_CURSOR: encode_cursor,
    }
    framed = frame_content(magic, data.draw(messages[magic]).SerializeToString())
    with suppress(Corrupt):
        image = DECODERS[magic](framed, "")
        assert DECODERS[magic](encoders[magic](image), "") == image


# Damage


@pytest.mark.parametrize("magic", DECODERS)
def test_every_flipped_bit_is_found(magic: bytes) -> None:
    framed = ENCODED[magic]
    for bit in range(len(framed) * 8):
        damaged = bytearray(framed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt) as found:
            DECODERS[magic](bytes(damaged), "the/path")
        assert found.value.path == "the/path"


@pytest.mark.parametrize("magic", DECODERS)
def test_every_other_length_is_found(magic: bytes) -> None:
    framed = ENCODED[magic]
    for damaged in (*(framed[:length] for length in range(len(framed))), framed + b"\0", framed * 2):
        with pytest.raises(Corrupt):
            DECODERS[magic](damaged, "")


def test_one_kind_is_not_taken_for_another() -> None:
    for magic, framed in ENCODED.items():
        for other, decoder in DECODERS.items():
            if other != magic:
                with pytest.raises(Corrupt):
                    decoder(framed, "")


@pytest.mark.parametrize(
    ("decode", "magic", "name"),
    [
        (decode_broker, MAGIC_BROKER, "broker manifest"),
        (decode_topic, MAGIC_TOPIC, "topic manifest"),
        (decode_cursor, MAGIC_CURSOR, "cursor"),
        (decode_producers, MAGIC_PRODUCERS, "file of producers"),
        (decode_inputs, MAGIC_INPUTS, "file of compaction inputs"),
    ],
)
def test_an_error_names_what_is_damaged(decode: Decoder, magic: bytes, name: str) -> None:
    framed = bytearray(frame_content(magic, b"content"))
    framed[-1] ^= 1
    with pytest.raises(Corrupt, match=f"A {name}'s checksum does not match"):
        decode(bytes(framed), "")
    with pytest.raises(Corrupt, match=f"A {name} has impossible values"):
        decode(frame_content(magic, b"content"), "")


@pytest.mark.parametrize("magic", DECODERS)
def test_a_field_that_a_newer_version_wrote_is_not_dropped(magic: bytes) -> None:
    """The next checkpoint would write the manifest without it."""
    with pytest.raises(Corrupt, match="a newer version wrote"):
        DECODERS[magic](frame_content(magic, ENCODED[magic][FRAME_BYTES:] + bytes((0xFA, 0x7F, 1, 0))), "")


def test_a_later_version_says_so() -> None:
    later = bytearray(ENCODED[MAGIC_TOPIC])
    later[4] = 2
    with pytest.raises(Corrupt, match="version 2"):
        decode_topic(bytes(later), "")


@pytest.mark.parametrize("magic", DECODERS)
def test_a_length_is_believed_only_as_far_as_the_bytes_reach(magic: bytes) -> None:
    huge = b"\xff\xff\xff\xff\x0f"  # a varint of nearly 4 GiB
    contents = [bytes([field << 3 | 2]) + huge for field in range(1, 12)]
    tracemalloc.start()
    for content in contents:
        for framed in (frame_content(magic, content), magic + b"\1\0\0\0" + b"\xff" * 8 + content):
            with pytest.raises(Corrupt):
                DECODERS[magic](framed, "")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


# Values that no broker writes


@pytest.mark.parametrize(
    "changes",
    [
        {"broker_id": ""},
        {"checkpoint_lsn": 1 << 63},
        {"topics": {0: "x"}},
        {"topics": {8: "x"}},
        {"topics": {3: ""}},
        {"topics": {3: "x", 4: "x"}},
        {"next_topic_id": 0},
        {"next_ledger_id": 0},
        {"next_ledger_id": (1 << 48) + 1},
        {"last_alive_ms": -1},
    ],
)
def test_a_root_with_a_value_out_of_range_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        decode_broker(encode_broker(dataclasses.replace(make.broker_image(), **changes)), "")


def subscription(**changes: Any) -> dict[str, Any]:
    first, second = make.topic_image().subscriptions
    return {"subscriptions": (dataclasses.replace(first, **changes), second)}


def sealed_ledger(**changes: Any) -> dict[str, Any]:
    first, last = make.topic_image().ledgers
    return {"ledgers": (changed_ledger(first, **changes), last)}


def open_ledger(**changes: Any) -> dict[str, Any]:
    first, last = make.topic_image().ledgers
    return {"ledgers": (first, changed_ledger(last, **changes))}


def changed_ledger(ledger: LedgerImage, **changes: Any) -> LedgerImage:
    return dataclasses.replace(ledger, capture=dataclasses.replace(ledger.capture, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"topic_id": 0},
        {"name": ""},
        {"create_time_ms": -1},
        {"applied_lsn": 1 << 63},
        {"next_subscription_id": 3},
        {"indexed_through": Position(1 << 48, 0)},
        {"indexed_through": Position(1, (1 << 32) + 1)},
        {"index_lsn": 1 << 63},
        {"frontier_ms": -1},
        {"ledgers": make.topic_image().ledgers[::-1]},
        {"ledgers": make.topic_image().ledgers[:1] * 2},
        sealed_ledger(ledger_id=0),
        sealed_ledger(ledger_id=12),
        sealed_ledger(entry_count=(1 << 32) + 1),
        sealed_ledger(entry_count=0),
        sealed_ledger(data_bytes=0),
        sealed_ledger(data_bytes=1 << 33),
        sealed_ledger(sealed=False, times_crcs=(1, 2), rows_crcs=(1, 2)),
        sealed_ledger(times_crcs=(1,)),
        {
            "ledgers": [
                dataclasses.replace(ledger, facts=LedgerFacts(-1)) for ledger in make.topic_image().ledgers
            ]
        },
        open_ledger(ledger_id=1 << 48),
        open_ledger(times_crcs=()),
        open_ledger(rows_crcs=(1, 2)),
        open_ledger(entry_count=5000),
        subscription(subscription_id=0),
        subscription(subscription_id=3),
        subscription(subscription_id=4),
        subscription(name=""),
        subscription(name="audit"),
        subscription(type=0),
        subscription(type=5),
        subscription(create_time_ms=-1),
        subscription(start=Position(1 << 48, 0)),
        subscription(mark=Position(11, (1 << 32) + 1)),
        subscription(cursor_file="../1.a"),
        subscription(cursor_file="1.a\n"),
        subscription(cursor_file="1"),
    ],
)
def test_a_topic_with_a_value_out_of_range_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        decode_topic(encode_topic(dataclasses.replace(make.topic_image(), **changes)), "")


def test_a_log_ends_in_a_ledger_that_is_there_or_behind_all_of_them() -> None:
    image = make.topic_image()
    last = image.ledgers[-1].ledger_id
    for end in (Position(last, 1), Position(last - 1, 5)):
        with pytest.raises(Corrupt, match="the log ends"):
            decode_topic(encode_topic(dataclasses.replace(image, log_end=end)), "")


def cursor_message() -> pb.CursorFile:
    return pb.CursorFile.FromString(ENCODED[MAGIC_CURSOR][FRAME_BYTES:])


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message.ClearField("topic_id"),
        lambda message: message.ClearField("subscription_id"),
        lambda message: message.settled[0].ClearField("bitmap"),
        lambda message: message.settled[0].ClearField("ledger_id"),
        lambda message: message.settled.add(ledger_id=12, bitmap=BitMap([1]).serialize()),
        lambda message: message.settled.add(ledger_id=1 << 48, bitmap=BitMap([1]).serialize()),
        lambda message: message.settled.add(ledger_id=13, bitmap=BitMap([1]).serialize() + b"\0"),
        lambda message: message.settled.add(ledger_id=13, bitmap=b"junk"),
        lambda message: message.attempts.add(ledger_id=13, bit=1, bitmap=BitMap([1]).serialize()),
        lambda message: message.attempts.add(ledger_id=12, bit=3, bitmap=BitMap([1]).serialize()),
        lambda message: [
            message.attempts.add(ledger_id=13, bit=bit, bitmap=BitMap().serialize()) for bit in range(33)
        ],
        lambda message: message.waiting.add(ledger_id=13, bitmap=BitMap([1]).serialize(), times=b"\xff" * 8),
        lambda message: message.waiting.add(ledger_id=13, bitmap=BitMap([1]).serialize(), times=bytes(7)),
        lambda message: message.waiting.add(ledger_id=13, bitmap=BitMap([1]).serialize(), times=bytes(16)),
        lambda message: message.waiting.add(ledger_id=13, bitmap=BitMap().serialize()),
        lambda message: message.waiting.add(ledger_id=13, times=bytes(8)),
        lambda message: message.waiting.add(ledger_id=12, bitmap=BitMap([2]).serialize(), times=bytes(8)),
        lambda message: message.waiting.add(
            ledger_id=1 << 48, bitmap=BitMap([2]).serialize(), times=bytes(8)
        ),
    ],
)
def test_a_cursor_with_a_value_out_of_range_is_corrupt(change: Callable[[pb.CursorFile], Any]) -> None:
    message = cursor_message()
    decode_cursor(frame_content(MAGIC_CURSOR, message.SerializeToString()), "")
    change(message)
    with pytest.raises(Corrupt):
        decode_cursor(frame_content(MAGIC_CURSOR, message.SerializeToString()), "")


# Bitmaps


@given(st.binary(max_size=200))
def test_any_bytes_are_a_bitmap_or_refused(content: bytes) -> None:
    with suppress(ValueError):
        assert len(bitmap_from_bytes(content).serialize()) == len(content)


@given(data=st.data(), entries=entry_sets, runs=st.booleans())
def test_a_damaged_bitmap_is_a_bitmap_or_refused(data: st.DataObject, entries: set[int], runs: bool) -> None:
    bitmap = BitMap(entries | set(range(1000, 1000 + data.draw(st.integers(0, 9000)))))
    if runs:
        bitmap.run_optimize()
    content = bytearray(bitmap.serialize())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, min(len(content) - 1, 60)))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        found = bitmap_from_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
        assert len(list(found & BitMap(entries))) <= len(found)  # it can be used
