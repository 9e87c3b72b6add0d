"""Functions stay small enough to be read in one go. How large modules and classes are is a matter of who owns what."""

from __future__ import annotations

import ast
from pathlib import Path

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
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": length(node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES_MAX}


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the function's lines, its docstring aside."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines
