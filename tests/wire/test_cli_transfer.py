"""`postdate export` and `postdate import` with a real broker: nothing is lost, nothing comes twice, whatever stops them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import postdate
from postdate import cli
from tests.process.fork_server import ForkServer
from tests.wire.conftest import Wire, within

HOUR = timedelta(hours=1)
Run = Callable[..., Awaitable[tuple[int, str, str]]]


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


def soon(minutes: int = 60) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=minutes)


async def waiting(client: postdate.Client, topic: str) -> list[postdate.ScheduledMessage]:
    return [each async for each in client.schedule.list(topic, payloads=True)]


def facts(message: postdate.ScheduledMessage) -> tuple[object, ...]:
    names = ("schedule_key", "deliver_at", "key", "properties", "ttl", "event_time", "traceparent", "payload")
    return tuple(getattr(message, name) for name in names)


async def export(run: Run, topic: str, path: Path, *options: str) -> list[dict[str, object]]:
    code, out, err = await run("export", topic, *options)
    assert (code, err[:9]) == (0, "exported ")
    path.write_text(out)  # noqa: ASYNC240
    return [json.loads(line) for line in out.splitlines()]


def file_of(path: Path, count: int, due: datetime, name: str = "a-file") -> str:
    lines = [{"postdate_export": 1, "id": name}]
    lines += [{"deliver_at": due.isoformat(), "payload": str(number)} for number in range(count)]
    lines += [{"postdate_export_end": 1, "messages": count}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


async def test_a_round_trip_changes_nothing(client: postdate.Client, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    whole = postdate.OutgoingMessage(
        b"\xff\x00",
        key="k\u00e4se",
        properties={"a": "b\n"},
        deliver_at=soon(61) + timedelta(milliseconds=7),
        schedule_key="order-17",
        ttl=timedelta(seconds=9),
        event_time=soon(-60),
        traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    )
    async with client.producer("orders") as producer:
        await producer.send_many(
            [whole, *(postdate.OutgoingMessage(b"%d" % i, deliver_at=soon(i + 62)) for i in range(1200))]
        )
        await producer.send_many([b"due"])
    lines = await export(run, "orders", path)
    assert (len(lines), lines[-1]["messages"]) == (1203, 1201)
    assert (await run("import", "copy", str(path)))[0] == 3
    await client.topics.create("copy")
    code, out, _ = await run("import", "copy", str(path), "-o", "json")
    assert (code, json.loads(out)["stored"]) == (0, 1201)
    assert [*map(facts, await waiting(client, "copy"))] == [*map(facts, await waiting(client, "orders"))]
    code, out, _ = await run("import", "copy", str(path), "-o", "json")
    assert (code, json.loads(out)["stored"], json.loads(out)["stored_before"]) == (0, 0, 1201)


async def test_part_of_a_topic_is_exported(client: postdate.Client, run: Run, tmp_path: Path) -> None:
    async with client.producer("t") as producer:
        for minutes, key in ((60, "a-1"), (120, "a-2"), (120, "b-1"), (180, "a-3")):
            await producer.send(b"x", deliver_at=soon(minutes), schedule_key=key)
    path = tmp_path / "part"
    lines = await export(run, "t", path, "--from", "90m", "--until", "150m", "--key-prefix", "a-")
    assert [line.get("schedule_key") for line in lines[1:-1]] == ["a-2"]
    assert (await run("export", "nope"))[0] == 3


async def test_a_run_that_was_killed_is_gone_on_with(
    fork_server: ForkServer, wire: Wire, client: postdate.Client, run: Run, tmp_path: Path
) -> None:
    path = file_of(tmp_path / "many", 6000, soon())
    # So slow that there is a middle, and so forgetful that only the greatest number tells what is stored.
    await client.topics.create("t", postdate.TopicPolicy(max_produce_rate=2000, dedup_entries=500))
    process = await fork_server.fork(("-m", "postdate.cli", "import", "t", path), os.environ)

    async def stored() -> int:
        return (await client.schedule.count("t")).messages

    async with asyncio.timeout(20):
        while not await stored():
            assert process.returncode is None
            await asyncio.sleep(0.01)
    process.kill()
    await within(process.wait())
    before = await stored()
    assert 0 < before < 6000
    await client.topics.update("t", max_produce_rate=0)
    code, out, _ = await run("import", "t", path, "-o", "json")
    found = json.loads(out)
    assert (code, found["stored"] + found["stored_before"], await stored()) == (0, 6000, 6000)
    assert found["stored_before"] >= before
    assert {each.payload for each in await waiting(client, "t")} == {b"%d" % number for number in range(6000)}


async def test_what_is_due_already_is_delivered_at_once_or_left_out(
    client: postdate.Client, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    for topic in ("at-once", "left-out"):
        await client.topics.create(topic)
        await client.subscriptions.create(topic, "s")
    file_of(path, 3, soon(-60))
    code, _, err = await run("import", "at-once", str(path))
    assert (code, "3 messages due already are delivered at once" in err) == (0, True)
    received = await client.receive("at-once", "s", max_messages=9, wait=timedelta(seconds=5))
    assert len(received.messages) == 3
    code, out, _ = await run("import", "left-out", str(path), "--skip-past", "-o", "json")
    assert (code, json.loads(out)["skipped_past_due"], json.loads(out)["stored"]) == (0, 3, 0)
    assert not (await client.receive("left-out", "s")).messages


async def test_a_schedule_key_that_waits_already_is_named_or_replaced(
    client: postdate.Client, run: Run, tmp_path: Path
) -> None:
    async with client.producer("t") as producer:
        await producer.send(b"new", deliver_at=soon(), schedule_key="k")
    path = tmp_path / "file"
    await export(run, "t", path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        lines[0]
        + lines[1].replace('"k"', '"other"')
        + lines[1].replace("new", "newer")
        + lines[2].replace("1}", "2}")
    )
    code, _, err = await run("import", "t", str(path))
    assert (code, "line 3" in err, len(await waiting(client, "t"))) == (1, True, 1)
    assert (await run("import", "t", str(path), "--replace"))[0] == 0
    assert sorted(each.payload or b"" for each in await waiting(client, "t")) == [b"new", b"newer"]


async def test_what_is_refused_in_the_middle_can_be_mended(
    client: postdate.Client, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    file_of(path, 1500, soon())
    lines = path.read_text().splitlines(keepends=True)
    bad = lines[1301].replace("}", ', "schedule_key": "taken"}')
    path.write_text("".join([*lines[:1301], bad, *lines[1302:]]))
    async with client.producer("t") as producer:
        await producer.send(b"holder", deliver_at=soon(), schedule_key="taken")
    code, _, err = await run("import", "t", str(path))
    assert (code, "line 1,302" in err, "SCHEDULE_KEY_TAKEN" in err) == (5, True, True)
    assert "at least 1,000 messages of 1,500 are stored, run it again" in err
    path.write_text("".join(lines))
    code, out, _ = await run("import", "t", str(path), "-o", "json")
    assert (code, json.loads(out)["stored_before"], json.loads(out)["stored"]) == (0, 1000, 500)
    assert (await client.schedule.count("t")).messages == 1501


async def test_nothing_is_sent_of_a_file_that_is_wrong(
    client: postdate.Client, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    await client.topics.create("t", postdate.TopicPolicy(max_delay=timedelta(hours=2)))
    file_of(path, 3, soon())
    good = path.read_text()
    for text, says in (
        (good.replace('"2"', "2"), "line 4: payload must be a string; nothing was sent"),
        (good.rpartition('{"postdate_export_end"')[0], "cut off"),
        (
            good.replace('"1"', '"' + "x" * (1 << 21) + '"'),
            "line 3: payload has 2,097,152 bytes; this broker takes 1,048,576",
        ),
    ):
        path.write_text(text)
        code, _, err = await run("import", "t", str(path))
        assert (code, says in err) == (1, True), err
    file_of(path, 1, soon(180))
    code, _, err = await run("import", "t", str(path))
    assert (code, "line 2" in err, "max_delay" in err) == (1, True, True)
    path.write_text(good)
    code, out, err = await run("import", "t", str(path), "--dry-run", "-o", "json")
    assert (code, json.loads(out)["messages"], "nothing was sent" in err) == (0, 3, True)
    assert await waiting(client, "t") == []
    await client.topics.update("t", dedup_window=timedelta(0))
    code, _, err = await run("import", "t", str(path))
    assert (code, "--dedup-window" in err) == (1, True)
