"""Both trackers under the model of a tracker; see `tracker_machine`. To run another one, add a factory."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from broker.delayed.bucket_tracker import BucketPolicyValues
from broker.delayed.memory_tracker import MemoryTracker
from tests.depth import machine_settings
from tests.model.bucket_machine import BucketMachine
from tests.model.tracker_machine import HOUR, Factory, TrackerMachine


def _memory(**options: int) -> Factory:
    return lambda reader, frontier: MemoryTracker(reader, frontier, **options)


FACTORIES: dict[str, Factory] = {
    "memory": _memory(),
    "memory-tiny-loads": _memory(load_entries_max=3),
    "memory-no-lead": _memory(tick_ms=1_000, lead_ms=0, load_entries_max=5),
    "memory-1ms-ticks": _memory(tick_ms=1, lead_ms=10),
    "memory-long-lead": _memory(tick_ms=100, lead_ms=10_000, load_entries_max=20),
    "memory-1h-ticks": _memory(tick_ms=HOUR, load_entries_max=10),
}


SETTINGS = machine_settings(fast=1, change=2, deep=1_000)


@pytest.mark.parametrize("name", FACTORIES)
def test_tracker_behaves_like_a_sorted_list(name: str) -> None:
    machine = type("Machine", (TrackerMachine,), {"factory": staticmethod(FACTORIES[name])})
    run_state_machine_as_test(machine, settings=SETTINGS)


BUCKET_POLICIES = {
    "bucket-1": (BucketPolicyValues(1, 1, 1_000, 1, 1_000, 1), 1),
    "bucket-2": (BucketPolicyValues(2, 2, 10_000, 2, 1_000, 2), 2),
    "bucket-3": (BucketPolicyValues(3, 9, HOUR, 3, HOUR, 3), 3),
    "bucket-5-large-loads": (BucketPolicyValues(5, 9, HOUR, 4, 100, 3), 1_000),
    "bucket-tiers": (BucketPolicyValues(1, 9, HOUR, 100, 100, 5), 10),
}


@pytest.mark.parametrize("name", BUCKET_POLICIES)
def test_bucket_tracker_behaves_like_a_sorted_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.delayed.stale.SLICE_ROWS", 2)
    policy, load_entries_max = BUCKET_POLICIES[name]
    settings_of = {"policy": policy, "load_entries_max": load_entries_max}
    machine = type("Machine", (BucketMachine,), settings_of)
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_a_row_that_was_added_twice_is_stale_after_a_merge_left_out_one_of_them() -> None:
    policy, load_entries_max = BUCKET_POLICIES["bucket-5-large-loads"]
    settings_of = {"policy": policy, "load_entries_max": load_entries_max}
    machine = type("Machine", (BucketMachine,), settings_of)()
    machine.store_and_seal(data=[(1, [0]), (1, [2])], calls=0)  # and a merge of both waits
    machine.add_again(ledger_id=1)
    machine.store_herd(ledger_id=1, offset=1, count=5)
    machine.discard_ledger(ledger_id=1)
    machine.start_merge(calls=0, is_forced=False)
    machine.counts_agree()
    machine.teardown()  # takes all that is due, and checks each row against the model
    assert machine.tracker.count() == 0
    assert machine.tracker.next_due_ms() is None
