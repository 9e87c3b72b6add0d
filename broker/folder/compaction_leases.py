"""Leases of compaction jobs: what they hold, and until when. Memory only: after a restart no job has one.

Invariants:
  COMPACTION-1  A lease is the newest of its topic's inputs: what one lease holds no other gets before it ends.
  COMPACTION-3  Files that a lease names stay while it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from broker.delayed.lent_buckets import Loan
from broker.errors import Fenced, InvalidRequest, LimitReached, NotFound, Refused
from broker.folder.compaction_candidates import bucket_candidates, eligible_ledgers
from broker.folder.compaction_values import Committed, Lease
from broker.folder.staging import Staging
from broker.runtime.clock import Clock
from broker.storage.compaction_inputs import CompactionInputs
from broker.topics.topic import Topic

LEASES_MAX = 64
INPUTS_MAX = 10_000


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease that lives."""

    lease: Lease
    topic: Topic
    inputs: CompactionInputs
    loan: Loan | None
    keeping: contextlib.ExitStack  # of the input files
    committing: asyncio.Task[Committed] | None = None


class CompactionLeases:
    """See the module's description."""

    def __init__(
        self,
        staging: Staging,
        clock: Clock,
        rng: random.Random,
        lease_ms_max: int,
        note: Callable[[str], None],
    ) -> None:
        self._staging = staging
        self._clock = clock
        self._rng = rng
        self._lease_ms_max = lease_ms_max
        self._note = note
        self._held: dict[str, HeldLease] = {}  # oldest first
        self._epoch = 0

    def __iter__(self) -> Iterator[HeldLease]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def new(self, topic: Topic, ledger_ids: Sequence[int], bucket_ids: Sequence[int], lease_ms: int) -> Lease:
        """Return a lease under a new name and epoch; it is held once `hold` says so."""
        now_ms = self._clock.now_ms()
        self._epoch = max(self._epoch + 1, now_ms)
        compaction_id = f"{self._rng.getrandbits(64):016x}"
        return Lease(
            compaction_id=compaction_id,
            epoch=self._epoch,
            topic=topic.name,
            ledger_ids=tuple(sorted(ledger_ids)),
            bucket_ids=tuple(bucket_ids),
            folder=f"staging/{compaction_id}",
            expires_at_ms=now_ms + min(lease_ms or self._lease_ms_max, self._lease_ms_max),
        )

    def hold(self, lease: Lease, topic: Topic, inputs: CompactionInputs, loan: Loan | None) -> HeldLease:
        """Keep the input files until the lease ends (COMPACTION-3)."""
        keeping = contextlib.ExitStack()
        keeping.enter_context(topic.log.keep_files())
        if topic.index.upkeep is not None:
            keeping.enter_context(topic.index.upkeep.keep_files())
        self._held[lease.compaction_id] = held = HeldLease(lease, topic, inputs, loan, keeping)
        return held

    def check_free(self, topic: Topic, ledger_ids: Sequence[int], bucket_ids: Sequence[int]) -> None:
        """Raise InvalidRequest, LimitReached or Refused unless these can be leased now."""
        if not ledger_ids and not bucket_ids:
            raise InvalidRequest(
                "The request names neither a ledger nor a bucket",
                field="ledger_ids",
                reason="EMPTY_COMPACTION",
            )
        if len(ledger_ids) + len(bucket_ids) > INPUTS_MAX:
            raise InvalidRequest(
                f"More than {INPUTS_MAX} ledgers and buckets", field="ledger_ids", reason="TOO_MANY_ENTRIES"
            )
        if len(self._held) >= LEASES_MAX:
            raise LimitReached(
                f"The maximum number of compactions, {LEASES_MAX}, is under way",
                reason="TOO_MANY_COMPACTIONS",
                retry_after_ms=60_000,
            )
        for held in self._held.values():
            if held.topic is topic and (
                set(held.lease.ledger_ids) & set(ledger_ids) or set(held.lease.bucket_ids) & set(bucket_ids)
            ):
                raise Refused(
                    f"Another compaction of topic {topic.name!r} is under way",
                    reason="COMPACTION_RUNNING",
                    topic=topic.name,
                    compaction_id=held.lease.compaction_id,
                )
        ledgers = {ledger.name.ledger_id for ledger in eligible_ledgers(topic, self._clock.now_ms())}
        buckets = [bucket.bucket_id for bucket in bucket_candidates(topic)]
        at = buckets.index(bucket_ids[0]) if bucket_ids and bucket_ids[0] in buckets else 0
        if set(ledger_ids) - ledgers or buckets[at : at + len(bucket_ids)] != list(bucket_ids):
            raise Refused(
                f"A ledger or bucket of topic {topic.name!r} cannot be compacted, or no longer: make a new plan",
                reason="COMPACTION_INPUT_CHANGED",
                topic=topic.name,
            )

    def current(self, compaction_id: str, epoch: int) -> HeldLease:
        """Return a lease that lives; raises NotFound, Fenced."""
        self.end_expired()
        held = self._held.get(compaction_id)
        if held is None:
            raise NotFound(
                f"Compaction {compaction_id[:64]!r} does not exist or has ended: begin another one",
                reason="COMPACTION_NOT_FOUND",
            )
        if held.lease.epoch != epoch:
            raise Fenced("The compaction has another epoch; another job owns it", reason="COMPACTION_FENCED")
        return held

    def end_expired(self) -> None:
        """End those that nobody used in time."""
        now_ms = self._clock.now_ms()
        for held in list(self._held.values()):
            if held.lease.expires_at_ms <= now_ms and held.committing is None:
                self.end(held)
                self._note("expired")

    def end(self, held: HeldLease) -> None:
        """End a lease, if it lives: its files go free, and its folder is an orphan."""
        if self._held.pop(held.lease.compaction_id, None) is None:
            return
        held.keeping.close()
        self._staging.orphan(held.lease.folder)
        if not held.topic.deleted:
            held.topic.note_change()  # files that were kept wait for a checkpoint
