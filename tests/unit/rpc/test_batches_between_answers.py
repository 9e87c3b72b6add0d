"""Messages that are due do not wait until all of a consumer's acknowledgements are confirmed."""

from __future__ import annotations

import asyncio
from typing import Any

from broker.rpc import consumer
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from postdate_api.v1 import consumer_pb2, message_pb2
from tests.harness import EARLIEST, Node, Outgoing
from tests.unit.rpc.call_world import Edge

ACKS = 60


async def written_to_a_busy_consumer(clock: SimClock) -> list[Any]:
    """Return what is written to a consumer that acknowledges one by one, while a message falls due."""
    node = Node(MemVfs(), clock)
    node.open()
    await node.create_subscription("orders", "billing", position=EARLIEST)
    ids = await node.produce("orders", [Outgoing(b"x") for _ in range(ACKS)])
    await node.produce("orders", [Outgoing(b"due", deliver_after_ms=30)])
    requests = [consumer_pb2.SubscribeRequest() for _ in range(ACKS + 1)]
    requests[0].open.topic, requests[0].open.subscription = "orders", "billing"
    requests[0].open.permits.messages = 2 * ACKS
    for number, (request, position) in enumerate(zip(requests[1:], ids, strict=True), 1):
        one = message_pb2.EntrySet(ledger_id=position.ledger_id, entry_ids=[position.entry_id])
        request.ack.CopyFrom(consumer_pb2.Ack(request_id=number, entries=[one]))
    edge = Edge([request.SerializeToString() for request in requests], half_closes=False)
    service = consumer.ConsumerService(node.broker)
    subscribe: Any = service.handlers()["Subscribe"].stream_stream
    stream = asyncio.create_task(subscribe(None, edge))
    await asyncio.sleep(1)
    stream.cancel()
    await asyncio.wait([stream])
    await node.stop()
    return [consumer_pb2.SubscribeResponse.FromString(raw) for raw in edge.written]


def test_a_batch_goes_between_the_confirmations_of_many_acknowledgements() -> None:
    frames: list[Any] = []

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        frames.extend(await written_to_a_busy_consumer(clock))

    run_sim(scenario, seed=1)
    kinds = [frame.WhichOneof("frame") for frame in frames]
    assert kinds.count("confirmed") == ACKS
    due = next(
        number
        for number, frame in enumerate(frames)
        if any(each.message.payload == b"due" for each in frame.batch.deliveries)
    )
    confirmed = kinds[:due].count("confirmed")
    assert 10 < confirmed < ACKS - 10, (
        f"{confirmed} confirmations before it, each of which took a millisecond"
    )
