"""Frames of dead letters: what they keep, what they lose, and that any bytes give a frame or Corrupt."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from broker.errors import Corrupt, Refused
from broker.policy import EffectiveSubscriptionPolicy, SubscriptionPolicy
from broker.rpc.decode import ProduceEnvelope
from broker.topic_shards import ALL_TOPICS, TopicShard, shard_of
from broker.topics import dead_letter_frames as frames
from postdate_api.v1.message_pb2 import Message

GIVEN = {
    frames.TOPIC: "orders",
    frames.SUBSCRIPTION: "billing",
    frames.LEDGER_ID: "7",
    frames.ENTRY_ID: "0",
    frames.ATTEMPTS: "3",
    frames.REASON: "größer als 300 Zeichen? " * 20,
    frames.TIME_MS: "1790000000000",
}
WHOLE = Message(
    payload=b"\x00p" * 200,
    key="k",
    properties={"a": "b", "": "no name", "empty": "", "postdate.other": "stays"},
    deliver_at_ms=1,
    deliver_after_ms=2,
    schedule_key="s",
    ttl_ms=3,
    sequence_id=4,
    event_time_ms=-5,
    traceparent="00-abc",
)


def frame_of(message: Message | bytes) -> bytes:
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    return bytes(ProduceEnvelope(messages=[raw]).SerializeToString())


def message_in(frame: bytes) -> Message:
    [raw] = ProduceEnvelope.FromString(frame).messages
    return Message.FromString(raw)


def kept(message: Message) -> Message:
    """Return what a dead letter keeps of a message."""
    rest = Message.FromString(message.SerializeToString())
    for name in ("deliver_at_ms", "deliver_after_ms", "schedule_key", "ttl_ms", "sequence_id"):
        rest.ClearField(name)
    return rest


@pytest.mark.parametrize("message", [WHOLE, Message(), Message(payload=b"x"), Message(properties={"a": "b"})])
def test_a_dead_letter_keeps_the_message_and_says_where_it_comes_from(message):
    letter = frames.dead_letter_frame(frame_of(message), GIVEN)
    expected = kept(message)
    expected.properties.update(GIVEN)
    assert message_in(letter) == expected
    assert message_in(frames.requeued_frame(letter)) == kept(message)


def test_reserved_properties_of_a_producer_are_kept_unless_they_are_ours():
    message = Message(properties={"postdate.mine": "1", frames.TOPIC: "theirs", frames.REASON: "theirs"})
    letter = message_in(frames.dead_letter_frame(frame_of(message), GIVEN))
    assert dict(letter.properties) == {"postdate.mine": "1", **GIVEN}


def test_a_dead_letter_of_a_dead_letter_does_not_grow():
    once = frames.dead_letter_frame(frame_of(WHOLE), GIVEN)
    assert len(frames.dead_letter_frame(once, GIVEN)) == len(once)


def test_fields_that_come_twice_and_entries_in_any_order_mean_what_they_meant():
    entry = b"\x12\x01v\x0a\x01w\x0a" + bytes((len(frames.TOPIC),)) + frames.TOPIC.encode()
    raw = b"\x0a\x01a\x0a\x01b\x1a" + bytes((len(entry),)) + entry + b"\x1a\x00"
    letter = message_in(frames.requeued_frame(frame_of(raw)))
    assert (letter.payload, dict(letter.properties)) == (b"b", {"": ""})


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x0a\x00",  # another tag
        b"\x12",
        b"\x12\x01",  # shorter than it says
        b"\x12\x00\x00",  # longer
        b"\x12\x02\x0a\x05",  # a field beyond the end
        b"\x12\x01\x0b",  # a group
        b"\x12\x0b\x08" + b"\xff" * 10,  # a number that never ends
    ],
)
def test_bytes_that_are_no_frame_are_corrupt(frame):
    with pytest.raises(Corrupt):
        frames.dead_letter_frame(frame, GIVEN)


@pytest.mark.slow
def test_any_bytes_give_a_frame_or_corrupt():
    rng = random.Random(1)
    whole = frame_of(WHOLE)
    for _ in range(3_000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        cut = bytes(damaged[: rng.randint(0, len(damaged))]) if rng.random() < 0.3 else bytes(damaged)
        try:
            letter = frames.dead_letter_frame(cut, GIVEN)
        except Corrupt:
            continue
        assert len(ProduceEnvelope.FromString(letter).messages) == 1


def test_where_dead_letters_go():
    def name(topic: str, subscription: str, given: str | None = None) -> str:
        return frames.dead_letter_topic_name(
            topic, subscription, EffectiveSubscriptionPolicy(dead_letter_topic=given)
        )

    assert name("t", "s") == "t~s~dead-letters"
    assert name("t", "s", "elsewhere") == "elsewhere"
    assert name("t" * 240, "s") == "t" * 240 + "~s~dead-letters"
    assert name("t" * 255, "s", "short") == "short"
    for refused in (("t" * 241, "s"), ("t", "s", "t")):
        with pytest.raises(Refused) as caught:
            name(*refused)
        assert caught.value.reason == "NO_DEAD_LETTER_TOPIC"


@pytest.mark.parametrize(
    ("own", "default_attempts", "is_refused"),
    [
        (SubscriptionPolicy(), 0, False),
        (SubscriptionPolicy(max_delivery_attempts=3), 0, True),
        (SubscriptionPolicy(), 3, True),
        (SubscriptionPolicy(max_delivery_attempts=0), 3, False),
        (SubscriptionPolicy(max_delivery_attempts=3, dead_letter_topic="short"), 0, False),
        (SubscriptionPolicy(dead_letter_topic="t" * 255), 0, True),  # the topic itself
    ],
)
def test_settings_without_a_place_are_refused(own, default_attempts, is_refused):
    attempts = default_attempts if own.max_delivery_attempts is None else own.max_delivery_attempts
    effective = EffectiveSubscriptionPolicy(
        max_delivery_attempts=attempts, dead_letter_topic=own.dead_letter_topic
    )
    if is_refused:
        with pytest.raises(Refused):
            frames.check_dead_letter_topic("t" * 255, "s", effective, ALL_TOPICS)
    else:
        frames.check_dead_letter_topic("t" * 255, "s", effective, ALL_TOPICS)


def test_a_place_on_another_shard_is_refused_with_a_name_that_would_do():
    policy = EffectiveSubscriptionPolicy(dead_letter_topic="topic9")  # on shard 0 of 2
    with pytest.raises(Refused) as caught:
        frames.check_dead_letter_topic("orders~x", "s", policy, TopicShard(1, 2))
    assert caught.value.reason == "DEAD_LETTER_TOPIC_ELSEWHERE"
    beside = replace(policy, dead_letter_topic=str(caught.value.facts["suggested"]))
    assert beside.dead_letter_topic == "orders~topic9"
    frames.check_dead_letter_topic("orders~x", "s", beside, TopicShard(1, 2))
    too_long = replace(policy, dead_letter_topic="topic9~" + "x" * 248)
    with pytest.raises(Refused, match="begin its name with that of the topic") as caught:
        frames.check_dead_letter_topic("orders~x", "s", too_long, TopicShard(1, 2))
    assert caught.value.facts["suggested"] == ""


def test_a_place_named_after_the_topic_lies_on_its_shard():
    policy = EffectiveSubscriptionPolicy(max_delivery_attempts=3)
    for topic in ("orders", "topic9", "topic9~x"):
        number = shard_of(topic, 2)
        frames.check_dead_letter_topic(topic, "s", policy, TopicShard(number, 2))
