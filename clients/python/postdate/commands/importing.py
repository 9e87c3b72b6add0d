"""`postdate import TOPIC FILE`: pending messages from JSON lines.

Messages go in the order of the file, one batch at a time, from a producer named after the file, under the number of
their line. So the broker itself knows what of a file it has: there are no holes below the greatest number, a
repeat is answered as one, and what it remembers only by that number (SEQUENCE_TOO_OLD) is passed over.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO

import click
from click.shell_completion import CompletionItem
from rich.progress import Progress

import postdate
from postdate.commands.completion import TOPIC
from postdate.commands.import_redis import import_redis
from postdate.commands.import_schedules import celery_beat, crontab
from postdate.commands.message_lines import LINE_BYTES_MAX, BadLine, read_header, read_messages
from postdate.commands.output import emit_one, progress_bar
from postdate.commands.sending import send_patiently
from postdate.commands.settings import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_PARTLY,
    CommandFailed,
    CommandGroup,
    Settings,
    describe,
    exit_code,
    run,
)
from postdate.commands.values import counted

_BATCH_MESSAGES = 1000
_BATCH_BYTES = 1 << 20  # of lines; a message alone may be larger
_REQUEST_BYTES = 8 << 20
_INDEX = re.compile(r"messages\[(\d+)\]")


class _ImportGroup(CommandGroup):
    """`import TOPIC FILE`, and `import redis`: what is no subcommand is a topic."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            args = ["file", *args]
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        topic = click.Argument(["topic"], type=TOPIC)
        return [*super().shell_complete(ctx, incomplete), *topic.shell_complete(ctx, incomplete)]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["TOPIC FILE | redis TOPIC KEY | crontab TOPIC FILE | celery-beat TOPIC FILE", "[OPTIONS]"]


# Unknown here: options of `import TOPIC FILE` that stand before TOPIC.
@click.group(
    "import",
    cls=_ImportGroup,
    context_settings={"ignore_unknown_options": True},
    short_help="Import pending messages from JSON lines or Redis, schedules from a crontab or Celery.",
)
def import_() -> None:
    """Import pending messages from JSON lines or from Redis.

    `postdate import TOPIC FILE` reads the output of `postdate export`; see `postdate import file --help`.
    """


import_.add_command(import_redis)
import_.add_command(crontab)
import_.add_command(celery_beat)


@dataclass(frozen=True)
class _Line:
    """A message, and where it stands."""

    number: int
    message: postdate.OutgoingMessage


@dataclass
class _Import:
    """Counts of what became of the file."""

    producer_name: str
    messages: int = 0
    past: int = 0
    first_due: datetime | None = None
    last_due: datetime | None = None
    stored: int = 0
    stored_before: int = 0
    skipped_past: int = 0
    highest: int = 0  # line that the broker is known to have, with all before it


@import_.command("file", short_help="Import the messages of a file of JSON lines.")
@click.argument("topic", type=TOPIC)
@click.argument("path", metavar="FILE", type=click.Path(allow_dash=True, dir_okay=False, exists=True))
@click.option("--dry-run", is_flag=True, help="Check every line; send nothing.")
@click.option(
    "--skip-past",
    is_flag=True,
    help="Skip messages that are already due.  [default: they are delivered at once]",
)
@click.option("--replace", is_flag=True, help="Replace pending messages that have the same schedule keys.")
@click.pass_obj
def import_file(
    settings: Settings, topic: str, path: str, dry_run: bool, skip_past: bool, replace: bool
) -> None:
    """Send the messages of FILE, which `postdate export` wrote, to TOPIC; - is stdin.

    Every line is checked before the first one is sent. An interrupted import can be run again: messages of this file
    that TOPIC has already are not stored a second time.
    """
    with _opened(path) as file:
        run(_import(settings, topic, file, dry_run=dry_run, skip_past=skip_past, replace=replace))


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """The file, which can be read twice."""
    if path != "-":
        with open(path, "rb") as file:
            if file.seekable():
                yield file
                return
            with _spooled(file) as copy:
                yield copy
    else:
        with _spooled(sys.stdin.buffer) as copy:
            yield copy


@contextmanager
def _spooled(file: BinaryIO) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(file, copy)
        copy.seek(0)
        yield copy


