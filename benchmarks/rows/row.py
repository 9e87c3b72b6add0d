"""One row of the table."""

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
        """Return whether the target is reached; None where there is none."""
        if self.target is None:
            return None
        ordered = sorted(values, reverse=self.better == "more")
        value = ordered[-1] if self.judge == "worst" else median(values)
        return value >= self.target if self.better == "more" else value <= self.target


def median(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def figures(row: Row, runs: list[dict[str, Any]]) -> list[float]:
    return [float(run[row.figure]) for run in runs]
