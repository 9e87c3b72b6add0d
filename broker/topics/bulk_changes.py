"""Bulk changes at work: cancels and moves of all messages that match a filter, made step by step.

    begin --> one record: what it is to do
    work: find the next messages in due order --> decide (`changing.py`) --> one record: them, and how far it has come
          ... --> the last one says that it is done

One task a topic makes its bulk changes one after the other, each finding what the ones before it have left. Over all
topics a few steps at most are made at a time, in the order in which they were asked for, and a step is small: others
are served between any two of them.

Invariants:
  BULKWORK-1  A step is decided in the step without await in which its record is submitted, and only if the bulk change
      has not ended and no record that ends it is on its way.
  BULKWORK-2  No message is changed twice: a bulk change goes forward only, and leaves alone what a record after its
      first step has moved, its own ones too.
  BULKWORK-3  Only a broker that serves runs this: a standby applies what the owner's records say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from broker.config import BrokerConfig
from broker.delayed.due_rows import Key
from broker.errors import (
    Corrupt,
    InvalidRequest,
    LimitReached,
    NotFound,
    PostdateError,
    StorageFailed,
)
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCounters
from broker.runtime.clock import Clock
from broker.runtime.supervise import Spawn
from broker.storage.bulk import BulkDefinition, BulkEnd, BulkKind, BulkProgress, BulkStanding, BulkStep
from broker.storage.changes import Cancelled, Moved
from broker.storage.records import BulkStepped
from broker.topics.refusals import check_max_delay, topic_not_found
from broker.topics.registry import Registry
from broker.topics.schedule_values import Cancel, Change, ChangeResult, DueRange, Move, OutcomeColumns
from broker.topics.topic import Topic

log = get_logger(__name__)

_STEPS_AT_ONCE = 4
_RETRY_SECONDS = 1.0
_FAILURE_CHARACTERS_MAX = 500

_Key = tuple[int, int]  # topic_id, bulk_id


class _EndedMeanwhileError(Exception):
    """Somebody ended the bulk change while its next step was prepared."""


class BulkChanges:
    """See the module's description."""

    def __init__(
        self,
        registry: Registry,
        config: BrokerConfig,
        clock: Clock,
        *,
        spawn: Spawn,
        wait_room: Callable[[], Awaitable[None]],
        counters: BrokerCounters,
    ) -> None:
        """`wait_room` returns once a record may be submitted; it raises what refuses every change."""
        self._registry = registry
        self._config = config
        self._clock = clock
        self._spawn = spawn
        self._wait_room = wait_room
        self._counters = counters
        self._coming: dict[
            _Key, tuple[BulkDefinition, asyncio.Future[None]]
        ] = {}  # on their way to be applied
        self._ending: dict[_Key, asyncio.Future[None]] = {}  # BULKWORK-1
        self._at_work: set[int] = set()  # topics, each with a task
        self._turns = asyncio.Semaphore(_STEPS_AT_ONCE)

    def start(self) -> None:
        """Go on with what had not ended when the broker did."""
        for topic in self._registry.topics.values():
            self._wake(topic)

    # -- calls -----------------------------------------------------------------------------------------------

    async def begin(self, topic: Topic, definition: BulkDefinition) -> int:
        """Begin a bulk change; returns its number once that is durable. The same request_id again begins nothing."""
        known = self._known(topic, definition)
        if known is None:
            known = await self._begin_new(topic, definition)
        bulk_id, durable = known
        if durable is not None:
            await asyncio.shield(durable)
        return bulk_id

    async def _begin_new(
        self, topic: Topic, definition: BulkDefinition
    ) -> tuple[int, asyncio.Future[None] | None]:
        await self._wait_room()
        due = DueRange(definition.start_ms, definition.end_ms)
        counts = await topic.schedule.count(due, 0)
        if topic.deleted:
            raise topic_not_found(topic.name)
        if definition.kind is not BulkKind.CANCEL and definition.kind is not BulkKind.SHIFT:
            field = "deliver_at_ms" if definition.kind is BulkKind.MOVE else "deliver_after_ms"
            new_ms = np.array([definition.new_ms], dtype=np.int64)
            check_max_delay(new_ms, self._clock.now_ms(), topic.policy, lambda _: field)
        known = self._known(topic, definition)  # another call may have come in between
        if known is None:
            total = sum(messages for _, messages in counts.bars)
            known = self._submit_begin(topic, replace(definition, total=total))
        return known

    async def cancel(self, topic: Topic, bulk_id: int) -> BulkStanding:
        """End a bulk change where it is, if it has not ended; returns how it stands once that is durable."""
        standing = self.standing(topic, bulk_id)
        if not standing.end:
            durable = self._ending.get((topic.topic_id, bulk_id))
            if durable is None:
                durable = self._end(topic, bulk_id, BulkEnd.CANCELLED)
            await asyncio.shield(durable)
            standing = self.standing(topic, bulk_id)
        return standing

    def standing(self, topic: Topic, bulk_id: int) -> BulkStanding:
        """The bulk change of that number, or NotFound."""
        standing = topic.bulk.get(bulk_id)
        if standing is None:
            raise NotFound(
                f"Topic {topic.name!r} has no bulk change {bulk_id}, or does not keep it any more",
                reason="BULK_CHANGE_NOT_FOUND",
                topic=topic.name,
            )
        return standing

    def _known(
        self, topic: Topic, definition: BulkDefinition
    ) -> tuple[int, asyncio.Future[None] | None] | None:
        """Return the one that an earlier call with this request_id began, and when that is durable."""
        if not definition.request_id:
            return None
        found: tuple[int, BulkDefinition, asyncio.Future[None] | None] | None = None
        bulk_id = topic.bulk.with_request_id(definition.request_id)
        if bulk_id is not None:
            found = bulk_id, self.standing(topic, bulk_id).definition, None
        for (topic_id, coming_id), (coming, durable) in self._coming.items():
            if topic_id == topic.topic_id and coming.request_id == definition.request_id:
                found = coming_id, coming, durable
        if found is None:
            return None
        if _asked(found[1]) != _asked(definition):
            raise InvalidRequest(
                "This request_id was used for another request", field="request_id", reason="REQUEST_ID_REUSED"
            )
        return found[0], found[2]

    def _submit_begin(self, topic: Topic, definition: BulkDefinition) -> tuple[int, asyncio.Future[None]]:
        coming = [bulk_id for topic_id, bulk_id in self._coming if topic_id == topic.topic_id]
        limit = self._config.tuning.bulk_unended_max
        if len(topic.bulk.unended_ids()) + len(coming) >= limit:
            raise LimitReached(
                f"Topic {topic.name!r} has {limit} bulk changes that have not ended, the limit",
                reason="TOO_MANY_BULK_CHANGES",
                limit=limit,
            )
        bulk_id = max([topic.bulk.last_id, *coming]) + 1
        durable = topic.submit_change(BulkStepped(topic.topic_id, BulkStep(bulk_id, definition)))
        self._coming[topic.topic_id, bulk_id] = definition, durable

        def begun(done: asyncio.Future[None]) -> None:
            if not done.cancelled():
                done.exception()  # told by the call, if somebody waits for its answer
            del self._coming[topic.topic_id, bulk_id]
            self._wake(topic)

        durable.add_done_callback(begun)
        self._counters.bulk_changes_begun += 1
        return bulk_id, durable

    # -- work ------------------------------------------------------------------------------------------------

    def _wake(self, topic: Topic) -> None:
        if topic.topic_id in self._at_work or topic.deleted or not topic.bulk.unended_ids():
            return
        self._at_work.add(topic.topic_id)
        self._spawn(f"bulk changes of topic {topic.topic_id}", self._work(topic))

    async def _work(self, topic: Topic) -> None:
        """Make the bulk changes of a topic, one after the other."""
        try:
            while not topic.deleted and (unended := topic.bulk.unended_ids()):
                await self._make(topic, unended[0])
        except StorageFailed:
            return  # the broker ends
        finally:
            self._at_work.discard(topic.topic_id)

    async def _make(self, topic: Topic, bulk_id: int) -> None:
        """Take steps until the bulk change has ended."""
        failure: PostdateError | None = None
        has_warned = False
        while not topic.deleted and (standing := topic.bulk.get(bulk_id)) is not None and not standing.end:
            if (ending := self._ending.get((topic.topic_id, bulk_id))) is not None:
                await asyncio.wait([ending])
                continue
            try:
                if failure is not None:
                    await asyncio.shield(self._end(topic, bulk_id, BulkEnd.FAILED, failure))
                    continue
                await topic.schedule.caught_up()  # by itself: nobody else waits for that
                async with self._turns:
                    await self._wait_room()
                    await self._step(topic, bulk_id, standing)
                has_warned = False
            except _EndedMeanwhileError:
                continue
            except StorageFailed:
                raise
            except (InvalidRequest, Corrupt) as error:
                if isinstance(error, Corrupt):
                    log.error("A bulk change met damage", topic=topic.name, bulk_change=bulk_id, error=error)
                failure = error
            except PostdateError as error:
                if not (topic.deleted or has_warned or error.reason == "DRAINING"):
                    has_warned = True
                    log.warning("A bulk change waits", topic=topic.name, bulk_change=bulk_id, error=error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _step(self, topic: Topic, bulk_id: int, standing: BulkStanding) -> None:
        """Change the next messages, and say so by one record."""
        definition, before = standing.definition, standing.progress

        def submit(
            change: Cancelled | Moved | None, outcomes: OutcomeColumns, examined: int, following: Key | None
        ) -> asyncio.Future[None]:
            now = topic.bulk.get(bulk_id)
            if (topic.topic_id, bulk_id) in self._ending or now is None or now.end:  # BULKWORK-1
                raise _EndedMeanwhileError
            matched = len(outcomes.found())
            progress = BulkProgress(
                before.place if following is None else following,
                before.examined + examined,
                before.matched + matched,
                before.done + int((outcomes.results == ChangeResult.DONE).sum()),
            )
            if following is None:
                return self._end(topic, bulk_id, BulkEnd.DONE, progress=progress, change=change)
            return topic.submit_change(
                BulkStepped(topic.topic_id, BulkStep(bulk_id, progress=progress), change)
            )

        await topic.schedule.change_next(
            DueRange(definition.start_ms, definition.end_ms),
            definition.key_prefix,
            change_of(definition),
            before.place,
            self._config.tuning.bulk_step_messages,
            # A cancelled message is not met again, wherever somebody moved it before.
            moved_before_lsn=standing.first_lsn if definition.kind is not BulkKind.CANCEL else 0,
            dry_run=definition.dry_run,
            submit=submit,
        )

    def _end(
        self,
        topic: Topic,
        bulk_id: int,
        end: BulkEnd,
        error: PostdateError | None = None,
        *,
        progress: BulkProgress | None = None,
        change: Cancelled | Moved | None = None,
    ) -> asyncio.Future[None]:
        """Submit the record that ends a bulk change."""
        if topic.deleted:
            raise topic_not_found(topic.name)
        ending = 1 + sum(topic_id == topic.topic_id for topic_id, _ in self._ending)
        step = BulkStep(
            bulk_id,
            progress=progress,
            end=end,
            end_ms=self._clock.now_ms(),
            failure_reason="" if error is None else error.reason,
            failure="" if error is None else error.told[:_FAILURE_CHARACTERS_MAX],
            forgotten_ids=topic.bulk.forgotten_with(ending, self._config.tuning.bulk_ended_kept),
        )
        key = topic.topic_id, bulk_id
        self._ending[key] = durable = topic.submit_change(BulkStepped(topic.topic_id, step, change))

        def ended(done: asyncio.Future[None]) -> None:
            del self._ending[key]
            with suppress(asyncio.CancelledError):
                if done.exception() is None:
                    self._note_end(topic, bulk_id)

        durable.add_done_callback(ended)
        return durable

    def _note_end(self, topic: Topic, bulk_id: int) -> None:
        self._counters.bulk_changes_ended += 1
        standing = topic.bulk.get(bulk_id)
        if standing is None:
            return
        self._counters.bulk_changes_failed += standing.end is BulkEnd.FAILED
        log.info(
            "A bulk change ended",
            topic=topic.name,
            bulk_change=bulk_id,
            end=standing.end.name.lower(),
            matched=standing.progress.matched,
            done=standing.progress.done,
            **({"failure": standing.failure} if standing.failure else {}),
        )


def change_of(definition: BulkDefinition) -> Change:
    """Return what a bulk change does with a message."""
    match definition.kind:
        case BulkKind.CANCEL:
            return Cancel()
        case BulkKind.SHIFT:
            return Move(shift_ms=definition.new_ms)
        case BulkKind.MOVE | BulkKind.DELAY:
            return Move(deliver_at_ms=definition.new_ms)


def _asked(definition: BulkDefinition) -> BulkDefinition:
    """Return what a call asked for: the same however often it is repeated."""
    is_delay = definition.kind is BulkKind.DELAY
    new_ms = definition.new_ms - definition.begin_ms if is_delay else definition.new_ms
    return replace(definition, new_ms=new_ms, begin_ms=0, total=0, principal="")
