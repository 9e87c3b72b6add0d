"""The hand-off of compactions is safe whatever happens meanwhile; and each of its guards is needed for that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyroaring import BitMap

from broker.delayed import bucket_set
from broker.delayed.bucket_set import BucketSet
from broker.delayed.bucket_writer import NotNeeded
from broker.errors import NotFound
from broker.folder import broker, recovery
from broker.folder import compaction as desk
from broker.folder.compaction_leases import CompactionLeases
from broker.folder.staging import Staging
from broker.runtime.vfs import Vfs
from broker.storage import sparse_check
from broker.storage.amendments import Amendments
from broker.storage.blocks import LedgerCapture
from broker.storage.bucket_files import BucketStorage
from broker.storage.bucket_snapshot import BucketMetadata
from broker.storage.compacted import CompactedLedger
from broker.storage.compaction_inputs import InputBuckets
from broker.storage.layout import Layout
from broker.storage.log import TopicLog
from broker.storage.sparse_files import read_present
from broker.storage.sparse_writer import GenerationSource
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import generations, topic_subscriptions
from broker.topics.registry import Registry
from tests.depth import DEPTH
from tests.model import compaction_walk
from tests.model.compaction_walk import CompactionWalk

RICH = (0, 3, 4, 7)
"""Seeds whose walks meet all that walks are for."""
SEEDS = {"fast": RICH[:1], "change": RICH, "deep": range(500)}[DEPTH]
STEPS = 120
MUTANT_SEEDS = 40
FOUND_BY = {
    "what is owed": [3],
    "what was moved": [37],
    "the same generation": [3],
    "outputs examined": [11],
    "bytes are whole": [31],
    "the bucket is compared": [9],
    "replayed files kept": [2],
    "the lease is current": [10],
    "inputs are kept": [19],
}
"""Seeds that have found a guard missing that most others do not need: asked first, to save time."""


@pytest.fixture(autouse=True)
def several_jobs_on_one_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompactionLeases, "check_free", lambda *_: None)


def walk(seed: int, steps: int = STEPS) -> CompactionWalk:
    """One walk to its end; raises Violation."""

    async def scenario(_: SimLoop, clock: SimClock) -> CompactionWalk:
        one = CompactionWalk(seed, clock)
        await one.run(steps)
        return one

    return run_sim(scenario, seed=seed)


good_walk = cache(walk)
"""With all guards on."""


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_loses_anything_to_a_compaction(seed: int):
    good_walk(seed)


@pytest.mark.slow
def test_the_walk_meets_what_it_is_for():
    walks = [good_walk(seed) for seed in RICH]
    assert sum(each.swapped for each in walks) > 10
    assert sum(each.merged for each in walks) > 1
    assert {"OWED", "REPLACED", "DAMAGED"} <= {refusal for each in walks for refusal in each.refused}


def _guards_but(name: str) -> list[Any]:
    return [each for each in generations.GUARDS if each.__name__ != name]


def _trusting(
    vfs: Vfs, folder: str, capture: LedgerCapture, source: GenerationSource, settled: BitMap, frontier_ms: int
) -> CompactedLedger:
    """Takes a job's word for everything but which entries there are."""
    with contextlib.closing(vfs.open(capture.name(folder).path("times"))) as file:
        present = read_present(file, capture)
    assert capture.sparse is not None
    return CompactedLedger(
        ledger_id=capture.ledger_id,
        from_generation=source.capture.generation,
        generation=capture.generation,
        data_bytes=capture.data_bytes,
        present_bytes=capture.sparse.present_bytes,
        present=present,
        last_expire_ms=0,
    )


def _unchecked(
    storage: BucketStorage, sources: Any, buckets: InputBuckets, not_needed: NotNeeded
) -> Generator[None, None, BucketMetadata]:
    """Takes the bucket for what it says it is."""
    with contextlib.closing(storage.open_reader(buckets.new_bucket_id)) as reader:
        yield
        return reader.read_metadata()


def _any_lease(self: CompactionLeases, compaction_id: str, epoch: int) -> Any:
    """Leases that know whoever has ever had one, while the broker runs."""
    held = self._held.get(compaction_id) or _ended.get(compaction_id)
    if held is None:
        raise NotFound("unknown")
    held.committing = None
    return held


_ended: dict[str, Any] = {}
_end = CompactionLeases.end


def _end_and_remember(self: CompactionLeases, held: Any) -> None:
    _ended[held.lease.compaction_id] = held
    _end(self, held)


async def _leave_folder(self: Staging, folder: str) -> None:
    """Leave a job's folder where it is."""


def _forget_replayed(vfs: Vfs, layout: Layout, manifests: recovery.Manifests, registry: Registry) -> None:
    """Recovery that removes what no manifest names, replayed or not."""
    remove_unnamed(vfs, layout, manifests, cast("Registry", SimpleNamespace(topics={})))


remove_unnamed = recovery.remove_unnamed


def _believe_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sparse_check, "verify_ledger", lambda *_: [])
    patch.setattr(
        compaction_walk, "KINDS", ("data",)
    )  # columns are read, and so looked at, by the comparison


def _hear_anybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CompactionLeases, "current", _any_lease)
    patch.setattr(CompactionLeases, "end", _end_and_remember)
    patch.setattr(Staging, "remove", _leave_folder)


GUARDS_OFF: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "what is owed": lambda patch: patch.setattr(generations, "GUARDS", _guards_but("_is_not_owed")),
    "what was moved": lambda patch: patch.setattr(generations, "GUARDS", _guards_but("_is_not_moved")),
    "the same generation": lambda patch: patch.setattr(
        generations, "GUARDS", _guards_but("_is_same_generation")
    ),
    "outputs examined": lambda patch: patch.setattr(desk, "examine_generation", _trusting),
    "what is live is there": lambda patch: patch.setattr(sparse_check, "live_entries", lambda *_: BitMap()),
    "bytes are whole": _believe_files,
    "what is gone is folded in": lambda patch: patch.setattr(Amendments, "leave_out", lambda self, _: self),
    "the lent buckets stand": lambda patch: patch.setattr(BucketSet, "_is_lent", lambda *_: True),
    "the bucket is compared": lambda patch: patch.setattr(bucket_set, "check_steps", _unchecked),
    "replayed files kept": lambda patch: patch.setattr(broker, "remove_unnamed", _forget_replayed),
    "the lease is current": _hear_anybody,
    "repeats are known": lambda patch: patch.setattr(desk, "_REMEMBERED", 0),
    "new ones settle what is gone": lambda patch: patch.setattr(
        topic_subscriptions, "settle_cancelled", lambda *_: None
    ),
    "inputs are kept": lambda patch: patch.setattr(TopicLog, "keeps_files", False),
}


@pytest.mark.deep
@pytest.mark.parametrize("guard", GUARDS_OFF)
def test_each_guard_is_needed(guard: str, monkeypatch: pytest.MonkeyPatch):
    """With one guard off, some walk breaks a promise."""
    GUARDS_OFF[guard](monkeypatch)
    for seed in [*FOUND_BY.get(guard, ()), *range(MUTANT_SEEDS)]:
        try:
            walk(seed)
        except Exception:  # a violation, or a broker that cannot go on
            return
    pytest.fail(f"{MUTANT_SEEDS} walks without {guard!r} broke nothing")
