"""Steps of changes by a filter, each made by a test as the work of bulk changes makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from broker.delayed.due_rows import Key
from broker.storage.changes import Cancelled, Moved
from broker.topics.schedule_values import Change, DueRange, Outcome, OutcomeColumns
from broker.topics.topic import Topic


async def change_next(
    topic: Topic,
    due: DueRange,
    key_prefix: str,
    change: Change,
    *,
    start: Key = (0, 0, 0),
    limit: int = 1_000,
    moved_before_lsn: int = 0,
    dry_run: bool = False,
) -> tuple[Sequence[Outcome], Key | None]:
    """Change the next messages; returns what became of those that matched, and where it goes on."""
    told: list[tuple[Sequence[Outcome], Key | None]] = []

    def submit(
        record: Cancelled | Moved | None, outcomes: OutcomeColumns, _: int, following: Key | None
    ) -> asyncio.Future[None]:
        told.append((list(outcomes.found()), following))
        if record is not None:
            return topic.submit_change(record)
        nothing = asyncio.get_running_loop().create_future()
        nothing.set_result(None)
        return nothing

    await topic.schedule.change_next(
        due,
        key_prefix,
        change,
        start,
        limit,
        moved_before_lsn=moved_before_lsn,
        dry_run=dry_run,
        submit=submit,
    )
    (step,) = told
    return step
