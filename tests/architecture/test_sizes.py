"""Functions stay small enough to be read in one go. How large modules and classes are is a matter of who owns what."""

from __future__ import annotations

from pathlib import Path

from tests.architecture.sources import facts_of

ROOT = Path(__file__).resolve().parents[2]
FUNCTION_LINES_MAX = 70

MODULES = [
    path
    for folder in ("broker", "clients/python/postdate", "tests", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]


def test_functions_are_short():
    lengths = {
        f"{path.relative_to(ROOT)}:{function.line} {function.name}": function.lines
        for path in MODULES
        for function in facts_of(path).functions
    }
    assert not {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES_MAX}
