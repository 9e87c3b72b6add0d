"""`postdate schedule` against the fake broker."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate as sdk
from postdate.commands import output as output_module
from postdate.commands.histogram import Screen, draw, fitting_width
from postdate.commands.values import parse_shift, parse_when
from postdate_api.v1.schedule_pb2 import BULK_CHANGE_STATE_RUNNING, BulkChange
from tests.unit.client.fake_server import FakeBroker

Run = Callable[..., Any]
START = datetime(2100, 1, 1, tzinfo=UTC)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture(autouse=True)
def _zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    yield
    os.environ.pop("TZ")
    time.tzset()


@pytest.fixture(autouse=True)
async def _pending(broker: FakeBroker, client: sdk.Client) -> None:
    """Messages 0 to 4 of `t`, due an hour apart, with keys order-0 to order-4; 5 is due."""
    messages = [
        sdk.OutgoingMessage(b"%d" % i, deliver_at=START + i * HOUR, schedule_key=f"order-{i}")
        for i in range(5)
    ]
    async with client.producer("t") as producer:
        await producer.send_many([*messages, sdk.OutgoingMessage(b"due")])
    broker.unary.clear()


@pytest.mark.slow
async def test_list_shows_what_waits_on_the_local_clock(postdate: Run) -> None:
    table = await postdate("schedule", "list", "t")
    assert "t, times in CET" in table.out
    assert "2100-01-01 01:00:00" in table.out and "order-4" in table.out
    rows = (
        await postdate("schedule", "list", "t", "--key-prefix", "order-1", "-o", "json", "--payload")
    ).json
    assert [(row["id"], row["schedule_key"], row["payload"]) for row in rows] == [("7:1", "order-1", "1")]
    assert rows[0]["deliver_at"] == "2100-01-01T01:00:00+00:00"
    some = await postdate("schedule", "list", "t", "--limit", "2", "-o", "jsonl")
    assert [row["id"] for row in some.lines] == ["7:0", "7:1"]
    assert some.err == "the first 2; --limit N or --all shows more\n"
    assert len((await postdate("schedule", "list", "t", "--all", "-o", "jsonl")).lines) == 5
    until = await postdate("schedule", "list", "t", "--until", "2100-01-01T02:00:00Z", "-o", "jsonl")
    assert ([row["id"] for row in until.lines], until.err) == (["7:0", "7:1"], "")
    assert (await postdate("schedule", "list", "t", "--until", "1h", "-o", "json")).json == []
    nothing = await postdate("schedule", "list", "t", "--until", "1h")
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "no message of t that matches waits\n")
    assert (await postdate("schedule", "list", "nope")).code == 3


async def test_get_shows_one(postdate: Run) -> None:
    shown = await postdate("schedule", "get", "t", "-k", "order-1", "--payload")
    assert "2100-01-01 02:00:00.000 CET, in" in shown.out and "payload" in shown.out
    assert (await postdate("schedule", "get", "t", "7:1", "-o", "json")).json["state"] == "WAITING"
    assert (await postdate("schedule", "get", "t", "7:5")).code == 3


@pytest.mark.slow
async def test_one_message_is_cancelled_and_moved_without_asking(broker: FakeBroker, postdate: Run) -> None:
    moved = await postdate("schedule", "move", "t", "7:1", "--by", "-10m", "-o", "json")
    assert (moved.code, moved.json["result"], moved.json["deliver_at"]) == (
        0,
        "DONE",
        "2100-01-01T00:50:00+00:00",
    )
    moved = await postdate("schedule", "move", "t", "-k", "order-1", "--to", "2100-01-01T03:00:00+01:00")
    assert (moved.code, "2100-01-01 03:00:00.000 CET" in moved.out) == (0, True)
    dry = await postdate("schedule", "cancel", "t", "-k", "order-1", "--dry-run")
    assert (dry.code, broker.topics["t"].cancelled) == (0, set())
    assert dry.err == "dry run: nothing was changed; 1 message would be cancelled\n"
    assert (await postdate("schedule", "cancel", "t", "7:1")).code == 0
    again = await postdate("schedule", "cancel", "t", "7:1", "-o", "json")
    assert (again.code, again.json["result"]) == (0, "ALREADY_CANCELLED")  # as it was asked for
    late = await postdate("schedule", "cancel", "t", "7:5", "-o", "json")
    assert (late.code, late.json["delivered_to"]) == (1, ["billing", "audit"])
    assert late.err == "postdate: it was not cancelled: ALREADY_DELIVERED\n"
    gone = await postdate("schedule", "move", "t", "-k", "nobody", "--in", "1h")
    assert (gone.code, gone.err) == (3, "postdate: it was not moved: NOT_FOUND\n")
    assert (await postdate("schedule", "send-now", "t", "-k", "order-2")).code == 0
    assert broker.unary[-1].HasField("deliver_after_ms") and not broker.unary[-1].deliver_after_ms


@pytest.mark.slow
@pytest.mark.parametrize("bar", ["--progress", "--no-progress"])
async def test_several_messages_are_changed_and_those_that_were_not_are_named(
    broker: FakeBroker, postdate: Run, bar: str
) -> None:
    done = await postdate("schedule", "cancel", "t", "7:0", "7:1", "-o", "json", bar)
    assert (done.code, done.json) == (0, {"matched": 2, "cancelled": 2, "not_done": []})
    assert ("cancelled" in done.err) is (bar == "--progress")
    partly = await postdate("schedule", "move", "t", "7:2", "7:5", "7:9", "--in", "1h", bar)
    assert (partly.code, "postdate: 2 of 3 were not moved" in partly.err) == (5, True)
    assert "7:5" in partly.out and "billing, audit" in partly.out and "NOT_FOUND" in partly.out
    late = await postdate("schedule", "cancel", "t", "7:5", "7:9", "-o", "json", "--dry-run", bar)
    assert (late.code, "postdate: 2 of 2 would not be cancelled" in late.err) == (1, True)
    assert [each["result"] for each in late.json["not_done"]] == ["ALREADY_DELIVERED", "NOT_FOUND"]
    assert (await postdate("schedule", "cancel", "t", "-k", "x", "-k", "y", bar)).code == 3
    assert "dry run: nothing was changed; 0 messages would be cancelled" in late.err
    one = await postdate("schedule", "move", "t", "7:2", "7:9", "--in", "1h", bar)
    assert (one.code, "postdate: 1 of 2 was not moved" in one.err) == (5, True)
    again = await postdate("schedule", "cancel", "t", "7:0", "7:1", bar)
    assert (again.code, "already cancelled" in again.out) == (0, True)


async def test_of_many_failures_the_first_are_shown(postdate: Run) -> None:
    keys = [each for i in range(25) for each in ("-k", f"x{i}")]
    many = await postdate("schedule", "cancel", "t", *keys)
    assert (many.code, many.out.count("NOT_FOUND")) == (3, 20)
    assert "and 5 more; -o json shows all" in many.err


@pytest.mark.slow
@pytest.mark.parametrize("bar", ["--progress", "--no-progress"])
async def test_a_change_by_filter_says_how_many_match_and_needs_yes(
    broker: FakeBroker, postdate: Run, bar: str
) -> None:
    asks = await postdate("schedule", "cancel", "t", "--key-prefix", "order-", bar)
    assert (asks.code, broker.topics["t"].cancelled) == (2, set())
    assert asks.out.split() == ["matched", "5", "cancelled", "0"]
    assert asks.err.endswith("postdate: nothing was cancelled; add --yes to go on\n")
    dry = await postdate("schedule", "cancel", "t", "--all", "--dry-run", "--yes", "-o", "json", bar)
    assert (dry.code, dry.json) == (0, {"matched": 5, "would_be_cancelled": 5})
    assert dry.err.endswith("dry run: nothing was changed; 5 messages would be cancelled\n")
    assert broker.topics["t"].cancelled == set()
    some = ("--from", "2100-01-01T01:00:00Z", "--until", "2100-01-01T03:00:00Z", "--yes", "-o", "json", bar)
    moved = await postdate("schedule", "move", "t", *some, "--by", "10m")
    assert (moved.code, moved.json) == (0, {"matched": 2, "moved": 2})
    assert ("2/2" in moved.err) is (bar == "--progress")
    every = await postdate("schedule", "cancel", "t", "--all", "--yes", "-o", "json", bar)
    assert (every.code, every.json["cancelled"], broker.topics["t"].cancelled) == (0, 5, {0, 1, 2, 3, 4})
    nothing = await postdate("schedule", "send-now", "t", "--all", "--yes", "-o", "json", bar)
    assert (nothing.code, nothing.json) == (0, {"matched": 0, "sent": 0})


async def test_bulk_changes_are_listed_with_what_they_match_on_the_local_clock(
    broker: FakeBroker, postdate: Run
) -> None:
    day = ("--from", "2100-01-01T00:30:00Z", "--until", "2100-01-02T00:00:00Z")
    await postdate("schedule", "cancel", "t", "--key-prefix", "order-3", *day, "--yes")
    begun = await postdate(
        "schedule", "move", "t", "--all", "--to", "2100-01-05T00:00:00Z", "--yes", "--no-wait"
    )
    assert "2100-01-05 01:00:00.000 CET" in begun.out and "T00:00" not in begun.out
    change = broker.topics["t"].bulk_changes[1]
    change.MergeFrom(BulkChange(state=BULK_CHANGE_STATE_RUNNING, total_messages=200, examined_messages=110))
    table = (await postdate("schedule", "bulk-changes", "t")).out
    for part in (
        "t, times in CET",
        "order-3…",
        "2100-01-01 01:30:00",
        "until 2100-01-02",
        "all",
        "RUNNING 55 %",
    ):
        assert part in " ".join(table.replace("│", " ").split()), part
    await postdate("schedule", "send-now", "t", "--all", "--yes", "--no-wait")
    sent = broker.topics["t"].bulk_changes[2]
    sent.deliver_at_ms = sent.begin_time_ms
    now, moved, cancelled = (await postdate("schedule", "bulk-changes", "t", "-o", "json")).json
    assert now["change"] == "send now"
    assert moved["change"] == "move to 2100-01-05T00:00:00+00:00"
    assert (cancelled["key_prefix"], cancelled["from"]) == ("order-3", "2100-01-01T00:30:00+00:00")


async def test_a_change_that_fails_half_way_says_how_far_it_came(broker: FakeBroker, postdate: Run) -> None:
    broker.knobs.bulk_change_fails = True
    partly = await postdate("schedule", "cancel", "t", "--all", "--yes", "-o", "json")
    assert partly.code == 5
    assert partly.err.splitlines()[-1].startswith(
        "postdate: 5 messages were changed, then bulk change 1 failed"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["get", "t"], "give either an ID or --schedule-key"),
        (["get", "t", "7:1", "-k", "a"], "give either an ID or --schedule-key"),
        (["cancel", "t"], "select messages by"),
        (["cancel", "t", "7:1", "-k", "a"], "select messages by"),
        (["cancel", "t", "7:1", "--all"], "--all cannot be combined with IDs"),
        (["cancel", "t", "-k", "a", "--all"], "--all cannot be combined with IDs"),
        (["cancel", "t", "7:1", "--until", "1h"], "select messages by"),
        (["cancel", "t", "--all", "--until", "1h"], "--all cannot be combined with"),
        (["cancel", "t", "7-1"], "not a message id"),
        (["move", "t", "7:1"], "give one of --to"),
        (["move", "t", "7:1", "--in", "1h", "--by", "1h"], "give one of --to"),
        (["move", "t", "7:1", "--by", "soon"], "not a duration"),
        (["list", "t", "--from", "soon"], "or so long from now: 15m"),
        (["histogram", "t", "--width", "0"], "greater than 0"),
        (["histogram", "t", "--from", "2h", "--until", "1h"], "--until must be later than --from"),
        (["histogram"], "Missing argument"),
    ],
)
async def test_usage(broker: FakeBroker, postdate: Run, arguments: list[str], says: str) -> None:
    result = await postdate("schedule", *arguments)
    assert (result.code, says in result.err) == (2, True), result.err
    assert broker.unary == []


async def test_the_histogram_fits_what_is_there(broker: FakeBroker, postdate: Run) -> None:
    drawn = await postdate("schedule", "histogram", "t", "--from", "2100-01-01T00:00:00Z", "--width", "1h")
    assert drawn.out.splitlines()[0] == "5 messages due, in bars of 1h; times in CET"
    assert [line[:7] for line in drawn.out.splitlines()[1:]] == [f"0{i}:00 1" for i in range(1, 6)]
    assert all(len(line) == 80 for line in drawn.out.splitlines()[1:])
    found = (await postdate("schedule", "histogram", "t", "-o", "json")).json
    assert (found["messages"], found["exact"], found["before"]) == (5, True, 0)
    rows = (await postdate("schedule", "histogram", "t", "t", "-o", "jsonl", "--width", "2h")).lines
    assert sum(row["messages"] for row in rows) == 10
    assert (await postdate("schedule", "histogram", "nope")).code == 3


async def test_a_list_in_a_pipe_is_as_wide_as_columns_says(
    postdate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "bytes" in (await postdate("schedule", "list", "t")).out
    monkeypatch.setenv("COLUMNS", "70")
    narrow = (await postdate("schedule", "list", "t")).out
    assert ("bytes" in narrow, max(map(len, narrow.splitlines())) <= 70) == (False, True)


@pytest.mark.slow
async def test_what_others_sent_does_nothing_to_the_terminal(client: sdk.Client, postdate: Run) -> None:
    evil = "\x1b]0;owned\x07\x9b2J[bold]\u202e\n"
    async with client.producer("t") as producer:
        await producer.send(
            evil.encode(), key=evil, properties={evil: evil}, schedule_key=evil, deliver_at=START
        )
        await producer.send(evil.encode(), key=evil)
    shown = [
        await postdate("schedule", "list", "t", "--payload"),
        await postdate("schedule", "get", "t", "-k", evil, "--payload"),
        await postdate("schedule", "cancel", "t", "-k", evil, "-k", evil + "2"),
        await postdate("consume", "t", "s", "--idle", "100ms"),
    ]
    for each in shown:
        folded = "".join(each.out.split())
        assert "x1b]0;owned" in folded and "[bold]" in folded, each.out
        assert [char for char in each.out + each.err if not char.isprintable() and char != "\n"] == []
    as_json = await postdate("schedule", "get", "t", "-k", evil, "-o", "json")
    assert as_json.code == 3 and "\x1b" not in as_json.err


@pytest.mark.slow
async def test_a_histogram_finds_a_width_whatever_is_said_to_be_last(
    broker: FakeBroker, postdate: Run
) -> None:
    start_ms = round(START.timestamp() * 1000)
    broker.knobs.due_ms = (start_ms, start_ms + 1_000_000 * 3_600_000)
    far = (await postdate("schedule", "histogram", "t", "-o", "json")).json
    assert (far["messages"], far["width_ms"], len(far["bars"])) == (5, 15 * 60_000, 5)
    broker.knobs.due_ms = (start_ms, start_ms + 1)
    near = (await postdate("schedule", "histogram", "t", "-o", "json")).json
    assert near == far
    later = (await postdate("schedule", "histogram", "t", "--until", "1h", "-o", "json")).json
    assert (later["bars"], later["after"]) == ([], 5)
    assert broker.unary[-1].due.start_ms < broker.unary[-1].due.end_ms
    given = await postdate("schedule", "histogram", "t", "--width", "1ms")
    assert (given.code, "TOO_MANY_BARS" in given.err) == (1, True)


def counts(*bars: tuple[timedelta, int], **fields: Any) -> sdk.ScheduledCounts:
    shown = tuple(sdk.ScheduledBar(START + after, messages, 0) for after, messages in bars)
    return sdk.ScheduledCounts(shown, **{"before": 0, "after": 0, "exact": True} | fields)


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_bars_are_as_long_as_their_share_and_lines_fit(width: int) -> None:
    found = counts((0 * HOUR, 1_000_000), (HOUR, 500_000), (3 * HOUR, 1))
    _, *lines = draw(found, START, HOUR, Screen(width, has_blocks=True))
    assert len(lines) == 4 and len(lines[0]) == width
    most, half, none, least = (line[16:] for line in lines)
    assert set(most) == {"█"} and abs(len(half) - len(most) / 2) <= 1
    assert (none, least) == ("", "▏")
    assert [line[:5] for line in lines] == ["01:00", "02:00", "03:00", "04:00"]
    plain = list(draw(found, START, HOUR, Screen(width, has_blocks=False)))[1:]
    assert (len(plain[0]), plain[3][16:], plain[0].isascii()) == (width, "#", True)


def test_what_lies_outside_and_what_is_estimated_is_said() -> None:
    about = next(draw(counts((HOUR, 1), exact=False), START, HOUR, Screen(80, has_blocks=True)))
    assert about == "1 message due, in bars of 1h, about so many in each; times in CET"
    lines = list(draw(counts(before=3, after=1_234, exact=False), START, HOUR, Screen(80, has_blocks=True)))
    assert lines == [
        "0 messages due; times in CET",
        "3 before 2100-01-01 01:00:00",
        "1,234 later",
    ]


@pytest.mark.parametrize(
    ("bars", "step", "labels"),
    [
        ([HOUR, 2 * HOUR], HOUR, ["02:00", "03:00"]),
        ([22 * HOUR, 23 * HOUR], HOUR, ["Fri 01-01 23:00", "Sat 01-02 00:00"]),
        ([HOUR, HOUR + MINUTE / 2], MINUTE / 2, ["02:00:00", "02:00:30"]),
        ([HOUR, HOUR + MINUTE / 600], MINUTE / 600, ["02:00:00.000", "02:00:00.100"]),
        ([23 * HOUR, 47 * HOUR], 24 * HOUR, ["2100-01-02", "2100-01-03"]),
        ([HOUR + MINUTE / 6, 2 * HOUR + MINUTE / 6], HOUR, ["02:00:10", "03:00:10"]),
        ([-HOUR - MINUTE, -HOUR], MINUTE, ["2099-12-31 23:59", "2100-01-01 00:00"]),
    ],
)
def test_labels_tell_bars_apart(bars: list[timedelta], step: timedelta, labels: list[str]) -> None:
    found = counts(*((after, 1) for after in bars))
    lines = list(draw(found, START, step, Screen(80, has_blocks=True)))[1:]
    assert [line[: len(label)] for line, label in zip(lines, labels, strict=True)] == labels


def test_long_runs_of_nothing_are_one_line() -> None:
    found = counts((0 * HOUR, 1), (HOUR, 1), (1_000 * HOUR, 1))
    lines = list(draw(found, START, HOUR, Screen(80, has_blocks=True)))[1:]
    assert (len(lines), lines[2]) == (4, "...")


def test_a_fitting_width_makes_few_bars() -> None:
    widths = [fitting_width(span) for span in (timedelta(0), MINUTE, HOUR, 24 * HOUR, 7 * 24 * HOUR)]
    assert widths == [timedelta(milliseconds=1), timedelta(seconds=5), 5 * MINUTE, HOUR, 12 * HOUR]
    assert fitting_width(timedelta(days=100_000)) % timedelta(days=364) == timedelta(0)


def test_times_and_shifts_as_people_write_them() -> None:
    assert parse_shift("-1h30m") == -1.5 * HOUR
    assert parse_shift("+10m") == parse_shift("10m") == 10 * MINUTE
    assert parse_when("2100-01-01T01:00:00+01:00") == START
    assert abs(parse_when("1h") - datetime.now(UTC) - HOUR) < MINUTE
    for wrong in ("soon", "-1h", "2100-01-01T00:00:00"):
        with pytest.raises(ValueError, match="so long from now"):
            parse_when(wrong)
    with pytest.raises(ValueError, match="not a duration"):
        parse_shift("--1h")


def documented() -> list[list[str]]:
    """The commands that the documents show about the schedule, as a shell splits them."""
    root = Path(__file__).parents[3]
    lines = [
        line
        for name in ("README.md", "docs/scheduling.md")
        for line in (root / name).read_text().splitlines()
    ]
    shown = [line.split(" > ")[0] for line in lines if line.startswith("postdate schedule ")]
    return [shlex.split(line, comments=True)[1:] for line in shown]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", documented(), ids=" ".join)
async def test_what_the_documents_show_is_understood(
    broker: FakeBroker, postdate: Run, arguments: list[str]
) -> None:
    for topic in ("orders", "reminders"):
        broker.topic(topic)
    result = await postdate(*arguments)
    assert result.code in {0, 3}, result.err
    assert broker.unary


LAST = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)


@pytest.mark.parametrize("last", [LAST, LAST - HOUR, LAST.replace(microsecond=999_999), START])
@pytest.mark.parametrize(
    "step", [timedelta(milliseconds=1), HOUR, timedelta(days=1), timedelta(days=400_000)]
)
def test_the_histogram_draws_any_time_that_there_is(last: datetime, step: timedelta) -> None:
    bars = [sdk.ScheduledBar(last - 2 * HOUR, 3, 30), sdk.ScheduledBar(last, 1, 10)]
    counts = sdk.ScheduledCounts(tuple(bars), 0, 0, True)
    lines = list(draw(counts, bars[0].start, step, Screen(80, has_blocks=False)))
    assert lines[0].startswith("4 messages due")
    assert sum("#" in line for line in lines) == 2


@pytest.mark.parametrize("output", ["table", "json", "jsonl"])
async def test_what_is_listed_is_written_page_by_page(
    postdate: Run, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.setattr(output_module, "PAGE_ROWS", 2)
    written: list[int] = []
    add = output_module.RowStream.add

    def counted(self: output_module.RowStream, row: Any) -> None:
        add(self, row)
        written.append(len(self._page))

    monkeypatch.setattr(output_module.RowStream, "add", counted)
    shown = await postdate("schedule", "list", "t", "-o", output)
    assert written == ([1, 0, 1, 0, 1] if output == "table" else [0] * 5)  # what waits to be written
    if output == "table":
        assert [shown.out.count(f"order-{i}") for i in range(5)] == [1] * 5
        assert shown.out.count("times in") == 1
    else:
        rows = shown.json if output == "json" else shown.lines
        assert [row["schedule_key"] for row in rows] == [f"order-{i}" for i in range(5)]
