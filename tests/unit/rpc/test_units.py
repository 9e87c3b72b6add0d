"""A delivery time in another unit than milliseconds is refused, wherever a client gives one, and says so.

The fields are found in the API: one that is new fails here until it is known where it is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from google.protobuf.descriptor import Descriptor

from broker.errors import InvalidRequest
from broker.model import DELIVER_AT_MS_MAX, DELIVER_AT_MS_MIN
from broker.rpc.decode import decode_produce
from broker.rpc.schedule_requests import move_of
from postdate_api.v1 import admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2
from tests.configs import broker_config

NOW_MS = 1_790_000_000_000
MODULES = (admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2)
WRONG = {
    "seconds": NOW_MS // 1_000,
    "microseconds": NOW_MS * 1_000,
    "nanoseconds": NOW_MS * 1_000_000,
    "just too early": DELIVER_AT_MS_MIN - 1,
    "just too late": DELIVER_AT_MS_MAX + 1,
    "least": 1,
    "greatest": (1 << 63) - 1,
}


def produce(ms: int, others: int = 0) -> int | None:
    """The time that is read of the last message."""
    request = producer_pb2.ProduceRequest(topic="t")
    for _ in range(others):
        request.messages.add(payload=b"x", deliver_at_ms=NOW_MS)
    request.messages.add(payload=b"x", deliver_at_ms=ms)
    batch = decode_produce(request.SerializeToString(), broker_config(data_dir="d")).batch
    return int(batch.deliver_at_ms[-1])


def produce_many(ms: int) -> int | None:
    return produce(ms, others=100)


def reschedule(ms: int) -> int | None:
    return move_of(schedule_pb2.RescheduleRequest(deliver_at_ms=ms), NOW_MS).deliver_at_ms


def start_bulk_change(ms: int) -> int | None:
    return move_of(schedule_pb2.StartBulkChangeRequest(deliver_at_ms=ms), NOW_MS, "change").deliver_at_ms


EDGES: dict[str, list[Callable[[int], int | None]]] = {
    "Message.deliver_at_ms": [produce, produce_many],
    "RescheduleRequest.deliver_at_ms": [reschedule],
    "StartBulkChangeRequest.deliver_at_ms": [start_bulk_change],
}


def fields_of(descriptor: Descriptor, seen: set[str]) -> Iterator[str]:
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        if field.name == "deliver_at_ms":
            yield f"{descriptor.name}.{field.name}"
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


def test_every_delivery_time_that_a_request_can_hold_is_checked() -> None:
    seen: set[str] = set()
    found = {
        name
        for module in MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        for name in fields_of(method.input_type, seen)
    }
    assert found == set(EDGES)


@pytest.mark.parametrize("edge", [each for edges in EDGES.values() for each in edges])
@pytest.mark.parametrize("unit", WRONG)
def test_a_time_in_another_unit_is_refused(edge: Callable[[int], int | None], unit: str) -> None:
    with pytest.raises(InvalidRequest, match="counts milliseconds since the Unix epoch") as caught:
        edge(WRONG[unit])
    assert caught.value.reason == "INVALID_DELIVER_AT_MS"
    assert caught.value.field.endswith("deliver_at_ms")


@pytest.mark.parametrize("edge", [each for edges in EDGES.values() for each in edges])
@pytest.mark.parametrize("ms", [DELIVER_AT_MS_MIN, NOW_MS, DELIVER_AT_MS_MAX])
def test_a_time_in_milliseconds_is_taken(edge: Callable[[int], int | None], ms: int) -> None:
    assert edge(ms) == ms


def test_unset_keeps_its_meaning() -> None:
    assert (produce(0), produce_many(0)) == (0, 0)
