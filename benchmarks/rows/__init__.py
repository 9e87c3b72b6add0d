"""The rows of the table: which figure of which scenario, and what it is to reach."""

from __future__ import annotations

from benchmarks.rows import backlog, broker, cluster, index, jobs, schedule, shards, sharing
from benchmarks.rows.row import Row, figures, median

__all__ = ["GROUPS", "ROWS", "Row", "figures", "median"]

GROUPS = {
    "the broker": broker.ROWS,
    "the index": index.ROWS,
    "schedule control": schedule.ROWS,
    "a large backlog": backlog.ROWS,
    "topics that share a broker": sharing.ROWS,
    "shards": shards.ROWS,
    "jobs": jobs.ROWS,
    "a cluster": cluster.ROWS,
}
"""Rows that stand in one table of docs/benchmarks.md, by its name there."""

ROWS = tuple(row for rows in GROUPS.values() for row in rows)