async def _import(
    settings: Settings, topic: str, file: BinaryIO, *, dry_run: bool, skip_past: bool, replace: bool
) -> None:
    async with settings.client() as client:
        limits = (await client.server_info()).limits
        policy = (await _topic(client, topic)).effective_policy
        if policy.dedup_window == timedelta(0) and not dry_run:
            raise CommandFailed(
                f"{topic} remembers no sequence ids, so a second run would store everything twice; "
                f"postdate topic update {topic} --dedup-window 10m",
                EXIT_FAILED,
            )
        with progress_bar(settings) as progress:
            try:
                result = _check(file, limits, policy, progress)
            except BadLine as error:
                raise CommandFailed(f"{error}; nothing was sent", EXIT_FAILED) from None
            if not dry_run:
                await _send(client, topic, file, result, progress, skip_past=skip_past, replace=replace)
    _report(settings, result, dry_run=dry_run, skip_past=skip_past)


async def _topic(client: postdate.Client, topic: str) -> postdate.TopicDescription:
    try:
        return await client.topics.get(topic)
    except postdate.NotFound as error:
        # Made by the way, it would have settings that nobody chose; and a million messages should not go to a typo.
        text = f"{describe(error)}; make it first: postdate topic create {topic}"
        raise CommandFailed(text, EXIT_NOT_FOUND) from None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(LINE_BYTES_MAX):
        yield line


def _check(
    file: BinaryIO, limits: postdate.ServerLimits, policy: postdate.TopicPolicy, progress: Progress
) -> _Import:
    """Read the whole file; BadLine names the first line that is wrong, or that the broker would refuse."""
    # With the first message, for people who write files by hand use an id twice.
    id, first = read_header(file.readline(LINE_BYTES_MAX)), file.readline(LINE_BYTES_MAX)
    result = _Import(f"postdate-import-{id}-{hashlib.sha256(first).hexdigest()[:8]}")
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    now = datetime.now(UTC)
    latest = now + policy.max_delay if policy.max_delay else None
    bar = progress.add_task("checked, bytes", total=size)
    done = len(file.readline(LINE_BYTES_MAX))
    for number, line_bytes, message in read_messages(_lines(file)):
        due = message.deliver_at
        assert due is not None
        if latest is not None and due > latest:
            days = policy.max_delay
            raise BadLine(number, f"{due.isoformat()} is more than the topic's max_delay ({days}) from now")
        _check_sizes(number, message, limits)
        result.messages += 1
        result.past += due <= now
        result.first_due = due if result.first_due is None else min(due, result.first_due)
        result.last_due = due if result.last_due is None else max(due, result.last_due)
        done += line_bytes
        if result.messages % _BATCH_MESSAGES == 0:
            progress.update(bar, completed=done)
    progress.update(bar, completed=size)
    return result


def _check_sizes(number: int, message: postdate.OutgoingMessage, limits: postdate.ServerLimits) -> None:
    properties = message.properties or {}
    sizes = (
        ("payload", len(message.payload), limits.payload_bytes_max, "bytes"),
        ("key", len(message.key.encode()), limits.key_bytes_max, "bytes"),
        ("schedule_key", len(message.schedule_key.encode()), limits.schedule_key_bytes_max, "bytes"),
        ("properties", len(properties), limits.properties_count_max, "entries"),
    )
    for name, size, limit, unit in sizes:
        if size > limit:
            raise BadLine(number, f"{name} has {size:,} {unit}; this broker takes {limit:,}")


def _batches(file: BinaryIO, messages_max: int) -> Iterator[list[_Line]]:
    """As many lines as go in one request. One schedule key twice in one would be refused."""
    file.seek(0)
    file.readline(LINE_BYTES_MAX)
    batch: list[_Line] = []
    keys: set[str] = set()
    size = 0
    for number, line_bytes, message in read_messages(_lines(file)):
        size += line_bytes
        if batch and (len(batch) == messages_max or size > _BATCH_BYTES or message.schedule_key in keys):
            yield batch
            batch, keys, size = [], set(), line_bytes
        batch.append(_Line(number, message))
        if message.schedule_key:
            keys.add(message.schedule_key)
    if batch:
        yield batch


