"""Facts of each module's source that several tests look at: it is parsed once."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Function:
    """A function and its lines, its docstring aside."""

    name: str
    line: int
    lines: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and texts of a module, without its tree, which would fill the memory."""

    docstrings: tuple[tuple[str, str], ...]
    """(name of what it documents, text); the module's own has no name. Those of attributes and constants count too."""
    classes: tuple[str, ...]
    functions: tuple[Function, ...]


@cache
def facts_of(path: Path) -> Facts:
    docstrings, classes, functions = [], [], []
    for node in _documented(ast.parse(path.read_text())):
        text = ast.get_docstring(node, clean=False)
        if text is not None:
            docstrings.append((getattr(node, "name", ""), text))
        docstrings += attribute_docstrings(node)
        if isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif not isinstance(node, ast.Module):
            functions.append(Function(node.name, node.lineno, length(node, is_documented=text is not None)))
    return Facts(tuple(docstrings), tuple(classes), tuple(functions))


def _documented(module: ast.Module) -> Iterator[Documented]:
    """Modules, classes and functions, in statements alone: of all nodes most are in expressions."""
    left: deque[ast.AST] = deque([module])
    while left:
        node = left.popleft()
        if isinstance(node, Documented):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):  # of a lambda and of `a if b else c` it is an expression
                left += inner


def attribute_docstrings(node: Documented) -> list[tuple[str, str]]:
    """The (name, text) of each assignment in a body that is followed by a string."""
    return [
        (
            ast.unparse(assignment.targets[0] if isinstance(assignment, ast.Assign) else assignment.target),
            text,
        )
        for assignment, statement in pairwise(node.body)
        if isinstance(assignment, ast.Assign | ast.AnnAssign)
        and isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(text := statement.value.value, str)
    ]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef, *, is_documented: bool) -> int:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if is_documented:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines
