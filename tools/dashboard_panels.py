"""Panels of the Grafana dashboards, row by row. `tools/dashboards.py` makes JSON of them.

A panel is a title, a unit, its queries (legend and expression; Grafana fills in `$topic` and `$instance`) and a
sentence that says what it means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What the variables of a dashboard narrow a query to.
_BROKER = 'instance=~"$instance"'
_TOPIC = 'instance=~"$instance", topic=~"$topic"'


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    meaning: str
    kind: str = "timeseries"
    width: int = 8
    alarm: float | None = None  # red from here on
    instant: bool = False


Row = tuple[str, Sequence[Panel]]


def _quantiles(metric: str, by: str, where: str) -> list[tuple[str, str]]:
    legend = "".join(f" {{{{{label}}}}}" for label in by.split(", ") if label)
    labels = f"{by}, le" if by else "le"
    return [
        (
            f"p{int(quantile * 100)}{legend}",
            f"histogram_quantile({quantile}, sum by ({labels}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))",
        )
        for quantile in (0.5, 0.99)
    ]


def _rate(metric: str, by: str, where: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


_BOTH = "topic, subscription"
_SUBSCRIPTION = "{{topic}}/{{subscription}}"

MESSAGES: tuple[Row, ...] = (
    (
        "On time?",
        (
            Panel(
                "Early deliveries",
                "short",
                [("early", f"sum(postdate_early_deliveries_total{{{_TOPIC}}})")],
                "Messages sent before their time since the broker started. Must be 0.",
                kind="stat",
                width=4,
                alarm=1,
                instant=True,
            ),
            Panel(
                "Delivered within a second",
                "percentunit",
                [
                    (
                        "on time",
                        f'sum(rate(postdate_delivery_lateness_seconds_bucket{{{_TOPIC}, le="1.0"}}[1h])) '
                        f"/ sum(rate(postdate_delivery_lateness_seconds_count{{{_TOPIC}}}[1h]))",
                    )
                ],
                "Share of the messages of the last hour that left within a second of their time. Consumers that take "
                "nothing lower it.",
                kind="stat",
                width=5,
                instant=True,
            ),
            Panel(
                "Next due",
                "dateTimeAsIso",
                [("next", f"1000 * min(postdate_next_due_timestamp_seconds{{{_TOPIC}}})")],
                "When the next message comes due.",
                kind="stat",
                width=5,
                instant=True,
            ),
            Panel(
                "Scheduled",
                "short",
                [("scheduled", f"sum(postdate_scheduled_messages{{{_TOPIC}}})")],
                "Messages whose time has not come.",
                kind="stat",
                width=5,
                instant=True,
            ),
            Panel(
                "Dead letters",
                "short",
                [("dead letters", f"sum(postdate_dead_letter_messages{{{_TOPIC}}})")],
                "Messages given up that nobody has dealt with yet.",
                kind="stat",
                width=5,
                alarm=1,
                instant=True,
            ),
            Panel(
                "Lateness",
                "s",
                _quantiles("postdate_delivery_lateness_seconds", _BOTH, _TOPIC),
                "From due time to hand-out: half of the messages, and all but one in a hundred, were no later.",
                width=12,
            ),
            Panel(
                "Lateness of all deliveries",
                "short",
                [
                    (
                        "{{le}}",
                        f"sum by (le) (increase(postdate_delivery_lateness_seconds_bucket{{{_TOPIC}}}[$__range]))",
                    )
                ],
                "Messages in the shown time that were at most so many seconds late.",
                kind="bargauge",
                width=12,
                instant=True,
            ),
        ),
    ),
    (
        "What is coming",
        (
            Panel(
                "Due within, all topics",
                "short",
                [
                    (
                        "{{within}}",
                        f"sort(sum by (within) (postdate_due_within_messages{{{_BROKER}}}))",
                    )
                ],
                "Scheduled messages that come due within a minute, ten minutes, an hour, a day, a week.",
                kind="bargauge",
                instant=True,
            ),
            Panel(
                "Due within, over time",
                "short",
                [("{{within}}", f"sum by (within) (postdate_due_within_messages{{{_BROKER}}})")],
                "A herd shows in the longer ranges first, and is worked off when it leaves the shortest.",
            ),
            Panel(
                "Scheduled by topic",
                "short",
                [("{{topic}}", f"sum by (topic) (postdate_scheduled_messages{{{_TOPIC}}})")],
                "Messages whose time has not come.",
            ),
        ),
    ),
    (
        "Flow",
        (
            Panel(
                "Produced",
                "ops",
                [("{{topic}}", _rate("postdate_produced_messages_total", "topic", _TOPIC))],
                "Messages stored a second.",
            ),
            Panel(
                "Delivered",
                "ops",
                [(_SUBSCRIPTION, _rate("postdate_delivered_messages_total", _BOTH, _TOPIC))],
                "Messages sent to consumers a second, redeliveries included.",
            ),
            Panel(
                "Settled",
                "ops",
                [
                    ("acked " + _SUBSCRIPTION, _rate("postdate_acked_messages_total", _BOTH, _TOPIC)),
                    ("expired " + _SUBSCRIPTION, _rate("postdate_expired_messages_total", _BOTH, _TOPIC)),
                    ("dead " + _SUBSCRIPTION, _rate("postdate_dead_lettered_messages_total", _BOTH, _TOPIC)),
                ],
                "Messages a second that a subscription is done with.",
            ),
            Panel(
                "Changed before delivery",
                "ops",
                [
                    ("cancelled {{topic}}", _rate("postdate_cancelled_messages_total", "topic", _TOPIC)),
                    ("moved {{topic}}", _rate("postdate_moved_messages_total", "topic", _TOPIC)),
                ],
                "Messages cancelled or moved a second.",
            ),
            Panel(
                "Refused requests",
                "ops",
                [("{{reason}}", _rate("postdate_refused_requests_total", "reason", _BROKER))],
                "Requests a second that were answered with an error, of all topics.",
            ),
            Panel(
                "Bytes",
                "Bps",
                [
                    ("in {{topic}}", _rate("postdate_produced_bytes_total", "topic", _TOPIC)),
                    ("out {{topic}}", _rate("postdate_delivered_bytes_total", "topic", _TOPIC)),
                ],
                "Bytes of messages a second, produced and delivered.",
            ),
        ),
    ),
    (
        "Consumers",
        (
            Panel(
                "Ready",
                "short",
                [(_SUBSCRIPTION, f"sum by ({_BOTH}) (postdate_ready_messages{{{_TOPIC}}})")],
                "Messages owed and due that nobody holds. Grows where consumers do not keep up.",
            ),
            Panel(
                "Oldest ready message",
                "s",
                [(_SUBSCRIPTION, f"max by ({_BOTH}) (postdate_oldest_ready_age_seconds{{{_TOPIC}}})")],
                "How long the oldest ready message has been waiting.",
            ),
            Panel(
                "Held by consumers",
                "short",
                [(_SUBSCRIPTION, f"sum by ({_BOTH}) (postdate_leased_messages{{{_TOPIC}}})")],
                "Messages sent and not answered yet.",
            ),
            Panel(
                "Consumers connected",
                "short",
                [(_SUBSCRIPTION, f"sum by ({_BOTH}) (postdate_consumers{{{_TOPIC}}})")],
                "Streams and receiving calls.",
            ),
            Panel(
                "Coming back",
                "ops",
                [
                    ("nacked " + _SUBSCRIPTION, _rate("postdate_nacked_messages_total", _BOTH, _TOPIC)),
                    (
                        "expired " + _SUBSCRIPTION,
                        _rate("postdate_lease_expired_messages_total", _BOTH, _TOPIC),
                    ),
                    ("again " + _SUBSCRIPTION, _rate("postdate_redelivered_messages_total", _BOTH, _TOPIC)),
                ],
                "Messages a second that were given back, lost their lease, or were sent again.",
            ),
            Panel(
                "Paused or paced",
                "bool_yes_no",
                [
                    (
                        "paused " + _SUBSCRIPTION,
                        f"max by ({_BOTH}) (postdate_subscription_paused{{{_TOPIC}}})",
                    ),
                    ("paced " + _SUBSCRIPTION, f"max by ({_BOTH}) (postdate_subscription_paced{{{_TOPIC}}})"),
                ],
                "Subscriptions whose delivery is paused, and those of which pacing holds ready messages back.",
            ),
        ),
    ),
)

BROKER: tuple[Row, ...] = (
    (
        "Journal and disk",
        (
            Panel(
                "Sync of the journal",
                "s",
                _quantiles("postdate_journal_sync_seconds", "", _BROKER),
                "Producers wait for one sync. Follows the disk.",
            ),
            Panel(
                "Written to the journal",
                "Bps",
                [("bytes", f"sum(rate(postdate_journal_bytes_total{{{_BROKER}}}[$__rate_interval]))")],
                "Bytes a second.",
            ),
            Panel(
                "Waiting for a sync",
                "bytes",
                [("pending", f"sum(postdate_journal_pending_bytes{{{_BROKER}}})")],
                "Stays high and does not move: the disk is stuck.",
            ),
            Panel(
                "Disk",
                "bytes",
                [
                    ("free", f"min(postdate_disk_free_bytes{{{_BROKER}}})"),
                    ("reserve", f"max(postdate_disk_reserve_bytes{{{_BROKER}}})"),
                ],
                "Produce is refused when free falls below the reserve.",
            ),
            Panel(
                "Stored by topic",
                "bytes",
                [("{{topic}}", f"sum by (topic) (postdate_storage_bytes{{{_TOPIC}}})")],
                "Bytes of messages in ledgers.",
            ),
            Panel(
                "Checkpoints",
                "s",
                [
                    *_quantiles("postdate_checkpoint_duration_seconds", "", _BROKER),
                    ("recovery at the last start", f"max(postdate_recovery_seconds{{{_BROKER}}})"),
                ],
                "How long checkpoints take, and how long the last recovery took.",
            ),
        ),
    ),
    (
        "Index",
        (
            Panel(
                "Memory of the index",
                "bytes",
                [("{{topic}}", f"sum by (topic) (postdate_index_memory_bytes{{{_TOPIC}}})")],
                "Follows what is due soon, not what is pending.",
            ),
            Panel(
                "Buckets",
                "short",
                [("{{topic}}", f"sum by (topic) (postdate_index_buckets{{{_TOPIC}}})")],
                "Sealed ones and the mutable one; merged when there are many.",
            ),
            Panel(
                "Index on disk",
                "bytes",
                [
                    ("snapshots {{topic}}", f"sum by (topic) (postdate_index_snapshot_bytes{{{_TOPIC}}})"),
                    ("keys {{topic}}", f"sum by (topic) (postdate_schedule_key_bytes{{{_TOPIC}}})"),
                ],
                "Bucket snapshots and runs of schedule keys.",
            ),
            Panel(
                "Seals, merges, loads",
                "ops",
                [
                    (
                        "{{operation}} {{result}}",
                        _rate("postdate_index_operations_total", "operation, result", _BROKER),
                    )
                ],
                "Operations a second. Failed ones are tried again.",
            ),
            Panel(
                "Time of a load",
                "s",
                _quantiles("postdate_index_load_seconds", "", _BROKER),
                "Bringing into memory what is due soon.",
            ),
            Panel(
                "Rebuilds",
                "short",
                [
                    ("index", f"sum(postdate_index_rebuilds_total{{{_BROKER}}})"),
                    ("schedule keys", f"sum(postdate_schedule_key_rebuilds_total{{{_BROKER}}})"),
                ],
                "Since the broker started. Must stay 0.",
                alarm=1,
            ),
        ),
    ),
    (
        "Loop and process",
        (
            Panel(
                "Loop lag",
                "s",
                _quantiles("postdate_loop_lag_seconds", "", _BROKER),
                "How much later than asked the event loop calls back: every delivery waits that long.",
            ),
            Panel(
                "Processor",
                "percentunit",
                [
                    (
                        "{{instance}}",
                        f'rate(process_cpu_seconds_total{{job="postdate", {_BROKER}}}[$__rate_interval])',
                    )
                ],
                "1 is one core, which is about all that the loop can use.",
            ),
            Panel(
                "Memory",
                "bytes",
                [("{{instance}}", f'process_resident_memory_bytes{{job="postdate", {_BROKER}}}')],
                "Resident.",
            ),
            Panel(
                "Up for",
                "s",
                [("{{instance}}", f'time() - process_start_time_seconds{{job="postdate", {_BROKER}}}')],
                "Since the process started.",
                kind="stat",
                instant=True,
            ),
            Panel(
                "Ready",
                "bool_yes_no",
                [("{{instance}}", f"postdate_ready{{{_BROKER}}}")],
                "Whether it serves.",
                kind="stat",
                instant=True,
            ),
            Panel(
                "Clock steps",
                "short",
                [("{{instance}}", f"postdate_clock_steps_total{{{_BROKER}}}")],
                "Times that the wall clock jumped since the process started.",
                kind="stat",
                instant=True,
            ),
        ),
    ),
    (
        "Compaction, audit, backup",
        (
            Panel(
                "Compactions",
                "short",
                [("{{result}}", f"sum by (result) (increase(postdate_compactions_total{{{_BROKER}}}[1d]))")],
                "Ended within the last day, by result.",
            ),
            Panel(
                "Given back to the disk",
                "bytes",
                [("reclaimed", f"sum(increase(postdate_reclaimed_bytes_total{{{_BROKER}}}[1d]))")],
                "Within the last day: ledgers that were done with or rewritten.",
            ),
            Panel(
                "Ledgers removed and rewritten",
                "short",
                [
                    ("removed", f"sum(increase(postdate_removed_ledgers_total{{{_BROKER}}}[1d]))"),
                    ("rewritten", f"sum(increase(postdate_compacted_ledgers_total{{{_BROKER}}}[1d]))"),
                ],
                "Within the last day.",
            ),
            Panel(
                "Age of the last backup",
                "s",
                [("backup", f"time() - (postdate_backup_last_success_timestamp_seconds{{{_BROKER}}} > 0)")],
                "Empty if there is none.",
                kind="stat",
                width=6,
                alarm=172_800,
                instant=True,
            ),
            Panel(
                "Size of the last backup",
                "bytes",
                [("backup", f"postdate_backup_last_bytes{{{_BROKER}}}")],
                "Linked or copied.",
                kind="stat",
                width=6,
                instant=True,
            ),
            Panel(
                "Age of the last clean audit",
                "s",
                [("audit", "time() - postdate_audit_last_success_timestamp_seconds")],
                "Empty if there was none.",
                kind="stat",
                width=6,
                alarm=172_800,
                instant=True,
            ),
            Panel(
                "Findings of the last audit",
                "short",
                [("{{kind}}", "postdate_audit_findings")],
                "By kind.",
                kind="stat",
                width=6,
                instant=True,
            ),
        ),
    ),
)
