"""Scenarios: what they start, in order, and the figures they yield. One call is one run, on a new broker."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import HERE, Broker, Client, Setup, environment, free_ports, spawn

Figures = dict[str, Any]
Scenario = Callable[[Setup], Figures]

HOUR_MS = 3_600_000
RANDOM_DELAY = {"after_ms": [1_000, HOUR_MS]}  # uniform
SHORT_DELAY = {"after_ms": [1_000, 3_000]}
CONSTANT_DELAY = {"after_ms": [HOUR_MS, HOUR_MS]}


def produce_100b(setup: Setup) -> Figures:
    return _produce(setup, _Load(1000, 100, in_flight=32))


def produce_1kb(setup: Setup) -> Figures:
    return _produce(setup, _Load(1000, 1024, in_flight=8))


def produce_by_100(setup: Setup) -> Figures:
    return _produce(setup, _Load(100, 100, in_flight=128))


def sdk_send_many(setup: Setup) -> Figures:
    return _produce(setup, _Load(1000, 100, in_flight=8), "sdk_send_many", tasks=8, each=False)


def sdk_send_burst(setup: Setup) -> Figures:
    """One list after the other, none in flight beside it; also each message's share of the client's CPU time."""
    figures = _produce(setup, _Load(1000, 100, in_flight=1), "sdk_send_many", tasks=1, each=False)
    if "use" in figures:
        figures["client_ns"] = figures["use"]["client"] / figures["rate"] * 1e9
    return figures


def sdk_send_many_each(setup: Setup) -> Figures:
    return _produce(setup, _Load(1000, 100, in_flight=8), "sdk_send_many", tasks=8, each=True)


def sdk_send_linger(setup: Setup) -> Figures:
    return _produce(setup, _Load(256, 100, in_flight=1), "sdk_send", tasks=256)


def single(setup: Setup) -> Figures:
    syncs: list[float] = []
    turns = 5
    count = setup.sized(1_000)

    def sync() -> None:
        with machine.pinned(setup.broker_core):
            syncs.extend(machine.sync_us(setup.folder, count))

    with Broker(setup, "single") as broker, echo_server(setup) as echo_address:
        task = {"echo_address": echo_address, "payload_bytes": 100, "count": count, "turns": turns}
        client = Client(setup, broker, "single", **task)
        result = client.run(on_phase={"sync": sync})
    sync_us, trip_us = statistics.median(syncs), result["trip_us"]["p50"]
    return {
        "ratio": result["unary_us"]["p50"] / (sync_us + trip_us),
        "stream_ratio": result["stream_us"]["p50"] / (sync_us + trip_us),
        "unary_us": result["unary_us"]["p50"],
        "unary_p99_us": result["unary_us"]["p99"],
        "stream_us": result["stream_us"]["p50"],
        "fdatasync_p50_us": sync_us,
        "round_trip_p50_us": trip_us,
        **use(client),
    }


def deliver(setup: Setup) -> Figures:
    return _deliver(setup, "deliver", setup.sized(2_000_000), subscriptions=1)


def deliver_3_subs(setup: Setup) -> Figures:
    return _deliver(setup, "deliver", setup.sized(500_000), subscriptions=3)


def sdk_deliver(setup: Setup) -> Figures:
    return _deliver(setup, "sdk_deliver", setup.sized(500_000), subscriptions=1)


def herd(setup: Setup) -> Figures:
    count = setup.sized(500_000)
    with Broker(setup, "herd") as broker:
        client = Client(setup, broker, "herd", count=count, spread_ms=999, lead_ms=5_000 + count // 100)
        result = client.run()
    late = result["late_ms"]
    return {
        "rate": result["rate"],
        "late_p50_ms": late["p50"],
        "late_p99_ms": late["p99"],
        "late_max_ms": late["max"],
        **use(client),
    }


def lateness(setup: Setup) -> Figures:
    with Broker(setup, "lateness") as broker:
        client = Client(
            setup, broker, "lateness", rate=1_000, seconds=9 if setup.quick else 25, delay_ms=5_000
        )
        return {**client.run(), **use(client)}


def restart(setup: Setup) -> Figures:
    """Killed at once after the load: the journal is as full as it gets."""
    pending = setup.sized(2_000_000)
    with Broker(setup, "restart") as broker:
        load(setup, broker, pending, CONSTANT_DELAY)
        return kill_and_wait(setup, broker, pending)


def kill_and_wait(setup: Setup, broker: Broker, pending: int) -> Figures:
    """Kill a loaded broker, start it again, and wait for the first delivery."""
    started: list[float] = []

    def kill_and_start() -> None:
        broker.kill()
        started.append(broker.start())

    client = Client(setup, broker, "restart", due_ms=300, pending=pending)
    result = client.run(on_phase={"stored": kill_and_start})
    return {
        "first_s": result["first_at"] - started[0],
        "indexed_s": result["indexed_at"] - started[0],
        "attempts": result["attempts"],
        "recovery_s": broker.metrics().get("postdate_recovery_seconds", float("nan")),
        "pending": pending,
    }


def memory(setup: Setup) -> Figures:
    return added_memory(setup, "memory", setup.sized(2_000_000), CONSTANT_DELAY)


SCENARIOS: dict[str, Scenario] = {
    "produce-100b": produce_100b,
    "produce-1kb": produce_1kb,
    "produce-by-100": produce_by_100,
    "sdk-send-many": sdk_send_many,
    "sdk-send-burst": sdk_send_burst,
    "sdk-send-many-each": sdk_send_many_each,
    "sdk-send-linger": sdk_send_linger,
    "single": single,
    "deliver": deliver,
    "sdk-deliver": sdk_deliver,
    "deliver-3-subs": deliver_3_subs,
    "herd": herd,
    "lateness": lateness,
    "restart": restart,
    "memory": memory,
}


def limits(setup: Setup) -> Figures:
    """Measure the machine without a broker's work; an idle broker is there, as in every run."""
    count = setup.sized(2_000)
    with machine.pinned(setup.broker_core):
        syncs = machine.sync_us(setup.folder, count)
        mops, copy = machine.python_mops(), machine.copy_gb_per_second()
    with Broker(setup, "limits") as broker, echo_server(setup) as echo_address:
        client = Client(
            setup, broker, "round_trip", echo_address=echo_address, payload_bytes=120, count=count
        )
        trips = client.run(seconds_max=60)["us"]
    return {
        "fdatasync_4k_p50_us": statistics.median(syncs),
        "round_trip_p50_us": statistics.median(trips),
        "python_mops": mops,
        "copy_gb_per_s": copy,
    }


