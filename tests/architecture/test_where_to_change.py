"""The tables of CONTRIBUTING.md, ARCHITECTURE.md and tests/README.md name places that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


TABLE = section("Where to change what")
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if re.match(r"\| [a-z]", line)][1:]
PATH = re.compile(r"`([\w.-]+/[\w./-]+)`(?: `([A-Z_a-z][\w.]*)`)?")
TESTS = (ROOT / "tests" / "README.md").read_text()
READ_ALONG = ARCHITECTURE.split("\nTo read along", 1)[1].split("\n## ", 1)[0]
PLACES = sorted({*PATH.findall(TABLE + section("Where to begin a test") + TESTS + READ_ALONG)})


def names_of(path: Path) -> set[str]:
    """Functions, classes, `Class.method`s and assigned names of a module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("path", "name"), PLACES, ids=lambda place: place or "whole")
def test_a_place_exists(path: str, name: str):
    assert (ROOT / path).exists()
    assert not name or name in names_of(ROOT / path)


def test_each_row_names_a_place_and_a_test():
    assert len(ROWS) > 15
    for row in ROWS:
        assert PATH.search(row[1]) and row[2].startswith("`tests/"), row
