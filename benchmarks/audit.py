"""The scenarios of the audit: millions of pending messages in files, checked by the command as an operator runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import Setup, environment
from benchmarks.scenarios import Figures, Scenario
from broker.testing.data_folder import NOW_MS, FolderWriter, StoredLedger, StoredSubscription

_LEDGER_ENTRIES = 500_000
_LEDGERS_OF_TOPIC = 5
_MONTH_MS = 30 * 86_400_000
_SECONDS_MAX = 300
_LOOK_SECONDS = 0.1


def audit_5m(setup: Setup) -> Figures:
    return _audit(setup, setup.entries or setup.sized(5_000_000))


def audit_50m(setup: Setup) -> Figures:
    return _audit(setup, setup.entries or setup.sized(50_000_000))


SCENARIOS: dict[str, Scenario] = {"audit-5m": audit_5m, "audit-50m": audit_50m}


def _audit(setup: Setup, count: int) -> Figures:
    """On Spark, and without; both on the cores that there are."""
    folder = setup.folder / "audited"
    try:
        _write(folder, count)
        spark = _run(setup, folder, ["--master", "local[2]"])
        inline = _run(setup, folder, ["--engine", "inline"])
        return spark | {f"inline_{name}": value for name, value in inline.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, count: int) -> None:
    """Topics of 2,500,000 messages, all of them delayed over a month; of the messages themselves there are holes."""
    random = np.random.default_rng(7)
    with FolderWriter(str(folder)) as writer:
        ledger_id = 0
        left, number = count, 0
        while left > 0:
            ledgers: list[StoredLedger] = []
            while left > 0 and len(ledgers) < _LEDGERS_OF_TOPIC:
                rows = min(left, _LEDGER_ENTRIES)
                ledger_id += 1
                times = NOW_MS + random.integers(1, _MONTH_MS, rows)
                ledgers.append(StoredLedger(ledger_id, times, hollow=True))
                left -= rows
            writer.add_topic(f"topic-{number}", ledgers, [StoredSubscription("billing")])
            number += 1


def _run(setup: Setup, folder: Path, options: list[str]) -> Figures:
    command = [sys.executable, "-m", "broker.cli", "audit", str(folder), "--output", "json", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=setup.source,
        env=environment(setup.source),
    )
    peaks = {"python_mb": 0.0, "java_mb": 0.0}
    watcher = threading.Thread(target=_watch, args=(process, peaks))
    watcher.start()
    try:
        output, _ = process.communicate(timeout=_SECONDS_MAX)
    finally:
        process.kill()
        watcher.join()
    if process.returncode != 0:
        raise BenchmarkFailed(f"the audit ended with {process.returncode}")
    report = json.loads(output)
    return {
        "seconds": report["seconds"],
        "start_up_s": report["start_up_seconds"],
        "entries": report["totals"]["index_entries"],
        **peaks,
    }


def _watch(process: subprocess.Popen[bytes], peaks: dict[str, float]) -> None:
    """The greatest proportional memory of the command's processes together, by what they run."""
    while process.poll() is None:
        found = {"python_mb": 0.0, "java_mb": 0.0}
        for pid in _family(process.pid):
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue  # it has ended
            pss = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            found["java_mb" if name == "java" else "python_mb"] += pss / 1024
        for key, value in found.items():
            peaks[key] = max(peaks[key], value)
        time.sleep(_LOOK_SECONDS)


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    family = [pid]
    for parent in family:
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                family += map(int, tasks.read_text().split())
            except OSError:
                continue
    return family
