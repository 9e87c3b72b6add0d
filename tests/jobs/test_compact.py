"""Plans of compaction are worth their work and within their bounds; one topic that fails does not end a pass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import NotFound, PostdateError, Refused, Unavailable
from broker.folder.compaction_values import (
    BucketCandidate,
    Candidates,
    Committed,
    Lease,
    LedgerCandidate,
)
from broker.jobs.audit import AuditRequest, run_audit
from broker.jobs.compact import CompactRequest, Tell, TopicResult, run_compact
from broker.jobs.compact_plan import CompactLimits, TopicPlan, freed_bytes, plan_topic
from broker.jobs.engine import InlineEngine
from broker.jobs.rewrite import rewrite
from broker.jobs.spark_session import SparkMissing
from broker.jobs.values import Level
from broker.jobs.work import R, U, Work
from broker.rpc.compaction_client import seen_at
from broker.storage.compaction_inputs import Outputs
from tests.harness import DATA_DIR, Node
from tests.jobs.compacting import compact_offline
from tests.jobs.folders import PINNED_IDS, die, flip, write_pinned_folder
from tests.unit.folder.compaction_world import TOPIC, compact, fill, generations, run

MIB = 1 << 20
DEAD = LedgerCandidate(1, 0, 1000, 1000, 990, 100 * MIB)
LIMITS = CompactLimits()


def ledgers(*some: LedgerCandidate) -> Candidates:
    return Candidates("t", tuple(replace(each, ledger_id=i) for i, each in enumerate(some, 1)), ())


def planned(plan: TopicPlan) -> list[int]:
    return [each.ledger_id for each in plan.ledgers]


@pytest.mark.parametrize(
    ("ledger", "is_chosen"),
    [
        pytest.param(DEAD, True, id="mostly dead"),
        pytest.param(replace(DEAD, settled_count=800), True, id="a fifth is live"),
        pytest.param(replace(DEAD, settled_count=799), False, id="more than a fifth is live"),
        pytest.param(replace(DEAD, settled_count=0), False, id="nothing is settled"),
        pytest.param(replace(DEAD, disk_bytes=MIB), False, id="frees less than it is worth"),
        pytest.param(replace(DEAD, disk_bytes=2 * MIB), True, id="frees just enough"),
        pytest.param(
            replace(DEAD, disk_bytes=1000, settled_count=1000), True, id="small, and all of it goes"
        ),
        pytest.param(replace(DEAD, present_count=0, settled_count=0), False, id="nothing is left"),
    ],
)
def test_a_ledger_is_chosen_if_that_is_worth_it(ledger: LedgerCandidate, is_chosen: bool):
    assert bool(planned(plan_topic(ledgers(ledger), LIMITS, 1 << 40))) == is_chosen


def test_caps_take_the_oldest():
    some = ledgers(DEAD, DEAD, DEAD, DEAD)
    assert planned(plan_topic(some, replace(LIMITS, ledgers_max=2), 1 << 40)) == [1, 2]
    assert planned(plan_topic(some, LIMITS, 350 * MIB)) == [1, 2, 3]
    assert planned(plan_topic(some, LIMITS, 0)) == []
    assert freed_bytes(DEAD) == 99 * MIB


def test_what_caps_leave_is_counted_and_buckets_count_too():
    some = ledgers(DEAD, DEAD, DEAD)
    assert plan_topic(some, replace(LIMITS, ledgers_max=2), 1 << 40).left_count == 1
    plan = plan_topic(some, LIMITS, 150 * MIB)
    assert (planned(plan), plan.left_count, plan.read_bytes) == ([1], 2, 100 * MIB)
    both = replace(buckets(10, 10, 10, 10), ledgers=some.ledgers[:1])
    assert plan_topic(both, LIMITS, 104 * MIB).read_bytes == 104 * MIB
    assert plan_topic(both, LIMITS, 103 * MIB).buckets == ()


def buckets(*waiting: int) -> Candidates:
    return Candidates(
        "t", (), tuple(BucketCandidate(i, 100_000, count, MIB) for i, count in enumerate(waiting, 1))
    )


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        pytest.param([10, 10, 10], [], id="too few"),
        pytest.param([10, 10, 10, 0, 10], [], id="spent ones go by themselves"),
        pytest.param([10, 10, 10, 10], [1, 2, 3, 4], id="small ones"),
        pytest.param([10, 10, 100_000, 10, 10, 10, 10], [4, 5, 6, 7], id="neighbours, the longest run"),
        pytest.param(
            [49_999, 49_999, 49_999, 50_001, 10], [], id="half of it waits: neither small nor delivered"
        ),
    ],
)
def test_small_and_delivered_neighbours_are_merged(waiting: list[int], chosen: list[int]):
    plan = plan_topic(buckets(*waiting), LIMITS, 1 << 40)
    assert [each.bucket_id for each in plan.buckets] == chosen


@pytest.mark.parametrize(
    ("seen", "told", "here"),
    [
        ("", "/data", "/data"),
        ("/mnt/x/", "/data", "/mnt/x/"),
        ("", "/data/shard-0001", "/data/shard-0001"),
        ("/mnt/x", "/data/shard-0001", "/mnt/x/shard-0001"),
        ("/mnt/x/shard-0001", "/data/shard-0001", "/mnt/x/shard-0001"),
        ("/mnt/x/shard-0001/", "/data/shard-0001", "/mnt/x/shard-0001/"),
    ],
)
def test_the_folder_of_a_shard_is_seen_in_the_folder_around_it(seen: str, told: str, here: str) -> None:
    assert seen_at(seen, told) == here


class _Desk:
    """Topics that fail at each step, and one that does not."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def data_dir(self, topic: str) -> str:
        return "d"

    async def topics(self) -> list[str]:
        return ["bad candidates", "bad begin", "bad work", "bad commit"]

    async def candidates(self, topic: str) -> Candidates:
        self._fail(topic, "bad candidates", NotFound("no such topic"))
        return Candidates(topic, (DEAD,), ())

    async def begin(self, topic: str, ledger_ids: Sequence[int], bucket_ids: Sequence[int]) -> Lease:
        self.calls.append(f"begin {topic}")
        self._fail(topic, "bad begin", Refused("busy", reason="COMPACTION_RUNNING"))
        return Lease(topic, 1, topic, tuple(ledger_ids), tuple(bucket_ids), f"staging/{topic}", 0)

    async def commit(self, compaction_id: str, epoch: int, outputs: Outputs) -> Committed:
        raise Unavailable("gone")

    async def abort(self, compaction_id: str, epoch: int) -> None:
        self.calls.append(f"abort {compaction_id}")
        raise Unavailable("gone")

    def _fail(self, topic: str, bad: str, error: PostdateError) -> None:
        if topic == bad:
            raise error


