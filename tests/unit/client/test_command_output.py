"""Tables of the `postdate` command."""

from __future__ import annotations

from typing import Any

import pytest
from rich.table import Table

from postdate.commands.output import emit_one, emit_rows
from postdate.commands.settings import Settings

TABLE = Settings(output="table")
ROWS: list[dict[str, Any]] = [
    {"name": "a", "total_count": 1_200},
    {"name": "日本語", "total_count": None},
    {"name": "e\u0301 [red]x[/red] :smile: \\", "total_count": 7},
]


def test_each_row_that_fits_is_a_line_and_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    emit_rows(TABLE, ROWS, ["name", "total_count"], "names")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "names",
        "┏━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━┓",
        "┃ name                     ┃ total count ┃",
        "┡━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━┩",
        "│ a                        │       1,200 │",
        "│ 日本語                   │           - │",
        "│ e\u0301 [red]x[/red] :smile: \\ │           7 │",
        "└──────────────────────────┴─────────────┘",
    ]


def test_rows_that_do_not_fit_are_folded_and_shown_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    emit_rows(TABLE, [{"name": ":smile: [b] :smile: [b]", "n": 1}], ["name", "n"])
    cells = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert len(cells) > 1
    assert " ".join(cells) == ":smile: [b] :smile: [b]"
    emit_one(TABLE, {"name": ":smile:[b]"})
    assert capsys.readouterr().out.split() == ["name", ":smile:[b]"]


@pytest.mark.parametrize("rows", [[], [{}]])
def test_a_table_of_nothing_is_its_heading(
    capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]]
) -> None:
    emit_rows(TABLE, rows, ["name"])
    assert capsys.readouterr().out.splitlines()[1] == "┃ name ┃"


@pytest.mark.parametrize("width", ["20", "160"])
def test_a_title_is_not_folded_to_the_width_of_its_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    title = "12 occurrences, [times] in Europe/Berlin :smile:"
    emit_rows(TABLE, [{"n": 1}], ["n"], title)
    emit_rows(TABLE, [{"n": "x" * 30, "m": "y" * 30}], ["n", "m"], title)
    assert capsys.readouterr().out.splitlines().count(title) == 2


def test_rich_is_given_the_frame_of_a_table_and_not_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # It takes half a millisecond a row, and there may be a million.
    given: list[int] = []
    add = Table.add_row

    def counted(self: Table, *cells: Any) -> None:
        given.append(len(cells))
        add(self, *cells)

    monkeypatch.setattr(Table, "add_row", counted)
    emit_rows(TABLE, [{"name": f"n-{i}"} for i in range(1_000)], ["name"])
    assert given == [0]
