"""Logs: a constant sentence plus fields, over the standard library's logging.

    log = get_logger(__name__)
    log.info("Topic created", topic=name)

The sentence is constant, so that it can be searched and counted; what varies is a field. Values come from
clients, so they are escaped, and cut when long: nobody can forge a line through a name. Bytes are never
shown, only counted, and an object of a type that is not known here shows its type alone: it might hold a
payload.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import PurePath
from typing import TextIO

from broker.model import Position
from broker.runtime.clock import Clock, SystemClock

TEXT_CHARACTERS_MAX = 1_000
LIST_ITEMS_MAX = 20

LIBRARY_LINES_MAX = 10
"""Lines that a library may log in a minute, but for those of _ONE_LINE."""

_MINUTE_NS = 60_000_000_000
_ONE_LINE = frozenset(("opentelemetry", "urllib3"))
"""Those that log each attempt to reach a receiver of spans that is away, which is no concern of the broker's work."""
_LIBRARIES = frozenset(("aiohttp", "asyncio", "grpc")) | _ONE_LINE
"""Those that log what strangers send, each with a traceback, or what they try again and again."""

Scalar = str | int | float | bool | None
Shown = Scalar | list[Scalar]

_FIELDS = "fields"
_PLAIN = re.compile(r"[A-Za-z0-9._~:/+\[\]-]+", re.ASCII)
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


class Log:
    """Writes sentences with fields for one module."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, sentence: str, /, **fields: object) -> None:
        self._write(logging.DEBUG, sentence, fields, None)

    def info(self, sentence: str, /, **fields: object) -> None:
        self._write(logging.INFO, sentence, fields, None)

    def warning(self, sentence: str, /, **fields: object) -> None:
        self._write(logging.WARNING, sentence, fields, None)

    def error(self, sentence: str, /, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """With `exc_info` the traceback is logged too: give it for bugs, not for what was to be expected."""
        self._write(logging.ERROR, sentence, fields, exc_info)

    def _write(
        self, level: int, sentence: str, fields: Mapping[str, object], error: BaseException | None
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, sentence, extra={_FIELDS: fields}, exc_info=error, stacklevel=3)


class Notice:
    """Keeps what goes on failing from filling the log: it is told at once, and then once a minute."""

    __slots__ = ("_again_ns", "_clock")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._again_ns: int | None = None

    def is_time(self) -> bool:
        now_ns = self._clock.monotonic_ns()
        if self._again_ns is not None and now_ns < self._again_ns:
            return False
        self._again_ns = now_ns + _MINUTE_NS
        return True


class CountedNotice:
    """Keeps what clients can repeat from filling the log: it is told at once, and then once a minute how often."""

    __slots__ = ("_count", "_notice")

    def __init__(self, clock: Clock) -> None:
        self._notice = Notice(clock)
        self._count = 0

    def note(self, count: int = 1) -> int:
        """Count some more; return how many there were since the last line if it is time for one, else 0."""
        self._count += count
        if not self._notice.is_time():
            return 0
        told, self._count = self._count, 0
        return told


def get_logger(name: str) -> Log:
    """The log of a module; `name` is its `__name__`."""
    return Log(logging.getLogger(name))


def configure_logging(
    log_format: str, log_level: str, stream: TextIO | None = None, *, shard: int | None = None
) -> None:
    """Send all logs, those of libraries too, to `stream` (stderr). Values as in `BrokerConfig`.

    `shard` stands in each line of a process that has one.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(LibraryLines(SystemClock()))
    if shard is not None:
        handler.addFilter(_ShardOfLines(shard))
    logging.basicConfig(level=_LEVELS[log_level], handlers=[handler], force=True)


def set_log_level(log_level: str) -> None:
    """Log from this level on. Values as in `BrokerConfig`."""
    logging.getLogger().setLevel(_LEVELS[log_level])


@dataclass(slots=True)
class _Minute:
    began_ns: int
    lines: int = 0
    left_out: int = 0


class LibraryLines(logging.Filter):
    """Bounds the lines of a library in a minute; the first one after that tells how many were left out."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._minutes: dict[str, _Minute] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        library = record.name.partition(".")[0]
        if library not in _LIBRARIES:
            return True
        now_ns = self._clock.monotonic_ns()
        minute = self._minutes.setdefault(library, _Minute(now_ns))
        if now_ns - minute.began_ns >= _MINUTE_NS:
            minute.began_ns, minute.lines = now_ns, 0
        if minute.lines >= (1 if library in _ONE_LINE else LIBRARY_LINES_MAX):
            minute.left_out += 1
            return False
        minute.lines += 1
        if minute.left_out:
            setattr(record, _FIELDS, {**_fields(record), "left_out": minute.left_out})
            minute.left_out = 0
        return True


class _ShardOfLines(logging.Filter):
    """Adds the shard to the fields of each line."""

    def __init__(self, shard: int) -> None:
        super().__init__()
        self._shard = shard

    def filter(self, record: logging.LogRecord) -> bool:
        setattr(record, _FIELDS, {"shard": self._shard, **_fields(record)})
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Shown] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        for key, value in _fields(record).items():
            entry[key if key not in entry else f"{key}_"] = show(value)
        if (trace := _trace(record)) is not None:
            entry["exception"] = trace
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """One line for people; a traceback follows indented, so that none of it passes for a line."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_time(record)} {record.levelname:<7} {_escape(_cut(record.getMessage()))}"]
        parts += [f"{key}={_quote(show(value))}" for key, value in _fields(record).items()]
        line = "  ".join([parts[0], " ".join(parts[1:])]) if len(parts) > 1 else parts[0]
        if (trace := _trace(record)) is not None:
            line += "".join(f"\n    {_escape(part)}" for part in trace.splitlines())
        return line


def show(value: object) -> Shown:
    """Return what of a value may be seen in a log."""
    if isinstance(value, list | tuple) and not isinstance(value, Position):
        items = [_show_one(item) for item in value[:LIST_ITEMS_MAX]]
        return [*items, f"... {len(value)} in all"] if len(value) > LIST_ITEMS_MAX else items
    return _show_one(value)


def _show_one(value: object) -> Scalar:
    match value:
        case Enum():
            return value.name
        case None | bool():
            return value
        case int():
            # Readers of JSON differ on numbers beyond 64 bits, and Python does not print huge ones.
            return value if value.bit_length() <= 64 else "<huge int>"
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return _cut(value)
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
        case Position():
            return f"{value.ledger_id}:{value.entry_id}"
        case PurePath():
            return _cut(str(value))
        case BaseException():
            return _cut(f"{type(value).__name__}: {value}")
        case _:
            # NumPy's scalars among others.
            item = getattr(value, "item", None)
            if callable(item) and getattr(value, "ndim", None) == 0:
                return _show_one(item())
            return f"<{type(value).__name__}>"


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, _FIELDS, None)
    return fields if isinstance(fields, Mapping) else {}


def _trace(record: logging.LogRecord) -> str | None:
    if not record.exc_info or record.exc_info[1] is None:
        return None
    return "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")


def _time(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[:TEXT_CHARACTERS_MAX] + "..."


def _escape(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _quote(value: Shown) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value)