async def _send(
    client: postdate.Client,
    topic: str,
    file: BinaryIO,
    result: _Import,
    progress: Progress,
    *,
    skip_past: bool,
    replace: bool,
) -> None:
    limits = (await client.server_info()).limits
    messages_max = min(_BATCH_MESSAGES, limits.batch_messages_max)
    bar = progress.add_task("imported", total=result.messages)
    batches = _batches(file, messages_max)
    async with client.producer(
        topic,
        producer_name=result.producer_name,
        batch_messages_max=messages_max,
        batch_bytes_max=_REQUEST_BYTES,
        in_flight_max=1,
    ) as producer:
        try:
            batch = next(batches, None)
            while batch is not None:
                # One at a time, or a refused batch would leave a hole; the next is read while this one is stored.
                sending = asyncio.create_task(_send_batch(producer, batch, result, skip_past, replace))
                following = await asyncio.to_thread(next, batches, None)
                await sending
                progress.update(bar, advance=len(batch))
                batch = following
        except postdate.PostdateError as error:
            raise _stopped(error, result) from error
        except asyncio.CancelledError:
            raise CommandFailed(_so_far(result, "interrupted"), EXIT_INTERRUPTED) from None


async def _send_batch(
    producer: postdate.Producer, batch: list[_Line], result: _Import, skip_past: bool, replace: bool
) -> None:
    if skip_past:
        now = datetime.now(UTC)
        waiting = [line for line in batch if line.message.deliver_at is None or line.message.deliver_at > now]
        result.skipped_past += len(batch) - len(waiting)
        batch = waiting
    while True:
        known = sum(line.number <= result.highest for line in batch)
        result.stored_before += known
        batch = batch[known:]
        if not batch:
            return
        for line in batch:
            line.message.sequence_id = line.number
        try:
            receipts = await send_patiently(producer, [line.message for line in batch], replace=replace)
        except postdate.FailedPrecondition as error:
            if error.reason != "SEQUENCE_TOO_OLD":
                raise _located(error, batch) from error
            result.highest = int(error.metadata["highest_sequence_id"])
            continue
        except postdate.PostdateError as error:
            raise _located(error, batch) from error
        repeats = sum(ids.id_count for ids in receipts.ranges if ids.duplicate)
        result.stored_before += repeats
        result.stored += len(batch) - repeats
        return


def _located(error: postdate.PostdateError, batch: list[_Line]) -> postdate.PostdateError:
    """The same, with the line of the file where the broker names the message."""
    if found := _INDEX.search(error.field):
        number = batch[int(found[1])].number
        error.message = f"line {number:,}: {error.message}"
    return error


def _stopped(error: postdate.PostdateError, result: _Import) -> CommandFailed:
    code = exit_code(error)
    if code == EXIT_FAILED and result.stored + result.stored_before:
        code = EXIT_PARTLY
    return CommandFailed(_so_far(result, describe(error)), code)


def _so_far(result: _Import, why: str) -> str:
    done = result.stored + result.stored_before
    return (
        f"{why}; at least {counted(done, 'message')} of {result.messages:,} are stored, run it again to go on"
    )


def _report(settings: Settings, result: _Import, *, dry_run: bool, skip_past: bool) -> None:
    fields: dict[str, Any] = {
        "messages": result.messages,
        "past_due": result.past,
        "first_due": None if result.first_due is None else result.first_due.astimezone(UTC).isoformat(),
        "last_due": None if result.last_due is None else result.last_due.astimezone(UTC).isoformat(),
    }
    if dry_run:
        emit_one(settings, {"dry_run": True} | fields)
        click.echo("dry run: every line is valid, nothing was sent", err=True)
    else:
        counts = {
            "stored": result.stored,
            "stored_before": result.stored_before,
            "skipped_past_due": result.skipped_past,
        }
        emit_one(settings, fields | counts)
        if result.messages and result.stored_before == result.messages:
            click.echo("nothing was sent: the topic already has all messages of this file", err=True)
    if result.past and not skip_past:
        would = "would be" if dry_run else "is" if result.past == 1 else "are"
        click.echo(
            f"{counted(result.past, 'message')} due already {would} delivered at once; --skip-past leaves such out",
            err=True,
        )
