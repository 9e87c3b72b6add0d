"""One measurement: the disk is probed, a server and a client are started, watched and stopped, the disk is probed."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine, processes
from benchmarks.errors import BenchmarkFailed
from benchmarks.peers import peer_class
from benchmarks.peers.peer import Peer, tree
from benchmarks.peers.programs import CLIENTS, ROOT
from benchmarks.peers.rows import Scenario, Sizes, Take

_PROBES = 100
_QUIET_SECONDS_MAX = 20.0
_KERNEL_THREADS = 2
"""The process that all threads of the kernel descend from: they write back what the servers wrote."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The folder and cores of the runs, and their bounds."""

    folder: Path
    server_core: int
    client_core: int
    foreign_max: float
    """Cores that others may take during a measurement."""
    probe_ratio_max: float
    """Between the disk's probes before and after."""
    seconds_max: float
    """Of one measurement."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Disk and CPU as seen around and during a measurement."""

    foreign: float
    probe_before_us: float
    probe_after_us: float

    def disturbance(self, limits: Machine) -> str:
        """Return why the measurement does not count; empty if it does."""
        if self.foreign > limits.foreign_max:
            return f"others took {self.foreign:.2f} of a core"
        low, high = sorted((self.probe_before_us, self.probe_after_us))
        if high > limits.probe_ratio_max * low:
            return f"a sync took {self.probe_before_us:.0f} µs before and {self.probe_after_us:.0f} µs after"
        return ""


def take_until_quiet(measure: Callable[[], Take], again_max: int, say: Callable[[Take], None]) -> list[Take]:
    """Measure; what is disturbed is thrown away and measured again, at most so many times. All takes are returned."""
    takes = []
    for _ in range(again_max + 1):
        takes.append(measure())
        say(takes[-1])
        if not takes[-1].disturbed:
            break
    return takes


def measure(limits: Machine, name: str, scenario: Scenario, sizes: Sizes) -> Take:
    """One take, on a new server."""
    before = probe(limits)
    run = Run(limits, name, scenario, sizes)
    try:
        figures = run.run()
    finally:
        run.close()
    watch = Watch(run.foreign, before, probe(limits))
    shown = {"foreign": watch.foreign, "probe_before_us": before, "probe_after_us": watch.probe_after_us}
    return Take(figures | shown, watch.disturbance(limits))


def probe(limits: Machine) -> float:
    """Microseconds of an append of 4 KiB with its sync, the median."""
    with machine.pinned(limits.server_core):
        return statistics.median(machine.sync_us(limits.folder, _PROBES))


class Run:
    """A server, a client, and what they say to each other."""

    def __init__(self, limits: Machine, name: str, scenario: Scenario, sizes: Sizes) -> None:
        self.foreign = 0.0
        self._limits = limits
        self._scenario = scenario
        self._figures: dict[str, float] = {}
        self._name = name
        kind = peer_class(name)
        folder = limits.folder / f"{name}-{scenario.name}"
        shutil.rmtree(folder, ignore_errors=True)
        ports = processes.free_ports(kind.ports_count)
        self._peer: Peer = kind(folder, ports, limits.server_core)
        self._task = scenario.task(sizes) | {
            "folder": str(folder),
            "ports": ports,
            "core": limits.server_core,
        }
        self._client: subprocess.Popen[str] | None = None
        self._log = limits.folder / "client.log"
        self._begin: tuple[float, float] = (0.0, 0.0)
        self._before = {"memory": 0, "disk": 0}
        self._started_at = 0.0

    def run(self) -> dict[str, float]:
        """Run to the end; return the figures."""
        self._peer.start()
        self._client = self._spawn_client()
        result = self._converse(time.monotonic() + self._limits.seconds_max)
        if "first_at" in result:
            result["first_s"] = result.pop("first_at") - self._started_at
        return result | self._figures

    def close(self) -> None:
        """Stop both."""
        try:
            if self._client is not None:
                self._client.kill()
                self._client.wait()
                for pipe in (self._client.stdin, self._client.stdout):
                    with suppress(OSError):
                        assert pipe is not None
                        pipe.close()
        finally:
            self._peer.stop()

    def _spawn_client(self) -> subprocess.Popen[str]:
        environment = processes.environment(ROOT)
        environment["PYTHONPATH"] += os.pathsep + str(CLIENTS)
        command = [sys.executable, "-m", "benchmarks.peers.client", self._name, self._scenario.work]
        with open(self._log, "w") as log:
            process: subprocess.Popen[str] = processes.spawn(
                self._limits.client_core,
                [*command, json.dumps(self._task)],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=1,
            )
        return process

    def _converse(self, deadline: float) -> dict[str, float]:
        assert self._client is not None and self._client.stdin is not None
        while True:
            line = self._next_line(deadline)
            if not line:
                said = self._log.read_text(errors="replace")[-1500:].strip()
                raise BenchmarkFailed(f"the client died: {said}")
            said = json.loads(line)
            if "failed" in said:
                self._peer.check_alive()
                raise BenchmarkFailed(said["failed"])
            if "result" in said:
                result: dict[str, float] = said["result"]
                return result
            self._on_phase(said["phase"])
            self._client.stdin.write("go\n")
            self._client.stdin.flush()

    def _on_phase(self, name: str) -> None:
        match name:
            case "connected" | "measuring":
                self._mark_begin()
            case "measured":
                self._mark_end()
            case "empty":
                self._wait_quiet()
                self._before = {"memory": self._peer.memory(), "disk": self._peer.disk()}
            case "loaded":
                self._wait_quiet()
                for what, value in (("memory", self._peer.memory()), ("disk", self._peer.disk())):
                    self._figures[what] = (value - self._before[what]) / self._task["count"]
                self._mark_end()
            case "stored":
                self._peer.kill()
                self._started_at = self._peer.start()

    def _mark_begin(self) -> None:
        self._begin = (time.monotonic(), self._foreign_seconds())

    def _mark_end(self) -> None:
        """Note what others took; the worst of several phases counts."""
        begin, before = self._begin
        taken = (self._foreign_seconds() - before) / max(time.monotonic() - begin, 1e-3)
        self.foreign = max(self.foreign, taken, 0.0)

    def _foreign_seconds(self) -> float:
        """CPU time of everybody but the server, the client, us and the kernel's own threads."""
        assert self._client is not None
        ours = [os.getpid(), self._client.pid, *tree(_KERNEL_THREADS)]
        return machine.busy_seconds() - self._peer.cpu() - sum(map(processes.cpu_seconds, ours))

    def _wait_quiet(self) -> None:
        """Wait until the server has caught up with what it was given, or for the bound."""
        deadline = time.monotonic() + _QUIET_SECONDS_MAX
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            before = self._peer.cpu()
            time.sleep(0.5)
            self._peer.check_alive()
            quiet = quiet + 1 if self._peer.cpu() - before < 0.05 else 0

    def _next_line(self, deadline: float) -> str:
        # One line is on its way at most, as the client waits for an answer: readline blocks for no other.
        assert self._client is not None and self._client.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._client.stdout, selectors.EVENT_READ)
            while not selector.select(timeout=1.0):
                self._peer.check_alive()
                if time.monotonic() > deadline:
                    raise BenchmarkFailed(f"not done after {self._limits.seconds_max:.0f} s")
        return self._client.stdout.readline()
