"""The fork server of tests: each broker of it is a process by itself, and none outlives the tests."""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path

import pytest

from tests.process.conftest import LIMIT_SECONDS, Processes
from tests.process.fork_server import ForkServer


async def test_a_forked_broker_ends_by_itself_and_all_end_with_the_server(tmp_path: Path):
    server = ForkServer()
    processes = Processes(server)
    brokers = await asyncio.gather(*(processes.start(data_dir=str(tmp_path / name)) for name in "abc"))
    for broker in brokers:
        await broker.serving()
    killed, stopped, left = brokers
    await killed.kill()
    assert killed.process.returncode == -9
    stopped.process.terminate()
    assert await stopped.wait() == 0, stopped.lines
    assert left.process.returncode is None
    ended = os.pidfd_open(left.process.pid)
    server.close()
    assert select.select([ended], [], [], LIMIT_SECONDS)[0], "a broker has outlived its server"
    os.close(ended)
    with pytest.raises(AssertionError, match="before its processes"):
        await left.wait()
