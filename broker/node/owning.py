"""The life of a node that owns its shard: from a take-over to the end of the process.

    1  close the standby, and wait until the clock has passed the ceiling of the owners before (CLUSTER-14)
    2  open the folder as after a crash, open the ports, serve
    3  append a heartbeat whenever nothing else was for a quarter of a lease
    4  asked to stop: drain, resign, end with status 0. Asked to hand the shard over: the same with status 1, as a
       supervisor starts only what failed, if it is so told. Fenced, or unable to write: end with status 1

Between the take-over and the first group of the broker the log is kept from falling silent by groups that this
module appends itself.

  CLUSTER-12  An append that was fenced fails the journal for good, everybody who waits is told, and the process ends.
  CLUSTER-14  After its take-over an owner waits until its wall clock has passed what its predecessors may have owned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from broker.cluster.group_head import blank
from broker.cluster.lease import LEASE_PART
from broker.cluster.shard_log import OwnedLog
from broker.config import BrokerConfig
from broker.errors import Fenced, PostdateError
from broker.folder.broker import Broker
from broker.node.following import Won
from broker.node.member import Member
from broker.observe.cluster_view import ClusterView, NodeProgress, OwnerRoute
from broker.observe.logs import get_logger
from broker.observe.metrics import ClusterSnapshot
from broker.runtime.notify import ServiceNotifier
from broker.runtime.supervise import forget_result
from broker.server import OwnedShard, Server
from broker.storage.record_types import RecordType

log = get_logger(__name__)

_CEILING_WAIT_MS = 5_000
_BEATS_PER_LEASE = 4
_BASE_PATIENCE = 2.0


class Owning:
    """An owner, and what is told of it."""

    def __init__(
        self,
        member: Member,
        won: Won,
        notifier: ServiceNotifier,
        read_config: Callable[[], BrokerConfig] | None,
        complete: Callable[[ClusterView], ClusterView],
    ) -> None:
        """`complete` adds to a view what other nodes have told."""
        self._member = member
        self._complete = complete
        self._won = won
        self._log = won.group_log
        self._lease = won.lease
        self._beat_seconds = won.lease.owner_lease_ms / _BEATS_PER_LEASE / 1e3
        self._owned_log = OwnedLog(
            won.group_log, member.shard, ceiling_ms=won.taken.until_ms, group_gap_ms=member.group_gap_ms
        )
        self._server = Server(
            member.config,
            notifier=notifier,
            clock=member.clock,
            read_config=read_config,
            shard=OwnedShard(won.lease, self._open_broker, self.view, self._take_snapshot, self._resign_to),
        )
        self._successor = ""  # who was named in a request to move the shard

    def reload_soon(self) -> None:
        """Read anew what can change while the broker serves."""
        self._server.reload_soon()

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` or a failure; returns the exit status. Raises what the start of a server raises."""
        try:
            await self._change_over()
        except Fenced:
            self._member.rest.begin()
            raise
        server = self._server
        await server.start()
        broker = server.broker
        broker.supervisor.spawn_lasting("heartbeats", self._beat(broker))
        bases = self._member.bases.keep(broker, self._log, patience=_BASE_PATIENCE)
        broker.supervisor.spawn_lasting("bases", bases)
        await self._wait_end(stop)
        if server.failure is None:
            self._owned_log.resigns_to = self._successor or next(iter(self._member.others), "")
        await self._stop_server()
        if server.failure is None and (stop.is_set() or not self._successor):
            return 0
        if server.failure is None:
            log.warning(
                "The shard was handed over; this process ends and must be restarted as a standby",
                to=self._successor,
            )
            return 1
        if isinstance(server.failure.__cause__, Fenced):
            self._member.rest.begin()
            log.error(
                "Another node owns the shard now; this process ends and must be restarted as a standby",
                error=server.failure.__cause__,
                rest_ms=self._member.rest.left_ms(),
            )
        return 1

    def _resign_to(self, node: str) -> None:
        self._successor = node
        self._server.request_stop()

    async def _change_over(self) -> None:
        """Close the standby and wait for the ceiling of former owners; meanwhile the log does not fall silent."""
        log.info("Taking over", epoch=self._won.taken.epoch, lsn=self._won.taken.at_index)
        is_over = asyncio.Event()
        keeping = asyncio.create_task(self._keep_owning(is_over))
        try:
            await self._won.following.close()
            await self._wait_ceiling()
        finally:
            is_over.set()
            await keeping

    async def _keep_owning(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), self._beat_seconds)
            await self._log.append(self._log.next_index, blank())

    async def _wait_ceiling(self) -> None:
        """Wait until this clock has passed the time until which somebody else may have owned the shard."""
        left_ms = self._won.taken.until_ms - self._member.clock.now_ms()
        if left_ms > _CEILING_WAIT_MS:
            log.warning(
                "The clock of the previous owner is ahead of this node's; messages it may have delivered count as "
                "due",
                ahead_ms=left_ms,
            )
        if left_ms >= 0:
            await asyncio.sleep((min(left_ms, _CEILING_WAIT_MS) + 1) / 1e3)

    async def _open_broker(self, broker: Broker) -> None:
        await broker.open_shard(self._owned_log)

    async def _beat(self, broker: Broker) -> None:
        """Append a group without records whenever nothing was appended for a while."""
        lease = self._lease
        full_ms = lease.owner_lease_ms * LEASE_PART
        while True:
            left_seconds = self._beat_seconds - (full_ms - lease.left_ms()) / 1e3
            if left_seconds <= 0 and not broker.journal.pending_bytes:
                with suppress(PostdateError):  # it stops, or has failed and told so
                    forget_result(broker.journal.submit(RecordType.LOG_BLANK, [], lambda lsn: None))
            await asyncio.sleep(max(left_seconds, self._beat_seconds / 4))

    async def _wait_end(self, stop: asyncio.Event) -> None:
        """Return when the server failed, or is to stop."""
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(self._server.wait_stop())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _stop_server(self) -> None:
        """Stop the server; a group that the store takes no more is given up after a lease."""
        stopping = asyncio.create_task(self._server.stop())
        config = self._member.config
        seconds = (config.drain_grace_ms + 2 * self._lease.owner_lease_ms) / 1e3
        await asyncio.wait([stopping], timeout=seconds)
        if not stopping.done():
            await self._log.close()
        await stopping

    # -- what is told --------------------------------------------------------------------------------------------

    def view(self) -> ClusterView:
        """Return what this node knows of the cluster. Without its lease it knows no owner: there may be another one."""
        member, route = self._member, OwnerRoute(self._won.taken.epoch)
        if self._lease.holds():
            route = OwnerRoute(self._won.taken.epoch, member.name, member.nodes[member.name])
        lsn = self._log.next_index - 1
        return self._complete(
            self._won.following.view()._replace(
                route=route,
                standbys=member.others,
                applied_lsn=lsn,
                applied_time_ms=member.clock.now_ms(),
                progress=(NodeProgress(member.name, lsn),),
            )
        )

    def _take_snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(
            is_owner=True,
            epoch=self._won.taken.epoch,
            lease_seconds_left=self._lease.left_ms() / 1e3,
            standby_lag_records=0,
            standby_lag_seconds=0.0,
            base_age_seconds=self._member.bases.age_ms / 1e3,
            take_overs=self._won.following.take_overs + 1,
            log_bytes=self._log.stored_bytes,
            clock_skew_seconds=0.0,
        )
