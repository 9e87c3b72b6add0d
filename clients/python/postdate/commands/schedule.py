"""`postdate schedule`: what is pending, to see, cancel and move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import click

import postdate
from postdate.commands.completion import TOPIC
from postdate.commands.histogram import histogram
from postdate.commands.output import (
    RowStream,
    emit_one,
    emit_rows,
    payload_fields,
    progress_bar,
    table_width,
)
from postdate.commands.settings import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_PARTLY,
    CommandFailed,
    CommandGroup,
    Settings,
    not_confirmed,
    run,
)
from postdate.commands.values import (
    DURATION,
    MESSAGE_ID,
    SHIFT,
    TIME,
    WHEN,
    counted,
    local_time,
    local_time_ms,
    local_zone,
    show_duration,
)

_LIMIT = 100
_SHOWN_FAILURES = 20
_NARROW_COLUMNS = ["due", "in", "id", "schedule_key"]
_WIDE = 100  # from so many columns of the terminal on, all are shown
_COLUMNS = ["due", "in", "id", "schedule_key", "key", "bytes"]

Change = Callable[..., Awaitable[Any]]

_IDS = click.argument("ids", nargs=-1, type=MESSAGE_ID, metavar="[ID]...")
_KEYS = click.option(
    "--schedule-key", "-k", "keys", multiple=True, help="The message with this schedule key. May be repeated."
)
FROM = click.option(
    "--from", "start", type=WHEN, metavar="WHEN", help="Due at this time or later: 15m (from now), or a time."
)
UNTIL = click.option(
    "--until", "end", type=WHEN, metavar="WHEN", help="Due before this time: 15m (from now), or a time."
)
PREFIX = click.option(
    "--key-prefix", "prefix", default="", help="Only messages whose schedule key begins with this text."
)
_ALL = click.option("--all", "every", is_flag=True, help="All pending messages.")
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Change nothing; print what would be done.")
_NO_WAIT = click.option(
    "--no-wait",
    is_flag=True,
    help="With a filter: return once the broker has begun; `schedule bulk-change` shows how it goes on.",
)
_YES = click.option(
    "--yes", is_flag=True, help="Confirm; required with --from, --until, --key-prefix or --all."
)


@click.group(cls=CommandGroup)
def schedule() -> None:
    """See, count, cancel and move pending messages."""


schedule.add_command(histogram)


@schedule.command("list")
@click.argument("topic", type=TOPIC)
@FROM
@UNTIL
@PREFIX
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=_LIMIT,
    show_default=True,
    help="Maximum number of messages shown.",
)
@click.option("--all", "every", is_flag=True, help="Show all messages, without a limit.")
@click.option("--payload", is_flag=True, help="Also show payloads.")
@click.pass_obj
def list_scheduled(
    settings: Settings,
    topic: str,
    start: datetime | None,
    end: datetime | None,
    prefix: str,
    limit: int,
    every: bool,
    payload: bool,
) -> None:
    """List pending messages of TOPIC, soonest first."""

    async def work() -> None:
        has_more = False
        now = datetime.now(UTC)
        columns = _COLUMNS if table_width() >= _WIDE else _NARROW_COLUMNS
        columns = [*columns, "payload"] if payload else columns
        rows = RowStream(settings, columns, f"{topic}, times in {local_zone(now)}", {"due", "in", "id"})
        async with settings.client() as client:
            found = client.schedule.list(
                topic,
                start=start,
                end=end,
                key_prefix=prefix,
                limit=None if every else limit + 1,
                payloads=payload,
            )
            async for message in found:
                if rows.count == limit and not every:
                    has_more = True
                    break
                rows.add(_row(message, now) if settings.output == "table" else _record(message))
        if settings.output == "table" and not rows.count:
            which = "that matches waits" if start or end or prefix else "waits"
            click.echo(f"no message of {topic} {which}", err=True)
        else:
            rows.end()
        if has_more:
            click.echo(f"the first {limit:,}; --limit N or --all shows more", err=True)

    run(work())


@schedule.command("get")
@click.argument("topic", type=TOPIC)
@click.argument("id", required=False, type=MESSAGE_ID)
@click.option("--schedule-key", "-k", "key", default="", help="The message with this schedule key.")
@click.option("--payload", is_flag=True, help="Also show the payload.")
@click.pass_obj
def get_scheduled(
    settings: Settings, topic: str, id: postdate.MessageId | None, key: str, payload: bool
) -> None:
    """Show one pending message of TOPIC, by ID or by --schedule-key.

    By ID, a message that came back from a consumer is shown, too, with the reason of the last nack.
    """
    if (id is None) == (not key):
        raise click.UsageError("give either an ID or --schedule-key")

    async def work() -> None:
        async with settings.client() as client:
            message = await client.schedule.get(topic, id, schedule_key=key, payload=payload)
        fields = _record(message) | {"returned": [asdict(each) for each in message.returned]}
        if settings.output == "table":
            now = datetime.now(UTC)
            fields |= {
                "deliver_at": f"{_local(message.deliver_at)}, {_until(message.deliver_at, now)}",
                "publish_time": _local(message.publish_time),
                "returned": [
                    f"{each.subscription}: {each.attempts} attempts, last reason {each.last_reason or 'not given'}"
                    for each in message.returned
                ],
            }
        emit_one(settings, fields)

    run(work())


@dataclass(frozen=True)
class _Chosen:
    """The messages that a command is about: named ones, or those that match."""

    topic: str
    ids: tuple[postdate.MessageId, ...]
    keys: tuple[str, ...]
    start: datetime | None
    end: datetime | None
    prefix: str

    @classmethod
    def of(cls, options: dict[str, Any]) -> _Chosen:
        has_filter = bool(options["start"] or options["end"] or options["prefix"])
        every = options.pop("every")
        kinds = bool(options["ids"]) + bool(options["keys"]) + has_filter
        if every and kinds:
            raise click.UsageError(
                "--all cannot be combined with IDs, --schedule-key, --from, --until or --key-prefix"
            )
        if kinds + every != 1:
            raise click.UsageError(
                "select messages by IDs, by --schedule-key, by --from, --until and --key-prefix, or with --all"
            )
        return cls(**options)

    @property
    def is_named(self) -> bool:
        return bool(self.ids or self.keys)

    @property
    def only(self) -> dict[str, Any] | None:
        """The one message that is named, as the SDK wants it; None if there are several."""
        if len(self.ids) + len(self.keys) != 1:
            return None
        return {"id": self.ids[0]} if self.ids else {"schedule_key": self.keys[0]}

    @property
    def named(self) -> dict[str, Any]:
        return {"ids": self.ids, "schedule_keys": self.keys}

    @property
    def matching(self) -> dict[str, Any]:
        return {"start": self.start, "end": self.end, "key_prefix": self.prefix}


def _choice(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments and options that say which messages."""
    for option in reversed(
        (
            click.argument("topic", type=TOPIC),
            _IDS,
            _KEYS,
            FROM,
            UNTIL,
            PREFIX,
            _ALL,
            _DRY_RUN,
            _YES,
            _NO_WAIT,
        )
    ):
        command = option(command)
    return command


