"""After a crash at any operation a repeat finds the original or stores it: nothing is lost, and nothing is there twice.

A short history with sequence ids is played on a recording disk: repeats, other boundaries, two producers, batches on
their way together, checkpoints, a roll of the ledger, a second life. At each operation the power goes; the producers
send everything again that they had sent by then, as clients do that were not answered.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from broker.model import Position
from broker.rpc.decode import ProduceEnvelope
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from postdate_api.v1 import message_pb2
from tests.crash.points import same_broker_id
from tests.depth import at_depth, sampled
from tests.harness import Node, Outgoing, positions_of, small_config

__all__ = ["same_broker_id"]
pytestmark = pytest.mark.usefixtures("same_broker_id")

Key = tuple[str, int]  # producer, sequence id

CONFIG = small_config(ledger_max_entries=6, journal_group_bytes_max=1024, producers_per_topic_max=2)
STRIDE = at_depth(change=7, deep=1)
POLICIES = (CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED)


@dataclass(frozen=True)
class Sent:
    """A batch, when it was submitted and what was answered when, as counts of the disk's operations."""

    producer: str
    sequence_ids: tuple[int, ...]
    submitted_at: int
    answers: list[tuple[int, list[Position]]] = field(default_factory=list)


@dataclass
class History:
    vfs: MemVfs
    clock: SimClock
    sent: list[Sent] = field(default_factory=list)

    async def send(self, node: Node, producer: str, *sequence_ids: int) -> None:
        each = Sent(producer, sequence_ids, self.vfs.op_count)
        self.sent.append(each)
        positions = await produce(node, producer, sequence_ids)
        each.answers.append((self.vfs.op_count, positions))


async def produce(node: Node, producer: str, sequence_ids: tuple[int, ...]) -> list[Position]:
    # So long that a group of the journal takes two of them: a checkpoint overtakes those that wait.
    payloads = [f"{producer}/{each}/".encode().ljust(400, b".") for each in sequence_ids]
    messages = [
        Outgoing(payload, sequence_id=each) for payload, each in zip(payloads, sequence_ids, strict=True)
    ]
    accepted = await node.submit("t", messages, producer)
    await accepted.durable
    return positions_of(accepted.ids)


@cache
def history() -> History:
    async def scenario(_: SimLoop, clock: SimClock) -> History:
        played = History(MemVfs(), clock)
        node = Node(played.vfs, clock, CONFIG).open()
        await first_life(played, node)
        node.abandon()  # killed: what it had sent to the disk arrives all the same
        await asyncio.sleep(1)
        node.broker._lock.close()  # type: ignore[union-attr]
        node = Node(played.vfs, clock, CONFIG).open()
        await second_life(played, node)
        await node.stop()
        return played

    return run_sim(scenario, seed=3)


async def first_life(played: History, node: Node) -> None:
    await played.send(node, "a", 1, 2, 3)
    async with asyncio.TaskGroup() as together:
        together.create_task(played.send(node, "a", 4))
        together.create_task(played.send(node, "b", 10, 12))
        together.create_task(played.send(node, "a", 2, 3, 4, 5))
        together.create_task(played.send(node, "a", 4, 5))
    await node.checkpoint()
    async with asyncio.TaskGroup() as together:
        together.create_task(node.checkpoint())
        together.create_task(played.send(node, "a", 6, 7))
        together.create_task(played.send(node, "b", 11))
    await node.submit("t", [Outgoing(b"a/8/", sequence_id=8)], "a")  # the kill comes before the answer
    played.sent.append(Sent("a", (8,), played.vfs.op_count))


async def second_life(played: History, node: Node) -> None:
    await played.send(node, "a", 7, 8, 9)
    await node.checkpoint()
    await played.send(node, "b", 10, 11, 12, 13)
    async with asyncio.TaskGroup() as together:
        for number in range(10, 22):
            together.create_task(played.send(node, "a", number))
        together.create_task(node.checkpoint())
        together.create_task(played.send(node, "a", 9, 10, 20, 21))


@dataclass
class Found:
    """Content of the log after the crash, and after the producers had sent everything again."""

    kept: set[Key]
    stored: list[Key]
    positions: dict[Key, Position]


def send_again(vfs: MemVfs, sent: list[Sent]) -> Found:
    async def scenario(_: SimLoop, clock: SimClock) -> Found:
        node = Node(vfs, clock, CONFIG).open()
        positions = {}
        kept = set((await stored_keys(node)).values())
        for each in sent:
            answered = await produce(node, each.producer, each.sequence_ids)
            assert len(answered) == len(each.sequence_ids)
            for sequence_id, position in zip(each.sequence_ids, answered, strict=True):
                first = positions.setdefault((each.producer, sequence_id), position)
                assert first == position, "one message was given two ids"
        stored = await stored_keys(node)
        assert all(stored[position] == key for key, position in positions.items())
        assert node.failures == []
        return Found(kept, list(stored.values()), positions)

    return run_sim(scenario, seed=1, start_ms=history().clock.now_ms())


async def stored_keys(node: Node) -> dict[Position, Key]:
    """Return the producer's key of every stored message."""
    if "t" not in node.broker.registry.by_name:
        return {}
    stored = {}
    for ledger in node.topic("t").log:
        columns = await ledger.read(np.arange(ledger.entry_count, dtype=np.uint32))
        for entry_id, frame in enumerate(columns.frames):
            message = message_pb2.Message.FromString(ProduceEnvelope.FromString(frame).messages[0])
            producer, number, _ = message.payload.decode().split("/")
            stored[Position(ledger.name.ledger_id, entry_id)] = (producer, int(number))
    return stored


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
def test_a_repeat_after_a_crash_finds_the_original_or_stores_it(policy: CrashPolicy):
    played = history()
    seen: dict[tuple[frozenset[tuple[str, bytes]], int], Found] = {}
    for at in sampled(range(played.vfs.op_count + 1), STRIDE, POLICIES.index(policy)):
        vfs = played.vfs.crashed(at, policy, random.Random(at))
        sent = [each for each in played.sent if each.submitted_at <= at]
        disk = (frozenset(vfs.snapshot().items()), len(sent))
        found = seen.get(disk) or send_again(vfs, sent)
        seen[disk] = found
        where = f"crash at {at} ({policy})"
        expected = {(each.producer, number) for each in sent for number in each.sequence_ids}
        assert sorted(found.stored) == sorted(expected), f"{where}: lost, or stored twice"
        for each in sent:
            for answered_at, positions in each.answers:
                if answered_at <= at:
                    assert {(each.producer, number) for number in each.sequence_ids} <= found.kept, (
                        f"P1: {where}: an answered message is gone"
                    )
                    got = [found.positions[each.producer, number] for number in each.sequence_ids]
                    assert got == positions, f"{where}: an answered message has other ids"
    assert len(seen) > 20


def test_the_history_has_what_matters():
    played = history()
    files = [op.path for op in played.vfs.ops if "producers." in op.path and op.kind == "rename"]
    assert len(files) >= 3, "the file of producers is written by several checkpoints"
    assert any(op.kind == "remove" and "producers." in op.path for op in played.vfs.ops)
    positions = [positions for each in played.sent for _, positions in each.answers]
    assert len({position.ledger_id for each in positions for position in each}) >= 3
