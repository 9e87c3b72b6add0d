"""The pages, and where each is."""

from __future__ import annotations

from broker.web import audit, dead_letters, manage, storage, topics
from broker.web.bulk_changes import cancel_bulk_change, show_bulk_change
from broker.web.changes import change_message, show_change, start_change
from broker.web.cluster import show_cluster
from broker.web.overview import show_overview
from broker.web.owed import show_owed
from broker.web.publish import publish, show_publish
from broker.web.recurring import show_schedule, show_schedules
from broker.web.scheduled import show_message, show_scheduled
from broker.web.site import PageRoute, route
from broker.web.timeline import show_timeline

_TOPIC, _SUBSCRIPTION = "/topics/{topic}", "/topics/{topic}/subscriptions/{name}"
FORM_ROUTES: list[PageRoute] = [
    route("GET", "/new-topic", manage.show_new_topic, "CreateTopic"),
    route("POST", "/new-topic", manage.create_topic, "CreateTopic"),
    route("GET", f"{_TOPIC}/settings", manage.show_topic_settings, "UpdateTopic"),
    route("POST", f"{_TOPIC}/settings", manage.update_topic, "UpdateTopic"),
    route("GET", f"{_TOPIC}/delete", manage.show_delete_topic, "DeleteTopic"),
    route("POST", f"{_TOPIC}/delete", manage.delete_topic, "DeleteTopic"),
    route("GET", f"{_TOPIC}/produce", show_publish, "Produce"),
    route("POST", f"{_TOPIC}/produce", publish, "Produce"),
    route("GET", f"{_TOPIC}/new-subscription", manage.show_new_subscription, "CreateSubscription"),
    route("POST", f"{_TOPIC}/new-subscription", manage.create_subscription, "CreateSubscription"),
    route("GET", f"{_SUBSCRIPTION}/settings", manage.show_subscription_settings, "UpdateSubscription"),
    route("POST", f"{_SUBSCRIPTION}/settings", manage.update_subscription, "UpdateSubscription"),
    route("GET", f"{_SUBSCRIPTION}/seek", manage.show_seek, "Seek"),
    route("POST", f"{_SUBSCRIPTION}/seek", manage.seek, "Seek"),
    route("GET", f"{_SUBSCRIPTION}/delete", manage.show_delete_subscription, "DeleteSubscription"),
    route("POST", f"{_SUBSCRIPTION}/delete", manage.delete_subscription, "DeleteSubscription"),
]
"""Forms with a page of their own: made of calls, on a front as on a broker."""

ROUTES: list[PageRoute] = [
    route("GET", "/", show_overview, "GetStats"),
    route("GET", "/timeline", show_timeline, "CountScheduled"),
    route("GET", "/scheduled", show_scheduled, "ListScheduled"),
    route("GET", "/scheduled/change", show_change, "StartBulkChange"),
    route("POST", "/scheduled/change", start_change, "StartBulkChange"),
    route("GET", "/topics/{topic}/bulk-changes/{id}", show_bulk_change, "GetBulkChange"),
    route("POST", "/topics/{topic}/bulk-changes/{id}", cancel_bulk_change, "CancelBulkChange"),
    route("GET", "/topics/{topic}/messages/{id}", show_message, "GetScheduled"),
    route("POST", "/topics/{topic}/messages/{id}", change_message, "CancelScheduled"),
    route("GET", "/topics", topics.show_topics, "GetTopic"),
    route("GET", "/topics/{topic}", topics.show_topic, "GetTopic"),
    *FORM_ROUTES,
    route("GET", "/topics/{topic}/recurring", show_schedules, "ListRecurring"),
    route("GET", "/topics/{topic}/recurring/{name}", show_schedule, "GetRecurring"),
    route("POST", "/topics/{topic}/subscriptions/{name}", topics.change_subscription, "Pause"),
    route("GET", "/topics/{topic}/subscriptions/{name}/skip", topics.show_skip, "SkipAll"),
    route("POST", "/topics/{topic}/subscriptions/{name}/skip", topics.skip_all, "SkipAll"),
    route("GET", "/topics/{topic}/subscriptions/{name}/owed", show_owed, "ListOwed"),
    route("GET", "/dead-letters", dead_letters.show_all, "ListDeadLetters"),
    route("GET", "/dead-letters/{topic}/{name}", dead_letters.show_letters, "ListDeadLetters"),
    route("POST", "/dead-letters/{topic}/{name}", dead_letters.change_letters, "RequeueDeadLetters"),
    route("GET", "/dead-letters/{topic}/{name}/purge", dead_letters.show_purge, "PurgeDeadLetters"),
    route("GET", "/storage", storage.show_storage, "GetStats"),
    route("GET", "/storage/{topic}", storage.show_topic_storage, "GetTopic"),
    route("GET", "/audit", audit.show_audit, "ListBackups"),
    route("GET", "/audit/report.html", audit.show_report, "ListBackups"),
]

CLUSTER_ROUTES: list[PageRoute] = [route("GET", "/cluster", show_cluster, "GetCluster", shows_state=False)]
"""Of an owner besides, and all that a standby has."""
