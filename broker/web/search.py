"""Questions to the list of scheduled messages, and the times that forms hold. Pure; times of forms are UTC."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from broker.delayed.due_rows import Key
from broker.model import TIME_MS_MAX
from broker.settings import parse_duration_ms
from broker.topics.schedule_values import Cancel, Change, DueRange, Move
from broker.web.refusals import PageRefusal

_PLACE = re.compile(r"([0-9]{1,16})\.([0-9]{1,15})\.([0-9]{1,10})", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TEXT_MAX = 2_000
_DIGITS_MAX = 20


@dataclass(frozen=True, slots=True)
class Search:
    """A search among the scheduled messages, as the address of the page has it."""

    topic: str
    id: str
    key: str
    prefix: str
    start_ms: int  # 0: from now on
    end_ms: int  # 0: without an end
    after: Key | None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Search:
        """Refuses what is not a time, a range without time in it, and a place that is none."""
        texts = {name: query.get(name, "").strip() for name in ("topic", "id", "key", "prefix")}
        if any(len(text) > _TEXT_MAX for text in texts.values()):
            raise PageRefusal("That is too long to search for.")
        start_ms, end_ms = (parse_time_ms(query.get(name, "")) for name in ("from", "until"))
        if end_ms and end_ms <= start_ms:
            raise PageRefusal("The range ends before it begins.")
        return cls(**texts, start_ms=start_ms, end_ms=end_ms, after=_parse_place(query.get("after", "")))

    @property
    def due(self) -> DueRange:
        return DueRange(self.start_ms, self.end_ms or TIME_MS_MAX + 1)

    @property
    def is_narrowed(self) -> bool:
        """Return whether it is for less than all messages of a topic."""
        return bool(self.prefix or self.start_ms or self.end_ms)

    def fields(self) -> dict[str, str]:
        """The filter: what a change of all that match needs of it."""
        given = {
            "topic": self.topic,
            "prefix": self.prefix,
            "from": str(self.start_ms or ""),
            "until": str(self.end_ms or ""),
        }
        return {name: value for name, value in given.items() if value}

    def link(self, after: Key | None = None) -> str:
        """The list, or a page of it."""
        place = {"after": ".".join(map(str, after))} if after else {}
        return "/scheduled?" + urlencode(self.fields() | place)


def parse_time_ms(text: str) -> int:
    """Milliseconds, or a date and time as a form has it; 0 for nothing."""
    text = text.strip()
    if not text:
        return 0
    if text.isascii() and text.isdigit() and len(text) > 8:
        time_ms = int(text) if len(text) <= _DIGITS_MAX else 0
    else:
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise PageRefusal(f"{text[:60]!r} is not a time: write 2026-12-24 18:00, in UTC.") from None
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
        time_ms = (at - _EPOCH) // timedelta(milliseconds=1)
    if not 0 < time_ms <= TIME_MS_MAX:
        raise PageRefusal(f"{text[:60]!r} is before 1970 or too far away.")
    return time_ms


def form_time(time_ms: int) -> str:
    """A time as a form's field for date and time takes it; empty for none, or where dates end."""
    if not 0 < time_ms < 253_402_300_800_000:
        return ""
    at = datetime.fromtimestamp(time_ms // 1_000, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S")


def parse_change(form: Mapping[str, str]) -> Change:
    """The change that a form asks for: cancel it, send it now, or move it."""
    match form.get("action", ""):
        case "cancel":
            return Cancel()
        case "now":
            return Move(deliver_after_ms=0)
        case "move":
            return _parse_move(form.get("how", ""), form)
        case _:
            raise PageRefusal("Say what to do: cancel, send now or move.")


def _parse_move(how: str, form: Mapping[str, str]) -> Move:
    if how == "at":
        at_ms = parse_time_ms(form.get("at", ""))
        if not at_ms:
            raise PageRefusal("Say when the message is to be delivered.")
        return Move(deliver_at_ms=at_ms)
    text = form.get("by", "").strip()
    sign = -1 if text.startswith("-") else 1
    try:
        by_ms = sign * parse_duration_ms(text.lstrip("+-").strip())
    except ValueError:
        raise PageRefusal(f"{text[:60]!r} is not a duration: write 90s, 15m, 2h or 3d.") from None
    if abs(by_ms) > TIME_MS_MAX:
        raise PageRefusal("That is too far away.")
    if how == "after":
        if by_ms < 0:
            raise PageRefusal("A time from now on is not negative.")
        return Move(deliver_after_ms=by_ms)
    if how == "by":
        return Move(shift_ms=by_ms)
    raise PageRefusal("Say how to move: to a time, from now on, or later.")


def _parse_place(text: str) -> Key | None:
    if not text:
        return None
    match = _PLACE.fullmatch(text)
    if match is None:
        raise PageRefusal("The page begins at a place that is none.")
    return int(match[1]), int(match[2]), int(match[3])
