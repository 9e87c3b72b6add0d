"""Scenarios of a cluster: the same work as with a local journal, and take-overs.

The store is a process of its own on the client's core, as in earnest it is another machine (`slow_store.py`). Its
creates take 30 ms at the median and 150 ms at the 99th percentile, as those of an object store in the same region, or
what the disk takes.
"""

from __future__ import annotations

import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import grpc

from benchmarks import slow_store
from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import (
    HERE,
    Broker,
    Client,
    Setup,
    cpu_seconds,
    environment,
    free_ports,
    spawn,
)
from benchmarks.scenarios import CONSTANT_DELAY, RANDOM_DELAY, Figures, Scenario, echo_server, load, use

_PUT_MS = "30,150"
_STORE_SECONDS_MAX = 20.0
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "benchmarks", "AWS_SECRET_ACCESS_KEY": "not-a-secret-of-anybody"}
_OWNER_SECONDS_MAX = 60.0
_BASE_SECONDS_MAX = 180.0
"""A node looks for bases once a minute, and makes one where there is none."""


class Node(Broker):
    """One node of a cluster; it is ready once it owns the shard, or follows it."""

    def __init__(self, setup: Setup, name: str, store_url: str) -> None:
        self.env = {**_CREDENTIALS, "POSTDATE_CLUSTER_STORE": store_url, "POSTDATE_NODE": name}
        super().__init__(setup, f"node-{name}", env=self.env)
        self.name = name

    def join(self, *nodes: Node) -> None:
        """Say who is in the cluster; before it is started."""
        self.env["POSTDATE_CLUSTER_NODES"] = ",".join(f"{node.name}={node.address}" for node in nodes)

    def wait_owner(self) -> None:
        """Wait until this node owns the shard."""
        deadline = time.monotonic() + _OWNER_SECONDS_MAX
        while time.monotonic() < deadline:
            self.check_alive()
            with suppress(OSError):
                if self.metrics().get('postdate_role{role="owner"}', 0.0) == 1.0:
                    return
            time.sleep(0.02)
        raise BenchmarkFailed(f"node {self.name} did not become the owner; its log ends: {self.log_tail()}")

    def logged(self, sentence: str) -> tuple[datetime, str]:
        """Return the line of its log with a sentence, and its time."""
        for line in self.log_text().splitlines():
            time_text, _, rest = line.partition(" ")
            if sentence in rest:
                return datetime.fromisoformat(time_text), rest
        raise BenchmarkFailed(
            f"node {self.name} has not logged {sentence!r}; its log ends: {self.log_tail()}"
        )


@contextmanager
def _store(setup: Setup, folder: Path, put_ms: str) -> Iterator[str]:
    """The URL of a store that runs."""
    port = free_ports(1)[0]
    process = spawn(
        setup.client_core,
        [sys.executable, "-m", "benchmarks.slow_store", str(folder), str(port), put_ms],
        env=environment(setup.source), cwd=HERE,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + _STORE_SECONDS_MAX
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkFailed("the store does not answer")
            time.sleep(0.02)
        yield f"s3://{slow_store.BUCKET}/?endpoint=http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def _cluster(setup: Setup, *names: str, put_ms: str = _PUT_MS, fresh: str = "") -> Iterator[list[Node]]:
    """Nodes that run, the first of which owns the shard, and last one that is not started yet, if it has a name."""
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=setup.folder))
    setup = replace(setup, folder=folder)
    store = folder / "store"
    store.mkdir()
    command = [sys.executable, "-m", "broker.cli", "cluster", "create", f"file://{store}"]
    subprocess.run(
        command, env=environment(setup.source), cwd=setup.source, check=True, capture_output=True, timeout=120
    )
    with _store(setup, store, put_ms) as url:
        nodes = [Node(setup, name, url) for name in (*names, *([fresh] if fresh else []))]
        try:
            for node in nodes:
                node.join(*nodes)
            nodes[0].start()
            nodes[0].wait_owner()
            for node in nodes[1 : len(names)]:
                node.start()
                node.wait_ready()
            yield nodes
            for node in nodes:
                node.check_alive()
        finally:
            for node in nodes:
                node.kill()
            shutil.rmtree(folder, ignore_errors=True)


def _rate(setup: Setup, broker: Broker) -> Figures:
    """Produce with so many batches in flight that no store's time bounds it."""
    client = Client(
        setup, broker, "produce", subscriptions=1, delay=RANDOM_DELAY, batch=1000, payload_bytes=100, window=128,
        warm_seconds=setup.seconds(2.0), seconds=setup.seconds(6.0),
    )  # fmt: skip
    return {**client.run(), **use(client)}


def cluster_produce(setup: Setup) -> Figures:
    with Broker(setup, "local") as broker:
        local = _rate(setup, broker)
    with _cluster(setup, "a") as (node,):
        before = _puts(node)
        begin = time.monotonic()
        stored = _rate(setup, node)
        busy_puts = (_puts(node) - before) / (time.monotonic() - begin)
        time.sleep(3)
        before, begin = _puts(node), time.monotonic()
        time.sleep(setup.seconds(50))
        idle_puts = (_puts(node) - before) / (time.monotonic() - begin)
    return {
        "rate": stored["rate"],
        "local_rate": local["rate"],
        "ratio": stored["rate"] / local["rate"],
        "busy_puts": busy_puts,
        "idle_puts": idle_puts,
        "use": stored["use"],
    }


