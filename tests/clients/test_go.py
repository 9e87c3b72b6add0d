"""The example in Go: it builds from the protos alone, and its worker goes on over a restart of the broker."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

import postdate
from tests.process.conftest import Start, start

__all__ = ["start"]  # the fixture

ROOT = Path(__file__).parents[2]
BUILD_LIMIT_S = 400
COUNT = 20
GENERATOR = ROOT / "build/protos-venv/bin/python"


async def run(*command: str, folder: Path, limit_s: float, **environ: str) -> str:
    """What the command prints; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), limit_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{command}\n{out.decode()}"
    return out.decode()


def need_toolchain(*programs: str) -> None:
    """Skip where a language is not installed, on a build server too: Debian's Go is too old for this example."""
    missing = [each for each in programs if shutil.which(each) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def copied(name: str) -> Path:
    """The example's sources below build/, as deep as clients/ is, so that relative paths to the protos hold."""
    folder = ROOT / "build" / f"{name}-example"
    shutil.copytree(
        ROOT / "clients" / name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("target", "v1")
    )
    return folder


async def build_go(tmp_path: Path) -> tuple[str, ...]:
    need_toolchain("go", "gofmt")
    if not GENERATOR.exists():
        need_toolchain("protoc")
    else:
        protoc = tmp_path / "bin/protoc"
        protoc.parent.mkdir()
        protoc.write_text(f'#!/bin/sh\nexec {GENERATOR} -m grpc_tools.protoc "$@"\n')
        protoc.chmod(0o755)
    folder = copied("go")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    await run("go", "generate", ".", folder=folder, limit_s=BUILD_LIMIT_S, PATH=path)
    await run("go", "vet", "./...", folder=folder, limit_s=BUILD_LIMIT_S)
    await run(
        "go", "build", "-o", str(tmp_path / "example"), "./example", folder=folder, limit_s=BUILD_LIMIT_S
    )
    assert (await run("gofmt", "-l", "worker.go", "generate.go", "example", folder=folder, limit_s=60)) == ""
    return (str(tmp_path / "example"),)


async def test_a_worker_goes_on_over_a_restart_and_holds_its_leases(start: Start, tmp_path: Path):
    command = await build_go(tmp_path)
    # A message takes four times its lease: without extensions each would come again and again.
    settings = {"data_dir": str(tmp_path / "data"), "lease_ms": "500ms"}
    broker = await (await start(**settings)).serving()
    address = broker.grpc_address
    example = asyncio.ensure_future(
        run(*command, folder=tmp_path, limit_s=120, POSTDATE_ADDRESS=address, WORK="2s")
    )
    async with postdate.connect(address) as client:
        while not example.done() and not [
            each for each in await client.stats() for one in each.subscriptions if one.leased_messages
        ]:
            await asyncio.sleep(0.05)
    assert not example.done(), example.result()
    await broker.kill()
    broker = await (await start(**settings | {"grpc_address": address})).serving()
    told = await example
    handled = Counter(re.findall(r"handling (order \d+), attempt", told))
    assert handled.keys() == {f"order {number}" for number in range(COUNT)}, told
    # At most those that were begun as the broker was killed are handled twice.
    assert sum(handled.values()) <= COUNT + 4, told
    async with postdate.connect(address) as client:
        (stats,) = await client.stats("orders")
        assert [(one.ready_messages, one.leased_messages) for one in stats.subscriptions] == [(0, 0)]


def test_dependencies_are_pinned_and_name_no_host():
    assert "replace" not in (ROOT / "clients/go/go.mod").read_text()
    assert (ROOT / "clients/go/go.sum").read_text().count("h1:") > 4
