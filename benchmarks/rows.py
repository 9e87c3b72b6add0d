"""The rows of the table: which figure of which scenario, and what it is to reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, taken from what each run of its scenario yields."""

    name: str
    scenario: str
    figure: str  # its key in what the scenario yields
    unit: str
    what: str
    target: float | None = None
    better: Literal["more", "less"] = "more"
    judge: Literal["median", "worst"] = "median"
    on_request: bool = False  # it takes long, and runs only if its name or its scenario's is spelled out

    def reached(self, values: list[float]) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.target is None:
            return None
        ordered = sorted(values, reverse=self.better == "more")
        value = ordered[-1] if self.judge == "worst" else median(values)
        return value >= self.target if self.better == "more" else value <= self.target


def median(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


# fmt: off   (a table)
ROWS = (
    Row(
        "produce-100b",
        "produce-100b",
        "rate",
        "msg/s",
        "ProduceStream, batches of 1,000 of 100 B, random delays",
        700_000,
    ),
    Row("produce-1kb", "produce-1kb", "rate", "msg/s", "the same, 1 KB", 200_000),
    Row("produce-by-100", "produce-by-100", "rate", "msg/s", "the same, batches of 100 of 100 B", 250_000),
    Row("sdk-send-many", "sdk-send-many", "rate", "msg/s", "SDK, send_many of 1,000 of 100 B", 300_000),
    Row(
        "sdk-send-linger",
        "sdk-send-linger",
        "rate",
        "msg/s",
        "SDK, send with linger, 256 tasks, 100 B",
        60_000,
    ),
    Row(
        "single-ratio",
        "single",
        "ratio",
        "x",
        "one message awaited (unary), of fdatasync + round trip",
        2.0,
        "less",
    ),
    Row("deliver", "deliver", "rate", "msg/s", "deliver and ack what is due, raw stubs, 100 B", 500_000),
    Row("sdk-deliver", "sdk-deliver", "rate", "msg/s", "the same through the SDK's iterator", 150_000),
    Row("late-p99", "lateness", "p99", "ms", "1,000 msg/s with a 5 s delay: lateness p99", 5.0, "less"),
    Row("late-max", "lateness", "max", "ms", "the same: the latest", 50.0, "less"),
    Row("late-early", "lateness", "early", "msg", "the same: early messages", 0, "less", "worst"),
    Row(
        "restart",
        "restart",
        "first_s",
        "s",
        "kill -9 with 2,000,000 pending: start to first delivery",
        2.0,
        "less",
    ),
    Row(
        "memory",
        "memory",
        "added_mb",
        "MB",
        "VmRSS 30 s after loading 2,000,000, above an empty broker",
        60.0,
        "less",
    ),
    # The index of delayed messages.
    Row(
        "index-rate",
        "index",
        "settled_rate",
        "entry/s",
        "index only, 10,000,000 random over 30 days, add by 1,000: until sealed and merged, one core",
        3_000_000,
    ),
    Row("index-add", "index", "add_rate", "entry/s", "the same: add alone"),
    Row(
        "index-seal-rate",
        "index",
        "rate",
        "entry/s",
        "the same: until all is added, 100,000 not sealed at most",
    ),
    Row(
        "index-memory", "index", "added_mb", "MB", "the same: VmRSS 30 s after it, above empty", 100.0, "less"
    ),
    Row(
        "index-bytes",
        "index",
        "bytes_per_message",
        "B",
        "the same: disk for snapshots a message",
        5.0,
        "less",
    ),
    Row("index-times-bytes", "index", "times_bytes", "B", "beside it: `times` a message", None, "less"),
    Row("index-rows-bytes", "index", "rows_bytes", "B", "beside it: `rows` a message", None, "less"),
    Row(
        "index-reopen",
        "index",
        "first_s",
        "s",
        "the same: process start to the first due entry",
        None,
        "less",
    ),
    Row(
        "index-reopen-cold",
        "index",
        "cold_first_s",
        "s",
        "the same, files not in the page cache",
        None,
        "less",
    ),
    Row(
        "index-uniform-bytes",
        "index-uniform",
        "bytes_per_message",
        "B",
        "disk for snapshots a message, the same delay for all, batches of 1,000",
        0.2,
        "less",
    ),
    Row(
        "index-steady-bytes",
        "index-steady",
        "bytes_per_message",
        "B",
        "the same, single messages, 1,000 a second at random moments",
        None,
        "less",
    ),
    Row("index-100m-rate", "index-100m", "settled_rate", "entry/s", "index-rate with 100,000,000"),
    Row(
        "index-100m-memory",
        "index-100m",
        "added_mb",
        "MB",
        "index-memory with 100,000,000",
        None,
        "less",
    ),
    Row(
        "index-100m-memory-ratio",
        "index-100m",
        "memory_ratio",
        "x",
        "the same, of that with 10,000,000",
        1.3,
        "less",
    ),
    Row(
        "index-100m-bytes",
        "index-100m",
        "bytes_per_message",
        "B",
        "index-bytes with 100,000,000",
        5.0,
        "less",
    ),
    Row(
        "index-100m-merged",
        "index-100m",
        "merge_ratio",
        "x",
        "bytes written by merging per byte sealed, 100,000,000",
        6.0,
        "less",
    ),
    Row("index-100m-reopen", "index-100m", "first_s", "s", "index-reopen with 100,000,000", None, "less"),
    Row(
        "index-1g-build", "index-1g", "settled_s", "s", "1,000,000,000: built", None, "less", on_request=True
    ),
    Row("index-1g-memory", "index-1g", "added_mb", "MB", "the same: VmRSS", None, "less", on_request=True),
    Row("index-1g-disk", "index-1g", "disk_mb", "MB", "the same: snapshots", None, "less", on_request=True),
    Row(
        "index-1g-reopen",
        "index-1g",
        "first_s",
        "s",
        "the same: start to first due",
        None,
        "less",
        on_request=True,
    ),
    Row(
        "index-1g-minute",
        "index-1g",
        "minute_s",
        "s",
        "the same: start until the first minute is delivered",
        None,
        "less",
        on_request=True,
    ),
    Row(
        "index-1g-reopen-cold",
        "index-1g",
        "cold_first_s",
        "s",
        "the same, cold: start to first due",
        None,
        "less",
        on_request=True,
    ),
    Row(
        "memory-10m",
        "memory-10m",
        "added_mb",
        "MB",
        "VmRSS 30 s after loading 10,000,000 random over 30 days, above an empty broker",
        100.0,
        "less",
    ),
    Row(
        "restart-burst",
        "restart-burst",
        "first_s",
        "s",
        "kill -9 after a burst, 10,000,000 pending: start to first delivery",
        1.5,
        "less",
    ),
    Row("restart-burst-100k", "restart-burst", "few_first_s", "s", "the same, 100,000 pending", None, "less"),
    Row("restart-burst-ratio", "restart-burst", "ratio", "x", "the first of the second", 2.0, "less"),
    Row(
        "restart-checkpoint",
        "restart-checkpoint",
        "first_s",
        "s",
        "kill -9 just before a checkpoint, 10,000,000 pending: start to first delivery",
        1.5,
        "less",
    ),
    Row(
        "restart-checkpoint-100k",
        "restart-checkpoint",
        "few_first_s",
        "s",
        "the same, 100,000 pending",
        None,
        "less",
    ),
    Row(
        "restart-checkpoint-ratio", "restart-checkpoint", "ratio", "x", "the first of the second", 2.0, "less"
    ),
    Row(
        "late-10m-p99",
        "lateness-10m",
        "p99",
        "ms",
        "1,000 msg/s with a 5 s delay, 10,000,000 others pending: lateness p99",
        5.0,
        "less",
    ),
    Row("late-10m-max", "lateness-10m", "max", "ms", "the same: the latest", None, "less"),
    Row("late-10m-early", "lateness-10m", "early", "msg", "the same: early messages", 0, "less", "worst"),
    Row(
        "herd-1m",
        "herd-1m",
        "seconds",
        "s",
        "1,000,000 due in one second, one consumer, 100 B: until all are acknowledged",
        4.0,
        "less",
    ),
    Row(
        "herd-1m-produce-p99",
        "herd-1m",
        "produce_p99_ms",
        "ms",
        "the same: single messages produced meanwhile, 200 a second",
        50.0,
        "less",
    ),
    Row("herd-1m-same", "herd-1m-same", "seconds", "s", "herd-1m, all due at one millisecond", None, "less"),
    Row("herd-1m-cold", "herd-1m-cold", "seconds", "s", "herd-1m, files not in the page cache", None, "less"),
    Row(
        "loop-lag-max",
        "loop-lag",
        "lag_max_ms",
        "ms",
        "loop lag at 100,000 msg/s produced, seals and merges running, a sample each 2 ms: max",
        20.0,
        "less",
    ),
    Row("loop-lag-p99", "loop-lag", "lag_p99_ms", "ms", "the same: p99", None, "less"),
    Row(
        "loop-lag-own-max",
        "loop-lag",
        "own_lag_max_ms",
        "ms",
        "the same: max, without what other processes took of the core",
        20.0,
        "less",
    ),
    Row(
        "loop-lag-memory-max",
        "loop-lag",
        "memory_lag_max_ms",
        "ms",
        "the same with the index in memory: neither seals nor merges",
        None,
        "less",
    ),
    # Without a target.
    Row(
        "deliver-herd",
        "herd",
        "rate",
        "msg/s",
        "500,000 due within one second, consumer waiting (500,000/s is the ceiling)",
    ),
    Row("herd-late-p99", "herd", "late_p99_ms", "ms", "the same: lateness p99", None, "less"),
    Row(
        "deliver-3-subs",
        "deliver-3-subs",
        "rate",
        "msg/s",
        "what is due to three subscriptions at once, all deliveries",
    ),
    Row(
        "sdk-send-many-each",
        "sdk-send-many-each",
        "rate",
        "msg/s",
        "SDK, send_many of 1,000 with a delay for each message",
    ),
    Row("single-unary", "single", "unary_us", "us", "one message awaited, unary, p50", None, "less"),
    Row("single-stream", "single", "stream_us", "us", "one message awaited, on a stream, p50", None, "less"),
    Row(
        "produce-lag-p99",
        "produce-100b",
        "lag_p99_ms",
        "ms",
        "loop lag while produce-100b runs, four samples a second: p99, at most",
        None,
        "less",
    ),
    Row(
        "produce-lag-max",
        "produce-100b",
        "lag_max_ms",
        "ms",
        "the same: max, at most",
        None,
        "less",
    ),
    Row(
        "restart-indexed",
        "restart",
        "indexed_s",
        "s",
        "start until the index holds all pending messages again",
        None,
        "less",
    ),
)
# fmt: on


def figures(row: Row, runs: list[dict[str, Any]]) -> list[float]:
    return [float(run[row.figure]) for run in runs]
