"""Prints the size of the house: code lines by room, and classes that a reviewer should look at.

    python tools/house.py

A code line is one with a token on it that is neither comment nor docstring. A class is shown when it has more than 20
methods or 12 attributes of an instance. That is no limit, as a limit makes people cut by the ruler; it asks whether the
class owns more than one thing.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METHODS, ATTRIBUTES = 20, 12
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def modules() -> Iterator[tuple[str, Path]]:
    """Each module and its room."""
    for folder in ("broker", "clients/python/postdate"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.name:
                inner = path.relative_to(ROOT / "broker").parent if folder == "broker" else Path("sdk")
                yield (
                    "sdk" if folder != "broker" else f"broker/{inner.parts[0]}" if inner.parts else "broker",
                    path,
                )


def code_lines(source: str) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - skipped)


def class_sizes(source: str) -> Iterator[tuple[str, int, int]]:
    """(class, methods, attributes of an instance)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            attributes = {
                each.attr
                for method in methods
                for each in ast.walk(method)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and ast.unparse(each.value) == "self"
            }
            yield node.name, len(methods), len(attributes)


def main() -> None:
    lines: Counter[str] = Counter()
    for room, path in modules():
        lines[room] += code_lines(path.read_text())
    for room, count in sorted(lines.items()):
        print(f"{room:24}{count:>8,}")
    print(f"{'all':24}{lines.total():>8,}\n")
    print(f"{'methods':>8}{'attributes':>12}  class")
    large = [
        (methods, attributes, f"{path.relative_to(ROOT)} {name}")
        for _, path in modules()
        for name, methods, attributes in class_sizes(path.read_text())
        if methods > METHODS or attributes > ATTRIBUTES
    ]
    for methods, attributes, name in sorted(large, reverse=True):
        print(f"{methods:>8}{attributes:>12}  {name}")


if __name__ == "__main__":
    main()
