"""Each fault of `MUTANTS` has its place in the code, and is caught by its test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
FAILED = 1
"""Exit status of pytest where tests have failed; another one says that they could not be run."""


def test_each_mutant_has_one_place_in_the_code_and_a_test() -> None:
    for name, mutant in MUTANTS.items():
        assert (ROOT / mutant.file).read_text().count(mutant.text) == 1, name
        path, _, test = mutant.test.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), name


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the code and its tests."""
    copy = tmp_path_factory.mktemp("mutants") / "tree"
    ignored = shutil.ignore_patterns(".*", "node_modules", "__pycache__", "site")
    shutil.copytree(ROOT, copy, ignore=ignored)
    yield copy
    shutil.rmtree(copy)


def outcome_of(tree: Path, test: str) -> int:
    arguments = ("-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", test)
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    environ["TEST_DEPTH"] = "change"
    return subprocess.run(
        (sys.executable, *arguments), cwd=tree, env=environ, capture_output=True, check=False
    ).returncode


@pytest.mark.deep
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(tree: Path, name: str) -> None:
    mutant = MUTANTS[name]
    path = tree / mutant.file
    text = path.read_text()
    assert outcome_of(tree, mutant.test) == 0, "the test passes without the fault"
    try:
        path.write_text(text.replace(mutant.text, mutant.replacement))
        assert outcome_of(tree, mutant.test) == FAILED
    finally:
        path.write_text(text)
