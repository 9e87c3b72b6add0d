"""`postdate import redis TOPIC KEY`: the members of a sorted set, each due at its score.

A member becomes a message with a schedule key made of its hash, and replaces what waits under that key. So a second run
gives a member that still waits no second message, and one whose score has changed its new time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import click

import postdate
from postdate._time import moment
from postdate.commands.completion import TOPIC
from postdate.commands.output import emit_one, emit_rows, plain, progress_bar
from postdate.commands.schedule import FROM, UNTIL
from postdate.commands.sending import send_patiently
from postdate.commands.settings import (
    EXIT_FAILED,
    EXIT_PARTLY,
    EXIT_UNREACHABLE,
    Command,
    CommandFailed,
    Settings,
    describe,
    run,
)
from postdate.commands.values import counted

_BATCH = 500
_SHOWN = 20
_SECONDS_BELOW = 1e11  # as seconds the year 5138, as milliseconds March 1973
_MS = {"s": 1000.0, "ms": 1.0}

# A member that the application has scheduled anew meanwhile stays. Seventeen digits name a score exactly.
_REMOVE = """
local removed = 0
for i = 1, #ARGV, 2 do
    local score = redis.call('ZSCORE', KEYS[1], ARGV[i])
    if score and tonumber(score) == tonumber(ARGV[i + 1]) then
        removed = removed + redis.call('ZREM', KEYS[1], ARGV[i])
    end
end
return removed
"""


@dataclass(frozen=True)
class _Mapping:
    """Settings of how a member becomes a message."""

    name: str  # of the sorted set
    unit: str
    payload_field: str | None
    key_field: str | None
    schedule_key_field: str | None

    def message(self, member: bytes, score: float) -> postdate.OutgoingMessage:
        """Raises ValueError if it cannot be one."""
        if not math.isfinite(score) or score < 0:
            raise ValueError(f"its score {score} is not a time")
        if (score >= _SECONDS_BELOW) != (self.unit == "ms"):
            other = "s" if self.unit == "ms" else "ms"
            raise ValueError(f"its score {score:.0f} looks like a time in {other}; if so, add --unit {other}")
        # Up: not early by a fraction of a millisecond either.
        deliver_at = moment(math.ceil(score * _MS[self.unit]))
        # Of the bytes, so that members that are no text have one too.
        schedule_key = f"redis/{self.name[:200]}/{hashlib.sha256(member).hexdigest()[:32]}"
        payload, key = member, ""
        if self.payload_field or self.key_field or self.schedule_key_field:
            fields = _fields(member)
            if self.payload_field:
                value = _of(fields, self.payload_field)
                payload = (value if isinstance(value, str) else json.dumps(value)).encode()
            if self.key_field:
                key = _text(fields, self.key_field)
            if self.schedule_key_field:
                schedule_key = _text(fields, self.schedule_key_field)
        return postdate.OutgoingMessage(payload, key=key, deliver_at=deliver_at, schedule_key=schedule_key)


@dataclass
class _Moved:
    """Counts of what became of the members."""

    stored: int = 0
    removed: int = 0
    outside_range: int = 0
    skipped_past: int = 0
    past: int = 0
    refused: list[dict[str, Any]] = field(default_factory=list)
    refused_count: int = 0
    members: dict[str, bytes] = field(default_factory=dict)
    """Of each schedule key that came from a member's own field: whose it is."""

    def is_first(self, schedule_key: str, member: bytes) -> bool:
        """Tell whether no other member has this key: its message would give way, and with --move be lost."""
        return self.members.setdefault(schedule_key, digest := hashlib.sha256(member).digest()[:16]) == digest

    def refuse(self, member: bytes, why: str) -> None:
        self.refused_count += 1
        if len(self.refused) < _SHOWN:
            self.refused.append({"member": member.decode(errors="backslashreplace")[:200], "why": why})


@click.command("redis", cls=Command, short_help="Import the members of a Redis sorted set.")
@click.argument("topic", type=TOPIC)
@click.argument("key", metavar="KEY")
@click.option(
    "--url",
    default="redis://127.0.0.1:6379/0",
    show_default=True,
    envvar="REDIS_URL",
    help="redis://HOST:PORT/DB, rediss:// with TLS, or unix:///PATH?db=DB; or set REDIS_URL.",
)
@click.option(
    "--unit", type=click.Choice(list(_MS)), default="s", show_default=True, help="Unit of the scores."
)
@click.option("--payload-field", metavar="NAME", help="Members are JSON objects; this field is the payload.")
@click.option("--key-field", metavar="NAME", help="Members are JSON objects; this field is the key.")
@click.option(
    "--schedule-key-field",
    metavar="NAME",
    help="Members are JSON objects; this field is the schedule key.  [default: a hash of the member]",
)
@FROM
@UNTIL
@click.option(
    "--skip-past",
    is_flag=True,
    help="Skip messages that are already due.  [default: they are delivered at once]",
)
@click.option("--move", is_flag=True, help="Remove members from Redis once the broker has them on disk.")
@click.option("--dry-run", is_flag=True, help="Check every member; send and remove nothing.")
@click.pass_obj
def import_redis(settings: Settings, /, topic: str, key: str, url: str, **options: Any) -> None:
    """Send the members of the sorted set KEY, whose scores are times, to TOPIC. Redis keeps them, unless --move.

    An interrupted import can be run again: a member that is pending in TOPIC is replaced, not duplicated. A member that
    has been delivered and is still in Redis is delivered once more.
    """
    mapping = _Mapping(
        key, options["unit"], options["payload_field"], options["key_field"], options["schedule_key_field"]
    )
    moved = run(_import(settings, topic, url, mapping, options))
    left_out = {
        "outside_range": moved.outside_range,
        "skipped_past_due": moved.skipped_past,
        "refused": moved.refused_count,
    }
    stored = "would_be_stored" if options["dry_run"] else "stored"
    counts = {"past_due": moved.past, stored: moved.stored, "removed": moved.removed}
    fields: dict[str, Any] = {"members": moved.stored + sum(left_out.values())} | counts | left_out
    if not fields["members"]:
        click.echo(plain(f"Redis has nothing under {key}"), err=True)
    if settings.output == "table":
        emit_one(settings, fields)
        if moved.refused:
            emit_rows(settings, moved.refused, ["member", "why"], "Refused")
    else:
        emit_one(settings, fields | {"refusals": moved.refused})
    if moved.refused_count:
        raise CommandFailed(
            f"{counted(moved.refused_count, 'member')} cannot be sent as messages, and stay in Redis",
            EXIT_PARTLY if moved.stored else EXIT_FAILED,
        )


