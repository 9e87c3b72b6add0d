"""`postdate consume`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click

import postdate
from postdate.commands.completion import SUBSCRIPTION, TOPIC
from postdate.commands.output import emit_lines, message_record, plain, progress_bar
from postdate.commands.settings import (
    EXIT_INTERRUPTED,
    EXIT_PARTLY,
    Command,
    CommandFailed,
    Settings,
    describe,
    run,
)
from postdate.commands.values import DURATION, local, show_duration

_AT_ONCE = 1000
_IDLE = timedelta(seconds=2)


@click.command("consume", cls=Command, short_help="Receive, print and acknowledge messages.")
@click.argument("topic", type=TOPIC)
@click.argument("subscription", type=SUBSCRIPTION)
@click.option("--count", type=click.IntRange(1), help="Stop after this number of messages.")
@click.option("--follow", is_flag=True, help="Run until interrupted.")
@click.option(
    "--idle",
    type=DURATION,
    help="Stop when no message arrived for this time.  [default: 2s, or never with --count or --follow]",
)
@click.option(
    "--type",
    "kind",
    type=click.Choice([each.name.lower() for each in postdate.SubscriptionType]),
    help="Type of the subscription.  [default: that of the existing subscription, or shared]",
)
@click.option(
    "--from", "start", type=click.Choice(["earliest", "latest"]), help="First message of a new subscription."
)
@click.option(
    "--no-ack",
    is_flag=True,
    help="Do not acknowledge: the messages are returned when the command ends, and no delivery attempt is counted.",
)
@click.option("--lease", type=DURATION, help="Lease of the messages received.")
@click.pass_obj
def consume(settings: Settings, /, topic: str, subscription: str, **options: Any) -> None:
    """Receive messages of SUBSCRIPTION of TOPIC, print and acknowledge them.

    With --count, the command waits for that number of messages. Without --count and --follow, it ends when no message
    has arrived for the time of --idle.
    """
    count = options["count"]
    idle: timedelta | None = None if options["follow"] else options["idle"]
    if idle is None and count is None and not options["follow"]:
        idle = _IDLE
    taken, interrupted = run(_consume(settings, topic, subscription, options, idle))
    if interrupted and not options["follow"]:
        raise CommandFailed(f"interrupted after {taken} messages", EXIT_INTERRUPTED)
    if count is not None and taken < count and not interrupted:
        raise CommandFailed(f"{taken} of {count} messages came", EXIT_PARTLY)
    # For people: a script sees that there is no output, and cron mails what is on stderr.
    if idle is not None and not taken and not interrupted and sys.stderr.isatty():
        click.echo(f"no message came within {show_duration(idle)}; --follow waits for messages", err=True)


async def _consume(
    settings: Settings, topic: str, subscription: str, options: dict[str, Any], idle: timedelta | None
) -> tuple[int, bool]:
    count: int | None = options["count"]
    interrupted = False
    async with settings.client() as client:
        consumer = client.subscribe(
            topic,
            subscription,
            type=postdate.SubscriptionType[options["kind"].upper()] if options["kind"] else None,
            initial_position=postdate.InitialPosition[options["start"].upper()] if options["start"] else None,
            lease=options["lease"],
            limit=count,
            on_connection=tell_of_connection,
        )
        async with consumer:

            def interrupt() -> None:
                nonlocal interrupted
                interrupted = True
                consumer.stop()  # what was printed is still acked and confirmed

            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, interrupt)
            taken = await _print_all(settings, consumer, count, idle, ack=not options["no_ack"])
    return taken, interrupted


async def _print_all(
    settings: Settings,
    consumer: postdate.Subscription,
    count: int | None,
    idle: timedelta | None,
    *,
    ack: bool,
) -> int:
    taken = 0
    printer = Printer(settings.output, message_line)
    with progress_bar(settings) as progress:
        bar = progress.add_task("received", total=count)
        while messages := await consumer.receive_many(_AT_ONCE, timeout=idle):
            printer.print(messages)
            taken += len(messages)
            progress.update(bar, advance=len(messages))
            if ack:
                for message in messages:
                    consumer.ack_nowait(message)
    printer.end()
    return taken


def tell_of_connection(error: postdate.PostdateError | None) -> None:
    """Say that the connection broke, or that there is one again: a consumer tries for as long as it is open."""
    text = "connected again" if error is None else f"{plain(describe(error))}; trying again"
    # Not `click.echo`, which writes into a progress bar instead of above it.
    print(f"postdate: {text}", file=sys.stderr)


class Printer:
    """Prints messages as they come; a JSON document is one array."""

    def __init__(self, output: str, line: Callable[[postdate.Message], str]) -> None:
        self._output = output
        self._line = line
        self._first = True

    def print(self, messages: list[postdate.Message]) -> None:
        if self._output == "jsonl":
            emit_lines(map(message_record, messages))
        elif self._output == "json":
            for message in messages:
                text = json.dumps(message_record(message), indent=2)
                sys.stdout.write(("[\n" if self._first else ",\n") + text)
                self._first = False
        else:
            sys.stdout.write("".join(map(self._line, messages)))
        sys.stdout.flush()

    def end(self) -> None:
        if self._output == "json":
            sys.stdout.write("[]\n" if self._first else "\n]\n")
            sys.stdout.flush()


def message_line(message: postdate.Message) -> str:
    """A message on one line of a terminal, its due time first."""
    key = f" key={plain(message.key)}" if message.key else ""
    again = f" attempt={message.attempt}" if message.attempt > 1 else ""
    payload = plain(message.payload.decode(errors="backslashreplace"))
    when = local(message.deliver_at).isoformat(timespec="milliseconds")
    return f"{when} {message.id}{key}{again} {payload}\n"
