"""Whatever a query, a path or a form says, a page answers, and not with an internal error.

The fields are those that each page was seen to read, so a new one is tried without being named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from broker.web.routes import ROUTES
from broker.web.site import PageRoute, Visit
from tests.depth import at_depth, sampled
from tests.unit.web.conftest import MakePages, Pages
from tests.unit.web.test_pages import filled

VALUES = [
    "",
    " ",
    "0",
    "-1",
    "1",
    "1:1",
    "1.1.1",
    "9" * 12,
    "9" * 20,
    "9" * 5_000,
    "-" + "9" * 5_000,
    str(2**63),
    "1e999",
    "nan",
    "\u00b2" * 9,
    "\u0661" * 9,
    "\0",
    "\r\nSet-Cookie: a=b",
    "\u202e",
    "../../../etc/passwd",
    "\"'><script>alert(1)</script>",
    "{{7*7}}%s{0}",
    "a" * 3_000,
    "0001-01-01",
    "0001-01-01T00:00+23:59",
    "9999-12-31T23:59:59.999999-23:59",
    "2026-02-30",
    "9999",
    "99999999999999999999d",
    "9999999999999999.999999999999999.9999999999",
    "999999999999999:9999999999",
    "year",
    "second",
    "cancel",
    "move",
    "at",
    "by",
    "orders",
]
FIXED = {"topic": "orders", "name": "billing", "id": "1:3", "action": "move", "how": "at"}
"""Fields of a request besides the one that is tried, so that the page comes so far as to read others."""


class Noting(Mapping[str, str]):
    """A query or a form, and which of its fields were asked for."""

    def __init__(self, held: Mapping[str, str], asked: set[str]) -> None:
        self._held = held
        self._asked = asked

    def __getitem__(self, name: str) -> str:
        self._asked.add(name)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The fields that pages have asked for."""
    found: set[str] = set()
    monkeypatch.setattr(Visit, "query", property(lambda visit: Noting(visit.request.query, found)))
    form: Any = Visit.__dict__["form"]
    monkeypatch.setattr(
        Visit, "form", property(lambda visit: Noting(form.__get__(visit), found), form.__set__)
    )
    return found


def path_of(route: PageRoute, **params: str) -> str:
    """The path of a route, its variable parts filled in."""
    names, path = list(route.path.groupindex), route.path.pattern
    for name in names:
        path = path.replace(f"(?P<{name}>[^/]+)", quote(params.get(name, FIXED[name]), safe="") or "%20")
    return path.replace("\\", "")


async def try_it(pages: Pages, route: PageRoute, path: str, fields: Mapping[str, str], csrf: str) -> None:
    method, data = route.method, None
    if method == "POST":
        data = {**fields, "csrf": csrf}
    elif fields:
        path += "?" + urlencode(fields)
    headers = {"Origin": f"http://{pages.server.address}", "Sec-Fetch-Site": "same-origin"}
    async with pages.session.request(
        method, path, data=data, headers=headers, allow_redirects=False
    ) as response:
        shown = {name: value[:40] for name, value in fields.items()}
        assert response.status < 500, f"{method} {path[:100]} {shown}: {response.status}"
        assert "a" not in response.cookies


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", range(len(ROUTES)), ids=[f"{r.method} {r.handler.__name__}" for r in ROUTES]
)
async def test_every_field_takes_anything(make_pages: MakePages, asked: set[str], number: int) -> None:
    pages = await filled(make_pages)
    csrf = await pages.csrf()
    route = ROUTES[number]
    base = FIXED | {"csrf": csrf}
    stride = at_depth(change=20, deep=1)
    tried: set[str] = set()
    asked.clear()
    await try_it(pages, route, path_of(route), base if route.method == "POST" else {}, csrf)
    while names := asked - tried - {"csrf", "back"}:
        name = min(names)
        tried.add(name)
        for value in sampled(VALUES, stride, number + len(tried)):
            await try_it(pages, route, path_of(route), FIXED | {name: value}, csrf)
    for name in route.path.groupindex:
        for value in sampled(VALUES, stride, number):
            await try_it(pages, route, path_of(route, **{name: value}), FIXED, csrf)
