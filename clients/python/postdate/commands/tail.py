"""`postdate tail`: watch a topic without taking anything from its subscriptions."""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import postdate
from postdate.commands.completion import TOPIC
from postdate.commands.consume import Printer, message_line, tell_of_connection
from postdate.commands.output import plain, show
from postdate.commands.settings import Command, Settings, describe, run
from postdate.commands.values import counted, local, local_time_ms, local_zone, show_duration

_PREFIX = "postdate-tail-"
_ABANDONED_AFTER = timedelta(minutes=1)  # longer than one takes from its making to its consumer
_AT_ONCE = 1000
_REFRESH_S = 0.5
_ROWS_AROUND = 5  # lines of the screen that are not messages


@click.command("tail", cls=Command, short_help="Follow a topic without affecting its subscriptions.")
@click.argument("topic", type=TOPIC)
@click.option(
    "--produced", is_flag=True, help="Show messages when the broker stores them, not when they are due."
)
@click.option(
    "--scheduled", is_flag=True, help="Show the next messages to become due, updated until interrupted."
)
@click.option("--count", type=click.IntRange(1), help="Stop after this number of messages.")
@click.pass_obj
def tail(settings: Settings, topic: str, produced: bool, scheduled: bool, count: int | None) -> None:
    """Show the messages of TOPIC as they become due, until interrupted.

    The command uses a temporary subscription, so the other subscriptions of TOPIC are not affected. If it is killed,
    its subscription is deleted by the next `postdate tail` of TOPIC.
    """
    if scheduled and (produced or count):
        raise click.UsageError("--scheduled cannot be combined with --produced and --count")
    if scheduled and not (sys.stdout.isatty() and settings.output == "table"):
        raise click.UsageError("--scheduled requires a terminal; use postdate schedule list instead")
    with suppress(KeyboardInterrupt):  # how it is meant to end
        run(_watch(settings, topic) if scheduled else _tail(settings, topic, count, produced=produced))


async def _tail(settings: Settings, topic: str, count: int | None, *, produced: bool) -> None:
    printer = Printer(settings.output, _stored_line if produced else message_line)
    async with settings.client() as client, _subscription(client, topic, produced=produced) as name:
        since = (await client.server_info()).broker_time
        async with client.subscribe(topic, name, on_connection=tell_of_connection) as consumer:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, consumer.stop)
            click.echo(f"following {plain(topic)}; end with Ctrl-C", err=True)
            left = count
            while messages := await consumer.receive_many(_AT_ONCE, timeout=None):
                for message in messages:
                    consumer.ack_nowait(message)
                if not produced:
                    # What was due before came to others then.
                    messages = [each for each in messages if max(each.deliver_at, each.publish_time) >= since]
                printer.print(messages[:left])
                if left is not None and (left := left - len(messages)) <= 0:
                    break
    printer.end()


@asynccontextmanager
async def _subscription(client: postdate.Client, topic: str, *, produced: bool) -> AsyncIterator[str]:
    """A subscription that lasts as long as the context.

    To see what was produced before and is due from now on, it begins at the start of the topic. Nobody handles what it
    is sent, so nothing of it may become a dead letter.
    """
    await _sweep(client, topic)
    name = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    await client.subscriptions.create(
        topic,
        name,
        type=postdate.SubscriptionType.EXCLUSIVE,
        initial_position=postdate.InitialPosition.LATEST if produced else postdate.InitialPosition.EARLIEST,
        policy=postdate.SubscriptionPolicy(max_delivery_attempts=0, honor_delay=not produced),
    )
    try:
        yield name
    finally:
        try:
            await client.subscriptions.delete(topic, name)
        except postdate.NotFound:
            pass  # its topic was deleted
        except postdate.PostdateError as error:
            click.echo(
                f"postdate: the subscription {name} was not deleted: {plain(describe(error))}", err=True
            )


async def _sweep(client: postdate.Client, topic: str) -> None:
    """Delete what others left behind when they were killed."""
    (stats,) = await client.stats(topic)
    idle = {each.name for each in stats.subscriptions if each.name.startswith(_PREFIX) and not each.consumers}
    if not idle:
        return
    now = (await client.server_info()).broker_time
    async for each in client.subscriptions.list(topic):
        if each.name in idle and now - each.create_time > _ABANDONED_AFTER:
            try:
                await client.subscriptions.delete(topic, each.name)
            except postdate.NotFound:
                continue  # somebody else was quicker


def _stored_line(message: postdate.Message) -> str:
    """The line of a message that was stored: when it is due if not at once, and the message."""
    text = message_line(message).partition(" ")[2]
    when = local(message.publish_time).isoformat(timespec="milliseconds")
    delay = message.deliver_at - message.publish_time
    due = f"due in {show_duration(delay)} " if delay > timedelta(0) else ""
    return f"{when} {due}{text}"


async def _watch(settings: Settings, topic: str) -> None:
    console = Console()
    async with settings.client() as client:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                room = max(1, console.height - _ROWS_AROUND)
                (stats,) = await client.stats(topic)
                found = [each async for each in client.schedule.list(topic, limit=room, payloads=True)]
                live.update(upcoming(topic, stats.scheduled_messages, found, datetime.now(UTC)), refresh=True)
                await asyncio.sleep(_REFRESH_S)


def upcoming(topic: str, total: int, found: list[postdate.ScheduledMessage], now: datetime) -> Table:
    """A table of what is due next, one line each."""
    title = f"{plain(topic)}: {counted(total, 'message')} waiting, times in {local_zone(now)}"
    table = Table(title=escape(title), title_justify="left", expand=True)
    for name in ("due", "in", "id"):
        table.add_column(name, no_wrap=True, justify="right" if name == "in" else "left")
    for name in ("schedule key", "payload"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if name == "schedule key" else 2)
    for each in found:
        cells: list[Any] = [
            local_time_ms(each.deliver_at),
            show_duration(max(each.deliver_at - now, timedelta(0))),
            str(each.id),
            each.schedule_key,
            (each.payload or b"")[:500].decode(errors="backslashreplace"),
        ]
        table.add_row(*(Text(show(cell)) for cell in cells))
    return table
