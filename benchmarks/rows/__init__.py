"""The rows of the table: which figure of which scenario, and what it is to reach."""

from __future__ import annotations

from benchmarks.rows import broker, cluster, index, jobs, sharing
from benchmarks.rows.row import Row, figures, median

__all__ = ["ROWS", "Row", "figures", "median"]

ROWS = (*broker.ROWS, *index.ROWS, *sharing.ROWS, *jobs.ROWS, *cluster.ROWS)
