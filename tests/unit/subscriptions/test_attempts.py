"""Attempts: how often what was sent came back."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.model import ENTRY_ID_MAX, Position
from broker.subscriptions.attempts import Attempts
from tests.harness import entries_of

positions = st.builds(Position, st.integers(1, 3), st.sampled_from([*range(12), 1 << 16, ENTRY_ID_MAX]))
sets = st.frozensets(positions, max_size=8)


@given(steps=st.lists(st.tuples(st.sampled_from(["add", "forget"]), sets, st.integers(1, 9)), max_size=20))
def test_attempts_count_what_a_counter_counts(steps: list[tuple[str, frozenset[Position], int]]):
    attempts, counter, seen = Attempts(), Counter[Position](), set[Position]()
    for step, some, times_over in steps:
        seen |= some
        for _ in range(times_over if step == "add" else 1):
            if step == "add":
                attempts.add(entries_of(some))
                counter.update(some)
            else:
                attempts.forget(entries_of(some))
                for position in some:
                    counter.pop(position, None)
    for ledger_id in (1, 2, 3):
        ids = sorted(entry_id for each, entry_id in seen if each == ledger_id)
        counts = attempts.counts(ledger_id, np.array(ids, dtype=np.uint32))
        assert counts.tolist() == [counter[Position(ledger_id, entry_id)] for entry_id in ids]
    # What is counted no more costs nothing, and no digit is there for nothing.
    assert attempts.digits.keys() == {ledger_id for ledger_id, _ in counter}
    assert all(digits[-1] for digits in attempts.digits.values())


def test_attempts_keep_nothing_of_the_callers_sets():
    attempts, mine = Attempts(), {1: BitMap([1, 2])}
    attempts.add(mine)
    mine[1].add(9)
    attempts.add({1: BitMap([1])})
    assert mine == {1: BitMap([1, 2, 9])}
    assert attempts.counts(1, np.array([1, 2, 9], dtype=np.uint32)).tolist() == [2, 1, 0]
