"""Order in which test processes take the files of tests."""

from __future__ import annotations

from pathlib import Path

from tests.lanes import BUSY, LONG, WAITING, place

ROOT = Path(__file__).resolve().parents[2]


def test_what_the_order_names_exists():
    for path in (*WAITING, *BUSY, *LONG):
        assert (ROOT / path).exists(), path


def test_what_waits_is_at_the_first_end_and_what_works_at_the_last_the_long_ones_outermost():
    places = [
        place(path)
        for path in (
            "tests/process/test_cluster_shards.py",
            "tests/process/test_signals.py",
            "tests/wire/test_seek.py",
            "tests/model/test_schedule_model.py",
            "tests/crash/test_reshard.py",
        )
    ]
    assert places == [-2, -1, 0, 1, 2]
