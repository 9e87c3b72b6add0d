"""Templates, what they show values with, and the files beside them. Templates escape whatever they are given."""

from __future__ import annotations

import asyncio
import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

_HERE = Path(__file__).parent
_CONTENT_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_DATES_END_MS = 253_402_300_800_000
"""The year 10000, which dates do not reach; delivery times do."""
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control characters, those that turn or hide text among them; halves of characters; ends of lines and paragraphs."""
_JOINERS = "\u200c\u200d"
"""Unseen as well, but Persian is spelled with them, and people are made of them."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A stylesheet, script or picture."""

    body: bytes
    content_type: str


def load_static() -> dict[str, StaticFile]:
    """All files of `static/`, by name. Blocks."""
    return {
        path.name: StaticFile(path.read_bytes(), _CONTENT_TYPES[path.suffix])
        for path in sorted((_HERE / "static").iterdir())
        if path.suffix in _CONTENT_TYPES
    }


class Renderer:
    """Makes HTML of templates. Making the first one blocks: it compiles all of them."""

    def __init__(self) -> None:
        self._environment = _templates()

    async def render(self, template: str, values: Mapping[str, object]) -> str:
        """The HTML; made in a thread, so the values must be nobody's live state."""
        return await asyncio.to_thread(self._environment.get_template(template).render, values)


@cache
def _templates() -> jinja2.Environment:
    """Return the templates, compiled once: a node that takes over has had the pages of a standby."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        auto_reload=False,
        cache_size=-1,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    stamp = hashlib.sha256(b"".join(file.body for file in load_static().values())).hexdigest()[:12]
    templates.globals["static_stamp"] = stamp
    templates.filters |= {
        "compact": compact,
        "number": number,
        "rate": rate,
        "size": size,
        "duration": duration,
        "seconds": lambda value: duration(value * 1000),
        "moment": moment,
        "ago": ago,
        "percent": percent,
        "plural": plural,
        "visible": visible,
        "visible_lines": lambda text: visible(text, "\n\r\t"),
    }
    for name in templates.list_templates(extensions=["html"]):
        templates.get_template(name)
    return templates


def number(value: float) -> str:
    """12,345 or, below 10 and not whole, 1.5."""
    return f"{value:,.1f}" if value < 10 and value != int(value) else f"{value:,.0f}"


def rate(value: float) -> str:
    """As `number`, with as many places as a small rate needs."""
    return number(value) if value >= 1 or not value else f"{value:.2g}" if value >= 0.001 else "< 0.001"


def compact(value: int) -> str:
    """As `number`, in seven characters at most: what stands beside a chart has room for no more."""
    for unit, suffix in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if value >= unit:
            return f"{value / unit:.4g} {suffix}"
    return number(value)


def size(value: float) -> str:
    """Bytes in the greatest unit that leaves a number of at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(value_ms: float) -> str:
    """The two greatest units of a duration in milliseconds."""
    if value_ms < 1_000:
        return f"{value_ms:.1f} ms" if 0 < value_ms < 10 else f"{value_ms:.0f} ms"
    if value_ms < 60_000:
        return f"{value_ms / 1_000:.1f} s"
    rest = int(value_ms // 1_000)
    parts: list[tuple[int, str]] = []
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, seconds)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count:,} {unit}" for count, unit in parts[:2] if count)


def moment(time_ms: int, precision: str = "seconds") -> Markup:
    """A time as `<time>`, in UTC; the script can turn it into local time."""
    if not 0 <= time_ms < _DATES_END_MS:
        return escape(f"{time_ms:,} ms after 1970")
    at = datetime.fromtimestamp(time_ms / 1000, UTC)
    shown = at.isoformat(" ", precision).removesuffix("+00:00")
    machine = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return Markup('<time datetime="{}" data-precision="{}">{}<span class="zone"> UTC</span></time>').format(
        machine, precision, shown
    )


def ago(time_ms: int, now_ms: int) -> str:
    """Return how far a time lies from now: "in 3 h 2 min", "5 s ago"."""
    distance = abs(time_ms - now_ms)
    if distance < 1_000:
        return "now"
    shown = f"{distance // 1_000} s" if distance < 60_000 else duration(distance)
    return f"in {shown}" if time_ms > now_ms else f"{shown} ago"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def plural(count: int, one: str, many: str = "") -> str:
    """`1 message`, `2,000 messages`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def visible(text: str, kept: str = "") -> str:
    """A text that somebody sent, with what is no character to be seen written as `\\u202e`, but for what is `kept`.

    What turns the direction of text, or hides in it, could make one key look like another.
    """
    if text.isprintable():
        return text
    kept += _JOINERS
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in _UNSEEN and character not in kept
        else character
        for character in text
    )
