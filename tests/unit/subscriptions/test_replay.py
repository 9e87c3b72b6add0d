"""The replay queue: what became due comes out in due order, or the queue is empty and says so."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.delayed.due_rows import DueRows
from broker.subscriptions.replay import ReplayQueue

Due = tuple[int, int, int]


def chunk(*due: Due) -> DueRows:
    return DueRows(
        np.array([d[0] for d in due], dtype=np.int64),
        np.array([d[1] for d in due], dtype=np.int64),
        np.array([d[2] for d in due], dtype=np.uint32),
    )


def listed(found: DueRows | None) -> list[Due]:
    if found is None:
        return []
    columns = (found.deliver_at_ms.tolist(), found.ledger_ids.tolist(), found.entry_ids.tolist())
    return list(zip(*columns, strict=True))


def numbered(first: int, count: int) -> list[Due]:
    return [(first + i, 1 + i % 2, i) for i in range(count)]


def test_an_empty_queue_has_nothing():
    queue = ReplayQueue(5)
    assert (queue.take(9), len(queue)) == (None, 0)


def test_chunks_come_out_in_parts_of_at_most_the_limit():
    queue, due = ReplayQueue(9), numbered(10, 6)
    assert queue.push(chunk(*due[:4])) and queue.push(chunk(*due[4:]))
    assert [listed(queue.take(3)) for _ in range(3)] == [due[:3], due[3:], []]


def test_what_passes_the_limit_empties_the_queue():
    queue = ReplayQueue(4)
    assert queue.push(chunk(*numbered(1, 3)))
    assert not queue.push(chunk(*numbered(4, 2)))
    assert (queue.take(9), len(queue)) == (None, 0)
    assert queue.push(chunk(*numbered(6, 4)))  # exactly the limit
    assert listed(queue.take(9)) == numbered(6, 4)


def test_after_an_overflow_nothing_is_skipped_of_the_next_chunk():
    queue = ReplayQueue(4)
    queue.push(chunk(*numbered(1, 4)))
    queue.take(2)
    assert not queue.push(chunk(*numbered(5, 3)))
    queue.push(chunk(*numbered(8, 3)))
    assert listed(queue.take(9)) == numbered(8, 3)


def test_what_is_put_back_comes_first_again():
    queue, due = ReplayQueue(9), numbered(1, 6)
    queue.push(chunk(*due))
    taken = listed(queue.take(4))
    queue.put_back(chunk(*taken[1:]))
    assert len(queue) == 5
    assert listed(queue.take(9)) + listed(queue.take(9)) == due[1:]


def test_chunks_are_shared_and_stay_as_they_are():
    shared, due = chunk(*numbered(1, 4)), numbered(1, 4)
    one, other = ReplayQueue(9), ReplayQueue(9)
    for queue in (one, other):
        queue.push(shared)
        queue.put_back(chunk(*listed(queue.take(2))))
    assert listed(one.take(9)) + listed(one.take(9)) == due
    assert listed(other.take(9)) + listed(other.take(9)) == listed(shared) == due


@given(
    limit=st.integers(1, 20),
    steps=st.lists(
        st.tuples(st.sampled_from(["push", "take", "put_back", "clear"]), st.integers(1, 9)), max_size=40
    ),
)
def test_the_queue_gives_what_a_plain_list_would(limit: int, steps: list[tuple[str, int]]):
    queue, model, pushed = ReplayQueue(limit), list[Due](), 0
    for step, number in steps:
        if step == "push":
            due = numbered(pushed, number)
            pushed += number
            fits = len(model) + number <= limit
            assert queue.push(chunk(*due)) == fits
            model = [*model, *due] if fits else []
        elif step == "clear" and number == 9:
            queue.clear()
            model = []
        else:
            taken = listed(queue.take(number))
            assert taken == model[: len(taken)] and len(taken) <= number
            assert bool(taken) == bool(model)
            kept = number // 2 if step == "put_back" else len(taken)
            if taken[kept:]:
                queue.put_back(chunk(*taken[kept:]))
            del model[: min(kept, len(taken))]
        assert len(queue) == len(model)
    rest: list[Due] = []
    while (more := queue.take(3)) is not None:
        rest += listed(more)
    assert rest == model


def test_small_chunks_are_taken_together_and_large_ones_stay_shared():
    queue, due = ReplayQueue(1_000_000), numbered(0, 5_005)
    for first, end in ((0, 1), (1, 3), (3, 5)):
        queue.push(chunk(*due[first:end]))
    large = chunk(*due[5:])
    queue.push(large)
    assert listed(queue.take(100)) == due[:5]
    taken = queue.take(4_000)
    assert taken is not None
    assert np.shares_memory(taken.entry_ids, large.entry_ids)
    assert len(queue) == 1_000


def test_clearing_is_counted():
    queue, due = ReplayQueue(2), numbered(0, 5)
    queue.push(chunk(*due[:2]))
    assert queue.clears == 0
    assert not queue.push(chunk(*due[2:]))
    assert queue.clears == 1
