"""The scenario in which a broker with a GB of messages makes a backup while it delivers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.errors import BenchmarkFailed
from benchmarks.pending import MONTH_DELAY
from benchmarks.processes import HERE, Broker, Client, Setup, environment, spawn
from benchmarks.scenarios import Figures, Scenario

_PAYLOAD_BYTES = 1024
_BATCH = 1_000
_RATE = 1_000
_BACKUP_SECONDS_MAX = 120.0
_BACKUP = """
import asyncio, sys, time, postdate
async def work():
    async with postdate.connect(sys.argv[1]) as client:
        await asyncio.sleep(float(sys.argv[2]))
        begin = time.monotonic()
        await client.backups.create()
        print(begin, time.monotonic())
asyncio.run(work())
"""


def backup(setup: Setup) -> Figures:
    """Lateness and the loop's longest gap while backups are made; and as long before."""
    path = setup.folder / "lag-backup.json"
    script = HERE / "benchmarks" / "probed_broker.py"
    with Broker(setup, "backup", script=script, env={"BENCHMARK_LAG_FILE": str(path)}) as broker:
        count = setup.sized(1_000_000)
        task = {"batch": _BATCH, "payload_bytes": _PAYLOAD_BYTES, "window": 8, "count": count}
        Client(setup, broker, "produce", subscriptions=1, delay=MONTH_DELAY, **task).run()
        broker.wait_quiet()
        seconds = setup.seconds(30.0)
        quiet = _deliver(setup, broker, seconds)
        quiet_end = time.monotonic()
        begun: list[subprocess.Popen[str]] = []
        busy = _deliver(setup, broker, seconds, lambda: begun.append(_begin_backup(setup, broker)))
        begin, end = _times(begun[0])
        time.sleep(1.5)  # the last line
        metrics = broker.metrics()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    during = [sample for at, some in lines if begin < at < end + 1 for sample in some]
    before = [sample for at, some in lines if quiet_end - seconds < at <= quiet_end for sample in some]
    return {
        "seconds": metrics["postdate_backup_last_duration_seconds"],
        "bytes": metrics["postdate_backup_last_bytes"],
        "gap_max_ms": max(lag for lag, _, _ in during),
        "own_gap_max_ms": max(min(lag, process) for lag, _, process in during),
        "quiet_gap_max_ms": max(lag for lag, _, _ in before),
        "late_max_ms": busy["max"],
        "late_p99_ms": busy["p99"],
        "quiet_late_max_ms": quiet["max"],
        "quiet_late_p99_ms": quiet["p99"],
    }


def _deliver(
    setup: Setup, broker: Broker, seconds: float, on_measuring: Callable[[], None] | None = None
) -> Figures:
    client = Client(setup, broker, "lateness", rate=_RATE, seconds=seconds, delay_ms=2_000, has_topic=True)
    return client.run(on_phase={"measuring": on_measuring} if on_measuring else None)


def _begin_backup(setup: Setup, broker: Broker) -> subprocess.Popen[str]:
    """In a while, so that deliveries are under way by then."""
    return spawn(
        setup.client_core,
        [sys.executable, "-c", _BACKUP, broker.address, str(setup.seconds(8.0))],
        env=environment(setup.source),
        stdout=subprocess.PIPE,
    )


def _times(process: subprocess.Popen[str]) -> tuple[float, float]:
    output, _ = process.communicate(timeout=_BACKUP_SECONDS_MAX)
    if process.returncode:
        raise BenchmarkFailed("the backup failed; its error is above")
    begin, end = map(float, output.split())
    return begin, end


SCENARIOS: dict[str, Scenario] = {"backup": backup}
