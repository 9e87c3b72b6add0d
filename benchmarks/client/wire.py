"""Reads delivered batches in bulk: the frame is parsed with each delivery as bytes, and the columns that a
consumer needs are read from all deliveries at once.

That is what a consumer in a language with a fast parser costs; one that parses message by message in Python
would be measured itself. Deliveries that do not all have the same fields in the same order go to the typed
parser instead: slower, the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from postdate_api.v1 import consumer_pb2, message_pb2

Column = npt.NDArray[np.int64]
_PADDING = 16


@dataclass(slots=True)
class Columns:
    """One batch, aligned."""

    ledger_ids: Column
    entry_ids: Column
    deliver_at_ms: Column
    attempts: Column
    message_starts: Column | None  # of `message` in `octets`; None where the typed parser was asked
    octets: npt.NDArray[np.uint8]
    parts: list[bytes]


def _frame_class() -> Any:
    """SubscribeResponse with its batch as `repeated bytes`, in a pool of its own."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="postdate.bench", syntax="proto3")
    batch = file.message_type.add(name="Batch")
    deliveries = consumer_pb2.Batch.DELIVERIES_FIELD_NUMBER
    batch.field.add(name="deliveries", number=deliveries, type=kinds.TYPE_BYTES, label=kinds.LABEL_REPEATED)
    frame = file.message_type.add(name="Frame")
    frame.field.add(
        name="batch",
        number=consumer_pb2.SubscribeResponse.BATCH_FIELD_NUMBER,
        type=kinds.TYPE_MESSAGE,
        type_name=".postdate.bench.Batch",
        label=kinds.LABEL_OPTIONAL,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("postdate.bench.Frame"))


_Frame = _frame_class()
_BATCH_TAG = consumer_pb2.SubscribeResponse.BATCH_FIELD_NUMBER << 3 | 2
_ID = consumer_pb2.Delivery.ID_FIELD_NUMBER
_MESSAGE = consumer_pb2.Delivery.MESSAGE_FIELD_NUMBER
_DELIVER_AT_MS = consumer_pb2.Delivery.DELIVER_AT_MS_FIELD_NUMBER
_ATTEMPT = consumer_pb2.Delivery.DELIVERY_ATTEMPT_FIELD_NUMBER
_LEDGER_ID = message_pb2.MessageId.LEDGER_ID_FIELD_NUMBER
_ENTRY_ID = message_pb2.MessageId.ENTRY_ID_FIELD_NUMBER


def read_frame(raw: bytes) -> Columns | consumer_pb2.SubscribeResponse:
    """The columns of a batch; any other frame as it is."""
    if raw[0] != _BATCH_TAG:
        return consumer_pb2.SubscribeResponse.FromString(raw)
    return read_deliveries(list(_Frame.FromString(raw).batch.deliveries))


def read_deliveries(parts: list[bytes]) -> Columns:
    lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    octets = np.frombuffer(b"".join(parts) + bytes(_PADDING), dtype=np.uint8)
    ends = lengths.cumsum()
    fields = _walk(octets, ends - lengths, ends)
    if fields is None or not {_ID, _DELIVER_AT_MS, _ATTEMPT} <= fields.keys():
        return _typed(parts, octets)
    ids = _walk(octets, *fields[_ID])
    if ids is None or not {_LEDGER_ID, _ENTRY_ID} <= ids.keys():
        return _typed(parts, octets)
    message = fields.get(_MESSAGE)
    return Columns(
        ids[_LEDGER_ID][0],
        ids[_ENTRY_ID][0],
        fields[_DELIVER_AT_MS][0],
        fields[_ATTEMPT][0],
        message[0] if message else None,
        octets,
        parts,
    )


def _walk(octets: npt.NDArray[np.uint8], at: Column, ends: Column) -> dict[int, tuple[Column, Column]] | None:
    """The fields of all messages `octets[at[i]:ends[i]]`: number -> (values, their ends), or (starts, ends).

    None if they do not all have the same fields in the same order.
    """
    found: dict[int, tuple[Column, Column]] = {}
    while (more := at < ends).any():
        tags = octets[at]
        tag = int(tags[0])
        if not more.all() or (tags != tag).any() or tag & 0x80:
            return None
        values, after = _varints(octets, at + 1)
        if tag & 7 == 2:
            found[tag >> 3] = (after, after + values)
            at = after + values
        elif tag & 7 == 0:
            found[tag >> 3] = (values, after)
            at = after
        else:
            return None
    return found if (at == ends).all() else None


def _varints(octets: npt.NDArray[np.uint8], at: Column) -> tuple[Column, Column]:
    """The varints that begin at `at`, and where each ends."""
    octet = octets[at]
    values = (octet & 0x7F).astype(np.int64)
    more = octet >= 0x80
    at = at + 1
    shift = 7
    while more.any() and shift < 70:
        live = more.astype(np.int64)
        octet = octets[at]
        values |= ((octet & 0x7F).astype(np.int64) * live) << shift
        at += live
        more &= octet >= 0x80
        shift += 7
    return values, at


def _typed(parts: list[bytes], octets: npt.NDArray[np.uint8]) -> Columns:
    deliveries = [consumer_pb2.Delivery.FromString(part) for part in parts]

    def column(values: list[int]) -> Column:
        return np.array(values, dtype=np.int64)

    return Columns(
        column([delivery.id.ledger_id for delivery in deliveries]),
        column([delivery.id.entry_id for delivery in deliveries]),
        column([delivery.deliver_at_ms for delivery in deliveries]),
        column([delivery.delivery_attempt for delivery in deliveries]),
        None,
        octets,
        parts,
    )
