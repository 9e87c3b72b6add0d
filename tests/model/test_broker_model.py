"""A whole broker against the reference.

Hypothesis finds short counterexamples, random walks cover more. A failing walk is run again by its seed.
`MUTANTS` switch off one clause of the delivery rule each (architecture.md, section 6); a model that did not notice
would prove nothing. `make test-deep` tries the mutants, and a thousand of everything.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from broker.delayed import index_feed
from broker.subscriptions import reader
from tests.depth import at_depth, machine_settings
from tests.model.broker_machine import BrokerMachine
from tests.model.broker_mutants import MUTANTS
from tests.model.broker_walk import walk

WALKS = at_depth(fast=2, change=4, deep=1_000)
RARE = {"rebuilds_after_live_frontier": 3_050}
"""Mutants that about one walk in two hundred notices, and where to begin so that it takes a few seconds."""
WALKS_MAX = 200
"""A mutant that so many walks do not notice is not noticed; the slowest one today needs twenty."""


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """A few rows at a time, so that a log of twenty is long."""
    monkeypatch.setattr(index_feed, "_INDEX_ROWS", 2)
    monkeypatch.setattr(reader, "_SCAN_ROWS", 3)


def test_a_broker_behaves_like_a_dict_and_some_sets():
    run_state_machine_as_test(
        BrokerMachine,
        settings=machine_settings(fast=2, change=8, deep=1_000),
    )


@pytest.mark.parametrize("seed", range(WALKS))
def test_a_random_schedule_loses_hurries_and_doubles_nothing(seed):
    walk(seed)


def test_every_mutant_has_its_place(monkeypatch):
    for put_in in MUTANTS.values():
        with monkeypatch.context() as patch:
            put_in(patch)


@pytest.mark.deep
@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_notices_that_a_broker(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    first = RARE.get(name, 0)
    for seed in range(first, first + WALKS_MAX):
        try:
            walk(seed)
        except AssertionError:
            return
    pytest.fail(f"{WALKS_MAX} schedules showed no difference")
