"""Backup, audit and compaction."""

from __future__ import annotations

from benchmarks.rows.row import Row

# fmt: off   (a table)
ROWS = (
    Row(
        "backup-gap",
        "backup",
        "own_gap_max_ms",
        "ms",
        "longest gap of the loop while 1 GB is backed up and 1,000 messages a second are delivered, less what other "
        "processes took",
        20.0,
        "less",
    ),
    Row("backup-late-p99", "backup", "late_p99_ms", "ms", "lateness p99 meanwhile", None, "less"),
    Row("backup-late-quiet", "backup", "quiet_late_p99_ms", "ms", "the same before the backup", None, "less"),
    Row("backup-seconds", "backup", "seconds", "s", "time of that backup", None, "less"),
    Row(
        "compact-left",
        "compact-ledgers",
        "left_percent",
        "%",
        "bytes left of 200 ledgers of 50,000 messages of 1 KB of which one each is due next year, compacted offline",
        1.0,
        "less",
    ),
    Row("compact-seconds", "compact-ledgers", "seconds", "s", "time of that, with the start", None, "less"),
    Row(
        "compact-index-50m",
        "compact-index-50m",
        "inline_seconds",
        "s",
        "50,000,000 index entries of twenty topics merged offline, as many delivered ones dropped; without start-up",
        30.0,
        "less",
        on_request=True,
    ),
    Row(
        "compact-index-50m-spark",
        "compact-index-50m",
        "seconds",
        "s",
        "the same, Spark",
        30.0,
        "less",
        on_request=True,
    ),
    Row(
        "compact-index-5m",
        "compact-index-5m",
        "inline_seconds",
        "s",
        "5,000,000 index entries merged offline, as many delivered ones dropped; without start-up",
        None,
        "less",
    ),
    Row(
        "compact-index-5m-spark", "compact-index-5m", "seconds", "s", "the same, Spark local[2]", None, "less"
    ),
    Row(
        "compact-index-5m-start",
        "compact-index-5m",
        "start_up_s",
        "s",
        "the same: start-up, apart",
        None,
        "less",
    ),
    Row(
        "compact-live-late",
        "compact-live",
        "late_ratio",
        "x",
        "lateness p99 of a quiet topic while 20,000,000 index entries of others are compacted, of that before",
        1.5,
        "less",
    ),
    Row(
        "compact-live-produce",
        "compact-live",
        "produce_ratio",
        "x",
        "the same: p99 of a produce call",
        1.5,
        "less",
    ),
    Row("compact-live-late-p99", "compact-live", "late_p99_ms", "ms", "the same: lateness p99", None, "less"),
    Row(
        "compact-live-produce-p99",
        "compact-live",
        "produce_p99_ms",
        "ms",
        "the same: produce p99",
        None,
        "less",
    ),
    Row("compact-live-seconds", "compact-live", "seconds", "s", "time of that compaction", None, "less"),
    Row("audit-5m", "audit-5m", "seconds", "s", "audit of 5,000,000 pending, Spark local[2]", 4.0, "less"),
    Row("audit-5m-start", "audit-5m", "start_up_s", "s", "the same: start-up, apart", None, "less"),
    Row("audit-5m-inline", "audit-5m", "inline_seconds", "s", "the same without Spark", 4.0, "less"),
    Row(
        "audit-50m", "audit-50m", "seconds", "s", "audit of 50,000,000 pending, Spark local[2]", 15.0, "less"
    ),
    Row(
        "audit-50m-python", "audit-50m", "python_mb", "MB", "the same: memory of Python (PSS)", 700.0, "less"
    ),
    Row(
        "audit-50m-java",
        "audit-50m",
        "java_mb",
        "MB",
        "the same: memory of the JVM (PSS), heap 1 GB",
        None,
        "less",
    ),
    Row("audit-50m-inline", "audit-50m", "inline_seconds", "s", "the same without Spark", 15.0, "less"),
    Row("audit-50m-inline-mb", "audit-50m", "inline_python_mb", "MB", "the same: memory", 700.0, "less"),
)
# fmt: on