async def _import(
    settings: Settings, topic: str, url: str, mapping: _Mapping, options: dict[str, Any]
) -> _Moved:
    try:
        from redis import asyncio as redis  # noqa: PLC0415 - an extra: nothing else needs it
        from redis import exceptions  # noqa: PLC0415
    except ImportError:
        raise CommandFailed(
            "this needs the redis package: pip install 'postdate[cli,redis]'", EXIT_FAILED
        ) from None
    moved = _Moved()
    try:
        source = redis.from_url(url)
    except ValueError as error:
        raise click.UsageError(f"--url: {error}") from None
    try:
        async with source, settings.client() as client:
            await client.topics.get(topic)  # a typo must not become a topic
            await _copy(settings, client, topic, source, mapping, options, moved)
    except exceptions.ConnectionError as error:
        raise CommandFailed(f"Redis cannot be reached: {error}", EXIT_UNREACHABLE) from None
    except exceptions.RedisError as error:
        raise CommandFailed(f"Redis: {error}", EXIT_FAILED) from None
    except postdate.PostdateError as error:
        if not moved.stored:
            raise
        text = f"{describe(error)}; {counted(moved.stored, 'member')} are stored, run it again to go on"
        raise CommandFailed(text, EXIT_PARTLY) from None
    return moved


async def _copy(
    settings: Settings,
    client: postdate.Client,
    topic: str,
    source: Any,
    mapping: _Mapping,
    options: dict[str, Any],
    moved: _Moved,
) -> None:
    remove = source.register_script(_REMOVE)
    total = await source.zcard(mapping.name)
    with progress_bar(settings) as progress:
        bar = progress.add_task("looked at" if options["dry_run"] else "imported", total=total)
        async with client.producer(topic, in_flight_max=1) as producer:
            async for members in _members(source, mapping.name):
                batch = _batch(members, mapping, options, moved)
                progress.update(bar, advance=len(members))
                if options["dry_run"]:
                    moved.stored += len(batch)
                    continue
                if not batch:
                    continue
                await _store(producer, batch, moved)
                if options["move"] and batch:
                    arguments = [part for member, score, _ in batch for part in (member, f"{score:.17g}")]
                    moved.removed += await remove(keys=[mapping.name], args=arguments)


_Member = tuple[bytes, float, postdate.OutgoingMessage]


async def _members(source: Any, name: str) -> AsyncIterator[list[tuple[bytes, float]]]:
    """All members that are there from the beginning to the end, in no order; some may come twice."""
    cursor = 0
    while True:
        cursor, members = await source.zscan(name, cursor, count=_BATCH)
        for start in range(0, len(members), _BATCH):
            yield members[start : start + _BATCH]
        if not cursor:
            return


def _batch(
    members: Sequence[tuple[bytes, float]], mapping: _Mapping, options: dict[str, Any], moved: _Moved
) -> list[_Member]:
    now = datetime.now(UTC)
    start, end = options["start"], options["end"]
    batch: dict[str, _Member] = {}
    for member, score in members:
        try:
            message = mapping.message(member, score)
        except ValueError as error:
            moved.refuse(member, str(error))
            continue
        due = message.deliver_at
        assert due is not None
        if (start is not None and due < start) or (end is not None and due >= end):
            moved.outside_range += 1
            continue
        if due <= now:
            moved.past += 1
            if options["skip_past"]:
                moved.skipped_past += 1
                continue
        if mapping.schedule_key_field and not moved.is_first(message.schedule_key, member):
            moved.refuse(member, f"another member has its schedule key, {message.schedule_key}")
            continue
        batch[message.schedule_key] = (member, score, message)
    return list(batch.values())


async def _store(producer: postdate.Producer, batch: list[_Member], moved: _Moved) -> None:
    """Store a batch; what alone is refused is taken out of it, and stays in Redis."""
    while batch:
        try:
            await send_patiently(producer, [message for *_, message in batch], replace=True)
        except postdate.InvalidRequest as error:
            place = _place(error)
            if place is None:
                raise
            member, *_ = batch.pop(place)
            moved.refuse(member, describe(error))
            continue
        moved.stored += len(batch)
        return


def _place(error: postdate.InvalidRequest) -> int | None:
    number = error.field.removeprefix("messages[").partition("]")[0]
    return int(number) if error.field.startswith("messages[") and number.isdecimal() else None


def _fields(member: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(member)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(
            "it is not a JSON object, which --payload-field and the other --...-field options require"
        )
    return fields


def _of(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"it has no field {name}")
    return fields[name]


def _text(fields: dict[str, Any], name: str) -> str:
    value = _of(fields, name)
    if not isinstance(value, str | int):
        raise ValueError(f"its field {name} is neither a string nor an integer")
    return str(value)
