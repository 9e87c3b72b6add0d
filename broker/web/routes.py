"""The pages, and where each is."""

from __future__ import annotations

from broker.web import audit, dead_letters, storage, topics
from broker.web.changes import change_message, show_change, show_job, start_change, stop_job
from broker.web.cluster import show_cluster
from broker.web.overview import show_overview
from broker.web.owed import show_owed
from broker.web.recurring import show_schedule, show_schedules
from broker.web.scheduled import show_message, show_scheduled
from broker.web.site import PageRoute, route
from broker.web.timeline import show_timeline

ROUTES: list[PageRoute] = [
    route("GET", "/", show_overview),
    route("GET", "/timeline", show_timeline),
    route("GET", "/scheduled", show_scheduled),
    route("GET", "/scheduled/change", show_change),
    route("POST", "/scheduled/change", start_change),
    route("GET", "/changes/{job}", show_job),
    route("POST", "/changes/{job}", stop_job),
    route("GET", "/topics/{topic}/messages/{id}", show_message),
    route("POST", "/topics/{topic}/messages/{id}", change_message),
    route("GET", "/topics", topics.show_topics),
    route("GET", "/topics/{topic}", topics.show_topic),
    route("GET", "/topics/{topic}/recurring", show_schedules),
    route("GET", "/topics/{topic}/recurring/{name}", show_schedule),
    route("POST", "/topics/{topic}/subscriptions/{name}", topics.change_subscription),
    route("GET", "/topics/{topic}/subscriptions/{name}/skip", topics.show_skip),
    route("POST", "/topics/{topic}/subscriptions/{name}/skip", topics.skip_all),
    route("GET", "/topics/{topic}/subscriptions/{name}/owed", show_owed),
    route("GET", "/dead-letters", dead_letters.show_all),
    route("GET", "/dead-letters/{topic}/{name}", dead_letters.show_letters),
    route("POST", "/dead-letters/{topic}/{name}", dead_letters.change_letters),
    route("GET", "/dead-letters/{topic}/{name}/purge", dead_letters.show_purge),
    route("GET", "/storage", storage.show_storage),
    route("GET", "/storage/{topic}", storage.show_topic_storage),
    route("GET", "/audit", audit.show_audit),
    route("GET", "/audit/report.html", audit.show_report),
]

CLUSTER_ROUTES: list[PageRoute] = [route("GET", "/cluster", show_cluster, shows_state=False)]
"""Of an owner besides, and all that a standby has."""
