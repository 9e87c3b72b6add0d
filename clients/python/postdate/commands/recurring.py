"""`postdate recurring`: schedules that recur, to put, see, pause, delete, trigger and backfill."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TextIO

import click

import postdate
from postdate.commands.completion import TOPIC
from postdate.commands.output import emit_one, emit_rows
from postdate.commands.recurring_lines import schedule_line, schedule_of_line
from postdate.commands.settings import (
    EXIT_FAILED,
    EXIT_PARTLY,
    CommandFailed,
    CommandGroup,
    Settings,
    describe,
    exit_code,
    run,
)
from postdate.commands.values import (
    AGO,
    DURATION,
    TIME,
    counted,
    limit_option,
    local_time,
    local_zone,
    show_duration,
)

_COLUMNS = ["name", "recurs", "time_zone", "next", "paused"]
_NAME = click.argument("name")
_NAMES = click.argument("names", nargs=-1, required=True, metavar="NAME...")
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Change nothing; print what would be done.")


@click.group(cls=CommandGroup)
def recurring() -> None:
    """Create, show, change and delete recurring schedules."""


def _definition(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what a schedule is."""
    for option in reversed(
        (
            click.option(
                "--cron", default="", help="Five fields, or six with seconds before them: '0 9 * * MON-FRI'."
            ),
            click.option(
                "--every", "interval", type=DURATION, help="Time from one occurrence to the next: 15m, 1h30m."
            ),
            click.option(
                "--at",
                "times",
                type=TIME,
                multiple=True,
                metavar="TIME",
                help="One occurrence. May be repeated.",
            ),
            click.option(
                "--time-zone", default="UTC", show_default=True, help="Zone of --cron, such as Europe/Berlin."
            ),
            click.option("--start", type=TIME, metavar="TIME", help="No occurrence before this time."),
            click.option("--end", type=TIME, metavar="TIME", help="No occurrence from this time on."),
            click.option(
                "--jitter",
                type=DURATION,
                default=timedelta(),
                help="Deliver each occurrence so much later at most, and before the next one.",
            ),
        )
    ):
        command = option(command)
    return command


@recurring.command("put")
@click.argument("topic", type=TOPIC)
@_NAME
@_definition
@click.option(
    "--overdue",
    type=click.Choice([each.value for each in postdate.RecurringOverdue]),
    default="all",
    show_default=True,
    help="Which occurrences to store of those that were missed while the broker was down; one: the last.",
)
@click.option(
    "--paused",
    is_flag=True,
    help="Store nothing until the schedule is resumed. Of a new one only: one that is there keeps its pause.",
)
@click.option("--payload", default="", help="Text of the messages.")
@click.option("--key", default="", help="Key of the messages.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    metavar="NAME=VALUE",
    help="Property of the messages. May be repeated.",
)
@click.option("--ttl", type=DURATION, help="Time to live of the messages after their due time.")
@click.pass_obj
def put(
    settings: Settings,
    /,
    topic: str,
    name: str,
    payload: str,
    properties: tuple[str, ...],
    overdue: str,
    **options: Any,
) -> None:
    """Create the schedule NAME of TOPIC, or replace it."""
    pairs = [pair.partition("=") for pair in properties]
    if wrong := [name for name, equals, _ in pairs if not (name and equals)]:
        raise click.UsageError(f"--property must be NAME=VALUE, not {wrong[0]!r}")
    schedule = _schedule(
        name,
        options,
        payload=payload.encode(),
        properties={name: value for name, _, value in pairs},
        overdue=postdate.RecurringOverdue(overdue),
    )

    async def work() -> None:
        async with settings.client() as client:
            emit_one(settings, _record(await client.recurring.put(topic, schedule)))

    run(work())


def _schedule(name: str, options: dict[str, Any], **others: Any) -> postdate.RecurringSchedule:
    if bool(options["cron"]) + (options["interval"] is not None) + bool(options["times"]) != 1:
        raise click.UsageError("give one of --cron, --every and --at")
    options = options | {"times": sorted(options["times"])}  # the broker wants them to rise
    return postdate.RecurringSchedule(name=name, **options, **others)


@recurring.command("list")
@click.argument("topic", type=TOPIC)
@click.option("--prefix", default="", help="Only schedules whose name begins with this text.")
@limit_option("by name")
@click.pass_obj
def list_recurring(settings: Settings, topic: str, prefix: str, limit: int | None) -> None:
    """List the recurring schedules of TOPIC."""

    async def work() -> None:
        async with settings.client() as client:
            states = [each async for each in client.recurring.list(topic, name_prefix=prefix, limit=limit)]
        if settings.output == "table":
            rows = [_row(each) for each in states]
            title = f"{topic}, times in {local_zone(datetime.now(UTC))}"
            emit_rows(settings, rows, _COLUMNS, title, {"name", "next"})
        else:
            emit_rows(settings, [_record(each) for each in states], _COLUMNS)

    run(work())


