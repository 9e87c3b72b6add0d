"""The recurring schedules of one topic as durable state: what each is, and how far it has come. Pure.

    RecurringSchedules decides (`recurring_schedules.py`) -> one record: occurrences and steps -> `apply`

Invariants:
  RECURRING-1  A schedule moves on by the record that stores its occurrences and by no other, so that no crash skips or
      doubles one.
  RECURRING-2  `position` names the occurrence that is stored ahead, if it was delayed when it was stored: what is
      cancelled when the schedule is paused, changed or deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from broker.model import START, Position
from broker.storage.manifest import TopicImage
from broker.storage.records import Record, Recurred
from broker.storage.recurring import RecurringImage, RecurringStanding, RecurringStep
from broker.storage.recurring_values import OverdueRuns
from broker.topics.component import Capture, NewFile, not_applied


class TopicRecurring:
    """See the module's description."""

    def __init__(self, image: RecurringImage | None = None, file: str = "") -> None:
        """`file`: its name in `cursors/`, of which `image` is the content."""
        self._by_name: dict[str, RecurringStanding] = dict(image.by_name) if image else {}
        self._names: list[str] | None = None  # sorted; None: to be sorted
        self._choosy = sum(map(_is_choosy, self._by_name.values()))
        self._byte_count = sum(state.definition.byte_count for state in self._by_name.values())
        self._changed = False
        self._file = file

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def get(self, name: str) -> RecurringStanding | None:
        """The schedule of that name."""
        return self._by_name.get(name)

    def names(self) -> Sequence[str]:
        """All names, sorted."""
        if self._names is None:
            self._names = sorted(self._by_name)
        return self._names

    @property
    def byte_count(self) -> int:
        """Bytes of all definitions."""
        return self._byte_count

    @property
    def has_overdue_action(self) -> bool:
        """Return whether a schedule leaves out occurrences that were missed."""
        return self._choosy > 0

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`."""
        match record:
            case Recurred():
                for step in record.steps:
                    self._step(step, record)
                self._changed = True
            case _:
                not_applied(self, record)

    def _step(self, step: RecurringStep, record: Recurred) -> None:
        before = self._by_name.pop(step.name, None) if step.deleted else self._by_name.get(step.name)
        definition = step.definition or (before.definition if before else None)
        if before is not None:
            self._choosy -= _is_choosy(before)
            self._byte_count -= before.definition.byte_count
        if step.deleted or definition is None:
            self._names = None
            return
        if before is None:
            self._names = None
        progress = replace(step.progress, position=_position(step, record))
        state = self._by_name[step.name] = RecurringStanding(definition, progress)
        self._choosy += _is_choosy(state)
        self._byte_count += definition.byte_count

    def capture(self, image: TopicImage) -> Capture:
        """See `Component`."""
        if not self._changed:
            return Capture(replace(image, recurring_file=self._file))
        self._changed = False
        before, self._file = self._file, f"recurring.{image.applied_lsn:x}" if self._by_name else ""
        content = RecurringImage(image.topic_id, dict(self._by_name))
        return Capture(
            replace(image, recurring_file=self._file),
            files=(NewFile(f"cursors/{self._file}", content.encode),) if self._file else (),
            replaced=(f"cursors/{before}",) if before not in ("", self._file) else (),
        )


def _position(step: RecurringStep, record: Recurred) -> Position:
    """Return the place of the occurrence that is stored ahead (RECURRING-2)."""
    produced = record.produced
    if produced is None or not step.progress.ahead_ms or not produced.times[step.place]:
        return START
    return Position(produced.ledger_id, produced.first_entry_id + step.place)


def _is_choosy(state: RecurringStanding) -> bool:
    return state.definition.overdue is not OverdueRuns.ALL and not state.definition.paused
