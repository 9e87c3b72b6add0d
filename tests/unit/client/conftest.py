"""A fake broker, a client of it, and the `postdate` command."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate import cli
from tests.unit.client.fake_server import FakeBroker


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    fake = FakeBroker()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def client(broker: FakeBroker) -> AsyncIterator[postdate.Client]:
    address = f"127.0.0.1:{broker.port}"
    retry_for = timedelta(seconds=5)
    async with postdate.connect(address, retry_for=retry_for, rng=random.Random(1)) as connected:
        yield connected


class Outcome:
    """Result of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(name="postdate")
def command(
    broker: FakeBroker, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    """Runs the command in a thread: it has a loop of its own, and the broker lives in ours."""
    monkeypatch.setenv("POSTDATE_ADDRESS", f"127.0.0.1:{broker.port}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("COLUMNS", raising=False)
    # Signal handlers belong to the main thread; here the command runs in another.
    monkeypatch.setattr(asyncio.BaseEventLoop, "add_signal_handler", lambda *_: None, raising=False)
    monkeypatch.setattr("asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler", lambda *_: None)

    async def run(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = await asyncio.to_thread(_code_of, arguments)
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


def _code_of(arguments: tuple[str, ...]) -> int:
    try:
        return cli.run(arguments)
    except SystemExit as end:  # click's own, when it completes for a shell
        return int(end.code or 0)
