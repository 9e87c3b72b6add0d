"""A broker whose topics are spread over shards, a process each."""

from __future__ import annotations

from benchmarks.rows.row import Row

# fmt: off   (a table)
ROWS = (
    Row(
        "shards-unary",
        "shards",
        "unary_ratio",
        "x",
        "one message awaited (unary) through the front of two shards, of directly",
        1.5,
        "less",
    ),
    Row(
        "shards-stream",
        "shards",
        "stream_ratio",
        "x",
        "ProduceStream, batches of 1,000 of 100 B, through the front, of directly; front and shard on one core",
        0.5,
    ),
    Row(
        "shards-cpu",
        "shards",
        "cpu_ratio",
        "x",
        "the same: messages for each second of CPU of two shards, of a broker without shards",
        0.9,
    ),
    Row(
        "shards-deliver-cpu",
        "shards",
        "deliver_cpu_ratio",
        "x",
        "deliver and acknowledge what is due: messages for each second of CPU of two shards, of a broker without",
        0.9,
    ),
    Row(
        "shards-cpu-apart",
        "shards",
        "cpu_apart_ratio",
        "x",
        "produce, with one shard after the other, as on cores of their own",
        0.9,
    ),
    Row(
        "shards-deliver-cpu-apart",
        "shards",
        "deliver_cpu_apart_ratio",
        "x",
        "deliver, with one shard after the other, as on cores of their own",
        0.9,
    ),
    Row(
        "shards-memory",
        "shards-memory",
        "shard_mb",
        "MB",
        "memory of each idle shard above two",
        60.0,
        "less",
        on_request=True,
    ),
    Row(
        "shards-start",
        "shards-start",
        "all_s",
        "s",
        "four shards with 10,000,000 pending each, on two cores: start to first delivery of all",
        3.0,
        "less",
        on_request=True,
    ),
    Row(
        "shards-taken-over",
        "shards-taken-over",
        "worst_s",
        "s",
        "a node with four shards is killed, until all have answered: the worst of 20",
        12.0,
        "less",
        on_request=True,
    ),
)
# fmt: on
