"""`postdate bench replay`: a real log through the broker, on time."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from rich.progress import Progress

import postdate
from postdate._time import epoch_ms, moment
from postdate.commands.logtimes import LogFile, TimedEntry, read_log
from postdate.commands.output import emit_one, emit_rows, plain, progress_bar, record
from postdate.commands.settings import EXIT_CHECK_FAILED, Command, CommandFailed, Settings, run
from postdate.commands.tally import Arrival, Expected, tally
from postdate.commands.timeline import Timeline, plan_timeline
from postdate.commands.values import DURATION, RATE, show_duration

_SUBSCRIPTIONS = ("replay-a", "replay-b")
_BATCH = 1000
_AHEAD = 4  # batches on their way at once
_PRODUCE_PER_S = 20_000  # a cautious guess, to choose the start
_LEAD_MIN_MS = 1000
_STALLED_S = 10.0  # nothing came for so long after the last was due: it is missing
_AFTERMATH_S = 0.3  # to catch what comes twice


@dataclass
class _Run:
    """One replay under way."""

    plan: Timeline
    entries: list[TimedEntry]  # in order of due time
    offsets_ms: list[int]
    start_ms: int = 0
    expected: dict[postdate.MessageId, Expected] = field(default_factory=dict)
    produced_late: int = 0
    arrivals: dict[str, list[Arrival]] = field(default_factory=dict)

    def due_ms(self, index: int) -> int:
        return self.start_ms + self.offsets_ms[index]


@click.command("replay", cls=Command)
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False, readable=True))
@click.option(
    "--speed",
    type=RATE,
    default="1000",
    show_default=True,
    help="Speed of the replay, as a multiple of the original.",
)
@click.option(
    "--max-gap", type=DURATION, help="Shorten idle gaps to this time.  [default: chosen to fit --within]"
)
@click.option(
    "--within",
    type=DURATION,
    default="60s",
    show_default=True,
    help="Time the replay may take, if --max-gap is not given.",
)
@click.option(
    "--limit", type=click.IntRange(1), help="Use only this number of messages, the last of the file."
)
@click.option("--topic", help="Replay through this topic.  [default: a new one, deleted afterwards]")
@click.option("--keep", is_flag=True, help="Do not delete the new topic.")
@click.pass_obj
def replay(settings: Settings, /, path: str, topic: str | None, keep: bool, **options: Any) -> None:
    """Replay FILE, a log whose lines begin with a date and time.

    All lines are sent at once, with delivery times at the original intervals divided by --speed, and received on two
    subscriptions. Exit code 6 if a line is missing, early, duplicated or changed.
    """
    try:
        log = read_log(path, datetime.now(UTC))
    except (OSError, EOFError) as error:
        raise click.UsageError(f"cannot read {path}: {error}") from None
    entries = log.entries[-options["limit"] :] if options["limit"] else log.entries
    if not entries:
        raise click.UsageError(f"no line of {path} begins with a date and time")
    gap: timedelta | None = options["max_gap"]
    plan = plan_timeline(
        [entry.time_ms for entry in entries],
        options["speed"],
        gap_max_ms=None if gap is None else gap / timedelta(milliseconds=1),
        within_ms=options["within"] / timedelta(milliseconds=1),
    )
    # What is due first is sent first, also where the file is out of order.
    order = sorted(range(len(entries)), key=plan.offsets_ms.__getitem__)
    under_way = _Run(plan, [entries[index] for index in order], [plan.offsets_ms[index] for index in order])
    name = topic or f"replay-{uuid.uuid4().hex[:8]}"
    run(_replay(settings, name, under_way, delete=topic is None and not keep))
    _report(settings, path, log, under_way, options["speed"])


async def _replay(settings: Settings, topic: str, under_way: _Run, *, delete: bool) -> None:
    async with settings.client() as client:
        with progress_bar(settings) as progress:
            try:
                await _send_and_receive(client, topic, under_way, progress)
            finally:
                if delete:
                    await forget(client, topic)


async def _send_and_receive(client: postdate.Client, topic: str, under_way: _Run, progress: Progress) -> None:
    earliest = postdate.InitialPosition.EARLIEST
    total = len(under_way.entries)
    async with (
        client.subscribe(topic, _SUBSCRIPTIONS[0], initial_position=earliest) as one,
        client.subscribe(topic, _SUBSCRIPTIONS[1], initial_position=earliest) as two,
    ):
        lead_ms = _LEAD_MIN_MS + total * 1000 // _PRODUCE_PER_S
        under_way.start_ms = epoch_ms(datetime.now(UTC), "start") + lead_ms
        async with asyncio.TaskGroup() as tasks:
            for subscription in (one, two):
                tasks.create_task(_receive(subscription, under_way, progress))
            await _produce(client, topic, under_way, progress)


async def _produce(client: postdate.Client, topic: str, under_way: _Run, progress: Progress) -> None:
    entries = under_way.entries
    bar = progress.add_task("sent", total=len(entries))
    slots = asyncio.Semaphore(_AHEAD)
    async with client.producer(topic) as producer, asyncio.TaskGroup() as tasks:

        async def send(start: int) -> None:
            indexes = range(start, min(start + _BATCH, len(entries)))
            batch = [
                postdate.OutgoingMessage(
                    entries[index].text,
                    deliver_at=moment(under_way.due_ms(index)),
                    event_time=moment(entries[index].time_ms),
                )
                for index in indexes
            ]
            try:
                receipts = await producer.send_many(batch)
            finally:
                slots.release()
            for index, receipt in zip(indexes, receipts, strict=True):
                due_ms = under_way.due_ms(index)
                under_way.expected[receipt.id] = Expected(due_ms, entries[index].text)
                under_way.produced_late += epoch_ms(receipt.publish_time, "publish") > due_ms
            progress.update(bar, advance=len(batch))

        for start in range(0, len(entries), _BATCH):
            await slots.acquire()
            tasks.create_task(send(start))


async def _receive(subscription: postdate.Subscription, under_way: _Run, progress: Progress) -> None:
    total = len(under_way.entries)
    bar = progress.add_task(f"received on {subscription.name}", total=total)
    arrivals = under_way.arrivals.setdefault(subscription.name, [])
    seen: set[postdate.MessageId] = set()
    while True:
        left_ms = under_way.start_ms + under_way.plan.length_ms - time.time() * 1000
        patience_s = max(0.0, left_ms / 1000) + _STALLED_S if len(seen) < total else _AFTERMATH_S
        messages = await subscription.receive_many(_BATCH, timeout=timedelta(seconds=patience_s))
        arrived_ms = time.time() * 1000  # the wall clock: it is what due times are about
        if not messages:
            break
        for message in messages:
            seen.add(message.id)
            arrivals.append(
                Arrival(
                    id=message.id,
                    arrived_ms=arrived_ms,
                    deliver_at_ms=epoch_ms(message.deliver_at, "deliver_at"),
                    publish_ms=epoch_ms(message.publish_time, "publish_time"),
                    payload=message.payload,
                )
            )
            subscription.ack_nowait(message)
        progress.update(bar, completed=len(seen))
    await subscription.wait_confirmed()


async def forget(client: postdate.Client, topic: str) -> None:
    """Delete a topic that was for one run only. What went wrong before it says more than why this fails."""
    try:
        await client.topics.delete(topic)
    except (postdate.NotFound, postdate.Unavailable):
        return  # it never came to be, or the failure that matters is on its way up
    except postdate.PostdateError as error:
        click.echo(plain(f"postdate: the topic {topic} was not deleted: {error}"), err=True)


def _report(settings: Settings, path: str, log: LogFile, under_way: _Run, speed: float) -> None:
    results = {name: tally(under_way.arrivals.get(name, ()), under_way.expected) for name in _SUBSCRIPTIONS}
    good = all(result.good for result in results.values())
    plan = under_way.plan
    if settings.output == "table":
        click.echo(_headline(path, log, under_way, speed))
        rows = [{"subscription": name} | record(result) for name, result in results.items()]
        emit_rows(settings, rows, list(rows[0]))
        if under_way.produced_late:
            click.echo(
                f"{under_way.produced_late:,} were stored after they were due; "
                "their lateness counts from when they were stored"
            )
    else:
        document = {
            "file": path,
            "lines": log.line_count,
            "lines_skipped": log.skipped_count,
            "messages": len(under_way.entries),
            "speed": speed,
            "original_ms": plan.original_ms,
            "replay_ms": plan.length_ms,
            "gaps_cut": plan.cut_count,
            "gap_max_ms": round(plan.gap_max_ms, 3),
            "produced_late": under_way.produced_late,
            "ok": good,
            "subscriptions": [{"subscription": name} | record(result) for name, result in results.items()],
        }
        emit_one(settings, document)
    if not good:
        raise CommandFailed("messages are missing, early, duplicated or changed", EXIT_CHECK_FAILED)


def _headline(path: str, log: LogFile, under_way: _Run, speed: float) -> str:
    plan = under_way.plan
    original = show_duration(timedelta(milliseconds=plan.original_ms))
    length = show_duration(timedelta(milliseconds=plan.length_ms))
    text = (
        f"{len(under_way.entries):,} messages from {log.line_count:,} lines of {path}: "
        f"{original} replayed at {speed:g}x in {length}"
    )
    if log.skipped_count:
        text += f"; {log.skipped_count:,} lines before the first time were skipped"
    if plan.cut_count:
        text += f"; {plan.cut_count:,} idle gaps cut to {plan.gap_max_ms:,.0f} ms"
    return text
