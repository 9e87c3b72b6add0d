"""What a subscription has settled: the mark, and the holes beyond it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.model import Entries, Position
from broker.subscriptions.cursor import Cursor


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


def test_c2_the_mark_moves_over_what_is_settled_in_order() -> None:
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
