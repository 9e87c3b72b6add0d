"""Finds what a producer repeats, so that it is answered with the ids it got and not stored again.

`look` decides what of a batch is new, from what is durable (`producers.py`) and what is on its way to the disk;
`reserve` notes a batch that was submitted. What is reserved is kept as a second state of each producer that has
something on its way; `apply` of the same record brings the first one there. A repeat of what is on its way waits for
the same durability: that of the producer's last record, which lies behind all that it repeats.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from broker.errors import InvalidRequest, LimitReached, Refused
from broker.model import Batch, IdRange, Int64Column, UInt64Column
from broker.policy import EffectiveTopicPolicy
from broker.storage.records import Produced, Sequences
from broker.topics.plan import LedgerEnd, plan_produced
from broker.topics.producers import (
    PRODUCER_BYTES,
    RUN_BYTES,
    DedupMemory,
    KnownIds,
    ProducerHistory,
    Producers,
)

_RETRY_MS_MAX = 3_600_000  # a window may be longer than what RetryInfo can say
_INDEX = re.compile(r"messages\[(\d+)\]")


@dataclass(slots=True)
class _Ahead:
    """A producer as it will be once all that was submitted is durable."""

    producer: ProducerHistory  # the durable one, while nothing was submitted
    is_own: bool = False
    durable: asyncio.Future[None] | None = None  # of its last record


@dataclass(frozen=True, slots=True)
class Look:
    """Answer to a batch with sequence ids: what of it is new."""

    sequences: Sequences | None  # what its record says; None: nothing of it is new
    fresh: Batch | None  # what of it is new
    fresh_at: Int64Column | None  # the place of each of these in the batch; None: they are all of it
    known: KnownIds | None  # what is known of each message of a batch that is not all new
    durable: asyncio.Future[None] | None = (
        None  # nothing is new: once this is done, what it repeats is durable
    )

    @property
    def publish_time_ms(self) -> int:
        """Return the publish time of the first repeated message."""
        assert self.known is not None
        return int(self.known.publish_times_ms[np.argmax(self.known.is_known)])

    def ids(self, stored: IdRange | None) -> tuple[IdRange, ...]:
        """The ids of all messages in order, `stored` being those of what is new."""
        known = self.known
        if known is None:
            assert stored is not None
            return (stored,)
        ledger_ids, entry_ids = known.ledger_ids.copy(), known.entry_ids.copy()
        if stored is not None:
            ledger_ids[self.fresh_at] = stored.ledger_id
            entry_ids[self.fresh_at] = np.arange(stored.first_entry_id, stored.first_entry_id + stored.count)
        follows = (
            (ledger_ids[1:] == ledger_ids[:-1])
            & (entry_ids[1:] == entry_ids[:-1] + 1)
            & (known.is_known[1:] == known.is_known[:-1])
        )
        starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        counts = np.diff(starts, append=len(ledger_ids))
        columns = (ledger_ids[starts], entry_ids[starts], counts, known.is_known[starts])
        return tuple(
            IdRange(*values) for values in zip(*(column.tolist() for column in columns), strict=True)
        )

    def plan(
        self,
        batch: Batch,
        topic_id: int,
        end: LedgerEnd,
        new_ledger_id: Callable[[], int],
        now_ms: int,
        policy: EffectiveTopicPolicy,
    ) -> Produced:
        """The record of what is new of the batch that was looked at; see `plan_produced`."""
        fresh, fresh_at = self.fresh, self.fresh_at
        assert fresh is not None and fresh.count <= batch.count
        try:
            return plan_produced(fresh, topic_id, end, new_ledger_id, now_ms, policy, self.sequences)
        except InvalidRequest as error:
            if fresh_at is not None:  # the refusal names the message as the request does
                error.field = _INDEX.sub(lambda match: f"messages[{fresh_at[int(match[1])]}]", error.field)
            raise


def is_sequenced(batch: Batch, policy: EffectiveTopicPolicy) -> bool:
    """Return whether a topic has an eye on a batch's sequence ids."""
    return batch.sequence_ids is not None and bool(policy.dedup_window_ms)


