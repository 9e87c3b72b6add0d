"""The tables of docs/benchmarks.md, one for each group of rows: a run writes those of which it has measured all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.figures import origin, replace_figures
from benchmarks.report import number
from benchmarks.rows import GROUPS


def measured_groups(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the groups of which all rows were measured, none of which failed, but for those that take long and are
    asked for by name."""
    measured = _measured_rows(results)
    groups = []
    for group, rows in GROUPS.items():
        wanted = {row.name for row in rows if not row.on_request} or {row.name for row in rows}
        if wanted <= measured:
            groups.append(group)
    return groups


def write_tables(
    page: str,
    command: str,
    machine: Mapping[str, Any],
    limits: Mapping[str, float],
    results: Mapping[str, Mapping[str, Any]],
    groups: Sequence[str],
) -> str:
    """Put the tables of measured groups in the place of the old ones. `results`: what `row_result` gives, by row."""
    measured = _measured_rows(results)
    for group in groups:
        rows = [results[row.name] for row in GROUPS[group] if row.name in measured]
        text = f"{origin(command, machine)} {_limits(limits)}\n\n{_table(rows)}"
        page = replace_figures(page, group, text)
    return page


def _measured_rows(results: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {name for name, result in results.items() if "failed" not in result}


def _limits(limits: Mapping[str, float]) -> str:
    if not limits:
        return ""
    return (
        f"The machine alone: `fdatasync` of 4 KiB {limits['fdatasync_4k_p50_us']:.0f} µs and a round trip of gRPC "
        f"{limits['round_trip_p50_us']:.0f} µs at the median, {limits['python_mops']:.0f} million turns of a loop of "
        f"Python a second, {limits['copy_gb_per_s']:.1f} GB/s copied."
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| what | measured | wanted | broker's core |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        wanted = "" if row["target"] is None else _quantity(row["target"], row["unit"])
        core = f"{row['use']['broker']:.2f}" if "use" in row else ""
        lines.append(f"| {row['what']} | {_measured(row)} | {wanted} | {core} |")
    return "\n".join(lines)


def _measured(row: Mapping[str, Any]) -> str:
    text = _quantity(row["median"], row["unit"])
    if row["reached"] is False:
        text = f"**{text}**"
    return text if len(row["runs"]) == 1 else f"{text} ({number(row['min'])} to {number(row['max'])})"


def _quantity(value: float, unit: str) -> str:
    if "/s" in unit:
        return f"{number(value)}/s" if unit != "MB/s" else f"{number(value)} MB/s"
    return f"{number(value)}x" if unit == "x" else f"{number(value)} {unit.replace('us', 'µs')}"
