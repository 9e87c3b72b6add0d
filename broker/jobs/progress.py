"""How far a job is, on standard error: a bar on a terminal, now and then a line elsewhere."""

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

    def tell(self, done: int, total: int, what: str = "tasks") -> None:
        if self._is_terminal:
            filled = _BAR * done // max(total, 1)
            sys.stderr.write(
                f"\r{self._job} [{'#' * filled}{'.' * (_BAR - filled)}] {done:,}/{total:,} {what}"
            )
            sys.stderr.flush()
            self._shown = True
        elif time.monotonic() - self._told_at >= _PLAIN_SECONDS:
            self._told_at = time.monotonic()
            click.echo(f"{self._job}: {done:,} of {total:,} {what} are done", err=True)

    def end(self) -> None:
        """Leave the bar where it is: what is printed next begins a line."""
        if self._shown:
            sys.stderr.write("\n")
            self._shown = False
