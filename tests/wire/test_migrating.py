"""The Postdate code of docs/migrating does what the pages say, against a real broker whose clock is stepped."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest

import postdate
from postdate import cli
from tests.wire.conftest import Ahead, Wire, within

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "migrating").glob("*.md"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_QUARTER = timedelta(minutes=15)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in _BLOCK.findall(page.read_text()) if found == language]


def code(name: str) -> dict[str, Any]:
    """Run the Postdate blocks of a page; returns their names. Those of the other system come before `## After`."""
    text = (DOCS / "migrating" / f"{name}.md").read_text()
    namespace: dict[str, Any] = {"__name__": name}
    for language, body in _BLOCK.findall(text.partition("\n## After\n")[2]):
        if language == "python":
            exec(compile(body, f"docs/migrating/{name}.md", "exec", dont_inherit=True), namespace)
    return namespace


@pytest.fixture
async def client(timed: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(timed.server.grpc_address) as connected:
        yield connected


@asynccontextmanager
async def handled(work: Callable[..., Any], client: postdate.Client) -> AsyncIterator[asyncio.Queue[bytes]]:
    """Runs a page's worker; the queue has what it handled."""
    queue: asyncio.Queue[bytes] = asyncio.Queue()

    async def handle(payload: bytes) -> None:
        queue.put_nowait(payload)

    task = asyncio.create_task(work(client, handle))
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def comes(queue: asyncio.Queue[Any]) -> Any:
    return await within(queue.get())


async def waits(client: postdate.Client, topic: str) -> list[str]:
    return [each.schedule_key async for each in client.schedule.list(topic)]


async def test_celery(client: postdate.Client, ahead: Ahead, tmp_path: Path, timed: Wire) -> None:
    page = code("celery")
    await client.subscriptions.create("tasks", "celery")
    sent: asyncio.Queue[Any] = asyncio.Queue()

    def send_task(name: str, args: Any, kwargs: Any) -> None:
        sent.put_nowait((name, args, kwargs))

    async with client.producer("tasks") as producer:
        for number in (17, 18):
            await page["send_later"](
                producer, "orders.close", [number], countdown=_QUARTER, task_id=f"close-{number}"
            )
    assert await page["revoke"](client, "close-17")
    assert not await page["revoke"](client, "close-17")
    due = datetime.now(UTC) + timedelta(hours=1)
    request = {"id": "a", "name": "orders.remind", "args": [5], "kwargs": {"by": "mail"}}
    # The way a worker reports it; two may know of the same task.
    naive = due.astimezone().replace(tzinfo=None).isoformat()
    scheduled = {f"celery@{host}": [{"eta": naive, "priority": 6, "request": request}] for host in "ab"}
    file = io.StringIO()
    assert page["write_scheduled"](scheduled, file, "celery-2026") == 1
    path = tmp_path / "scheduled.jsonl"
    path.write_text(file.getvalue())
    command = ("import", "tasks", str(path), "--address", timed.server.grpc_address)
    assert await asyncio.to_thread(cli.run, command) == 0
    assert [each.deliver_at async for each in client.schedule.list("tasks", key_prefix="a")] == [
        due.replace(microsecond=-(-due.microsecond // 1000) * 1000 % 1_000_000)
        + timedelta(seconds=due.microsecond > 999_000)
    ]
    handing = asyncio.create_task(page["hand_over"](client, send_task))
    ahead.step(900_000)
    assert await comes(sent) == ("orders.close", [18], {})
    ahead.step(2_700_000)
    assert await comes(sent) == ("orders.remind", [5], {"by": "mail"})
    handing.cancel()
    await asyncio.gather(handing, return_exceptions=True)


async def test_rabbitmq(client: postdate.Client, ahead: Ahead) -> None:
    page = code("rabbitmq")
    await client.subscriptions.create("orders", "closing")
    async with client.producer("orders") as producer, handled(page["consume"], client) as queue:
        await page["publish"](producer, b"17", x_delay=900_000, key="shop-3")
        assert queue.empty()
        ahead.step(900_000)
        assert await comes(queue) == b"17"


async def test_redis(client: postdate.Client, ahead: Ahead) -> None:
    page = code("redis")
    await client.subscriptions.create("orders", "closing")
    async with client.producer("orders") as producer, handled(page["work"], client) as queue:
        for _ in range(2):  # a second one replaces the first
            await page["close_later"](producer, 17)
        assert await waits(client, "orders") == ["order-17"]
        ahead.step(900_000)
        assert json.loads(await comes(queue)) == {"order": 17}


async def test_sqs(client: postdate.Client, ahead: Ahead) -> None:
    page = code("sqs")
    await client.subscriptions.create("jobs", "workers")
    due = datetime.now(UTC) + timedelta(days=3)
    hop = json.dumps({"id": "job-2", "due": due.timestamp()})
    async with client.producer("jobs") as producer, handled(page["work"], client) as queue:
        await page["send"](producer, "job-1", b"first", due - timedelta(hours=1))
        for _ in range(2):  # as SQS may deliver it
            await page["last_hop"](producer, hop)
        assert await waits(client, "jobs") == ["job-1", "job-2"]
        assert queue.empty()
        ahead.step(3 * 86_400_000)
        assert [await comes(queue), await comes(queue)] == [b"first", hop.encode()]


async def test_pulsar(client: postdate.Client, ahead: Ahead) -> None:
    page = code("pulsar")
    kind = postdate.SubscriptionType.KEY_SHARED
    await client.subscriptions.create("orders", "billing", type=kind)
    due = datetime.now(UTC) + timedelta(minutes=14)
    async with client.producer("orders") as producer, handled(page["billing"], client) as queue:
        await page["close_later"](producer, 17, "shop-3")
        for _ in range(2):
            await page["pass_on"](producer, b"old", "1:2:3", due)
        assert await waits(client, "orders") == ["pulsar/1:2:3", "order-17"]
        ahead.step(900_000)
        assert [await comes(queue), await comes(queue)] == [b"old", b"close order 17"]


def test_each_page_is_run() -> None:
    assert {page.stem for page in PAGES} == {"index", "celery", "pulsar", "rabbitmq", "redis", "sqs"}
    assert all(
        f"async def test_{page.stem}(" in Path(__file__).read_text() for page in PAGES if page.stem != "index"
    )


def commands() -> list[str]:
    """The lines of `postdate` in the pages: whole ones in shell blocks, and in the text perhaps only a name."""
    found = []
    for page in [DOCS / "cli.md", *PAGES]:
        lines = [line for body in blocks(page, "sh") for line in body.splitlines()]
        lines += re.findall(r"`(postdate [a-z][^`]* [^`]*)`", page.read_text())
        found += [line.partition(" > ")[0] for line in lines if line.startswith("postdate ")]
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_a_command_of_a_page_is_one(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("orders.jsonl", "scheduled.jsonl", "dpkg.log"):
        (tmp_path / name).touch()
    command: click.Command = cli.cli
    # Not every machine has the log that the manual replays.
    context = command.make_context("postdate", shlex.split(line.replace("/var/log/dpkg.log", "dpkg.log"))[1:])
    while isinstance(command, click.Group):
        name, found, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command = found
        if arguments or isinstance(command, click.Group):
            context = command.make_context(name, arguments, parent=context)
