"""Recurring schedules at work: stores their occurrences, and changes, triggers and backfills them.

    due (a heap of times) --> plan (recurrence.py, pure) --> one record: occurrences that are due, the next one, steps
                                                             --> applied: due again when the next one is

The next occurrence of a schedule is stored ahead as an ordinary message that waits, so that the index delivers it in
time however late this task is; the one after it is stored when its time has come. Many schedules move on by one record.

Invariants:
  FIRING-1  A schedule is held from the moment it is planned, or a change of it is decided, until that record is
      applied: nobody else decides on it meanwhile.
  FIRING-2  Only a broker that serves runs this: a standby applies what the owner's records say.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from broker.config import BrokerConfig
from broker.errors import NotFound, PostdateError, StorageFailed
from broker.model import CANCELLED_MS, START, Entries, Position, bitmap_of, common_entries
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCounters
from broker.runtime.clock import Clock
from broker.runtime.supervise import Spawn, YieldBudget
from broker.storage.alive import Absence
from broker.storage.changes import Cancelled, Changed
from broker.storage.records import Recurred
from broker.storage.recurring import RecurringStanding, RecurringStep
from broker.storage.recurring_values import Definition, OverdueRuns, RecurringProgress
from broker.topics.recurrence import (
    OVERDUE_AFTER_MS,
    Due,
    DueOccurrence,
    next_after,
    occurrence,
    plan_due,
)
from broker.topics.recurring_frames import OccurrenceBatch
from broker.topics.recurring_reading import read_occurrences
from broker.topics.recurring_room import RecurringRoom
from broker.topics.refusals import topic_not_found
from broker.topics.registry import Registry
from broker.topics.topic import Topic

log = get_logger(__name__)

BACKFILL_MAX = 1_000
"""Occurrences that one call stores."""
_BATCH_MESSAGES = 256
_BATCH_BYTES = 1 << 20
_RETRY_MS = 1_000
_SLICE_MS = 0.5
"""Time of the loop that is taken at once to find what is next: an occurrence that has come due goes through several
rounds of the loop beside it until it is with its consumer."""
_STALE_MAX = 1_000
"""Entries of the heap beyond one a schedule, before it is made anew."""

T = TypeVar("T")
_Key = tuple[int, str]  # topic_id, name


@dataclass(frozen=True, slots=True)
class Waiting:
    """The occurrence that is stored ahead, while nobody may have been sent it."""

    position: Position
    deliver_at_ms: int  # effective

    @property
    def entries(self) -> Entries:
        return {self.position.ledger_id: bitmap_of(np.array([self.position.entry_id], dtype=np.uint32))}


class RecurringSchedules:
    """See the module's description. `begin`, then `run`."""

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
        """`wait_room` returns once a batch may be submitted; it raises what a producer would be refused with."""
        self._registry = registry
        self._config = config
        self._clock = clock
        self._spawn = spawn
        self._wait_room = wait_room
        self._counters = counters
        self._heap: list[tuple[int, int, str]] = []
        self._due_ms: dict[_Key, int] = {}
        """Of each schedule that is in the heap; other entries of it there are stale."""
        self._held: dict[_Key, asyncio.Future[None]] = {}  # FIRING-1
        self._room = RecurringRoom(config.tuning)
        self._due: dict[int, list[str]] = {}  # by topic: to be stored now; there is a task for each
        self._refused: set[int] = set()
        """Topics that took no batch when it was tried last, which was logged: they are given one message at a time, as
        a quota may have no room for more."""
        self._refusals = 0
        self._work = asyncio.Event()

    # -- life ------------------------------------------------------------------------------------------------

    def begin(self, absences: tuple[Absence, ...]) -> None:
        """Hold back occurrences that were missed and are not to be delivered: one step, before anything is.

        `absences`: when nobody was there, so that nobody was sent what came due.
        """
        for topic in self._registry.topics.values():
            if len(topic.recurring):
                self._room.include(topic)
            if topic.recurring.has_overdue_action:
                self._hold_back(topic, absences)

    def _hold_back(self, topic: Topic, absences: tuple[Absence, ...]) -> None:
        missed = [
            (name, state.progress, waiting)
            for name in topic.recurring
            if (state := topic.recurring.get(name)) is not None
            and self._is_left_out(state)
            and (waiting := self._waiting(topic, state.progress)) is not None
            and any(left_ms < waiting.deliver_at_ms <= back_ms for left_ms, back_ms in absences)
        ]
        for first in range(0, len(missed), _BATCH_MESSAGES):
            some = missed[first : first + _BATCH_MESSAGES]
            steps = tuple(
                RecurringStep(name, RecurringProgress(progress.ahead_ms)) for name, progress, _ in some
            )
            self._submit(topic, steps, [waiting for _, _, waiting in some])
        self._counters.recurring_missed += len(missed)

    def _is_left_out(self, state: RecurringStanding) -> bool:
        """Return whether an occurrence that is stored, and was missed, must not be delivered."""
        definition, progress, now_ms = state.definition, state.progress, self._clock.now_ms()
        if definition.paused or not 0 < progress.deliver_at_ms < now_ms - OVERDUE_AFTER_MS:
            return False
        if definition.overdue is OverdueRuns.ONE:  # the last one; is there a later one?
            following = _checked(lambda: next_after(definition, progress.ahead_ms))
            return following is not None and following <= now_ms
        return definition.overdue is OverdueRuns.NONE

    async def run(self) -> None:
        """Store what is due until cancelled."""
        budget = YieldBudget(self._clock)
        for topic in list(self._registry.topics.values()):
            for name in list(topic.recurring):
                self._check_ahead(topic, name)
                self._plan(topic, name)
                await budget.spent()
        recheck_seconds = self._config.tuning.clock_recheck_ms / 1_000
        while True:
            self._work.clear()
            now_ms = self._clock.now_ms()
            self._gather(now_ms)
            timer = None
            if self._heap:  # the clock may be stepped: look again soon
                seconds = min((self._heap[0][0] - now_ms) / 1_000, recheck_seconds)
                timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._work.set)
            try:
                await self._work.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    @property
    def next_ms(self) -> int | None:
        """The time at which something is to be stored next, 0 while it is under way; None: never."""
        if self._due:
            return 0
        return self._heap[0][0] if self._heap else None

    def _check_ahead(self, topic: Topic, name: str) -> None:
        """Withdraw what is stored ahead at another time than the rule says now: the zone has changed its rules."""
        state = topic.recurring.get(name)
        if state is None or not state.progress.ahead_ms or (topic.topic_id, name) in self._held:
            return
        definition, progress = state.definition, state.progress
        if _checked(lambda: next_after(definition, progress.after_ms)) in (None, progress.ahead_ms):
            return
        waiting = self._withdrawn(topic, state)
        if waiting is not None and not common_entries(waiting.entries, topic.log.under_way.changing):
            self._submit(topic, (RecurringStep(name, RecurringProgress(progress.after_ms)),), [waiting])

    def _plan(self, topic: Topic, name: str) -> None:
        """Put a schedule into the heap, under the time at which it is due."""
        key = topic.topic_id, name
        state = topic.recurring.get(name)
        if state is None or state.definition.paused:
            self._due_ms.pop(key, None)
            return
        self._put_due(key, state.progress.deliver_at_ms)

    def _put_due(self, key: _Key, due_ms: int) -> None:
        if self._due_ms.get(key) == due_ms:
            return
        self._due_ms[key] = due_ms
        heapq.heappush(self._heap, (due_ms, *key))
        if len(self._due_ms) > self._config.tuning.recurring_max:  # some are of topics that were deleted
            topics = self._registry.topics
            self._due_ms = {each: due_ms for each, due_ms in self._due_ms.items() if each[0] in topics}
        if len(self._heap) > 2 * len(self._due_ms) + _STALE_MAX:
            self._heap = [(due_ms, *key) for key, due_ms in self._due_ms.items()]
            heapq.heapify(self._heap)
        self._work.set()

    def _gather(self, now_ms: int) -> None:
        """Take what is due from the heap, and see to it that each topic stores its own."""
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, topic_id, name = heapq.heappop(self._heap)
            if self._due_ms.get((topic_id, name)) != due_ms:
                continue
            del self._due_ms[topic_id, name]
            topic = self._registry.topics.get(topic_id)
            if topic is None:
                continue
            if topic_id not in self._due:
                self._due[topic_id] = []
                self._spawn(f"recurring schedules of topic {topic_id}", self._store(topic))
            self._due[topic_id].append(name)

    # -- storing ---------------------------------------------------------------------------------------------

    async def _store(self, topic: Topic) -> None:
        """Store what is due of a topic until nothing is."""
        refusals = self._refusals
        try:
            while (names := self._due[topic.topic_id]) and not topic.deleted:
                self._due[topic.topic_id] = []
                at = 0
                while at < len(names):
                    at += await self._store_some(topic, names[at:])
            if refusals == self._refusals:
                self._refused.discard(topic.topic_id)
        finally:
            del self._due[topic.topic_id]

    async def _store_some(self, topic: Topic, names: list[str]) -> int:
        """Store occurrences of the first schedules by one record; returns how many were looked at."""
        held: list[str] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        looked, retry_ms = len(names), 0
        try:
            await self._wait_room()
            looked = await self._store_held(topic, names, held, done)
        except StorageFailed:
            return looked  # the broker ends
        except PostdateError as error:
            retry_ms = self._clock.now_ms() + _RETRY_MS
            self._refusals += 1
            if not topic.deleted and topic.topic_id not in self._refused:
                self._refused.add(topic.topic_id)
                log.warning("Occurrences of recurring schedules wait", topic=topic.name, error=error)
        finally:
            done.set_result(None)
            for name in held:
                del self._held[topic.topic_id, name]
                if not retry_ms:
                    self._plan(topic, name)
        if retry_ms and not topic.deleted:
            for name in names:
                self._put_due((topic.topic_id, name), retry_ms)
        return looked

    async def _store_held(
        self, topic: Topic, names: list[str], held: list[str], done: asyncio.Future[None]
    ) -> int:
        budget = YieldBudget(self._clock, _SLICE_MS)
        batch, steps = OccurrenceBatch(), []
        looked = dropped = 0
        messages_max = 1 if topic.topic_id in self._refused else _BATCH_MESSAGES
        for name in names:
            if len(batch) >= messages_max or batch.byte_count >= _BATCH_BYTES:
                break
            looked += 1
            key, state, now_ms = (topic.topic_id, name), topic.recurring.get(name), self._clock.now_ms()
            if key in self._held or state is None or state.definition.paused:
                continue  # whoever holds it puts it into the heap again
            if state.progress.deliver_at_ms > now_ms:
                self._plan(topic, name)
                continue
            due = self._planned(topic, name, state, now_ms, messages_max)
            if due is None:
                continue
            if messages_max == 1 and due.now and due.ahead is not None:  # a quota may have room for one alone
                due = replace(due, ahead=None, progress=RecurringProgress(due.now[-1].time_ms))
            self._held[key] = done
            held.append(name)
            place = batch.add(name, state.definition.message, due.now)
            if due.ahead is not None:
                place = batch.add(name, state.definition.message, [due.ahead])
            steps.append(RecurringStep(name, due.progress, place=place))
            dropped += due.dropped
            await budget.spent()
        if steps:
            accepted = await topic.keyed.submit(batch.batch(), True, tuple(steps))
            await asyncio.shield(accepted.durable)
            self._counters.recurring_stored += len(batch)
            self._counters.recurring_missed += dropped
        return looked

    def _planned(
        self, topic: Topic, name: str, state: RecurringStanding, now_ms: int, messages_max: int
    ) -> Due | None:
        """Plan a schedule; None: there is nothing to store, now or ever."""
        definition, progress = state.definition, state.progress
        limit = max(1, min(messages_max, _BATCH_BYTES // (len(definition.message) + 1)))
        due = _checked(lambda: plan_due(name, definition, progress, now_ms, limit))
        if due is None:
            log.error(
                "A recurring schedule cannot be read on this machine: its time zone or its cron is not known here",
                topic=topic.name,
                schedule=name,
                time_zone=definition.rule.zone,
                cron=definition.rule.cron,
            )
            return None
        return due if due.now or due.ahead is not None else None

    # -- changes ---------------------------------------------------------------------------------------------

    async def put(
        self, topic: Topic, name: str, definition: Definition, *, keeps_pause: bool = False
    ) -> bool:
        """Create or replace a schedule; returns whether there was none, once that is durable.

        `keeps_pause`: one that is there stays paused, or at work.
        """
        while True:
            await self._free(topic, name)
            before = topic.recurring.get(name)
            if keeps_pause and before is not None:
                definition = replace(definition, paused=before.definition.paused)
            if before is not None and before.definition == definition:
                return False
            self._room.check(topic, name, definition)
            waiting = self._withdrawn(topic, before)
            if not await self._wait_unchanged(topic, waiting):
                break
        after_ms = self._clock.now_ms()
        if before is not None:
            after_ms = self._goes_on_after_ms(topic, before, definition, waiting)
        await self._change(topic, RecurringStep(name, RecurringProgress(after_ms), definition), waiting)
        return before is None

    def _goes_on_after_ms(
        self, topic: Topic, before: RecurringStanding, definition: Definition, waiting: Waiting | None
    ) -> int:
        """Return the time after which a schedule that is replaced goes on.

        Never twice, also if the clock was set back: not before what was delivered. What somebody cancelled, or moved
        and received, does not come back while the schedule has the times that it had.
        """
        progress, now_ms = before.progress, self._clock.now_ms()
        is_due = progress.deliver_at_ms <= max(now_ms, self._unsent_after_ms(topic))
        if (definition.rule, definition.start_ms) == (before.definition.rule, before.definition.start_ms):
            return max(now_ms, progress.after_ms if waiting is not None else progress.through_ms)
        if is_due:
            return max(now_ms, progress.through_ms)
        # With other times, what was left out of the former ones holds nothing up.
        return max(now_ms, min(progress.after_ms, now_ms + OVERDUE_AFTER_MS))

    async def pause(self, topic: Topic, name: str, *, paused: bool) -> None:
        """Stop a schedule, or let it go on from now; returns when that is durable."""
        state = self.state(topic, name)
        await self.put(topic, name, replace(state.definition, paused=paused))

    async def delete(self, topic: Topic, name: str) -> None:
        """Delete a schedule; returns when that is durable."""
        while True:
            await self._free(topic, name)
            waiting = self._withdrawn(topic, self.state(topic, name))
            if not await self._wait_unchanged(topic, waiting):
                break
        await self._change(topic, RecurringStep(name, RecurringProgress(0), deleted=True), waiting)

    async def trigger(self, topic: Topic, name: str) -> tuple[Position, int]:
        """Store a message of a schedule now, and leave its times; returns its id and the time it names."""
        state = self.state(topic, name)
        time_ms = self._clock.now_ms()
        if time_ms == state.progress.ahead_ms:  # which may wait for its jitter under that key
            time_ms -= 1
        (position,) = await self._store_past(topic, name, state.definition, [time_ms])
        return position, time_ms

    async def backfill(
        self, topic: Topic, name: str, start_ms: int, end_ms: int, *, dry_run: bool
    ) -> tuple[list[int], int]:
        """Store the occurrences of a span of the past; returns them, and where the rest begins, if there is one.

        A refusal ends it: it is raised if nothing was stored, and otherwise met again by the call for the rest.
        """
        state = self.state(topic, name)
        if self._withdrawn(topic, state) is not None:  # it holds the key of its occurrence
            end_ms = min(end_ms, state.progress.ahead_ms)
        times: list[int] = []
        budget = YieldBudget(self._clock)
        rest_ms = 0
        for time_ms in read_occurrences(name, state.definition, start_ms - 1):
            if time_ms >= end_ms:
                break
            if len(times) == BACKFILL_MAX:
                rest_ms = time_ms
                break
            times.append(time_ms)
            await budget.spent()
        if dry_run:
            return times, rest_ms
        step = max(1, min(_BATCH_MESSAGES, _BATCH_BYTES // (len(state.definition.message) + 1)))
        for first in range(0, len(times), step):
            try:
                await self._store_past(topic, name, state.definition, times[first : first + step])
            except StorageFailed:  # this part is in doubt
                raise
            except PostdateError:
                if not first:
                    raise
                return times[:first], times[first]
        return times, rest_ms

    def state(self, topic: Topic, name: str) -> RecurringStanding:
        """The schedule of that name, or NotFound."""
        state = topic.recurring.get(name)
        if state is None:
            raise NotFound(
                f"Topic {topic.name!r} has no recurring schedule {name!r}",
                reason="RECURRING_NOT_FOUND",
                topic=topic.name,
            )
        return state

    def next_of(self, name: str, state: RecurringStanding) -> DueOccurrence | None:
        """The next occurrence of a schedule; None: there is none, or it is paused."""
        definition, progress, now_ms = state.definition, state.progress, self._clock.now_ms()
        if definition.paused:
            return None
        if progress.deliver_at_ms > now_ms:
            return DueOccurrence(progress.ahead_ms, progress.deliver_at_ms)
        time_ms = _checked(lambda: next_after(definition, max(progress.through_ms, now_ms)))
        return None if time_ms is None else occurrence(name, definition, time_ms)

    async def _store_past(
        self, topic: Topic, name: str, definition: Definition, times: Iterable[int]
    ) -> list[Position]:
        batch = OccurrenceBatch()
        batch.add(name, definition.message, [DueOccurrence(time_ms, 0) for time_ms in times])
        await self._wait_room()
        accepted = await topic.keyed.submit(batch.batch(), False)
        await asyncio.shield(accepted.durable)
        self._counters.recurring_stored += len(batch)
        return [
            Position(ids.ledger_id, ids.first_entry_id + at)
            for ids in accepted.ids
            for at in range(ids.count)
        ]

    async def _change(self, topic: Topic, step: RecurringStep, waiting: Waiting | None) -> None:
        """Submit a change in the step in which it was decided; returns when it is durable."""
        durable = self._submit(topic, (step,), [] if waiting is None else [waiting])
        await asyncio.shield(durable)

    def _submit(
        self, topic: Topic, steps: tuple[RecurringStep, ...], withdrawn: list[Waiting]
    ) -> asyncio.Future[None]:
        cancelled = Cancelled(topic.topic_id, _merged(withdrawn)) if withdrawn else None
        durable = topic.submit_change(Recurred(topic.topic_id, steps, None, cancelled))
        names = [step.name for step in steps]
        for step in steps:
            self._held[topic.topic_id, step.name] = durable
            if step.definition is not None:
                self._room.come(topic, step.name, step.definition)

        def release(_: asyncio.Future[None]) -> None:
            for name in names:
                del self._held[topic.topic_id, name]
                self._room.applied(topic, name)
                self._plan(topic, name)

        durable.add_done_callback(release)
        return durable

    async def _free(self, topic: Topic, name: str) -> None:
        """Return once nobody holds a schedule (FIRING-1)."""
        while (held := self._held.get((topic.topic_id, name))) is not None:
            await asyncio.wait([held])
            await asyncio.sleep(0)  # its callbacks let it go
        if topic.deleted:
            raise topic_not_found(topic.name)

    # -- the occurrence that is stored ahead -----------------------------------------------------------------

    def _withdrawn(self, topic: Topic, state: RecurringStanding | None) -> Waiting | None:
        """Return the message that a change of the schedule cancels: one that waits for its time."""
        waiting = None if state is None else self._waiting(topic, state.progress)
        if waiting is None or waiting.deliver_at_ms <= self._unsent_after_ms(topic):
            return None
        return waiting

    def _unsent_after_ms(self, topic: Topic) -> int:
        """Return the time after which nothing was sent to anybody."""
        return max(topic.frontier_ms, topic.index.reached_ms)

    def _waiting(self, topic: Topic, progress: RecurringProgress) -> Waiting | None:
        """The message that is stored ahead, if it is there and was not cancelled."""
        position = progress.position
        if position == START or topic.log.entry_count(position.ledger_id) is None:
            return None
        if position.ledger_id in topic.log.under_way.going:
            return None
        ids = np.array([position.entry_id], dtype=np.uint32)
        stored = np.array([progress.deliver_at_ms], dtype=np.int64)
        time_ms = int(topic.log.amendments.effective_now(position.ledger_id, ids, stored)[0])
        return Waiting(position, time_ms) if 0 < time_ms < CANCELLED_MS else None

    async def _wait_unchanged(self, topic: Topic, waiting: Waiting | None) -> bool:
        """Wait while somebody cancels or moves what waits; returns whether that was so: then look again."""
        if waiting is None or not common_entries(waiting.entries, topic.log.under_way.changing):
            return False
        await topic.log.under_way.wait_unchanged(waiting.entries)
        return True


def _merged(withdrawn: list[Waiting]) -> dict[int, Changed]:
    """Return the part of a record that cancels all of them."""
    ledgers: dict[int, list[tuple[int, int]]] = {}
    for waiting in withdrawn:
        ledgers.setdefault(waiting.position.ledger_id, []).append(
            (waiting.position.entry_id, waiting.deliver_at_ms)
        )
    merged = {}
    for ledger_id, entries in ledgers.items():
        ids, times = zip(*sorted(entries), strict=True)
        merged[ledger_id] = Changed(np.array(ids, dtype=np.uint32), np.array(times, dtype=np.int64))
    return merged


def _checked(work: Callable[[], T]) -> T | None:
    """Return the answer of a rule; None if it cannot be read here: a zone may be missing on this machine."""
    try:
        return work()
    except (LookupError, ValueError, OSError):
        return None
