"""Depth of a run of the tests: `fast` while one writes, `change` for each change, `deep` at night.

A test that searches asks `at_depth` how far; a case that only `deep` tries is marked `deep`. CONTRIBUTING.md and
tests/README.md say what the targets of make leave to each other. A seed of Hypothesis comes with HYPOTHESIS_SEED: at
`deep` for every test that uses it, at `change` on a build server for the state machines of tests/model alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import islice, product
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

DEPTH = os.environ.get("TEST_DEPTH", "change")
EXAMPLES = {"fast": 10, "change": 25, "deep": 1_000}
"""Examples of Hypothesis for a test that does not say otherwise."""
DAY = int(os.environ.get("HYPOTHESIS_SEED") or 0)
"""Number that shifts every sample: of the day on a build server, 0 where there is none."""
TODAY = DAY or int(os.environ.setdefault("TEST_DAY", f"{date.today():%Y%m%d}"))
"""As `DAY`, but of the calendar where no seed is given: for cases of which each run tries another few. The variable is
for the processes of one run, which may begin before midnight and after."""
T = TypeVar("T")


def at_depth(*, change: int, deep: int, fast: int | None = None) -> int:
    """Return the count or distance for the depth of this run."""
    return {"fast": change if fast is None else fast, "change": change, "deep": deep}[DEPTH]


def sampled(items: Iterable[T], stride: int, shift: int = 0) -> Iterator[T]:
    """Iterate over every so many of some items, on each day over others: of fewer over one, with a stride of 1 over all."""
    items = list(items)
    stride = min(stride, len(items)) or 1
    return islice(items, (DAY + shift) % stride, None, stride)


def deep_but(kept: Iterable[T], cases: Iterable[T]) -> list[object]:
    """The cases of a table, all but the kept ones left to the deep run."""
    kept = list(kept)
    return [
        each
        if each in kept
        else pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.deep)
        for each in cases
    ]


def every_pair(*axes: Iterable[object]) -> list[object]:
    """Half of all combinations of three axes or more, with every pair of values of any two; the others are deep."""
    numbered = (list(enumerate(axis)) for axis in axes)
    return [
        pytest.param(*(value for _, value in case), marks=[pytest.mark.deep] * (sum(n for n, _ in case) % 2))
        for case in product(*numbered)
    ]


def one_of_three(number: int) -> pytest.MarkDecorator:
    """Mark of one of three long tests: of those with 0, 1 and 2 a change has one, on each day another."""
    return pytest.mark.slow if number == TODAY % 3 else pytest.mark.deep


def load_profile() -> None:
    """No example has a time limit, since tests share a machine.

    A build server tries the same examples of each test on every day, unless it runs deep with the seed of the day.
    """
    settings.register_profile(
        "deep",
        max_examples=EXAMPLES["deep"],
        deadline=None,
        derandomize=False,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    if DEPTH == "deep":
        settings.load_profile("deep")
    elif (given := settings.get_current_profile_name()) in ("default", "ci"):
        settings.register_profile(
            "unhurried", settings.get_profile(given), max_examples=EXAMPLES[DEPTH], deadline=None
        )
        settings.load_profile("unhurried")


def machine_settings(*, fast: int, change: int, deep: int) -> settings:
    """Settings of a state machine: with a seed other examples, else the same in every run."""
    return settings(
        max_examples=at_depth(fast=fast, change=change, deep=deep),
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize="HYPOTHESIS_SEED" not in os.environ,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
