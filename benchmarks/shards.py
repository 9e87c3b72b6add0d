"""Scenarios of shards: the front, two against a broker without shards, memory, a start, and a node that is lost."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import Broker, Client, Setup, environment, free_ports
from benchmarks.scenarios import Figures, Scenario

_SHARDS = 2
_MANY = 4
_NODES = ("a", "b")


class Shards(Broker):
    """A broker with several shards, on both cores; its shards have the ports behind its own."""

    def __init__(self, setup: Setup, name: str, shards: int, *, env: dict[str, str] | None = None) -> None:
        flags = () if env else ("--shards", str(shards))  # of a cluster the store says how many
        super().__init__(replace(setup, broker_flags=(*setup.broker_flags, *flags)), name, env=env)
        self.address = f"127.0.0.1:{_port_before_free_ones(shards)}"
        self._cores = {setup.broker_core, setup.client_core}

    def start(self) -> float:
        begin = super().start()
        os.sched_setaffinity(self.pid, self._cores)  # before it has any thread or child
        return begin

    @property
    def children(self) -> list[int]:
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def own_memory_mb(self) -> float:
        """Return the memory of all its processes, in which a page that they share counts once."""
        return sum(_proportional_mb(pid) for pid in (self.pid, *self.children))


def shards(setup: Setup) -> Figures:
    """All on the same core, so the front's CPU time counts as a loss of throughput."""
    several = replace(setup, broker_flags=(*setup.broker_flags, "--shards", str(_SHARDS)))
    front = Broker(several, "several")
    front.address = f"127.0.0.1:{_port_before_free_ones(_SHARDS)}"
    with Broker(setup, "one") as one, front:
        children = Path(f"/proc/{front.pid}/task/{front.pid}/children").read_text().split()
        task = {"front": front.address, "pid": one.pid, "shard_pids": [int(pid) for pid in children]}
        result = Client(setup, one, "shards", turns=4, batches=setup.sized(300), **task).run()
    return {
        "unary_ratio": result["front_us"] / result["direct_us"],
        "stream_ratio": result["front_rate"] / result["direct_rate"],
        "cpu_ratio": result["one_cpu_s"] / result["two_cpu_s"],
        "deliver_cpu_ratio": result["one_deliver_cpu_s"] / result["two_deliver_cpu_s"],
        "cpu_apart_ratio": result["one_cpu_s"] / result["two_apart_cpu_s"],
        "deliver_cpu_apart_ratio": result["one_deliver_cpu_s"] / result["two_apart_deliver_cpu_s"],
        **result,
    }


def shards_memory(setup: Setup) -> Figures:
    """Memory of an idle broker with five shards above that of one with two, for each of the three."""
    found = {}
    for count in (2, 5):
        with Shards(setup, f"idle-{count}", count) as broker:
            time.sleep(setup.seconds(10))
            found[count] = broker.own_memory_mb()
    return {"shard_mb": (found[5] - found[2]) / 3, "two_mb": found[2], "five_mb": found[5]}


def shards_start(setup: Setup) -> Figures:
    """Four shards with 10,000,000 pending each are killed and started again, until all of them have delivered."""
    started: list[float] = []
    with Shards(setup, "start", _MANY) as broker:

        def kill_and_start() -> None:
            broker.kill()
            started.append(broker.start())

        task = {"count": setup.sized(10_000_000), "due_ms": 300}
        client = Client(setup, broker, "shards_start", **task)
        result = client.run(900, {"loaded": lambda: time.sleep(setup.seconds(30)), "stored": kill_and_start})
    firsts = [first - started[0] for first in result["first_at"]]
    return {"all_s": max(firsts), "first_s": min(firsts), "pending": result["pending"]}


def shards_taken_over(setup: Setup) -> Figures:
    """A node with four shards is killed, again and again: the time until the other has answered for each of them."""
    store = setup.folder / "store"
    store.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "broker.cli",
        "cluster",
        "create",
        f"file://{store}",
        f"--shards={_MANY}",
    ]
    subprocess.run(
        command, env=environment(setup.source), cwd=setup.source, check=True, capture_output=True, timeout=120
    )
    nodes, envs = [], []
    for name in _NODES:
        envs.append({"POSTDATE_CLUSTER_STORE": f"file://{store}", "POSTDATE_NODE": name})
        nodes.append(Shards(setup, f"node-{name}", _MANY, env=envs[-1]))
    for env in envs:
        env["POSTDATE_CLUSTER_NODES"] = ",".join(
            f"{name}={node.address}" for name, node in zip(_NODES, nodes, strict=True)
        )
    try:
        return _take_over(setup, nodes)
    finally:
        for node in nodes:
            node.kill()
        subprocess.run(["rm", "-rf", str(store), *(str(node.data_folder) for node in nodes)], check=False)


def _take_over(setup: Setup, nodes: list[Shards]) -> Figures:
    outages: list[float] = []
    for node in nodes:
        node.start()
        node.wait_ready()
    owner, standby = nodes
    owner.kill()  # from here on one node owns all shards
    Client(setup, standby, "shards_served").run()
    for _ in range(3 if setup.quick else 20):
        owner.start()
        owner.wait_ready()
        owner, standby = standby, owner
        standby.wait_quiet(120)
        begun = time.monotonic()
        owner.kill()
        served = Client(setup, standby, "shards_served").run()
        outages.append(max(served["first_at"]) - begun)
    if max(outages) > 60:
        raise BenchmarkFailed(f"shards were without an owner for {max(outages):.1f} s")
    return {"p50_s": statistics.median(outages), "worst_s": max(outages), "outages_s": outages}


def _proportional_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise BenchmarkFailed(f"/proc/{pid}/smaps_rollup has no Pss")


def _port_before_free_ones(shards: int) -> int:
    """Return a port such that those of the shards, which follow it, are free too."""
    while True:
        [port] = free_ports(1)
        with ExitStack() as stack:
            try:
                for offset in range(shards + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", port + offset)))
            except OSError:
                continue
        return port


SCENARIOS: dict[str, Scenario] = {
    "shards": shards,
    "shards-memory": shards_memory,
    "shards-start": shards_start,
    "shards-taken-over": shards_taken_over,
}
