"""Run three nodes of a cluster here, kill the owner three times, and count what was lost and what came early.

The nodes share a store: a folder, or with --s3 a versitygw over a folder. Nothing is left running.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import postdate

BIN = Path(sys.executable).parent
FOLDER = Path(__file__).resolve().parents[1] / "build" / "demo-cluster"
NAMES = "abc"
KILLS = 3
SENDERS = 16
DELAY_MS_MAX = 2_000
CALM_SECONDS = 4.0
"""Seconds of messages before each kill, and after the last one."""
PATIENCE_SECONDS = 60.0
S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "postdate-demo", "AWS_SECRET_ACCESS_KEY": "not-a-secret-of-anybody"}


class Nodes:
    """The processes of three nodes, each started again when it ends, as systemd or Kubernetes would."""

    def __init__(self, store: str, environment: dict[str, str]) -> None:
        ports = free_ports(2 * len(NAMES))
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in zip(NAMES, ports, strict=False)}
        self._http = dict(zip(NAMES, (f"127.0.0.1:{port}" for port in ports[len(NAMES) :]), strict=True))
        self._store = store
        self._environment = environment
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keeping: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._keeping = [asyncio.create_task(self._keep(name)) for name in NAMES]

    def kill(self, name: str) -> None:
        """End a node as the loss of its machine would."""
        self._processes[name].send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)

    async def _keep(self, name: str) -> None:
        nodes = ",".join(f"{node}={address}" for node, address in self.addresses.items())
        settings = {
            "data-dir": str(FOLDER / name),
            "grpc-address": self.addresses[name],
            "http-address": self._http[name],
            "cluster-store": self._store,
            "cluster-nodes": nodes,
            "node": name,
        }
        options = [f"--{key}={value}" for key, value in settings.items()]
        with log_file(name) as output:
            while True:
                process = await asyncio.create_subprocess_exec(
                    BIN / "postdate-broker", "serve", *options,
                    env=self._environment, stdout=output, stderr=output,
                )  # fmt: skip
                self._processes[name] = process
                try:
                    await process.wait()
                finally:
                    await end(process)
                await asyncio.sleep(1)  # what a supervisor waits


class Traffic:
    """Messages with numbers and random delays, and what became of them."""

    def __init__(self) -> None:
        self.answered: dict[int, float] = {}  # when, on the loop's clock
        self.delivered: dict[int, int] = {}  # how often
        self.arrived = asyncio.Event()
        self.early = 0
        self.answer_at = 0.0
        self.gap = 0.0
        """The longest time without an answer since it was reset."""
        self._numbers = itertools.count()
        self._rng = random.Random(1)

    async def send(self, producer: postdate.Producer) -> None:
        """Send one message after the other; ends only by being cancelled."""
        while True:
            number = next(self._numbers)
            delay = timedelta(milliseconds=self._rng.randrange(DELAY_MS_MAX))
            await producer.send(b"%d" % number, deliver_after=delay)
            now = time.monotonic()
            self.gap = max(self.gap, now - self.answer_at) if self.answer_at else 0.0
            self.answer_at = self.answered[number] = now
            await asyncio.sleep(0.02)

    async def take(self, subscription: postdate.Subscription) -> None:
        async for message in subscription:
            number = int(message.payload)
            self.early += message.deliver_at is not None and message.deliver_at > datetime.now(UTC)
            self.delivered[number] = self.delivered.get(number, 0) + 1
            subscription.ack_nowait(message)
            self.arrived.set()

    @property
    def lost(self) -> int:
        return len(self.answered.keys() - self.delivered.keys())


async def main(*, s3: bool) -> int:
    logging.getLogger("postdate").setLevel(logging.ERROR)  # that connections break is what this is about
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "store" / "postdate").mkdir(parents=True)
    async with contextlib.AsyncExitStack() as stack:
        environment, store = dict(os.environ), f"file://{FOLDER}/store"
        if s3:
            environment |= S3_ENVIRONMENT
            store = await stack.enter_async_context(s3_store(environment))
        await create_cluster(store, environment)
        nodes = Nodes(store, environment)
        stack.push_async_callback(nodes.stop)
        nodes.start()
        traffic = Traffic()
        addresses = ",".join(nodes.addresses.values())
        patience = timedelta(seconds=PATIENCE_SECONDS)
        print(f"demo: three nodes at {addresses}, logs in {FOLDER}", flush=True)
        client = await stack.enter_async_context(postdate.connect(addresses, retry_for=patience))
        await client.topics.create("demo", postdate.TopicPolicy(dedup_window=timedelta(hours=1)))
        async with (
            client.subscribe("demo", "s", initial_position=postdate.InitialPosition.EARLIEST) as subscription,
            client.producer("demo", producer_name="demo") as producer,
        ):
            taking = asyncio.create_task(traffic.take(subscription))
            sending = [asyncio.create_task(traffic.send(producer)) for _ in range(SENDERS)]
            try:
                for _ in range(KILLS):
                    await asyncio.sleep(CALM_SECONDS)
                    await kill_owner(client, nodes, traffic, sending)
                await asyncio.sleep(CALM_SECONDS)
                await stop(sending)
                await settle(traffic)
                await subscription.wait_confirmed()
            finally:  # interrupted too, before the producer is closed under them
                await stop([*sending, taking])
    again = sum(count - 1 for count in traffic.delivered.values())
    print(
        f"demo: {len(traffic.answered)} answered, {traffic.lost} lost, {traffic.early} early, {again} came again"
    )
    return 1 if traffic.lost or traffic.early else 0


async def kill_owner(
    client: postdate.Client, nodes: Nodes, traffic: Traffic, sending: list[asyncio.Task[None]]
) -> None:
    """Kill the owner, and wait until another one answers."""
    shard = (await client.cluster()).shards[0]
    traffic.gap = 0.0
    nodes.kill(shard.owner)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            now = (await client.cluster()).shards[0]
            if now.epoch > shard.epoch:
                break
            await asyncio.sleep(0.1)
        owned_at = time.monotonic()
        while traffic.answer_at < owned_at:
            for failed in [task for task in sending if task.done()]:
                await failed
            await asyncio.sleep(0.02)
    print(
        f"demo: killed {shard.owner}; {now.owner} owns the shard, {traffic.gap:.1f} s without an answer",
        flush=True,
    )


async def settle(traffic: Traffic) -> None:
    """Wait until all that was answered was delivered, or no more comes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while traffic.lost:
                traffic.arrived.clear()
                await traffic.arrived.wait()


