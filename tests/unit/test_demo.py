"""`make demo`: how fast it replays, and how it ends."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from tools import demo


def test_a_long_log_is_replayed_faster_than_was_wanted_and_the_demo_says_why() -> None:
    assert demo.replay_speed(1000, 6_000) == (1000, "")
    assert demo.replay_speed(1000, 120_000) == (2000, "; 1,000 times would take longer than 60 seconds")


def test_a_replay_that_failed_ends_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str | Path, ...]] = []

    def fail(address: str, *arguments: str | Path) -> int:
        calls.append((address, *arguments))
        return 2

    monkeypatch.setattr(demo, "broker", lambda: contextlib.nullcontext("here"))
    monkeypatch.setattr(demo, "postdate", fail)
    (tmp_path / "log").write_text("no date\n")
    assert demo.replay(tmp_path / "log", 1000) == 1
    assert calls == [("here", "bench", "replay", tmp_path / "log", "--speed", "1000", "--keep")]


def test_ctrl_c_ends_the_demo_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "replay", interrupt)
    monkeypatch.setattr(sys, "argv", ["demo", "--speed", "1", "log"])
    assert demo.main() == 130
    assert capsys.readouterr().err == "demo: interrupted\n"
