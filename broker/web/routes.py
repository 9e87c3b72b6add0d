"""Which page is where."""

from __future__ import annotations

from broker.web.changes import change_message, show_change, show_job, start_change
from broker.web.overview import show_overview
from broker.web.scheduled import show_message, show_scheduled
from broker.web.site import Route, route
from broker.web.timeline import show_timeline

ROUTES: list[Route] = [
    route("GET", "/", show_overview),
    route("GET", "/timeline", show_timeline),
    route("GET", "/scheduled", show_scheduled),
    route("GET", "/scheduled/change", show_change),
    route("POST", "/scheduled/change", start_change),
    route("GET", "/changes/{job}", show_job),
    route("GET", "/topics/{topic}/messages/{id}", show_message),
    route("POST", "/topics/{topic}/messages/{id}", change_message),
]
