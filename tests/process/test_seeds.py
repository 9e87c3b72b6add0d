"""A seed of the day decides what a build server tries: of the state machines for a change, of all tests when deep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = """
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.depth import machine_settings


class Machine(RuleBasedStateMachine):
    @rule(number=st.integers())
    def draw(self, number):
        print("machine drew", number)


def test_machine():
    run_state_machine_as_test(Machine, settings=machine_settings(fast=5, change=5, deep=5))


@given(st.lists(st.integers(), min_size=5))
def test_plain(numbers):
    print("plain drew", numbers)
"""


def drawn(folder: Path, seed: str | None, depth: str) -> dict[str, list[str]]:
    """Return what the tests drew, by kind of test, as `tools/test.sh` runs them with a seed or without one."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_one.py").write_text(TEST)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HYPOTHESIS")}
    environ |= {"CI": "true", "TEST_DEPTH": depth, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the others take most of the time
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "_hypothesis_pytestplugin", str(folder)]
    if seed is not None:
        environ["HYPOTHESIS_SEED"] = seed
        command.append(f"--hypothesis-seed={seed}")
    found = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    lines = found.stdout.splitlines()
    return {kind: [line for line in lines if f"{kind} drew" in line] for kind in ("machine", "plain")}


@pytest.mark.parametrize("depth", ["change", pytest.param("deep", marks=pytest.mark.deep)])
def test_the_seed_decides_what_is_tried(tmp_path: Path, depth: str) -> None:
    first, again, other = (drawn(tmp_path, seed, depth) for seed in ("1", "1", "2"))
    assert first == again
    assert first["machine"] != other["machine"]
    assert (first["plain"] != other["plain"]) == (depth == "deep")


def test_without_a_seed_a_build_server_tries_the_same_every_time(tmp_path: Path) -> None:
    assert drawn(tmp_path, None, "change") == drawn(tmp_path, None, "change")


@pytest.mark.parametrize("given", ["", "20261122"])
def test_the_runner_says_how_to_try_it_again(given: str) -> None:
    environ = {**os.environ, "PYTHON": "echo", "HYPOTHESIS_SEED": given}
    command = ["bash", str(ROOT / "tools" / "test.sh"), "deep", "tests/model"]
    said, run = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    seed = run.split("--hypothesis-seed=")[1].split()[0]
    assert len(seed) == 8 and seed == (given or seed)
    assert f"HYPOTHESIS_SEED={seed} make test-deep" in said


def test_a_build_server_has_the_seed_of_the_day() -> None:
    assert (
        "export HYPOTHESIS_SEED=${HYPOTHESIS_SEED:-$(date -u +%Y%m%d)}" in (ROOT / ".ci" / "run").read_text()
    )
