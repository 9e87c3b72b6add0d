"""The tables of docs/benchmarks-peers.md, written between two markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.figures import origin, replace_figures
from benchmarks.peers.rows import ROWS, Figure, PeerRow, Sizes, Take, best, figure_of
from benchmarks.report import number

FIGURES = "make bench-peers"


@dataclass(frozen=True, slots=True)
class About:
    """The peers of a run: title, version, what an answer means, how it was set up."""

    title: str
    version: str
    answer: str
    setup: str


@dataclass(frozen=True, slots=True)
class Results:
    """All that a run has to tell."""

    machine: Mapping[str, Any]
    command: str
    sizes: Sizes
    runs: int
    peers: Mapping[str, About]
    takes: Mapping[tuple[str, str], Sequence[Take]]
    """By peer and scenario."""
    failures: Mapping[tuple[str, str], str]
    skipped: Mapping[str, str]
    """Peers that did not run, and why."""
    instead: Mapping[tuple[str, str], str]
    """The text in the place of figures that a peer has no measurement of, by peer and scenario."""


def write_page(page: str, results: Results) -> str:
    """Put the tables of a run in the place of those between the markers."""
    return replace_figures(page, FIGURES, render(results))


def render(results: Results) -> str:
    """The tables of a run, in Markdown."""
    parts = [
        f"{origin(results.command, results.machine)} {_medians(results.runs)}{_probes(results)}",
        table(results),
    ]
    parts += [f"{peer.title}: {reason}." for (name, peer, reason) in _failures(results)]
    parts += [f"Left out: {name} ({reason})." for name, reason in results.skipped.items()]
    lines = ["| | version | an answer means | set up |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {each.title} | {each.version} | {each.answer} | {each.setup} |" for each in results.peers.values()
    ]
    return "\n\n".join([*parts, "\n".join(lines)])


def table(results: Results) -> str:
    """The figures: a line for each row, a column for each peer, the best in bold."""
    head = ["", *(peer.title for peer in results.peers.values())]
    lines = [head, ["---", *("---:" for _ in results.peers)]]
    measured = {scenario for _, scenario in (*results.takes, *results.failures)}
    for row in ROWS:
        if row.scenario not in measured:
            continue
        figures = {name: figure for name in results.peers if (figure := _figure(results, name, row))}
        top = best(row, figures)
        cells = [
            results.instead.get((name, row.scenario)) or _cell(row, figures.get(name), bold=name in top)
            for name in results.peers
        ]
        lines.append([row.what.format(**asdict(results.sizes)), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _figure(results: Results, name: str, row: PeerRow) -> Figure | None:
    return figure_of(row, results.takes.get((name, row.scenario), ()))


def _cell(row: PeerRow, figure: Figure | None, *, bold: bool) -> str:
    if figure is None:
        return "failed"
    unit = row.unit if row.unit.startswith("/") or not row.unit else f" {row.unit}"
    text = number(figure.value) + unit
    return (f"**{text}**" if bold else text) + (" *" if figure.disturbed else "")


def _medians(runs: int) -> str:
    how = "One run" if runs == 1 else f"Medians of {runs} runs, peers in turns"
    return f"{how}; an asterisk: disturbed every time. "


def _probes(results: Results) -> str:
    probes = [
        take.figures[name]
        for takes in results.takes.values()
        for take in takes
        for name in ("probe_before_us", "probe_after_us")
        if name in take.figures
    ]
    if not probes:
        return ""
    thrown = sum(bool(take.disturbed) for takes in results.takes.values() for take in takes)
    count = sum(map(len, results.takes.values()))
    return (
        f"An append of 4 KiB with its sync took {min(probes):.0f} to {max(probes):.0f} µs around the measurements, "
        f"of which {thrown} of {count} were disturbed and thrown away."
    )


def _failures(results: Results) -> list[tuple[str, About, str]]:
    return [
        (name, results.peers[name], f"`{scenario}` failed: {reason.splitlines()[0]}")
        for (name, scenario), reason in results.failures.items()
    ]
