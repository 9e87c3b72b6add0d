"""Produce, deliver, lateness, restart, memory."""

from __future__ import annotations

from benchmarks.rows.row import Row


def _share(scenario: str, target: float | None = None) -> Row:
    what = "the same: share of the limit, the smaller of bare gRPC and of bare appends with a sync"
    return Row(f"{scenario}-share", scenario, "share", "x", what, target)


# fmt: off   (a table)
ROWS = (
    Row(
        "produce-100b",
        "produce-100b",
        "rate",
        "msg/s",
        "ProduceStream, batches of 1,000 of 100 B, random delays",
        1_200_000,
    ),
    _share("produce-100b", 0.5),
    Row(
        "produce-lag-p99",
        "produce-100b",
        "lag_p99_ms",
        "ms",
        "loop lag meanwhile, four samples a second: p99, at most",
        None,
        "less",
    ),
    Row("produce-lag-max", "produce-100b", "lag_max_ms", "ms", "the same: max, at most", None, "less"),
    Row("produce-1kb", "produce-1kb", "rate", "msg/s", "ProduceStream, batches of 1,000 of 1 KB", 300_000),
    _share("produce-1kb", 0.5),
    Row(
        "produce-by-100", "produce-by-100", "rate", "msg/s", "ProduceStream, batches of 100 of 100 B", 250_000
    ),
    _share("produce-by-100", 0.5),
    Row(
        "sdk-send-many",
        "sdk-send-many",
        "rate",
        "msg/s",
        "SDK, `send_many` of 1,000 of 100 B, eight in flight",
        300_000,
    ),
    _share("sdk-send-many"),
    Row(
        "sdk-send-many-each",
        "sdk-send-many-each",
        "rate",
        "msg/s",
        "SDK, `send_many` of 1,000 of 100 B with a delay for each message, eight in flight",
    ),
    _share("sdk-send-many-each"),
    Row(
        "sdk-send-burst",
        "sdk-send-burst",
        "rate",
        "msg/s",
        "SDK, `send_many` of 1,000 of 100 B, one in flight",
        248_000,
    ),
    _share("sdk-send-burst"),
    Row(
        "sdk-send-burst-client",
        "sdk-send-burst",
        "client_ns",
        "ns",
        "the same: CPU time of the client for a message",
        None,
        "less",
    ),
    Row(
        "sdk-send-linger",
        "sdk-send-linger",
        "rate",
        "msg/s",
        "SDK, `send` with linger, 256 tasks, 100 B",
        60_000,
    ),
    _share("sdk-send-linger"),
    Row(
        "single-ratio",
        "single",
        "ratio",
        "x",
        "one message awaited, unary: of `fdatasync` and a round trip together",
        1.4,
        "less",
    ),
    Row("single-unary", "single", "unary_us", "us", "the same: p50", None, "less"),
    Row("single-stream", "single", "stream_us", "us", "one message awaited, on a stream: p50", None, "less"),
    Row(
        "deliver",
        "deliver",
        "rate",
        "msg/s",
        "deliver and acknowledge what is due, raw stubs, 100 B",
        500_000,
    ),
    Row("sdk-deliver", "sdk-deliver", "rate", "msg/s", "the same through the SDK's iterator", 150_000),
    Row(
        "deliver-3-subs",
        "deliver-3-subs",
        "rate",
        "msg/s",
        "what is due to three subscriptions at once: all deliveries",
    ),
    Row(
        "deliver-herd",
        "herd",
        "rate",
        "msg/s",
        "500,000 due within one second, a consumer waits (500,000/s at most)",
    ),
    Row("herd-late-p99", "herd", "late_p99_ms", "ms", "the same: lateness p99", None, "less"),
    Row(
        "late-p99", "lateness", "p99", "ms", "1,000 messages/s with a delay of 5 s: lateness p99", 5.0, "less"
    ),
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
        "restart-indexed",
        "restart",
        "indexed_s",
        "s",
        "the same: start until the index holds all of them again",
        None,
        "less",
    ),
    Row(
        "memory",
        "memory",
        "added_mb",
        "MB",
        "memory 30 s after loading 2,000,000, above an empty broker",
        60.0,
        "less",
    ),
)
# fmt: on
