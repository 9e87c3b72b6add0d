"""Nodes of different versions: what a newer one decides and an older one does not know stops that one, loudly.

The older version is a node whose table of records lacks one. In a simulation all nodes share one process, so the table
is looked at through the context of who decodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from unittest.mock import patch

import pytest

from broker.cluster import group_head
from broker.cluster.follower import TakenOver
from broker.cluster.group_head import GroupKind, Head, blank, encode_entry
from broker.cluster.group_objects import entry_name
from broker.errors import Corrupt, Fenced, StorageFailed
from broker.folder import recovery
from broker.storage import records
from broker.storage.record_types import RecordType
from broker.storage.records import Record
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import control
from tests.harness import Node, Outgoing
from tests.sim.shard_brokers import LEASE_MS, SHARD, ShardBroker, make_bucket

NEWEST = RecordType.SUBSCRIPTION_CHANGED
_IS_OLDER: ContextVar[bool] = ContextVar("is_older", default=False)


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = records.decode_record

    def decode_by_version(record_type: int, body: memoryview) -> Record:
        older = {number: decoder for number, decoder in records._DECODERS.items() if number != NEWEST}
        if not _IS_OLDER.get():
            return decode(record_type, body)
        with patch.object(records, "_DECODERS", older):
            return decode(record_type, body)

    monkeypatch.setattr(recovery, "decode_record", decode_by_version)


@contextmanager
def older_version() -> Iterator[None]:
    """Have all that is begun here be of the older version."""
    token = _IS_OLDER.set(True)
    try:
        yield
    finally:
        _IS_OLDER.reset(token)


async def stops(standby: ShardBroker, taking: asyncio.Task[TakenOver], why: str) -> None:
    """Wait until a standby has stopped, and see what it says; its folder is closed as a node does."""
    async with asyncio.timeout(60):
        await asyncio.wait([taking])
    with pytest.raises(Corrupt, match=why):
        taking.result()
    await standby.node.stop()


async def decide_something_new(node: Node) -> None:
    """Have an owner append a record that the older version does not know, among others."""
    topic = node.topic("orders")
    await asyncio.gather(
        node.produce("orders", [Outgoing(b"before")]),
        control.pause(topic, topic.subscriptions.named("all"), paused=True),
        node.produce("orders", [Outgoing(b"behind", deliver_after_ms=500)]),
    )


def test_a_record_that_an_older_standby_does_not_know_stops_it_and_not_the_owner() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket, disk = make_bucket(), MemVfs()
        owner = ShardBroker(bucket, loop, "a", MemVfs())
        await (await owner.follow())
        node = await owner.own()
        await node.create_subscription("orders", "all")
        with older_version():
            standby = ShardBroker(bucket, loop, "b", disk)
            taking = await standby.follow(rank=1)
        assert await standby.agrees_with(node)
        await decide_something_new(node)
        await stops(
            standby, taking, f"unknown type {NEWEST.value}: a newer version wrote it.* Start that version"
        )
        with older_version():  # as its supervisor has it
            standby = ShardBroker(bucket, loop, "b", disk)
            taking = await standby.follow(rank=1)
        await stops(standby, taking, "a newer version wrote it")
        await asyncio.sleep(3 * LEASE_MS / 1e3)
        await node.produce("orders", [Outgoing(b"on")])
        assert node.failures == [] and owner.log.epoch == 1, "the owner goes on"
        upgraded = ShardBroker(bucket, loop, "b", disk)
        await upgraded.follow(rank=1)
        assert await upgraded.agrees_with(node)
        upgraded.kill()
        await owner.stop()

    run_sim(scenario, seed=1)


def test_the_shard_goes_from_the_older_version_to_the_newer_one_and_back() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket, disk = make_bucket(), MemVfs()
        with older_version():
            first = ShardBroker(bucket, loop, "a", disk)
            await (await first.follow())
            node = await first.own()
        await node.create_subscription("orders", "all")
        await node.produce("orders", [Outgoing(b"old")])
        second = ShardBroker(bucket, loop, "b", MemVfs())
        taking = await second.follow(rank=1)
        assert await second.agrees_with(node)
        await first.stop(resigns_to="b")
        await taking
        node = await second.own()
        with older_version():  # as long as nothing new was decided, it may follow and take over again
            first = ShardBroker(bucket, loop, "a", disk)
            taking = await first.follow()
            assert await first.agrees_with(node)
            await second.stop(resigns_to="a")
            await taking
            node = await first.own()
        second = ShardBroker(bucket, loop, "b", second.vfs)
        taking = await second.follow(rank=1)
        assert await second.agrees_with(node)
        inbox = await node.subscribe("orders", "all")
        assert [message.payload for message in await inbox.wait(1)] == [b"old"]
        second.kill()
        await first.stop()

    run_sim(scenario, seed=1)


def newer_group(index: int, epoch: int) -> bytes:
    """A take-over by a version whose heads are of another form."""
    with patch.object(group_head, "VERSION", group_head.VERSION + 1):
        return encode_entry(Head(GroupKind.TAKE_OVER, SHARD, epoch, index, 5, 6, bytes(8), "c"), blank())


def test_a_group_of_a_newer_form_stops_a_standby_and_fences_an_owner() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, standby = ShardBroker(bucket, loop, "a", MemVfs()), ShardBroker(bucket, loop, "b", MemVfs())
        await (await owner.follow())
        node = await owner.own()
        await node.produce("orders", [Outgoing(b"1")])
        taking = await standby.follow(rank=1)
        assert await standby.agrees_with(node)
        index = owner.log.next_index
        bucket.objects[entry_name(SHARD.number, index)] = newer_group(index, 2)
        with pytest.raises(StorageFailed):
            await node.produce("orders", [Outgoing(b"2")])
        failure = node.failures[0].__cause__
        assert isinstance(failure, Fenced) and "has version 2; this broker reads up to version 1" in str(
            failure
        )
        assert not owner.lease.holds()
        await stops(standby, taking, "has version 2; this broker reads up to version 1.* Start the version")
        owner.kill()

    run_sim(scenario, seed=1)
