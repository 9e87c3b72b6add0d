"""Figures that a run writes into a page of the documentation between two markers, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.errors import BenchmarkFailed


def markers(figures: str) -> tuple[str, str]:
    """The lines before and behind the figures of that name."""
    return f"<!-- figures of {figures}: begin -->", f"<!-- figures of {figures}: end -->"


def replace_figures(page: str, figures: str, text: str) -> str:
    """Put text in the place of that between the markers; raises BenchmarkFailed for a page without them."""
    begin, end = markers(figures)
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise BenchmarkFailed(f"the page has no markers for the figures of {figures}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def origin(command: str, machine: Mapping[str, Any]) -> str:
    """Return how, when and where figures were measured."""
    return (
        f"`{command}`, commit {machine['commit']}, {machine['date']}; {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB, {machine['system']}, Linux {machine['kernel']}, {machine['file_system']}, "
        f"Python {machine['python']}."
    )
