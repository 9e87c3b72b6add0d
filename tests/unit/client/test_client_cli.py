"""The `postdate` command against the fake broker: results, formats, exit codes, one line of error."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postdate import Client, Unavailable
from postdate.commands import output
from postdate.commands.settings import describe
from postdate.commands.values import parse_duration, parse_rate, parse_time, show_duration
from tests.unit.client.fake_server import FakeBroker
from tests.unit.client.fake_values import status

Run = Callable[..., Any]


@pytest.mark.slow
async def test_topic_commands(broker: FakeBroker, postdate: Run) -> None:
    assert (await postdate("topic", "create", "t", "--tick", "2s", "--tracker", "memory")).code == 0
    assert broker.unary[0].policy.tick_ms == 2000
    shown = await postdate("topic", "get", "t", "--output", "json")
    assert shown.json["effective_policy"]["dedup_window_ms"] == 60_000
    assert (shown.json["policy"]["tick_ms"], shown.json["policy"]["dedup_window_ms"]) == (2000, None)
    assert [row["name"] for row in (await postdate("topic", "list", "-o", "jsonl")).lines] == ["t"]
    assert "│ t " in (await postdate("topic", "list")).out
    assert (await postdate("topic", "delete", "t")).code == 0
    assert broker.topics == {}


async def test_subscription_commands(broker: FakeBroker, postdate: Run) -> None:
    created = await postdate(
        "-o", "json", "subscription", "create", "t", "s", "--type", "failover", "--lease", "9s"
    )
    assert (created.json["type"], created.json["policy"]["lease_ms"]) == ("FAILOVER", 9000)
    assert (await postdate("subscription", "get", "t", "s")).code == 0
    assert [row["name"] for row in (await postdate("subscription", "list", "t", "-o", "json")).json] == ["s"]
    assert (await postdate("subscription", "delete", "t", "s")).code == 0
    assert (await postdate("subscription", "get", "t", "s")).code == 3


async def test_produce_with_a_schedule_key(broker: FakeBroker, postdate: Run) -> None:
    done = await postdate(
        "produce", "t", "--payload", "hi", "--schedule-key", "k", "--replace", "--delay", "1h"
    )
    assert (done.code, done.out) == (0, "stored 1 message, 7:0\n")
    message = broker.topic("t").deliveries[0].message
    assert (message.schedule_key, message.deliver_after_ms) == ("k", 3_600_000)


async def test_produce_and_consume(broker: FakeBroker, postdate: Run) -> None:
    sent = await postdate(
        "produce",
        "t",
        "--payload",
        "hi",
        "--key",
        "k",
        "--property",
        "a=b",
        "--count",
        "3",
        "--delay",
        "20ms",
    )
    assert (sent.code, sent.out) == (0, "stored 3 messages, 7:0 to 7:2\n")
    seen = await postdate("consume", "t", "s", "--count", "3", "-o", "jsonl")
    assert seen.code == 0
    assert [(row["payload"], row["key"], row["properties"]) for row in seen.lines] == [
        ("hi", "k", {"a": "b"})
    ] * 3
    assert broker.topic("t").subscriptions["s"].acked == {0, 1, 2}


async def test_produce_lines_of_a_file_and_of_stdin(
    broker: FakeBroker, postdate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n\nfour")
    sent = await postdate("produce", "t", "--file", str(path), "-o", "json")
    assert (sent.json["stored"], sent.json["failed"]) == (4, 0)
    assert sent.json["ranges"][0]["count"] == 3
    assert (await postdate("produce", "t", "--file", str(path), "--whole")).code == 0
    with path.open("rb") as raw:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
        lines = (await postdate("produce", "t", "-o", "jsonl")).lines
    assert sum(row["count"] for row in lines) == 4
    assert broker.payloads("t") == [
        b"one",
        b"two",
        b"",
        b"four",
        b"one\ntwo\n\nfour",
        b"one",
        b"two",
        b"",
        b"four",
    ]


class Typed(io.TextIOWrapper):
    """A terminal's stdin."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("source", [(), ("--file", "-")])
