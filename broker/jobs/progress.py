"""Progress of a job, on standard error: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time

import click

_PLAIN_SECONDS = 10.0  # between two lines where there is no terminal
_BAR = 30


class Progress:
    """Of one run."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._is_terminal = sys.stderr.isatty()
        self._told_at = time.monotonic()
        self._shown = False

    def tell(self, done: int, total: int) -> None:
        """Of tasks."""
        self.show(done / max(total, 1), f"{done}/{total} tasks")

    def show(self, part: float, text: str) -> None:
        """`part` of 1 is done; in words, `text` is."""
        if self._is_terminal:
            filled = int(_BAR * part)
            sys.stderr.write(f"\r{self._job} [{'#' * filled}{'.' * (_BAR - filled)}] {text}")
            sys.stderr.flush()
            self._shown = True
        elif time.monotonic() - self._told_at >= _PLAIN_SECONDS:
            self._told_at = time.monotonic()
            click.echo(f"{self._job}: {text} done", err=True)

    def end(self) -> None:
        """Leave the bar where it is: what is printed next begins a line."""
        if self._shown:
            sys.stderr.write("\n")
            self._shown = False
