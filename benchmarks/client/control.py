"""Messages between a client's process and the one that started it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


async def phase(name: str) -> None:
    """Say that a phase begins, and wait for leave to go on. What runs beside goes on meanwhile."""
    say({"phase": name})
    if not await asyncio.to_thread(sys.stdin.readline):
        raise RuntimeError("whoever started this is gone")


def check(holds: bool, what: str) -> None:
    """A check of the run: if it does not hold, the run has no figure."""
    if not holds:
        raise AssertionError(what)


def percentiles(values: Any) -> dict[str, float]:
    """p50, p99 and max of a column, by the nearest rank."""
    ordered = sorted(values)
    check(bool(ordered), "nothing was measured")
    last = len(ordered) - 1
    return {
        "p50": float(ordered[round(0.5 * last)]),
        "p99": float(ordered[round(0.99 * last)]),
        "max": float(ordered[last]),
    }
