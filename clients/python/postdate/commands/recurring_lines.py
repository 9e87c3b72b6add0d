"""Recurring schedules as JSON lines: what `postdate recurring export` writes and `import` reads. Pure.

    {"name": "report", "cron": "0 9 * * MON-FRI", "time_zone": "Europe/Berlin", "payload": "daily"}

`name` and one of `cron`, `interval_ms` and `times` are required; what is left out has its default.
"""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import Any

from postdate.commands.output import payload_fields
from postdate.commands.values import parse_time
from postdate.recurring import RecurringOverdue, RecurringSchedule

_MS = timedelta(milliseconds=1)
_TEXTS = ("cron", "time_zone", "key")
_TIMES = ("start", "end")
_DURATIONS = ("interval", "jitter", "ttl")
_KNOWN = {
    "name",
    "times",
    "overdue",
    "paused",
    "payload",
    "payload_base64",
    "properties",
    *_TEXTS,
    *_TIMES,
    *(f"{name}_ms" for name in _DURATIONS),
}
_STATE = {"next_time", "next_deliver_at", "next_id"}
"""Shown beside a schedule by `get` and `list`; no part of one."""


def schedule_line(schedule: RecurringSchedule) -> str:
    """Return the line of a schedule, without its end; only what is not at its default."""
    fields: dict[str, Any] = {"name": schedule.name}
    fields |= {name: value for name in _TEXTS if (value := getattr(schedule, name))}
    if schedule.times:
        fields["times"] = [each.isoformat() for each in schedule.times]
    fields |= {name: value.isoformat() for name in _TIMES if (value := getattr(schedule, name)) is not None}
    fields |= {f"{name}_ms": value // _MS for name in _DURATIONS if (value := getattr(schedule, name))}
    if schedule.overdue is not RecurringOverdue.ALL:
        fields["overdue"] = schedule.overdue.value
    if schedule.paused:
        fields["paused"] = True
    if schedule.payload:
        fields |= payload_fields(schedule.payload)
    if schedule.properties:
        fields["properties"] = dict(schedule.properties)
    return json.dumps(fields)


def schedule_of_line(line: str) -> RecurringSchedule:
    """The schedule of a line; raises ValueError or TypeError."""
    fields = json.loads(line)
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise ValueError("it is no JSON object with a name")
    if unknown := fields.keys() - _KNOWN - _STATE:
        raise ValueError(f"it has the unknown field {min(unknown)!r}")
    if "payload" in fields and "payload_base64" in fields:
        raise ValueError("it has payload and payload_base64")
    _check_types(fields)
    payload = fields.get("payload", "").encode()
    if "payload_base64" in fields:
        payload = base64.b64decode(fields["payload_base64"], validate=True)
    given: dict[str, Any] = {name: fields[name] for name in _TEXTS if name in fields}
    given |= {name: parse_time(fields[name]) for name in _TIMES if name in fields}
    given |= {name: fields[f"{name}_ms"] * _MS for name in _DURATIONS if f"{name}_ms" in fields}
    return RecurringSchedule(
        name=fields["name"],
        times=tuple(map(parse_time, fields.get("times", ()))),
        overdue=RecurringOverdue(fields.get("overdue", "all")),
        paused=fields.get("paused", False),
        payload=payload,
        properties=fields.get("properties", {}),
        **given,
    )


def _check_types(fields: dict[str, Any]) -> None:
    for name in (*_TEXTS, "payload", "payload_base64"):
        if not isinstance(fields.get(name, ""), str):
            raise ValueError(f"{name} must be a string")
    for name in (f"{each}_ms" for each in _DURATIONS):
        if type(fields.get(name, 0)) is not int:  # a bool is an int as well
            raise ValueError(f"{name} must be a whole number of milliseconds")
    if not isinstance(fields.get("paused", False), bool):
        raise ValueError("paused must be true or false")
    properties = fields.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(each, str) for each in properties.values()):
        raise ValueError("properties must be an object of strings")
