"""Failures of a benchmark."""

from __future__ import annotations


class BenchmarkFailed(Exception):
    """A run has no figure, because something went wrong or a check did not hold; the text says what."""
