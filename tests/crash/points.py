"""What tests of crash points share: the states of a recorded history, and what a failure says of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from broker.testing.mem_vfs import RANDOM_POLICIES, CrashPolicy, MemVfs
from broker.topics import recovery
from tests.crash.history import Model, Recorder, fold

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


@cache
def model_after(recorder: Recorder, record_count: int, life: int) -> Model:
    """What the first records of a life say."""
    return fold([each.record for each in recorder.lives[life].submitted[:record_count]])


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
