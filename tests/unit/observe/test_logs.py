"""Logs: one record a line whatever names hold, and never a payload."""

from __future__ import annotations

import enum
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.model import Position
from broker.observe.logs import (
    LIBRARY_LINES_MAX,
    TEXT_CHARACTERS_MAX,
    LibraryLines,
    configure_logging,
    get_logger,
    show,
)
from tests.unit.rpc.test_unread_room import HandClock


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def written(log_format: str, sentence: str = "Topic created", **fields: object) -> str:
    stream = io.StringIO()
    configure_logging(log_format, "info", stream)
    get_logger("broker.test").info(sentence, **fields)
    return stream.getvalue()


def test_json_lines_hold_sentence_and_fields() -> None:
    entry = json.loads(written("json", topic="orders", count=3, position=Position(7, 9), ok=True, none=None))
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "broker.test",
        "message": "Topic created",
        "topic": "orders",
        "count": 3,
        "position": "7:9",
        "ok": True,
        "none": None,
    }


def test_text_is_one_readable_line() -> None:
    line = written("text", topic="orders", reason="no space left")
    assert line.endswith('Z INFO    Topic created  topic=orders reason="no space left"\n')
    assert written("text").endswith("Topic created\n")


@given(st.text())
def test_no_name_can_forge_a_line_or_a_field(name: str) -> None:
    for log_format in ("json", "text"):
        lines = written(log_format, topic=name, after=1).splitlines()
        assert len(lines) == 1
        assert lines[0].isprintable()
    assert (
        json.loads(written("json", topic=name))["topic"][:TEXT_CHARACTERS_MAX] == name[:TEXT_CHARACTERS_MAX]
    )


def test_a_field_cannot_replace_what_every_line_has() -> None:
    entry = json.loads(written("json", level="debug", message="other", time=0))
    assert (entry["level"], entry["level_"], entry["message"], entry["message_"], entry["time_"]) == (
        "info",
        "debug",
        "Topic created",
        "other",
        0,
    )


class Holder:
    def __repr__(self) -> str:
        return "secret payload"


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"secret", "<6 bytes>"),
        (bytearray(b"secret"), "<6 bytes>"),
        (memoryview(b"secret"), "<6 bytes>"),
        ([b"secret", 1], ["<6 bytes>", 1]),
        (Holder(), "<Holder>"),
        ({"payload": "secret"}, "<dict>"),
        (np.arange(3), "<ndarray>"),
        (np.int64(3), 3),
        (Colour.RED, "RED"),
        (Path("/x"), "/x"),
        (float("nan"), "nan"),
        pytest.param(10**5_000, "<huge int>", id="huge"),
        (OSError("broken"), "OSError: broken"),
        pytest.param("a" * 2_000, "a" * TEXT_CHARACTERS_MAX + "...", id="long"),
    ],
)
def test_values_show_what_may_be_seen(value: object, expected: object) -> None:
    assert show(value) == expected


def test_long_lists_are_cut() -> None:
    assert show(list(range(100)))[-1] == "... 100 in all"  # type: ignore[index]


def test_tracebacks_cannot_pass_for_lines_of_their_own() -> None:
    stream = io.StringIO()
    for log_format in ("text", "json"):
        configure_logging(log_format, "info", stream)
        try:
            raise ValueError("first\n2026-01-01T00:00:00.000Z INFO    Forged\r\x1b[2J")
        except ValueError as error:
            get_logger("broker.test").error("It failed", exc_info=error, topic="t")
    text, entry = stream.getvalue().rsplit("\n{", 1)
    first, *others = text.split("\n")
    assert first.endswith("ERROR   It failed  topic=t")
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    assert "ValueError: first" in json.loads("{" + entry)["exception"]


def test_levels_below_the_configured_one_are_silent() -> None:
    stream = io.StringIO()
    configure_logging("text", "warning", stream)
    log = get_logger("broker.test")
    log.debug("One")
    log.info("Two")
    log.warning("Three")
    assert stream.getvalue().count("\n") == 1


def test_libraries_log_in_the_same_form() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    logging.getLogger("aiohttp.server").error("Error handling %s", "a\nb")
    assert json.loads(stream.getvalue())["message"] == "Error handling a\nb"


def test_a_sentence_with_a_percent_sign_is_taken_as_it_is() -> None:
    assert json.loads(written("json", "Disk is 100% full"))["message"] == "Disk is 100% full"


@pytest.mark.parametrize(
    ("name", "lines_max"),
    [
        ("grpc._cython.cygrpc", LIBRARY_LINES_MAX),
        ("asyncio", LIBRARY_LINES_MAX),
        ("aiohttp.server", LIBRARY_LINES_MAX),
        ("opentelemetry.exporter.otlp", 1),
        ("urllib3.connectionpool", 1),
    ],
)
def test_a_library_that_logs_what_it_is_sent_or_tries_is_bounded(name: str, lines_max: int) -> None:
    """Per minute; what was left out is counted, and our own lines are not among it."""
    clock, stream = HandClock(), io.StringIO()
    configure_logging("json", "info", stream)
    (handler,) = logging.getLogger().handlers
    (bound,) = handler.filters
    assert isinstance(bound, LibraryLines)
    bound._clock = clock
    for _ in range(1_000):
        logging.getLogger(name).error("Unexpected", exc_info=ValueError("x"))
    for _ in range(20):
        get_logger("broker.test").info("Topic created")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["logger"] for line in lines] == [name] * lines_max + ["broker.test"] * 20
    clock.seconds += 60
    stream.truncate(0)
    stream.seek(0)
    for _ in range(2):
        logging.getLogger(name).error("Unexpected")
    first, *others = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["left_out"] == 1_000 - lines_max
    assert len(others) == min(1, lines_max - 1)
    assert not any("left_out" in other for other in others)
