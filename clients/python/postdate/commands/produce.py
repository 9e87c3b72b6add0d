"""`postdate produce`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, BinaryIO

import click
from rich.progress import Progress, TaskID

import postdate
from postdate.commands.completion import TOPIC
from postdate.commands.output import emit_lines, emit_one, progress_bar
from postdate.commands.settings import (
    EXIT_PARTLY,
    Command,
    CommandFailed,
    Settings,
    describe,
    run,
)
from postdate.commands.values import DURATION, TIME

_BATCH = 1000
_AHEAD = 8  # batches on their way at once
_READ_BYTES = 256 * 1024


@click.command("produce", cls=Command, short_help="Send messages, now or for later.")
@click.argument("topic", type=TOPIC)
@click.option("--payload", help="Text to send.")
@click.option(
    "--file", "path", type=click.Path(allow_dash=True), help="File to send, one message per line; - is stdin."
)
@click.option("--whole", is_flag=True, help="Send the whole file as one message.")
@click.option("--count", type=click.IntRange(1), help="Number of times to send the payload.")
@click.option(
    "--delay", type=DURATION, help="Delay, counted from when the broker accepts the message: 15m, 1h30m, 3d."
)
@click.option("--at", type=TIME, help="Delivery time: 2026-12-24T18:00:00+01:00.")
@click.option("--key", default="", help="Key of the messages.")
@click.option(
    "--schedule-key",
    default="",
    metavar="KEY",
    help="Unique name of the pending message, by which it can be found, moved or cancelled.",
)
@click.option("--replace", is_flag=True, help="Replace the pending message that has this --schedule-key.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    metavar="NAME=VALUE",
    help="Property of the messages. May be repeated.",
)
@click.option("--ttl", type=DURATION, help="Time to live after the due time.")
@click.pass_obj
def produce(settings: Settings, /, topic: str, **options: Any) -> None:
    """Send messages to TOPIC: --payload, the lines of --file, or the lines of stdin."""
    if options["delay"] is not None and options["at"] is not None:
        raise click.UsageError("give --delay or --at, not both")
    if options["payload"] is not None and options["path"] is not None:
        raise click.UsageError("give --payload or --file, not both")
    if options["count"] is not None and options["payload"] is None:
        raise click.UsageError("--count requires --payload")
    if options["whole"] and options["path"] is None:
        raise click.UsageError("--whole requires --file")
    if options["replace"] and not options["schedule_key"]:
        raise click.UsageError("--replace requires --schedule-key")
    is_one = options["whole"] or (options["payload"] is not None and options["count"] in {None, 1})
    if options["schedule_key"] and not is_one:
        raise click.UsageError(
            "--schedule-key names one message: give --payload once, or --file with --whole"
        )
    template = _Template(
        key=options["key"],
        schedule_key=options["schedule_key"],
        properties=_properties(options["properties"]),
        deliver_after=options["delay"],
        deliver_at=options["at"],
        ttl=options["ttl"],
    )
    if options["payload"] is None and options["path"] in {None, "-"} and sys.stdin.isatty():
        what = "one message" if options["whole"] else "lines"
        click.echo(f"reading {what} from the terminal; end with Ctrl-D", err=True)
        if settings.progress is None:  # a bar would be drawn over what is typed
            settings = replace(settings, progress=False)
    source, total = _source(options["payload"], options["path"], options["whole"], options["count"] or 1)
    sent = _Sent(settings, template, replace=options["replace"])
    run(_send(settings, topic, source, total, sent))
    sent.report()


class _Template:
    """Settings that all messages of one command have in common."""

    def __init__(
        self,
        *,
        key: str,
        schedule_key: str,
        properties: dict[str, str],
        deliver_after: timedelta | None,
        deliver_at: datetime | None,
        ttl: timedelta | None,
    ) -> None:
        self._fields: dict[str, Any] = {
            "key": key,
            "schedule_key": schedule_key,
            "properties": properties or None,
            "deliver_after": deliver_after,
            "deliver_at": deliver_at,
            "ttl": ttl,
        }

    def message(self, payload: bytes) -> postdate.OutgoingMessage:
        return postdate.OutgoingMessage(payload, **self._fields)


class _Sent:
    """Messages to send, and what became of them."""

    def __init__(self, settings: Settings, template: _Template, *, replace: bool) -> None:
        self.template = template
        self.replace = replace
        self._settings = settings
        self.stored_count = 0
        self.failed_count = 0
        self.ranges: list[postdate.IdRange] = []
        self.error: postdate.PostdateError | None = None

    def stored(self, receipts: postdate.Receipts) -> None:
        self.stored_count += len(receipts)
        if self._settings.output == "jsonl":
            emit_lines(_range_record(ids) for ids in receipts.ranges)
        else:
            self.ranges += receipts.ranges

    def failed(self, count: int, error: postdate.PostdateError) -> None:
        self.failed_count += count
        self.error = self.error or error

    def report(self) -> None:
        if self._settings.output == "json":
            fields = {"stored": self.stored_count, "failed": self.failed_count}
            emit_one(self._settings, fields | {"ranges": [_range_record(ids) for ids in self.ranges]})
        elif self._settings.output == "table" and self.stored_count:
            first, last = self.ranges[0], self.ranges[-1]
            ids = f"{first.ledger_id}:{first.first_entry_id}"
            if self.stored_count > 1:
                ids += f" to {last.ledger_id}:{last.first_entry_id + last.id_count - 1}"
            noun = "message" if self.stored_count == 1 else "messages"
            click.echo(f"stored {self.stored_count:,} {noun}, {ids}")
        if self.error is None:
            if not self.stored_count:
                click.echo("nothing to send", err=True)
            return
        if not self.stored_count:
            raise self.error
        text = f"{self.failed_count:,} messages failed: {describe(self.error)}"
        raise CommandFailed(text, EXIT_PARTLY)


def _range_record(ids: postdate.IdRange) -> dict[str, Any]:
    return {
        "ledger_id": ids.ledger_id,
        "first_entry_id": ids.first_entry_id,
        "count": ids.id_count,
        "publish_time": ids.publish_time.isoformat(),
    }


async def _send(
    settings: Settings,
    topic: str,
    source: Iterator[list[bytes]],
    total: int | None,
    sent: _Sent,
) -> None:
    slots = asyncio.Semaphore(_AHEAD)
    async with settings.client() as client, client.producer(topic) as producer:
        with progress_bar(settings) as progress:
            bar = progress.add_task("sent", total=total)

            async def send(payloads: list[bytes]) -> None:
                try:
                    messages = [sent.template.message(each) for each in payloads]
                    receipts = await producer.send_many(messages, replace=sent.replace)
                    sent.stored(receipts)
                except postdate.PostdateError as error:
                    sent.failed(len(payloads), error)
                finally:
                    slots.release()
                    _advance(progress, bar, len(payloads))

            async with asyncio.TaskGroup() as tasks:
                while sent.error is None:
                    await slots.acquire()
                    # Reading blocks where the other end of a pipe is slow.
                    payloads = await asyncio.to_thread(next, source, None)
                    if payloads is None:
                        break
                    tasks.create_task(send(payloads))


def _advance(progress: Progress, bar: TaskID, count: int) -> None:
    progress.update(bar, advance=count)


def _source(
    payload: str | None, path: str | None, whole: bool, count: int
) -> tuple[Iterator[list[bytes]], int | None]:
    if payload is not None:
        return _repeated(payload.encode(), count), count
    try:
        file = sys.stdin.buffer if path in {None, "-"} else open(str(path), "rb")  # noqa: SIM115
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from None
    if whole:
        return iter([[file.read()]]), 1
    return _lines(file), None


def _repeated(payload: bytes, count: int) -> Iterator[list[bytes]]:
    while count:
        size = min(count, _BATCH)
        yield [payload] * size
        count -= size


def _lines(file: BinaryIO) -> Iterator[list[bytes]]:
    """Lists of lines as they come: what a slow pipe has given is not kept waiting for more."""
    with file:
        rest = b""
        while chunk := os.read(file.fileno(), _READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for start in range(0, len(lines), _BATCH):
                yield lines[start : start + _BATCH]
        if rest:
            yield [rest]


def _properties(pairs: tuple[str, ...]) -> dict[str, str]:
    properties = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise click.UsageError(f"--property must be NAME=VALUE, not {pair!r}")
        properties[name] = value
    return properties
