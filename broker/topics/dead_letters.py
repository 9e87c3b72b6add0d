"""Dead letters: messages that a subscription gave up, kept in another topic until somebody deals with them.

    subscription --give_up--> read, rewrite --one record--> dead-letter topic, held there by HOLDER_NAME
                                                        \\-> settled where it came from
    requeue: the same the other way, for the one subscription; purge: settled on the holder

A record of two parts does both, so that no crash leaves a message in neither place or in both. Which entries of the
dead-letter topic were given up here is durable in `Subscription.dead_letters`; of them, what the holder has not settled
and whose ledger is there is still held. A crash before the record is durable: the message is delivered once more.

A dead letter goes to its topic by the broker's own doing: no quota refuses it, and a full disk does not, like an
acknowledgement. What else may go wrong (a limit of topics, a message that cannot be read) makes the message wait for
redelivery as long as a message may, and is told in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import google_crc32c
import numpy as np

from broker.config import BrokerConfig
from broker.errors import NotFound, PostdateError, Refused
from broker.model import (
    Batch,
    Entries,
    Position,
    UInt32Column,
    bitmap_of,
    common_entries,
    ids_of,
    members,
    merge_entries,
    without_entries,
)
from broker.policy import EffectiveTopicPolicy, SubscriptionPolicy
from broker.runtime.clock import Clock
from broker.runtime.supervise import Spawn, YieldBudget
from broker.settings import MIB
from broker.storage.records import Settled, SettleReason, Transferred
from broker.storage.salvage import NO_FRAME, read_marking_damage
from broker.subscriptions import giving_up
from broker.subscriptions.entry_states import PROMISED, State
from broker.subscriptions.reasons import first_of
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.topics import dead_letter_frames as frames
from broker.topics.dead_letter_frames import HOLDER_NAME, dead_letter_topic_name
from broker.topics.policies import without_delay_limits
from broker.topics.refusals import subscription_not_found
from broker.topics.registry import Registry
from broker.topics.topic import Topic

_MESSAGES_MAX = 500
_BYTES_MAX = MIB
"""Of one record, but for a message that is larger alone."""
_READERS_MAX = 4
"""Transfers that read and rewrite at once: each holds a record's messages in memory."""
_LATEST = 1


@dataclass(frozen=True, slots=True)
class HeldLetters:
    """Some dead letters of a subscription, and where they lie."""

    topic: Topic
    holder: Subscription
    entries: Entries


class _Cause(NamedTuple):
    """Cause of giving up messages, and the text of the nack that led to it, if any."""

    reason: str
    last_reason: str

    @property
    def was_sent(self) -> bool:
        """Return whether the messages were with a consumer just now."""
        return self.reason not in giving_up.UNSENT

    def last_reason_of(self, subscription: Subscription, position: Position) -> str:
        return self.last_reason or subscription.reasons.of(position)


@dataclass(slots=True)
class _Requeue:
    """One request to send dead letters again, and what has come of it."""

    source: Topic
    subscription: Subscription
    deliver_after_ms: int
    moved: Entries = field(default_factory=dict)
    waits: list[asyncio.Future[None]] = field(default_factory=list)


