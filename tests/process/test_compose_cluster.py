"""The three nodes of docker-compose.yml as processes, each in a network of its own: what the file says makes a cluster.

Stands in for `docker compose --profile cluster up` where there is no container engine. Images are tried by
`make image-test`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
from asyncio.subprocess import Process
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

import postdate
from tests.process.namespaces import Network, need_namespaces
from tools.replay_dockerfile import parse

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
NODES = ("node-a", "node-b", "node-c")
(IMAGE_ENV,) = [
    step.text
    for step in parse((ROOT / "deploy/Dockerfile").read_text())["broker"].steps
    if step.keyword == "ENV"
]
READY_SECONDS = 120


class Containers:
    """The services of the file, and where their volumes are."""

    def __init__(self, folder: Path) -> None:
        self.network = Network(NODES, "clients", random.Random(1), has_names=True)
        self.processes: dict[str, Process] = {}
        self._folder = folder

    def told(self, name: str, text: str) -> str:
        """Return a text of a service as an engine would give it, but for the folders that volumes are mounted at."""
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
        for volume in SERVICES[name]["volumes"]:
            source, place = volume.split(":")
            (self._folder / source).mkdir(exist_ok=True)
            text = re.sub(rf"(^|file://){place}$", rf"\g<1>{self._folder / source}", text)
        return text

    async def start(self, name: str, command: list[str], place: tuple[str, ...] = ()) -> Process:
        image = dict(pair.split("=", 1) for pair in IMAGE_ENV.split())
        given = {
            key: self.told(name, value) for key, value in (image | SERVICES[name]["environment"]).items()
        }
        with (self._folder / f"{name}.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *place, sys.executable, "-m", "broker", *(self.told(name, word) for word in command),
                cwd=ROOT, env={"PATH": os.environ["PATH"]} | given, stdout=output, stderr=output,
            )  # fmt: skip
        self.processes[name] = process
        return process

    async def up(self, name: str) -> None:
        await self.start(name, SERVICES[name].get("command", ["serve"]), self.network.command(name))

    async def wait_healthy(self, name: str) -> None:
        """Wait until the service's own health check succeeds."""
        _, program, *arguments = SERVICES[name]["healthcheck"]["test"]
        assert program == "python"
        async with asyncio.timeout(READY_SECONDS):
            while True:
                assert self.processes[name].returncode is None, (self._folder / f"{name}.log").read_text()
                asking = await asyncio.create_subprocess_exec(
                    *self.network.command(name), sys.executable, *arguments, stderr=asyncio.subprocess.DEVNULL
                )
                if await asking.wait() == 0:
                    return
                await asyncio.sleep(0.2)

    def connect(self, name: str) -> postdate.Client:
        """Return a client of one node: who is outside does not know the names of the others."""
        address = f"{self.network.address(name)}:7650"
        return postdate.connect(address, retry_for=timedelta(seconds=READY_SECONDS))

    async def kill(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@pytest.mark.deep
async def test_the_compose_file_makes_a_cluster_that_outlives_its_owner(tmp_path: Path) -> None:
    need_namespaces()
    containers = Containers(tmp_path)
    async with containers.network.up(), contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(containers.kill)
        for node in NODES:
            (waits_for,) = SERVICES[node]["depends_on"].items()
            assert waits_for == ("cluster-create", {"condition": "service_completed_successfully"})
        create = await containers.start("cluster-create", SERVICES["cluster-create"]["command"])
        assert await create.wait() == 0, (tmp_path / "cluster-create.log").read_text()
        for node in NODES:
            await containers.up(node)
        for node in NODES:
            await containers.wait_healthy(node)
        async with containers.connect("node-a") as client:
            await client.topics.create("orders")  # it waits for an owner
            owner = "node-" + (await client.cluster()).shards[0].owner
        other = next(node for node in NODES if node != owner)
        client = await stack.enter_async_context(containers.connect(other))
        async with (
            client.subscribe("orders", "billing") as subscription,
            client.producer("orders", producer_name="compose") as producer,
        ):
            await producer.send(b"before")
            containers.processes[owner].send_signal(signal.SIGKILL)
            await containers.processes[owner].wait()
            await producer.send(b"after")
            payloads = set()
            async with asyncio.timeout(READY_SECONDS):
                async for message in subscription:
                    await message.ack()
                    payloads.add(message.payload)
                    if len(payloads) == 2:
                        break
        assert "node-" + (await client.cluster()).shards[0].owner != owner
        assert SERVICES[owner]["restart"] == "always"
        await containers.up(owner)
        await containers.wait_healthy(owner)
