"""The tracer of the benchmarks wraps functions of the broker by name: a name that has changed must be noticed."""

from __future__ import annotations

import pytest

from benchmarks.lone import STEPS
from benchmarks.traced_broker import HOOKS, resolve


@pytest.mark.parametrize("path", [path for path, _, _ in HOOKS])
def test_a_function_that_is_traced_is_there(path: str):
    assert callable(resolve(path)[2])


def test_every_label_has_a_row_of_the_table():
    assert {label for _, *labels in HOOKS for label in labels if label} <= STEPS.keys()
