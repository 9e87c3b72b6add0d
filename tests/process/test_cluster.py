"""Three nodes over a store in a folder: owners are killed, frozen and stopped; nothing that was answered is lost."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path

import pytest

from broker.cluster.creation import create_cluster
from broker.cluster.file_store import FileStore
from tests.depth import at_depth
from tests.process.conftest import LIMIT_SECONDS, SMALL, BrokerProcess, Start
from tests.process.load import UNDER_WAY, Load, run_for
from tests.process.test_crash import settle

LEASE_MS = 3_000
ROUNDS = at_depth(change=1, deep=10)


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds at the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Trio:
    """The processes of three nodes, by name."""

    def __init__(self, start: Start, folder: Path) -> None:
        self._start = start
        self._folder = folder
        self._ports = dict(zip("abc", free_ports(3), strict=True))
        self.processes: dict[str, BrokerProcess] = {}

    async def create(self) -> None:
        (self._folder / "store").mkdir()
        await create_cluster(FileStore(str(self._folder / "store")), 1, LEASE_MS)
        for name in self._ports:
            await self.start_node(name)

    async def start_node(self, name: str) -> None:
        self.processes[name] = await self._start(
            data_dir=str(self._folder / name),
            grpc_address=f"127.0.0.1:{self._ports[name]}",
            cluster_store=f"file://{self._folder}/store",
            cluster_nodes=",".join(f"{node}=127.0.0.1:{port}" for node, port in self._ports.items()),
            node=name,
            base_interval_ms="3s",
            **SMALL,
        )

    async def owner(self) -> tuple[str, BrokerProcess]:
        """Wait until a node serves."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                for name, process in self.processes.items():
                    if process.grpc_address:
                        return name, process
                    assert process.process.returncode is None, "\n".join(process.lines)
                await asyncio.sleep(0.02)

    async def following(self, name: str) -> None:
        """Wait until a node follows."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while not any('"Following"' in line for line in self.processes[name].lines):
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_nothing_is_lost_early_or_back_whatever_becomes_of_owners(start: Start, tmp_path: Path) -> None:
    trio = Trio(start, tmp_path)
    await trio.create()
    load = Load(seed=15)
    gaps: dict[str, float] = {}
    for _ in range(ROUNDS):
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
            load.begin_life()
            name, owner = await trio.owner()
            tasks = await run_for(owner, load, 0.3 * load.rng.random())
            began = time.monotonic()
            owner.process.send_signal(number)
            del trio.processes[name]
            if number is not signal.SIGSTOP:
                status = await owner.wait()
                assert (status == 0) == (number is signal.SIGTERM), owner.lines
            await trio.owner()
            gaps[number.name] = time.monotonic() - began
            if number is signal.SIGSTOP:
                owner.process.send_signal(signal.SIGCONT)
                assert await owner.wait() == 1
                assert owner.logged("Another node owns the shard now")
            await asyncio.gather(*tasks)
            assert not load.violations, load.violations[:5]
            await trio.start_node(name)
            await trio.following(name)
    load.begin_life()
    _, owner = await trio.owner()
    await settle(load, owner)
    assert not load.violations, load.violations[:5]
    assert len(load.answered) >= 3 * ROUNDS * UNDER_WAY
    assert all(load.confirmed.values())
    assert gaps["SIGTERM"] < LEASE_MS / 1e3, "whoever is named does not wait for the lease"
