"""A run of real nodes under load: their owner is killed, frozen and cut off in turn, and the clients' history judged.

    python -m tests.process.cluster_run --minutes 60 --every 60

The store is a real S3-compatible server (`tests/s3_server.py`), each node behind a proxy of its own that can be cut. With
`--site file` it is a folder, which cannot be cut; with `--site namespaces` nodes, store and clients are in network
namespaces of their own, which only root can make (`cluster_sites.py`). With `--faults kill freeze cut` no others are
made; `--faults rolling` restarts all nodes in good order, one after the other. With `--shards 8` each node has a process
for each of eight shards: in turn all processes of a node are killed or frozen, or that of one shard alone. It ends with
the counts as JSON, and with status 1 if a promise was broken.
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
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc

import postdate
from broker.topic_shards import shard_of
from postdate_api.v1 import admin_pb2, admin_pb2_grpc
from tests.process.cluster_history import History
from tests.process.cluster_sites import SITES, FileSite
from tests.process.test_shards import shard_processes
from tests.s3_server import CREDENTIALS

ROOT = Path(__file__).parents[2]
PROCESS_KINDS = ("process", "frozen process")
"""Faults of one shard's process, where a node has several."""
ROLLING = "rolling"
"""A restart of all nodes, one after the other, each once the one before follows all shards again."""
SUBSCRIPTIONS = ("billing", "audit")
LEASE_MS = 4_000
FAULT_LEASES = (2.75, 5.0)
"""Longer than standbys wait that rest, two leases and a half for the last in rank."""
SETTLE_SECONDS = 60.0
BUSY_SECONDS = 600.0
"""For nodes to start and to follow, on a machine that is busy."""
WAITING_MAX = 5_000
"""Messages without an answer: while nobody owns the shard they gather."""


