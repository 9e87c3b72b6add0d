"""After a crash at any operation each request of a produce stream that was answered is there, and none is in part.

Requests come faster than the disk takes them, so that most are stored together.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from broker.rpc.producer import ProducerService
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from postdate_api.v1 import message_pb2, producer_pb2
from tests.crash.points import same_broker_id
from tests.depth import at_depth, sampled
from tests.harness import EARLIEST, Node, small_config
from tests.unit.rpc.call_world import Edge

__all__ = ["same_broker_id"]
pytestmark = pytest.mark.usefixtures("same_broker_id")

CONFIG = small_config(ledger_max_entries=1_000)
REQUESTS, MESSAGES = 60, 3
STRIDE = at_depth(change=4, deep=1)
POLICIES = (CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED)


class Noting(Edge):
    """A client that notes when each request was answered, as a count of the disk's operations."""

    def __init__(self, frames: list[bytes], vfs: MemVfs) -> None:
        super().__init__(frames)
        self.answers: list[tuple[int, Any]] = []
        self._vfs = vfs

    async def write(self, raw: bytes) -> None:
        message = producer_pb2.ProduceResponse.FromString(raw)
        self.answers += [(self._vfs.op_count, answer) for answer in message.answers or (message,)]
        await super().write(raw)


@dataclass
class History:
    vfs: MemVfs
    answers: list[tuple[int, Any]] = field(default_factory=list)
    records: int = 0


def payloads_of(number: int) -> list[bytes]:
    return [b"%d/%d" % (number, index) for index in range(MESSAGES)]


@cache
def history() -> History:
    async def scenario(_: SimLoop, clock: SimClock) -> History:
        vfs = MemVfs()
        node = Node(vfs, clock, CONFIG).open()
        await node.broker.registry.topic_or_create("t")
        frames = [
            producer_pb2.ProduceRequest(
                topic="t",
                request_id=number,
                join_answers=True,
                messages=[message_pb2.Message(payload=payload) for payload in payloads_of(number)],
            ).SerializeToString()
            for number in range(REQUESTS)
        ]
        client, lsn = Noting(frames, vfs), node.broker.journal.durable_lsn
        stream: Any = ProducerService(node.broker).handlers()["ProduceStream"].stream_stream
        await stream(None, client)
        played = History(vfs, client.answers, node.broker.journal.durable_lsn - lsn)
        await node.stop()
        return played

    return run_sim(scenario, seed=3)


def stored_after(vfs: MemVfs) -> Mapping[tuple[int, int], bytes]:
    """Return the payloads that the next life delivers, by their ids."""

    async def scenario(_: SimLoop, clock: SimClock) -> Mapping[tuple[int, int], bytes]:
        node = Node(vfs, clock, CONFIG).open()
        found: dict[tuple[int, int], bytes] = {}
        if "t" in node.broker.registry.by_name:
            await node.create_subscription("t", "all", position=EARLIEST)
            inbox = await node.subscribe("t", "all")
            await asyncio.sleep(2)
            for each in inbox.poll():
                found[each.position.ledger_id, each.position.entry_id] = each.payload
        await node.stop()
        return found

    return run_sim(scenario, seed=4)


def test_requests_of_the_history_were_stored_together() -> None:
    played = history()
    assert [answer.request_id for _, answer in played.answers] == list(range(REQUESTS))
    assert not any(answer.HasField("error") for _, answer in played.answers)
    assert played.records <= REQUESTS // 3


@pytest.mark.parametrize("policy", POLICIES)
def test_an_answered_request_is_there_after_any_crash_and_none_in_part(policy: CrashPolicy) -> None:
    played = history()
    for at in sampled(range(played.vfs.op_count + 1), STRIDE, POLICIES.index(policy)):
        found = stored_after(played.vfs.crashed(at, policy, random.Random(at)))
        payloads = set(found.values())
        assert len(payloads) == len(found), f"crash at {at}: something twice"
        for number in range(REQUESTS):
            count = len(payloads.intersection(payloads_of(number)))
            assert count in (0, MESSAGES), f"crash at {at}: request {number} is there in part"
        for answered_at, answer in played.answers:
            if answered_at <= at:
                (ids,) = answer.ids
                got = [found.get((ids.ledger_id, ids.first_entry_id + index)) for index in range(ids.count)]
                assert got == payloads_of(answer.request_id), f"crash at {at}: {answer.request_id}"
