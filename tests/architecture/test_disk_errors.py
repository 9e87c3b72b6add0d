"""docs/guarantees.md says of every operation of the disk what its errors lead to: none is forgotten.

Which tests the rows name is looked at by test_guarantees.py, as for the rest of the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from broker.runtime.vfs import File, Vfs

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| `tests/", re.MULTILINE)


def rows() -> list[tuple[str, set[str]]]:
    """(operation, its system calls) of each row of the table."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    section = page.partition("### Disk errors\n")[2].partition("\n### ")[0]
    return [(name, set(re.findall(r"`(\w+)`", calls))) for name, calls, _, _ in _ROW.findall(section)]


def operations() -> set[str]:
    return {
        name
        for protocol in (Vfs, File)
        for name, value in vars(protocol).items()
        if callable(value) and not name.startswith("_")
    }


def calls_of(path: Path) -> set[str]:
    """The functions of `os` and `fcntl` that a module calls."""
    return {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("os", "fcntl")
    }


def test_every_operation_has_its_rows():
    assert {name for name, _ in rows()} == operations()
    assert len(operations()) > 15


def test_every_system_call_has_its_rows():
    folder = ROOT / "broker" / "runtime"
    made = calls_of(folder / "vfs.py") | calls_of(folder / "spare_files.py")
    named = set.union(*(calls for _, calls in rows()))
    assert named == made
