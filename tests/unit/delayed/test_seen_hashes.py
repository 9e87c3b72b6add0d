"""Hashes that were seen, against a set."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.delayed.seen_hashes import SeenHashes

hashes = st.integers(1, 50) | st.integers(1, (1 << 64) - 1)


@given(
    added=st.lists(st.lists(hashes, min_size=1, max_size=40), max_size=12),
    asked=st.lists(hashes, max_size=40),
)
def test_it_has_what_was_added_and_nothing_else(added: list[list[int]], asked: list[int]) -> None:
    seen = SeenHashes()
    wanted: set[int] = set()
    for part in added:
        seen.add(np.array(part, dtype=np.uint64))
        wanted |= set(part)
        asked += part
    assert seen.has(np.array(asked, dtype=np.uint64)).tolist() == [value in wanted for value in asked]
    assert len(seen) == sum(map(len, added))


def test_a_table_that_grew_has_all_of_them() -> None:
    rng = np.random.default_rng(3)
    seen, parts = SeenHashes(), []
    for count in (1, 10, 1_000, 3, 30_000, 1):
        parts.append(rng.integers(1, 1 << 64, count, dtype=np.uint64))
        seen.add(parts[-1])
        assert all(seen.has(part).all() for part in parts)
    others = rng.integers(1, 1 << 64, 100_000, dtype=np.uint64)
    assert not seen.has(others).any()
    assert seen.memory_bytes() < 40 * len(seen) + (1 << 20)


def test_it_keeps_no_hold_of_what_it_was_given() -> None:
    seen = SeenHashes()
    given_hashes = np.array([5, 3], dtype=np.uint64)
    seen.add(given_hashes)
    given_hashes[:] = 7
    assert seen.has(np.array([3, 5, 7], dtype=np.uint64)).tolist() == [True, True, False]
