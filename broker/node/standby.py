"""A standby: a broker that applies what the owner of its shard decides, until it may take over.

    follow       read a group, apply it; ledgers, checkpoints and the index go on as an owner's do
    silence      after half a lease without a group a checkpoint, so that little is left to replay
    clock        while it is far from the owner's, others take over first
    take over    the follower appends a take-over; the caller closes this broker and opens the folder again

Nothing here decides: no consumer is served, no lease ends, no ledger is dropped, nothing expires.

  CLUSTER-15  The state after an lsn is the same on every node, whatever its version, settings, clock and files. A
              record that presupposes a file of one machine is not a record.
"""

from __future__ import annotations

import asyncio
from collections import deque

from broker.cluster.follower import Follower, TakenOver
from broker.cluster.group_head import GroupKind, LogEntry, Shard
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.shard_log import FollowedLog
from broker.folder.broker import Broker
from broker.observe.logs import get_logger

log = get_logger(__name__)

CAUGHT_UP_MS = 1_000
"""A group that is applied this long after its owner began to store it leaves the standby behind."""

_SKEW_GROUPS = 100
_SKEW_GROUPS_MIN = 10
"""Groups that tell of a clock: a few may only have been slow to come."""

SKEW_TOLD_MS = 250
SKEW_MAX_MS = 2_000
"""Skew above which this standby takes over last: by its clock messages would be late, or early by all others."""
_CLEARED_SHARE = 0.8
"""Share of a bound down to which it counts as passed once it was, so that a skew near it changes little."""


class Standby:
    """A broker of a shard that another node owns."""

    def __init__(self, broker: Broker, group_log: ObjectGroupLog, shard: Shard, follower: Follower) -> None:
        self._broker = broker
        self._log = group_log
        self._shard = shard
        self._follower = follower
        self.applied_wall_ms = 0  # of the owner's clock, when it began to store the group applied last
        self.take_overs = 0
        self._is_behind = True  # the end of the log has not been seen yet
        self._has_waited = False  # for the next group, which is new then
        self._ages_ms: deque[int] = deque(maxlen=_SKEW_GROUPS)  # of groups that were waited for, as they came
        self._told_skew_ms = 0  # the bound that was passed when the log was last told of it
        self.owner = ""
        """The node that stored the last group; empty: it has resigned, or there is none yet."""

    @property
    def lag_ms(self) -> int:
        """Return how long ago the owner stored what this standby has applied; 0 while it has applied all there is."""
        if not self._is_behind:
            return 0
        return max(self._broker.clock.now_ms() - self.applied_wall_ms, 0) if self.applied_wall_ms else 0

    @property
    def skew_ms(self) -> int:
        """Return by how much this clock is ahead of the owner's, at most; negative: behind."""
        return min(self._ages_ms, default=0)

    async def open(self) -> None:
        """Recover the folder, and begin to write and to index what will be applied."""
        await self._broker.open_shard(FollowedLog(self._log, self._shard))
        self._broker.start_following()
        self._broker.supervisor.spawn_lasting("checkpoints of silences", self._checkpoint_silences())

    async def run(self) -> TakenOver:
        """Apply what comes until this node owns the shard. Raises CutOff, Corrupt."""
        return await self._follower.run(self._apply, self._note_end)

    async def _apply(self, entry: LogEntry) -> None:
        self._note_age(entry)
        await self._broker.follow(entry.group, entry.bytes)
        self.owner = "" if entry.head.kind is GroupKind.RESIGN else entry.head.node
        self.take_overs += entry.head.kind is GroupKind.TAKE_OVER and entry.head.epoch > 0
        self.applied_wall_ms = entry.head.wall_ms
        self._is_behind = self._broker.clock.now_ms() - entry.head.wall_ms > CAUGHT_UP_MS

    def _note_age(self, entry: LogEntry) -> None:
        if entry.head.kind is GroupKind.TAKE_OVER:
            self._ages_ms.clear()  # they were of another clock, and so was what followed from them
            self._told_skew_ms, self._follower.competes_last = 0, False
        if self._has_waited:
            self._ages_ms.append(self._broker.clock.now_ms() - entry.head.wall_ms)
            self._judge_clock()
        self._has_waited = False

    def _judge_clock(self) -> None:
        """Let other standbys take over first while this clock is far from the owner's; tell of changes."""
        if len(self._ages_ms) < _SKEW_GROUPS_MIN:
            return
        skew_ms = self.skew_ms
        passed = next(
            (bound for bound in (SKEW_MAX_MS, SKEW_TOLD_MS) if self._passes(abs(skew_ms), bound)), 0
        )
        if passed == self._told_skew_ms:
            return
        self._told_skew_ms = passed
        self._follower.competes_last = passed == SKEW_MAX_MS
        if passed == SKEW_MAX_MS:
            log.error(
                "The clock of this node differs too much from the owner's; other standbys take over first",
                ahead_ms=skew_ms,
            )
        elif passed:
            log.warning("The clock of this node differs from the owner's", ahead_ms=skew_ms)
        else:
            log.info("The clock of this node agrees with the owner's again", ahead_ms=skew_ms)

    def _passes(self, skew_ms: int, bound_ms: int) -> bool:
        return skew_ms > (bound_ms * _CLEARED_SHARE if bound_ms <= self._told_skew_ms else bound_ms)

    def _note_end(self, is_end: bool) -> None:
        self._is_behind = not is_end
        self._has_waited = is_end

    async def _checkpoint_silences(self) -> None:
        """Write a checkpoint whenever the log falls silent: a take-over may be near."""
        half_lease_ms = self._follower.owner_lease_ms / 2
        while True:
            await asyncio.sleep(max(half_lease_ms - self._follower.silent_ms, half_lease_ms / 8) / 1e3)
            if self._follower.silent_ms >= half_lease_ms and self._broker.checkpointer.is_behind:
                await self._broker.checkpointer.checkpoint()
