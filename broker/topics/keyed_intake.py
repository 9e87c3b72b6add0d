"""Batches with schedule keys: a key is taken while a message with it waits, or is about to.

    look -> who holds the keys (filters; if they do not rule it out, runs and messages are read) -> decide -> submit

Invariants:
  INTAKE-1  One batch at a time is between its first look and its submission: what was read stays all there is to know.
      What is about to be cancelled or moved is waited for.
  INTAKE-2  From submission to `apply` the hashes of a batch are in flight; another batch with one of them waits, and
      looks again.
  INTAKE-3  There is no await between the decision, which is made from what is applied, and the submission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from broker.errors import AlreadyExists
from broker.model import (
    CANCELLED_MS,
    Batch,
    Entries,
    Int64Column,
    Position,
    UInt64Column,
    bitmap_of,
    common_entries,
)
from broker.storage.changes import Changed
from broker.storage.key_filter import Probe
from broker.storage.log import TopicLog
from broker.storage.recurring import RecurringStep
from broker.topics.intake import Accepted, check_distinct
from broker.topics.topic_keys import Holders, TopicKeys


class TakingTopic(Protocol):
    """A topic as keyed intake needs it."""

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> TopicLog: ...

    @property
    def keys(self) -> TopicKeys: ...

    @property
    def frontier_ms(self) -> int: ...

    def submit(
        self,
        batch: Batch,
        replacing: dict[int, Changed] | None = None,
        steps: tuple[RecurringStep, ...] = (),
    ) -> Accepted: ...

    def fresh_part(self, batch: Batch) -> tuple[Batch | None, Int64Column | None]:
        """Return the new part of a batch (None: nothing), and its places in the batch (None: it is all of it). Raises
        what the batch is refused with."""


@dataclass(frozen=True, slots=True, eq=False)
class _NewKeys:
    """The keys of what is new of a batch."""

    places: Int64Column  # of their messages in the batch
    probe: Probe

    @property
    def hashes(self) -> UInt64Column:
        return self.probe.hashes


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """Holders of some keys, as of one moment."""

    version: int
    wanted: Int64Column  # places in the batch, of all keys that were wanted
    places: list[int]  # of those that were looked for
    holders: Sequence[Holders]  # places are those in `places`


class _Taken(NamedTuple):
    """A message whose key is taken, by its place in the batch, and who holds it."""

    place: int
    ledger_id: int
    entry_id: int
    deliver_at_ms: int


class KeyedIntake:
    """See the module's description. One topic's."""

    def __init__(self, topic: TakingTopic) -> None:
        self._topic = topic
        self._lock = asyncio.Lock()

    async def submit(self, batch: Batch, replace: bool, steps: tuple[RecurringStep, ...] = ()) -> Accepted:
        """As `Topic.submit`; raises AlreadyExists if a key is taken and its holder is not to be replaced."""
        check_distinct(batch)
        keys = self._topic.keys
        async with self._lock:  # INTAKE-1
            await keys.wait_room()
            known: _Known | None = None
            while True:
                wanted = self._wanted(batch)
                if wanted is None:  # repeats have no keys to take
                    return self._topic.submit(batch, None, steps)
                if not keys.is_ready:
                    await keys.wait_ready()
                    continue
                maybe_at = np.flatnonzero(keys.maybe(wanted.probe))
                if (wait := keys.in_flight(wanted.hashes[maybe_at])) is not None:
                    await asyncio.wait([wait])  # INTAKE-2
                elif (looked := await self._look(batch, wanted, maybe_at, known)) is not known:
                    known = looked  # there was an await
                elif (changing := self._changing(known)) is not None:
                    await self._topic.log.under_way.wait_unchanged(changing)
                else:
                    return self._decide(batch, wanted, known, replace, steps)

    def _wanted(self, batch: Batch) -> _NewKeys | None:
        """The keys that are not those of repeats; None: there are none. Raises what the batch is refused with."""
        fresh, places = self._topic.fresh_part(batch)
        if fresh is None or fresh.schedule_keys is None:
            return None
        at = np.flatnonzero(fresh.schedule_hashes)
        hashes = fresh.schedule_hashes[at]
        return _NewKeys(at if places is None else places[at], Probe(hashes))

    async def _look(
        self, batch: Batch, wanted: _NewKeys, maybe_at: Int64Column, known: _Known | None
    ) -> _Known | None:
        """Return who holds the keys, which only those at some of their places may have: what is known if that still is
        all, and nothing was awaited; None: nobody."""
        keys, spans = self._topic.keys, batch.schedule_keys
        assert spans is not None
        if (
            known is not None
            and known.version == keys.version
            and np.array_equal(known.wanted, wanted.places)
        ):
            return known
        version = keys.version
        if known is None and not len(maybe_at):
            return None
        places: list[int] = wanted.places[maybe_at].tolist()
        holders = await keys.holders([spans.key(place) for place in places], wanted.hashes[maybe_at])
        return _Known(version, wanted.places, places, holders)

    def _changing(self, known: _Known | None) -> Entries | None:
        """Holders that are being cancelled or moved; None: none is."""
        changing = self._topic.log.under_way.changing
        if known is None or not changing:
            return None
        held = {holder.ledger_id: bitmap_of(holder.entry_ids) for holder in known.holders}
        return common_entries(held, changing) or None

    def _decide(
        self,
        batch: Batch,
        wanted: _NewKeys,
        known: _Known | None,
        replace: bool,
        steps: tuple[RecurringStep, ...],
    ) -> Accepted:
        """Submit the batch, or refuse it: one step (INTAKE-3)."""
        frontier_ms = self._topic.frontier_ms
        taken: list[_Taken] = []
        replacing: dict[int, Changed] = {}
        holders, looked = ((), []) if known is None else (known.holders, known.places)
        for held in holders:
            times = self._topic.keys.times_now(held)
            at = np.flatnonzero((times > frontier_ms) & (times < CANCELLED_MS))
            if not len(at):
                continue
            entry_ids, times = held.entry_ids[at], times[at]
            replacing[held.ledger_id] = Changed(entry_ids, times)
            places = (looked[held.places[row]] for row in at.tolist())
            rows = zip(places, entry_ids.tolist(), times.tolist(), strict=True)
            taken += (_Taken(place, held.ledger_id, entry_id, time_ms) for place, entry_id, time_ms in rows)
        if taken and not replace:
            raise _refusal(min(taken))
        accepted = self._topic.submit(batch, replacing, steps)
        new = next(ids for ids in accepted.ids if not ids.duplicate)
        first = Position(new.ledger_id, new.first_entry_id)
        self._topic.keys.expect(first, wanted.probe, accepted.durable)  # INTAKE-2
        return accepted


def _refusal(taken: _Taken) -> AlreadyExists:
    return AlreadyExists(
        f"The schedule_key of messages[{taken.place}] is taken by a pending message: "
        f"{taken.ledger_id}:{taken.entry_id}",
        field=f"messages[{taken.place}].schedule_key",
        reason="SCHEDULE_KEY_TAKEN",
        ledger_id=taken.ledger_id,
        entry_id=taken.entry_id,
        deliver_at_ms=taken.deliver_at_ms,
    )
