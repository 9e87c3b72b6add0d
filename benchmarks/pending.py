"""The scenarios with millions of messages pending in a broker's index."""

from __future__ import annotations

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

from benchmarks import cache
from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import HERE, Broker, Client, Setup, spawn_client
from benchmarks.scenarios import HOUR_MS, Figures, Scenario, added_memory, kill_and_wait, load, use

MONTH_DELAY = {"after_ms": [HOUR_MS, 30 * 24 * HOUR_MS]}  # nothing of it comes due while we measure
_CHECKPOINT_BYTES = 64 << 20  # the broker's default
_CHECKPOINT_SECONDS_MAX = 90.0
_BATCH = 1_000
_LAG_RATE = 100_000


def restart_burst(setup: Setup) -> Figures:
    """Killed at once after the load."""
    few = _killed_after_burst(setup, setup.sized(100_000))
    many = _killed_after_burst(setup, setup.sized(10_000_000))
    return {**many, "few_first_s": few["first_s"], "ratio": many["first_s"] / few["first_s"]}


def restart_checkpoint(setup: Setup) -> Figures:
    """Killed when the next checkpoint is about to begin: the journal is as long as it gets, all else is quiet."""
    few = _killed_before_checkpoint(setup, setup.sized(100_000))
    many = _killed_before_checkpoint(setup, setup.sized(10_000_000))
    return {**many, "few_first_s": few["first_s"], "ratio": many["first_s"] / few["first_s"]}


def lateness_10m(setup: Setup) -> Figures:
    with Broker(setup, "lateness-10m") as broker:
        load(setup, broker, setup.sized(10_000_000), MONTH_DELAY)
        broker.wait_quiet()
        seconds = 9 if setup.quick else 25
        client = Client(
            setup, broker, "lateness", rate=1_000, seconds=seconds, delay_ms=5_000, has_topic=True
        )
        return {**client.run(), **use(client)}


def herd_1m(setup: Setup) -> Figures:
    return _herd(setup)


def herd_1m_same(setup: Setup) -> Figures:
    return _herd(setup, spread_ms=0)


def herd_1m_cold(setup: Setup) -> Figures:
    return _herd(setup, cold=True)


def loop_lag(setup: Setup) -> Figures:
    """With buckets; and with the index in memory, which neither seals nor merges, for comparison."""
    figures = _lag(setup, "bucket")
    other = _lag(setup, "memory")
    return figures | {
        f"memory_{name}": other[name]
        for name in ("lag_max_ms", "lag_p99_ms", "own_lag_max_ms", "busy_lag_max_ms")
    }


def memory_10m(setup: Setup) -> Figures:
    return added_memory(setup, "memory-10m", setup.sized(10_000_000), MONTH_DELAY)


def disk_1m(setup: Setup) -> Figures:
    """One ledger, which takes entries."""
    return _disk(setup, "disk-1m", 1_000_000)


def disk_10m(setup: Setup) -> Figures:
    """Ten ledgers, of which all but the last one are packed."""
    return _disk(setup, "disk-10m", 10_000_000)


def _disk(setup: Setup, name: str, count: int) -> Figures:
    """Blocks of the data directory a pending message, after the load and once the broker is at rest."""
    setup = replace(setup, broker_flags=(*setup.broker_flags, "--checkpoint-interval-ms=4000"))
    count = setup.sized(count)
    with Broker(setup, name) as broker:
        load(setup, broker, count, MONTH_DELAY)
        broker.wait_quiet()
        loaded = sum(_blocks_bytes(broker).values())
        time.sleep(30)  # rows are packed; a checkpoint, and an interval in which nothing comes
        broker.check_alive()
        parts = _blocks_bytes(broker)
    figures = {f"{name}_bytes": taken / count for name, taken in parts.items()}
    return {"bytes": sum(figures.values()), "loaded_bytes": loaded / count, **figures}


