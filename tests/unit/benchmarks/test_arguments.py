"""Arguments of the benchmarks: a wrong one ends a program before it measures anything."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import __main__ as all_rows
from benchmarks import arguments, lone
from benchmarks.peers import __main__ as peers

ROOT = Path(__file__).resolve().parents[3]


def test_a_checkout_and_a_folder_that_can_be_written_are_taken(tmp_path: Path) -> None:
    assert arguments.checkout(str(ROOT)) == ROOT
    assert arguments.writable_folder(f"{tmp_path}/new/one") == tmp_path / "new/one"
    assert not list((tmp_path / "new/one").iterdir())
    assert arguments.at_least_one("12") == 12


def test_a_folder_that_is_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentTypeError, match="file cannot be written: File exists"):
        arguments.writable_folder(f"{tmp_path}/file")


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        (all_rows, ("--runs", "0")),
        (all_rows, ("--runs", "-1")),
        (all_rows, ("--entries", "0")),
        (all_rows, ("--source", "/nope")),
        (all_rows, ("--dir", "/proc/x")),
        (lone, ("--source", "/nope")),
        (lone, ("--count", "0")),
        (lone, ("--turns", "0")),
        (peers, ("--runs", "0")),
    ],
)
def test_a_wrong_argument_is_refused_in_a_line(
    program: ModuleType,
    wrong: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *wrong])
    options: Callable[[], object] = program._options
    with pytest.raises(SystemExit) as ended:
        options()
    assert ended.value.code == 2
    name, value = wrong
    assert f"error: argument {name}: {value} " in capsys.readouterr().err.splitlines()[-1]
