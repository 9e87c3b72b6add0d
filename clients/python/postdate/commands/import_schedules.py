"""`postdate import crontab` and `postdate import celery-beat`: recurring schedules from elsewhere.

Each becomes a schedule of a topic whose messages say what to do: the command of a crontab, or the task of Celery with
its arguments. Names follow from these, so that a second run replaces what the first one put.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, TextIO

import click

import postdate
from postdate.commands.completion import TOPIC
from postdate.commands.recurring import put_all
from postdate.commands.settings import EXIT_FAILED, Command, CommandFailed, Settings

_MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_VARIABLE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_ZONES = {"CRON_TZ", "TZ"}
_NOT_NAME = re.compile(r"[^A-Za-z0-9._~-]+")
_NAME_CHARACTERS = 60
_PERIODS = {
    "days": timedelta(days=1),
    "hours": timedelta(hours=1),
    "minutes": timedelta(minutes=1),
    "seconds": timedelta(seconds=1),
    "microseconds": timedelta(microseconds=1),
}
_SHORTEST = timedelta(seconds=1)
_DROPPED = (
    "queue",
    "exchange",
    "routing_key",
    "headers",
    "priority",
    "expires",
    "expire_seconds",
    "start_time",
)
"""Fields of a periodic task that a schedule has no place for."""
_EMPTY = (None, "", "{}", 0)
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Put nothing; print what would be put.")
_ZONE = click.option("--time-zone", default="UTC", show_default=True, help="Zone where the file names none.")


@click.command("crontab", cls=Command, short_help="Import a crontab as recurring schedules.")
@click.argument("topic", type=TOPIC)
@click.argument("source", type=click.File("r"), metavar="FILE")
@_ZONE
@click.option("--system", is_flag=True, help="The sixth column is a user, as in /etc/crontab.")
@_DRY_RUN
@click.pass_obj
def crontab(
    settings: Settings, topic: str, source: TextIO, time_zone: str, system: bool, dry_run: bool
) -> None:
    """Put each line of a crontab (`crontab -l | postdate import crontab TOPIC -`) as a recurring schedule of TOPIC.

    The payload of its messages is the command; CRON_TZ or TZ in the file is the zone of the lines after it. Other
    variables and @reboot are left out, and named.
    """
    put_all(settings, topic, crontab_schedules(source, time_zone, system=system), dry_run=dry_run)


def crontab_schedules(
    lines: Iterable[str], zone: str, *, system: bool = False
) -> list[postdate.RecurringSchedule]:
    """Return the schedules of a crontab."""
    schedules = []
    names: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if (variable := _VARIABLE.fullmatch(text)) is not None:
            if variable[1] in _ZONES:
                zone = variable[2].strip("\"'") or "UTC"
            else:
                click.echo(f"line {number:,}: the variable {variable[1]} is left out", err=True)
            continue
        fields = 1 if text.startswith("@") else 5
        parts = text.split(None, fields + system)
        if len(parts) != fields + system + 1:
            raise CommandFailed(f"line {number:,}: it has no command", EXIT_FAILED)
        cron, command = " ".join(parts[:fields]), parts[-1]
        if cron == "@reboot":
            click.echo(f"line {number:,}: @reboot is left out", err=True)
            continue
        if cron.startswith("@"):
            if cron.lower() not in _MACROS:
                raise CommandFailed(f"line {number:,}: {cron} is not known", EXIT_FAILED)
            cron = _MACROS[cron.lower()]
        schedules.append(
            postdate.RecurringSchedule(
                name=_name(command, names), cron=cron, time_zone=zone, payload=command.encode()
            )
        )
    return schedules


@click.command("celery-beat", cls=Command, short_help="Import periodic tasks of django-celery-beat.")
@click.argument("topic", type=TOPIC)
@click.argument("source", type=click.File("r"), metavar="FILE")
@_ZONE
@_DRY_RUN
@click.pass_obj
def celery_beat(settings: Settings, topic: str, source: TextIO, time_zone: str, dry_run: bool) -> None:
    """Put the periodic tasks of django-celery-beat as recurring schedules of TOPIC.

    FILE is what `python manage.py dumpdata django_celery_beat` writes; - is stdin. The payload is a JSON object with
    task, args and kwargs. Tasks that are not enabled are put paused. Left out and named are solar and one-off tasks,
    intervals below a second, and crontabs that restrict both day of month and day of week: in Celery both must match.
    Fields that a schedule does not have are named, such as expires, start_time and queue.
    """
    try:
        dump = json.load(source)
    except ValueError as error:  # of JSON, and of UTF-8
        raise CommandFailed(f"{source.name}: this is no JSON: {error}", EXIT_FAILED) from error
    try:
        schedules = list(celery_schedules(dump, time_zone))
    except ValueError as error:
        text = f"{source.name}: this is no dump of django_celery_beat: {error}"
        raise CommandFailed(text, EXIT_FAILED) from error
    put_all(settings, topic, schedules, dry_run=dry_run)


def celery_schedules(dump: Any, zone: str) -> Iterator[postdate.RecurringSchedule]:
    """Return the schedules of a dump of django-celery-beat. Raises ValueError, which names the entry that is wrong."""
    if not isinstance(dump, list):
        raise ValueError("it is not a list")
    rows = {}
    for number, row in enumerate(dump, 1):
        try:
            rows[row["model"].lower(), row["pk"]] = row["fields"]
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"entry {number:,} is no object with model, pk and fields") from None
    for (model, key), task in rows.items():
        if model == "django_celery_beat.periodictask":
            try:
                schedule = _celery_schedule(task, rows, zone)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{model} {key}: {_wrong(error)}") from error
            if schedule is not None:
                yield schedule


def _celery_schedule(
    task: dict[str, Any], rows: dict[tuple[str, Any], dict[str, Any]], zone: str
) -> postdate.RecurringSchedule | None:
    """The schedule of a periodic task; None if there is none, which is said."""
    if task["task"] == "celery.backend_cleanup":
        return None
    when = _when(task, rows, zone)
    if isinstance(when, str):
        click.echo(f"{task['name']}: {when} is left out", err=True)
        return None
    if dropped := [name for name in _DROPPED if task.get(name) not in _EMPTY]:
        click.echo(f"{task['name']}: put without {', '.join(dropped)}", err=True)
    content = {
        "task": task["task"],
        "args": json.loads(task.get("args") or "[]"),
        "kwargs": json.loads(task.get("kwargs") or "{}"),
    }
    return postdate.RecurringSchedule(
        name=_name(task["name"], None),
        paused=not task.get("enabled", True),
        payload=json.dumps(content).encode(),
        **when,
    )


def _wrong(error: Exception) -> str:
    """Say what an entry lacks: a field, or another entry that it refers to."""
    if not isinstance(error, KeyError):
        return str(error)
    what = error.args[0]
    return f"there is no {' '.join(map(str, what)) if isinstance(what, tuple) else what}"


def _when(
    task: dict[str, Any], rows: dict[tuple[str, Any], dict[str, Any]], zone: str
) -> dict[str, Any] | str:
    """Fields of a schedule that recurs as a periodic task does; or what the task is, if no schedule is like that."""
    if task.get("crontab") and not task.get("one_off"):
        fields = rows["django_celery_beat.crontabschedule", task["crontab"]]
        names = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
        parts = {name: str(fields[name]).replace(" ", "") for name in names}
        if not any(parts[name].startswith("*") for name in ("day_of_month", "day_of_week")):
            return "a crontab of days that must match both day_of_month and day_of_week"
        return {"cron": " ".join(parts.values()), "time_zone": fields.get("timezone") or zone}
    if task.get("interval") and not task.get("one_off"):
        fields = rows["django_celery_beat.intervalschedule", task["interval"]]
        if fields["period"] not in _PERIODS:
            return f"an interval in {fields['period']}"
        interval = fields["every"] * _PERIODS[fields["period"]]
        return {"interval": interval} if interval >= _SHORTEST else "an interval below a second"
    return "a solar or one-off task"


def _name(text: str, seen: Counter[str] | None) -> str:
    """A name that follows from a text; `seen` counts those that had the same text."""
    plain = _NOT_NAME.sub("-", text).strip("-._~")[:_NAME_CHARACTERS].strip("-._~")
    if seen is None and plain == text:
        return plain
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = f"{plain}-{digest}" if plain else digest
    if seen is not None:
        seen[name] += 1
        if seen[name] > 1:
            return f"{name}-{seen[name]}"
    return name
