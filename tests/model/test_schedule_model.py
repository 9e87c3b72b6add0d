"""Cancels, moves, keys and filters on a whole broker against the reference.

Hypothesis finds short counterexamples, random walks cover more. A failing walk is run again by its seed.
`make test-deep` tries the mutants, and a thousand of everything.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.delayed import index_feed
from broker.subscriptions import reader
from tests.depth import at_depth, machine_settings
from tests.model.schedule_mutants import MUTANTS
from tests.model.schedule_walk import run_steps, steps_of, walk

WALKS = at_depth(fast=1, change=2, deep=1_000)
WALKS_MAX = 200
"""A mutant that so many walks do not notice is not noticed."""
good_walk = cache(walk)
"""With nothing put in on purpose."""


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """A few rows at a time, so that a log of twenty is long."""
    monkeypatch.setattr(index_feed, "_INDEX_ROWS", 2)
    monkeypatch.setattr(reader, "_SCAN_ROWS", 3)


@machine_settings(fast=2, change=8, deep=1_000)
@given(st.integers(0, 1 << 20), st.lists(steps_of(), min_size=5, max_size=40))
def test_a_schedule_behaves_like_a_dict(seed, steps):
    run_steps(seed, steps)


@pytest.mark.parametrize("seed", range(WALKS))
def test_a_random_schedule_loses_hurries_and_doubles_nothing(seed):
    good_walk(seed)


@pytest.mark.slow
def test_the_walks_meet_everything():
    seen = sum((good_walk(seed) for seed in range(2)), start=good_walk(25))
    kinds = {"DONE", "ALREADY_DELIVERED", "NOT_FOUND", "ALREADY_CANCELLED", "moved", "replaced", "taken"}
    assert kinds | {"due", "exact", "counted"} <= seen.keys()


def test_every_mutant_has_its_place(monkeypatch):
    for put_in in MUTANTS.values():
        with monkeypatch.context() as patch:
            put_in(patch)


@pytest.mark.deep
@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_notices_that(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    for seed in random.Random(1).sample(range(10_000), WALKS_MAX):
        try:
            walk(seed)
        except Exception:  # a broker that breaks is noticed too
            return
    pytest.fail(f"{WALKS_MAX} schedules showed no difference")
