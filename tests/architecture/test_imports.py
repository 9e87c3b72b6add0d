"""Each library is known to the packages named here and to no other.

The direction among the broker's own packages is checked by import-linter (`make check`). Together they also
rule out indirect imports: what lies below an edge can reach neither the edge nor the library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ALLOWED = {
    "grpc": ("broker.rpc", "broker.server"),
    "grpc_health": ("broker.rpc", "broker.server"),
    "grpc_reflection": ("broker.rpc",),
    "google.protobuf": ("broker.rpc", "broker.storage"),
    "google.rpc": ("broker.rpc",),
    "postdate": ("broker.rpc", "broker.server", "broker.cli"),
    "aiohttp": ("broker.web", "broker.server", "broker.observe"),
    "jinja2": ("broker.web",),
    "prometheus_client": ("broker.web", "broker.server", "broker.observe", "broker.jobs"),
    "pyspark": ("broker.jobs",),
}


@pytest.mark.parametrize("library", ALLOWED)
def test_library_stays_at_its_edge(library):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "broker").rglob("*.py"))
        if not within(module_name(path), ALLOWED[library])
        for name, line in imports(path)
        if within(name, (library,))
    ]
    assert not wrong


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from google import protobuf` imports a module too, so each name counts as one.
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)
