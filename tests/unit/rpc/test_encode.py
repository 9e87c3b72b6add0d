"""Deliveries on their wire form: what is written is what the typed classes read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, ROW, TIME_MS_MAX
from broker.rpc import encode
from broker.rpc.encode import encode_batch_response, encode_deliveries, put_varints
from broker.storage.varint import encode_varint
from broker.subscriptions.consumer import DeliveryBatch
from postdate_api.v1 import consumer_pb2, message_pb2
from tests.depth import at_depth

Told = tuple[int, int, int, int, int, bytes]
"""ledger_id, entry_id, publish_time_ms, deliver_at_ms, attempt, payload"""

GREATEST: Told = (LEDGER_ID_MAX, ENTRY_ID_MAX, TIME_MS_MAX, TIME_MS_MAX, (1 << 32) - 1, bytes(200))
LEAST: Told = (0, 0, 0, 0, 0, b"")


def frame_of(payload: bytes) -> bytes:
    return consumer_pb2.Delivery(message=message_pb2.Message(payload=payload)).SerializeToString()


def batch_of(told: Sequence[Told]) -> DeliveryBatch:
    frames = [frame_of(each[5]) for each in told]
    rows = np.zeros(len(told), ROW)
    rows["publish_time_ms"] = [each[2] for each in told]
    rows["length"] = [len(frame) for frame in frames]
    return DeliveryBatch(
        ledger_ids=np.array([each[0] for each in told], dtype=np.int64),
        entry_ids=np.array([each[1] for each in told], dtype=np.uint32),
        deliver_at_ms=np.array([each[3] for each in told], dtype=np.int64),
        rows=rows,
        frames=frames,
        attempts=np.array([each[4] for each in told], dtype=np.uint32),
        frames_bytes=sum(map(len, frames)),
    )


def read(deliveries: Any) -> list[Told]:
    return [
        (
            each.id.ledger_id,
            each.id.entry_id,
            each.publish_time_ms,
            each.deliver_at_ms,
            each.delivery_attempt,
            each.message.payload,
        )
        for each in deliveries
    ]


def ordinary(count: int) -> list[Told]:
    return [
        (7, 1_000 + i, 1_790_000_000_000 + i, 1_790_000_000_000 + 2 * i, 1, b"x" * (i % 150))
        for i in range(count)
    ]


def check(told: list[Told]) -> None:
    batch = batch_of(told)
    octets = encode_deliveries(batch)
    assert read(consumer_pb2.Batch.FromString(octets).deliveries) == told
    assert read(consumer_pb2.ReceiveResponse.FromString(octets).deliveries) == told
    response = consumer_pb2.SubscribeResponse.FromString(encode_batch_response(batch))
    assert response.WhichOneof("frame") == "batch"
    assert read(response.batch.deliveries) == told


@pytest.mark.parametrize("count", [0, 1, 16, 17, 2_000])
@pytest.mark.parametrize("extreme", [[], [LEAST], [GREATEST], [GREATEST, LEAST]])
def test_the_typed_classes_read_what_was_delivered(count: int, extreme: list[Told]):
    check([*extreme, *ordinary(count)][: count or None])


@pytest.mark.parametrize("same", [LEAST, GREATEST], ids=["least", "greatest"])
def test_a_batch_of_extremes_is_read(same: Told):
    check([same] * 17)


def test_a_response_names_its_batch_even_if_that_is_empty():
    response = consumer_pb2.SubscribeResponse.FromString(encode_batch_response(batch_of([])))
    assert response.WhichOneof("frame") == "batch"
    assert not response.batch.deliveries


def upto(greatest: int) -> st.SearchStrategy[int]:
    """Numbers of every width, the edges between widths among them."""
    edges = [edge for k in range(0, 64, 7) for edge in ((1 << k) - 1, 1 << k) if edge <= greatest]
    return st.sampled_from([*edges, greatest]) | st.integers(0, greatest)


deliveries = st.tuples(
    upto(LEDGER_ID_MAX),
    upto(ENTRY_ID_MAX),
    upto(TIME_MS_MAX),
    upto(TIME_MS_MAX),
    upto((1 << 32) - 1),
    st.sampled_from([0, 1, 90, 120, 127, 128, 16_000]).map(bytes) | st.binary(max_size=20),
)


@settings(max_examples=at_depth(fast=10, change=60, deep=600))
@given(told=st.lists(deliveries, min_size=1, max_size=6))
def test_both_ways_of_writing_are_read_alike(told: list[Told]):
    batch, few = batch_of(told), encode._FEW_DELIVERIES
    try:
        for encode._FEW_DELIVERIES in (0, 100):
            assert read(consumer_pb2.Batch.FromString(encode_deliveries(batch)).deliveries) == told
    finally:
        encode._FEW_DELIVERIES = few


@given(value=upto((1 << 64) - 1))
def test_a_varint_is_what_protobuf_writes(value: int):
    written = message_pb2.MessageId(ledger_id=value).SerializeToString()
    assert encode_varint(value) == (written[1:] or b"\0")


@pytest.mark.parametrize("bits", range(65))
@pytest.mark.parametrize("count", [1, 2, 9])
def test_varints_of_every_width_are_padded_to_one(bits: int, count: int):
    rng = random.Random(bits)
    values = [(1 << bits) - 1, *(rng.getrandbits(bits) if bits else 0 for _ in range(count - 1))]
    head = np.zeros((count, 14), np.uint8)
    end = put_varints(head, 2, 9, np.array(values, np.uint64))
    assert end == 3 + max(1, (bits + 6) // 7)
    assert (head[:, 2] == 9).all() and not head[:, :2].any() and not head[:, end:].any()
    for value, row in zip(values, head[:, 3:end].tolist(), strict=True):
        assert all(byte & 0x80 for byte in row[:-1]) and not row[-1] & 0x80
        assert sum((byte & 0x7F) << 7 * place for place, byte in enumerate(row)) == value
