"""`postdate dlq`: the messages that a subscription gave up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click

import postdate
from postdate.commands.completion import SUBSCRIPTION, TOPIC
from postdate.commands.output import RowStream, emit_one, payload_fields, progress_bar
from postdate.commands.settings import (
    EXIT_PARTLY,
    CommandFailed,
    CommandGroup,
    Settings,
    describe,
    not_confirmed,
    run,
)
from postdate.commands.values import AGO, DURATION, MESSAGE_ID, limit_option

_COLUMNS = ["id", "original_id", "attempts", "reason", "last_reason", "time", "payload_bytes", "key"]
_LOOK_EVERY_S = 0.2  # at how many are left, for the progress bar

_IDS = click.argument("ids", nargs=-1, type=MESSAGE_ID, metavar="[ID]...")
_ALL = click.option("--all", "every", is_flag=True, help="All dead letters of the subscription.")


@click.group(cls=CommandGroup, short_help="List, requeue and purge dead letters.")
def dlq() -> None:
    """List, requeue and purge dead letters, the messages that a subscription gave up."""


@dlq.command("list")
@click.argument("topic", type=TOPIC)
@click.argument("subscription", type=SUBSCRIPTION)
@click.option("--reason", default="", help="Only those whose reason or last reason contains this text.")
@click.option(
    "--from", "start", type=AGO, metavar="WHEN", help="Given up at this time or later: 15m (ago), or a time."
)
@click.option(
    "--until", "end", type=AGO, metavar="WHEN", help="Given up before this time: 15m (ago), or a time."
)
@limit_option("oldest first")
@click.option("--payload", is_flag=True, help="Also show payloads.")
@click.pass_obj
def list_dead_letters(
    settings: Settings,
    topic: str,
    subscription: str,
    reason: str,
    start: datetime | None,
    end: datetime | None,
    limit: int | None,
    payload: bool,
) -> None:
    """List the dead letters of SUBSCRIPTION of TOPIC, oldest first."""

    async def work() -> None:
        rows = RowStream(settings, [*_COLUMNS, "payload"] if payload else _COLUMNS)
        async with settings.client() as client:
            letters = client.dead_letters.list(
                topic, subscription, reason=reason, start=start, end=end, limit=limit, payloads=payload
            )
            async for letter in letters:
                rows.add(_row(letter))
        rows.end()

    run(work())


@dlq.command("requeue")
@click.argument("topic", type=TOPIC)
@click.argument("subscription", type=SUBSCRIPTION)
@_IDS
@_ALL
@click.option("--yes", is_flag=True, help="Confirm; required with --all.")
@click.option("--delay", type=DURATION, help="Deliver them after this delay.")
@click.pass_obj
def requeue(
    settings: Settings,
    topic: str,
    subscription: str,
    ids: tuple[postdate.MessageId, ...],
    every: bool,
    yes: bool,
    delay: timedelta | None,
) -> None:
    """Requeue dead letters to SUBSCRIPTION, as new messages that no other subscription receives."""
    _check(ids, every)

    async def work() -> None:
        async with settings.client() as client:
            if every and not yes:
                await _refuse(settings, client, topic, subscription, ids, "requeued")
                return
            call = partial(
                client.dead_letters.requeue, topic, subscription, ids, all=every, deliver_after=delay
            )
            change = await _follow(settings, client, topic, subscription, "requeued", call)
        _report(settings, "requeued", change)

    run(work())


@dlq.command("purge")
@click.argument("topic", type=TOPIC)
@click.argument("subscription", type=SUBSCRIPTION)
@_IDS
@_ALL
@click.option("--yes", is_flag=True, help="Confirm the operation (required).")
@click.pass_obj
def purge(
    settings: Settings,
    topic: str,
    subscription: str,
    ids: tuple[postdate.MessageId, ...],
    every: bool,
    yes: bool,
) -> None:
    """Discard dead letters of SUBSCRIPTION permanently."""
    _check(ids, every)

    async def work() -> None:
        async with settings.client() as client:
            if not yes:
                await _refuse(settings, client, topic, subscription, ids, "purged")
                return
            call = partial(client.dead_letters.purge, topic, subscription, ids, all=every)
            change = await _follow(settings, client, topic, subscription, "purged", call)
        _report(settings, "purged", change)

    run(work())


def _check(ids: tuple[postdate.MessageId, ...], every: bool) -> None:
    if bool(ids) == every:
        raise click.UsageError("give either ids or --all")


async def _refuse(
    settings: Settings,
    client: postdate.Client,
    topic: str,
    subscription: str,
    ids: tuple[postdate.MessageId, ...],
    done: str,
) -> None:
    """Without --yes: say how many it would be, and fail if it is any."""
    await client.subscriptions.get(topic, subscription)  # of one that is not there, nobody says how many
    count = len(set(ids)) or await _left(client, topic, subscription)
    emit_one(settings, {"matched": count, done: 0})
    if count:
        raise not_confirmed(done)


async def _follow(
    settings: Settings,
    client: postdate.Client,
    topic: str,
    subscription: str,
    done: str,
    change: Callable[[], Coroutine[Any, Any, postdate.DeadLetterChange]],
) -> postdate.DeadLetterChange:
    """Await a change; the bar shows how many dead letters went since it began."""
    with progress_bar(settings) as progress:
        if progress.disable:
            return await change()
        before = await _left(client, topic, subscription)
        bar = progress.add_task(done, total=before)
        work = asyncio.create_task(change())
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_LOOK_EVERY_S)
                left = await _left(client, topic, subscription)
                progress.update(bar, completed=max(0, before - left))
        finally:
            work.cancel()
        return await work


async def _left(client: postdate.Client, topic: str, subscription: str) -> int:
    (stats,) = await client.stats(topic)
    return sum(each.dead_letter_messages for each in stats.subscriptions if each.name == subscription)


def _report(settings: Settings, done: str, change: postdate.DeadLetterChange) -> None:
    failures = change.failures
    if failures and not change.count:
        raise next(iter(failures.values()))
    emit_one(settings, {done: change.count, "failed": [str(each) for each in failures]})
    if failures:
        first = describe(next(iter(failures.values())))
        raise CommandFailed(f"{len(failures)} were not {done}: {first}", EXIT_PARTLY)


def _row(letter: postdate.DeadLetter) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": str(letter.id),
        "dead_letter_topic": letter.dead_letter_topic,
        "original_id": str(letter.original_id),
        "attempts": letter.attempts,
        "reason": letter.reason,
        "last_reason": letter.last_reason,
        "time": letter.time.isoformat(),
        "payload_bytes": letter.payload_bytes,
        "key": letter.key,
        "properties": dict(letter.properties),
    }
    return row if letter.payload is None else row | payload_fields(letter.payload)