class DeadLetters:
    """Moves messages between topics for all subscriptions of a broker; see the module's description."""

    def __init__(
        self,
        registry: Registry,
        config: BrokerConfig,
        clock: Clock,
        *,
        spawn: Spawn,
        wait_room: Callable[[], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._spawn = spawn
        self._wait_room = wait_room
        self._bytes_max = min(_BYTES_MAX, config.tuning.journal_segment_bytes // 4)
        self._readers = asyncio.Semaphore(_READERS_MAX)
        self._going: set[asyncio.Future[None]] = set()

    # -- for subscriptions -----------------------------------------------------------------------------------

    def check_place(self, topic_id: int, subscription_id: int) -> None:
        """Raise Refused if there is no place for dead letters of this subscription."""
        source = self._registry.topics.get(topic_id)
        subscription = self._subscription(topic_id, subscription_id)
        if source is not None and subscription is not None:
            dead_letter_topic_name(source.name, subscription.name, subscription.policy)

    def give_up(
        self, topic_id: int, subscription_id: int, entries: Entries, reason: str, last_reason: str
    ) -> asyncio.Future[None]:
        """Make dead letters of entries that the subscription is `giving_up`; see `DeadLetterSink`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        subscription = self._subscription(topic_id, subscription_id)
        if subscription is None:  # nobody is owed them any more
            done.set_result(None)
            return done
        # Nobody may be waiting; a failed journal reports itself.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        name = f"dead letters of subscription {subscription.topic_id}/{subscription.subscription_id}"
        task = self._spawn(name, self._give_up(subscription, entries, _Cause(reason, last_reason), done))
        self._going.add(done)
        done.add_done_callback(self._going.discard)
        task.add_done_callback(lambda _: done.cancel())  # it was cancelled before it began
        return done

    def letters_held(self, topic_id: int, subscription_id: int) -> Entries:
        """See `DeadLetterSink`."""
        subscription = self._subscription(topic_id, subscription_id)
        return {} if subscription is None else self.still_held(subscription)

    def _subscription(self, topic_id: int, subscription_id: int) -> Subscription | None:
        topic = self._registry.topics.get(topic_id)
        return None if topic is None else topic.subscriptions.get(subscription_id)

    def still_held(self, subscription: Subscription) -> Entries:
        """The part of `dead_letters` that nobody has dealt with."""
        held: Entries = {}
        for place in self.places(subscription):
            merge_entries(held, place.entries)
        return held

    async def wait_idle(self) -> None:
        """Return once nothing is on its way any more."""
        while self._going:
            await asyncio.wait(self._going)

    async def _give_up(
        self, subscription: Subscription, entries: Entries, cause: _Cause, done: asyncio.Future[None]
    ) -> None:
        waits: list[asyncio.Future[None]] = []
        try:
            for ledger_id, ids in _slices(entries):
                async with self._readers:
                    waits += await self._give_up_some(subscription, ledger_id, ids, cause)
            for wait in waits:
                await wait
        except PostdateError as error:  # the broker writes no more: what is left is owed after the restart
            if not done.done():
                done.set_exception(error)
        if not done.done():
            done.set_result(None)

    async def _give_up_some(
        self, subscription: Subscription, ledger_id: int, ids: UInt32Column, cause: _Cause
    ) -> list[asyncio.Future[None]]:
        """The records that were submitted for these entries, of one kind or the other."""
        waits: list[asyncio.Future[None]] = []
        try:
            await self._move_out(subscription, ledger_id, ids, cause, waits)
        except PostdateError as error:
            left = subscription.states.among({ledger_id: bitmap_of(ids)}, State.GIVING_UP)
            if subscription.deleted or not left:
                return waits
            subscription.logs.kept.note(left, error=error)
            longest_ms = subscription.policy.max_backoff_ms
            not_before_ms = self._clock.now_ms() + longest_ms
            kept = subscription.decisions.keep_given_up(
                left, not_before_ms, cause.last_reason, was_sent=cause.was_sent
            )
            if kept is not None:
                waits.append(kept)
        return waits

    async def _move_out(
        self,
        subscription: Subscription,
        ledger_id: int,
        ids: UInt32Column,
        cause: _Cause,
        waits: list[asyncio.Future[None]],
    ) -> None:
        source = self._registry.topics.get(subscription.topic_id)
        while len(ids):
            if source is None or subscription.deleted:
                return  # nobody is owed them any more
            topic, holder = await self._place(source, subscription)
            await self._wait_room()
            _, rows, stored = await read_marking_damage(source.log, ledger_id, ids, self._bytes_max)
            some = ids[: len(stored)]
            letters = await self._letters(source, subscription, ledger_id, some, stored, cause)
            # No await from here to the record: an entry that was acknowledged meanwhile, or taken back by a seek,
            # is not GIVING_UP any more.
            if holder.deleted or topic.deleted:
                continue  # another place is made
            ours = subscription.states.among({ledger_id: bitmap_of(some)}, State.GIVING_UP)
            if ours and not subscription.deleted:
                kept = members(some, ours[ledger_id])
                batch = _batch_of(letters, rows["key_hash"][: len(some)], kept)
                settled = Settled(
                    source.topic_id, subscription.subscription_id, SettleReason.DEAD_LETTERED, ours
                )
                # It waits for somebody, not for its time to live to pass.
                policy = replace(without_delay_limits(topic.policy), default_ttl_ms=0)
                waits.append(self._submit(topic, batch, policy, settled, 0))
                subscription.logs.dead_lettered.note(
                    ours,
                    reason=cause.reason,
                    last_reason=cause.last_reason_of(subscription, first_of(ours)),
                )
                subscription.decisions.promise_settled(ours)
            ids = ids[len(stored) :]

    async def _place(self, source: Topic, subscription: Subscription) -> tuple[Topic, Subscription]:
        """The dead-letter topic of a subscription and what holds the messages there; made if they are not there."""
        name = dead_letter_topic_name(source.name, subscription.name, subscription.policy)
        topic = await self._registry.topic_or_create(name, always=True)
        if holder := await topic.subscriptions.find_created(HOLDER_NAME):
            return topic, holder
        # The first subscription of a topic begins at its first message. Where there were others, what is there already
        # is theirs.
        policy = SubscriptionPolicy(max_delivery_attempts=0)  # dead letters do not die again
        return topic, await topic.subscriptions.create(HOLDER_NAME, SubscriptionType.SHARED, _LATEST, policy)

    async def _letters(
        self,
        source: Topic,
        subscription: Subscription,
        ledger_id: int,
        ids: UInt32Column,
        stored: Sequence[bytes],
        cause: _Cause,
    ) -> list[bytes]:
        now_ms = self._clock.now_ms()
        budget = YieldBudget(self._clock)
        attempts = subscription.attempts.counts(ledger_id, ids) + cause.was_sent
        letters = []
        for entry_id, count, frame in zip(ids.tolist(), attempts.tolist(), stored, strict=True):
            properties = {
                frames.TOPIC: source.name,
                frames.SUBSCRIPTION: subscription.name,
                frames.LEDGER_ID: str(ledger_id),
                frames.ENTRY_ID: str(entry_id),
                frames.ATTEMPTS: str(count),
                frames.REASON: cause.reason if frame is not NO_FRAME else giving_up.DAMAGED,
                frames.TIME_MS: str(now_ms),
            }
            if last_reason := cause.last_reason_of(subscription, Position(ledger_id, entry_id)):
                properties[frames.LAST_REASON] = last_reason
            letters.append(
                frames.dead_letter_frame(frame, properties)
                if frame is not NO_FRAME
                else frames.damaged_letter_frame(properties)
            )
            await budget.spent()
        return letters

    # -- for operators ---------------------------------------------------------------------------------------

    def places(self, subscription: Subscription) -> list[HeldLetters]:
        """Return where the dead letters of a subscription lie that nobody has dealt with, in the order of their ids."""
        missing = dict(subscription.dead_letters)
        if not missing:
            return []
        places: list[HeldLetters] = []
        for topic in self._candidates(subscription):
            if not missing:
                break
            # Copies: more may be given up while a record that names these is on its way.
            there = {
                i: bitmap.copy() for i, bitmap in missing.items() if topic.log.entry_count(i) is not None
            }
            for ledger_id in there:
                del missing[ledger_id]
            holder = topic.subscriptions.find(HOLDER_NAME)
            if holder is not None and there:
                held = without_entries(there, holder.cursor.settled_part(there))
                if held:
                    places.append(HeldLetters(topic, holder, held))
        for ledger_id in missing:
            del subscription.dead_letters[ledger_id]  # ids are not used again: what is gone stays gone
        return sorted(places, key=lambda place: min(place.entries))

    def _candidates(self, subscription: Subscription) -> Iterator[Topic]:
        """Topics that may hold dead letters of a subscription: its own first, then those it may have had before."""
        source = self._registry.topics.get(subscription.topic_id)
        if source is None:
            return
        own = None
        with contextlib.suppress(Refused):  # there may have been a place under other settings
            name = dead_letter_topic_name(source.name, subscription.name, subscription.policy)
            own = self._registry.by_name.get(name)
        if own is not None:
            yield own
        yield from (topic for topic in self._registry.topics.values() if topic is not own)

    async def requeue(
        self, subscription: Subscription, chosen: Entries | None, deliver_after_ms: int
    ) -> Entries:
        """Send dead letters to their subscription again, all or those chosen; returns which, once that is durable."""
        source = self._registry.topics.get(subscription.topic_id)
        if source is None:
            return {}
        work = _Requeue(source, subscription, deliver_after_ms)
        for place in self.places(subscription):
            wanted = place.entries if chosen is None else common_entries(place.entries, chosen)
            for ledger_id, ids in _slices(wanted):
                rest = ids
                while len(rest):
                    await self._wait_room()
                    rest = rest[await self._requeue_some(work, place, ledger_id, rest) :]
        for wait in work.waits:
            await wait
        return work.moved

    async def _requeue_some(
        self, work: _Requeue, place: HeldLetters, ledger_id: int, ids: UInt32Column
    ) -> int:
        """Submit a record of the first entries; how many were looked at."""
        source, subscription = work.source, work.subscription
        budget = YieldBudget(self._clock)
        async with self._readers:
            try:
                _, rows, stored = await read_marking_damage(place.topic.log, ledger_id, ids, self._bytes_max)
            except NotFound:  # the ledger has gone: all of it was dealt with meanwhile
                return len(ids)
            letters = []
            whole = np.ones(len(stored), dtype=np.bool_)
            for at, frame in enumerate(stored):
                # Nothing is left of a message that was damaged: to send an empty one in its place would be a lie.
                whole[at] = frame is not NO_FRAME and not frames.is_damaged_letter(frame)
                letters.append(frames.requeued_frame(frame) if whole[at] else b"")
                await budget.spent()
        # No await from here on: two requests must not both find the same letter.
        if subscription.deleted or source.deleted:
            raise subscription_not_found(source.name, subscription.name)
        some = ids[: len(stored)]
        ours = _not_done(place.holder, {ledger_id: bitmap_of(some[whole])})
        if ours and not place.holder.deleted:
            kept = members(some, ours[ledger_id])
            batch = _batch_of(letters, rows["key_hash"][: len(some)], kept, work.deliver_after_ms)
            settled = Settled(place.topic.topic_id, place.holder.subscription_id, SettleReason.REQUEUED, ours)
            policy = without_delay_limits(source.policy)
            work.waits.append(self._submit(source, batch, policy, settled, subscription.subscription_id))
            place.holder.decisions.promise_settled(ours)
            merge_entries(work.moved, ours)
        return len(some)

    def _submit(
        self, into: Topic, batch: Batch, policy: EffectiveTopicPolicy, settled: Settled, subscription_id: int
    ) -> asyncio.Future[None]:
        record = Transferred(into.plan(batch, policy), settled, subscription_id)
        durable = into.submit_record(record, lambda lsn: self._registry.apply(record, lsn))
        into.ledgers.reserve(record.produced)
        return durable

    async def purge(self, subscription: Subscription, chosen: Entries | None) -> Entries:
        """Drop dead letters for good, all or those chosen; returns which, once that is durable."""
        purged: Entries = {}
        waits = []
        for place in self.places(subscription):
            wanted = place.entries if chosen is None else common_entries(place.entries, chosen)
            if ours := _not_done(place.holder, wanted):
                waits.append(place.holder.decisions.settle(ours, SettleReason.PURGED))
                merge_entries(purged, ours)
        for wait in waits:
            await wait
        return purged


def _not_done(holder: Subscription, entries: Entries) -> Entries:
    """The part that the holder has neither settled nor is about to settle."""
    return holder.states.without(entries, State.SETTLED, *PROMISED)


def _slices(entries: Entries) -> list[tuple[int, UInt32Column]]:
    """A set in parts of one ledger, each for one record."""
    return [
        (ledger_id, ids[first : first + _MESSAGES_MAX])
        for ledger_id, bitmap in sorted(entries.items())
        for ids in (ids_of(bitmap),)
        for first in range(0, len(ids), _MESSAGES_MAX)
    ]


def _batch_of(
    letters: Sequence[bytes], key_hashes: UInt32Column, kept: np.ndarray, deliver_after_ms: int = 0
) -> Batch:
    """The frames to keep, as a producer's batch."""
    chosen = [letters[index] for index in np.flatnonzero(kept).tolist()]
    count = len(chosen)
    zeros = np.zeros(count, dtype=np.int64)
    return Batch(
        frames=b"".join(chosen),
        lengths=np.fromiter(map(len, chosen), dtype=np.uint32, count=count),
        crcs=np.fromiter(map(google_crc32c.value, chosen), dtype=np.uint32, count=count),
        deliver_at_ms=zeros,
        deliver_after_ms=np.full(count, deliver_after_ms, dtype=np.int64),
        ttl_ms=zeros,
        key_hashes=key_hashes[kept],
        schedule_hashes=np.zeros(count, dtype=np.uint64),
    )
