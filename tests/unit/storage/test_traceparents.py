"""Traceparents found in stored messages."""

from __future__ import annotations

from broker.storage.message_fields import FRAME_HEAD
from broker.storage.traceparents import find_traceparents
from broker.storage.varint import encode_varint
from postdate_api.v1 import message_pb2

SAMPLED = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
NOT_SAMPLED = SAMPLED[:-1] + "0"


def frame(traceparent: str = "", payload: bytes = b"x") -> bytes:
    message = message_pb2.Message(payload=payload, traceparent=traceparent).SerializeToString()
    return FRAME_HEAD + encode_varint(len(message)) + message


INNER = frame(SAMPLED)


def found(frames: list[bytes], *, sampled: bool, looks_max: int = 10) -> list[tuple[int, str]]:
    return list(find_traceparents(frames, sampled=sampled, looks_max=looks_max))


def test_each_is_found_with_its_place():
    frames = [frame(), frame(NOT_SAMPLED), frame(SAMPLED)]
    assert found(frames, sampled=False) == [(1, NOT_SAMPLED), (2, SAMPLED)]
    assert found(frames, sampled=True) == [(2, SAMPLED)]


def test_what_lies_in_a_payload_is_none():
    assert found([frame(payload=INNER), frame(NOT_SAMPLED, INNER)], sampled=True) == []
    assert found([frame(NOT_SAMPLED, INNER)], sampled=False) == [(0, NOT_SAMPLED)]


def test_another_form_is_none():
    wrong = ["nonsense", SAMPLED.upper(), SAMPLED + "-x", "01" + SAMPLED[2:], SAMPLED[:-1] + "g"]
    assert found([frame(each) for each in wrong], sampled=False) == []


def test_few_frames_are_walked():
    frames = [frame(payload=INNER)] * 3 + [frame(SAMPLED)]
    assert found(frames, sampled=True, looks_max=4) == [(3, SAMPLED)]
    assert found(frames, sampled=True, looks_max=3) == []