@schedule.command("cancel")
@_choice
@click.pass_obj
def cancel(settings: Settings, /, dry_run: bool, yes: bool, no_wait: bool, **options: Any) -> None:
    """Cancel pending messages of TOPIC; no consumer receives them."""
    _change(settings, _Chosen.of(options), "cancel", "cancelled", {}, dry_run, yes, no_wait)


@schedule.command("move")
@_choice
@click.option("--to", "deliver_at", type=TIME, metavar="TIME", help="New delivery time.")
@click.option("--in", "deliver_after", type=DURATION, metavar="DURATION", help="New delay, counted from now.")
@click.option(
    "--by",
    "shift",
    type=SHIFT,
    metavar="DURATION",
    help="Time to add to the delivery time; negative values make it earlier: -10m.",
)
@click.pass_obj
def move(
    settings: Settings,
    /,
    deliver_at: datetime | None,
    deliver_after: timedelta | None,
    shift: timedelta | None,
    dry_run: bool,
    yes: bool,
    no_wait: bool,
    **options: Any,
) -> None:
    """Change the delivery time of pending messages of TOPIC."""
    times = {"deliver_at": deliver_at, "deliver_after": deliver_after, "shift": shift}
    if sum(each is not None for each in times.values()) != 1:
        raise click.UsageError("give one of --to, --in and --by")
    _change(settings, _Chosen.of(options), "move", "moved", times, dry_run, yes, no_wait)


