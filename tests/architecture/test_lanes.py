"""Processes that share a run read each file alone, and lose nothing of what one process would tell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "conftest.py": "from tests.conftest import *",
    "test_passing.py": """
import pytest

@pytest.fixture(scope="module")
def places(request):
    found = []
    yield found
    print("taken down", found)

@pytest.mark.parametrize("number", range(3))
def test_numbers(places, number):
    places.append(number)
    assert places == list(range(number + 1))

@pytest.mark.deep
def test_left_out():
    raise AssertionError("runs")
""",
    "test_failing.py": """
import os
import sys

import pytest

def test_the_next_file_is_unread_where_each_has_its_turn():
    assert ("test_passing" in sys.modules) == (os.environ["IN_TURN"] == "no")

def test_fails():
    assert [1, 2] == [1, 3]

@pytest.fixture
def broken():
    raise OSError("set up")

@pytest.fixture
def breaking():
    yield
    raise OSError("taken down")

def test_broken(broken):
    pass

def test_breaking(breaking):
    pass

@pytest.mark.skip(reason="a reason")
def test_skipped():
    pass
""",
    "test_unread.py": "import there_is_no_such_module",
    "test_last.py": """
import pytest

@pytest.fixture(scope="module")
def breaking():
    yield
    raise OSError("taken down with its file")

def test_passes(breaking):
    pass
""",
}


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_processes_that_share_files_tell_what_one_process_tells(tmp_path: Path, processes: int) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shared = ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"] if processes else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-q", "--continue-on-collection-errors", *shared],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}", "TEST_DEPTH": "change", "IN_TURN": "yes" if processes else "no"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert told(done.stdout) == {"failed": 1, "passed": 6, "skipped": 1, "errors": 4}, done.stdout
    for reason in (
        "set up",
        "taken down",
        "taken down with its file",
        "there_is_no_such_module",
        "[1, 2] == [1, 3]",
    ):
        assert reason in done.stdout


def told(output: str) -> dict[str, int]:
    """The counts of the last line, without what was deselected, which processes that share a run do not tell."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", output.splitlines()[-1])}
    return {
        word: count for word, count in counts.items() if word in ("failed", "passed", "skipped", "errors")
    }