def check_rising(batch: Batch) -> UInt64Column:
    """The sequence ids that a batch has; InvalidRequest if they do not rise."""
    sequence_ids = batch.sequence_ids
    assert sequence_ids is not None
    if len(sequence_ids) == 1:
        return sequence_ids
    places = np.flatnonzero(sequence_ids)
    given = sequence_ids if len(places) == len(sequence_ids) else sequence_ids[places]
    falls = given[1:] <= given[:-1]
    if np.count_nonzero(falls):
        at = places[1 + int(np.argmax(falls))]
        raise InvalidRequest(
            f"sequence_id {sequence_ids[at]} does not rise above the one before it in the batch",
            field=f"messages[{at}].sequence_id",
            reason="SEQUENCE_NOT_RISING",
        )
    return given


class Deduplication:
    """Repeats of one topic's producers."""

    def __init__(self, producers: Producers, memory: DedupMemory) -> None:
        self._durable = producers
        self._memory = memory
        self._held_bytes = 0  # of what the memory counts
        self._ahead: OrderedDict[str, _Ahead] | None = None  # who sent last comes last

    def look(self, batch: Batch, now_ms: int, policy: EffectiveTopicPolicy) -> Look:
        """Find the new part of a batch. Raises the refusal; changes nothing."""
        given = check_rising(batch)
        name = batch.producer_name
        ahead = self._known().get(name) or _Ahead(ProducerHistory())
        producer = ahead.producer
        known, fresh, fresh_at = None, batch, None
        if int(given[0]) <= producer.highest:
            known = _find(producer, batch, now_ms, policy)
            if known.is_known.all():
                return Look(None, None, None, known, ahead.durable or _done())
            if known.is_known.any():
                fresh_at = np.flatnonzero(~known.is_known)
                fresh = batch.part(fresh_at)
                assert fresh.sequence_ids is not None
                given = fresh.sequence_ids[fresh.sequence_ids > 0]
            else:
                known = None
        if not len(given):  # what is new has no sequence ids
            return Look(None, fresh, fresh_at, known)
        floor = producer.floor_after(given, now_ms, policy.dedup_window_ms, policy.dedup_entries)
        assert fresh.sequence_ids is not None
        sequences = Sequences(name, floor, fresh.sequence_ids)
        if forgotten_name := self._gives_way_to(sequences, now_ms, policy):
            sequences = replace(sequences, forgotten_name=forgotten_name)
        return Look(sequences, fresh, fresh_at, known)

    def reserve(self, record: Produced, durable: asyncio.Future[None]) -> None:
        """A batch that `look` looked at was submitted."""
        sequences = record.sequences
        if sequences is None:
            return
        known = self._known()
        if sequences.forgotten_name:
            self._count(-known.pop(sequences.forgotten_name).producer.memory_bytes)
        ahead = known.get(sequences.producer_name)
        if ahead is None:
            ahead = known[sequences.producer_name] = _Ahead(ProducerHistory(), is_own=True)
            self._count(ahead.producer.memory_bytes)
        elif not ahead.is_own:
            ahead.producer = ahead.producer.copy()
            ahead.is_own = True
        known.move_to_end(sequences.producer_name)
        ahead.durable = durable
        bytes_before = ahead.producer.memory_bytes
        ahead.producer.add(
            sequences.sequence_ids, record.ledger_id, record.first_entry_id, record.publish_time_ms
        )
        ahead.producer.forget_below(sequences.floor)
        self._count(ahead.producer.memory_bytes - bytes_before)

    def start(self) -> None:
        """Count what recovery found, once, however much it is."""
        self._count(sum(producer.memory_bytes for producer in self._durable.by_name.values()))

    def close(self) -> None:
        """The topic is gone: nothing is reserved any more."""
        self._count(-self._held_bytes)

    def _count(self, growth_bytes: int) -> None:
        self._held_bytes += growth_bytes
        self._memory.used_bytes += growth_bytes

    def forget_expired(self, now_ms: int, policy: EffectiveTopicPolicy) -> None:
        """Forget what no answer is made from any more, where memory is short. Called periodically."""
        if not self._memory.is_short:
            return
        for name, ahead in self._known().items():
            if ahead.durable is not None and not ahead.durable.done():
                continue
            if name not in self._durable.by_name:
                continue  # the journal has failed
            bytes_before = ahead.producer.memory_bytes
            ahead.producer = self._durable.forget_expired(
                name, now_ms, policy.dedup_window_ms, policy.dedup_entries
            )
            ahead.is_own = False
            self._count(ahead.producer.memory_bytes - bytes_before)

    def let_go(self) -> None:
        """Drop the second state of producers that have nothing on its way."""
        if self._ahead is None:
            return
        for name, ahead in self._ahead.items():
            if ahead.is_own and ahead.durable is not None and ahead.durable.done():
                if (producer := self._durable.by_name.get(name)) is None:
                    continue  # the journal has failed
                ahead.producer = producer
                ahead.is_own = False

    def _known(self) -> OrderedDict[str, _Ahead]:
        if self._ahead is None:
            by_age = sorted(
                self._durable.by_name.items(), key=lambda item: (item[1].last_publish_ms, item[0])
            )
            self._ahead = OrderedDict((name, _Ahead(producer)) for name, producer in by_age)
        return self._ahead

    def _gives_way_to(self, sequences: Sequences, now_ms: int, policy: EffectiveTopicPolicy) -> str:
        """Return the producer to forget for a batch, empty if there is room. Raises LimitReached."""
        known, name, limits = self._known(), sequences.producer_name, self._memory
        window_ms, entries_max = policy.dedup_window_ms, policy.dedup_entries
        assert window_ms is not None and entries_max is not None
        has_place = name in known or len(known) < limits.producers_per_topic_max
        # Nearly always there is room for the most that it could be.
        if has_place and limits.has_room(PRODUCER_BYTES + RUN_BYTES * len(sequences.sequence_ids)):
            return ""
        before = known[name].producer if name in known else ProducerHistory()
        growth_bytes = before.memory_bytes_after(sequences.sequence_ids, sequences.floor, entries_max)
        growth_bytes -= before.memory_bytes if name in known else 0
        if has_place and limits.has_room(growth_bytes):
            return ""
        idle_ms = 0
        if oldest := next((known_name for known_name in known if known_name != name), ""):
            ahead = known[oldest]
            idle_ms = now_ms - ahead.producer.last_publish_ms
            if idle_ms >= window_ms and (ahead.durable is None or ahead.durable.done()):
                if limits.has_room(growth_bytes - ahead.producer.memory_bytes):
                    return oldest
                has_place = True
        if has_place:
            raise LimitReached(
                "The memory for sequence ids of producers, of all topics, is full (dedup_memory_bytes_max)",
                reason="DEDUP_MEMORY_FULL",
                retry_after_ms=min(limits.retry_ms, _RETRY_MS_MAX),
                dedup_memory_bytes_max=limits.bytes_max,
            )
        raise LimitReached(
            "The topic remembers the sequence ids of as many producers as it can, and none has been idle for long "
            "enough to be forgotten",
            reason="TOO_MANY_PRODUCERS",
            retry_after_ms=min(max(1, window_ms - idle_ms), window_ms, _RETRY_MS_MAX),
            producers_per_topic_max=limits.producers_per_topic_max,
        )


