"""Whole brokers of one shard, over a store on virtual time: each on a disk and by a clock of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from broker.cluster.creation import encode_first
from broker.cluster.follower import Follower, TakenOver
from broker.cluster.group_head import Shard
from broker.cluster.group_objects import entry_name
from broker.cluster.lease import OwnerLease
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.shard_log import OwnedLog
from broker.config import BrokerConfig
from broker.folder.broker import Broker
from broker.node.shard_bases import ShardBases
from broker.node.standby import Standby
from broker.storage.record_types import RecordType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop
from broker.testing.sim_store import SimBucket, SimStore
from tests.crash.history import crash_config, observe
from tests.harness import Node

SHARD = Shard(bytes(range(16)), 0, 1)
LEASE_MS = 4000


class LeaseSimClock(SimClock):
    """A simulated clock of a machine that never sleeps."""

    def boottime_ns(self) -> int:
        return self.monotonic_ns()


def make_bucket(seed: int = 1) -> SimBucket:
    """A bucket with the first group of the shard's log."""
    bucket = SimBucket(random.Random(seed))
    bucket.objects[entry_name(0, 1)] = encode_first(SHARD)
    return bucket


class ShardBroker:
    """One life of a node: a standby, then perhaps the owner."""

    def __init__(
        self,
        bucket: SimBucket,
        loop: SimLoop,
        name: str,
        vfs: MemVfs,
        config: BrokerConfig | None = None,
        *,
        store: SimStore | None = None,
        clock: LeaseSimClock | None = None,
        executors: Sequence[Executor] = (),
        bases: ShardBases | None = None,
        shard: Shard = SHARD,
        watch: Callable[[Broker, str], None] = lambda broker, name: None,
    ) -> None:
        """`executors`: its threads, if they are not those that all lives share.

        `watch` is given each of its brokers before that is opened.
        """
        self.name = name
        self.shard = shard
        self.vfs = vfs
        self.store = store or SimStore(bucket)
        self.clock = clock or LeaseSimClock(loop)
        self.lease = OwnerLease(self.clock, LEASE_MS)
        self.log = ObjectGroupLog(
            self.store, shard, name, self.lease, make_nonce=lambda: bucket.rng.randbytes(8)
        )
        self.follower: Follower
        self._config = config or crash_config()
        self._executors = executors
        self._bases = bases
        self._watch = watch
        self.node = Node(vfs, self.clock, self._config, executors=executors)
        watch(self.node.broker, name)
        self.taken: TakenOver
        self.owned_log: OwnedLog
        self._beat: asyncio.Task[None] | None = None

    async def follow(self, rank: int = 0) -> asyncio.Task[TakenOver]:
        """Begin to follow; the task ends with a take-over."""
        self.follower = Follower(self.log, self.lease, self.clock, self.name, self._trimmed_below, rank=rank)
        self.standby = Standby(self.node.broker, self.log, self.shard, self.follower)
        await self.standby.open()
        return asyncio.create_task(self._take_over())

    async def _take_over(self) -> TakenOver:
        self.taken = await self.standby.run()
        return self.taken

    async def own(self) -> Node:
        """Close the standby and open its folder to serve."""
        await self.node.stop()
        self.node = Node(self.vfs, self.clock, self._config, ownership=self.lease, executors=self._executors)
        self._watch(self.node.broker, self.name)
        self.owned_log = OwnedLog(self.log, self.shard, ceiling_ms=self.taken.until_ms)
        await self.node.broker.open_shard(self.owned_log)
        self.node.broker.start()
        self._beat = asyncio.create_task(self._heartbeats())
        return self.node

    async def stop(self, resigns_to: str | None = None) -> None:
        """End as SIGTERM does."""
        if self._beat is not None:
            self._beat.cancel()
        self.owned_log.resigns_to = resigns_to
        await self.node.stop()

    def kill(self) -> None:
        """The process ends without a word."""
        if self._beat is not None:
            self._beat.cancel()
        self.node.abandon()
        lock = self.node.broker._lock
        assert lock is not None
        lock.close()

    async def reach(self, lsn: int) -> None:
        """Wait until all up to an lsn is applied."""
        async with asyncio.timeout(600):
            while self.node.broker.journal.durable_lsn < lsn:
                await asyncio.sleep(0.05)

    async def agrees_with(self, owner: Node) -> bool:
        """Wait until it has applied all that the owner has, and return whether they have the same state."""
        while True:
            lsn = owner.broker.journal.durable_lsn
            await self.reach(lsn)
            states = await observe(self.node), await observe(owner)
            if self.node.broker.journal.durable_lsn == owner.broker.journal.durable_lsn == lsn:
                return states[0] == states[1]

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(LEASE_MS / 4000)
            await self.node.broker.journal.submit(RecordType.LOG_BLANK, [], lambda lsn: None)

    async def _trimmed_below(self) -> int:
        return 0 if self._bases is None else await self._bases.trimmed_below()
