"""`postdate bench`: simple loads from one client.

What the broker can do is measured by the project's `make bench`, with processes of its own; this
is for a look at a broker that runs.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from rich.progress import Progress

import postdate
from postdate._time import epoch_ms
from postdate.commands.output import emit_one, progress_bar
from postdate.commands.replay import forget
from postdate.commands.settings import EXIT_CHECK_FAILED, CommandFailed, CommandGroup, Settings, run
from postdate.commands.tally import percentile
from postdate.commands.values import DURATION, RATE

_SUBSCRIPTION = "bench"
_TICK_S = 0.01
_PATIENCE_S = 10.0


@click.group("bench", cls=CommandGroup, short_help="Measure throughput and lateness, or replay a real log.")
def bench() -> None:
    """Measure the throughput and lateness of a broker under simple loads, or replay a real log."""


@bench.command("produce")
@click.option(
    "--messages", type=click.IntRange(1), default=200_000, show_default=True, help="Number of messages."
)
@click.option("--size", type=click.IntRange(0), default=100, show_default=True, help="Bytes per payload.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Messages per call; 1: one at a time.",
)
@click.option(
    "--tasks", type=click.IntRange(1), default=4, show_default=True, help="Number of concurrent senders."
)
@click.option("--delay", type=DURATION, default="1h", show_default=True, help="Delay of each message.")
@click.option("--topic", help="Topic to use; it is not deleted afterwards.")
@click.pass_obj
def produce(settings: Settings, /, topic: str | None, **options: Any) -> None:
    """Send messages as fast as the broker stores them."""

    async def work() -> float:
        async with _topic(settings, topic) as (client, name):
            return await _load(settings, client, name, **options)

    seconds = run(work())
    _report_rate(settings, options["messages"], options["size"], seconds)


@bench.command("deliver")
@click.option(
    "--messages", type=click.IntRange(1), default=200_000, show_default=True, help="Number of messages."
)
@click.option("--size", type=click.IntRange(0), default=100, show_default=True, help="Bytes per payload.")
@click.option(
    "--permits",
    type=click.IntRange(1),
    default=4000,
    show_default=True,
    help="Number of messages delivered ahead of processing (permits).",
)
@click.option("--topic", help="Topic to use; it is not deleted afterwards.")
@click.pass_obj
def deliver(settings: Settings, topic: str | None, messages: int, size: int, permits: int) -> None:
    """Store messages that are due at once, then receive and acknowledge them."""

    async def work() -> float:
        async with _topic(settings, topic) as (client, name):
            with suppress(postdate.AlreadyExists):  # of a run before, on a topic that is kept
                await client.subscriptions.create(
                    name, _SUBSCRIPTION, initial_position=postdate.InitialPosition.EARLIEST
                )
            load = {"messages": messages, "size": size, "batch": 1000, "tasks": 4}
            await _load(settings, client, name, delay=timedelta(0), **load)
            return await _drain(settings, client, name, messages, permits)

    seconds = run(work())
    _report_rate(settings, messages, size, seconds)


@bench.command("latency")
@click.option("--rate", type=RATE, default="1000", show_default=True, help="Messages per second.")
@click.option("--delay", type=DURATION, default="5s", show_default=True, help="Delay of each message.")
@click.option("--duration", type=DURATION, default="10s", show_default=True, help="Duration of sending.")
@click.option("--size", type=click.IntRange(0), default=100, show_default=True, help="Bytes per payload.")
@click.option("--topic", help="Topic to use; it is not deleted afterwards.")
@click.pass_obj
def latency(settings: Settings, /, topic: str | None, **options: Any) -> None:
    """Measure the lateness of delayed messages; exit code 6 if any is early or missing."""

    async def work() -> dict[str, Any]:
        async with _topic(settings, topic) as (client, name):
            with progress_bar(settings) as progress:
                return await _measure(client, name, progress, **options)

    result = run(work())
    emit_one(settings, result)
    if result["early"] or result["missing"]:
        raise CommandFailed("messages are early or missing", EXIT_CHECK_FAILED)


@asynccontextmanager
async def _topic(settings: Settings, name: str | None) -> AsyncIterator[tuple[postdate.Client, str]]:
    """A topic of our own, deleted afterwards, unless one was named."""
    async with settings.client() as client:
        topic = name or f"bench-{uuid.uuid4().hex[:8]}"
        if name is None:
            await client.topics.create(topic)
        try:
            yield client, topic
        finally:
            if name is None:
                await forget(client, topic)


async def _load(
    settings: Settings,
    client: postdate.Client,
    topic: str,
    *,
    messages: int,
    size: int,
    batch: int,
    tasks: int,
    delay: timedelta,
) -> float:
    payload = os.urandom(size)
    left = messages
    with progress_bar(settings) as progress:
        bar = progress.add_task("sent", total=messages)
        async with client.producer(topic) as producer:

            async def send() -> None:
                nonlocal left
                while left > 0:
                    count = min(batch, left)
                    left -= count
                    if batch == 1:
                        await producer.send(payload, deliver_after=delay)
                    else:
                        await producer.send_many([payload] * count, deliver_after=delay)
                    progress.update(bar, advance=count)

            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(tasks):
                    group.create_task(send())
            return time.perf_counter() - started


async def _drain(
    settings: Settings, client: postdate.Client, topic: str, messages: int, permits: int
) -> float:
    taken = 0
    with progress_bar(settings) as progress:
        bar = progress.add_task("received", total=messages)
        started = time.perf_counter()
        async with client.subscribe(topic, _SUBSCRIPTION, permits=permits, limit=messages) as subscription:
            async for message in subscription:
                subscription.ack_nowait(message)
                taken += 1
                if taken % 1000 == 0:
                    progress.update(bar, completed=taken)
            await subscription.wait_confirmed()
            return time.perf_counter() - started


async def _measure(
    client: postdate.Client,
    topic: str,
    progress: Progress,
    *,
    rate: float,
    delay: timedelta,
    duration: timedelta,
    size: int,
) -> dict[str, Any]:
    total = max(1, round(rate * duration.total_seconds()))
    lateness: list[float] = []
    earliest = postdate.InitialPosition.EARLIEST
    async with (
        client.subscribe(topic, _SUBSCRIPTION, initial_position=earliest, limit=total) as subscription,
        client.producer(topic) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(_send_steadily(producer, progress, total=total, rate=rate, delay=delay, size=size))
        bar = progress.add_task("received", total=total)
        patience = timedelta(seconds=_PATIENCE_S) + delay
        while messages := await subscription.receive_many(1000, timeout=patience):
            arrived_ms = time.time() * 1000
            for message in messages:
                lateness.append(arrived_ms - epoch_ms(message.deliver_at, "deliver_at"))
                subscription.ack_nowait(message)
            progress.update(bar, advance=len(messages))
    early = sum(late < 0 for late in lateness)
    lateness.sort()
    return {
        "messages": total,
        "missing": total - len(lateness),
        "early": early,
        "late_p50_ms": percentile(lateness, 0.5),
        "late_p99_ms": percentile(lateness, 0.99),
        "late_max_ms": percentile(lateness, 1.0),
    }


async def _send_steadily(
    producer: postdate.Producer, progress: Progress, *, total: int, rate: float, delay: timedelta, size: int
) -> None:
    payload = os.urandom(size)
    bar = progress.add_task("sent", total=total)
    started = time.perf_counter()
    sent = 0
    async with asyncio.TaskGroup() as tasks:
        while sent < total:
            owed = min(total, int((time.perf_counter() - started) * rate) + 1) - sent
            if owed > 0:
                due = datetime.now(UTC) + delay
                tasks.create_task(_send_batch(producer, [payload] * owed, due))
                sent += owed
                progress.update(bar, completed=sent)
            await asyncio.sleep(_TICK_S)


async def _send_batch(producer: postdate.Producer, payloads: list[bytes], due: datetime) -> None:
    await producer.send_many(payloads, deliver_at=due)


def _report_rate(settings: Settings, messages: int, size: int, seconds: float) -> None:
    emit_one(
        settings,
        {
            "messages": messages,
            "payload_bytes": size,
            "seconds": round(seconds, 3),
            "messages_per_second": round(messages / seconds),
        },
    )
