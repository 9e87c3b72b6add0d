"""Spans of real processes: each shard sends its own, and what is left goes out at the end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from postdate_api.v1 import message_pb2, producer_pb2
from tests.process.conftest import Start
from tests.span_receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


async def test_each_shard_sends_its_own(start: Start, tmp_path: Path, receiver: Receiver):
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
    broker = await start("--shards=2", environ=environ, data_dir=str(tmp_path / "d"))
    await broker.serving()
    names = [f"topic-{number}" for number in range(16)]
    caller = f"00-{'ab' * 16}-{'cd' * 8}-01"
    for name in names:
        request = producer_pb2.ProduceRequest(topic=name, messages=[message_pb2.Message(payload=b"x")])
        await broker.producer.Produce(request, metadata=(("traceparent", caller),))
    assert not receiver.spans()
    broker.process.send_signal(signal.SIGTERM)
    assert await broker.wait() == 0
    spans = receiver.spans("Produce")
    assert len(spans) == len(names)
    assert {span.parent_span_id.hex() for span in spans} == {"cd" * 8}  # through the front
    resources = receiver.resources()
    assert sorted(each["postdate.shard"] for each in resources) == [0, 1]
    assert len({each["service.instance.id"] for each in resources}) == 2
