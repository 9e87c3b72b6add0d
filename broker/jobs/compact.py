"""Compaction: plan, rewrite, hand in; topic by topic, so that one that fails does not sink the run.

The same for a running broker (`rpc.compaction_client`) and for a folder that nobody uses (`compact_offline`): both are
a `Desk`. Nothing is changed unless `apply` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from broker.errors import PostdateError
from broker.jobs.compact_plan import CompactLimits, TopicPlan, plan_topic
from broker.jobs.rewrite import rewrite
from broker.runtime.vfs import Vfs
from broker.storage.compaction_inputs import Outputs
from broker.topics.compaction_values import Candidates, Committed, Lease

_TRIES = 3


class Desk(Protocol):
    """The broker, as a job sees it. Calls raise PostdateError."""

    @property
    def data_dir(self) -> str:
        """The data directory as seen from here; known after the first `candidates`."""

    async def topics(self) -> list[str]: ...

    async def candidates(self, topic: str) -> Candidates: ...

    async def begin(self, topic: str, ledger_ids: Sequence[int], bucket_ids: Sequence[int]) -> Lease: ...

    async def commit(self, lease: Lease, outputs: Outputs) -> Committed: ...

    async def abort(self, lease: Lease) -> None: ...


@dataclass(frozen=True, slots=True)
class TopicResult:
    """What became of one topic."""

    topic: str
    planned: TopicPlan | None = None
    committed: Committed | None = None
    unchanged: int = 0  # ledgers of which nothing would go
    error: str = ""
    is_running: bool = False  # another job is at work on it


@dataclass(slots=True)
class Tell:
    """Who hears what a run does."""

    planned: Callable[[Sequence[TopicPlan]], None] = lambda plans: None
    progress: Callable[[int], None] = lambda done_bytes: None
    finished: Callable[[TopicResult], None] = lambda result: None


@dataclass(slots=True)
class CompactRequest:
    """What a run is to do."""

    apply: bool = False
    topics: tuple[str, ...] = ()  # none: all
    limits: CompactLimits = field(default_factory=CompactLimits)


async def run_compact(desk: Desk, vfs: Vfs, request: CompactRequest, tell: Tell) -> list[TopicResult]:
    """Plan all topics, and with `apply` do what is planned. Raises PostdateError if there is no broker to ask."""
    plans: list[TopicPlan] = []
    results: list[TopicResult] = []
    budget = request.limits.read_bytes_max
    for topic in request.topics or await desk.topics():
        try:
            plan = plan_topic(await desk.candidates(topic), request.limits, budget)
        except PostdateError as error:
            results.append(_failed(topic, error))
            tell.finished(results[-1])
            continue
        budget -= plan.ledger_bytes
        if not plan.is_empty:
            plans.append(plan)
    tell.planned(plans)
    for plan in plans:
        if request.apply:
            result = await _compact_topic(desk, vfs, plan, request.limits, tell)
        else:
            result = TopicResult(plan.topic, plan)
        results.append(result)
        tell.finished(result)
    return results


async def _compact_topic(
    desk: Desk, vfs: Vfs, plan: TopicPlan, limits: CompactLimits, tell: Tell
) -> TopicResult:
    try:
        plan, lease = await _begin(desk, plan, limits)
    except PostdateError as error:
        return _failed(plan.topic, error, plan)
    if lease is None:
        return TopicResult(plan.topic, plan)
    try:
        outputs = await rewrite(vfs, desk.data_dir, f"{desk.data_dir}/{lease.folder}", tell.progress)
        if not outputs.ledgers and not outputs.has_bucket:
            await desk.abort(lease)
            return TopicResult(plan.topic, plan, unchanged=len(plan.ledgers))
    except (PostdateError, OSError) as error:
        await _abort_quietly(desk, lease)
        return _failed(plan.topic, error, plan)
    try:
        committed = await desk.commit(lease, outputs)
    except PostdateError as error:
        # What became of it is not known, so nothing is cleaned up here: the broker does that.
        return _failed(plan.topic, error, plan)
    return TopicResult(plan.topic, plan, committed, len(plan.ledgers) - len(outputs.ledgers))


async def _begin(desk: Desk, plan: TopicPlan, limits: CompactLimits) -> tuple[TopicPlan, Lease | None]:
    """Lease what is planned, or what is left of it: buckets come and go while a broker delivers. None: nothing is."""
    for tries_left in reversed(range(_TRIES)):
        ledger_ids = [each.ledger_id for each in plan.ledgers]
        bucket_ids = [each.bucket_id for each in plan.buckets]
        try:
            return plan, await desk.begin(plan.topic, ledger_ids, bucket_ids)
        except PostdateError as error:
            if error.reason != "COMPACTION_INPUT_CHANGED" or not tries_left:
                raise
        plan = plan_topic(await desk.candidates(plan.topic), limits, plan.ledger_bytes)
        if tries_left == 1:
            plan = replace(plan, buckets=())  # what is left for the last try stands still
        if plan.is_empty:
            break
    return plan, None


async def _abort_quietly(desk: Desk, lease: Lease) -> None:
    try:
        await desk.abort(lease)
    except PostdateError:
        return  # the lease ends by itself


def _failed(topic: str, error: PostdateError | OSError, plan: TopicPlan | None = None) -> TopicResult:
    text = error.message if isinstance(error, PostdateError) else str(error)
    is_running = isinstance(error, PostdateError) and error.reason == "COMPACTION_RUNNING"
    return TopicResult(topic, plan, error=text, is_running=is_running)
