"""Recurring schedules with a real broker: over gRPC, by the SDK, by the command; refusals, and imports from elsewhere."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

import postdate
from broker.errors import InvalidRequest
from broker.model import DELIVER_AT_MS_MAX
from broker.rpc.recurring import RecurringCalls
from broker.rpc.request_ids import RequestIds
from broker.storage.recurring_values import Definition, RecurringRule
from broker.topics.recurring_schedules import RecurringSchedules
from broker.topics.topic import Topic
from postdate import cli
from postdate.commands.import_schedules import celery_schedules, crontab_schedules
from postdate.commands.recurring_lines import schedule_line, schedule_of_line
from postdate_api.v1 import message_pb2, schedule_pb2
from tests.wire.conftest import Wire, now_ms, refused, within

Run = Callable[..., Awaitable[tuple[int, str, str]]]
DAY_MS = 86_400_000


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address, retry_for=timedelta(seconds=5)) as connected:
        yield connected


@pytest.fixture
def run(wire: Wire, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("POSTDATE_ADDRESS", wire.server.grpc_address)

    async def run_one(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = await asyncio.to_thread(cli.run, arguments)
        return (code, *capfd.readouterr())

    return run_one


async def put(wire: Wire, **fields: Any) -> Any:
    schedule = schedule_pb2.RecurringSchedule(**{"name": "s", **fields})
    request = schedule_pb2.PutRecurringRequest(topic="t", schedule=schedule)
    return await within(wire.schedule.PutRecurring(request))


async def test_a_schedule_over_grpc(wire: Wire):
    answer = await put(
        wire, cron="0 9 * * *", time_zone="Europe/Berlin", message=message_pb2.Message(key="k")
    )
    assert answer.created and answer.state.schedule.message.key == "k"
    assert not (
        await put(wire, cron="0 9 * * *", time_zone="Europe/Berlin", message=answer.state.schedule.message)
    ).created
    due_ms = answer.state.next_time_ms
    assert now_ms() < due_ms <= now_ms() + DAY_MS
    key = schedule_pb2.GetScheduledRequest(topic="t", schedule_key=f"schedule/s/{due_ms}")
    while True:  # it is stored a moment later
        got = await within(wire.schedule.GetRecurring(schedule_pb2.GetRecurringRequest(topic="t", name="s")))
        if got.state.HasField("next_id"):
            break
    pending = await within(wire.schedule.GetScheduled(key))
    assert (pending.scheduled.id, pending.scheduled.deliver_at_ms) == (got.state.next_id, due_ms)
    for name in ("a", "b", "c", "s2"):
        await put(wire, name=name, interval_ms=3_600_000)
    names, token = [], ""
    while True:
        request = schedule_pb2.ListRecurringRequest(topic="t", page_size=2, page_token=token)
        page = await within(wire.schedule.ListRecurring(request))
        names += [each.schedule.name for each in page.states]
        if not (token := page.next_page_token):
            break
    assert names == ["a", "b", "c", "s", "s2"]
    request = schedule_pb2.ListRecurringRequest(topic="t", name_prefix="s")
    assert [each.schedule.name for each in (await within(wire.schedule.ListRecurring(request))).states] == [
        "s",
        "s2",
    ]
    await within(wire.schedule.DeleteRecurring(schedule_pb2.DeleteRecurringRequest(topic="t", name="s")))
    assert (await refused(wire.schedule.GetScheduled(key))).reason == "SCHEDULED_NOT_FOUND"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"name": "a/b", "interval_ms": 1_000}, "INVALID_NAME"),
        ({}, "NO_RECURRENCE"),
        ({"cron": "* * *"}, "INVALID_CRON"),
        ({"cron": "0 " * 200}, "INVALID_CRON"),
        ({"cron": ""}, "INVALID_CRON"),
        ({"cron": "* * * * *", "time_zone": "Europe/Bonn"}, "INVALID_TIME_ZONE"),
        ({"interval_ms": 999}, "INVALID_INTERVAL_MS"),
        ({"times": schedule_pb2.RecurringTimes(times_ms=[2, 1])}, "INVALID_TIMES"),
        ({"times": schedule_pb2.RecurringTimes()}, "INVALID_TIMES"),
        ({"times": schedule_pb2.RecurringTimes(times_ms=[1, 2])}, "NO_OCCURRENCE"),
        ({"interval_ms": 1_000, "start_ms": -1}, "INVALID_TIME_RANGE"),
        ({"interval_ms": 1_000, "start_ms": 9, "end_ms": 9}, "INVALID_TIME_RANGE"),
        ({"interval_ms": 1_000, "end_ms": 9}, "NO_OCCURRENCE"),
        ({"interval_ms": 1_000, "jitter_ms": DAY_MS + 1}, "INVALID_JITTER_MS"),
        ({"interval_ms": 1_000, "overdue_action": 9}, "INVALID_OVERDUE_ACTION"),
        (
            {"interval_ms": 1_000, "message": message_pb2.Message(deliver_at_ms=5)},
            "INVALID_RECURRING_MESSAGE",
        ),
        (
            {"interval_ms": 1_000, "message": message_pb2.Message(schedule_key="k")},
            "INVALID_RECURRING_MESSAGE",
        ),
        ({"interval_ms": 1_000, "message": message_pb2.Message(payload=bytes(2 << 20))}, "PAYLOAD_TOO_LARGE"),
        (
            {"interval_ms": 1_000, "message": message_pb2.Message(payload=bytes(64 << 10))},
            "RECURRING_MESSAGE_TOO_LARGE",
        ),
    ],
)
async def test_what_is_refused(wire: Wire, fields: dict[str, Any], reason: str):
    assert (await refused(put(wire, **fields))).reason == reason


async def test_the_same_again_changes_nothing_also_when_it_is_over(wire: Wire, run: Run, tmp_path: Path):
    await put(wire, name="daily", interval_ms=DAY_MS)
    topic = wire.broker.registry.topic("t")
    over = Definition(RecurringRule(times_ms=(1_000, 2_000)), b"")
    await wire.broker.recurring.put(topic, "a-list", over)
    times = schedule_pb2.RecurringTimes(times_ms=[1_000, 2_000])
    answer = await put(wire, name="a-list", times=times)
    assert not answer.created and not answer.state.next_time_ms
    others = schedule_pb2.RecurringTimes(times_ms=[1_000, 2_001])
    assert (await refused(put(wire, name="a-list", times=others))).reason == "NO_OCCURRENCE"
    # A put leaves the pause as it is, so that one which differs in nothing else changes nothing.
    await wire.broker.recurring.pause(topic, "a-list", paused=True)
    assert (await put(wire, name="a-list", times=times)).state.schedule.paused
    path = tmp_path / "schedules.jsonl"
    assert (await run("recurring", "export", "t", "--file", str(path)))[0] == 0
    code, out, err = await run("recurring", "import", "t", str(path), "-o", "json")
    assert (code, [each["name"] for each in json.loads(out)]) == (0, ["a-list", "daily"]), err
    for options in ((), ("--dry-run",)):
        code, out, err = await run("recurring", "import", "other", str(path), "-o", "json", *options)
        assert (code, [each["name"] for each in json.loads(out)]) == (0, ["daily"])
        assert "a-list: it has no occurrence after now" in err


async def test_calls_about_what_is_not_there_and_spans_that_are_none(wire: Wire):
    await wire.produce("t", b"x")
    for method, kind in (("Get", "GetRecurringRequest"), ("Delete", "DeleteRecurringRequest")):
        request = getattr(schedule_pb2, kind)(topic="t", name="no")
        assert (
            await refused(getattr(wire.schedule, f"{method}Recurring")(request))
        ).reason == "RECURRING_NOT_FOUND"
    future = schedule_pb2.BackfillRecurringRequest(topic="t", name="no", start_ms=1, end_ms=now_ms() + DAY_MS)
    assert (await refused(wire.schedule.BackfillRecurring(future))).reason == "INVALID_TIME_RANGE"
    many = schedule_pb2.PreviewRecurringRequest(topic="t", name="no", count=1_001)
    assert (await refused(wire.schedule.PreviewRecurring(many))).reason == "INVALID_COUNT"
    nothing = schedule_pb2.PreviewRecurringRequest(topic="t")
    assert (await refused(wire.schedule.PreviewRecurring(nothing))).reason == "INVALID_SELECTOR"


async def test_a_zone_that_has_vanished_is_told(wire: Wire):
    await put(wire, name="hourly", interval_ms=3_600_000)
    topic = wire.broker.registry.topic("t")
    for name, rule in (
        ("cron", RecurringRule(cron="0 9 * * *", zone="Europe/Bonn")),
        ("interval", RecurringRule(interval_ms=DAY_MS, zone="Europe/Bonn")),
    ):
        await wire.broker.recurring.put(topic, name, Definition(rule, b""))
    preview = await refused(
        wire.schedule.PreviewRecurring(schedule_pb2.PreviewRecurringRequest(topic="t", name="cron"))
    )
    backfill = await refused(
        wire.schedule.BackfillRecurring(
            schedule_pb2.BackfillRecurringRequest(topic="t", name="cron", start_ms=1, end_ms=DAY_MS)
        )
    )
    for refusal in (preview, backfill):
        assert (refusal.code, refusal.reason, refusal.metadata["time_zone"]) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "RECURRING_NOT_READABLE",
            "Europe/Bonn",
        )
    of_interval = schedule_pb2.PreviewRecurringRequest(topic="t", name="interval", after_ms=1)
    answer = await within(wire.schedule.PreviewRecurring(of_interval))
    assert answer.occurrences[0].wall_time == "1970-01-02T00:00:00+00:00"
    listed = await within(wire.schedule.ListRecurring(schedule_pb2.ListRecurringRequest(topic="t")))
    assert len(listed.states) == 3


async def test_the_last_time_there_is_ahead_of_utc(wire: Wire):
    times = schedule_pb2.RecurringTimes(times_ms=[DELIVER_AT_MS_MAX])
    await put(wire, times=times, time_zone="Pacific/Kiritimati")
    request = schedule_pb2.PreviewRecurringRequest(topic="t", name="s")
    answer = await within(wire.schedule.PreviewRecurring(request))
    assert [each.wall_time for each in answer.occurrences] == ["9999-12-31T23:59:59.999+00:00"]


async def test_a_long_preview_lets_others_run(wire: Wire):
    _, preview = RecurringCalls(wire.broker, RequestIds(wire.broker.clock)).calls()["PreviewRecurring"]
    schedule = schedule_pb2.RecurringSchedule(name="s", cron="* * * * * *")
    request = schedule_pb2.PreviewRecurringRequest(topic="t", schedule=schedule, count=1_000)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(count())
    await preview(request)
    other.cancel()
    assert turns >= 3


async def test_a_repeated_trigger_is_answered_and_stores_nothing(wire: Wire):
    await put(wire, interval_ms=DAY_MS)
    request = schedule_pb2.TriggerRecurringRequest(topic="t", name="s", request_id="once")
    first = await within(wire.schedule.TriggerRecurring(request))
    assert await within(wire.schedule.TriggerRecurring(request)) == first


async def test_the_way_of_a_schedule_by_the_sdk(client: postdate.Client):
    start = datetime.now(UTC).replace(microsecond=0)
    schedule = postdate.RecurringSchedule(
        name="tick",
        interval=timedelta(seconds=1),
        payload=b"tick",
        properties={"a": "b"},
        ttl=timedelta(hours=1),
        overdue=postdate.RecurringOverdue.ONE,
        jitter=timedelta(milliseconds=5),
    )
    async with client.subscribe("t", "all") as subscription:
        state = await client.recurring.put("t", schedule)
        assert state.schedule == schedule and state.next_time is not None
        previewed = await client.recurring.preview("t", "tick", count=2, after=start)
        assert [each.time for each in previewed] == [
            start + timedelta(seconds=1),
            start + timedelta(seconds=2),
        ]
        async for message in subscription:
            assert (message.payload, message.properties["postdate.schedule.name"]) == (b"tick", "tick")
            await message.ack()
            break
        paused = await client.recurring.pause("t", "tick")
        assert paused.schedule.paused and paused.next_time is None
        assert (await client.recurring.put("t", schedule)).schedule.paused  # which a deployment does not undo
        await client.recurring.trigger("t", "tick")
        hours = await client.recurring.backfill(
            "t", "tick", start - timedelta(seconds=30), start, dry_run=True
        )
        assert len(hours) == 30
        assert (await client.recurring.resume("t", "tick")).next_time is not None
        assert [each.schedule.name async for each in client.recurring.list("t")] == ["tick"]
        assert (await client.recurring.get("t", "tick")).schedule == schedule
        await client.recurring.delete("t", "tick")
        with pytest.raises(postdate.NotFound):
            await client.recurring.get("t", "tick")
    with pytest.raises(ValueError, match="exactly one"):
        await client.recurring.put("t", postdate.RecurringSchedule(name="x"))


async def test_the_examples_of_the_manual_run(client: postdate.Client):
    page = (Path(__file__).parents[2] / "docs/recurring.md").read_text()
    names: dict[str, Any] = {"client": client, "postdate": postdate}
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) >= 2
    for code in examples:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        outcome = eval(compile(code, "docs/recurring.md", "exec", flags=flags), names)
        if inspect.isawaitable(outcome):
            await within(outcome)
    assert (len(names["times"]), len(names["occurrences"])) == (6, 5)
    assert [each.schedule.name async for each in client.recurring.list("reports")] == ["daily"]


async def test_a_backfill_of_nothing_is_one_line(client: postdate.Client, run: Run):
    schedule = postdate.RecurringSchedule(name="yearly", cron="0 0 1 1 *", payload=b"x")
    await client.recurring.put("t", schedule)
    span = ("--from", "2026-02-01T00:00:00Z", "--until", "2026-02-02T00:00:00Z")
    assert await run("recurring", "backfill", "t", "yearly", *span) == (0, "0 occurrences\n", "")
    code, out, _ = await run("recurring", "backfill", "t", "yearly", *span, "-o", "json")
    assert (code, json.loads(out)) == (0, [])


async def test_the_command_puts_shows_and_moves_schedules(client: postdate.Client, run: Run, tmp_path: Path):
    code, out, _ = await run(
        *("recurring", "put", "t", "daily", "--cron", "0 9 * * *", "--time-zone", "Europe/Berlin"),
        *("--payload", "go", "--property", "a=b", "-o", "json"),
    )
    assert (code, json.loads(out)["properties"]) == (0, {"a": "b"})
    code, out, _ = await run(
        "recurring", "put", "t", "hourly", "--every", "1h", "--overdue", "none", "-o", "json"
    )
    assert (code, json.loads(out)["overdue"]) == (0, "none")
    code, out, _ = await run("recurring", "list", "t")
    assert code == 0 and "every 1h" in out and "Europe/Berlin" in out
    code, out, _ = await run("recurring", "preview", "t", "daily", "--count", "2", "-o", "jsonl")
    assert code == 0 and [json.loads(line)["time"][11:16] for line in out.splitlines()] == ["09:00", "09:00"]
    code, out, _ = await run("recurring", "preview", "t", "--cron", "0 0 1 * *", "-o", "json")
    assert (code, len(json.loads(out))) == (0, 10)
    path = tmp_path / "schedules.jsonl"
    assert (await run("recurring", "export", "t", "--file", str(path)))[0] == 0
    assert (await run("recurring", "import", "other", str(path), "--dry-run"))[0] == 0
    assert (await run("recurring", "import", "other", str(path)))[0] == 0
    before = [each.schedule async for each in client.recurring.list("t")]
    assert [each.schedule async for each in client.recurring.list("other")] == before
    assert (await run("recurring", "pause", "t", "daily", "hourly"))[0] == 0
    assert (await run("recurring", "trigger", "t", "daily"))[0] == 0
    assert (await run("recurring", "resume", "t", "daily"))[0] == 0
    code, out, _ = await run(
        *(
            "recurring",
            "backfill",
            "t",
            "hourly",
            "--from",
            "2026-01-01T00:00:00Z",
            "--until",
            "2026-01-01T03:00:00Z",
        ),
        *("-o", "json"),
    )
    assert (code, len(json.loads(out))) == (0, 3)
    ago = ("--from", "200m", "--until", "20m")
    code, out, _ = await run("recurring", "backfill", "t", "hourly", *ago, "--dry-run", "-o", "json")
    assert (code, len(json.loads(out))) == (0, 3)
    assert (await run("recurring", "get", "t", "daily"))[0] == 0
    assert (await run("recurring", "delete", "t", "daily", "hourly"))[0] == 0
    assert (await run("recurring", "get", "t", "daily"))[0] == 3
    assert (await run("recurring", "put", "t", "x", "--cron", "* * * * *", "--every", "1h"))[0] == 2


async def test_an_import_tells_what_was_over_and_what_was_refused_only_when_it_was_put(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "schedules.jsonl"
    path.write_text('{"name": "early", "cron": "0 9 * * *"}\n{"name": "late", "cron": "0 10 * * *"}\n')
    put, refusals = RecurringSchedules.put, {"late": "NO_OCCURRENCE"}

    async def put_some(
        self: RecurringSchedules, topic: Topic, name: str, definition: Definition, *, keeps_pause: bool
    ) -> bool:
        if name in refusals:
            raise InvalidRequest("It is refused", field="schedule", reason=refusals[name])
        return await put(self, topic, name, definition, keeps_pause=keeps_pause)

    monkeypatch.setattr(RecurringSchedules, "put", put_some)
    code, out, err = await run("recurring", "import", "t", str(path), "-o", "json")
    assert (code, [row["name"] for row in json.loads(out)]) == (0, ["early"])
    assert "late: it has no occurrence after now" in err
    refusals["late"] = "INVALID_PAYLOAD"
    code, out, err = await run("recurring", "import", "t", str(path), "-o", "json")
    assert (code, out) == (
        5,
        "",
    ) and "late: It is refused (schedule, INVALID_PAYLOAD); 1 schedule before it were put" in err
    refusals["early"] = "INVALID_PAYLOAD"
    code, out, err = await run("recurring", "import", "t", str(path), "-o", "json")
    assert (code, out) == (1, "") and "early: It is refused" in err


async def test_an_import_with_a_message_that_cannot_be_stored_puts_nothing(
    client: postdate.Client, run: Run, tmp_path: Path
):
    path = tmp_path / "schedules.jsonl"
    wrong = {"name": "wrong", "cron": "0 9 * * *", "payload": "x" * 300_000}
    path.write_text('{"name": "right", "cron": "0 9 * * *"}\n' + json.dumps(wrong) + "\n")
    for options in (("--dry-run",), ()):
        code, out, err = await run("recurring", "import", "t", str(path), *options)
        assert (code, out) == (1, "")
        assert "wrong: " in err and "RECURRING_MESSAGE_TOO_LARGE" in err and "nothing was put" in err
    with pytest.raises(postdate.NotFound):
        _ = [each async for each in client.recurring.list("t")]


async def test_a_crontab_and_periodic_tasks_of_celery_are_put(
    client: postdate.Client, run: Run, tmp_path: Path
):
    crontab = tmp_path / "crontab"
    crontab.write_text(CRONTAB)
    for _ in range(2):
        code, out, err = await run("import", "crontab", "jobs", str(crontab), "-o", "json")
        assert (code, len(json.loads(out))) == (0, 4), err
        assert "@reboot is left out" in err and "MAILTO" in err
    assert len([each async for each in client.recurring.list("jobs")]) == 4
    crontab.write_text("0 1 * * * first\n0 0 31 2 * never\n")
    for options in (("--dry-run",), ()):
        code, out, err = await run("import", "crontab", "wrong", str(crontab), *options)
        assert (
            (code, out) == (1, "")
            and "'0 0 31 2 *'" in err
            and "no month has" in err
            and "nothing was put" in err
        )
    with pytest.raises(postdate.NotFound):
        _ = [each async for each in client.recurring.list("wrong")]
    dump = tmp_path / "beat.json"
    dump.write_text(json.dumps(DUMP))
    code, out, err = await run("import", "celery-beat", "tasks", str(dump), "-o", "json")
    assert (code, [each["name"] for each in json.loads(out)]) == (
        0,
        ["nightly", "every-10-s-d95aebc6"],
    ) or err
    states = {each.schedule.name: each.schedule async for each in client.recurring.list("tasks")}
    assert json.loads(states["nightly"].payload) == {"task": "shop.report", "args": [1], "kwargs": {"a": 2}}


CRONTAB = """\
# jobs
MAILTO=root
CRON_TZ=Europe/Berlin
0 9 * * 1-5   /usr/bin/report --daily
@daily        backup.sh
@reboot       start
TZ="UTC"
*/5 * * * *   poll
*/5 * * * *   poll
"""
DUMP = [
    {
        "model": "django_celery_beat.crontabschedule",
        "pk": 1,
        "fields": {
            "minute": "0",
            "hour": "3",
            "day_of_month": "*",
            "month_of_year": "*",
            "day_of_week": "mon, fri",
            "timezone": "Europe/Berlin",
        },
    },
    {"model": "django_celery_beat.intervalschedule", "pk": 2, "fields": {"every": 10, "period": "seconds"}},
    {
        "model": "django_celery_beat.periodictask",
        "pk": 1,
        "fields": {
            "name": "nightly",
            "task": "shop.report",
            "crontab": 1,
            "args": "[1]",
            "kwargs": '{"a": 2}',
        },
    },
    {
        "model": "django_celery_beat.periodictask",
        "pk": 2,
        "fields": {"name": "every 10 s", "task": "shop.poll", "interval": 2, "enabled": False},
    },
    {
        "model": "django_celery_beat.periodictask",
        "pk": 3,
        "fields": {"name": "dawn", "task": "t", "solar": 1},
    },
]


def test_lines_of_a_crontab():
    found = crontab_schedules(CRONTAB.splitlines(), "Asia/Tokyo")
    assert [(each.cron, each.time_zone) for each in found] == [
        ("0 9 * * 1-5", "Europe/Berlin"),
        ("0 0 * * *", "Europe/Berlin"),
        ("*/5 * * * *", "UTC"),
        ("*/5 * * * *", "UTC"),
    ]
    assert len({each.name for each in found}) == 4
    (system,) = crontab_schedules(["1 2 * * * root cd / && run-parts /etc/cron.daily"], "UTC", system=True)
    assert system.payload == b"cd / && run-parts /etc/cron.daily"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope", "this is no JSON: Expecting value: line 1 column 1 (char 0)"),
        ("{}", "this is no dump of django_celery_beat: it is not a list"),
        (
            json.dumps([*DUMP, {"model": "x", "pk": 1}]),
            f"this is no dump of django_celery_beat: entry {len(DUMP) + 1} is no object with model, pk and fields",
        ),
        (
            '[{"model": "django_celery_beat.PeriodicTask", "pk": 4, "fields": {"task": "t", "crontab": 7}}]',
            "this is no dump of django_celery_beat: django_celery_beat.periodictask 4: "
            "there is no django_celery_beat.crontabschedule 7",
        ),
        (
            '[{"model": "django_celery_beat.periodictask", "pk": 4, "fields": {}}]',
            "this is no dump of django_celery_beat: django_celery_beat.periodictask 4: there is no task",
        ),
    ],
)
async def test_what_is_no_dump_of_celery_is_named_with_its_place(
    run: Run, tmp_path: Path, text: str, says: str
):
    path = tmp_path / "beat.json"
    path.write_text(text)
    assert await run("import", "celery-beat", "t", str(path)) == (1, "", f"postdate: {path}: {says}\n")


def test_periodic_tasks_of_celery():
    cron, interval = celery_schedules(DUMP, "UTC")
    assert (cron.cron, cron.time_zone, cron.paused) == ("0 3 * * mon,fri", "Europe/Berlin", False)
    assert (interval.interval, interval.paused) == (timedelta(seconds=10), True)


def test_tasks_of_celery_that_no_schedule_is_like_are_named(capsys: pytest.CaptureFixture[str]):
    def row(model: str, key: int, **fields: Any) -> dict[str, Any]:
        return {"model": f"django_celery_beat.{model}", "pk": key, "fields": fields}

    def crontab(key: int, day_of_month: str, day_of_week: str) -> dict[str, Any]:
        days = {"day_of_month": day_of_month, "month_of_year": "*", "day_of_week": day_of_week}
        return row("crontabschedule", key, minute="0", hour="3", **days)

    def task(name: str, **fields: Any) -> dict[str, Any]:
        return row("periodictask", len(name), name=name, task="t", **fields)

    dump = [
        crontab(1, "1-7", "mon"),
        crontab(2, "*/2", "mon"),
        row("intervalschedule", 1, every=5_000_000, period="microseconds"),
        row("intervalschedule", 2, every=5, period="microseconds"),
        row("intervalschedule", 3, every=5, period="weeks"),
        task("both", crontab=1),
        task("stars", crontab=2, queue="slow", expires="2030-01-01T00:00:00Z", headers="{}", priority=None),
        task("five-s", interval=1, start_time="2030-01-01T00:00:00Z"),
        task("five-us", interval=2),
        task("five-weeks", interval=3),
    ]
    found = list(celery_schedules(dump, "UTC"))
    assert [(each.name, each.cron, each.interval) for each in found] == [
        ("stars", "0 3 */2 * mon", None),
        ("five-s", "", timedelta(seconds=5)),
    ]
    assert capsys.readouterr().err.splitlines() == [
        "both: a crontab of days that must match both day_of_month and day_of_week is left out",
        "stars: put without queue, expires",
        "five-s: put without start_time",
        "five-us: an interval below a second is left out",
        "five-weeks: an interval in weeks is left out",
    ]


def test_lines_of_schedules_come_back_as_they_were():
    schedule = postdate.RecurringSchedule(
        name="s",
        times=(datetime(2030, 1, 1, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC)),
        start=datetime(2029, 1, 1, tzinfo=UTC),
        jitter=timedelta(seconds=1),
        payload=b"\xff",
        properties={"a": "b"},
        paused=True,
        overdue=postdate.RecurringOverdue.NONE,
        ttl=timedelta(seconds=2),
    )
    assert schedule_of_line(schedule_line(schedule)) == schedule
    for line in ("[]", '{"name": "x", "crom": 1}', '{"name": "x", "payload": "a", "payload_base64": "YQ=="}'):
        with pytest.raises(ValueError, match="it "):
            schedule_of_line(line)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("payload", 5), ("payload_base64", 5), ("cron", 5), ("time_zone", None), ("key", ["k"])),
        *(
            ("ttl_ms", "1"),
            ("interval_ms", True),
            ("paused", "no"),
            ("properties", []),
            ("properties", {"a": 1}),
        ),
    ],
)
def test_a_value_of_another_type_in_a_line_is_refused_by_its_name(name: str, value: Any):
    with pytest.raises(ValueError, match=f"{name} must be "):
        schedule_of_line(json.dumps({"name": "x", name: value}))


async def test_tables_name_their_zone_and_times_may_come_in_any_order(
    wire: Wire, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        later, sooner = "2030-01-02T00:00:00Z", "2030-01-01T00:00:00+01:00"
        code, out, err = await run("recurring", "put", "t", "s", "--at", later, "--at", sooner, "-o", "json")
        assert code == 0, err
        assert json.loads(out)["times"] == ["2029-12-31T23:00:00+00:00", "2030-01-02T00:00:00+00:00"]
        _, out, _ = await run("recurring", "list", "t")
        assert "t, times in CE" in out and "2030-01-01 00:00:00" in out
        await run("recurring", "put", "t", "hourly", "--every", "1h")
        span = ("--from", "2026-01-01T00:00:00Z", "--until", "2026-01-01T03:00:00Z")
        _, out, _ = await run("recurring", "backfill", "t", "hourly", *span, "--dry-run")
        assert "3 occurrences, times in CE" in " ".join(out.split()) and "2026-01-01 01:00:00" in out
    finally:
        monkeypatch.undo()
        time.tzset()
