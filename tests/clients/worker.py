"""Checks of the example workers of all languages: their output, judged in one place."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from asyncio.subprocess import PIPE, STDOUT
from collections import Counter
from pathlib import Path

import postdate
from tests.process.conftest import Start

ROOT = Path(__file__).parents[2]
COUNT = 20
LIMIT_S = 120
BUILD_LIMIT_S = 400


def copied(name: str, root: Path) -> Path:
    """The example's sources below `root`, with the protos where it looks for them. Two builds in one folder disturb
    each other, and what one leaves behind would hide what the next lacks."""
    for each in ("protos", "third_party"):
        (root / each).symlink_to(ROOT / each)
    ignored = shutil.ignore_patterns("target", "v1")
    return Path(shutil.copytree(ROOT / "clients" / name, root / "clients" / name, ignore=ignored))


def build(*command: str, folder: Path, **environ: str) -> str:
    """Return the output of a build step, which must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=BUILD_LIMIT_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


async def run(*command: str, environ: dict[str, str], status: int = 0) -> str:
    """Return the output of the example, which must end with this status."""
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | environ, stdout=PIPE, stderr=STDOUT
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == status, f"{command}\n{out.decode()}"
    return out.decode()


async def check_restart(
    start: Start, tmp_path: Path, *command: str, lease_ms: str = "2s", **environ: str
) -> None:
    """A worker whose messages take more than twice their lease goes on over a kill -9 of the broker, and holds its leases."""
    settings = {"data_dir": str(tmp_path / "data"), "lease_ms": lease_ms}
    broker = await (await start(**settings)).serving()
    address = broker.grpc_address
    example = asyncio.ensure_future(run(*command, environ={**environ, "POSTDATE_ADDRESS": address}))
    async with postdate.connect(address) as client:
        while not example.done() and not await held(client):
            await asyncio.sleep(0.05)
    assert not example.done(), example.result()
    await broker.kill()
    broker = await (await start(**settings | {"grpc_address": address})).serving()
    told = await example
    handled = Counter(re.findall(r"handling (order \d+), attempt", told))
    assert handled.keys() == {f"order {number}" for number in range(COUNT)}, told
    # At most those that were begun as the broker was killed are handled twice: without extensions all come again.
    assert sum(handled.values()) <= COUNT + 4, told
    async with postdate.connect(address) as client:
        (stats,) = await client.stats("orders")
        assert [(one.ready_messages, one.leased_messages) for one in stats.subscriptions] == [(0, 0)]


async def check_stop(start: Start, tmp_path: Path, *command: str, status: int, **environ: str) -> None:
    """SIGTERM: what was begun is done and acknowledged, what was not begun is left for others, and nothing is held."""
    broker = await (await start(data_dir=str(tmp_path / "data"))).serving()
    environment = os.environ | environ | {"POSTDATE_ADDRESS": broker.grpc_address}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE, stderr=STDOUT)
    try:
        async with asyncio.timeout(LIMIT_S):
            assert process.stdout is not None
            told = ""
            while not told.count("handling order"):
                line = await process.stdout.readline()
                assert line, told
                told += line.decode()
            process.terminate()
            told += (await process.stdout.read()).decode()
            assert await process.wait() == status, told
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    begun = told.count("handling order")
    assert 0 < begun < COUNT and f"{begun} handled" in told, told
    async with postdate.connect(broker.grpc_address) as client:
        (stats,) = await client.stats("orders")
        (subscription,) = stats.subscriptions
        left = subscription.ready_messages + subscription.scheduled_messages
        assert (left, subscription.leased_messages) == (COUNT - begun, 0), told


async def held(client: postdate.Client) -> int:
    """Count the messages that consumers hold."""
    return sum(one.leased_messages for each in await client.stats() for one in each.subscriptions)
