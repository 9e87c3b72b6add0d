"""What came back: how often, under which time, and in which order it goes out again."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.model import ENTRY_ID_MAX, Entries, Position
from broker.subscriptions.redelivery import Attempts, RedeliveryQueue, Waiting
from tests.harness import entries_of

positions = st.builds(Position, st.integers(1, 3), st.sampled_from([*range(12), 1 << 16, ENTRY_ID_MAX]))
sets = st.frozensets(positions, max_size=8)
times = st.integers(0, 6)


def positions_in(some: Entries) -> set[Position]:
    return {Position(ledger_id, entry_id) for ledger_id, bitmap in some.items() for entry_id in bitmap}


def drain(queue: RedeliveryQueue, now_ms: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while (taken := queue.take(now_ms, 100)) is not None:
        found += [(taken[0], entry_id) for entry_id in taken[1].tolist()]
    return found


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


@given(steps=st.lists(st.tuples(st.sampled_from(["put", "forget"]), sets, times), max_size=20))
def test_waiting_knows_the_last_time_of_each_entry(steps: list[tuple[str, frozenset[Position], int]]):
    waiting, model = Waiting(), dict[Position, int]()
    for step, some, not_before_ms in steps:
        if step == "put":
            waiting.put(not_before_ms, entries_of(some))
            model |= dict.fromkeys(some, not_before_ms)
        else:
            waiting.forget(entries_of(some))
            model = {position: each for position, each in model.items() if position not in some}
        assert positions_in(waiting.entries()) == model.keys()
        items = waiting.items()
        assert [item[:2] for item in items] == sorted({(t, ledger_id) for (ledger_id, _), t in model.items()})
        assert {(i, e): t for t, i, bitmap in items for e in bitmap} == model
        assert sum(len(bitmap) for _, _, bitmap in items) == len(model)


def test_what_waiting_answers_is_a_copy():
    waiting, mine = Waiting(), {1: BitMap([1])}
    waiting.put(5, mine)
    mine[1].add(2)
    waiting.items()[0][2].add(3)
    assert waiting.items() == [(5, 1, BitMap([1]))]


def test_an_entry_is_queued_once_under_its_first_time():
    queue = RedeliveryQueue()
    queue.push(5, {1: BitMap([1, 2])})
    queue.push(1, {1: BitMap([2, 3])})
    assert drain(queue, 1) == [(1, 3)]
    assert drain(queue, 5) == [(1, 1), (1, 2)]
    assert drain(queue, 9) == []


def test_a_limit_splits_and_the_rest_stays_ready():
    queue = RedeliveryQueue()
    queue.push(5, {1: BitMap(range(5))})
    queue.push(6, {1: BitMap([9])})
    assert queue.take(4, 2) is None
    taken = queue.take(6, 2)
    assert taken is not None and taken[1].tolist() == [0, 1]
    assert (queue.next_ms(), queue.queued) == (0, {1: BitMap([2, 3, 4, 9])})
    assert drain(queue, 6) == [(1, 2), (1, 3), (1, 4), (1, 9)]


def test_what_is_forgotten_is_neither_taken_nor_waited_for():
    queue = RedeliveryQueue()
    queue.push(1, {1: BitMap([1])})
    queue.push(2, {1: BitMap([2]), 2: BitMap([1, 2])})
    queue.forget({1: BitMap([1, 2]), 2: BitMap([1])})
    assert queue.next_ms() == 2
    assert drain(queue, 9) == [(2, 2)]
    assert queue.next_ms() is None


def test_nothing_of_a_cleared_queue_comes_back():
    queue = RedeliveryQueue()
    queue.push(1, {1: BitMap([1])})
    queue.clear()
    assert (queue.next_ms(), queue.take(9, 9)) == (None, None)
    queue.push(7, {1: BitMap([1])})  # not under the time that it had before
    assert (queue.take(6, 9), queue.next_ms()) == (None, 7)


queue_steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), sets, times),
        st.tuples(st.just("take"), times, st.integers(1, 4)),
        st.tuples(st.just("forget"), sets, st.just(0)),
    ),
    max_size=30,
)


@given(steps=queue_steps)
def test_the_queue_gives_what_a_plain_dict_would(steps: list[tuple[str, object, int]]):
    queue, model, done = RedeliveryQueue(), dict[Position, int](), set[Position]()
    for step, what, number in steps:
        if step == "push":
            assert isinstance(what, frozenset)
            some = what - done  # what is done is never queued again
            queue.push(number, entries_of(some))
            model = dict.fromkeys(some, number) | model
        elif step == "forget":
            assert isinstance(what, frozenset)
            queue.forget(entries_of(what))
            done |= what
            model = {position: each for position, each in model.items() if position not in what}
        else:
            assert isinstance(what, int)
            taken = queue.take(what, number)
            model = {position: 0 if each <= what else each for position, each in model.items()}
            ready = sorted(position for position, each in model.items() if not each)
            assert (taken is None) == (not ready)
            if taken is not None:
                ledger_id, ids = taken[0], taken[1].tolist()
                assert 0 < len(ids) <= number and ids == sorted(set(ids))
                of_ledger = [each for each in ready if each.ledger_id == ready[0].ledger_id]
                assert [Position(ledger_id, entry_id) for entry_id in ids] == of_ledger[:number]
                for each in of_ledger[:number]:
                    del model[each]
        assert queue.next_ms() == min(model.values(), default=None)
        assert positions_in(queue.queued) == model.keys() and all(queue.queued.values())


def test_what_came_back_at_different_times_goes_in_the_order_of_the_log():
    queue = RedeliveryQueue()
    queue.push(1, {2: BitMap([0])})
    queue.push(2, {1: BitMap([5, 6])})
    queue.push(3, {1: BitMap([0, 1])})
    assert drain(queue, 3) == [(1, 0), (1, 1), (1, 5), (1, 6), (2, 0)]
