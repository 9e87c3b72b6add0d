"""The scenario of shards: through the front against directly, and two of them against a broker without shards."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.processes import Broker, Client, Setup, free_ports
from benchmarks.scenarios import Figures, Scenario

_SHARDS = 2


def shards(setup: Setup) -> Figures:
    """All on the same core, so the front's CPU time counts as a loss of throughput."""
    several = replace(setup, broker_flags=(*setup.broker_flags, "--shards", str(_SHARDS)))
    front = Broker(several, "several")
    front.address = f"127.0.0.1:{_port_before_free_ones()}"
    with Broker(setup, "one") as one, front:
        children = Path(f"/proc/{front.pid}/task/{front.pid}/children").read_text().split()
        task = {"front": front.address, "pid": one.pid, "shard_pids": [int(pid) for pid in children]}
        result = Client(setup, one, "shards", turns=4, batches=300, **task).run()
    return {
        "unary_ratio": result["front_us"] / result["direct_us"],
        "stream_ratio": result["front_rate"] / result["direct_rate"],
        "cpu_ratio": result["one_cpu_s"] / result["two_cpu_s"],
        **result,
    }


def _port_before_free_ones() -> int:
    """Return a port such that those of the shards, which follow it, are free too."""
    while True:
        [port] = free_ports(1)
        with ExitStack() as stack:
            try:
                for offset in range(_SHARDS + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", port + offset)))
            except OSError:
                continue
        return port


SCENARIOS: dict[str, Scenario] = {"shards": shards}
