"""Compaction: plan, rewrite, hand in; topic by topic, so that one that fails does not sink the run.

The same for a running broker (`rpc.compaction_client`) and for one that serves nobody (`compact_offline`): both are a
`Desk`. Nothing is changed unless `apply` is set.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from broker.errors import PostdateError
from broker.folder.compaction_values import Candidates, Committed, Lease
from broker.jobs.compact_plan import CompactLimits, TopicPlan, plan_topic
from broker.jobs.engine import Engine
from broker.jobs.rewrite import BUCKETS, REWRITE, RewriteResult, RewriteUnit, outputs_of
from broker.storage.compaction_inputs import Outputs

_TRIES = 3
_ROUND_TOPICS = 32  # half of the leases that a broker gives
_ROUND_BYTES = 16 << 30
_MERGE_WEIGHT = 8  # merging an entry of the index costs as much as passing by so many that are left out


class Desk(Protocol):
    """The broker, as a job sees it. Calls raise PostdateError."""

    def data_dir(self, topic: str) -> str:
        """The data directory that has a topic, as seen from here; known after `candidates` of it."""

    async def topics(self) -> list[str]: ...

    async def candidates(self, topic: str) -> Candidates: ...

    async def begin(self, topic: str, ledger_ids: Sequence[int], bucket_ids: Sequence[int]) -> Lease: ...

    async def commit(self, compaction_id: str, epoch: int, outputs: Outputs) -> Committed: ...

    async def abort(self, compaction_id: str, epoch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class TopicResult:
    """Result for one topic."""

    topic: str
    planned: TopicPlan | None = None
    committed: Committed | None = None
    unchanged: int = 0  # ledgers of which nothing would go
    error: str = ""
    is_running: bool = False  # another job is at work on it


@dataclass(slots=True)
class Tell:
    """Listener that hears what a run does."""

    elsewhere: Callable[[Mapping[str, Sequence[str]]], None] = lambda topics: None
    """Topics that were passed over, by the address of the node that has their files."""
    planned: Callable[[Sequence[TopicPlan]], None] = lambda plans: None
    started: Callable[[float], None] = lambda start_up_seconds: None
    progress: Callable[[int], None] = lambda done_bytes: None  # of all that is planned
    finished: Callable[[TopicResult], None] = lambda result: None


@dataclass(slots=True)
class CompactRequest:
    """Options of a run."""

    apply: bool = False
    topics: tuple[str, ...] = ()  # none: all
    limits: CompactLimits = field(default_factory=CompactLimits)


async def run_compact(desk: Desk, engine: Engine, request: CompactRequest, tell: Tell) -> list[TopicResult]:
    """Plan all topics, and with `apply` do what is planned. Raises PostdateError if there is no broker to ask.

    The engine is started only if there is something to do; raises what its start raises.
    """
    plans: list[TopicPlan] = []
    results: list[TopicResult] = []
    elsewhere: dict[str, list[str]] = {}
    budget = request.limits.read_bytes_max
    for topic in request.topics or await desk.topics():
        try:
            candidates = await desk.candidates(topic)
            plan = plan_topic(candidates, request.limits, budget)
        except PostdateError as error:
            results.append(_failed(topic, error))
            tell.finished(results[-1])
            continue
        if candidates.owner_address is not None:
            elsewhere.setdefault(candidates.owner_address, []).append(topic)
        budget -= plan.read_bytes
        if not plan.is_empty or plan.left_count:
            plans.append(plan)
    tell.elsewhere(elsewhere)
    tell.planned(plans)
    todo = [plan for plan in plans if not plan.is_empty]
    if request.apply and todo:
        return results + await _apply(desk, engine, todo, request.limits, tell)
    return results + [TopicResult(plan.topic, plan) for plan in todo]


async def _apply(
    desk: Desk, engine: Engine, plans: Sequence[TopicPlan], limits: CompactLimits, tell: Tell
) -> list[TopicResult]:
    results: list[TopicResult] = []
    done_bytes = 0
    started = time.monotonic()
    try:
        await asyncio.to_thread(engine.start)
        tell.started(time.monotonic() - started)
        for some in _rounds(plans):
            round_bytes = sum(plan.read_bytes for plan in some)

            def progress(part: float, before: int = done_bytes, size: int = round_bytes) -> None:
                tell.progress(before + int(part * size))

            results += await _Round(desk, engine, limits, tell, progress).run(some)
            done_bytes += round_bytes
    finally:
        await asyncio.to_thread(engine.stop)
    return results


def _rounds(plans: Sequence[TopicPlan]) -> Iterator[list[TopicPlan]]:
    """Yield what is leased and worked on together: enough to keep all cores busy, and done long before a lease ends."""
    some: list[TopicPlan] = []
    size = 0
    for plan in plans:
        if some and (len(some) == _ROUND_TOPICS or size + plan.read_bytes > _ROUND_BYTES):
            yield some
            some, size = [], 0
        some.append(plan)
        size += plan.read_bytes
    if some:
        yield some


@dataclass(slots=True)
class _Begun:
    """A topic that is worked on."""

    plan: TopicPlan
    lease: Lease
    units: list[RewriteUnit]
    results: list[RewriteResult] = field(default_factory=list)


class _Round:
    """Some topics: leased, worked on by the engine together, and handed in one by one as each is complete."""

    def __init__(
        self,
        desk: Desk,
        engine: Engine,
        limits: CompactLimits,
        tell: Tell,
        progress: Callable[[float], None],
    ) -> None:
        self._desk = desk
        self._engine = engine
        self._limits = limits
        self._tell = tell
        self._progress = progress
        self._begun: dict[str, _Begun] = {}  # by folder, until they are handed in
        self._done: list[TopicResult] = []

    async def run(self, plans: Sequence[TopicPlan]) -> list[TopicResult]:
        try:
            for plan in plans:
                await self._begin(plan)
            units = [unit for topic in self._begun.values() for unit in topic.units]
            # A commit takes the broker as long as the work took the job, so it goes on beside the rest of the work.
            async with asyncio.TaskGroup() as commits:
                async for result in _run(self._engine, units, self._progress):
                    begun = self._begun[result.folder]
                    begun.results.append(result)
                    if len(begun.results) == len(begun.units):
                        del self._begun[result.folder]
                        commits.create_task(self._hand_in(begun))
        finally:  # of what was interrupted: its leases would keep the next run waiting
            for begun in self._begun.values():
                await _abort_quietly(self._desk, begun.lease)
        return self._done

    async def _begin(self, plan: TopicPlan) -> None:
        try:
            plan, lease = await _begin(self._desk, plan, self._limits)
        except PostdateError as error:
            self._finish(_failed(plan.topic, error, plan))
            return
        if lease is None:
            self._finish(TopicResult(plan.topic, plan))
            return
        data_dir = self._desk.data_dir(plan.topic)
        folder = f"{data_dir}/{lease.folder}"
        units = [
            RewriteUnit(data_dir, folder, ledger.ledger_id, ledger.present_count) for ledger in plan.ledgers
        ]
        if plan.buckets:
            waiting = sum(bucket.waiting_count for bucket in plan.buckets)
            units.append(RewriteUnit(data_dir, folder, BUCKETS, waiting * _MERGE_WEIGHT))
        self._begun[folder] = _Begun(plan, lease, units)

    async def _hand_in(self, begun: _Begun) -> None:
        """Hand in what went well: ledgers need nothing of each other."""
        plan, lease = begun.plan, begun.lease
        errors = [result.error for result in begun.results if result.error]
        unchanged = sum(
            not (result.output or result.error or result.ledger_id == BUCKETS) for result in begun.results
        )
        error = errors[0] + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "") if errors else ""
        outputs = outputs_of(begun.results)
        if not outputs.ledgers and not outputs.has_bucket:
            await _abort_quietly(self._desk, lease)
            self._finish(TopicResult(plan.topic, plan, unchanged=unchanged, error=error))
            return
        try:
            committed = await self._desk.commit(lease.compaction_id, lease.epoch, outputs)
        except PostdateError as refused:
            # What became of it is not known, so nothing is cleaned up here: the broker does that.
            self._finish(_failed(plan.topic, refused, plan))
            return
        self._finish(TopicResult(plan.topic, plan, committed, unchanged, error))

    def _finish(self, result: TopicResult) -> None:
        self._done.append(result)
        self._tell.finished(result)


async def _run(
    engine: Engine, units: Sequence[RewriteUnit], progress: Callable[[float], None]
) -> AsyncIterator[RewriteResult]:
    """The results of an engine, which blocks, as they come."""
    if not units:
        return
    loop = asyncio.get_running_loop()
    come: asyncio.Queue[list[RewriteResult] | None] = asyncio.Queue()

    def put(results: list[RewriteResult] | None) -> None:
        loop.call_soon_threadsafe(come.put_nowait, results)

    def tell(done: int, total: int) -> None:
        loop.call_soon_threadsafe(progress, done / max(1, total))

    def work() -> None:
        try:
            for results in engine.run(REWRITE, units, tell):
                put(results)
        finally:
            put(None)

    working = asyncio.create_task(asyncio.to_thread(work))
    while (results := await come.get()) is not None:
        for result in results:
            yield result
    await working


async def _begin(desk: Desk, plan: TopicPlan, limits: CompactLimits) -> tuple[TopicPlan, Lease | None]:
    """Lease what is planned, or what is left of it: buckets come and go while a broker delivers. None: nothing is."""
    for tries_left in reversed(range(_TRIES)):
        ledger_ids = [ledger.ledger_id for ledger in plan.ledgers]
        bucket_ids = [bucket.bucket_id for bucket in plan.buckets]
        try:
            return plan, await desk.begin(plan.topic, ledger_ids, bucket_ids)
        except PostdateError as error:
            if error.reason != "COMPACTION_INPUT_CHANGED" or not tries_left:
                raise
        plan = plan_topic(await desk.candidates(plan.topic), limits, plan.read_bytes)
        if tries_left == 1:
            plan = replace(plan, buckets=())  # what is left for the last try stands still
        if plan.is_empty:
            break
    return plan, None


async def _abort_quietly(desk: Desk, lease: Lease) -> None:
    try:
        await desk.abort(lease.compaction_id, lease.epoch)
    except PostdateError:
        return  # the lease ends by itself


def _failed(topic: str, error: PostdateError | OSError, plan: TopicPlan | None = None) -> TopicResult:
    text = error.message if isinstance(error, PostdateError) else str(error)
    is_running = isinstance(error, PostdateError) and error.reason == "COMPACTION_RUNNING"
    return TopicResult(topic, plan, error=text, is_running=is_running)