def topic_names(shards: int) -> tuple[str, ...]:
    """Return a topic of each shard."""
    names = ["orders", *(f"orders-{number}" for number in range(100 * shards))]
    return tuple(next(name for name in names if shard_of(name, shards) == number) for number in range(shards))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Member:
    """One node: a process that is started anew whenever it ends."""

    def __init__(
        self,
        name: str,
        settings: dict[str, str],
        folder: Path,
        command: tuple[str, ...] = (),
        module: str = "broker",
    ) -> None:
        self.name = name
        self.starts = 0
        self._settings = settings
        self._command = (*command, sys.executable, "-m", module)
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
                        *self._command, "serve", *arguments,
                        cwd=ROOT, env={**os.environ, **CREDENTIALS}, stdout=output, stderr=output,
                    )  # fmt: skip
                    self.starts += 1
                    self.statuses[await self.process.wait()] += 1
                    await asyncio.sleep(1.0)
            finally:
                if self.process is not None and self.process.returncode is None:
                    self.process.kill()
                    await self.process.wait()

    async def end(self) -> None:
        """Have it stop in good order, and return once it has ended; it is started again."""
        assert self.process is not None
        process = self.process
        process.terminate()
        await process.wait()

    def send(self, number: int) -> None:
        """Signal the node, with the processes of its shards."""
        assert self.process is not None
        for pid in (self.process.pid, *self.shards().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def shards(self) -> dict[int, int]:
        """Return the process of each shard, where a node has several."""
        assert self.process is not None
        # The node may be a child of the command that puts it into its place.
        return dict(shard_processes(self.process.pid)) or {
            number: pid for child in child_pids(self.process.pid) for number, pid in shard_processes(child)
        }


class Load:
    """Producers, consumers and those who change what waits, all of them through the SDK."""

    def __init__(
        self,
        address: str,
        seed: int,
        rate: float,
        topics: tuple[str, ...],
        ahead_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        """`ahead_ms`: by how much the owner's clock, by which nothing is early, may be ahead of the clients'."""
        self.history = History()
        self._ahead_ms = ahead_ms
        self.topics = topics
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
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(self.connect())
            producers = {
                topic: await stack.enter_async_context(client.producer(topic, producer_name=name))
                for topic in self.topics
            }
            group = await stack.enter_async_context(asyncio.TaskGroup())
            waiting: set[asyncio.Task[None]] = set()
            while self.producing:
                waiting = {task for task in waiting if not task.done()}
                if len(waiting) < WAITING_MAX:
                    topic = self._rng.choice(self.topics)
                    waiting.add(group.create_task(self._produce_one(client, topic, producers[topic])))
                await asyncio.sleep(self._rng.expovariate(self._rate))

    async def _produce_one(self, client: postdate.Client, topic: str, producer: postdate.Producer) -> None:
        self._number += 1
        number = self._number
        due_ms = now_ms() + self._rng.choice((0, 50, 500, 3_000, self._rng.randrange(1, 20_000)))
        self.history.begins(number, due_ms, time.monotonic())
        try:
            receipt = await producer.send(
                b"%d" % number, deliver_at=moment(due_ms), schedule_key=f"order/{number}"
            )
        except postdate.PostdateError as error:
            self.errors[f"send: {type(error).__name__}"] += 1
            return
        self.history.answered(number, str(receipt.id), time.monotonic(), topic)
        if self._rng.random() < 0.1:
            await self._change(client, topic, number)

    async def _change(self, client: postdate.Client, topic: str, number: int) -> None:
        """Cancel or move a message while it waits, if it still does."""
        key = f"order/{number}"
        try:
            if self._rng.random() < 0.5:
                self.history.cancels(number)
                outcome = await client.schedule.cancel(topic, schedule_key=key)
                if outcome.done:
                    self.history.cancelled(number, time.monotonic())
                else:
                    self.history.not_cancelled(number)
            else:
                due_ms = now_ms() + self._rng.randrange(1, 10_000)
                self.history.moves(number, due_ms)
                outcome = await client.schedule.move(topic, schedule_key=key, deliver_at=moment(due_ms))
                if outcome.done:
                    self.history.moved(number, due_ms)
        except postdate.PostdateError as error:
            self.errors[f"change: {type(error).__name__}"] += 1

    async def consume(self, topic: str, name: str) -> None:
        async with (
            self.connect() as client,
            client.subscribe(topic, name, permits=1_000) as subscription,
            asyncio.TaskGroup() as group,
        ):
            async for message in subscription:
                number = int(message.payload)
                self.history.delivered(name, number, now_ms() + self._ahead_ms())
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
        self.site: FileSite = SITES[options.site](folder, self.rng, "abc"[: options.nodes])
        self.addresses = self.site.addresses
        self.shards: int = options.shards
        self.kinds = options.faults or self.site.kinds + (PROCESS_KINDS if self.shards > 1 else ())
        self.load = Load(
            ",".join(self.addresses.values()),
            options.seed,
            options.rate,
            topic_names(self.shards),
            self.site.ahead_ms,
        )
        self.faults: Counter[str] = Counter()
        self.members: dict[str, Member] = {}
        self.owners: dict[int, tuple[int, str]] = {}
        """Of each shard the highest epoch that was seen, and its owner then."""

    @property
    def epochs(self) -> int:
        """Return the epochs of all shards together: the first one of each, and all take-overs."""
        return sum(epoch for epoch, _ in self.owners.values())

    async def go(self) -> bool:
        """Make the cluster, load it, break it; return whether every promise was kept."""
        async with contextlib.AsyncExitStack() as stack:
            await self._make_members(stack)
            lives = [asyncio.create_task(member.live()) for member in self.members.values()]
            stack.push_async_callback(cancel, lives)
            await self._wait_owners(BUSY_SECONDS)
            consumers = [
                asyncio.create_task(self.load.consume(topic, name))
                for topic in self.load.topics
                for name in SUBSCRIPTIONS
            ]
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
            sys.executable, "-m", "broker", "cluster", "create", self.site.create_url, f"--shards={self.shards}", cwd=ROOT, env={**os.environ, **CREDENTIALS}
        )  # fmt: skip
        assert await created.wait() == 0
        nodes = ",".join(f"{name}={address}" for name, address in self.addresses.items())
        for name in self.site.names:
            settings = {
                "cluster_store": self.site.stores[name],
                "cluster_nodes": nodes,
                "node": name,
                "data_dir": str(self.site.data_dir(name)),
                "grpc_address": self.addresses[name],
                "allow_plaintext": "true",
                "http_address": "127.0.0.1:0",
                "dedup_window_ms": "1h",
                "log_format": "json",
                "disk_reserve_bytes": "0",
            }
            self.members[name] = Member(
                name, settings, self.folder, self.site.command(name), self.site.module
            )

    async def _look(self) -> bool:
        """Ask all nodes for the owner of each shard; return whether each has one that some node knows."""
        known: dict[int, tuple[int, str]] = {}
        for address in self.addresses.values():
            async with grpc.aio.insecure_channel(address) as channel:
                stub = admin_pb2_grpc.AdminServiceStub(channel)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    cluster = await stub.GetCluster(admin_pb2.GetClusterRequest(), timeout=2)
                    for shard in cluster.shards:
                        if shard.owner:
                            found = shard.epoch, shard.owner
                            known[shard.number] = max(found, known.get(shard.number, (0, "")))
        is_new = all(found[0] >= self.owners.get(number, (0, ""))[0] for number, found in known.items())
        self.owners |= {
            number: max(found, self.owners.get(number, (0, ""))) for number, found in known.items()
        }
        return is_new and len(known) == self.shards

    async def _wait_owners(self, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not await self._look():
                await asyncio.sleep(0.2)

    async def _fault(self) -> None:
        """Do to an owner what is next in turn, and wait for another one, or for whoever is left."""
        kind = self.kinds[sum(self.faults.values()) % len(self.kinds)]
        await self._wait_owners(BUSY_SECONDS)
        if kind == ROLLING:
            await self._roll()
            return
        shard = self.rng.randrange(self.shards)
        before, epochs = dict(self.owners), self.epochs
        member = self.members[before[shard][1]]
        lost = [number for number, (_, owner) in before.items() if owner == member.name]
        send: Callable[[int], None] = member.send
        if kind in PROCESS_KINDS:
            lost, pid = [shard], member.shards()[shard]

            def send(number: int) -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

        self.faults[kind] += 1
        begun = time.monotonic()
        done = {"process": "kill", "frozen process": "freeze"}.get(kind, kind)
        async with self.site.fault(done, member.name, send):
            await asyncio.sleep(self.rng.uniform(*FAULT_LEASES) * LEASE_MS / 1e3)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                while not await self._look() or (
                    done in self.site.takes_owner
                    and any(self.owners[number][0] == before[number][0] for number in lost)
                ):
                    await asyncio.sleep(0.2)
        taken = [number for number in lost if self.owners[number][0] > before[number][0]]
        print(
            f"{kind} of {member.name}: {len(taken)} of {len(lost)} shards taken over, {self.epochs - epochs} in all, "
            f"within {time.monotonic() - begun:.1f} s; {json.dumps(self.load.history.facts(SUBSCRIPTIONS))}",
            flush=True,
        )

    async def _roll(self) -> None:
        """Restart all nodes in good order, one after the other."""
        begun, epochs = time.monotonic(), self.epochs
        for name, member in self.members.items():
            async with asyncio.timeout(BUSY_SECONDS):
                await member.end()
                while not await self._follows(name):
                    await asyncio.sleep(0.2)
            await self._wait_owners(BUSY_SECONDS)
        self.faults[ROLLING] += 1
        print(
            f"all nodes restarted: {self.epochs - epochs} shards handed over or taken, in {time.monotonic() - begun:.1f} s; "
            f"{json.dumps(self.load.history.facts(SUBSCRIPTIONS))}",
            flush=True,
        )

    async def _follows(self, name: str) -> bool:
        """Tell whether a node owns or closely follows each shard, by what it says itself."""
        async with grpc.aio.insecure_channel(self.addresses[name]) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            with contextlib.suppress(grpc.aio.AioRpcError):
                cluster = await stub.GetCluster(
                    admin_pb2.GetClusterRequest(), timeout=2, metadata=[("postdate-direct", "1")]
                )
                own = [each for shard in cluster.shards for each in shard.progress if each.node == name]
                return len(own) == self.shards and all(each.behind_ms < 1_000 for each in own)
        return False

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
            "take_overs": self.epochs - self.shards,
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


def child_pids(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


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
    parser.add_argument(
        "--faults", nargs="+", help="kinds of faults, in turn; all of the site if none is named"
    )
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--nodes", type=int, choices=(2, 3), default=3)
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
