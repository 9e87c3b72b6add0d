"""The life of a node that does not own its shard: from its folder, or a base, to a take-over."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from broker.cluster.follower import Follower, TakenOver
from broker.cluster.lease import OwnerLease
from broker.cluster.object_group_log import ObjectGroupLog
from broker.folder.scrape import take_snapshot
from broker.node.member import Member
from broker.node.standby import Standby
from broker.observe.cluster_view import ClusterView, NodeProgress, OwnerRoute
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCounters, BrokerSnapshot, ClusterSnapshot
from broker.rpc.cluster import FOLLOWED_WITHIN_MS
from broker.server import BrokerThreads

log = get_logger(__name__)

_RANK_PATIENCE = 0.25


class Won(NamedTuple):
    """A shard that was taken over, and what followed it until then."""

    taken: TakenOver
    group_log: ObjectGroupLog
    lease: OwnerLease
    following: Following


class Following:
    """A broker that follows, its threads, and what is told of it."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._lease = OwnerLease(member.clock, member.cluster.owner_lease_ms)
        self._log = member.make_log(self._lease)
        self._follower: Follower | None = None
        self._standby: Standby | None = None
        self._threads = BrokerThreads()
        self._broker = self._threads.make_broker(member.config, member.clock, self._fail)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, stop: asyncio.Event) -> Won | None:
        """Follow until the shard is taken over; None if `stop` came before.

        Raises CutOff, Corrupt, Fenced, OSError, and what fails the broker; it is closed then.
        """
        try:
            taken = await self._follow(stop)
        except BaseException:
            await self.close()
            raise
        if taken is None:
            await self.close()
            return None
        return Won(taken, self._log, self._lease, self)

    async def close(self) -> None:
        """Write a last checkpoint and let go of the folder."""
        if self._standby is not None:
            await self._broker.stop()
        self._threads.close()

    async def _follow(self, stop: asyncio.Event) -> TakenOver | None:
        member = self._member
        self._follower = Follower(
            self._log,
            self._lease,
            member.clock,
            member.name,
            member.bases.trimmed_below,
            rank=member.rank,
            rest_ms=member.rest.left_ms(),
        )
        standby = Standby(self._broker, self._log, member.shard, self._follower)
        await standby.open()
        self._standby = standby
        patience = 1 + _RANK_PATIENCE * member.rank
        self._broker.supervisor.spawn_lasting(
            "bases", member.bases.keep(self._broker, self._log, patience=patience)
        )
        log.info("Following", node=member.name, shard=member.shard.number, lsn=self._log.next_index - 1)
        loop = asyncio.get_running_loop()
        running, stopping = loop.create_task(standby.run()), loop.create_task(stop.wait())
        ends: list[asyncio.Future[Any]] = [running, stopping, self._failed]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return running.result() if running.done() else None
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.wait([running, stopping])

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # it is looked at by who follows, if anybody does

    # -- what is told --------------------------------------------------------------------------------------------

    @property
    def not_ready_because(self) -> str | None:
        """Return the reason why this node could not take over soon; None if it could."""
        if self._standby is None:
            return "recovering"
        if self._standby.lag_ms > FOLLOWED_WITHIN_MS:
            return f"standby, {self._standby.lag_ms} ms behind"
        return self._broker.not_ready_because

    @property
    def ready_line(self) -> str:
        lag_ms = self._standby.lag_ms if self._standby is not None else 0
        return f"standby, {self._log.unread} records and {lag_ms} ms behind"

    def take_snapshot(self) -> BrokerSnapshot:
        """Return what a scrape shows."""
        cluster = self.cluster_snapshot()
        if self._standby is None:
            return BrokerSnapshot(BrokerCounters(), (), (), 0, 0, ready=False, cluster=cluster)
        return take_snapshot(self._broker, cluster)

    def cluster_snapshot(self) -> ClusterSnapshot:
        """Return this node's figures of its cluster."""
        standby = self._standby
        return ClusterSnapshot(
            is_owner=False,
            epoch=self._log.epoch,
            lease_seconds_left=0.0,
            standby_lag_records=self._log.unread,
            standby_lag_seconds=standby.lag_ms / 1e3 if standby is not None else 0.0,
            base_age_seconds=self._member.bases.age_ms / 1e3,
            take_overs=self.take_overs,
            log_bytes=self._log.stored_bytes,
            clock_skew_seconds=standby.skew_ms / 1e3 if standby is not None else 0.0,
        )

    def view(self) -> ClusterView:
        """Return what this node knows of the cluster."""
        member, standby = self._member, self._standby
        owner = standby.owner if standby is not None and not self._is_silent else ""
        lsn, base = self._log.next_index - 1, member.bases.newest
        lag_ms = standby.lag_ms if standby is not None else 0
        return ClusterView(
            cluster_id=member.cluster.id,
            node=member.name,
            nodes=tuple(member.nodes.items()),
            shard=member.shard.number,
            route=OwnerRoute(self._log.epoch, owner, member.nodes.get(owner, "")),
            standbys=tuple(node for node in member.ranks if node != owner),
            applied_lsn=lsn,
            applied_time_ms=standby.applied_wall_ms if standby is not None else 0,
            base_lsn=base.lsn if base is not None else 0,
            base_time_ms=base.create_time_ms if base is not None else 0,
            progress=(NodeProgress(member.name, lsn, self._log.unread, lag_ms),),
        )

    @property
    def take_overs(self) -> int:
        """Changes of owners seen."""
        return self._standby.take_overs if self._standby is not None else 0

    @property
    def _is_silent(self) -> bool:
        """Return whether the owner has been silent for so long that it may be nobody."""
        return self._follower is None or self._follower.silent_ms > self._lease.owner_lease_ms
