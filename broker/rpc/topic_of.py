"""The topic that a request names, found in its bytes: whoever passes requests on does not parse them.

Serializers write fields by number, and the topic is the first one of every request that names one. Any other form is
parsed, with the bounds that the owner has for it. A request that names its topic twice may be understood in two ways:
the shard that it reaches then refuses a topic that it does not hold.
"""

from __future__ import annotations

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor

from broker.config import BrokerConfig
from broker.rpc.calls import parse
from postdate_api.v1 import admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2

_FIRST_FIELD = 0x0A
"""Tag of field 1 with a length and bytes."""
_NAMED = ("topic", "name")
_REQUESTS = {
    f"/{service.full_name}/{method.name}": method.input_type
    for file in (producer_pb2, consumer_pb2, schedule_pb2, admin_pb2, compaction_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def _topic_field(path: str, request: Descriptor) -> str:
    """Return the field with the topic; empty where there is none."""
    first = request.fields_by_number.get(1)
    is_text = first is not None and first.name in _NAMED and first.type == first.TYPE_STRING
    # The name of a backup is that of no topic.
    return first.name if first is not None and is_text and not path.endswith("Backup") else ""


_FIELDS = {path: field for path, request in _REQUESTS.items() if (field := _topic_field(path, request))}
TOPIC_METHODS = frozenset(_FIELDS)
"""Methods whose requests name one topic each, by their path."""
SUBSCRIBE = f"/{consumer_pb2.DESCRIPTOR.services_by_name['ConsumerService'].full_name}/Subscribe"


def topic_of(path: str, request: bytes, config: BrokerConfig) -> str:
    """Return the topic of a request of one of `TOPIC_METHODS`; empty if it names none. Raises InvalidRequest."""
    topic = _first_text(request, 0)
    if topic is not None:
        return topic
    kind = message_factory.GetMessageClass(_REQUESTS[path])
    return str(getattr(parse(kind, request, config), _FIELDS[path]))


def topic_of_open(request: bytes, config: BrokerConfig) -> str:
    """Return the topic of the first frame of a Subscribe stream; empty if it is no `open`. Raises InvalidRequest."""
    if request[:1] == bytes((_FIRST_FIELD,)):
        begin = 2 if request[1:2] < b"\x80" else 3 if request[2:3] < b"\x80" else 0
        topic = _first_text(request, begin) if begin else None
        if topic is not None:
            return topic
    return str(parse(consumer_pb2.SubscribeRequest, request, config).open.topic)


def _first_text(request: bytes, at: int) -> str | None:
    """Return the text of field 1, if it comes first and its length takes one or two bytes, as that of a name does."""
    head = request[at : at + 3]
    if len(head) < 3 or head[0] != _FIRST_FIELD:
        return None
    length, begin = head[1], at + 2
    if length >= 0x80:
        if head[2] >= 0x80:
            return None
        length, begin = length & 0x7F | head[2] << 7, at + 3
    text = request[begin : begin + length]
    return text.decode("ascii") if len(text) == length and text.isascii() else None
