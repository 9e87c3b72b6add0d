"""docs/errors.md lists every reason that the broker can give, with its status, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from broker import errors
from broker.rpc.status import _CODES

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([A-Z_]+)` \| ([A-Z_]+|-) \|", re.MULTILINE)
NAMED = re.compile(r"""["']([A-Z_]+)\b""")

COMPUTED = {
    "f'{name.upper()}_TOO_LARGE'": ["PAYLOAD", "KEY", "SCHEDULE_KEY", "PROPERTIES", "TRACEPARENT"],
    "f'INVALID_{name.upper()}'": ["DELIVER_AT_MS", "DELIVER_AFTER_MS", "TTL_MS", "REDELIVER_AFTER_MS"],
}
"""Names that the placeholders stand for."""

# Reasons of single ids in an answer, which no exception carries.
OF_ENTRIES = {"NOT_FOUND": "NOT_FOUND", "LEASE_LOST": "FAILED_PRECONDITION"}


def status_of(kind: type[errors.PostdateError]) -> str:
    return next((code.name for base, code in _CODES if issubclass(kind, base)), "INTERNAL")


def spelled(value: ast.expr) -> list[str]:
    """The reasons that an expression can be."""
    if isinstance(value, ast.JoinedStr):
        text = ast.unparse(value)
        return [re.sub(r"\{.*\}", name, text[2:-1]) for name in COMPUTED[text]]
    constants = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
    return [each for each in constants if isinstance(each, str) and re.fullmatch("[A-Z_]+", each)]


@cache
def given() -> dict[str, set[str]]:
    """Each reason in broker/, with the statuses it is given with."""
    found: dict[str, set[str]] = defaultdict(set)
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    for path in (ROOT / "broker").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            kind = kinds.get(getattr(node.func, "attr", getattr(node.func, "id", "")))
            if kind is None or not issubclass(kind, errors.PostdateError):
                continue
            reasons = [each for k in node.keywords if k.arg == "reason" for each in spelled(k.value)]
            for reason in reasons or [kind.reason]:
                found[reason].add(status_of(kind))
    for reason, status in OF_ENTRIES.items():
        found[reason].add(status)
    found["INTERNAL"].add("INTERNAL")
    return found


def test_every_reason_is_in_the_table_and_every_row_is_a_reason():
    text = (ROOT / "docs/errors.md").read_text()
    rows = ROW.findall(text)
    assert len({reason for reason, _ in rows}) == len(rows), "a reason has two rows"
    assert {reason for reason, _ in rows} == set(given())


def test_every_reason_has_the_status_of_its_row():
    rows = dict(ROW.findall((ROOT / "docs/errors.md").read_text()))
    assert {reason: {status} for reason, status in rows.items()} == given()


def test_every_reason_is_named_by_a_test():
    """A reason that no test names may be given where another one belongs."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__).resolve()]
    assert set(given()) - {word for text in texts for word in NAMED.findall(text)} == set()
