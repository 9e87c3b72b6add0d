"""Each library is known to the packages named here and to no other, and no modules import each other in a circle.

The direction among the broker's own packages is checked by import-linter (`make check`). Together they also
rule out indirect imports: what lies below an edge can reach neither the edge nor the library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ALLOWED = {
    "grpc": ("broker.rpc", "broker.server"),
    "grpc_health": ("broker.rpc", "broker.server"),
    "grpc_reflection": ("broker.rpc",),
    "google.protobuf": ("broker.rpc", "broker.storage"),
    "google.rpc": ("broker.rpc",),
    "postdate": ("broker.cli",),
    "postdate_api": (
        "broker.rpc",
        "broker.server",
        "broker.cli",
        "broker.storage.message_fields",
        "broker.testing",
    ),
    "aiohttp": ("broker.web", "broker.server", "broker.observe"),
    "jinja2": ("broker.web",),
    "obstore": ("broker.cluster",),
    "prometheus_client": ("broker.web", "broker.server", "broker.observe", "broker.jobs"),
    "opentelemetry": ("broker.observe",),
    "pyspark": ("broker.jobs",),
}

Graph = dict[str, set[str]]


@pytest.mark.parametrize("library", ALLOWED)
def test_library_stays_at_its_edge(library):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "broker").rglob("*.py"))
        if not within(module_name(path.relative_to(ROOT)), ALLOWED[library])
        for name, line in imports(path)
        if within(name, (library,))
    ]
    assert not wrong


LATE = frozenset(
    [
        "isin",
        "in1d",
        "intersect1d",
        "union1d",
        "setdiff1d",
        "setxor1d",
        "unique_values",
        "unique_counts",
        "unique_inverse",
        "unique_all",
        "quantile",
        "percentile",
        "nanquantile",
        "nanpercentile",
        "nanmedian",
        "ma",
        "random",
        "testing",
        "linalg",
        "fft",
        "genfromtxt",
    ]
)
"""Of NumPy: what loads `numpy.ma` at a first call, and modules that are loaded when they are first named. `unique` may be
called for more than the values, which loads nothing."""
MORE_THAN_VALUES = frozenset({"return_index", "return_inverse", "return_counts"})


def test_the_broker_names_nothing_of_numpy_that_is_loaded_late():
    """So the first delivery of a process waits for no module. The jobs and what only tests use may."""
    late = [
        f"{path.relative_to(ROOT)}:{line} names {name}"
        for path in sorted((ROOT / "broker").rglob("*.py"))
        if not within(module_name(path.relative_to(ROOT)), ("broker.jobs", "broker.testing"))
        for name, line in late_names(ast.parse(path.read_text()))
    ]
    assert not late


@pytest.mark.parametrize(
    ("source", "is_late"),
    [
        ("np.unique(x)", True),
        ("np.unique(x, axis=0)", True),
        ("np.unique(x, return_counts=True)", False),
        ("np.unique(x, return_counts=False)", True),
        ("map(np.unique, xs)", True),
        ("numpy.isin(x, y)", True),
        ("np.ma.masked", True),
        ("from numpy import unique", True),
        ("np.sort(x)", False),
    ],
)
def test_names_that_are_loaded_late_are_found(source, is_late):
    assert bool([*late_names(ast.parse(source))]) is is_late


def late_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    harmless = {
        call.func
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and any(
            word.arg in MORE_THAN_VALUES and isinstance(word.value, ast.Constant) and word.value.value is True
            for word in call.keywords
        )
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "numpy":
            names = [alias.name for alias in node.names]
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in {"np", "numpy"}
        ):
            names = [node.attr]
        else:
            continue
        yield from (
            (name, node.lineno)
            for name in names
            if name in LATE or (name == "unique" and node not in harmless)
        )


def test_modules_import_each_other_in_no_circle():
    assert circle(import_graph()) == []


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert set(circle(graph)) == {"a", "b", "c"}
    assert circle({**graph, "c": set()}) == []


def import_graph() -> Graph:
    """Return the imports of each module of the broker and the SDK, wherever they stand in it."""
    modules = {
        module_name(path.relative_to(root)): path
        for root, package in ((ROOT, "broker"), (ROOT / "clients/python", "postdate"))
        for path in (root / package).rglob("*.py")
        if "_pb2" not in path.name
    }
    graph: Graph = {}
    for name, path in modules.items():
        # `from package import name` imports a module or a name of the package.
        imported = {each if each in modules else each.rpartition(".")[0] for each, _ in imports(path)}
        graph[name] = (imported & modules.keys()) - {name}
    return graph


def circle(graph: Graph) -> list[str]:
    """Some circle; nothing if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    return list(walked_imports(path))


def walked_imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from google import protobuf` imports a module too, so each name counts as one.
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)
