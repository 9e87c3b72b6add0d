"""Choice of what is worth compacting in a topic. Pure: no file, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker.folder.compaction_values import BucketCandidate, Candidates, LedgerCandidate


@dataclass(frozen=True, slots=True)
class CompactLimits:
    """Thresholds above which an input is compacted, and the bounds of one pass."""

    live_ratio_max: float = 0.2  # a ledger of which more is live is left alone
    reclaim_bytes_min: int = 1 << 20  # a ledger that frees less is left alone, unless all of it goes
    ledgers_max: int = 1_000  # of a topic
    read_bytes_max: int = 100 << 30  # of all topics, ledgers and buckets
    bucket_entries_small: int = 50_000  # a bucket in which fewer wait is small
    buckets_min: int = 4  # so many neighbours are merged, or more


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """Plan for one topic."""

    topic: str
    ledgers: tuple[LedgerCandidate, ...]
    buckets: tuple[BucketCandidate, ...]  # neighbours, to be merged into one
    left_count: int = 0  # ledgers that are worth it, and are left for another night by the caps

    @property
    def is_empty(self) -> bool:
        return not self.ledgers and not self.buckets

    @property
    def ledger_bytes(self) -> int:
        return sum(ledger.disk_bytes for ledger in self.ledgers)

    @property
    def read_bytes(self) -> int:
        """About how many bytes are read."""
        return self.ledger_bytes + sum(bucket.disk_bytes for bucket in self.buckets)

    @property
    def freed_bytes(self) -> int:
        """About how many bytes of ledgers go."""
        return sum(map(freed_bytes, self.ledgers))


def plan_topic(candidates: Candidates, limits: CompactLimits, budget_bytes: int) -> TopicPlan:
    """The ledgers that free most for what has to be kept of them, oldest first, as far as the budget goes."""
    worth = [ledger for ledger in candidates.ledgers if _is_worth_it(ledger, limits)]
    chosen: list[LedgerCandidate] = []
    for ledger in worth[: limits.ledgers_max]:
        if ledger.disk_bytes > budget_bytes:
            break
        budget_bytes -= ledger.disk_bytes
        chosen.append(ledger)
    buckets = _plan_buckets(candidates.buckets, limits)
    if sum(bucket.disk_bytes for bucket in buckets) > budget_bytes:
        buckets = ()
    return TopicPlan(candidates.topic, tuple(chosen), buckets, len(worth) - len(chosen))


def freed_bytes(ledger: LedgerCandidate) -> int:
    """About how many bytes rewriting a ledger frees: messages are taken to be of one length."""
    return ledger.disk_bytes * ledger.settled_count // max(1, ledger.present_count)


def _is_worth_it(ledger: LedgerCandidate, limits: CompactLimits) -> bool:
    if not ledger.settled_count:
        return False
    live = ledger.present_count - ledger.settled_count
    if live > ledger.present_count * limits.live_ratio_max:
        return False
    return freed_bytes(ledger) >= limits.reclaim_bytes_min or (not live and ledger.present_count > 0)


def _plan_buckets(buckets: Sequence[BucketCandidate], limits: CompactLimits) -> tuple[BucketCandidate, ...]:
    """The longest run of neighbours that are small, or of which most was delivered."""
    best: list[BucketCandidate] = []
    run: list[BucketCandidate] = []
    for bucket in buckets:
        is_small = bucket.waiting_count < limits.bucket_entries_small
        # One of which nothing waits is dropped by the broker itself.
        if bucket.waiting_count and (is_small or bucket.waiting_count * 2 < bucket.entry_count):
            run.append(bucket)
            best = run.copy() if len(run) > len(best) else best
        else:
            run = []
    return tuple(best) if len(best) >= limits.buckets_min else ()
