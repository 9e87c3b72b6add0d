"""Results on stdout as a table, one JSON document, or JSON lines; progress on stderr."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import sys
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import postdate
from postdate.commands.settings import Settings
from postdate.commands.values import show_duration

Record = Mapping[str, Any]

PAGE_ROWS = 1_000
"""Rows of a table that are written together, so that the first ones are seen while others are on their way."""

_PIPED_WIDTH = 160
_UNSEEN = {"Cc", "Cs", "Zl", "Zp"}  # control characters, halves of characters, ends of lines and paragraphs
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They change the direction of writing, so that a text looks like another one."""


def record(value: Any) -> dict[str, Any]:
    """A frozen result as plain fields; durations in milliseconds, as the API has them."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if "timedelta" in str(field.type):
            ms = None if item is None else round(item / timedelta(milliseconds=1))
            fields[f"{field.name}_ms"] = ms
        else:
            fields[field.name] = _plain(item)
    return fields


def message_record(message: postdate.Message) -> dict[str, Any]:
    """A received message."""
    fields: dict[str, Any] = {
        "id": str(message.id),
        "key": message.key,
        "properties": dict(message.properties),
        "publish_time": message.publish_time.isoformat(),
        "deliver_at": message.deliver_at.isoformat(),
        "attempt": message.attempt,
    }
    return fields | payload_fields(message.payload)


def payload_fields(payload: bytes) -> dict[str, str]:
    """Bytes that are no text come as base64."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def emit_rows(
    settings: Settings,
    rows: Sequence[Record],
    columns: Sequence[str],
    title: str = "",
    whole: Collection[str] = (),
) -> None:
    """Many results. The table shows `columns`, those in `whole` on one line each; JSON has every field."""
    if settings.output == "json":
        print(json.dumps(list(rows), indent=2))
    elif settings.output == "jsonl":
        emit_lines(rows)
    else:
        console = _console()
        if title:  # a title of Rich's own is folded to the width of its table
            console.print(Text(plain(title), style="italic"), soft_wrap=True)
        table = Table()
        shown = [[show(row.get(column)) for row in rows] for column in columns]
        for column, cells in zip(columns, shown, strict=True):
            numeric = any(
                isinstance(value := row.get(column), int | float) and not isinstance(value, bool)
                for row in rows
            )
            heading = column.replace("_", " ")
            table.add_column(
                heading,
                justify="right" if numeric else "left",
                overflow="fold",  # what was cut could not be copied
                no_wrap=column in whole,
                min_width=max(map(_width, [heading, *cells])),
            )
        boundless = console.options.update(width=100_000)
        if Measurement.get(console, boundless, table).maximum <= console.width:
            _print_lines(console, table, shown)
            return
        for made in table.columns:
            made.min_width = None
        for texts in zip(*shown, strict=True):
            table.add_row(*map(Text, texts))
        if rows and Measurement.get(console, boundless, table).minimum > console.width:
            _print_blocks(console, rows, columns)
        else:
            console.print(table)


class RowStream:
    """Many results that come one by one, written as they come: a table in pages, each with its heading."""

    def __init__(
        self, settings: Settings, columns: Sequence[str], title: str = "", whole: Collection[str] = ()
    ) -> None:
        self._settings = settings
        self._columns = columns
        self._title = title
        self._whole = whole
        self._page: list[Record] = []
        self.count = 0

    def add(self, row: Record) -> None:
        if self._settings.output == "jsonl":
            emit_lines([row])
        elif self._settings.output == "json":
            sys.stdout.write((",\n" if self.count else "[\n") + json.dumps([row], indent=2)[2:-2])
        else:
            self._page.append(row)
            if len(self._page) == PAGE_ROWS:
                self._print()
        self.count += 1

    def end(self) -> None:
        """All were added."""
        if self._settings.output == "json":
            sys.stdout.write("\n]\n" if self.count else "[]\n")
        elif self._settings.output == "table" and (self._page or not self.count):
            self._print()

    def _print(self) -> None:
        title = self._title if self.count < PAGE_ROWS else ""
        emit_rows(self._settings, self._page, self._columns, title, self._whole)
        sys.stdout.flush()
        self._page = []


