"""The topic in a request's bytes, for every method that names one, against what the parser says."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import InvalidRequest
from broker.rpc.topic_of import TOPIC_METHODS, topic_of, topic_of_open
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2
from tests.configs import broker_config

CONFIG = broker_config()
PRODUCE = "/postdate.v1.ProducerService/Produce"
NAMES = ["", "t", "orders~billing~dead-letters", "x" * 127, "x" * 128, "x" * 255, "é"]


@pytest.mark.parametrize("path", sorted(TOPIC_METHODS))
@pytest.mark.parametrize("name", NAMES)
def test_the_topic_is_what_the_parser_finds(path: str, name: str) -> None:
    service, _, method = path[1:].partition("/")
    kind = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method].input_type
    request: Any = message_factory.GetMessageClass(kind)()
    field = "topic" if "topic" in request.DESCRIPTOR.fields_by_name else "name"
    setattr(request, field, name)
    assert topic_of(path, request.SerializeToString(), CONFIG) == name


@pytest.mark.parametrize("name", NAMES)
def test_the_topic_of_a_stream_is_that_of_its_first_frame(name: str) -> None:
    opening = consumer_pb2.SubscribeRequest(open=consumer_pb2.Open(topic=name, subscription="s" * 200))
    assert topic_of_open(opening.SerializeToString(), CONFIG) == name
    other = consumer_pb2.SubscribeRequest(permits=consumer_pb2.Permits(messages=1))
    assert topic_of_open(other.SerializeToString(), CONFIG) == ""


def test_fields_in_another_order_are_understood() -> None:
    messages = producer_pb2.ProduceRequest(messages=[message_pb2.Message(payload=b"x")])
    named = producer_pb2.ProduceRequest(topic="late")
    raw = messages.SerializeToString() + named.SerializeToString()
    assert topic_of(PRODUCE, raw, CONFIG) == "late"


@given(st.binary(max_size=40), st.sampled_from(["", "0a", "0a05", "0a8001", "0aff"]))
def test_any_bytes_are_a_topic_or_a_refusal(tail: bytes, head: str) -> None:
    for find in (lambda raw: topic_of(PRODUCE, raw, CONFIG), lambda raw: topic_of_open(raw, CONFIG)):
        with contextlib.suppress(InvalidRequest):
            assert isinstance(find(bytes.fromhex(head) + tail), str)
