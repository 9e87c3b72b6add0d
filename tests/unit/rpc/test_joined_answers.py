"""Answers of a produce stream that come in one message: only where it was asked for, in order, and without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from broker.rpc import producer
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from postdate_api.v1 import message_pb2, producer_pb2
from tests.harness import Node
from tests.unit.rpc.call_world import Edge

JOINED_BYTES_MAX = 1_100
"""Of a message with joined answers, each of which is short here."""


class TimedEdge(Edge):
    """A client that notes how far the journal was as an answer was written."""

    def __init__(self, node: Node, frames: Sequence[bytes]) -> None:
        super().__init__(frames)
        self.durable: list[int] = []
        self._node = node

    async def write(self, raw: bytes) -> None:
        self.durable.append(self._node.broker.journal.durable_lsn)
        await super().write(raw)


def request(number: int, *, joins: bool = True, payload: bytes = b"x", **fields: Any) -> Any:
    return producer_pb2.ProduceRequest(
        topic="orders",
        messages=[message_pb2.Message(payload=payload, **fields)],
        request_id=number,
        join_answers=joins,
    )


def answered(requests: Sequence[Any], *, fails: bool = False) -> tuple[list[list[Any]], list[int]]:
    """Return the answers in each message of a stream, and the durable lsn at each write less that at the first one."""
    edges: list[TimedEdge] = []

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock)
        node.open()
        await node.broker.registry.topic_or_create("orders")
        edge = TimedEdge(node, [each.SerializeToString() for each in requests])
        edges.append(edge)
        if fails:
            node.vfs.faults.add(Fault("sync", "*.seg"))
        service = producer.ProducerService(node.broker)
        stream: Any = service.handlers()["ProduceStream"].stream_stream
        await stream(None, edge)
        if not fails:
            await node.stop()

    run_sim(scenario, seed=1)
    messages = [producer_pb2.ProduceResponse.FromString(raw) for raw in edges[0].written]
    for message in messages:
        others = {field.name for field, _ in message.ListFields()} - {"answers"}
        assert not (message.answers and others)
        assert len(message.answers) != 1
        assert not message.answers or message.ByteSize() <= JOINED_BYTES_MAX
    return [list(message.answers or (message,)) for message in messages], edges[0].durable


def numbers(messages: list[list[Any]]) -> list[list[int]]:
    return [[answer.request_id for answer in answers] for answers in messages]


def test_answers_that_are_ready_together_come_in_one_message() -> None:
    messages, durable = answered([request(number) for number in range(1, 11)])
    assert numbers(messages) == [[1], list(range(2, 11))]
    entry_ids = [answer.ids[0].first_entry_id for answers in messages for answer in answers]
    assert entry_ids == [*range(8), 0, 1]  # a ledger has eight
    assert durable[0] < durable[1], "the first answer waited for the next group"


def test_who_does_not_ask_for_it_gets_an_answer_a_message() -> None:
    messages, _ = answered([request(number, joins=False) for number in range(1, 11)])
    assert numbers(messages) == [[number] for number in range(1, 11)]


def test_requests_that_do_not_ask_for_it_lie_between_others_in_order() -> None:
    joins = [True, True, True, False, True, True, False, False, True]
    messages, _ = answered([request(number, joins=each) for number, each in enumerate(joins, 1)])
    assert numbers(messages) == [[1], [2, 3], [4], [5, 6], [7], [8], [9]]


def test_a_refusal_has_its_place_among_joined_answers() -> None:
    requests = [request(1), request(2), request(3, deliver_at_ms=-1), request(4)]
    messages, _ = answered(requests)
    assert numbers(messages) == [[1], [2, 3, 4]]
    assert [answer.HasField("error") for answer in messages[1]] == [False, True, False]


def test_a_message_of_joined_answers_is_bounded() -> None:
    messages, _ = answered([request(number) for number in range(1, 201)])
    assert [number for each in numbers(messages) for number in each] == list(range(1, 201))
    assert max(map(len, messages)) > 30  # or the test shows nothing


@pytest.mark.parametrize("count", [1, 4])
def test_a_disk_that_fails_is_told_in_each_answer(count: int) -> None:
    messages, _ = answered([request(number) for number in range(1, count + 1)], fails=True)
    answers = [answer for each in messages for answer in each]
    assert [answer.request_id for answer in answers] == list(range(1, count + 1))
    assert all(answer.HasField("error") and not answer.ids for answer in answers)
