"""The bulk changes of one topic as durable state: what each is to do, how far it has come, how it ended. Pure.

    BulkChanges decides (`bulk_changes.py`) -> one record: messages that are changed, and the step -> `apply`

Invariants:
  BULK-1  A bulk change moves on by the record that changes the messages on its way and by no other, so that no crash
      skips or doubles a step.
  BULK-2  One that has ended takes no further step.
"""

from __future__ import annotations

from dataclasses import replace

from broker.storage.bulk import BulkEnd, BulkImage, BulkStanding, BulkStep
from broker.storage.manifest import TopicImage
from broker.storage.records import BulkStepped, Record
from broker.topics.component import Capture, NewFile, not_applied


class TopicBulkChanges:
    """See the module's description."""

    def __init__(self, image: BulkImage | None = None, file: str = "") -> None:
        """`file`: its name in `cursors/`, of which `image` is the content."""
        self.last_id = image.last_id if image else 0
        """The greatest number that was given to one."""
        self._by_id: dict[int, BulkStanding] = dict(image.by_id) if image else {}  # rising
        self._changed = False
        self._file = file

    def get(self, bulk_id: int) -> BulkStanding | None:
        """The bulk change of that number."""
        return self._by_id.get(bulk_id)

    def ids(self) -> list[int]:
        """All numbers, rising."""
        return list(self._by_id)

    def unended_ids(self) -> list[int]:
        """Numbers of those that have not ended, in the order in which they are made."""
        return [bulk_id for bulk_id, standing in self._by_id.items() if not standing.end]

    def with_request_id(self, request_id: str) -> int | None:
        """Return the number of the one that a call with this request_id began."""
        for bulk_id, standing in self._by_id.items():
            if standing.definition.request_id == request_id:
                return bulk_id
        return None

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`."""
        match record:
            case BulkStepped():
                for bulk_id in record.step.forgotten_ids:
                    self._by_id.pop(bulk_id, None)
                self._step(record.step, lsn)
                self._changed = True
            case _:
                not_applied(self, record)

    def _step(self, step: BulkStep, lsn: int) -> None:
        if step.definition is not None:
            self._by_id[step.bulk_id] = BulkStanding(step.definition)
            self.last_id = max(self.last_id, step.bulk_id)
            return
        before = self._by_id.get(step.bulk_id)
        if before is None or before.end:  # BULK-2
            return
        self._by_id[step.bulk_id] = replace(
            before,
            progress=step.progress or before.progress,
            first_lsn=before.first_lsn or lsn,
            end=step.end,
            end_ms=step.end_ms,
            failure_reason=step.failure_reason,
            failure=step.failure,
        )

    def forgotten_with(self, ending: int, kept: int) -> tuple[int, ...]:
        """Return which of those that ended go if `ending` more end and `kept` are kept: the oldest, dry runs first.

        A call that repeats the request_id of a change that is forgotten makes it again; counts must not bring that on.
        """
        ended = [
            (not standing.definition.dry_run, bulk_id)
            for bulk_id, standing in self._by_id.items()
            if standing.end is not BulkEnd.NONE
        ]
        return tuple(bulk_id for _, bulk_id in sorted(ended)[: max(0, len(ended) + ending - kept)])

    def capture(self, image: TopicImage) -> Capture:
        """See `Component`."""
        if not self._changed:
            return Capture(replace(image, bulk_file=self._file))
        self._changed = False
        before, self._file = self._file, f"bulk.{image.applied_lsn:x}"
        content = BulkImage(image.topic_id, self.last_id, dict(self._by_id))
        return Capture(
            replace(image, bulk_file=self._file),
            files=(NewFile(f"cursors/{self._file}", content.encode),),
            replaced=(f"cursors/{before}",) if before not in ("", self._file) else (),
        )
