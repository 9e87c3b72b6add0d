"""Cursors: the mark, and the holes beyond it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.model import Entries, Position
from broker.subscriptions.cursor import Cursor, entries_between


class Spans:
    """Ledgers and their lengths."""

    def __init__(self, *counts: int) -> None:
        self.counts = dict(enumerate(counts, 1))

    def entry_count(self, ledger_id: int) -> int | None:
        return self.counts.get(ledger_id)

    def next_ledger_id(self, ledger_id: int) -> int | None:
        return min((i for i in self.counts if i > ledger_id), default=None)


def entries(*positions: tuple[int, int]) -> Entries:
    found: Entries = {}
    for ledger_id, entry_id in positions:
        found.setdefault(ledger_id, BitMap()).add(entry_id)
    return found


def test_cursor_2_the_mark_moves_over_what_is_settled_in_order() -> None:
    cursor, spans = Cursor(Position(1, 0)), Spans(5)
    cursor.settle(entries((1, 0), (1, 1)), spans)
    assert cursor.mark == (1, 2)
    assert not cursor.settled


def test_a_hole_holds_the_mark_and_costs_a_bit() -> None:
    cursor, spans = Cursor(Position(1, 0)), Spans(5)
    cursor.settle(entries((1, 1), (1, 3)), spans)
    assert (cursor.mark, cursor.settled) == ((1, 0), entries((1, 1), (1, 3)))
    cursor.settle(entries((1, 0)), spans)
    assert (cursor.mark, cursor.settled) == ((1, 2), entries((1, 3)))


def test_a_ledger_is_settled_before_the_mark_and_where_every_entry_is() -> None:
    cursor, spans = Cursor(Position(2, 1)), Spans(3, 3, 3, 3)
    cursor.settle(entries((2, 1), (3, 0), (3, 2), (4, 0), (4, 1), (4, 2)), spans)
    assert [cursor.has_settled(ledger_id, 3) for ledger_id in (1, 2, 3, 4, 5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    cursor.settle(entries((2, 2)), spans)
    assert cursor.mark == (3, 1)
    assert [cursor.has_settled(ledger_id, 3) for ledger_id in (2, 3)] == [True, False]
    cursor.settle(entries((3, 1)), spans)
    assert cursor.mark == (4, 3)
    assert cursor.has_settled(4, 3)
    assert not cursor.has_settled(4, 4)


def test_what_was_dropped_is_forgotten_and_the_mark_moves_over_it() -> None:
    cursor, spans = Cursor(Position(1, 0)), Spans(2, 2, 2, 2)
    cursor.settle(entries((1, 0), (2, 0), (2, 1), (4, 1)), spans)
    assert cursor.mark == (1, 1)
    del spans.counts[2]
    assert cursor.drop([2], spans)
    assert (cursor.mark, cursor.settled) == ((1, 1), entries((4, 1)))
    assert not cursor.drop([2], spans), "there is nothing to write"
    cursor.settle(entries((1, 1)), spans)
    assert cursor.mark == (3, 0)
    cursor.settle(entries((3, 0), (3, 1), (4, 0)), spans)
    assert cursor.mark == (4, 2)
    for ledger_id in (1, 3, 4):
        del spans.counts[ledger_id]
    cursor.drop([1, 3, 4], spans)
    assert (cursor.mark, cursor.settled) == ((4, 2), {}), "behind the last ledger it waits for the next"
    assert cursor.settle(entries((3, 1)), spans) == {}, "what is gone is settled"
    spans.counts[6] = 2
    assert cursor.settle(entries((6, 0)), spans) == entries((6, 0))
    assert cursor.mark == (6, 1)


def test_the_part_between_two_positions() -> None:
    some = entries((1, 5), (2, 0), (2, 1), (3, 7), (4, 1), (4, 2), (5, 0))
    assert entries_between(some, Position(2, 1), Position(4, 2)) == entries((2, 1), (3, 7), (4, 1))
    assert entries_between(some, Position(0, 0), Position(1, 6)) == entries((1, 5))
    assert entries_between(some, Position(2, 1), Position(2, 1)) == {}


def test_the_mark_crosses_ledgers_that_came_after_it_reached_the_end() -> None:
    # It once stayed where the log had ended, for ever, and bitmaps gathered behind it. A model that rolls ledgers
    # while everything is settled finds the family.
    cursor, spans = Cursor(Position(1, 0)), Spans(2)
    cursor.settle(entries((1, 0), (1, 1)), spans)
    assert cursor.mark == (1, 2)
    spans.counts |= {2: 2, 3: 2}
    cursor.settle(entries((2, 0), (2, 1), (3, 0)), spans)
    assert (cursor.mark, cursor.settled) == ((3, 1), {})


def test_what_is_settled_twice_is_new_once() -> None:
    cursor, spans = Cursor(Position(1, 0)), Spans(5)
    assert cursor.settle(entries((1, 0), (1, 2)), spans) == entries((1, 0), (1, 2))
    assert cursor.settle(entries((1, 0), (1, 2), (1, 3)), spans) == entries((1, 3))


def test_nothing_before_the_start_is_owed() -> None:
    cursor, spans = Cursor(Position(2, 1)), Spans(3, 3)
    assert cursor.settled_part(entries((1, 0), (2, 0), (2, 1))) == entries((1, 0), (2, 0))
    assert not cursor.settle(entries((1, 2)), spans)


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    rounds=st.lists(st.integers(0, 1 << 30), max_size=12),
)
def test_the_mark_and_the_bitmaps_say_what_a_plain_set_says(counts: list[int], rounds: list[int]) -> None:
    spans, cursor, settled = Spans(counts[0]), Cursor(Position(1, 0)), set[tuple[int, int]]()
    for number, seed in enumerate(rounds):
        if number < len(counts):
            spans.counts[number + 1] = counts[number]
        everything = [(i, e) for i, count in spans.counts.items() for e in range(count)]
        some = random.Random(seed).sample(everything, random.Random(seed).randint(0, len(everything)))
        assert cursor.settle(entries(*some), spans) == entries(*(set(some) - settled))
        settled |= set(some)
        for position in everything:
            assert cursor.is_settled(Position(*position)) == (position in settled)
        first_open = min(
            (p for p in everything if p not in settled),
            default=(max(spans.counts), counts[max(spans.counts) - 1]),
        )
        assert cursor.mark == first_open or not settled
