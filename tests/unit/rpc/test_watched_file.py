"""A value made of files: what is broken is not taken, and a file that is gone stops nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from broker.observe.metrics import BrokerCounters
from broker.rpc.watched_file import Watched, read_text
from broker.settings import ConfigError


class Number:
    """A file with a number in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counters = BrokerCounters()
        self.watched: Watched[int] = Watched("number", [str(path), ""], self._read, self.counters)

    def _read(self) -> int:
        text = read_text("number_file", str(self.path))
        if text == "fault":
            raise RuntimeError("not foreseen")
        if not text.isdigit():
            raise ConfigError("it is no number")
        return int(text)

    @property
    def reloads(self) -> dict[tuple[str, str], int]:
        return self.counters.security_reloads


def test_what_changed_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("1")
    number = Number(tmp_path / "n")
    assert not number.watched.refresh()
    (tmp_path / "n").write_text("22")
    assert number.watched.refresh()
    assert number.watched.value == 22
    assert not number.watched.refresh()
    assert number.reloads == {("number", "ok"): 1}


@pytest.mark.parametrize("broken", ["no number", "fault", None])
def test_broken_file_leaves_the_old_value_and_is_told_once(tmp_path: Path, broken: str | None) -> None:
    (tmp_path / "n").write_text("1")
    number = Number(tmp_path / "n")
    if broken is None:
        (tmp_path / "n").unlink()
    else:
        (tmp_path / "n").write_text(broken)
    assert not number.watched.refresh()
    assert not number.watched.refresh()
    assert number.watched.value == 1
    assert number.reloads == {("number", "failed"): 1}
    (tmp_path / "n").write_text("333")
    assert number.watched.refresh()
    assert number.watched.value == 333


def test_change_that_could_not_be_read_in_passing_is_taken_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "n").write_text("1")
    number = Number(tmp_path / "n")
    (tmp_path / "n").write_text("22")  # and does not change any more
    with monkeypatch.context() as passing:
        passing.setattr("builtins.open", _fails)
        assert not number.watched.refresh()
        assert not number.watched.refresh()
    assert number.watched.value == 1
    assert number.watched.refresh()
    assert number.watched.value == 22
    assert number.reloads == {("number", "failed"): 1, ("number", "ok"): 1}


def _fails(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_file_that_was_exchanged_for_one_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    for name in ("a", "b"):
        os.utime(tmp_path / name, ns=(1, 1))
    link = tmp_path / "n"
    link.symlink_to("a")
    number = Number(link)
    (tmp_path / "new").symlink_to("b")
    (tmp_path / "new").replace(link)
    assert number.watched.refresh()
    assert number.watched.value == 2


def test_change_while_the_first_value_is_made_is_seen_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "n").write_text("1")
    read = Number._read

    def read_before_a_change(number: Number) -> int:
        value = read(number)
        (tmp_path / "n").write_text("22")
        return value

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Number, "_read", read_before_a_change)
        number = Number(tmp_path / "n")
    assert number.watched.value == 1
    monkeypatch.setattr(number.watched, "_make", lambda: read(number))
    assert number.watched.refresh()
    assert number.watched.value == 22


def test_first_value_must_be_good(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"number_file: .* cannot be read: No such file"):
        Number(tmp_path / "absent")
    (tmp_path / "n").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        Number(tmp_path / "n")