@recurring.command("get")
@click.argument("topic", type=TOPIC)
@_NAME
@click.pass_obj
def get(settings: Settings, topic: str, name: str) -> None:
    """Show the recurring schedule NAME of TOPIC."""

    async def work() -> None:
        async with settings.client() as client:
            emit_one(settings, _record(await client.recurring.get(topic, name)))

    run(work())


@recurring.command("delete")
@click.argument("topic", type=TOPIC)
@_NAMES
@click.pass_obj
def delete(settings: Settings, topic: str, names: tuple[str, ...]) -> None:
    """Delete recurring schedules of TOPIC; their next occurrences are cancelled."""
    _each(settings, names, lambda client, name: client.recurring.delete(topic, name))


@recurring.command("pause")
@click.argument("topic", type=TOPIC)
@_NAMES
@click.pass_obj
def pause(settings: Settings, topic: str, names: tuple[str, ...]) -> None:
    """Stop recurring schedules of TOPIC until they are resumed; their next occurrences are cancelled."""
    _each(settings, names, lambda client, name: client.recurring.pause(topic, name))


@recurring.command("resume")
@click.argument("topic", type=TOPIC)
@_NAMES
@click.pass_obj
def resume(settings: Settings, topic: str, names: tuple[str, ...]) -> None:
    """Let paused schedules of TOPIC go on from now."""
    _each(settings, names, lambda client, name: client.recurring.resume(topic, name))


def _each(
    settings: Settings, names: Sequence[str], call: Callable[[postdate.Client, str], Awaitable[Any]]
) -> None:
    async def work() -> None:
        async with settings.client() as client:
            for name in names:
                await call(client, name)

    run(work())


@recurring.command("trigger")
@click.argument("topic", type=TOPIC)
@_NAME
@click.pass_obj
def trigger(settings: Settings, topic: str, name: str) -> None:
    """Store one message of the schedule NAME of TOPIC now, and leave its times."""

    async def work() -> None:
        async with settings.client() as client:
            emit_one(settings, {"id": str(await client.recurring.trigger(topic, name))})

    run(work())


@recurring.command("backfill")
@click.argument("topic", type=TOPIC)
@_NAME
@click.option(
    "--from",
    "start",
    type=AGO,
    required=True,
    metavar="WHEN",
    help="The first moment of the span: 6h (ago), or a time.",
)
@click.option(
    "--until",
    "end",
    type=AGO,
    required=True,
    metavar="WHEN",
    help="The first moment after it: 1m (ago), or a time. Not after now.",
)
@_DRY_RUN
@click.pass_obj
def backfill(
    settings: Settings, topic: str, name: str, start: datetime, end: datetime, dry_run: bool
) -> None:
    """Store the past occurrences of the schedule NAME of TOPIC in a span once more."""

    async def work() -> None:
        async with settings.client() as client:
            times = await client.recurring.backfill(topic, name, start, end, dry_run=dry_run)
        if settings.output == "table" and not times:
            click.echo("0 occurrences")
            return
        rows = [{"time": each.isoformat()} for each in times]
        if settings.output == "table":
            rows = [{"time": local_time(each)} for each in times]
        title = f"{counted(len(times), 'occurrence')}, times in {local_zone(datetime.now(UTC))}"
        emit_rows(settings, rows, ["time"], title)

    run(work())


@recurring.command("preview")
@click.argument("topic", type=TOPIC)
@click.argument("name", required=False)
@_definition
@click.option(
    "--count", type=click.IntRange(1, 1_000), default=10, show_default=True, help="Number of occurrences."
)
@click.option("--after", type=TIME, metavar="TIME", help="Occurrences after this time, instead of now.")
@click.pass_obj
def preview(
    settings: Settings, /, topic: str, name: str | None, count: int, after: datetime | None, **options: Any
) -> None:
    """Show the next occurrences of the schedule NAME of TOPIC, or of --cron, --every or --at."""
    is_new = bool(options["cron"] or options["interval"] or options["times"])
    if is_new and name is not None:
        raise click.UsageError("give either NAME or one of --cron, --every and --at")
    schedule = name if name is not None else _schedule("preview", options)

    async def work() -> None:
        async with settings.client() as client:
            found = await client.recurring.preview(topic, schedule, count=count, after=after)
        rows = [
            {
                "time": each.wall_time,
                "utc": each.time.isoformat(),
                "delivered": each.deliver_at.isoformat(),
            }
            for each in found
        ]
        emit_rows(settings, rows, ["time", "utc", "delivered"], "", {"time"})

    run(work())