async def stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def create_cluster(store: str, environment: dict[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        BIN / "postdate-broker", "cluster", "create", store, env=environment,
        process_group=0,  # Ctrl-C is for us, and one of the two says so
    )  # fmt: skip
    try:
        if await process.wait():
            sys.exit("demo: the store will not do")
    finally:
        await end(process)


@contextlib.asynccontextmanager
async def s3_store(environment: dict[str, str]) -> AsyncIterator[str]:
    """Run an S3-compatible server over the folder of the store."""
    program = shutil.which("versitygw")
    if program is None:
        sys.exit(
            "demo: S3=1 needs versitygw in PATH: go install github.com/versity/versitygw/cmd/versitygw@v1.8.0"
        )
    port = free_ports(1)[0]
    arguments = ["--port", f"127.0.0.1:{port}", "--quiet", "--keep-alive", "posix", str(FOLDER / "store")]
    gateway = {
        "ROOT_ACCESS_KEY": S3_ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": S3_ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    }
    with log_file("store") as output:
        process = await asyncio.create_subprocess_exec(
            program, *arguments, env=environment | gateway, stdout=output, stderr=output
        )
        try:
            await listening(port)
            yield f"s3://postdate/demo?endpoint=http://127.0.0.1:{port}"
        finally:
            await end(process)


async def listening(port: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


def log_file(name: str) -> BinaryIO:
    return open(FOLDER / f"{name}.log", "ab")


async def end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [bound.getsockname()[1] for bound in sockets]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--s3", action="store_true", help="a store that speaks S3; needs versitygw in PATH")
    options = parser.parse_args()
    try:
        sys.exit(asyncio.run(main(s3=options.s3)))
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        sys.exit(130)