def _puts(node: Node) -> float:
    return node.metrics()["postdate_journal_sync_seconds_count"]


def _awaited(setup: Setup, put_ms: str) -> Figures:
    with _cluster(setup, "a", put_ms=put_ms) as (node,), echo_server(setup) as echo_address:
        task = {"echo_address": echo_address, "payload_bytes": 100, "count": setup.sized(500), "turns": 1}
        took = Client(setup, node, "single", **task).run()["unary_us"]
    return {"p50_ms": took["p50"] / 1e3, "p99_ms": took["p99"] / 1e3}


def cluster_single(setup: Setup) -> Figures:
    return _awaited(setup, _PUT_MS)


def cluster_single_at_once(setup: Setup) -> Figures:
    return _awaited(setup, "")


def cluster_lateness(setup: Setup) -> Figures:
    task = {"rate": 1_000, "seconds": 9 if setup.quick else 25, "delay_ms": 5_000}
    with Broker(setup, "local") as broker:
        local = Client(setup, broker, "lateness", **task).run()
    with _cluster(setup, "a") as (node,):
        late = Client(setup, node, "lateness", **task).run()
    return {"ratio": late["p99"] / local["p99"], "p99": late["p99"], "local_p99": local["p99"]}


def cluster_standby(setup: Setup) -> Figures:
    """CPU time of a standby while the owner takes a load, of the owner's."""
    with _cluster(setup, "a", "b") as (owner, standby):
        before = cpu_seconds(owner.pid), cpu_seconds(standby.pid)
        load(setup, owner, setup.sized(2_000_000), CONSTANT_DELAY)
        owner.wait_quiet()
        standby.wait_quiet()
        spent = cpu_seconds(owner.pid) - before[0], cpu_seconds(standby.pid) - before[1]
    return {"ratio": spent[1] / spent[0], "owner_s": spent[0], "standby_s": spent[1]}


def cluster_seed(setup: Setup) -> Figures:
    """Bytes a second at which a node without a folder gets the newest base, until it follows."""
    with _cluster(setup, "a", fresh="b") as (owner, fresh):
        load(setup, owner, setup.sized(10_000_000), CONSTANT_DELAY)
        deadline = time.monotonic() + _BASE_SECONDS_MAX
        while not owner.metrics()["postdate_base_age_seconds"]:
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"no base was made; the log of the owner ends: {owner.log_tail()}")
            time.sleep(0.5)
        fresh.start()
        fresh.wait_ready()
        begin, seeding = fresh.logged("Building the data directory from a base")
        end, _ = fresh.logged("Following")
    size = int(re.findall(r" bytes=(\d+)", seeding)[0])
    seconds = (end - begin).total_seconds()
    return {"mb_per_s": size / 1e6 / seconds, "mb": size / 1e6, "seconds": seconds}


def _outages(setup: Setup, *, planned: bool) -> Figures:
    """Time without an answer when the owner goes, again and again, with a load that waits."""
    outages: list[float] = []
    with _cluster(setup, "a", "b") as nodes:
        owner, standby = nodes
        load(setup, owner, setup.sized(10_000_000), CONSTANT_DELAY)
        for _ in range(3 if setup.quick else 30):
            standby.wait_quiet(120)
            _answer(owner, 10)
            last = time.monotonic()
            if planned:
                owner.stop()
            else:
                owner.kill()
            _answer(standby, _OWNER_SECONDS_MAX)
            outages.append(time.monotonic() - last)
            owner.start()
            owner.wait_ready()
            owner, standby = standby, owner
    return {
        "p50_s": statistics.median(outages),
        "worst_s": max(outages),
        "outages_s": outages,
    }


def _answer(node: Node, seconds: float) -> None:
    """Produce one message to a node, repeated until it answers itself."""
    from postdate_api.v1 import message_pb2, producer_pb2, producer_pb2_grpc  # noqa: PLC0415 - of what is measured

    request = producer_pb2.ProduceRequest(
        topic="bench", messages=[message_pb2.Message(payload=b"x", deliver_after_ms=3_600_000)]
    )
    deadline = time.monotonic() + seconds
    while True:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(node.address, options=options) as channel, suppress(grpc.RpcError):
            stub = producer_pb2_grpc.ProducerServiceStub(channel)
            stub.Produce(request, timeout=2, metadata=[("postdate-direct", "1")])
            return
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"node {node.name} has not answered; its log ends: {node.log_tail()}")
        time.sleep(0.02)


def cluster_killed(setup: Setup) -> Figures:
    return _outages(setup, planned=False)


def cluster_stopped(setup: Setup) -> Figures:
    return _outages(setup, planned=True)


SCENARIOS: dict[str, Scenario] = {
    "cluster-produce": cluster_produce,
    "cluster-single": cluster_single,
    "cluster-single-at-once": cluster_single_at_once,
    "cluster-lateness": cluster_lateness,
    "cluster-standby": cluster_standby,
    "cluster-seed": cluster_seed,
    "cluster-killed": cluster_killed,
    "cluster-stopped": cluster_stopped,
}