@recurring.command("export")
@click.argument("topic", type=TOPIC)
@click.option(
    "--file", "target", type=click.File("w"), default="-", help="File to write; - is stdout, the default."
)
@click.pass_obj
def export(settings: Settings, topic: str, target: TextIO) -> None:
    """Write the recurring schedules of TOPIC as JSON lines, for `postdate recurring import`."""

    async def work() -> None:
        async with settings.client() as client:
            async for state in client.recurring.list(topic):
                target.write(schedule_line(state.schedule) + "\n")

    run(work())


@recurring.command("import")
@click.argument("topic", type=TOPIC)
@click.argument("source", type=click.File("r"), metavar="FILE")
@_DRY_RUN
@click.pass_obj
def import_(settings: Settings, topic: str, source: TextIO, dry_run: bool) -> None:
    """Put the schedules of FILE, JSON lines as `postdate recurring export` writes them; - is stdin.

    A schedule that is there is replaced, but its pause stays; the same again changes nothing, so that a file may be
    imported at each deployment. What is there and not in FILE stays. One that has no occurrence after now is left out,
    and named.
    """
    schedules = []
    for number, line in enumerate(source, 1):
        if line.strip():
            try:
                schedules.append(schedule_of_line(line))
            except (ValueError, TypeError, KeyError) as error:
                raise CommandFailed(f"line {number:,}: {error}", EXIT_FAILED) from error
    put_all(settings, topic, schedules, dry_run=dry_run)


def put_all(
    settings: Settings, topic: str, schedules: Sequence[postdate.RecurringSchedule], *, dry_run: bool
) -> None:
    """Put schedules, all or none unless the broker refuses one that it took when asked; say what is next of each.

    One that is over is named, and the others are put.
    """

    async def work() -> None:
        rows: list[dict[str, Any]] = []
        async with settings.client() as client:
            following = [await _following(client, topic, schedule) for schedule in schedules]
            for schedule, expected in zip(schedules, following, strict=True):
                next_time, is_over = expected, expected is None
                if not dry_run:
                    state = await _put(client, topic, schedule, len(rows))
                    next_time, is_over = (None, True) if state is None else (state.next_time, False)
                if is_over:
                    click.echo(f"{schedule.name}: it has no occurrence after now, and is left out", err=True)
                    continue
                rows.append(
                    {
                        "name": schedule.name,
                        "recurs": _recurs(schedule),
                        "time_zone": schedule.time_zone,
                        "next": None if next_time is None else next_time.isoformat(),
                    }
                )
        emit_rows(settings, rows, ["name", "recurs", "time_zone", "next"], topic, {"name", "next"})

    run(work())


async def _following(
    client: postdate.Client, topic: str, schedule: postdate.RecurringSchedule
) -> datetime | None:
    """Ask the broker for the next occurrence of a schedule that is not put yet; None if there is none."""
    try:
        (following,) = await client.recurring.preview(topic, schedule, count=1)
    except postdate.InvalidRequest as error:
        if error.reason == "NO_OCCURRENCE":
            return None
        raise CommandFailed(f"{schedule.name}: {describe(error)}; nothing was put", EXIT_FAILED) from error
    return following.time


async def _put(
    client: postdate.Client, topic: str, schedule: postdate.RecurringSchedule, before_count: int
) -> postdate.RecurringState | None:
    """Put a schedule after others; None if it is over, also if it was not when the broker was asked."""
    try:
        return await client.recurring.put(topic, schedule)
    except postdate.PostdateError as error:
        if error.reason == "NO_OCCURRENCE":
            return None
        done = f"; {counted(before_count, 'schedule')} before it were put" if before_count else ""
        raise CommandFailed(
            f"{schedule.name}: {describe(error)}{done}", EXIT_PARTLY if before_count else exit_code(error)
        ) from error


def _recurs(schedule: postdate.RecurringSchedule) -> str:
    if schedule.cron:
        return schedule.cron
    if schedule.interval is not None:
        return f"every {show_duration(schedule.interval)}"
    return counted(len(schedule.times), "time")


def _row(state: postdate.RecurringState) -> dict[str, Any]:
    schedule = state.schedule
    return {
        "name": schedule.name,
        "recurs": _recurs(schedule),
        "time_zone": schedule.time_zone if schedule.cron else "",
        "next": "" if state.next_time is None else local_time(state.next_time),
        "paused": "yes" if schedule.paused else "",
    }


def _record(state: postdate.RecurringState) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(schedule_line(state.schedule))
    return fields | {
        "next_time": None if state.next_time is None else state.next_time.isoformat(),
        "next_deliver_at": None if state.next_deliver_at is None else state.next_deliver_at.isoformat(),
        "next_id": None if state.next_id is None else str(state.next_id),
    }
