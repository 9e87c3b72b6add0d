"""Which page is where."""

from __future__ import annotations

from broker.web.overview import show_overview
from broker.web.site import Route, route
from broker.web.timeline import show_timeline

ROUTES: list[Route] = [
    route("GET", "/", show_overview),
    route("GET", "/timeline", show_timeline),
]