def _print_lines(console: Console, table: Table, shown: Sequence[Sequence[str]]) -> None:
    """Print a table in which each row is one line. `shown`: the cells of each column, for which `table` has room.

    The frame is Rich's, the lines are not: they take a fiftieth of the time, and there may be millions.
    """
    if not any(shown):
        console.print(table)
        return
    table.add_row()
    with console.capture() as captured:
        console.print(table)
    head, edges, foot = captured.get().removesuffix("\n").rsplit("\n", 2)
    columns = [
        _padded(cells, column.min_width or 0, on_left=column.justify == "right")
        for column, cells in zip(table.columns, shown, strict=True)
    ]
    edge = edges[0]
    between = f" {edge} "
    lines = [f"{edge} {between.join(row)} {edge}" for row in zip(*columns, strict=True)]
    sys.stdout.write("\n".join([head, *lines, foot, ""]))


def _padded(cells: Iterable[str], width: int, *, on_left: bool) -> Iterator[str]:
    """Fill cells up to a width with spaces."""
    for cell in cells:
        spaces = " " * (width - _width(cell))
        yield spaces + cell if on_left else cell + spaces


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def _print_blocks(console: Console, rows: Sequence[Record], columns: Sequence[str]) -> None:
    """Print, where words of a table would be broken over lines, a block of lines for each row."""
    for row in rows:
        console.print(_facts({column: row.get(column) for column in columns}))
        console.print()


def emit_one(settings: Settings, fields: Record) -> None:
    """One result."""
    if settings.output == "json":
        print(json.dumps(fields, indent=2))
    elif settings.output == "jsonl":
        emit_lines([fields])
    else:
        _console().print(_facts(fields))


def _facts(fields: Record) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name.replace("_", " "), Text(show(value)))
    return table


def emit_lines(rows: Iterable[Record]) -> None:
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def show(value: Any) -> str:
    """A value in a cell of a table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, timedelta):
        return show_duration(value)
    if isinstance(value, Mapping):
        parts = (f"{show(name)}={show(item)}" for name, item in value.items() if item is not None)
        return ", ".join(parts) or "-"
    if isinstance(value, list):
        return ", ".join(map(show, value)) or "-"
    return plain(str(value))


def plain(text: str) -> str:
    """A text that does nothing to a terminal: what is no character to be seen is written as `\\x1b`.

    Payloads, keys and names are whatever somebody has sent.
    """
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode()
        if each in _TURNS or unicodedata.category(each) in _UNSEEN
        else each
        for each in text
    )


def progress_bar(settings: Settings) -> Progress:
    """Progress on stderr: on a terminal, or where it is asked for."""
    console = Console(stderr=True, force_terminal=True if settings.progress else None)
    wanted = console.is_terminal if settings.progress is None else settings.progress
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not wanted,
        # Or results would go to the terminal of the bar and not to the file or pipe that they are for.
        redirect_stdout=sys.stdout.isatty() and sys.stderr.isatty(),
        transient=not settings.progress,
    )


def table_width() -> int:
    """Return how wide tables are on this output."""
    return _console().width


def stdout_width(piped: int) -> int:
    """Return how wide lines on stdout may be: as the terminal or COLUMNS says, else so wide."""
    if sys.stdout.isatty():
        return Console().width  # which heeds COLUMNS too
    columns = os.environ.get("COLUMNS", "")
    return (int(columns) if columns.isdecimal() else 0) or piped


def _console() -> Console:
    # Piped output has no width of its own; 80 columns would cut what a script's log should show.
    return Console(width=stdout_width(_PIPED_WIDTH))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return record(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, datetime):
        return value.isoformat()
    return value
