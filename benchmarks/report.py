"""Shows the results: a table for people, JSON for everything else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from benchmarks.rows import Row, figures, median


@dataclass(slots=True)
class Outcome:
    """All runs of one scenario."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def failed(self) -> str:
        """Return the reason for missing figures; empty if there are figures."""
        if not self.failures:
            return "" if self.runs else "not run"
        tried = len(self.runs) + len(self.failures)
        return f"{len(self.failures)} of {tried} runs failed: {self.failures[0]}"


def row_result(row: Row, outcome: Outcome) -> dict[str, Any]:
    """One row for JSON."""
    result: dict[str, Any] = {"name": row.name, "what": row.what, "unit": row.unit, "target": row.target}
    if outcome.failed:
        return result | {"failed": outcome.failed}
    values = figures(row, outcome.runs)
    reached = row.reached(values)
    result |= {"median": median(values), "min": min(values), "max": max(values), "runs": values}
    result |= {"reached": reached}
    uses = [run["use"] for run in outcome.runs if "use" in run]
    if uses:
        result["use"] = {name: median([use[name] for use in uses]) for name in uses[0]}
    return result


def table(results: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown, and below it why rows failed."""
    head = ["row", "median", "min", "max", "unit", "target", "", "broker", "client", "others", "what"]
    lines = [head, *(_line(result) for result in results)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    right = (1, 2, 3, 5, 7, 8, 9)
    rendered = []
    for line in lines:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        rendered.append("| " + " | ".join(cells) + " |")
    rules = ["-" * (width - 1) + (":" if column in right else "-") for column, width in enumerate(widths)]
    rendered.insert(1, "| " + " | ".join(rules) + " |")
    rendered += [
        "",
        "broker, client, others: CPU in cores while it was measured; others is near 0 on a quiet machine.",
    ]
    seen: set[str] = set()
    for result in results:
        if "failed" in result and result["failed"] not in seen:
            seen.add(result["failed"])
            rendered.append(f"failed: {result['name']}: {_short(result['failed'])}")
    return "\n".join(rendered)


def describe(machine: dict[str, Any], limits: dict[str, float]) -> str:
    """The machine and what it can do without a broker."""
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    lines = [
        f"{machine['date']}, commit {machine['commit']}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"{machine['system']}, kernel {machine['kernel']}",
        f"Python {machine['python']}, {libraries}",
        f"{machine['file_system']}: {machine['folder']}; load {machine['load_before']}",
    ]
    if limits:
        lines.append("limits: " + ", ".join(f"{name} {number(value)}" for name, value in limits.items()))
    return "\n".join(lines)


def number(value: float) -> str:
    if math.isnan(value):
        return "-"
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _short(text: str) -> str:
    """The first and the last line: of a traceback, those say what happened. JSON has it all."""
    lines = text.splitlines()
    return text if len(lines) < 2 else f"{lines[0]} ... {lines[-1].strip()}"


def _line(result: dict[str, Any]) -> list[str]:
    target = "" if result["target"] is None else number(result["target"])
    if "failed" in result:
        return [result["name"], "failed", "", "", result["unit"], target, "no", "", "", "", result["what"]]
    verdict = {True: "yes", False: "no", None: ""}[result["reached"]]
    use = result.get("use", {})
    cores = [f"{use[name]:.2f}" if use else "" for name in ("broker", "client", "foreign")]
    values = [number(result[name]) for name in ("median", "min", "max")]
    return [result["name"], *values, result["unit"], target, verdict, *cores, result["what"]]