def _blocks_bytes(broker: Broker) -> dict[str, int]:
    """Bytes of the blocks that a broker's files take, by the kind of the file."""
    taken: dict[str, int] = defaultdict(int)
    for path in broker.data_folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                kind = "journal" if path.suffix == ".seg" else path.suffix.removeprefix(".") or "other"
                taken[kind] += path.stat().st_blocks * 512
    return taken


SCENARIOS: dict[str, Scenario] = {
    "restart-burst": restart_burst,
    "restart-checkpoint": restart_checkpoint,
    "lateness-10m": lateness_10m,
    "herd-1m": herd_1m,
    "herd-1m-same": herd_1m_same,
    "herd-1m-cold": herd_1m_cold,
    "loop-lag": loop_lag,
    "memory-10m": memory_10m,
    "disk-1m": disk_1m,
    "disk-10m": disk_10m,
}


def _killed_after_burst(setup: Setup, pending: int) -> Figures:
    with Broker(setup, "restart-burst") as broker:
        load(setup, broker, pending, MONTH_DELAY)
        return kill_and_wait(setup, broker, pending)


def _killed_before_checkpoint(setup: Setup, pending: int) -> Figures:
    if setup.quick:
        setup = replace(setup, broker_flags=(*setup.broker_flags, "--checkpoint-interval-ms=4000"))
    with Broker(setup, "restart-checkpoint") as broker:
        loaded = load(setup, broker, pending, MONTH_DELAY)
        broker.wait_quiet()
        per_message = broker.metrics()["postdate_journal_bytes_total"] / loaded["stored"]
        for _ in range(3):
            before = _wait_checkpoint(broker)
            if before is None:
                pending += _BATCH
                load(setup, broker, _BATCH, MONTH_DELAY, None)  # or none would follow
                continue
            # At most two thirds of what is pending: of few messages, the journal of all is no longer than that.
            burst = min(0.92 * _CHECKPOINT_BYTES / per_message, pending * 2 / 3)
            count = max(int(burst) // _BATCH, 1) * _BATCH
            load(setup, broker, count, MONTH_DELAY, None)
            pending += count
            after = broker.metrics()
            if after["postdate_checkpoints_total"] == before["postdate_checkpoints_total"]:
                journal = after["postdate_journal_bytes_total"] - before["postdate_journal_bytes_total"]
                return {"journal_mb": journal / 1e6, **kill_and_wait(setup, broker, pending)}
    raise BenchmarkFailed("a checkpoint came each time before the broker could be killed")


def _wait_checkpoint(broker: Broker) -> dict[str, float] | None:
    """The metrics just after a checkpoint; None if none comes, as nothing has changed."""
    first = broker.metrics()
    deadline = time.monotonic() + _CHECKPOINT_SECONDS_MAX
    while time.monotonic() < deadline:
        found = broker.metrics()
        if found["postdate_checkpoints_total"] > first["postdate_checkpoints_total"]:
            return found
        time.sleep(0.2)
    return None


def _herd(setup: Setup, *, cold: bool = False, spread_ms: int = 999) -> Figures:
    """One consumer waits; a second client produces single messages from a second before they are due until the end."""
    count = setup.sized(1_000_000)
    produced: dict[str, Any] = {}
    with Broker(setup, "herd") as broker, _probe(setup, broker) as (start, stop):
        lead_ms = 12_000 + count // 66
        client = Client(setup, broker, "herd", count=count, spread_ms=spread_ms, lead_ms=lead_ms)

        def loaded() -> None:
            if cold:
                cache.drop(broker.data_folder)

        read: list[int] = []

        def measuring() -> None:
            read.append(broker.read_bytes())
            start()

        def measured() -> None:
            read.append(broker.read_bytes())
            produced.update(stop())

        result = client.run(on_phase={"loaded": loaded, "measuring": measuring, "measured": measured})
    late = result["late_ms"]
    return {
        "seconds": result["seconds"],
        "rate": result["rate"],
        "late_p50_ms": late["p50"],
        "late_max_ms": late["max"],
        **{f"produce_{name}_ms": produced[name] for name in ("p50", "p99", "max")},
        "produced": produced["count"],
        "read_mb": (read[1] - read[0]) / 1e6,
        **use(client),
    }


def _probe(setup: Setup, broker: Broker) -> AbstractContextManager[tuple[Any, Any]]:
    return beside(setup, broker, "probe", rate=200)


@contextmanager
def beside(setup: Setup, broker: Broker, work: str, **task: Any) -> Iterator[tuple[Any, Any]]:
    """Two calls: one starts a client that produces beside another, one ends it and returns what it found."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> None:
        log = setup.folder / f"{work}.log"
        processes.append(spawn_client(setup, work, {"address": broker.address, **task}, log))

    def stop() -> dict[str, Any]:
        process = processes.pop()
        try:
            output, _ = process.communicate("stop\n", timeout=30)
        finally:
            process.kill()
            process.wait()
        said = [json.loads(line) for line in output.splitlines()]
        if not said or "result" not in said[-1]:
            raise BenchmarkFailed(f"the client that produces beside: {said[-1:]}")
        result: dict[str, Any] = said[-1]["result"]
        return result

    try:
        yield start, stop
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _lag(setup: Setup, tracker: str) -> Figures:
    """100,000 messages a second; how much later than asked the loop calls back, looked at every 2 ms."""
    path = setup.folder / f"lag-{tracker}.json"
    scrapes: list[tuple[float, dict[str, float]]] = []
    script = HERE / "benchmarks" / "probed_broker.py"
    env = {"BENCHMARK_LAG_FILE": str(path)}
    with Broker(setup, f"lag-{tracker}", script=script, env=env) as broker:
        seconds = setup.seconds(30.0)
        task: dict[str, Any] = {"rate": _LAG_RATE, "batch": 1_000, "payload_bytes": 100, "delay": MONTH_DELAY}
        task["tracker"] = tracker
        client = Client(setup, broker, "paced", warm_seconds=setup.seconds(5.0) + 1, seconds=seconds, **task)

        def scrape() -> None:
            scrapes.append((time.monotonic(), broker.metrics()))

        result = client.run(on_phase={"measuring": scrape, "measured": scrape})
        time.sleep(1.5)  # the last line
    (begin, before), (end, after) = scrapes
    # A scrape is a step of the loop too; it is not what is measured.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    samples = [sample for at, some in lines if begin + 1 < at <= end for sample in some]
    lags = sorted(lag for lag, _, _ in samples)
    own = sorted(min(lag, process) for lag, _, process in samples)  # without what other processes took
    busy = sorted(min(lag, thread) for lag, thread, _ in samples)
    if result["rate"] < (0.5 if setup.quick else 0.97) * _LAG_RATE:
        raise BenchmarkFailed(f"only {result['rate']:,.0f} messages a second were produced")
    return {
        "rate": result["rate"],
        "lag_p99_ms": lags[int(0.99 * len(lags))],
        "lag_max_ms": lags[-1],
        "lag_over_20_ms": sum(lag > 20 for lag in lags),
        "own_lag_max_ms": own[-1],
        "own_lag_p99_ms": own[int(0.99 * len(own))],
        "own_lag_over_20_ms": sum(lag > 20 for lag in own),
        "busy_lag_max_ms": busy[-1],
        "samples": len(samples),
        "answer_p99_ms": result["answer_p99_ms"],
        "seals": _operations(before, after, "seal"),
        "merges": _operations(before, after, "merge"),
        **use(client),
    }


def _operations(before: dict[str, float], after: dict[str, float], operation: str) -> float:
    name = f"postdate_index_{operation}_seconds_count"
    return after.get(name, 0.0) - before.get(name, 0.0)
