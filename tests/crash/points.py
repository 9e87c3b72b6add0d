"""Base of the tests of crash points: the states of a recorded history, and the texts of failures."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from broker.config import BrokerConfig
from broker.folder import recovery
from broker.testing.mem_vfs import RANDOM_POLICIES, CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from tests.crash.history import Model, Recorder, fold
from tests.depth import sampled
from tests.harness import Node

RECOVERY_POLICIES = (CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED)

Tree = frozenset[tuple[str, bytes]]


@pytest.fixture
def same_broker_id(monkeypatch):
    """A broker that is made anew would get another id each time, and two recoveries could not be compared."""
    monkeypatch.setattr(recovery.uuid, "uuid4", lambda: "00000000-0000-4000-8000-000000000000")


class Still:
    """A time that does not pass."""

    def now_us(self) -> int:
        return 0


def model_after(recorder: Recorder, record_count: int, life: int) -> Model:
    """Return the model after the first records of a life."""
    model: Model = pickle.loads(_model_after(recorder, record_count, life))
    return model


@cache
def _model_after(recorder: Recorder, record_count: int, life: int) -> bytes:
    """Pickled, as each who asks may change what it gets: `copy.deepcopy` takes ten times as long."""
    return pickle.dumps(fold([each.record for each in recorder.lives[life].submitted[:record_count]]))


def moments_of(policy: CrashPolicy, operations: Iterable[int], stride: int) -> Iterator[int]:
    """Every so many operations, on each day others; the policies' lie as far apart as they can."""
    return sampled(operations, stride, list(CrashPolicy).index(policy) * stride // len(CrashPolicy))


def states_at(
    recorder: Recorder, moments: Iterable[int], policy: CrashPolicy, seeds: range
) -> Iterator[tuple[int, int, MemVfs]]:
    """The states that a policy makes of the history at some operations: (operation, seed, disk)."""
    for at in moments:
        for seed in seeds if policy in RANDOM_POLICIES else seeds[:1]:
            yield at, seed, recorder.vfs.crashed(at, policy, random.Random(f"{seed}/{at}"))


@contextlib.contextmanager
def told(recorder: Recorder, at: int, policy: CrashPolicy, seed: int) -> Iterator[None]:
    """A failure says which crash it was."""
    try:
        yield
    except BaseException as error:
        op = recorder.vfs.ops[at - 1] if at else None
        error.add_note(f"crash at {at} ({policy}, seed {seed}), after {op and (op.kind, op.path)}")
        raise


def clock_at(recorder: Recorder, at: int) -> SimClock:
    """A clock that stands where the history's stood at an operation."""
    return SimClock(Still(), recorder.clock_at(at))


def check_recovery_of_recovery(vfs: MemVfs, clock: SimClock, config: BrokerConfig, tree: Tree) -> None:
    """Recover a disk, and again whatever a crash at each operation of that leaves: the files are the same."""
    Node(vfs, clock, config).open(start=False)
    recovered = vfs.snapshot()
    seen = {tree}  # found before the recovery, and opened just now
    for state in vfs.crash_states(policies=RECOVERY_POLICIES):
        again = frozenset(state.vfs.snapshot().items())
        if again not in seen:
            seen.add(again)
            Node(state.vfs, clock, config).open(start=False)
            assert state.vfs.snapshot() == recovered, f"recovery cut at {state.at} ({state.policy})"
