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
