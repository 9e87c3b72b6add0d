"""A shard on three nodes, over a store that loses and delays: nothing answered is lost, nobody says what is old."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import pytest

from broker.cluster import follower, object_group_log, take_over
from broker.cluster.lease import Moment, OwnerLease
from broker.cluster.take_over import Answer, AppendStep
from broker.errors import Corrupt
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.depth import at_depth
from tests.sim.shard_world import ShardWorld

SECONDS = 300


def run(seed: int) -> ShardWorld:
    async def scenario(loop: SimLoop, clock: SimClock) -> ShardWorld:
        world = ShardWorld(loop, seed)
        await world.run(SECONDS)
        return world

    return run_sim(scenario, seed=seed)


def test_nothing_answered_is_lost_whoever_owns_the_shard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for seed in range(at_depth(change=2, deep=1000)):
        world = run(seed)
        assert world.errors == [], f"seed {seed}: {world.counts}"
        counts += world.counts
        counts["answered"] += len(world.answered)
        counts["late"] += world.bucket.late_count
    for name in (
        "take-overs",
        "fenced",
        "begun with a base",
        "trims",
        "said",
        "answered",
        "late",
        "resigned",
    ):
        assert counts[name] > 0, f"{name}: the world has become harmless"


def taking(taken: Answer) -> Callable[[Answer], AppendStep]:
    return lambda answer: AppendStep.STORED if answer is taken else take_over.after_create(answer)


def another_is_ours(own: object, stored: object | None) -> AppendStep:
    return AppendStep.CREATE if stored is None else AppendStep.STORED


def extend_from_the_answer(lease: OwnerLease, begin: Moment) -> None:
    true_extend(lease, lease.begin())


true_extend = OwnerLease.extend

FAULTS: dict[str, tuple[object, str, object]] = {
    "exists is taken for ours": (object_group_log, "after_create", taking(Answer.EXISTS)),
    "no answer is taken for stored": (object_group_log, "after_create", taking(Answer.UNKNOWN)),
    "another group is taken for ours": (object_group_log, "after_read", another_is_ours),
    "fences are trimmed": (object_group_log, "is_removable", lambda kind, index, below: index < below),
    "no base is looked at": (follower, "is_stray", lambda index, trimmed_below: False),
    "nobody waits": (follower, "may_take_over", lambda *silence, **resigned: True),
    "the lease counts from the answer": (OwnerLease, "extend", extend_from_the_answer),
    "the lease is not looked at": (OwnerLease, "holds", lambda lease: lease.until_ms > 0),
}


@pytest.mark.deep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(*FAULTS[fault])
    for seed in range(20):
        try:
            if run(seed).errors:
                return
        except (Corrupt, ExceptionGroup):
            return
    pytest.fail("no seed finds it")
