"""`postdate-broker compact`: what its options mean, what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import click

from broker.errors import Fenced, PostdateError
from broker.folder.shard_folders import lock_folder, read_shards, shard_folder
from broker.jobs.compact import CompactRequest, Tell, TopicResult, run_compact
from broker.jobs.compact_offline import open_offline
from broker.jobs.compact_plan import CompactLimits, TopicPlan
from broker.jobs.engine import Engine
from broker.jobs.engines import choose_engine
from broker.jobs.folder import used_shards
from broker.jobs.java import JavaMissing
from broker.jobs.progress import Progress
from broker.jobs.spark_session import SparkMissing
from broker.rpc.compaction_client import RemoteDesk
from broker.runtime.clock import SystemClock
from broker.runtime.vfs import LocalVfs
from broker.topic_shards import shard_of

DONE, PARTLY, FAILED, ALREADY_RUNNING = 0, 1, 3, 4

_MIB = 1 << 20
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class CompactOptions:
    """As given on the command line."""

    connect: Callable[[str], RemoteDesk]
    """Takes the folder where the broker's data is seen from here, if that is another than its own."""
    offline: str | None
    data_dir: str | None
    apply: bool
    topics: tuple[str, ...]
    live_ratio: float
    reclaim_mib: int
    ledgers_max: int
    read_gib: int
    engine: str
    master: str


def compact_command(options: CompactOptions) -> int:
    """Run it; returns the exit code."""
    limits = CompactLimits(
        live_ratio_max=options.live_ratio,
        reclaim_bytes_min=options.reclaim_mib * _MIB,
        ledgers_max=options.ledgers_max,
        read_bytes_max=options.read_gib << 30,
    )
    engine = choose_engine(options.engine, options.master)
    shown = _Shown(is_apply=options.apply, engine=engine.name)
    try:
        request = CompactRequest(options.apply, options.topics, limits)
        results = asyncio.run(_run(options, request, engine, shown))
    except Fenced as error:
        click.echo(error.message, err=True)
        return ALREADY_RUNNING
    except (PostdateError, OSError, SparkMissing, JavaMissing) as error:
        click.echo(str(error), err=True)
        return FAILED
    finally:
        shown.end_line()
    shown.sum_up(results)
    if any(result.is_running for result in results):
        return ALREADY_RUNNING
    is_whole = all(
        not result.error and not (result.committed and result.committed.refused) for result in results
    )
    return DONE if is_whole else PARTLY


async def _run(
    options: CompactOptions, request: CompactRequest, engine: Engine, shown: _Shown
) -> list[TopicResult]:
    if options.offline is None:
        async with options.connect(options.data_dir or "") as desk:
            return await run_compact(desk, engine, request, shown.tell())
    vfs, folder = LocalVfs(), options.offline.rstrip("/") or "/"
    shards = read_shards(vfs, folder)
    if not shards:
        return await _run_offline(vfs, folder, engine, request, shown)
    results: list[TopicResult] = []
    lock = lock_folder(vfs, folder)
    try:
        used = used_shards(vfs, folder, shards)
        for number in range(shards):
            topics = tuple(topic for topic in request.topics if shard_of(topic, shards) == number)
            if request.topics and not topics:
                continue
            if number not in used:
                click.echo(f"Shard {number}: nothing was ever stored here.")
                for topic in topics:
                    results.append(TopicResult(topic, error=f"There is no topic {topic!r}"))
                    shown.finished(results[-1])
                continue
            click.echo(f"Shard {number}:")
            part = replace(request, topics=topics)
            results += await _run_offline(vfs, shard_folder(folder, number), engine, part, shown)
    finally:
        lock.close()
    return results


async def _run_offline(
    vfs: LocalVfs, folder: str, engine: Engine, request: CompactRequest, shown: _Shown
) -> list[TopicResult]:
    async with open_offline(vfs, SystemClock(), folder) as desk:
        return await run_compact(desk, engine, request, shown.tell())


class _Shown:
    """The plan on standard output, what happens on standard error."""

    def __init__(self, *, is_apply: bool, engine: str) -> None:
        self._is_apply = is_apply
        self._engine = engine
        self._total_bytes = 0
        self._progress = Progress("compact")
        self._begun = time.monotonic()
        self._start_up_seconds = 0.0

    def tell(self) -> Tell:
        return Tell(self.elsewhere, self.planned, self.started, self.progressed, self.finished)

    def elsewhere(self, topics: Mapping[str, Sequence[str]]) -> None:
        for address, names in sorted(topics.items()):
            some = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            owner = (
                f"the node at {address} owns them: run this command there, too"
                if address
                else "their owner is not known"
            )
            click.echo(f"{len(names)} topics are skipped ({some}): {owner}")

    def planned(self, plans: Sequence[TopicPlan]) -> None:
        self._total_bytes = sum(plan.read_bytes for plan in plans)
        for plan in plans:
            ledgers = plan.ledgers
            if ledgers:
                live = sum(ledger.present_count - ledger.settled_count for ledger in ledgers)
                click.echo(
                    f"{plan.topic}: rewrite {len(ledgers)} ledgers of {_size(plan.ledger_bytes)} "
                    f"with {live} live messages, which frees about {_size(plan.freed_bytes)}"
                )
            if plan.buckets:
                waiting = sum(bucket.waiting_count for bucket in plan.buckets)
                click.echo(f"{plan.topic}: merge {len(plan.buckets)} buckets with {waiting} entries into one")
            if plan.left_count:
                click.echo(
                    f"{plan.topic}: {plan.left_count} more ledgers exceed the limits of this run and are left for "
                    "another one"
                )
        if not plans:
            click.echo("Nothing is worth compacting.")
        elif not self._is_apply:
            click.echo("Nothing was changed. Run it with --apply to do this.")

    def started(self, seconds: float) -> None:
        self._start_up_seconds = seconds
        self._begun = time.monotonic()

    def progressed(self, done_bytes: int) -> None:
        part = done_bytes / max(1, self._total_bytes)
        self._progress.show(part, f"{part:4.0%} of {_size(self._total_bytes)}")

    def finished(self, result: TopicResult) -> None:
        self.end_line()
        if result.error:
            click.echo(f"{result.topic}: {result.error}", err=True)
        if result.committed is None:
            return
        for ledger_id, refusal in sorted(result.committed.refused.items()):
            click.echo(f"{result.topic}: ledger {ledger_id} was not replaced: {refusal.value}", err=True)

    def sum_up(self, results: Sequence[TopicResult]) -> None:
        if not self._is_apply or not results:
            return
        committed = [result.committed for result in results if result.committed is not None]
        ledgers = sum(len(topic.ledger_ids) for topic in committed)
        refused = sum(len(topic.refused) for topic in committed)
        merged = sum(topic.bucket_swapped for topic in committed)
        failed = sum(bool(result.error) for result in results)
        seconds = time.monotonic() - self._begun
        click.echo(
            f"{ledgers} ledgers were rewritten, {refused} refused; buckets of {merged} topics were merged; "
            f"{failed} topics failed; {seconds:.1f} s on {self._engine} after {self._start_up_seconds:.1f} s of "
            "start-up. The next checkpoint deletes the old files."
        )

    def end_line(self) -> None:
        self._progress.end()


def _size(count: int) -> str:
    return f"{count / _MIB:,.1f} MiB"
