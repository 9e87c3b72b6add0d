"""No module uses what another one keeps to itself: names with an underscore belong to the module that defines them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("broker", "clients/python/postdate")

# Names that are public in spite of their underscore.
PUBLIC = {"_replace", "_asdict", "_make", "_fields", "_exit"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def own_names(tree: ast.Module) -> Iterator[str]:
    """The names that the classes of a module define."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield node.attr
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def foreign_names(source: str) -> list[str]:
    """The private names of other modules that a module uses, each with its line."""
    tree = ast.parse(source)
    own = set(own_names(tree))
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and node.attr not in own
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()")
    ]


def test_private_names_stay_in_their_module():
    foreign = {
        str(path.relative_to(ROOT)): names
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name and (names := foreign_names(path.read_text()))
    }
    assert not foreign, "ask the owner for a public name, or move the code to him"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("topic._state", 1),
        ("def f(topic): topic.log._rows = 1", 1),
        ("self._log._rows", 1),
        ("class A:\n def f(self): self._x = self._y()", 0),
        ("class A:\n def __init__(self): self._x = 1\n def f(self, other): return other._x", 0),
        ("class A:\n _x: int\ndef f(a: A): return a._x", 0),
        ("class A(B):\n def _f(self): return super()._f()", 0),
        ("class A(B):\n def f(self): return super()._g()", 0),
        ("pair._replace(x=1)", 0),
        ("topic.__class__", 0),
    ],
)
def test_what_counts_as_a_private_name_of_another(source: str, count: int):
    assert len(foreign_names(source)) == count