def run_with(desk: _Desk, request: CompactRequest) -> list[TopicResult]:
    return asyncio.run(run_compact(desk, InlineEngine(1), request, Tell()))


def test_one_bad_topic_does_not_sink_the_run():
    desk = _Desk()
    results = run_with(desk, CompactRequest(apply=True))
    assert [bool(result.error) for result in results] == [True] * 4
    assert [result.is_running for result in results] == [False, True, False, False]
    assert "begin bad commit" in desk.calls
    assert "abort bad work" in desk.calls  # there is nothing to read


class _RestlessDesk(_Desk):
    """Buckets come and go between a look and a lease."""

    def __init__(self, bucket_ids: list[int]) -> None:
        super().__init__()
        self.bucket_ids = bucket_ids
        self.begun: list[tuple[list[int], list[int]]] = []

    async def candidates(self, topic: str) -> Candidates:
        some = tuple(BucketCandidate(i, 100, 10, MIB) for i in self.bucket_ids)
        return Candidates(topic, (DEAD,), some)

    async def begin(self, topic: str, ledger_ids: Sequence[int], bucket_ids: Sequence[int]) -> Lease:
        self.begun.append((list(ledger_ids), list(bucket_ids)))
        self.bucket_ids = [i + 1 for i in self.bucket_ids]
        if bucket_ids:
            raise Refused("gone", reason="COMPACTION_INPUT_CHANGED")
        return await super().begin(topic, ledger_ids, bucket_ids)


def test_what_changed_since_the_plan_is_planned_anew():
    desk = _RestlessDesk([1, 2, 3, 4])
    run_with(desk, CompactRequest(apply=True, topics=("bad work",)))
    assert desk.begun == [([1], [1, 2, 3, 4]), ([1], [2, 3, 4, 5]), ([1], [])]
    assert desk.calls == ["begin bad work", "abort bad work"]


def test_a_dry_run_asks_and_does_nothing():
    desk = _Desk()
    results = run_with(desk, CompactRequest(topics=("bad begin", "other")))
    assert desk.calls == []
    assert [planned(result.planned) for result in results if result.planned] == [[1], [1]]


def test_a_ledger_of_which_nothing_would_go_is_left_alone():
    """Settled by all, and not due: it counts as settled in the plan, and only the rows say that it must stay."""

    async def scenario(node: Node) -> Node:
        await fill(node, 1)
        await compact(node)
        before = generations(node)
        desk = node.broker.compactions
        (candidate,) = (await desk.candidates(TOPIC)).ledgers
        lease = await desk.begin(TOPIC, [candidate.ledger_id], [])

        outputs = await rewrite(node.vfs, DATA_DIR, f"{DATA_DIR}/{lease.folder}")
        assert outputs == Outputs()
        await desk.abort(lease.compaction_id, lease.epoch)
        assert generations(node) == before
        return node

    run(scenario)


# -- on real files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_pinned_folder(tmp_path / "data", topics=2)
    return tmp_path / "data"


def is_clean(data: Path) -> bool:
    return bool(run_audit(AuditRequest(str(data), Level.DEEP), InlineEngine(1))["outcome"] == "clean")


def test_processes_share_topics(data: Path):
    results = compact_offline(data, InlineEngine(2))
    assert sorted(each.topic for each in results) == ["orders-0", "orders-1"]
    for each in results:
        assert each.committed is not None
        assert len(each.committed.ledger_ids) == len(PINNED_IDS)
        assert each.committed.bucket_swapped
    assert is_clean(data)
    assert compact_offline(data, InlineEngine(1)) == []  # there is nothing more to do


def test_a_ledger_that_is_damaged_keeps_no_other_from_being_rewritten(data: Path):
    flip(data / "topics/1/ledgers/2.0.times", 100)
    results = {each.topic: each for each in compact_offline(data, InlineEngine(1))}
    assert not results["orders-1"].error
    assert "2.0.times" in results["orders-0"].error or "checksum" in results["orders-0"].error
    committed = results["orders-0"].committed
    assert committed is not None
    assert committed.ledger_ids == (1, 3, 4, 5)


def test_a_process_that_is_killed_leaves_everything_as_it_was(data: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("broker.jobs.engine.run_units", die)
        results = compact_offline(data, InlineEngine(2))
    assert [bool(each.error) and each.committed is None for each in results] == [True, True]
    assert is_clean(data)
    assert not any((data / "staging").iterdir())
    assert all(each.committed for each in compact_offline(data, InlineEngine(1)))


class _Hanging(InlineEngine):
    """Works for ever."""

    def __init__(self) -> None:
        super().__init__(1)
        self.begun, self.stopped = threading.Event(), threading.Event()

    def run(self, work: Work[U, R], units: Sequence[U], tell: Any) -> Iterator[list[R]]:
        self.begun.set()
        self.stopped.wait(30)
        yield []

    def stop(self) -> None:
        self.stopped.set()


def test_a_run_that_is_interrupted_gives_its_leases_back():
    desk, engine = _Desk(), _Hanging()

    async def scenario() -> None:
        request = CompactRequest(apply=True, topics=("one", "two"))
        running = asyncio.create_task(run_compact(desk, engine, request, Tell()))
        await asyncio.to_thread(engine.begun.wait, 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert desk.calls == ["begin one", "begin two", "abort one", "abort two"]
    assert engine.stopped.is_set()


def test_an_engine_that_cannot_start_leases_nothing():
    desk = _Desk()

    class _NoEngine(InlineEngine):
        def start(self) -> None:
            raise SparkMissing

    with pytest.raises(SparkMissing):
        asyncio.run(run_compact(desk, _NoEngine(), CompactRequest(apply=True, topics=("one",)), Tell()))
    assert desk.calls == []
