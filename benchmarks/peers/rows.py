"""The rows, how large their work is, and what becomes of several takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.rows.row import median


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the work."""

    warm_seconds: float
    seconds: float
    herd: int
    pending: int
    lateness_seconds: int


FULL = Sizes(warm_seconds=1.0, seconds=5.0, herd=100_000, pending=1_000_000, lateness_seconds=20)
QUICK = Sizes(warm_seconds=0.3, seconds=0.8, herd=10_000, pending=50_000, lateness_seconds=2)

DELAY_SECONDS = (1, 10)
RATE = 1_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """Work that is measured in one go, on a server of its own."""

    name: str
    work: str
    payload_bytes: int = 100

    def task(self, sizes: Sizes) -> dict[str, Any]:
        """The task that the client is given."""
        task: dict[str, Any] = {"payload_bytes": self.payload_bytes}
        match self.work:
            case "herd":
                return task | {"count": sizes.herd}
            case "pending":
                return task | {"count": sizes.pending}
            case "lateness":
                return task | {
                    "rate": RATE,
                    "seconds": sizes.lateness_seconds,
                    "delay_seconds": DELAY_SECONDS,
                }
            case _:
                return task | {"warm_seconds": sizes.warm_seconds, "seconds": sizes.seconds}


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One line of the table."""

    scenario: str
    figure: str
    what: str
    """With the fields of `Sizes`."""
    unit: str
    better: Literal["more", "less"] = "less"


_SIZES = ((100, "100 B"), (1024, "1 KB"))

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        *(
            Scenario(f"{work}-{size.replace(' ', '').lower()}", work, octets)
            for work in ("prepared", "bursts", "single", "herd")
            for octets, size in _SIZES
        ),
        Scenario("lateness", "lateness"),
        Scenario("pending", "pending"),
    )
}

ROWS = (
    PeerRow("prepared-100b", "rate", "produce, prepared batches of 1,000, 100 B", "/s", "more"),
    PeerRow("prepared-1kb", "rate", "the same, 1 KB", "/s", "more"),
    PeerRow("bursts-100b", "rate", "produce, client, bursts of 1,000, one in flight, 100 B", "/s", "more"),
    PeerRow("bursts-1kb", "rate", "the same, 1 KB", "/s", "more"),
    PeerRow("single-100b", "rate", "one message awaited, 100 B", "/s", "more"),
    PeerRow("single-1kb", "rate", "the same, 1 KB", "/s", "more"),
    PeerRow("herd-100b", "seconds", "{herd:,} due at once, all acknowledged, 100 B", "s"),
    PeerRow("herd-1kb", "seconds", "the same, 1 KB", "s"),
    PeerRow("lateness", "p50", "1,000/s, delays of 1 to 10 s: lateness p50", "ms"),
    PeerRow("lateness", "p99", "the same, p99", "ms"),
    PeerRow("lateness", "max", "the same, max", "ms"),
    PeerRow("lateness", "early", "the same, delivered before their time", ""),
    PeerRow("lateness", "again", "the same, delivered once more", ""),
    PeerRow("pending", "memory", "memory a pending message, {pending:,} of 100 B", "B"),
    PeerRow("pending", "disk", "disk a pending message", "B"),
    PeerRow("pending", "first_s", "kill -9 with {pending:,} pending: first delivery", "s"),
)


@dataclass(frozen=True, slots=True)
class Take:
    """One measurement, and why it does not count; empty if it does."""

    figures: Mapping[str, float]
    disturbed: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of the takes that count."""

    value: float
    takes: int
    disturbed: bool = False
    """There was no take that counts: it is the median of those that do not."""


def figure_of(row: PeerRow, takes: Sequence[Take]) -> Figure | None:
    """The figure of a row; None without a take."""
    quiet = [take for take in takes if not take.disturbed]
    chosen = quiet or takes
    values = [take.figures[row.figure] for take in chosen if row.figure in take.figures]
    if not values:
        return None
    return Figure(median(values), len(values), disturbed=not quiet)


def best(row: PeerRow, figures: Mapping[str, Figure]) -> set[str]:
    """The peers that nobody is ahead of."""
    values = {name: figure.value for name, figure in figures.items() if not math.isnan(figure.value)}
    if not values:
        return set()
    top = (max if row.better == "more" else min)(values.values())
    return {name for name, value in values.items() if value == top}
