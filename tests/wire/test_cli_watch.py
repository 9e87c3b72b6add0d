"""`postdate check` and `postdate tail` with a real broker, and contexts with one that wants TLS and knows its users."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate import cli
from postdate.commands import tail
from postdate.commands.check import CheckLimits, judge
from tests.certificates import Authority
from tests.process.fork_server import ForkServer
from tests.wire.conftest import Serve, Wire, within

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address) as connected:
        yield connected


@pytest.fixture
def run(wire: Wire, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("POSTDATE_ADDRESS", wire.server.grpc_address)
    monkeypatch.setattr("asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler", lambda *_: None)

    async def run_one(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = await asyncio.to_thread(cli.run, arguments)
        return (code, *capfd.readouterr())

    return run_one


async def names(client: postdate.Client) -> list[str]:
    return [each.name async for each in client.subscriptions.list("t")]


# -- check -----------------------------------------------------------------------------------------------------


async def test_a_check_is_one_line_and_0_or_6(client: postdate.Client, run: Run) -> None:
    await client.subscriptions.create("t", "s")
    async with client.producer("t") as producer:
        await producer.send_many([b"x"] * 5)
    code, out, err = await run("check")
    assert (code, err, out.count("\n"), out[:32]) == (0, "", 1, "POSTDATE OK - version 0.1.0, 1 t")
    code, out, err = await run(
        "check", "t/s", "--max-ready", "4", "--min-consumers", "1", "--max-dead-letters", "0"
    )
    assert (code, err) == (6, "")
    assert out == (
        "POSTDATE CRITICAL - t/s: ready 5, at most 4; t/s: consumers 0, at least 1"
        " | 't/s ready'=5;;4 't/s consumers'=0;;1: 't/s dead_letters'=0;;0\n"
    )
    generous = ("--max-ready", "5", "--max-lateness", "9s", "--max-ready-age", "1h", "--min-consumers", "0")
    code, out, _ = await run("check", "t", *generous, "-o", "json")
    found = json.loads(out)
    assert (code, found["ok"], [each["check"] for each in found["findings"]]) == (
        0,
        True,
        ["lateness_ms", "ready_age_ms", "ready", "consumers"],
    )
    async with client.subscribe("t", "s") as subscription:
        await subscription.receive_many(5)
        assert (await run("check", "t", "--min-consumers", "1", "--max-ready", "0"))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "no topic"),
        (["t/nope"], "no subscription nope of t"),
        (["t", "--min-consumers", "1"], "t has no subscription"),
        (["--address", "127.0.0.1:1", "--retry-for", "0"], "cannot be reached"),
    ],
)
async def test_what_a_check_cannot_look_at_is_critical(
    client: postdate.Client, run: Run, arguments: list[str], says: str
) -> None:
    await client.topics.create("t")
    code, out, err = await run("check", *arguments)
    assert (code, err, out.count("\n"), says in out) == (6, "", 1, True), out


async def test_lateness_is_what_the_broker_itself_owes(client: postdate.Client) -> None:
    await client.topics.create("t")
    info = await client.server_info()
    (stats,) = await client.stats("t")
    owed = postdate.TopicStats(
        **{name: getattr(stats, name) for name in stats.__slots__ if name != "next_due_time"},
        next_due_time=info.broker_time - timedelta(seconds=7),
    )
    for limit, good in ((5, False), (7, True)):
        assert judge(info, (owed,), (), CheckLimits(max_lateness=timedelta(seconds=limit))).is_good is good
    assert judge(info, (stats,), (), CheckLimits(max_lateness=timedelta(0))).is_good


# -- tail ------------------------------------------------------------------------------------------------------


async def test_tail_shows_what_becomes_due_and_disturbs_nobody(client: postdate.Client, run: Run) -> None:
    await client.subscriptions.create("t", "s")
    async with client.producer("t") as producer:
        await producer.send(b"gone before")
        await producer.send(b"due while it looks\x1b[2J", deliver_after=timedelta(seconds=1))
        await producer.send(b"later", deliver_after=timedelta(hours=1))
        code, out, _ = await run("tail", "t", "--count", "1")
    assert (code, out.endswith("due while it looks\\x1b[2J\n"), out.count("\n")) == (0, True, 1)
    assert await names(client) == ["s"]
    received = await client.receive("t", "s", max_messages=9, wait=timedelta(seconds=5))
    assert [(each.payload, each.attempt) for each in received.messages][:1] == [(b"gone before", 1)]


async def test_tail_of_what_is_produced(client: postdate.Client, run: Run) -> None:
    await client.topics.create("t")
    tailing = asyncio.create_task(run("tail", "t", "--produced", "--count", "1", "-o", "jsonl"))
    async with asyncio.timeout(10), client.producer("t") as producer:
        while (
            not (await client.stats("t"))[0].subscriptions
            or not (await client.stats("t"))[0].subscriptions[0].consumers
        ):
            await asyncio.sleep(0.01)
        await producer.send(b"later", deliver_after=timedelta(hours=1))
    code, out, _ = await within(tailing)
    assert (code, json.loads(out)["payload"]) == (0, "later")
    assert await names(client) == []


async def test_an_interrupted_tail_ends_well(
    fork_server: ForkServer, wire: Wire, client: postdate.Client
) -> None:
    await client.topics.create("t")
    command = ("-m", "postdate.cli", "--address", wire.server.grpc_address, "tail", "t")
    process = await fork_server.fork(command, os.environ)
    assert b"following t" in await within(process.stderr.readline())
    process.send_signal(signal.SIGINT)
    assert await within(process.wait()) == 0
    assert await names(client) == []


async def test_what_a_killed_tail_left_behind_is_deleted_by_the_next(
    client: postdate.Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.subscriptions.create("t", "postdate-tail-old")
    await client.subscriptions.create("t", "s")
    async with client.producer("t") as producer:
        await producer.send(b"x", deliver_after=timedelta(seconds=1))
        assert (await run("tail", "t", "--count", "1"))[0] == 0
        assert sorted(await names(client)) == [
            "postdate-tail-old",
            "s",
        ]  # young: its consumer may be on its way
        monkeypatch.setattr(tail, "_ABANDONED_AFTER", timedelta(0))
        await producer.send(b"x", deliver_after=timedelta(seconds=1))
        assert (await run("tail", "t", "--count", "1"))[0] == 0
    assert await names(client) == ["s"]


async def test_tail_says_what_it_cannot_do(client: postdate.Client, run: Run) -> None:
    await client.topics.create("t")
    for arguments, code, says in (
        (["nope"], 3, "TOPIC_NOT_FOUND"),
        (["t", "--scheduled"], 2, "requires a terminal"),
        (["t", "--scheduled", "--produced"], 2, "cannot be combined with"),
    ):
        found = await run("tail", *arguments)
        assert (found[0], says in found[2]) == (code, True), found


async def test_the_live_view_is_a_line_a_message(client: postdate.Client) -> None:
    now = datetime.now(UTC)
    async with client.producer("t") as producer:
        await producer.send(b"evil\x1b[2J[bold]", deliver_at=now + timedelta(hours=1), schedule_key="k")
    found: list[Any] = [each async for each in client.schedule.list("t", payloads=True)]
    table = tail.upcoming("t", 1, found, now)
    cells = [list(column.cells)[0] for column in table.columns]  # noqa: RUF015
    assert [cell.plain for cell in cells[1:]] == ["1h", "1:0", "k", "evil\\x1b[2J[bold]"]


# -- contexts --------------------------------------------------------------------------------------------------


async def test_a_context_reaches_a_broker_with_tls(
    serve: Serve, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("POSTDATE_ADDRESS", raising=False)
    authority = Authority(tmp_path)
    pair = authority.issue("server", is_local=True)
    wire = await serve(tls_cert_file=pair.cert_file, tls_key_file=pair.key_file)

    async def run(*arguments: str) -> int:
        return await asyncio.to_thread(cli.run, (*arguments, "--retry-for", "0"))

    address = ("--address", wire.server.grpc_address)
    assert await run("context", "add", "safe", *address, "--tls-ca", str(authority.ca_file), "--use") == 0
    assert await run("context", "add", "plain", *address) == 0
    assert await run("check") == 0
    assert await run("topic", "list", "--context", "plain") == 4
    assert await run("topic", "list", *address) == 4  # an address alone has no certificate
    capfd.readouterr()
    assert await run("info", "-o", "json") == 0
    assert json.loads(capfd.readouterr().out)["address"] == wire.server.grpc_address
