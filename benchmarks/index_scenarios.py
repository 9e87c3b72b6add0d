"""The index-only scenarios: a process on the broker's core fills an index, another one opens it again."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import cache
from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import Setup, environment, spawn
from benchmarks.scenarios import Figures, Scenario

_LEDGER_ENTRIES = 1_000_000  # the broker's default
_DELIVERED = ("first_s", "began_s", "restore_s", "minute_s", "loads", "resident_mb")


def index(setup: Setup) -> Figures:
    return _load_and_reopen(setup, setup.entries or setup.sized(10_000_000))


def index_uniform(setup: Setup) -> Figures:
    return _load(setup, "uniform", setup.entries or setup.sized(10_000_000))


def index_steady(setup: Setup) -> Figures:
    return _load(setup, "steady", setup.entries or setup.sized(10_000_000))


def index_100m(setup: Setup) -> Figures:
    """Beside its own figures: its memory, of that of a tenth of the entries."""
    count = setup.entries or setup.sized(100_000_000) // (10 if setup.quick else 1)
    tenth = _load(setup, "random", count // 10)
    figures = _load_and_reopen(setup, count)
    return figures | {"memory_ratio": figures["added_mb"] / tenth["added_mb"]}


def index_1g(setup: Setup) -> Figures:
    """Quick: a thousandth, or it would still take minutes."""
    count = setup.entries or setup.sized(1_000_000_000) // (100 if setup.quick else 1)
    return _load_and_reopen(setup, count)


def look(setup: Setup) -> Figures:
    """Pages and counts of what is pending, over the index and ledgers of messages of 100 bytes."""
    folder = setup.folder / "look"
    count = setup.entries or setup.sized(10_000_000)
    task = {"folder": str(folder), "delay": "random", "count": count, "ledger_entries": _LEDGER_ENTRIES}
    task["pages"] = 20 if setup.quick else 100
    try:
        return _IndexProcess(setup).run("look", task, seconds_max=60 + count / 50_000)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


SCENARIOS: dict[str, Scenario] = {
    "look": look,
    "index": index,
    "index-uniform": index_uniform,
    "index-steady": index_steady,
    "index-100m": index_100m,
    "index-1g": index_1g,
}


def _load_and_reopen(setup: Setup, count: int) -> Figures:
    """The index opened again from the page cache, and from the disk."""
    folder = setup.folder / "index"
    try:
        figures = _fill(setup, folder, "random", count)
        figures |= _reopen(setup, folder, figures)
        cache.drop(folder)
        cold = _reopen(setup, folder, figures)
        return figures | {f"cold_{name}": cold[name] for name in ("first_s", "restore_s", "minute_s")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _load(setup: Setup, delay: str, count: int) -> Figures:
    folder = setup.folder / "index"
    try:
        return _fill(setup, folder, delay, count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(setup: Setup, folder: Path, delay: str, count: int) -> Figures:
    task = {"folder": str(folder), "delay": delay, "count": count, "ledger_entries": _LEDGER_ENTRIES}
    task["wait_seconds"] = 2 if setup.quick else 30
    return _IndexProcess(setup).run("load", task, seconds_max=60 + count / 50_000)


def _reopen(setup: Setup, folder: Path, loaded: Figures) -> Figures:
    task = {"folder": str(folder), "count": loaded["count"], "minute": loaded["minute"]}
    found = _IndexProcess(setup).run("reopen", task | {"started": time.monotonic()}, seconds_max=120)
    return {name: found[name] for name in _DELIVERED}


class _IndexProcess:
    """Runs one piece of work in a process of its own. It imports the measured checkout, these benchmarks included."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._log_path = setup.folder / "index.log"
        self._said = b""

    def run(self, work: str, task: dict[str, Any], *, seconds_max: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds_max
        with open(self._log_path, "w") as log:
            process = spawn(
                self._setup.broker_core,
                [sys.executable, "-m", "benchmarks.index", work, json.dumps(task)],
                env=environment(self._setup.source),
                cwd=self._setup.source,
                text=False,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            return self._converse(process, work, deadline)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def _converse(self, process: subprocess.Popen[bytes], work: str, deadline: float) -> dict[str, Any]:
        assert process.stdin is not None
        while True:
            line = self._next_line(process, work, deadline)
            if not line:
                said = self._log_path.read_text(errors="replace")[-2000:].strip()
                raise BenchmarkFailed(f"the index process died in {work}: {said}")
            message = json.loads(line)
            if "failed" in message:
                raise BenchmarkFailed(f"{work}: {message['failed']}")
            if "result" in message:
                result: dict[str, Any] = message["result"]
                return result
            if "progress" in message:
                print(f"    {message['progress']}", flush=True)
            else:
                self._profile(message["phase"], process.pid)
                process.stdin.write(b"go\n")
                process.stdin.flush()

    def _profile(self, phase: str, pid: int) -> None:
        profiler = self._setup.profiler
        if profiler is None:
            return
        if phase == "measuring":
            profiler.attach(pid, self._setup.client_core)
        else:
            profiler.detach()

    def _next_line(self, process: subprocess.Popen[bytes], work: str, deadline: float) -> bytes:
        """The next line; empty once the process is gone. Lines of progress come whether or not we wait for one."""
        assert process.stdout is not None
        while b"\n" not in self._said:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while not selector.select(timeout=1.0):
                    if time.monotonic() > deadline:
                        raise BenchmarkFailed(f"the index process did not end {work} in time")
            more = os.read(process.stdout.fileno(), 65_536)
            if not more:
                return b""
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line
