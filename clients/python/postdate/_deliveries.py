"""The deliveries of one response as columns, from which messages are made as they are taken.

Deliveries side by side are, on the wire, one delivery whose fields are repeated. So the parser, told so, gives the ids
and payloads of all of them as arrays, where each delivery, its id and its message were objects before. The broker has
stored no message with two payloads, whatever its producer wrote, so as many payloads as messages are one of each.
Whatever else is asked of one is read by the parser of the API, from the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from postdate_api.v1 import consumer_pb2, message_pb2

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "postdate.columns"


def _add_columns(file: Any, kind: Any, merged: Mapping[str, str]) -> None:
    """Add a message with each field repeated, and those once that are messages with repeated fields themselves."""
    columns = file.message_type.add()
    kind.DESCRIPTOR.CopyToProto(columns)
    del columns.nested_type[:]
    for field in columns.field:
        if field.name in merged:
            # A message that comes again is merged with the one before: its repeated fields grow.
            field.label, field.type_name = _Field.LABEL_OPTIONAL, f".{_PACKAGE}.{merged[field.name]}"
            continue
        field.label = _Field.LABEL_REPEATED
        if field.type in (_Field.TYPE_MESSAGE, _Field.TYPE_STRING):
            field.type = _Field.TYPE_BYTES
            field.ClearField("type_name")


def _column_class() -> Any:
    """SubscribeResponse with a batch whose deliveries are one delivery with repeated fields."""
    file = descriptor_pb2.FileDescriptorProto(name="columns.proto", package=_PACKAGE, syntax="proto3")
    _add_columns(file, message_pb2.MessageId, {})
    _add_columns(file, message_pb2.Message, {})
    _add_columns(file, consumer_pb2.Delivery, {"id": "MessageId", "message": "Message"})
    for kind, name, inner in (
        (consumer_pb2.Batch, "deliveries", "Delivery"),
        (consumer_pb2.SubscribeResponse, "batch", "Batch"),
    ):
        outer = file.message_type.add(name=kind.DESCRIPTOR.name)
        number = kind.DESCRIPTOR.fields_by_name[name].number
        outer.field.add(
            name=name,
            number=number,
            label=_Field.LABEL_OPTIONAL,
            type=_Field.TYPE_MESSAGE,
            type_name=f".{_PACKAGE}.{inner}",
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"{_PACKAGE}.{consumer_pb2.SubscribeResponse.DESCRIPTOR.name}")
    )


_Columns = _column_class()
_BATCH_HEAD = bytes((consumer_pb2.SubscribeResponse.DESCRIPTOR.fields_by_name["batch"].number << 3 | 2,))


class Deliveries:
    """See the module's description. Deliveries have places, from 0 on."""

    __slots__ = ("_payloads", "_raw", "_typed", "entry_ids", "ledger_ids")

    def __init__(self, typed: Sequence[consumer_pb2.Delivery] | None, raw: bytes = b"") -> None:
        """`raw`: of a response whose frame is a batch, in place of its deliveries."""
        self._raw = raw
        self._typed = typed
        self._payloads: Sequence[bytes] | None = None
        self.ledger_ids: list[int]
        self.entry_ids: list[int]
        if typed is None:
            columns = _Columns.FromString(raw).batch.deliveries
            self.ledger_ids, self.entry_ids = list(columns.id.ledger_id), list(columns.id.entry_id)
            # A number that is 0 may be left out, as may a payload without bytes; then there are fewer. An attempt is
            # never 0.
            if len(self.ledger_ids) == len(self.entry_ids) == len(columns.delivery_attempt):
                payloads = columns.message.payload
                self._payloads = payloads if len(payloads) == len(self.ledger_ids) else None
                return
        self.ledger_ids = [delivery.id.ledger_id for delivery in self.typed]
        self.entry_ids = [delivery.id.entry_id for delivery in self.typed]

    def __len__(self) -> int:
        return len(self.ledger_ids)

    @property
    def typed(self) -> Sequence[consumer_pb2.Delivery]:
        """All of them, as messages of the API. They are all that is kept then: whoever holds one message holds them."""
        raw, typed = self._raw, self._typed  # in this order: another thread may be in here, too
        if typed is None:
            self._typed = typed = consumer_pb2.SubscribeResponse.FromString(raw).batch.deliveries
            self._payloads, self._raw = None, b""
        return typed

    def payload(self, place: int) -> bytes:
        payloads = self._payloads
        return self.typed[place].message.payload if payloads is None else payloads[place]


def read_response(raw: bytes) -> consumer_pb2.SubscribeResponse | Deliveries:
    """A frame of the broker; the deliveries of one that is a batch."""
    if raw.startswith(_BATCH_HEAD):
        return Deliveries(None, raw)
    response = consumer_pb2.SubscribeResponse.FromString(raw)
    return Deliveries(response.batch.deliveries) if response.HasField("batch") else response