async def test_no_bar_is_drawn_over_what_is_typed(
    broker: FakeBroker,
    postdate: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: tuple[str, ...],
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if stderr were a terminal
    assert "sent" in (await postdate("produce", "t", "--file", str(path))).err
    with path.open("rb") as raw:
        monkeypatch.setattr(sys, "stdin", Typed(raw))
        done = await postdate("produce", "t", *source)
    assert (done.code, done.err) == (0, "reading lines from the terminal; end with Ctrl-D\n")


@pytest.mark.parametrize("output", ["table", "json", "jsonl"])
async def test_produce_of_nothing_says_so(
    broker: FakeBroker, postdate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    path = tmp_path / "empty"
    path.touch()
    with path.open("rb") as raw:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
        done = await postdate("produce", "t", "-o", output)
    assert (done.code, done.err.strip()) == (0, "nothing to send")
    assert bool(done.out) is (output == "json")
    assert broker.requests == []


async def test_produce_that_fails_in_part_says_so(broker: FakeBroker, postdate: Run, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"good\n" * 1000 + b"bad\n")
    broker.knobs.poison = b"bad"
    sent = await postdate("produce", "t", "--file", str(path))
    assert sent.code == 5
    assert sent.err == "postdate: 1 messages failed: bad (messages[0].payload, POISON)\n"
    assert (await postdate("produce", "t", "--payload", "bad")).code == 1


async def test_consume_only_looks(broker: FakeBroker, postdate: Run) -> None:
    await postdate("produce", "t", "--payload", "x")
    seen = await postdate("consume", "t", "s", "--no-ack", "--count", "1")
    assert seen.out.endswith(" 7:0 x\n")
    assert broker.topic("t").subscriptions["s"].acked == set()
    again = await postdate("consume", "t", "s", "--count", "1", "-o", "json")
    assert again.json[0]["attempt"] == 2


async def test_consume_that_falls_short_says_so(broker: FakeBroker, postdate: Run) -> None:
    short = await postdate("consume", "t", "s", "--count", "2", "--idle", "20ms", "-o", "json")
    assert (short.code, short.json, short.err) == (5, [], "postdate: 0 of 2 messages came\n")


async def test_consume_of_nothing_says_so_to_people(
    broker: FakeBroker, client: Client, postdate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = ("consume", "t", "s", "--idle", "20ms")
    seen = await postdate(*nothing)
    assert (seen.code, seen.out, seen.err) == (0, "", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    seen = await postdate(*nothing, "--no-progress")
    assert (seen.code, seen.out) == (0, "")
    assert seen.err == "no message came within 20ms; --follow waits for messages\n"
    await send(client, b"x")
    seen = await postdate("consume", "t", "s", "--idle", "1s", "--no-progress")
    assert (seen.code, seen.out.count("\n"), seen.err) == (0, 1, "")


async def test_consume_waits_for_as_many_as_it_was_asked_for(
    broker: FakeBroker, postdate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.commands.consume._IDLE", timedelta(milliseconds=1))
    await postdate("produce", "t", "--payload", "late", "--delay", "100ms")
    assert (await postdate("consume", "t", "s")).out == ""
    seen = await postdate("consume", "t", "s", "--count", "1")
    assert (seen.code, seen.out.endswith(" 7:0 late\n")) == (0, True)


BROKE_AND_IS_BACK = re.compile(
    "postdate: the connection broke: .*; trying again\n(?:.*\n)*?.*postdate: connected again"
)


async def send(client: Client, payload: bytes) -> None:
    async with client.producer("t") as producer:
        await producer.send(payload)


async def break_between(broker: FakeBroker, client: Client) -> None:
    """Break the connection of a consumer that has taken a message, and have another one come."""
    await broker.wait(lambda: any(each.acked for each in broker.topic("t").subscriptions.values()))
    broker.cut()
    await broker.wait(lambda: len(broker.opens) == 2)
    await send(client, b"y")


@pytest.mark.parametrize("bar", ["--progress", "--no-progress"])
async def test_consume_says_that_the_connection_broke_and_is_there_again(
    broker: FakeBroker, client: Client, postdate: Run, bar: str
) -> None:
    await postdate("produce", "t", "--payload", "x")
    consuming = asyncio.create_task(postdate("consume", "t", "s", "--count", "2", "-o", "jsonl", bar))
    await break_between(broker, client)
    seen = await consuming
    assert (seen.code, [row["payload"] for row in seen.lines]) == (0, ["x", "y"])
    assert len(BROKE_AND_IS_BACK.findall(seen.err)) == seen.err.count("postdate:") / 2 == 1


async def test_tail_says_that_the_connection_broke(broker: FakeBroker, client: Client, postdate: Run) -> None:
    broker.topic("t")
    tailing = asyncio.create_task(postdate("tail", "t", "--count", "2", "-o", "jsonl"))
    await broker.wait(lambda: bool(broker.streams))
    await send(client, b"x")
    await break_between(broker, client)
    seen = await tailing
    assert (seen.code, [row["payload"] for row in seen.lines[-2:]]) == (0, ["x", "y"])
    assert BROKE_AND_IS_BACK.search(seen.err)


async def test_results_are_not_written_where_progress_is_shown(broker: FakeBroker, postdate: Run) -> None:
    await postdate("produce", "t", "--payload", "x")
    seen = await postdate("consume", "t", "s", "--count", "1", "-o", "jsonl", "--progress")
    assert [row["payload"] for row in seen.lines] == ["x"]
    assert "received" in seen.err


async def test_stats(broker: FakeBroker, postdate: Run) -> None:
    await postdate("produce", "t", "--payload", "x", "--at", "2100-01-01T00:00:00Z")
    await postdate("consume", "t", "s", "--idle", "0")
    found = await postdate("stats", "-o", "json")
    assert (found.json[0]["scheduled_messages"], found.json[0]["subscriptions"][0]["name"]) == (1, "s")
    table = await postdate("stats", "t")
    assert "scheduled messages" in table.out
    assert (await postdate("stats", "nope")).code == 3


async def test_deleting_several_goes_on_after_a_failure(broker: FakeBroker, postdate: Run) -> None:
    await postdate("topic", "create", "a")
    partly = await postdate("topic", "delete", "nope", "a")
    assert partly.code == 5
    assert partly.err == "postdate: nope: no topic nope (TOPIC_NOT_FOUND)\npostdate: 1 of 2 failed\n"
    assert (await postdate("topic", "delete", "nope")).code == 3


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["produce", "t", "--delay", "5x", "--payload", "x"], 2, "not a duration"),
        (["produce", "t", "--at", "2030-01-01T00:00:00", "--payload", "x"], 2, "no time zone"),
        (["produce", "t", "--at", "2030-01-01", "--payload", "x"], 2, "write 2030-01-01T00:00:00Z for UTC"),
        (["check", "t/"], 2, "names no subscription"),
        (["produce", "t", "--at", "2030-01-01T00:00:00Z", "--delay", "1s", "--payload", "x"], 2, "not both"),
        (["produce", "t", "--file", "/nope"], 2, "No such file"),
        (["produce", "t", "--file", "x", "--payload", "x"], 2, "not both"),
        (["produce", "t", "--count", "2"], 2, "--count requires --payload"),
        (["produce", "t", "--whole"], 2, "--whole requires --file"),
        (["produce", "t", "--payload", "x", "--replace"], 2, "--replace requires --schedule-key"),
        (["produce", "t", "--schedule-key", "k"], 2, "names one message"),
        (["produce", "t", "--payload", "x", "--count", "2", "--schedule-key", "k"], 2, "names one message"),
        (["produce", "t", "--payload", "x", "--property", "a"], 2, "NAME=VALUE"),
        (["bench", "replay", "/dev/nope"], 2, "does not exist"),
        (["bench", "replay", __file__, "--speed", "0"], 2, "above 0"),
        (["bench", "replay", __file__], 2, "begins with a date and time"),
        (["nonsense"], 2, "No such command"),
        (["topic", "get", "nope"], 3, "no topic nope (TOPIC_NOT_FOUND)"),
        (["--address", "127.0.0.1:1", "--retry-for", "0", "stats"], 4, "cannot be reached"),
        (["stats", "--address", "127.0.0.1:1", "--retry-for", "0"], 4, "cannot be reached"),
        (["-h"], 0, ""),
        (["--version"], 0, ""),
    ],
)
async def test_exit_codes_and_messages(postdate: Run, arguments: list[str], code: int, says: str) -> None:
    result = await postdate(*arguments)
    assert result.code == code
    assert says in result.err
    assert "Traceback" not in result.err


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("postdate.commands.replay._LEAD_MIN_MS", 200)
    path = tmp_path / "some.log"
    lines = [
        f"2024-01-02 10:{minute:02}:{second:02} line" for minute in range(5) for second in range(0, 60, 7)
    ]
    path.write_text("\n".join(["banner", *lines[:3], "  trace", *lines[3:]]))
    return str(path)


@pytest.mark.slow
async def test_replay_of_a_log(broker: FakeBroker, postdate: Run, log: str) -> None:
    result = await postdate("bench", "replay", log, "--speed", "10000", "--output", "json", "--no-progress")
    assert result.code == 0, result.err
    report = result.json
    assert (report["messages"], report["lines"], report["lines_skipped"], report["ok"]) == (45, 47, 1, True)
    assert report["original_ms"] == 296_000
    assert report["replay_ms"] == 30
    for each in report["subscriptions"]:
        assert (each["arrived"], each["early"], each["missing"], each["out_of_order"]) == (45, 0, 0, 0)
        assert each["late_p50_ms"] >= 0
    assert broker.topics == {}


@pytest.mark.slow
async def test_replay_table_names_the_cut_gaps(broker: FakeBroker, postdate: Run, log: str) -> None:
    result = await postdate("bench", "replay", log, "--max-gap", "5ms", "--topic", "mine", "--progress")
    assert result.code == 0
    assert "45 messages from 47 lines" in result.out
    assert "40 idle gaps cut to 5 ms" in result.out
    assert "received on replay-a" in result.err
    assert len(broker.payloads("mine")) == 45


@pytest.mark.slow
@pytest.mark.parametrize(
    ("knob", "value", "count"), [("early_ms", 500, "early"), ("drop_every", 9, "missing")]
)
async def test_replay_fails_on_a_bad_broker(
    broker: FakeBroker,
    postdate: Run,
    log: str,
    monkeypatch: pytest.MonkeyPatch,
    knob: str,
    value: int,
    count: str,
) -> None:
    monkeypatch.setattr("postdate.commands.replay._STALLED_S", 0.1)
    setattr(broker.knobs, knob, value)
    result = await postdate("bench", "replay", log, "--speed", "10000", "-o", "json")
    assert result.code == 6
    assert result.json["subscriptions"][0][count] > 0
    assert result.err == "postdate: messages are missing, early, duplicated or changed\n"


@pytest.mark.slow
async def test_bench_loads(broker: FakeBroker, postdate: Run) -> None:
    produced = await postdate("bench", "produce", "--messages", "500", "--batch", "100", "-o", "json")
    assert (produced.json["messages"], produced.json["messages_per_second"] > 0) == (500, True)
    assert (await postdate("bench", "produce", "--messages", "20", "--batch", "1")).code == 0
    delivered = await postdate("bench", "deliver", "--messages", "300", "-o", "json")
    assert delivered.json["messages"] == 300
    measured = await postdate("bench", "latency", "--duration", "50ms", "--delay", "30ms", "-o", "json")
    assert (measured.json["messages"], measured.json["early"], measured.json["missing"]) == (50, 0, 0)
    assert broker.topics == {}


async def test_refused_bench_is_one_line(broker: FakeBroker, postdate: Run) -> None:
    broker.knobs.unary_errors.append(status("PERMISSION_DENIED", "DENIED", "not you"))
    refused = await postdate("bench", "produce")
    assert (refused.code, refused.err) == (1, "postdate: not you (DENIED)\n")


def test_durations_as_people_write_them() -> None:
    assert parse_duration("1h30m") == timedelta(minutes=90)
    assert parse_duration("1.5s") == timedelta(milliseconds=1500)
    assert parse_duration("0") == timedelta(0)
    for wrong in ("", "5", "s", "1h 2m", "-1s", "1y", "9" * 40 + "w"):
        with pytest.raises(ValueError, match="is"):
            parse_duration(wrong)
    shown = [show_duration(timedelta(milliseconds=ms)) for ms in (5, 1500, 90_000, 93_784_000)]
    assert shown == ["5ms", "1.5s", "1m30s", "1d2h"]


def test_times_and_rates_as_people_write_them() -> None:
    assert parse_time("2026-12-24T18:00:00Z") == datetime(2026, 12, 24, 18, tzinfo=UTC)
    for wrong in ("tomorrow", "2026-12-24", "2026-12-24T18:00:00"):
        with pytest.raises(ValueError, match=r"is not a time|no time zone"):
            parse_time(wrong)
    assert parse_rate("2.5") == 2.5
    for wrong in ("0", "-1", "nan", "inf", "x"):
        with pytest.raises(ValueError, match="above 0"):
            parse_rate(wrong)


def test_cells_of_a_table() -> None:
    values = [None, True, 1234.5, 12345, timedelta(seconds=2), {"a": 1, "b": None}, "[x]", [], ["a", "b"]]
    assert [output.show(value) for value in values] == [
        "-",
        "yes",
        "1,234.500",
        "12,345",
        "2s",
        "a=1",
        "[x]",
        "-",
        "a, b",
    ]


async def test_who_gives_the_http_port_is_told_of_the_other(postdate: Run) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        told = await postdate("--address", f"127.0.0.1:{port}", "--retry-for", "0", "info")
    assert (told.code, told.err) == (
        4,
        "postdate: the broker cannot be reached: an HTTP server listens at this address; "
        "give the gRPC port, which is 7650 by default\n",
    )


def test_who_gives_the_default_http_port_is_told_of_the_other_at_a_change_too() -> None:
    # Of two addresses of a name the last one tells why: nobody listens at ::1.
    refused = "last error: UNKNOWN: ipv6:%5B::1%5D:7680: Failed to connect to remote host: Connection refused"
    for text in ("no connection to 127.0.0.1:7680", refused):
        told = describe(Unavailable(text, code="UNAVAILABLE"))
        assert told.endswith(
            "; 7680 is the HTTP port by default, give the gRPC port, which is 7650 by default"
        )


@pytest.mark.parametrize(
    ("message", "is_told"),
    [
        (
            "failed to connect: ipv4:127.0.0.1:7650: Failed to connect to remote host: Connection refused",
            True,
        ),
        ("no connection to 127.0.0.1:7650", True),
        ("no connection to broker.example:7650", False),
        ("recvmsg:Socket closed ipv4:127.0.0.1:7650", False),  # something is there
    ],
)
def test_who_has_no_broker_is_told_how_to_start_one(message: str, is_told: bool) -> None:
    told = describe(Unavailable(message, code="UNAVAILABLE"))
    assert ("postdate-broker serve" in told) is is_told
