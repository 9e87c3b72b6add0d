"""A model of what bulk changes of a topic may do, judged by the records that its brokers apply, whoever applies one first.

A record that was applied is durable: whatever comes after it, in whichever life, has to go on from there. The model
knows of each message its time, and of each bulk change which messages it had to change with a step and which it might.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from broker.model import CANCELLED_MS, Position
from broker.storage.bulk import BulkEnd, BulkKind, BulkStanding, BulkStep, DuePlace
from broker.storage.changes import Cancelled, Moved
from broker.storage.message_fields import body_at
from broker.storage.records import BulkStepped, Produced, Record
from broker.testing.sim_clock import SimClock
from broker.topics.topic import Topic
from postdate_api.v1 import message_pb2
from tests.harness import Delivered

_LAST: DuePlace = (CANCELLED_MS, 0, 0)


@dataclass(slots=True)
class BulkMessage:
    """A message as its records say."""

    key: str
    due_ms: int
    publish_ms: int
    changed_lsn: int
    revision: int = 0
    is_cancelled: bool = False
    is_delivered: bool = False
    was_delivered: bool = False  # also where the broker does not know any more


@dataclass(slots=True)
class BulkTrack:
    """A bulk change as its records say, and the messages it has changed."""

    standing: BulkStanding
    lsn: int  # of its last record
    changed: set[Position] = field(default_factory=set)
    is_forgotten: bool = False


class BulkModel:
    """See the module's description."""

    def __init__(self, kept: int) -> None:
        """`kept`: of bulk changes that ended."""
        self.kept = kept
        self.messages: dict[Position, BulkMessage] = {}
        self.tracks: dict[int, BulkTrack] = {}
        self.latest_ms = 0
        """The latest time that any clock of a broker has shown: what is due after it was sent to nobody."""
        self.before_record: Callable[[], None] = lambda: None
        """Tells what was delivered until now."""
        self._records: dict[int, list[bytes]] = {}

    def watch(self, apply: Callable[[Topic, Record, int], None]) -> Callable[[Topic, Record, int], None]:
        """Return a `Topic.apply` that is seen by the model."""

        def watched(topic: Topic, record: Record, lsn: int) -> None:
            body = [bytes(part) for part in record.encode()]
            if lsn in self._records:
                assert body == self._records[lsn], f"lsn {lsn} has two records"
            else:
                assert lsn > next(reversed(self._records), 0)
                self._records[lsn] = body
                self.before_record()
                self._meet(record, lsn)
            apply(topic, record, lsn)

        return watched

    def tick(self, clock: SimClock) -> None:
        """Note what a clock shows, before it is set and before anything is judged by it."""
        self.latest_ms = max(self.latest_ms, clock.now_ms())

    def delivered(self, arrived: list[Delivered]) -> None:
        for each in arrived:
            message = self.messages[each.position]
            assert not message.is_cancelled, f"{message.key} was delivered after its cancel"
            told_ms = max(message.due_ms, message.publish_ms)
            assert each.deliver_at_ms == told_ms, f"{message.key} was delivered at a time it has no more"
            assert each.sent_ms >= message.due_ms, f"{message.key} was delivered too early"
            message.is_delivered = message.was_delivered = True

    def restarts(self, clock: SimClock) -> None:
        """A broker begins: what was due by a clock far ahead of this one counts as not sent."""
        self.tick(clock)
        for message in self.messages.values():
            message.is_delivered &= message.due_ms <= clock.now_ms()

    # -- records ---------------------------------------------------------------------------------------------

    def _meet(self, record: Record, lsn: int) -> None:
        match record:
            case Produced():
                at = 0
                for row, time_ms in enumerate(record.times.tolist()):
                    frame = bytes(record.frames[at : (at := at + int(record.rows["length"][row]))])
                    key = message_pb2.Message.FromString(frame[body_at(frame) :]).schedule_key
                    position = Position(record.ledger_id, record.first_entry_id + row)
                    self.messages[position] = BulkMessage(
                        key, time_ms or record.publish_time_ms, record.publish_time_ms, lsn
                    )
            case Cancelled() | Moved():
                self._change(record, lsn)
            case BulkStepped(step=BulkStep(definition=None)):
                self._step(record, lsn)
            case BulkStepped(step=BulkStep(bulk_id=bulk_id, definition=definition)):
                assert definition is not None and bulk_id == max(self.tracks, default=0) + 1
                self.tracks[bulk_id] = BulkTrack(BulkStanding(definition), lsn)

    def _step(self, record: BulkStepped, lsn: int) -> None:
        step, track = record.step, self.tracks[record.step.bulk_id]
        before = track.standing
        assert not before.end, "it goes on after its end"
        if step.progress is None:
            assert record.change is None and step.end in (BulkEnd.CANCELLED, BulkEnd.FAILED)
        else:
            assert step.end in (BulkEnd.NONE, BulkEnd.DONE)
            earlier = [each for bulk_id, each in self.tracks.items() if bulk_id < step.bulk_id]
            assert all(each.standing.end for each in earlier), "it did not wait for those before it"
            self._judge(track, record, _LAST if step.end else step.progress.place)
        track.standing = replace(
            before,
            progress=step.progress or before.progress,
            first_lsn=before.first_lsn or lsn,
            end=step.end,
            end_ms=step.end_ms,
            failure_reason=step.failure_reason,
            failure=step.failure,
        )
        track.lsn = lsn
        for bulk_id in step.forgotten_ids:
            assert self.tracks[bulk_id].standing.end and bulk_id != step.bulk_id
            self.tracks[bulk_id].is_forgotten = True
        ended = [each for each in self.tracks.values() if each.standing.end]
        assert sum(not each.is_forgotten for each in ended) >= min(self.kept, len(ended))
        if record.change is not None:
            self._change(record.change, lsn)

    def _judge(self, track: BulkTrack, record: BulkStepped, end: DuePlace) -> None:
        """A step skips nothing that it met, takes nothing else, nothing twice, and counts what it took."""
        before, progress = track.standing, record.step.progress
        assert progress is not None
        definition = before.definition
        is_cancel = definition.kind is BulkKind.CANCEL
        assert end > before.progress.place, "a step goes forward"
        # It began when the step before was applied, its own or the last one of those before it.
        began_lsn = max(each.lsn for bulk_id, each in self.tracks.items() if bulk_id <= record.step.bulk_id)
        had_to, might, changed = set(), set(), set()
        for position, message in self.messages.items():
            is_met = before.progress.place <= (message.due_ms, *position) < end
            in_range = definition.start_ms <= message.due_ms < definition.end_ms
            if message.is_cancelled or not (
                is_met and in_range and message.key.startswith(definition.key_prefix)
            ):
                continue
            was_moved = before.first_lsn and message.revision and message.changed_lsn >= before.first_lsn
            if was_moved and not is_cancel:
                continue
            might.add(position)
            if message.changed_lsn <= began_lsn and message.due_ms > self.latest_ms + 1:
                had_to.add(position)
        for ledger_id, part in ({} if record.change is None else record.change.ledgers).items():
            changed |= {Position(ledger_id, entry_id) for entry_id in part.entry_ids.tolist()}
        assert changed <= might, "it changed what did not match"
        assert is_cancel == isinstance(record.change, Cancelled) or not changed
        assert not changed & track.changed, "it changed a message twice"
        done = progress.done - before.progress.done
        matched = progress.matched - before.progress.matched
        examined = progress.examined - before.progress.examined
        to_no_other_time = {
            each for each in might - changed if self._stays(definition.kind, definition.new_ms, each)
        }
        if definition.dry_run:
            assert not changed
            assert len(had_to) <= done <= matched <= len(might)
        else:
            assert had_to - to_no_other_time <= changed, "it skipped a message"
            assert len(changed) <= done <= len(changed | to_no_other_time), (
                "it counted what it did not change"
            )
            assert len(had_to | changed) <= matched <= len(might)
        assert examined >= matched
        if not is_cancel and record.change is not None:
            self._judge_times(definition.kind, definition.new_ms, record.change)
        track.changed |= changed

    def _stays(self, kind: BulkKind, new_ms: int, position: Position) -> bool:
        """Return whether its new time may be the one that it has; a time that has passed becomes the next one there is."""
        if kind is BulkKind.CANCEL:
            return False
        due_ms = self.messages[position].due_ms
        wanted_ms = due_ms + new_ms if kind is BulkKind.SHIFT else new_ms
        return wanted_ms == due_ms or wanted_ms < due_ms <= self.latest_ms + 1

    def _judge_times(self, kind: BulkKind, new_ms: int, change: Cancelled | Moved) -> None:
        for part in change.ledgers.values():
            assert part.new_ms is not None
            wanted = part.old_ms + new_ms if kind is BulkKind.SHIFT else np.full(len(part.old_ms), new_ms)
            has_passed = (part.new_ms > wanted) & (part.new_ms <= self.latest_ms + 1)
            assert ((part.new_ms == wanted) | has_passed).all(), "a message got another time"

    def _change(self, change: Cancelled | Moved, lsn: int) -> None:
        for ledger_id, part in change.ledgers.items():
            for row, entry_id in enumerate(part.entry_ids.tolist()):
                message = self.messages[Position(ledger_id, entry_id)]
                assert not message.is_cancelled, f"{message.key} was changed after its cancel"
                assert not message.is_delivered, f"{message.key} was changed after it was delivered"
                assert part.old_ms[row] == message.due_ms
                message.changed_lsn = lsn
                if part.new_ms is None:
                    message.is_cancelled = True
                else:
                    message.due_ms = int(part.new_ms[row])
                    message.revision += 1

    # -- what a broker shows ----------------------------------------------------------------------------------

    def check_shown(self, topic: Topic) -> None:
        """Each bulk change is shown as its records say, and none is lost."""
        kept = {bulk_id: each.standing for bulk_id, each in self.tracks.items() if not each.is_forgotten}
        assert {bulk_id: topic.bulk.get(bulk_id) for bulk_id in topic.bulk.ids()} == kept

    async def check_messages(self, topic: Topic) -> None:
        """Messages that are left have the times that their records gave them."""
        for ledger in topic.log:
            ledger_id = ledger.name.ledger_id
            ids = np.arange(ledger.entry_count, dtype=np.uint32)
            amendments = topic.log.amendments.get(ledger_id)
            times = await topic.log.times_of(ledger_id, ids)
            for entry_id, time_ms in enumerate(times.tolist()):
                message = self.messages[Position(ledger_id, entry_id)]
                assert (time_ms >= CANCELLED_MS) == message.is_cancelled
                assert message.is_cancelled or time_ms in (0, message.due_ms)  # 0: it was due as it came
                if amendments is not None and not message.is_cancelled:
                    assert int(amendments.revisions_of(ids)[entry_id]) == message.revision
