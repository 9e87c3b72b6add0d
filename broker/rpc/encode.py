"""Writes deliveries on their wire form: a header of fixed width for each message, then its stored frame.

    0x0a length | 0x0a length 0x08 ledger_id 0x10 entry_id | 0x18 publish | 0x20 deliver_at | 0x28 attempt | frame

That is `repeated Delivery deliveries = 1` of Batch and ReceiveResponse. The frame is `Delivery.message` as it was
stored. Varints are padded to the width that the largest of a batch needs, which protobuf allows, so that the
headers of a batch are the rows of one matrix. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from broker.model import Array
from broker.storage.message_fields import tag_of, tags_of
from broker.storage.varint import encode_varint
from broker.subscriptions.consumer import DeliveryBatch
from postdate_api.v1 import consumer_pb2, message_pb2

_FEW_DELIVERIES = 16
"""Up to so many messages, writing headers one by one costs less than the NumPy calls that many share."""
_SPREAD = tuple(
    (np.uint64(shift), np.uint64(low))
    for shift, low in ((4, (1 << 28) - 1), (2, 0x3FFF_0000_3FFF), (1, 0x7F_007F_007F_007F))
)
_LOW_56 = np.uint64((1 << 56) - 1)
_ID, _, _PUBLISH_TIME_MS, _DELIVER_AT_MS, _DELIVERY_ATTEMPT = tags_of(
    consumer_pb2.Delivery, "id", "message", "publish_time_ms", "deliver_at_ms", "delivery_attempt"
).values()
_LEDGER_ID, _ENTRY_ID = tags_of(message_pb2.MessageId, "ledger_id", "entry_id").values()
_DELIVERY = tag_of("deliveries", consumer_pb2.Batch, consumer_pb2.ReceiveResponse)
_DELIVERY_HEAD = bytes((_DELIVERY,))
_BATCH_HEAD = bytes((tag_of("batch", consumer_pb2.SubscribeResponse),))


def encode_deliveries(batch: DeliveryBatch) -> bytes:
    """The messages of a batch as `repeated Delivery deliveries = 1`."""
    if len(batch) <= _FEW_DELIVERIES:
        return _encode_few(batch)
    rows = batch.rows
    facts = [
        (_PUBLISH_TIME_MS, rows["publish_time_ms"]),
        (_DELIVER_AT_MS, batch.deliver_at_ms),
        (_DELIVERY_ATTEMPT, batch.attempts),
    ]
    following = rows["length"].astype(np.int64)
    head = message_heads(_DELIVERY, (_ID, batch.ledger_ids, batch.entry_ids), facts, following)
    parts: list[bytes] = [b""] * (2 * len(batch))
    parts[0::2] = np.frombuffer(head.tobytes(), dtype=f"V{head.shape[1]}").tolist()
    parts[1::2] = batch.frames
    return b"".join(parts)


def _encode_few(batch: DeliveryBatch) -> bytes:
    parts: list[bytes] = []
    facts = zip(
        batch.ledger_ids.tolist(),
        batch.entry_ids.tolist(),
        batch.rows["publish_time_ms"].tolist(),
        batch.deliver_at_ms.tolist(),
        batch.attempts.tolist(),
        batch.frames,
        strict=True,
    )
    for ledger_id, entry_id, publish_time_ms, deliver_at_ms, attempt, frame in facts:
        head = consumer_pb2.Delivery(
            id=message_pb2.MessageId(ledger_id=ledger_id, entry_id=entry_id),
            publish_time_ms=publish_time_ms,
            deliver_at_ms=deliver_at_ms,
            delivery_attempt=attempt,
        ).SerializeToString()
        parts += (_DELIVERY_HEAD, encode_varint(len(head) + len(frame)), head, frame)
    return b"".join(parts)


def encode_batch_response(batch: DeliveryBatch) -> bytes:
    """A SubscribeResponse whose frame is `batch`."""
    deliveries = encode_deliveries(batch)
    return b"".join((_BATCH_HEAD, encode_varint(len(deliveries)), deliveries))


def _varint_width(values: Array) -> int:
    """Bytes of the largest value as a varint."""
    return _width_of(int(values.max()))


def _width_of(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)


def message_heads(
    tag: int, id_: tuple[int, Array, Array], facts: Sequence[tuple[int, Array]], following: Array
) -> npt.NDArray[np.uint8]:
    """Beginnings of messages side by side, a row each: tag, length, id (its tag, ledgers, entries) and other numbers.

    So many bytes as `following` says belong to each message beyond its row.
    """
    id_tag, ledger_ids, entry_ids = id_
    ids = ((_LEDGER_ID, ledger_ids), (_ENTRY_ID, entry_ids))
    id_width = sum(1 + _varint_width(column) for _, column in ids)
    rest_width = 2 + id_width + sum(1 + _varint_width(column) for _, column in facts)
    lengths = following + rest_width
    rows = np.empty((len(lengths), 1 + _varint_width(lengths) + rest_width), dtype=np.uint8)
    at = put_varints(rows, 0, tag, lengths)
    rows[:, at] = id_tag
    rows[:, at + 1] = id_width
    at += 2
    for each, column in (*ids, *facts):
        at = put_varints(rows, at, each, column)
    return rows


def put_varints(head: npt.NDArray[np.uint8], at: int, tag: int, values: Array) -> int:
    """Write a tag and a varint of one width into every row, from column `at`; returns the column after it."""
    first, greatest = int(values[0]), int(values.max())
    width = _width_of(greatest)
    end = at + 1 + width
    if first == greatest == int(values.min()):
        groups = [0x80 | first >> shift & 0x7F for shift in range(0, 7 * width, 7)]
        head[:, at:end] = [tag, *groups[:-1], groups[-1] & 0x7F]
        return end
    head[:, at] = tag
    rest = values.astype("<u8")
    for column in range(at + 9, end):  # of what no time or id needs
        head[:, column] = (rest >> np.uint64(7 * (column - at - 1))).astype(np.uint8) & 0x7F
        head[:, column] |= 0x80 if column + 1 < end else 0
    # The other groups of seven bits are moved apart, halves, quarters and eighths: each to a byte of its own.
    rest &= _LOW_56
    for shift, low in _SPREAD:
        rest = (rest & low) | ((rest & ~low) << shift)
    rest |= np.uint64(int.from_bytes(b"\x80" * min(width - 1, 8), "little"))
    head[:, at + 1 : min(end, at + 9)] = rest.view(np.uint8).reshape(-1, 8)[:, :width]
    return end
