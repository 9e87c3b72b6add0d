"""Help texts of the broker's metrics, each once: a scrape shows it as HELP, docs/operations.md as the meaning.

A metric that has no text here cannot be made: `counter`, `gauge` and `histogram` look it up. A test compares the page.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

PREFIX = "postdate_"

HELP: dict[str, str] = {
    "delivered_messages": "Messages sent to consumers, redeliveries included.",
    "delivered_bytes": "Bytes of the messages sent to consumers.",
    "acked_messages": "Messages whose acknowledgement is durable.",
    "nacked_messages": "Messages given back by consumers.",
    "redelivered_messages": "Messages returned for redelivery: nacked, lease expired or consumer lost.",
    "lease_expired_messages": "Messages whose lease expired.",
    "expired_messages": (
        "Messages settled because their TTL had passed, or because they were overdue and the action is "
        "expire."
    ),
    "dead_lettered_messages": "Messages moved to the dead-letter topic.",
    "requeued_messages": "Dead letters requeued; counted on the dead-letters subscription that held them.",
    "purged_messages": "Dead letters purged; counted on the dead-letters subscription that held them.",
    "damaged_messages": (
        "Damaged messages moved to the dead letters, or settled where there are none. Must stay 0: alert on "
        "any increase."
    ),
    "unreadable_messages": (
        "Failed reads of messages whose row metadata is unreadable; the messages stay pending and are "
        "retried. Must stay 0: alert on any increase."
    ),
    "early_deliveries": "Messages delivered before their effective time. Must stay 0: alert on any increase.",
    "last_look_dropped_messages": (
        "Queue entries skipped by the final check before delivery, by reason: settled (or leased, or waiting "
        "for redelivery), moved, early (not due yet). Harmless: no message is lost."
    ),
    "delivery_lateness_seconds": (
        "Time from effective time to delivery; from arrival for messages without a delay. Absent until "
        "something was delivered. Messages that pacing held back are not included."
    ),
    "paced_delivery_lateness_seconds": (
        "Time from effective time to delivery of messages that pacing held back for some of it; from arrival for "
        "messages without a delay. Absent until there was one."
    ),
    "ready_messages": "Unsettled messages that are due, not leased and not waiting for the end of a back-off.",
    "leased_messages": "Messages leased to consumers.",
    "subscription_scheduled_messages": (
        "Unsettled messages that are not due yet, and nacked ones whose back-off has not ended."
    ),
    "dead_letter_messages": "Dead letters of this subscription that were neither requeued nor purged.",
    "oldest_ready_age_seconds": (
        "Age of the oldest ready message, since it was due or produced; 0 if none is ready. May lag by one "
        "scrape while messages flow; GetStats is exact."
    ),
    "consumers": "Connected consumers.",
    "subscription_paused": "1 if delivery is paused.",
    "subscription_paced": "1 if ready messages wait for pacing.",
    "produced_messages": "Messages stored.",
    "produced_bytes": "Bytes of the messages stored.",
    "produced_batches": "Batches stored: a produce request each, or small requests of a stream together.",
    "cancelled_messages": "Messages cancelled before they were delivered, including replaced ones.",
    "moved_messages": "Messages whose delivery time was changed, counted at each change.",
    "duplicate_batches": (
        "Produce requests recognised as repeats by their sequence ids, answered with the original message "
        "ids."
    ),
    "refused_batches": "Produce requests refused.",
    "scheduled_messages": (
        "Messages that are not due yet, including those that every subscription has already settled."
    ),
    "next_due_timestamp_seconds": (
        "Due time of the next message, Unix time; that of a cancelled or moved one may count until it is over. Absent "
        "if none is scheduled."
    ),
    "storage_bytes": "Bytes of messages in ledgers.",
    "index_memory_bytes": "Memory of the delayed index, estimated.",
    "index_buckets": (
        "Number of buckets of the delayed index: tracker bucket: sealed and mutable ones; tracker memory: time "
        "buckets."
    ),
    "index_loaded_entries": "Entries of the delayed index held in memory because they are due soon.",
    "index_snapshot_bytes": "Bytes of sealed buckets on disk.",
    "schedule_key_runs": "Files of the schedule-key index (key runs).",
    "schedule_key_bytes": "Size of the schedule-key index on disk.",
    "settled_schedule_keys": (
        "Schedule keys whose message no longer waits and that can still be looked up; approximate."
    ),
    "build_info": "Constant 1, with the labels version and python_version.",
    "ready": "1 if the broker serves, 0 while it recovers, drains, waits for the disk or has failed.",
    "due_within_messages": (
        "Scheduled messages of all topics that come due within the time of the label within: 1m, 10m, 1h, 1d,"
        " 7d; each counts in the longer ones too. An estimate: segments of the index that are not loaded are "
        "taken as spread evenly over their time range."
    ),
    "disk_free_bytes": "Free bytes on the data directory's disk; updated every second.",
    "disk_reserve_bytes": "Free bytes below which produce is refused (disk_reserve_bytes).",
    "dedup_memory_bytes": (
        "Memory of producers' sequence ids, of all topics. At dedup_memory_bytes_max new ones are refused "
        "with DEDUP_MEMORY_FULL."
    ),
    "clock_steps": (
        "Jumps of the wall clock by 100 ms or more, in either direction. Due times are compared with that "
        "clock."
    ),
    "recovery_seconds": "Duration of the recovery at the last start.",
    "topics": "Number of topics.",
    "subscriptions": "Number of subscriptions.",
    "refused_requests": "Requests answered with an error, by reason.",
    "journal_records": "Records written to the journal.",
    "journal_bytes": "Bytes written to the journal.",
    "journal_pending_bytes": "Journal bytes that wait for a sync.",
    "journal_sync_seconds": "Duration of a synced write of a journal group; in a cluster, of storing it in the store.",
    "role": "1 for the role of this node in the cluster: owner or standby. Only in a cluster.",
    "epoch": "Epoch of the last group of the journal that this node has read or written.",
    "lease_seconds_left": "Time for which the owner may answer without another stored group; 0 on a standby.",
    "standby_lag_records": "Records in the journal that this standby has not applied yet.",
    "standby_lag_seconds": "Age of the last group that this standby has applied; 0 if it has applied all of them.",
    "base_age_seconds": "Age of the newest base in the object store; 0 if there is none.",
    "log_bytes": "Size of the shard's journal in the object store, as far as this node has seen it.",
    "clock_skew_seconds": (
        "Time by which this standby's clock is ahead of the owner's; negative: behind. The minimum over the last 100 "
        "groups, because each takes time to arrive; 0 on the owner."
    ),
    "take_overs": "Changes of the owner of the shard seen by this process, its own take-over included.",
    "checkpoints": "Checkpoints completed.",
    "file_retries": (
        "File operations that failed without effect and were retried, for lack of file descriptors, memory or disk "
        "space. Requests that depend on them are delayed."
    ),
    "checkpoint_failures": "Checkpoints that failed. Must stay 0.",
    "checkpoint_duration_seconds": "Duration of a checkpoint.",
    "backups": "Backups completed.",
    "backup_failures": "Backups that failed.",
    "backup_last_success_timestamp_seconds": (
        "Start of the last completed backup, Unix time; 0 if there is none. Alert on its age."
    ),
    "backup_last_duration_seconds": "Duration of the last backup.",
    "backup_last_bytes": "Bytes of the last backup, linked or copied.",
    "removed_ledgers": "Ledgers removed because nothing in them was live.",
    "compacted_ledgers": "Ledgers replaced by a compacted generation; in a cluster each node counts its own.",
    "compactions": (
        "Compaction jobs ended, by result: committed, refused (some of the output), aborted (by the job, also"
        " if there was nothing to do), expired."
    ),
    "reclaimed_bytes": "Bytes freed by removing and compacting ledgers.",
    "auth_failures": (
        "Calls and streams refused, by reason: credentials missing, invalid or expired, or a right denied."
    ),
    "spans": (
        "Spans made, by result: sent, failed (the receiver was away or refused them), dropped (the queue was "
        "full). All 0 without OpenTelemetry."
    ),
    "limit_refusals": "Requests refused by a limit of the access file, by limit and key.",
    "limit_used": (
        "Pending messages or bytes, or topics, that count against a limit of the access file, by limit and key. "
        "Absent where no limit bounds them. What is accepted counts at once, what is settled within a second, on a "
        "broker with many topics within a minute."
    ),
    "limit_allowed": (
        "Maximum of pending messages or bytes, or topics, that a limit of the access file allows, by limit and key."
    ),
    "security_reloads": (
        "Reloads of certificates, keys, tokens or rights, by what and result. After a failed one the old ones"
        " stay in force."
    ),
    "tls_certificate_expiry_timestamp_seconds": (
        "Expiry of the broker's certificate, Unix time; 0 without a certificate."
    ),
    "index_operations": (
        "Seals, merges and loads of buckets, and failed reads of damaged ledgers (read), by operation and "
        "result. Failed ones are retried."
    ),
    "index_rebuilds": (
        "Rebuilds of a delayed index from its ledgers. Must stay 0, unless the clock is set back by more than"
        " a minute."
    ),
    "schedule_key_lookups": (
        "Schedule keys looked up in key runs and ledgers because the filters in memory did not rule them out."
    ),
    "recurring_stored": (
        "Messages stored for recurring schedules: occurrences, including those stored ahead, triggered and "
        "backfilled ones."
    ),
    "recurring_missed": (
        "Times that a recurring schedule left out missed occurrences; several in a row count once."
    ),
    "bulk_changes_begun": "Bulk changes, cancels and moves by a filter, that were begun.",
    "bulk_changes_ended": "Bulk changes that ended: done, cancelled or failed.",
    "bulk_changes_failed": "Bulk changes that failed before their end.",
    "schedule_key_rebuilds": (
        "Rebuilds of a schedule-key index from the ledgers. Must stay 0, unless the clock is set back by more "
        "than a minute."
    ),
    "index_seal_seconds": "Duration of a bucket seal.",
    "index_merge_seconds": "Duration of a bucket merge.",
    "index_load_seconds": "Duration of a step that loads entries due soon.",
    "loop_lag_seconds": "Delay of event-loop callbacks.",
}
"""By name, without the prefix and without the `_total` of counters."""


def counter(name: str, labels: Sequence[str] = (), value: float | None = None) -> CounterMetricFamily:
    """Return the family of a counter; `value` is for one without labels."""
    return CounterMetricFamily(PREFIX + name, HELP[name], value=value, labels=labels or None)


def gauge(name: str, labels: Sequence[str] = (), value: float | None = None) -> GaugeMetricFamily:
    """Return the family of a gauge; `value` is for one without labels."""
    return GaugeMetricFamily(PREFIX + name, HELP[name], value=value, labels=labels or None)


def histogram(name: str, labels: Sequence[str] = ()) -> HistogramMetricFamily:
    """Return the family of a histogram."""
    return HistogramMetricFamily(PREFIX + name, HELP[name], labels=labels)