@schedule.command("send-now")
@_choice
@click.pass_obj
def send_now(settings: Settings, /, dry_run: bool, yes: bool, no_wait: bool, **options: Any) -> None:
    """Deliver pending messages of TOPIC at once."""
    _change(
        settings, _Chosen.of(options), "move", "sent", {"deliver_after": timedelta(0)}, dry_run, yes, no_wait
    )


def _change(
    settings: Settings,
    chosen: _Chosen,
    verb: str,
    done: str,
    times: dict[str, Any],
    dry_run: bool,
    yes: bool,
    no_wait: bool,
) -> None:
    """Run one of the changes, and say what became of the messages."""
    if no_wait and (chosen.only is not None or chosen.is_named or dry_run or not yes):
        raise click.UsageError("--no-wait is for --from, --until, --key-prefix and --all, with --yes")

    async def work() -> None:
        async with settings.client() as client:
            if (only := chosen.only) is not None:
                call = getattr(client.schedule, verb)
                _report_one(
                    settings, done, await call(chosen.topic, **only, **times, dry_run=dry_run), dry_run
                )
            elif chosen.is_named:
                call = getattr(client.schedule, f"{verb}_many")
                total = len(chosen.ids) + len(chosen.keys)
                await _follow(
                    settings, done, total, call, chosen.topic, **chosen.named, **times, dry_run=dry_run
                )
            else:
                await _change_matching(settings, client, chosen, verb, done, times, dry_run, yes, no_wait)

    run(work())


async def _change_matching(
    settings: Settings,
    client: postdate.Client,
    chosen: _Chosen,
    verb: str,
    done: str,
    times: dict[str, Any],
    dry_run: bool,
    yes: bool,
    no_wait: bool,
) -> None:
    """Run a bulk change; without --yes one that only counts."""
    call = getattr(client.schedule, f"{verb}_matching")
    asked = chosen.matching | times | {"dry_run": dry_run or not yes}
    begun = await call(chosen.topic, **asked, wait=False)
    if no_wait:
        _emit_bulk(settings, begun)
        return
    change = await _wait_bulk(settings, client, chosen.topic, begun, "matching")
    name = f"would_be_{done}" if dry_run else done
    count = change.done if yes or dry_run else 0
    fields = {"matched": change.matched, name: count}
    failed = change.matched - change.done
    emit_one(settings, fields | {"already_delivered": failed} if failed else fields)
    if dry_run:
        _say_dry(done, change.done)
    elif not yes:
        if change.matched:
            raise not_confirmed(done)
    elif change.state is postdate.BulkChangeState.CANCELLED:
        raise CommandFailed("somebody cancelled it before its end", EXIT_PARTLY)
    if failed and (yes or dry_run):
        would = "would not be" if dry_run else "were not"
        message = f"{failed:,} of {change.matched:,} {would} {done}"
        raise CommandFailed(message, EXIT_PARTLY if change.done else EXIT_FAILED)


async def _wait_bulk(
    settings: Settings, client: postdate.Client, topic: str, begun: postdate.BulkChange, what: str
) -> postdate.BulkChange:
    """Await the end of a bulk change; the bar shows how many messages it has come past."""
    with progress_bar(settings) as progress:
        bar = progress.add_task(what, total=begun.total)

        def advance(seen: int, total: int) -> None:
            progress.update(bar, completed=seen, total=total)

        try:
            return await client.schedule.wait_bulk_change(topic, begun.id, progress=advance)
        except postdate.BulkChangeFailed as error:
            raise CommandFailed(error.message, EXIT_PARTLY if error.change.done else EXIT_FAILED) from error
        except asyncio.CancelledError:
            progress.stop()
            click.echo(
                f"the broker goes on; postdate schedule bulk-change {topic} {begun.id} shows it, --cancel ends it",
                err=True,
            )
            raise


@schedule.command("bulk-changes")
@click.argument("topic", type=TOPIC)
@click.pass_obj
def bulk_changes(settings: Settings, topic: str) -> None:
    """List the bulk changes of TOPIC: those that have not ended, and the last 100 that have."""

    async def work() -> None:
        async with settings.client() as client:
            found = await client.schedule.bulk_changes(topic)
        columns = ["id", "change", "of", "state", "matched", "done", "begun", "principal"]
        if settings.output == "table":
            title = f"{topic}, times in {local_zone(datetime.now(UTC))}"
            emit_rows(settings, [_bulk_row(each) for each in found], columns, title, {"id", "state"})
        else:
            emit_rows(settings, [_bulk_fields(each) for each in found], columns)

    run(work())


