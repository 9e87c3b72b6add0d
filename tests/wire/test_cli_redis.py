"""`postdate import redis` with a real Redis and a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

import postdate
from postdate import cli
from tests.process.fork_server import ForkServer
from tests.programs import need_program
from tests.wire.conftest import Wire

Run = Callable[..., Awaitable[tuple[int, Any, str]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Redis of our own, on a unix socket."""
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "s"
    program = need_program("redis-server")
    options = [
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    process = subprocess.Popen([program, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "ready to accept connections" in line.lower():
                break
        else:
            pytest.fail("redis-server ended")
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def source(server: str) -> Iterator[redis.Redis]:
    with redis.from_url(server) as connection:
        connection.flushall()
        yield connection


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address) as connected:
        await connected.topics.create("t")
        yield connected


@pytest.fixture
def run(wire: Wire, server: str, capfd: pytest.CaptureFixture[str]) -> Run:
    async def run_one(*arguments: str) -> tuple[int, Any, str]:
        capfd.readouterr()
        options = ("--url", server, "--address", wire.server.grpc_address, "-o", "json")
        code = await asyncio.to_thread(cli.run, ("import", "redis", *arguments, *options))
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else None, err

    return run_one


def due_s(minutes: float = 60) -> float:
    return round((datetime.now(UTC) + timedelta(minutes=minutes)).timestamp(), 3)


async def waiting(client: postdate.Client) -> list[postdate.ScheduledMessage]:
    return [each async for each in client.schedule.list("t", payloads=True)]


async def test_members_wait_as_messages_and_redis_keeps_them(
    client: postdate.Client, run: Run, source: redis.Redis
) -> None:
    at = due_s()
    members = {b"member %d" % number: at + number for number in range(1500)} | {b"\xff\x00": at}
    source.zadd("jobs", members)
    for _ in range(2):  # a second run finds what waits, and replaces it
        code, out, _ = await run("t", "jobs")
        assert (code, out["members"], out["stored"], out["removed"]) == (0, 1501, 1501, 0)
        found = await waiting(client)
        assert {each.payload: each.deliver_at.timestamp() for each in found} == pytest.approx(
            members, abs=0.0011
        )
        assert all(each.deliver_at.timestamp() >= members[each.payload or b""] for each in found)
        assert len(found) == 1501
    assert source.zcard("jobs") == 1501


async def test_a_dry_run_changes_nothing(client: postdate.Client, run: Run, source: redis.Redis) -> None:
    source.zadd("jobs", {"a": due_s(), "b": due_s(-1)})
    code, out, _ = await run("t", "jobs", "--dry-run", "--move")
    assert (code, out["would_be_stored"], out["past_due"]) == (0, 2, 1)
    assert (source.zcard("jobs"), await waiting(client)) == (2, [])


async def test_moved_members_leave_redis_once_they_are_stored(
    client: postdate.Client, run: Run, source: redis.Redis
) -> None:
    source.zadd(
        "jobs", {f"{number}": due_s() for number in range(700)} | {"later": due_s(300), "bad": float("inf")}
    )
    code, out, err = await run("t", "jobs", "--move", "--until", "2h")
    assert (code, out["stored"], out["removed"], out["refused"]) == (5, 700, 700, 1)
    assert (out["refusals"][0]["member"], "stay in Redis" in err) == ("bad", True)
    assert source.zrange("jobs", 0, -1) == [b"later", b"bad"]
    assert len(await waiting(client)) == 700


async def test_a_move_that_was_killed_is_gone_on_with(
    fork_server: ForkServer,
    client: postdate.Client,
    run: Run,
    source: redis.Redis,
    server: str,
    wire: Wire,
) -> None:
    members = {f"{number}": due_s() for number in range(4000)}
    source.zadd("jobs", members)
    await client.topics.update("t", max_produce_rate=1500)  # so slow that there is a middle
    command = (
        "-m",
        "postdate.cli",
        "--address",
        wire.server.grpc_address,
        "import",
        "redis",
        "t",
        "jobs",
        "--move",
    )
    process = await fork_server.fork((*command, "--url", server), os.environ)
    async with asyncio.timeout(20):
        while source.zcard("jobs") == 4000:
            assert process.returncode is None
            await asyncio.sleep(0.01)
    process.kill()
    await process.wait()
    left = {member.decode() for member in source.zrange("jobs", 0, -1)}
    there = {(each.payload or b"").decode() for each in await waiting(client)}
    assert 0 < len(left) < 4000
    assert left | there == members.keys()  # whatever left Redis is stored
    await client.topics.update("t", max_produce_rate=0)
    assert (await run("t", "jobs", "--move"))[0] == 0
    found = [(each.payload or b"").decode() for each in await waiting(client)]
    assert (source.zcard("jobs"), len(found), set(found)) == (0, 4000, members.keys())


async def test_a_member_that_is_scheduled_anew_meanwhile_stays(
    client: postdate.Client, run: Run, source: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.zadd("jobs", {"a": due_s(), "b": due_s()})
    send_many = postdate.Producer.send_many

    async def slow(*args: Any, **options: Any) -> Any:
        source.zadd("jobs", {"a": due_s(120)})
        return await send_many(*args, **options)

    monkeypatch.setattr(postdate.Producer, "send_many", slow)
    assert (await run("t", "jobs", "--move"))[1]["removed"] == 1
    monkeypatch.undo()
    assert source.zrange("jobs", 0, -1) == [b"a"]
    # The next run gives it the new time; there is one message for it all the while.
    assert (await run("t", "jobs", "--move"))[1]["removed"] == 1
    found = {each.payload: each.deliver_at for each in await waiting(client)}
    assert (len(found), source.zcard("jobs")) == (2, 0)
    assert found[b"a"] - found[b"b"] > timedelta(minutes=59)


async def test_nothing_leaves_redis_that_the_broker_refused(
    client: postdate.Client, run: Run, source: redis.Redis
) -> None:
    await client.topics.update("t", max_delay=timedelta(hours=2))
    source.zadd("jobs", {"near": due_s(), "far": due_s(300), "nearer": due_s(30)})
    code, out, _ = await run("t", "jobs", "--move")
    assert (code, out["stored"], out["refusals"][0]["member"]) == (5, 2, "far")
    assert "DELIVER_AT_TOO_FAR" in out["refusals"][0]["why"]
    assert source.zrange("jobs", 0, -1) == [b"far"]


async def test_fields_of_json_members(client: postdate.Client, run: Run, source: redis.Redis) -> None:
    job = {"id": 17, "shop": "s1", "body": {"n": 1}}
    at = due_s() * 1000
    source.zadd(
        "jobs", {json.dumps(job): at, json.dumps(job | {"x": 1}): at, "text": at, json.dumps({"id": 18}): at}
    )
    fields = ("--payload-field", "body", "--key-field", "shop", "--schedule-key-field", "id")
    code, out, _ = await run("t", "jobs", "--unit", "ms", *fields)
    assert (code, out["stored"], out["refused"]) == (5, 1, 3)
    assert {each["why"].split(",")[0] for each in out["refusals"]} == {
        "another member has its schedule key",
        "it is not a JSON object",
        "it has no field body",
    }
    (found,) = await waiting(client)
    assert (found.payload, found.key, found.schedule_key) == (b'{"n": 1}', "s1", "17")


async def test_what_is_due_already_comes_at_once_or_stays(
    client: postdate.Client, run: Run, source: redis.Redis
) -> None:
    await client.subscriptions.create("t", "s")
    source.zadd("jobs", {"late": due_s(-5)})
    code, out, _ = await run("t", "jobs", "--skip-past", "--move")
    assert (code, out["skipped_past_due"], out["removed"], source.zcard("jobs")) == (0, 1, 0, 1)
    code, out, _ = await run("t", "jobs", "--move")
    assert (code, out["past_due"], out["removed"], source.zcard("jobs")) == (0, 1, 1, 0)
    assert (await client.receive("t", "s", wait=timedelta(seconds=5))).messages[0].payload == b"late"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nope", "jobs"), 3, "TOPIC_NOT_FOUND"),
        (("t", "text"), 1, "WRONGTYPE"),
        (("t", "typo"), 0, "Redis has nothing under typo"),
        (("t", "seconds"), 1, "cannot be sent as messages"),
        (("t", "jobs", "--url", "nonsense"), 2, "--url"),
        (("t", "jobs", "--url", "unix:///nope"), 4, "Redis cannot be reached"),
    ],
)
async def test_what_goes_wrong_is_said(
    client: postdate.Client,
    wire: Wire,
    server: str,
    source: redis.Redis,
    capfd: Any,
    arguments: Any,
    code: int,
    says: str,
) -> None:
    source.set("text", "x")
    source.zadd("seconds", {"a": due_s() * 1000})
    command = ("import", "redis", "--url", server, "--address", wire.server.grpc_address, *arguments)
    assert await asyncio.to_thread(cli.run, command) == code
    assert says in capfd.readouterr().err


async def test_without_the_package_it_says_how_to_get_it(
    client: postdate.Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    code, _, err = await run("t", "jobs")
    assert (code, "pip install 'postdate[cli,redis]'" in err) == (1, True)