@contextmanager
def echo_server(setup: Setup) -> Iterator[str]:
    """A server that does nothing, on the broker's core; yields its address."""
    (port,) = free_ports(1)
    with open(setup.folder / "echo.log", "w") as log:
        server = spawn(
            setup.broker_core,
            [sys.executable, "-m", "benchmarks.echo", str(port)],
            env=environment(setup.source),
            cwd=HERE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class _Load(NamedTuple):
    """Requests of a produce row."""

    batch: int
    payload_bytes: int
    in_flight: int  # requests


def _produce(setup: Setup, load: _Load, work: str = "produce", **task: Any) -> Figures:
    task |= {"batch": load.batch, "payload_bytes": load.payload_bytes}
    with Broker(setup, work) as broker:
        bare = _bare(setup, broker, load)
        if work == "produce":
            task |= {"subscriptions": 1, "delay": RANDOM_DELAY, "window": load.in_flight}
        seconds = setup.seconds(6.0)
        client = Client(setup, broker, work, warm_seconds=setup.seconds(2.0), seconds=seconds, **task)
        scrapes: list[dict[str, float]] = []

        def scrape() -> None:
            scrapes.append(broker.metrics())

        result = client.run(on_phase={"measuring": scrape, "measured": scrape})
    result.pop("ledgers", None)
    share = result["rate"] / min(bare.values())
    return {**result, **bare, "share": share, **_lag(*scrapes), **use(client)}


def _bare(setup: Setup, broker: Broker, load: _Load) -> dict[str, float]:
    """Messages a second of such a row that gRPC takes in and that the disk writes, while the broker is idle.

    The disk writes all that is in flight at once, as one group of the journal holds at most.
    """
    seconds = setup.seconds(2.0)
    with echo_server(setup) as echo_address:
        task = {**load._asdict(), "window": load.in_flight, "delay": RANDOM_DELAY}
        client = Client(
            setup,
            broker,
            "take_in",
            echo_address=echo_address,
            warm_seconds=seconds / 4,
            seconds=seconds,
            **task,
        )
        taken = client.run()
    with machine.pinned(setup.broker_core):
        block_bytes = taken["request_bytes"] * load.in_flight
        written = machine.append_bytes_per_second(setup.folder, block_bytes, seconds)
    return {
        "grpc_rate": taken["rate"],
        "disk_rate": written / taken["request_bytes"] * load.batch,
    }


def _deliver(setup: Setup, work: str, count: int, *, subscriptions: int) -> Figures:
    with Broker(setup, work) as broker:
        loaded = load(setup, broker, count, SHORT_DELAY, subscriptions)
        time.sleep(SHORT_DELAY["after_ms"][1] / 1000 + 0.2)
        broker.wait_quiet()
        task = {"count": count, "ledgers": loaded["ledgers"], "subscriptions": subscriptions}
        client = Client(setup, broker, work, **task)
        result = client.run()
    return {**result, **use(client)}


def load(
    setup: Setup, broker: Broker, count: int, delay: dict[str, list[int]], subscriptions: int | None = 1
) -> Figures:
    """Store messages of 100 B. With `subscriptions` the topic is made; None if it is there, with messages."""
    task = {"batch": 1000, "payload_bytes": 100, "window": 16, "count": count, "delay": delay}
    if subscriptions is not None:
        task["subscriptions"] = subscriptions
    result = Client(setup, broker, "produce", **task).run()
    if result["stored"] != count:
        raise BenchmarkFailed(f"{result['stored']} of {count} messages were stored")
    return result


def added_memory(setup: Setup, name: str, count: int, delay: dict[str, list[int]]) -> Figures:
    """Measure a broker's memory half a minute after a load, above that of an empty one."""
    with Broker(setup, name) as broker:
        time.sleep(2)
        empty = broker.memory_bytes()
        load(setup, broker, count, delay)
        time.sleep(5 if setup.quick else 30)
        broker.check_alive()
        loaded = broker.memory_bytes()
    added = {name: (loaded[name] - empty[name]) / 1e6 for name in loaded}
    return {
        "added_mb": added["VmRSS"],
        "added_anon_mb": added["RssAnon"],
        "added_file_mb": added["RssFile"],
        "empty_mb": empty["VmRSS"] / 1e6,
        "bytes_per_message": added["VmRSS"] * 1e6 / count,
    }


def use(client: Client) -> Figures:
    return {} if client.use is None else {"use": asdict(client.use)}


def _lag(before: dict[str, float], after: dict[str, float]) -> Figures:
    """p99 and max of the loop's lag between two scrapes: the upper ends of their histogram buckets."""
    name = 'postdate_loop_lag_seconds_bucket{le="'
    bounds = [sample for sample in after if sample.startswith(name)]
    counts = [after[sample] - before.get(sample, 0.0) for sample in bounds]
    if not counts or not counts[-1]:
        return {"lag_p99_ms": float("nan"), "lag_max_ms": float("nan")}
    ends = [float(sample.removeprefix(name).rstrip('"}').replace("+Inf", "inf")) * 1000 for sample in bounds]

    def end_of(share: float) -> float:
        return next(end for end, count in zip(ends, counts, strict=True) if count >= share * counts[-1])

    return {"lag_p99_ms": end_of(0.99), "lag_max_ms": end_of(1.0)}
