"""Every example of docs/sdk.md runs, against a fake broker, with no changes but the address."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import postdate.otel
import postdate.subscription
import postdate.sync
import postdate.testing

PAGE = Path(__file__).parents[2] / "docs/sdk.md"
LIMIT_SECONDS = 20.0


def blocks() -> list[tuple[str, str]]:
    """Each example with the heading that it stands under."""
    found: list[tuple[str, str]] = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        found += [(heading, code) for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]
    assert len(found) >= 11
    return found


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[postdate.testing.FakeBroker]:
    async with postdate.testing.broker() as fake:
        for module in (postdate, postdate.sync):
            real = module.connect
            monkeypatch.setattr(
                module, "connect", lambda address, real=real, **options: real(here(address, fake), **options)
            )
        yield fake
    postdate.otel.uninstrument()


def here(address: str, fake: postdate.testing.FakeBroker) -> str:
    return fake.address if address == "localhost:7650" else address


@pytest.mark.parametrize(("heading", "code"), blocks(), ids=[heading for heading, _ in blocks()])
async def test_example_runs(fake: postdate.testing.FakeBroker, heading: str, code: str):
    async with fake.client() as client:
        await client.topics.create("orders")
        await client.subscriptions.create("orders", "billing")
        async with client.producer("orders") as producer:
            await producer.send(b"a message to have")
        names: dict[str, Any] = {"client": client, "timedelta": timedelta, "postdate": postdate}
        async with asyncio.timeout(LIMIT_SECONDS):
            running = asyncio.ensure_future(run(code, names))
            while not running.done():
                await stop_what_is_done(client, fake)
                await asyncio.sleep(0.01)
            await running
        for name in [each for each in names if each.startswith("test_")]:
            await names[name]()


async def run(code: str, names: dict[str, Any]) -> None:
    # A program of its own has a loop of its own, so it runs in a thread, and what is without async too.
    if "asyncio.run(" in code or "postdate.sync" in code:
        await in_thread(lambda: exec(compiled(code), names))
    else:
        outcome = eval(compiled(code), names)
        if inspect.isawaitable(outcome):
            await outcome


async def in_thread(program: Callable[[], None]) -> None:
    """Run a program in a thread that holds up nobody if the program does not end."""
    ended: Future[None] = Future()
    ended.set_running_or_notify_cancel()

    def whole() -> None:
        try:
            ended.set_result(program())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=whole, daemon=True).start()
    await asyncio.wrap_future(ended)


def compiled(code: str) -> CodeType:
    return compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def stop_what_is_done(client: postdate.Client, fake: postdate.testing.FakeBroker) -> None:
    """Examples go on for ever; stop those that have settled all there was."""
    for subscription in list(postdate.subscription.entered):
        if subscription.address != fake.address:
            continue
        (stats,) = await client.stats(subscription.topic)
        counts = next(each for each in stats.subscriptions if each.name == subscription.name)
        left = counts.ready_messages + counts.leased_messages + counts.scheduled_messages
        if not left and subscription.loop.is_running() and subscription.topic == "orders":
            subscription.loop.call_soon_threadsafe(subscription.stop)


def test_every_exception_is_explained():
    page = PAGE.read_text()
    kinds = [
        each
        for each in vars(postdate).values()
        if inspect.isclass(each) and issubclass(each, postdate.PostdateError)
    ]
    missing = [
        kind.__name__
        for kind in kinds
        if f"`{kind.__name__}`" not in page and kind is not postdate.PostdateError
    ]
    assert kinds
    assert not missing