@schedule.command("bulk-change")
@click.argument("topic", type=TOPIC)
@click.argument("id", type=click.IntRange(1))
@click.option("--wait", is_flag=True, help="Return once it has ended.")
@click.option("--cancel", "ends", is_flag=True, help="End it where it is. What it has changed stays changed.")
@click.pass_obj
def bulk_change(settings: Settings, topic: str, id: int, wait: bool, ends: bool) -> None:
    """Show the bulk change ID of TOPIC, wait for its end, or end it."""
    if wait and ends:
        raise click.UsageError("give one of --wait and --cancel")

    async def work() -> None:
        async with settings.client() as client:
            call = client.schedule.cancel_bulk_change if ends else client.schedule.bulk_change
            change = await call(topic, id)
            if wait:
                change = await _wait_bulk(settings, client, topic, change, _action(change))
        _emit_bulk(settings, change)

    run(work())


def _emit_bulk(settings: Settings, change: postdate.BulkChange) -> None:
    fields = _bulk_fields(change)
    if settings.output == "table":
        times = {"from": change.start, "until": change.end, "begin_time": change.begin_time}
        times["end_time"] = change.end_time
        fields |= {name: None if moment is None else _local(moment) for name, moment in times.items()}
        fields["change"] = _action(change, _local)
    emit_one(settings, fields)


def _action(change: postdate.BulkChange, show_time: Callable[[datetime], str] = datetime.isoformat) -> str:
    """Return what a bulk change does, in a few words."""
    if change.deliver_at == change.begin_time:
        text = "send now"
    elif change.deliver_at is not None:
        text = f"move to {show_time(change.deliver_at)}"
    elif change.shift is not None:
        text = f"move by {'-' if change.shift < timedelta(0) else ''}{show_duration(abs(change.shift))}"
    else:
        text = "cancel"
    return f"{text}, dry run" if change.dry_run else text


def _bulk_fields(change: postdate.BulkChange) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": change.id,
        "change": _action(change),
        "state": change.state.name,
        "from": None if change.start is None else change.start.isoformat(),
        "until": None if change.end is None else change.end.isoformat(),
        "key_prefix": change.key_prefix,
        "total": change.total,
        "examined": change.examined,
        "matched": change.matched,
        "done": change.done,
        "begin_time": change.begin_time.isoformat(),
        "end_time": None if change.end_time is None else change.end_time.isoformat(),
        "principal": change.principal,
    }
    return fields if not change.failure else fields | {"failure": change.failure}


def _bulk_row(change: postdate.BulkChange) -> dict[str, Any]:
    state = change.state.name
    if change.state is postdate.BulkChangeState.RUNNING and change.total:
        state += f" {min(change.examined, change.total) * 100 // change.total} %"
    bounds = [
        f"{word} {local_time(at)}" for word, at in (("from", change.start), ("until", change.end)) if at
    ]
    named = [f"{change.key_prefix}…"] if change.key_prefix else []
    return {
        "id": change.id,
        "change": _action(change, local_time),
        "of": " ".join(named + bounds) or "all",
        "state": state,
        "matched": change.matched,
        "done": change.done,
        "begun": local_time(change.begin_time),
        "principal": change.principal,
    }


async def _follow(
    settings: Settings, done: str, total: int, call: Change, *args: Any, dry_run: bool, **options: Any
) -> None:
    """Await a bulk change and report it; the bar shows how many messages were dealt with."""
    name = f"would_be_{done}" if dry_run else done
    with progress_bar(settings) as progress:
        bar = progress.add_task(done, total=total)

        def advance(seen: int, total: int) -> None:
            progress.update(bar, completed=seen, total=total)

        try:
            change = await call(*args, **options, dry_run=dry_run, progress=advance)
        except postdate.PartlyChanged as error:
            progress.stop()
            _emit_change(settings, name, error.change)
            raise CommandFailed(error.message, EXIT_PARTLY) from error
    _emit_change(settings, name, change)
    if dry_run:
        _say_dry(done, change.done)
    _judge(done, change, dry_run)


def _say_dry(done: str, count: int) -> None:
    click.echo(f"dry run: nothing was changed; {counted(count, 'message')} would be {done}", err=True)