def _find(producer: ProducerHistory, batch: Batch, now_ms: int, policy: EffectiveTopicPolicy) -> KnownIds:
    """Find each message of a batch among the remembered; Refused if one is too old to tell."""
    sequence_ids = batch.sequence_ids
    assert sequence_ids is not None
    places = np.flatnonzero(sequence_ids)
    given = sequence_ids[places]
    known = producer.find(given)
    # What is remembered for longer than was promised, because nothing was sent since, is forgotten all the same.
    floor = producer.floor_at(now_ms, policy.dedup_window_ms, policy.dedup_entries)
    expired = known.is_known & (known.publish_times_ms <= now_ms - policy.dedup_window_ms)
    unknown = (given < np.uint64(floor)) | (~known.is_known & (given == np.uint64(producer.highest)))
    too_old = np.flatnonzero(unknown | expired)
    if len(too_old):
        at = int(too_old[0])
        raise Refused(
            f"sequence_id {given[at]} (messages[{places[at]}]) may have been stored already: this producer has sent "
            f"ids up to {producer.highest}, and the broker no longer remembers the answer to this one",
            reason="SEQUENCE_TOO_OLD",
            sequence_id=int(given[at]),
            highest_sequence_id=producer.highest,
        )
    if len(places) == len(sequence_ids):
        return known
    columns = (np.zeros(len(sequence_ids), column.dtype) for column in known)
    whole = KnownIds(*columns)
    for column, values in zip(whole, known, strict=True):
        column[places] = values
    return whole


def _done() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
