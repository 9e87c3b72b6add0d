"""A build server tries other examples where it is given a seed, and says how to try them again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = """
from hypothesis import given, strategies as st
@given(st.lists(st.integers(), min_size=5))
def test_one(numbers):
    print("drew", numbers)
"""


def drawn(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_one.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *options, str(folder)]
    found = subprocess.run(
        command, cwd=folder, env={**os.environ, "CI": "true"}, capture_output=True, text=True, check=True
    )
    return "\n".join(line for line in found.stdout.splitlines() if "drew" in line)


def test_seed_of_a_build_server_decides_what_is_tried(tmp_path: Path) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "--hypothesis-profile=seeded --hypothesis-seed=$HYPOTHESIS_SEED" in script
    first, again, other = (
        drawn(tmp_path, "--hypothesis-profile=seeded", f"--hypothesis-seed={seed}") for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