def _emit_change(settings: Settings, name: str, change: postdate.ScheduleChange) -> None:
    """Show how many there are of each result; `name` is that of those which are done."""
    fields: dict[str, Any] = {"matched": change.matched, name: change.done}
    for result, count in change.counts.items():
        if result is not postdate.ChangeResult.DONE:
            fields[result.name.lower()] = count
    if settings.output != "table":
        emit_one(settings, fields | {"not_done": [_outcome(each) for each in change.not_done]})
        return
    emit_one(settings, fields)
    if change.not_done:
        rows = [_outcome(each) for each in change.not_done[:_SHOWN_FAILURES]]
        emit_rows(settings, rows, ["id", "schedule_key", "result", "delivered_to"], whole={"id", "result"})
        if (more := len(change.not_done) - len(rows)) > 0:
            click.echo(f"and {more:,} more; -o json shows all", err=True)


def _judge(done: str, change: postdate.ScheduleChange, dry_run: bool) -> None:
    """Fail if not all is as it was asked for. What was cancelled before is as a cancel wants it."""
    fine = change.done + (
        change.counts.get(postdate.ChangeResult.ALREADY_CANCELLED, 0) if done == "cancelled" else 0
    )
    failed = sum(change.counts.values()) - fine
    if not failed:
        return
    would = "would not be" if dry_run else "was not" if failed == 1 else "were not"
    message = f"{failed:,} of {sum(change.counts.values()):,} {would} {done}"
    if fine:
        raise CommandFailed(message, EXIT_PARTLY)
    only_unknown = change.counts.get(postdate.ChangeResult.NOT_FOUND, 0) == failed
    raise CommandFailed(message, EXIT_NOT_FOUND if only_unknown else EXIT_FAILED)


def _report_one(settings: Settings, done: str, outcome: postdate.ChangeOutcome, dry_run: bool) -> None:
    fields = _outcome(outcome)
    if settings.output == "table" and outcome.deliver_at is not None:
        fields["deliver_at"] = _local(outcome.deliver_at)
    emit_one(settings, {"dry_run": True} | fields if dry_run else fields)
    if dry_run:
        _say_dry(done, int(outcome.done))
    fine = {postdate.ChangeResult.DONE}
    if done == "cancelled":
        fine.add(postdate.ChangeResult.ALREADY_CANCELLED)
    if outcome.result in fine:
        return
    would = "would not be" if dry_run else "was not"
    is_unknown = outcome.result is postdate.ChangeResult.NOT_FOUND
    raise CommandFailed(
        f"it {would} {done}: {outcome.result.name}", EXIT_NOT_FOUND if is_unknown else EXIT_FAILED
    )


def _outcome(outcome: postdate.ChangeOutcome) -> dict[str, Any]:
    return {
        "id": None if outcome.id is None else str(outcome.id),
        "schedule_key": outcome.schedule_key,
        "result": outcome.result.name,
        "deliver_at": None if outcome.deliver_at is None else outcome.deliver_at.isoformat(),
        "delivered_to": list(outcome.delivered_to),
    }


def _record(message: postdate.ScheduledMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": str(message.id),
        "schedule_key": message.schedule_key,
        "deliver_at": message.deliver_at.isoformat(),
        "state": message.state.name,
        "publish_time": message.publish_time.isoformat(),
        "revision": message.revision,
        "size_bytes": message.size_bytes,
        "key": message.key,
        "properties": dict(message.properties),
        "ttl_ms": None if message.ttl is None else round(message.ttl / timedelta(milliseconds=1)),
        "event_time": None if message.event_time is None else message.event_time.isoformat(),
        "traceparent": message.traceparent,
    }
    return fields if message.payload is None else fields | payload_fields(message.payload)


def _row(message: postdate.ScheduledMessage, now: datetime) -> dict[str, Any]:
    row = {
        "due": local_time(message.deliver_at),
        "in": show_duration(max(message.deliver_at - now, timedelta(0))),
        "id": str(message.id),
        "schedule_key": message.schedule_key,
        "key": message.key,
        "bytes": message.size_bytes,
    }
    return row if message.payload is None else row | {"payload": message.payload.decode(errors="replace")}


def _local(moment: datetime) -> str:
    return f"{local_time_ms(moment)} {local_zone(moment)}"


def _until(moment: datetime, now: datetime) -> str:
    return f"in {show_duration(moment - now)}" if moment > now else f"{show_duration(now - moment)} ago"
