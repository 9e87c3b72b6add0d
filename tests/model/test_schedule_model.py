"""Cancels, moves, keys and filters on a whole broker against the plainest model: a dict of messages.

Hypothesis finds short counterexamples, random walks cover more. A failing walk is run again by its seed. More of
everything: POSTDATE_MODEL_EXAMPLES=2000 POSTDATE_MODEL_WALKS=2000.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.delayed import index_pump
from broker.subscriptions import reader
from tests.model.schedule_mutants import MUTANTS
from tests.model.schedule_walk import run_steps, steps_of, walk

EXAMPLES = int(os.environ.get("POSTDATE_MODEL_EXAMPLES", "15"))
WALKS = int(os.environ.get("POSTDATE_MODEL_WALKS", "25"))
WALKS_MAX = 200
"""A mutant that so many walks do not notice is not noticed."""


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """A few rows at a time, so that a log of twenty is long."""
    monkeypatch.setattr(index_pump, "_INDEX_ROWS", 2)
    monkeypatch.setattr(reader, "_SCAN_ROWS", 3)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(0, 1 << 20), st.lists(steps_of(), min_size=5, max_size=40))
def test_a_schedule_behaves_like_a_dict(seed, steps):
    run_steps(seed, steps)


@pytest.mark.parametrize("seed", range(WALKS))
def test_a_random_schedule_loses_hurries_and_doubles_nothing(seed):
    walk(seed)


def test_the_walks_meet_everything():
    seen = sum((walk(seed) for seed in range(4)), start=walk(WALKS))
    kinds = {"DONE", "ALREADY_DELIVERED", "NOT_FOUND", "ALREADY_CANCELLED", "moved", "replaced", "taken"}
    assert kinds | {"due", "exact", "counted"} <= seen.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_notices_that(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    for seed in random.Random(1).sample(range(10_000), WALKS_MAX):
        try:
            walk(seed)
        except Exception:  # a broker that breaks is noticed too
            return
    pytest.fail(f"{WALKS_MAX} schedules showed no difference")
