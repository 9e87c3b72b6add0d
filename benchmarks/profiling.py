"""Attaches py-spy to the broker while it is measured, and says where its time went."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from benchmarks.errors import BenchmarkFailed

_RATE = 100
_TOP = 25
_TICKS = os.sysconf("SC_CLK_TCK")
_LINE = re.compile(r":\d+$")
_THREAD = re.compile(r"^thread \((\d+)\): ([^;]*)", re.MULTILINE)
# py-spy takes these for threads at work, but they wait: for a task, for gRPC.
_WAITING = (
    "_worker (concurrent/futures/thread.py)",
    "StepThread._run (broker/runtime/steps.py)",
    "Thread.run (threading.py)",
    "run (threading.py)",
)
_LOOPS = ("Runner.run (asyncio/runners.py)", "run (asyncio/runners.py)")
_LOOP = "(the loop itself: gRPC, uvloop, and waiting)"


class Profiler:
    """Records one profile for each measured phase, as folded stacks: speedscope.app and flamegraph.pl read them."""

    def __init__(self, folder: Path, *, native: bool) -> None:
        found = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
        if found is None:
            raise BenchmarkFailed("--profile needs py-spy: run `make setup`, or put it on the PATH")
        self._command = [found, "record", "--rate", str(_RATE), "--format", "raw", "--threads"]
        # A broker that is stopped for each sample is slowed by a third; a torn stack now and then does no harm.
        self._command += ["--native"] if native else ["--nonblocking"]
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._output = folder
        self._log = folder / "py-spy.log"
        self._pid = 0
        self._begin = 0.0
        self._cpu: dict[str, float] = {}
        self.name = ""

    def attach(self, pid: int, core: int) -> None:
        """Start sampling; returns once it does."""
        self._folder.mkdir(parents=True, exist_ok=True)
        number = len(list(self._folder.glob(f"{self.name}-*.folded"))) + 1
        self._output = self._folder / f"{self.name}-{number}.folded"
        command = [*self._command, "--pid", str(pid), "--duration", "600", "--output", str(self._output)]
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        os.sched_setaffinity(self._process.pid, {core})
        self._pid, self._begin, self._cpu = pid, time.monotonic(), thread_cpu(pid)
        deadline = time.monotonic() + 10
        while "Sampling" not in (said := self._log.read_text(errors="replace")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.detach()
                raise BenchmarkFailed(f"py-spy cannot attach to the broker: {said.strip()}")
            time.sleep(0.05)

    def detach(self) -> None:
        """Stop sampling and print what was found."""
        if self._process is None:
            return
        process, self._process = self._process, None
        seconds = time.monotonic() - self._begin
        cpu = {name: spent - self._cpu.get(name, 0.0) for name, spent in thread_cpu(self._pid).items()}
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._output.exists():
            folded = self._output.read_text(errors="replace")
            print(summary(folded, self._output, cpu, seconds), flush=True)

    def close(self) -> None:
        """Kill it if a failure left it behind."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def thread_cpu(pid: int) -> dict[str, float]:
    """CPU seconds of each thread of a process, by its number."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            fields = (task / "stat").read_text().rpartition(") ")[2].split()
            found[task.name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def summary(folded: str, path: Path, cpu: dict[str, float], seconds: float) -> str:
    """CPU of the threads, as the kernel counts it, and the functions with the most samples that were at work."""
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    called = dict(_THREAD.findall(folded))
    for line in folded.splitlines():
        stack, _, count_text = line.rpartition(" ")
        thread, *frames = stack.split(";")
        names = [_short(frame) for frame in frames]
        if not names or names[-1].startswith(_WAITING):
            continue
        count = int(count_text)
        name = thread.partition(": ")[2]
        threads[name] += count
        own[f"{name:12.12} {_LOOP if names[-1].startswith(_LOOPS) else names[-1]}"] += count
        total.update({f"{name:12.12} {each}": count for each in names if _ours(each)})
    samples = sum(threads.values()) or 1
    lines = [f"profile of {seconds:.1f} s: {path}", "  CPU by thread, in cores (from the kernel):"]
    busiest = sorted(cpu.items(), key=lambda item: -item[1])[:8]
    lines += [
        f"  {spent / seconds:6.2f}  {called.get(n, n)}" for n, spent in busiest if spent / seconds >= 0.01
    ]
    lines.append(f"  {samples} samples at work: " + ", ".join(_shares(threads, samples)))
    lines.append("  the function itself:")
    lines += [f"  {count / samples:6.1%}  {name}" for name, count in own.most_common(_TOP)]
    lines.append("  the broker's functions with what they call:")
    lines += [f"  {count / samples:6.1%}  {name}" for name, count in total.most_common(_TOP)]
    return "\n".join(lines)


def _ours(name: str) -> bool:
    return "(broker/" in name and "(broker/cli.py" not in name


def _shares(threads: Counter[str], samples: int) -> list[str]:
    return [f"{name} {count / samples:.0%}" for name, count in threads.most_common()]


def _short(frame: str) -> str:
    """`name (path:line)` without the line and without the folders that all share."""
    name, _, place = frame.partition(" (")
    path = place.rstrip(")")
    for marker in ("site-packages/", "/main/", "/head/"):
        path = path.rpartition(marker)[2]
    return f"{name} ({_LINE.sub('', path)})"
