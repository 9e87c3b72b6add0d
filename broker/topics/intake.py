"""Intake of batches: repeats, quotas, and the plan of what is new."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from broker.errors import InvalidRequest
from broker.model import Batch, IdRange, Position, is_among
from broker.policy import EffectiveTopicPolicy
from broker.runtime.clock import Clock
from broker.storage.log import TopicLog
from broker.storage.records import Produced
from broker.topics.deduplication import Deduplication, Look, check_rising, is_sequenced
from broker.topics.plan import check_times
from broker.topics.producers import DedupMemory, Producers
from broker.topics.quota import BacklogSubscription, Quota, check_alone, has_quota, measure_backlog


@dataclass(frozen=True, slots=True)
class Accepted:
    """A batch on its way to the disk: its ids are decided; they count once `durable` is done."""

    ids: tuple[IdRange, ...]  # in the order of the messages; of repeats and new ones more than one
    publish_time_ms: int  # of what is stored now; if nothing is, of the first message when it was
    durable: asyncio.Future[None]

    @property
    def has_repeats(self) -> bool:
        """Return whether some of the ids are of messages stored before."""
        return any(id_range.duplicate for id_range in self.ids)

    def parts(self, counts: Iterable[int]) -> list[Accepted]:
        """Return it as parts of so many messages, in order, of a batch without repeats."""
        (whole,) = self.ids
        parts, first = [], whole.first_entry_id
        for count in counts:
            ids = (IdRange(whole.ledger_id, first, count),)
            parts.append(Accepted(ids, self.publish_time_ms, self.durable))
            first += count
        assert first == whole.first_entry_id + whole.count
        return parts


class Intake:
    """One topic's, for batches that are `is_examined`: `look` before one is submitted, `reserve` after it.

    Between the two nothing may happen.
    """

    def __init__(
        self,
        producers: Producers,
        log: TopicLog,
        subscriptions: Iterable[BacklogSubscription],
        *,
        clock: Clock,
        memory: DedupMemory,
    ) -> None:
        self._deduplication = Deduplication(producers, memory)
        self._quota = Quota(clock, lambda lsn: measure_backlog(log, subscriptions, lsn))

    def look(self, batch: Batch, now_ms: int, policy: EffectiveTopicPolicy, applied_lsn: int) -> Look | None:
        """Find the new part of a batch; None if it has no sequence ids. Raises the refusal."""
        look, fresh = None, batch
        if is_sequenced(batch, policy):
            look = self._deduplication.look(batch, now_ms, policy)
            if look.fresh is None:
                return look
            fresh = look.fresh
        if has_quota(policy):
            self._quota.check(policy, fresh.count, len(fresh.frames), applied_lsn)
        return look

    def reserve(self, record: Produced, policy: EffectiveTopicPolicy, durable: asyncio.Future[None]) -> None:
        """Reserve what a submitted batch takes."""
        count = len(record.times)
        if has_quota(policy):
            end = Position(record.ledger_id, record.first_entry_id + count)
            self._quota.take(policy, count, len(record.frames), end, durable)
        self._deduplication.reserve(record, durable)

    def start(self) -> None:
        """Recovery is over."""
        self._deduplication.start()

    def close(self) -> None:
        """The topic is deleted."""
        self._deduplication.close()

    def forget_expired(self, now_ms: int, policy: EffectiveTopicPolicy) -> None:
        """Make room where the memory of sequence ids is short."""
        self._deduplication.forget_expired(now_ms, policy)

    def let_go(self) -> None:
        """Give back memory that is not needed; asked for at each checkpoint."""
        self._deduplication.let_go()


def is_examined(batch: Batch, policy: EffectiveTopicPolicy) -> bool:
    """Return whether there is anything to look at; nearly always there is not."""
    return is_sequenced(batch, policy) or has_quota(policy)


def check_first(batch: Batch, now_ms: int, policy: EffectiveTopicPolicy) -> None:
    """Raise what a topic that has nothing yet would refuse a batch with."""
    check_times(batch, now_ms, policy)
    check_alone(policy, batch.count, len(batch.frames))
    check_distinct(batch)
    if is_sequenced(batch, policy):
        check_rising(batch)


def check_distinct(batch: Batch) -> None:
    """A key twice in one batch: the second message could only be refused, or replace the first one."""
    keys = batch.schedule_keys
    if keys is None:
        return
    rising = np.sort(batch.schedule_hashes)
    repeated = rising[1:][rising[1:] == rising[:-1]]
    if not len(repeated) or not repeated[-1]:  # 0 is none
        return
    seen: set[bytes] = set()
    for place in keys.places()[is_among(batch.schedule_hashes[keys.places()], repeated)].tolist():
        if (key := keys.key(place)) in seen:
            raise InvalidRequest(
                "An earlier message of the batch has the same schedule_key",
                field=f"messages[{place}].schedule_key",
                reason="SCHEDULE_KEY_REPEATED",
            )
        seen.add(key)
