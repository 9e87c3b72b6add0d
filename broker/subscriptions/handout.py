"""Base that the dispatchers of all subscription types share: reading what was taken, the last look, the hand-out.

Invariants:
  HANDOUT-1  No `await` lies between the last look and the hand-out: what is settled, leased, promised or too early at
      that moment is not sent (P2, P5).
  HANDOUT-2  Whatever is taken from a source is delivered, found to be somebody else's (settled, leased, waiting), or
      put back; an error or a vanished consumer puts it back too (P3).
  HANDOUT-3  What is settled is not read, and damage costs what it hit: a damaged message is set aside, entries of
      which not even the rows can be read wait, and the others go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from broker.delayed.due_rows import DueRows
from broker.errors import Corrupt, NotFound
from broker.model import (
    ROW,
    Array,
    Entries,
    Int64Column,
    RowColumn,
    UInt32Column,
    bitmap_of,
    distinct_values,
    merge_entries,
)
from broker.observe import spans
from broker.observe.spans import HandedMessage
from broker.runtime.clock import Clock
from broker.storage.alive import within
from broker.storage.log import with_expiry_moved
from broker.storage.salvage import NO_FRAME, read_around_damage
from broker.storage.traceparents import find_traceparents
from broker.subscriptions.consumer import Consumer, DeliveryBatch, prefix_within
from broker.subscriptions.damage import meet_damage
from broker.subscriptions.leases import lease_end_ns
from broker.subscriptions.subscription import Subscription

_SPANS_MAX = 64
"""Messages of one hand-out that are told as spans: each costs the loop some of the time that the next ones wait."""
_WINDOW_ENTRIES = 32_768
"""Due entries that are read together, at most, if their bytes fit into a frame."""


@dataclass(slots=True)
class Taken:
    """Entries taken from one source, in the order in which they are to be delivered."""

    ledger_ids: Int64Column
    entry_ids: UInt32Column
    expected_ms: Int64Column | None  # from a chunk: the time under which each was indexed
    from_redelivery: bool
    in_order: bool  # of one ledger, ids rising: nearly always so, and much cheaper


@dataclass(slots=True)
class Read:
    """Taken entries with what the log says of them; aligned with `Taken`. Frames of a prefix only."""

    times: Int64Column
    rows: RowColumn
    frames: list[bytes]
    version: int  # of the log's amendments, before this was read
    has_doubles: bool = False  # an entry was taken twice: moved, it is in a chunk under each of its times
    unread: Array | None = None  # where nothing was read, and is not to be sent; None: nowhere


@dataclass(slots=True)
class Window:
    """Due entries that were taken from the replay queue and read together; the first ones are handed out next.

    A herd's entries lie scattered over the log. Read a few thousand at a time, they would cost a read each; read in
    windows they are neighbours. What a consumer cannot take yet stays here instead of being read again.
    """

    taken: Taken
    read: Read
    clears: int  # of the replay queue when they were taken

    def first(self, count: int) -> tuple[Taken, Read]:
        """The first ones."""
        head = slice(0, count)
        return _part(self.taken, head), _read_part(self.read, head)

    def after(self, count: int) -> Window | None:
        """Return what is left when the first `count` are done with."""
        taken, read, rest = self.taken, self.read, slice(count, None)
        if count >= len(taken.entry_ids):
            return None
        assert taken.expected_ms is not None
        return Window(_part(taken, rest), _read_part(read, rest), self.clears)


class HandOut:
    """Reads entries of one subscription, looks at them one last time, and hands them out."""

    def __init__(self, subscription: Subscription, clock: Clock) -> None:
        self._subscription = subscription
        self._clock = clock

    def fitting_frame(self) -> int:
        """Return how many typical messages fit into a frame."""
        subscription = self._subscription
        return max(1, subscription.limits.batch_bytes // subscription.log.frame_bytes_average)

    async def read(self, taken: Taken) -> Read:
        """Read rows and frames, ledger by ledger, and bring them into the order of delivery."""
        bytes_max = self._subscription.limits.batch_bytes
        version = self._subscription.log.amendments.version
        first = int(taken.ledger_ids[0])
        if taken.in_order:
            some_times, some_rows, some_frames, some_unread = await self._read_ledger(
                first, taken.entry_ids, bytes_max
            )
            return Read(some_times, some_rows, some_frames, version, unread=some_unread)
        return await self._read_scattered(taken, version)

    async def _read_scattered(self, taken: Taken, version: int) -> Read:
        """Read entries of a chunk: sorted, those of a ledger together, then put back into the order of delivery."""
        bytes_max = self._subscription.limits.batch_bytes
        assert taken.expected_ms is not None
        order = np.lexsort((taken.entry_ids, taken.ledger_ids))
        ledger_ids, entry_ids = taken.ledger_ids[order], taken.entry_ids[order]
        is_double = (np.diff(entry_ids, prepend=0) == 0) & (np.diff(ledger_ids, prepend=-1) == 0)
        starts = np.flatnonzero(np.diff(ledger_ids, prepend=-1))
        times, rows, frames = [], [], []
        unread = np.zeros(len(order), dtype=np.bool_)
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
            wanted_ids = entry_ids[start:end][~is_double[start:end]]
            some_times, some_rows, some_frames, some_unread = await self._read_ledger(
                int(ledger_ids[start]), wanted_ids, bytes_max
            )
            # b"" stands for a frame that was not read, as no frame is empty.
            some_frames = [*some_frames, *[b""] * (len(wanted_ids) - len(some_frames))]
            if some_unread is None:
                some_unread = np.zeros(len(wanted_ids), dtype=np.bool_)
            if len(wanted_ids) < end - start:
                again = np.cumsum(~is_double[start:end]) - 1
                some_times, some_rows, some_unread = some_times[again], some_rows[again], some_unread[again]
                some_frames = [some_frames[i] for i in again.tolist()]
            unread[start:end] = some_unread
            times.append(some_times)
            rows.append(some_rows)
            frames += some_frames
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        in_order = [frames[i] for i in place.tolist()]
        whole = next((i for i, frame in enumerate(in_order) if not frame), len(in_order))
        rows_in_order = np.concatenate(rows)[place]
        wanted = max(1, prefix_within(rows_in_order["length"], bytes_max))
        frames = in_order[:whole]
        if whole < wanted:
            # The bytes went to entries that come later: read just those that come first, which fit.
            first_ones = DueRows(
                taken.expected_ms[:wanted], taken.ledger_ids[:wanted], taken.entry_ids[:wanted]
            )
            frames = (await self.read(taken_from_chunk(first_ones))).frames
        return Read(
            np.concatenate(times)[place],
            rows_in_order,
            frames,
            version,
            bool(is_double.any()),
            unread[place] if unread.any() else None,
        )

    async def _read_ledger(
        self, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
    ) -> tuple[Int64Column, RowColumn, list[bytes], Array | None]:
        """Times and rows, frames of a prefix, and where nothing was read (None: nowhere)."""
        settled = self._subscription.cursor.settled_mask(ledger_id, entry_ids)
        if settled is None:
            return await self._read_unsettled(ledger_id, entry_ids, bytes_max)
        count = len(entry_ids)
        times, rows, unread = np.zeros(count, np.int64), np.zeros(count, ROW), settled
        at = np.flatnonzero(~unread)
        some_frames: list[bytes] = []
        if len(at):
            times[at], rows[at], some_frames, some_unread = await self._read_unsettled(
                ledger_id, entry_ids[at], bytes_max
            )
            if some_unread is not None:
                unread[at] = some_unread
        frames = [NO_FRAME] * (int(at[len(some_frames)]) if len(some_frames) < len(at) else count)
        for place, frame in zip(at.tolist(), some_frames, strict=False):
            frames[place] = frame
        return times, rows, frames, unread

    async def _read_unsettled(
        self, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
    ) -> tuple[Int64Column, RowColumn, list[bytes], Array | None]:
        log = self._subscription.log
        try:
            try:
                return *await log.read(ledger_id, entry_ids, bytes_max), None
            except Corrupt:
                salvaged = await read_around_damage(log, ledger_id, entry_ids, bytes_max)
        except NotFound:  # the ledger was dropped, so these are settled
            count = len(entry_ids)
            everything = np.ones(count, dtype=np.bool_)
            return np.zeros(count, np.int64), np.zeros(count, ROW), [NO_FRAME] * count, everything
        meet_damage(self._subscription, ledger_id, entry_ids, salvaged)
        return salvaged.times, salvaged.rows, salvaged.frames, salvaged.damaged | salvaged.unreadable

    def last_look(self, taken: Taken, read: Read, now_ms: int) -> Array:
        """Return which entries may be sent now. What is too early waits for its time, what is expired is settled."""
        subscription = self._subscription
        keep = ~self._refused(taken)
        if read.unread is not None:
            keep &= ~read.unread
        sendable_count = int(np.count_nonzero(keep))
        has_changed = read.version != subscription.log.amendments.version
        if has_changed:
            self._refresh(taken, read)
        if taken.expected_ms is not None:
            keep &= read.times == taken.expected_ms  # else: moved since, and indexed under its new time too
        if read.has_doubles:
            keep &= _is_first(taken, keep)
        there_count = int(np.count_nonzero(keep))
        if subscription.absences and not taken.from_redelivery:
            keep &= ~within(read.times, subscription.absences)
        held_count = int(np.count_nonzero(keep))
        if subscription.honors_delay:
            early = keep & (read.times > now_ms)
            keep &= ~early
            if has_changed or not taken.from_redelivery:
                early &= read.times <= subscription.frontier_ms  # else it was moved, and comes in a chunk
            if early.any():
                self._wait_for_time(taken, read, early)
        counters = subscription.counters
        counters.dropped_settled_messages += len(keep) - sendable_count
        counters.dropped_moved_messages += sendable_count - there_count
        counters.dropped_early_messages += held_count - int(np.count_nonzero(keep))
        expire_at_ms = read.rows["expire_at_ms"]
        expired = keep & (expire_at_ms != 0) & (expire_at_ms <= now_ms)
        if expired.any():
            keep &= ~expired
            subscription.decisions.expire(entries_in(taken, np.flatnonzero(expired)))
        return keep

    def _refresh(self, taken: Taken, read: Read) -> None:
        """Read the times again after a cancel or move."""
        amendments, now = self._subscription.log.amendments, read.times.copy()
        for ledger_id in distinct_values(taken.ledger_ids).tolist():
            at = np.flatnonzero(taken.ledger_ids == ledger_id)
            now[at] = amendments.effective_now(ledger_id, taken.entry_ids[at], read.times[at])
        read.rows = with_expiry_moved(read.rows, read.times, now)
        read.times, read.version = now, amendments.version

    def _refused(self, taken: Taken) -> Array:
        subscription = self._subscription
        first = int(taken.ledger_ids[0])
        if taken.in_order:
            return subscription.not_to_send(first, taken.entry_ids)
        refused = np.zeros(len(taken.entry_ids), dtype=np.bool_)
        for ledger_id in distinct_values(taken.ledger_ids).tolist():
            at = np.flatnonzero(taken.ledger_ids == ledger_id)
            ids = taken.entry_ids[at]
            order = np.argsort(ids, kind="stable")
            refused[at[order]] = subscription.not_to_send(ledger_id, ids[order])
        return refused

    def _wait_for_time(self, taken: Taken, read: Read, early: Array) -> None:
        """The clock stepped back: what came too early is never dropped, it waits for its own time."""
        for time_ms in distinct_values(read.times[early]).tolist():
            at = np.flatnonzero(early & (read.times == time_ms))
            self._subscription.states.put_back(time_ms, entries_in(taken, at))

    def fitting(self, consumer: Consumer, lengths: Array) -> int:
        """Count the messages that fit the pacing and the consumer's permits; a larger one is sent when it holds
        nothing. They must be delivered now, as the room for them is taken."""
        fitting = min(len(lengths), max(0, consumer.permits), self._subscription.pacing.room)
        if fitting and consumer.counts_bytes:
            fitting = min(fitting, prefix_within(lengths, consumer.permit_bytes))
            if not fitting and not self._subscription.states.leases.held(consumer.consumer_id):
                fitting = 1
            consumer.starved = not fitting  # until it grants more, or is done with something
        if fitting and consumer.room is not None:
            return consumer.room.fitting(lengths[:fitting])
        return fitting

    def deliver(self, consumer: Consumer, taken: Taken, read: Read, chosen: Array, now_ms: int) -> None:
        """Hand the chosen entries to a consumer."""
        subscription = self._subscription
        ledger_ids, entry_ids = taken.ledger_ids[chosen], taken.entry_ids[chosen]
        rows = read.rows[chosen]
        frames = read.frames if len(chosen) == len(read.frames) else [read.frames[i] for i in chosen.tolist()]
        effective_ms = np.maximum(read.times[chosen], rows["publish_time_ms"])
        frames_bytes = int(rows["length"].sum())
        batch = DeliveryBatch(
            ledger_ids=ledger_ids,
            entry_ids=entry_ids,
            deliver_at_ms=effective_ms,
            rows=rows,
            frames=frames,
            attempts=self.attempts(ledger_ids, entry_ids),
            frames_bytes=frames_bytes,
        )
        now_ns = self._clock.monotonic_ns()
        deadline_ns = lease_end_ns(now_ns, consumer.lease_ms)
        subscription.pacing.handed_out(len(batch), now_ns)
        subscription.states.handed_out(consumer.consumer_id, entries_in(taken, chosen), deadline_ns)
        consumer.charge(len(batch), frames_bytes)
        consumer.deliver(batch)
        counters = subscription.counters
        counters.delivered_messages += len(batch)
        counters.delivered_bytes += frames_bytes
        if subscription.honors_delay:
            counters.early_deliveries += int((read.times[chosen] > now_ms).sum())
        late_ms = now_ms - effective_ms
        if spans.tracing is not None:
            traced = _traced_messages(batch, late_ms)
            spans.tracing.handed_out(subscription.topic_name, subscription.image.name, traced)
        if held_through_ms := subscription.pacing.held_through_ms:
            was_held = effective_ms <= held_through_ms
            counters.paced_lateness.observe_many(late_ms[was_held])
            late_ms = late_ms[~was_held]
        counters.lateness.observe_many(late_ms)

    def attempts(self, ledger_ids: Int64Column, entry_ids: UInt32Column) -> UInt32Column:
        """Return which delivery of each entry the next one would be: 1 for the first."""
        attempts = np.ones(len(entry_ids), dtype=np.uint32)
        counted = self._subscription.attempts
        for ledger_id in counted.digits.keys() & set(ledger_ids.tolist()) if counted.digits else ():
            at = np.flatnonzero(ledger_ids == ledger_id)
            order = at[np.argsort(entry_ids[at], kind="stable")]
            attempts[order] += counted.counts(ledger_id, entry_ids[order])
        return attempts

    def put_back(self, taken: Taken, at: Array | slice) -> None:
        """Put entries back that were not handed out, in front; they were not sent, so no attempt is counted."""
        subscription = self._subscription
        if taken.expected_ms is None:
            subscription.states.put_back(0, entries_in(taken, at))
        elif subscription.consumers and len(taken.entry_ids[at]):
            # Back where it was: a set of positions would forget the due order. If catch-up began meanwhile it finds
            # these again, and whoever comes second is refused by the last look; if nobody is left, it will find them.
            subscription.replay.put_back(
                DueRows(taken.expected_ms[at], taken.ledger_ids[at], taken.entry_ids[at])
            )


class DueWindows:
    """The replay queue, read in windows. `rest` is what is left of the last one."""

    def __init__(self, subscription: Subscription, hand_out: HandOut) -> None:
        self.rest: Window | None = None
        self._subscription = subscription
        self._hand_out = hand_out

    def put_back(self) -> None:
        """Forget the bytes of what is left: it is read again when there is room for it."""
        window, self.rest = self.rest, None
        if window is not None and window.clears == self._subscription.replay.clears:
            self._hand_out.put_back(window.taken, slice(None))

    async def next(self) -> Window | None:
        """Due entries that were read: what is left of the last window, or the next one; None if nothing is due."""
        replay, window = self._subscription.replay, self.rest
        self.rest = None
        if window is not None and window.clears == replay.clears:
            return window
        chunk = replay.take(min(_WINDOW_ENTRIES, self._hand_out.fitting_frame()))
        if chunk is None:
            return None
        taken, clears = taken_from_chunk(chunk), replay.clears
        try:
            read = await self._hand_out.read(taken)
        except BaseException:
            if clears == replay.clears:
                self._hand_out.put_back(taken, slice(None))
            raise
        if clears != replay.clears:
            return None  # catch-up has begun meanwhile, and finds them
        count = len(read.frames)
        if count < len(taken.entry_ids):  # as many as their bytes allow
            self._hand_out.put_back(taken, slice(count, None))
            taken, read = _part(taken, slice(0, count)), _read_part(read, slice(0, count))
        return Window(taken, read, clears)


def taken_from_ledger(ledger_id: int, entry_ids: UInt32Column, *, from_redelivery: bool) -> Taken:
    """Entries of one ledger, ids rising, under whatever time they have."""
    ledger_ids = np.full(len(entry_ids), ledger_id, dtype=np.int64)
    return Taken(ledger_ids, entry_ids, None, from_redelivery, in_order=True)


def taken_from_chunk(chunk: DueRows) -> Taken:
    """Entries of a chunk, each under the time that the chunk gives it."""
    ledger_ids, entry_ids = chunk.ledger_ids, chunk.entry_ids
    in_order = len(entry_ids) == 1 or (
        int(ledger_ids[0]) == int(ledger_ids[-1])
        and bool((ledger_ids == ledger_ids[0]).all())
        and bool((entry_ids[1:] > entry_ids[:-1]).all())
    )
    return Taken(ledger_ids, entry_ids, chunk.deliver_at_ms, from_redelivery=False, in_order=in_order)


def entries_in(taken: Taken, at: Array | slice) -> Entries:
    """The set of some of the entries."""
    entries: Entries = {}
    ledger_ids, entry_ids = taken.ledger_ids[at], taken.entry_ids[at]
    if not len(entry_ids):
        return entries
    first = int(ledger_ids[0])
    if taken.in_order:
        return {first: bitmap_of(entry_ids)}
    for ledger_id in distinct_values(ledger_ids).tolist():
        merge_entries(entries, {ledger_id: bitmap_of(entry_ids[ledger_ids == ledger_id])})
    return entries


def _traced_messages(batch: DeliveryBatch, late_ms: Int64Column) -> list[HandedMessage]:
    """Return the messages whose producers' spans are sampled, the first ones."""
    return [
        HandedMessage(
            traceparent,
            f"{batch.ledger_ids[place]}:{batch.entry_ids[place]}",
            int(late_ms[place]),
            int(batch.attempts[place]),
        )
        for place, traceparent in find_traceparents(batch.frames, sampled=True, looks_max=_SPANS_MAX)
    ]


def _is_first(taken: Taken, keep: Array) -> Array:
    """Of entries that were taken twice and are both wanted, the first one."""
    at = np.flatnonzero(keep)
    order = at[np.lexsort((at, taken.entry_ids[at], taken.ledger_ids[at]))]
    is_first = np.ones(len(keep), dtype=np.bool_)
    same = (np.diff(taken.ledger_ids[order]) == 0) & (np.diff(taken.entry_ids[order]) == 0)
    is_first[order[1:][same]] = False
    return is_first


def _part(taken: Taken, rows: slice) -> Taken:
    assert taken.expected_ms is not None
    return Taken(
        taken.ledger_ids[rows],
        taken.entry_ids[rows],
        taken.expected_ms[rows],
        taken.from_redelivery,
        taken.in_order,
    )


def _read_part(read: Read, rows: slice) -> Read:
    unread = read.unread if read.unread is None else read.unread[rows]
    return Read(read.times[rows], read.rows[rows], read.frames[rows], read.version, read.has_doubles, unread)
