"""A run of three real nodes under load: their owner is killed, frozen and cut off in turn, and the clients' history judged.

    python -m tests.process.cluster_run --minutes 60 --every 60

The store is a real S3-compatible server (`tests/s3_server.py`), each node behind a proxy of its own that can be cut. With
`--site file` it is a folder, which cannot be cut; with `--site namespaces` nodes, store and clients are in network
namespaces of their own, which only root can make (`cluster_sites.py`). It ends with the counts as JSON, and with status 1 if a
promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc

import postdate
from postdate_api.v1 import admin_pb2, admin_pb2_grpc
from tests.process.cluster_history import History
from tests.process.cluster_sites import NODES, SITES, FileSite
from tests.s3_server import CREDENTIALS

ROOT = Path(__file__).parents[2]
TOPIC = "orders"
SUBSCRIPTIONS = ("billing", "audit")
LEASE_MS = 4_000
FAULT_LEASES = (2.75, 5.0)
"""Longer than standbys wait that rest, two leases and a half for the last in rank."""
SETTLE_SECONDS = 60.0
WAITING_MAX = 5_000
"""Messages without an answer: while nobody owns the shard they gather."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Member:
    """One node: a process that is started anew whenever it ends."""

    def __init__(
        self, name: str, settings: dict[str, str], folder: Path, command: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.starts = 0
        self._settings = settings
        self._command = command
        self._folder = folder
        self.process: asyncio.subprocess.Process | None = None
        self.statuses: Counter[int] = Counter()

    async def live(self) -> None:
        """Keep a process of it running, until cancelled."""
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        with (self._folder / f"{self.name}.log").open("ab") as output:
            try:
                while True:
                    self.process = await asyncio.create_subprocess_exec(
                        *self._command, sys.executable, "-m", "broker", "serve", *arguments,
                        cwd=ROOT, env={**os.environ, **CREDENTIALS}, stdout=output, stderr=output,
                    )  # fmt: skip
                    self.starts += 1
                    self.statuses[await self.process.wait()] += 1
                    await asyncio.sleep(1.0)
            finally:
                if self.process is not None and self.process.returncode is None:
                    self.process.kill()
                    await self.process.wait()

    def send(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Load:
    """Producers, consumers and those who change what waits, all of them through the SDK."""

    def __init__(self, address: str, seed: int, rate: float) -> None:
        self.history = History()
        self._address = address
        self._rng = random.Random(seed)
        self._rate = rate
        self._number = 0
        self.errors: Counter[str] = Counter()
        self.producing = True

    def connect(self) -> postdate.Client:
        return postdate.connect(self._address, retry_for=timedelta(seconds=60))

    async def produce(self) -> None:
        """Send messages of which most are delayed, at a steady rate, whatever becomes of each."""
        name = f"producer-{self._rng.random()}"
        async with (
            self.connect() as client,
            client.producer(TOPIC, producer_name=name) as producer,
            asyncio.TaskGroup() as group,
        ):
            waiting: set[asyncio.Task[None]] = set()
            while self.producing:
                waiting = {task for task in waiting if not task.done()}
                if len(waiting) < WAITING_MAX:
                    waiting.add(group.create_task(self._produce_one(client, producer)))
                await asyncio.sleep(self._rng.expovariate(self._rate))

    async def _produce_one(self, client: postdate.Client, producer: postdate.Producer) -> None:
        self._number += 1
        number = self._number
        due_ms = now_ms() + self._rng.choice((0, 50, 500, 3_000, self._rng.randrange(1, 20_000)))
        self.history.begins(number, due_ms)
        try:
            receipt = await producer.send(
                b"%d" % number, deliver_at=moment(due_ms), schedule_key=f"order/{number}"
            )
        except postdate.PostdateError as error:
            self.errors[f"send: {type(error).__name__}"] += 1
            return
        self.history.answered(number, str(receipt.id), time.monotonic())
        if self._rng.random() < 0.1:
            await self._change(client, number)

    async def _change(self, client: postdate.Client, number: int) -> None:
        """Cancel or move a message while it waits, if it still does."""
        key = f"order/{number}"
        try:
            if self._rng.random() < 0.5:
                self.history.cancels(number)
                outcome = await client.schedule.cancel(TOPIC, schedule_key=key)
                if outcome.done:
                    self.history.cancelled(number, time.monotonic())
                else:
                    self.history.not_cancelled(number)
            else:
                due_ms = now_ms() + self._rng.randrange(1, 10_000)
                self.history.moves(number, due_ms)
                outcome = await client.schedule.move(TOPIC, schedule_key=key, deliver_at=moment(due_ms))
                if outcome.done:
                    self.history.moved(number, due_ms)
        except postdate.PostdateError as error:
            self.errors[f"change: {type(error).__name__}"] += 1

    async def consume(self, name: str) -> None:
        async with (
            self.connect() as client,
            client.subscribe(TOPIC, name, permits=1_000) as subscription,
            asyncio.TaskGroup() as group,
        ):
            async for message in subscription:
                number = int(message.payload)
                self.history.delivered(name, number, now_ms())
                group.create_task(self._ack(name, number, message))

    async def _ack(self, name: str, number: int, message: postdate.Message) -> None:
        try:
            await message.ack()
        except postdate.PostdateError as error:
            self.errors[f"ack: {type(error).__name__}"] += 1
        else:
            self.history.confirmed(name, number)


def moment(time_ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)


class Run:
    """Three nodes, a load and the faults."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.rng = random.Random(options.seed)
        self.site: FileSite = SITES[options.site](folder, self.rng)
        self.addresses = self.site.addresses
        self.load = Load(",".join(self.addresses.values()), options.seed, options.rate)
        self.faults: Counter[str] = Counter()
        self.members: dict[str, Member] = {}
        self.epoch = 0

    async def go(self) -> bool:
        """Make the cluster, load it, break it; return whether every promise was kept."""
        async with contextlib.AsyncExitStack() as stack:
            await self._make_members(stack)
            lives = [asyncio.create_task(member.live()) for member in self.members.values()]
            stack.push_async_callback(cancel, lives)
            await self._wait_owner(120)
            consumers = [asyncio.create_task(self.load.consume(name)) for name in SUBSCRIPTIONS]
            stack.push_async_callback(cancel, consumers)
            await asyncio.sleep(
                2
            )  # so that subscriptions are there before messages; they begin at the end of a topic
            producer = asyncio.create_task(self.load.produce())
            end = time.monotonic() + 60 * self.options.minutes
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(min(left, self.options.every))
                for task in (*consumers, producer):
                    if task.done():
                        task.result()
                if left > self.options.every:
                    await self._fault()
            self.load.producing = False
            await producer
            await self._settle()
        return self._judge()

    async def _make_members(self, stack: contextlib.AsyncExitStack) -> None:
        await stack.enter_async_context(self.site.up())
        created = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "broker", "cluster", "create", self.site.create_url, cwd=ROOT, env={**os.environ, **CREDENTIALS}
        )  # fmt: skip
        assert await created.wait() == 0
        nodes = ",".join(f"{name}={address}" for name, address in self.addresses.items())
        for name in NODES:
            settings = {
                "cluster_store": self.site.stores[name],
                "cluster_nodes": nodes,
                "node": name,
                "data_dir": str(self.folder / f"data-{name}"),
                "grpc_address": self.addresses[name],
                "allow_plaintext": "true",
                "http_address": "127.0.0.1:0",
                "dedup_window_ms": "1h",
                "log_format": "json",
                "disk_reserve_bytes": "0",
            }
            self.members[name] = Member(name, settings, self.folder, self.site.command(name))

    async def _owner(self) -> str:
        """The owner of the highest epoch that any node knows; empty if nobody answers."""
        owner = ""
        for address in self.addresses.values():
            async with grpc.aio.insecure_channel(address) as channel:
                stub = admin_pb2_grpc.AdminServiceStub(channel)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    cluster = await stub.GetCluster(admin_pb2.GetClusterRequest(), timeout=2)
                    for shard in cluster.shards:
                        if shard.owner and shard.epoch >= self.epoch:
                            self.epoch, owner = shard.epoch, shard.owner
        return owner

    async def _wait_owner(self, seconds: float) -> str:
        async with asyncio.timeout(seconds):
            while not (owner := await self._owner()):
                await asyncio.sleep(0.2)
        return owner

    async def _fault(self) -> None:
        """Do to the owner what is next in turn, and wait for another one, or for whoever is left."""
        kind = self.site.kinds[sum(self.faults.values()) % len(self.site.kinds)]
        member, epoch = self.members[await self._wait_owner(60)], self.epoch
        self.faults[kind] += 1
        begun = time.monotonic()
        async with self.site.fault(kind, member.name, member.send):
            await asyncio.sleep(self.rng.uniform(*FAULT_LEASES) * LEASE_MS / 1e3)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                while not await self._owner() or (kind in self.site.takes_owner and self.epoch == epoch):
                    await asyncio.sleep(0.2)
        print(
            f"{kind} of {member.name}: epoch {epoch} to {self.epoch} within {time.monotonic() - begun:.1f} s; "
            f"{json.dumps(self.load.history.facts(SUBSCRIPTIONS))}",
            flush=True,
        )

    async def _settle(self) -> None:
        """Wait until all that was answered has come."""
        history = self.load.history
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while any(history.missing(name) for name in SUBSCRIPTIONS):
                    await asyncio.sleep(0.5)
        await asyncio.sleep(2)  # what must not come has the time to

    def _judge(self) -> bool:
        history = self.load.history
        facts = history.facts(SUBSCRIPTIONS)
        facts |= {
            "faults": dict(self.faults),
            "take_overs": self.epoch - 1,
            "starts": {name: member.starts for name, member in self.members.items()},
            "ends": {name: dict(member.statuses) for name, member in self.members.items()},
            "errors": dict(self.load.errors),
            **self.site.facts(),
        }
        print(json.dumps(facts, indent=1))
        for violation in history.violations[:50]:
            print("BROKEN:", violation)
        lost = {name: history.missing(name)[:20] for name in SUBSCRIPTIONS}
        for name, numbers in lost.items():
            if numbers:
                print(f"LOST: {name}: {numbers}")
        return not history.violations and not any(lost.values())


async def cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--every", type=float, default=60, help="seconds between faults")
    parser.add_argument("--rate", type=float, default=200, help="messages a second")
    parser.add_argument("--site", choices=tuple(SITES), default="s3", help="where nodes and store are")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps data and logs; a temporary one is removed")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = options.folder
            folder.mkdir(parents=True)
        return 0 if asyncio.run(Run(options, folder).go()) else 1


if __name__ == "__main__":
    sys.exit(main())
