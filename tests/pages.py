"""The pages that there are, for tests that look at each of them."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from broker.web.routes import ROUTES


def pages_without(urls: Iterable[str]) -> set[str]:
    """Return the pages (paths as declared, by GET) that none of these URLs shows."""
    paths = [urlsplit(url).path for url in urls]
    return {
        route.template
        for route in ROUTES
        if route.method == "GET" and not any(route.path.fullmatch(path) for path in paths)
    }
