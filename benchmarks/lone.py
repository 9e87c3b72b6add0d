"""The steps of one lone message, timed: `python -m benchmarks.lone`, with `--source DIR` for another checkout.

Messages are sent one after the other: by a unary call and on a stream with raw stubs, and by the SDK's `send`. Both
processes stamp their steps on the same clock (`traced_broker.py`, `client/lone.py`); a row of the table is the time
from the step before, at the median. In the same run, in turns: the round trip of a gRPC server that does nothing, and
bare writes and syncs of as many bytes to the same file system. With `--calls`, system calls and wake-ups of each thread
of the broker, counted by strace while nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.arguments import at_least_one, checkout
from benchmarks.processes import HERE, Broker, Client, Setup, own_setup
from benchmarks.scenarios import echo_server

WAYS = ("unary", "stream", "sdk")
TRIPS = {"unary": "echo-unary", "stream": "echo-stream", "sdk": "echo-stream"}
STEPS = {
    "call": "client, wire, and the broker's loop: the call has begun",
    "read": "its message is read",
    "accept": "the service has it",
    "decoded": "decoded",
    "planned": "decided, and queued in the journal",
    "accepted": "the service goes on to wait",
    "taken": "the journal takes it",
    "thread": "hop to the journal's thread",
    "encoded": "group encoded",
    "synced": "written and synced",
    "stored": "the thread is done",
    "woken": "hop back to the loop",
    "applied": "applied",
    "answer": "hop to the task that answers",
    "answered": "answer encoded",
    "end": "wire, client",
}
_GROUP_BYTES = 270  # what the journal writes for a message of 100 B
_COUNTED = 300
_BARE = "append, fdatasync"
_BARE_PACED = "the same, one a millisecond"
"""As a broker's syncs come: one that follows another at once finds caches, disk and core awake."""


def main() -> int:
    options = _options()
    with own_setup("lone", options.source.resolve(), ("--log-level", "error")) as setup:
        _measure(setup, options.count, options.turns)
        if options.calls:
            _count_calls(setup)
    return 0


def _measure(setup: Setup, count: int, turns: int) -> None:
    trace_path = setup.folder / "trace.json"
    script = HERE / "benchmarks" / "traced_broker.py"
    env = {"BENCHMARK_TRACE_FILE": str(trace_path)}
    cpu: dict[str, float] = defaultdict(float)
    disk: dict[str, list[float]] = defaultdict(list)
    ways = (*WAYS, "echo-unary", "echo-stream")
    with Broker(setup, "lone", script=script, env=env) as broker, echo_server(setup) as echo_address:

        def begin(way: str) -> None:
            if way == WAYS[0]:
                with machine.pinned(setup.broker_core):
                    for name, took in _disk_us(setup.folder, count).items():
                        disk[name] += took
            cpu[way] -= _cpu_us(broker.pid)

        def end(way: str) -> None:
            cpu[way] += _cpu_us(broker.pid)

        on_phase: dict[str, Callable[[], None]] = {}
        for turn in range(turns):
            on_phase |= {f"{way}:begin:{turn}": partial(begin, way) for way in ways}
            on_phase |= {f"{way}:end:{turn}": partial(end, way) for way in ways}
        task = {
            "echo_address": echo_address,
            "payload_bytes": 100,
            "count": count,
            "turns": turns,
            "ways": ways,
        }
        result = Client(setup, broker, "lone", **task).run(on_phase=on_phase)
        broker.stop()
        trace = json.loads(trace_path.read_text())
        broker.start()  # as its end is checked
        broker.wait_ready()
    _report(result, trace, {way: cpu[way] / (count * turns) for way in ways}, disk, count * turns)


def _report(
    result: dict[str, Any],
    trace: dict[str, Any],
    cpu: dict[str, float],
    disk: dict[str, list[float]],
    sent: int,
) -> None:
    stamps = sorted(trace["stamps"], key=lambda stamp: stamp[1])
    at = [ns for _, ns in stamps]
    took: dict[str, float] = {}
    legs: dict[str, dict[str, float]] = {}
    for way, own in result["stamps"].items():
        times: dict[str, list[float]] = defaultdict(list)
        whole = []
        for (_, begin), (_, end) in zip(own[::2], own[1::2], strict=True):
            whole.append((end - begin) / 1000)
            last = begin
            inside = stamps[bisect_left(at, begin) : bisect_left(at, end)]
            for label, ns in (*inside, ("end", end)):
                times[label].append((ns - last) / 1000)
                last = ns
        took[way] = statistics.median(whole)
        # The mean of what every message has at its usual place; a step may come twice.
        legs[way] = {
            label: statistics.median(values) * len(values) / len(whole) for label, values in times.items()
        }
    print(f"\n{'microseconds, medians':58}" + "".join(f"{way:>9}" for way in WAYS))
    for label, what in STEPS.items():
        row = [legs[way].get(label) for way in WAYS]
        if any(value is not None for value in row):
            print(f"{what:58}" + "".join("        -" if value is None else f"{value:9.0f}" for value in row))
    bare = {name: statistics.median(values) for name, values in disk.items()}
    limit = {way: bare[_BARE] + took[TRIPS[way]] for way in WAYS}
    paced = {way: bare[_BARE_PACED] + took[TRIPS[way]] for way in WAYS}
    tasks = {way: _between(trace["tasks"], result["stamps"][way]) / sent for way in WAYS}
    rows: list[tuple[str, Callable[[str], float], str]] = [
        ("in all", lambda way: took[way], "9.0f"),
        ("messages a second", lambda way: 1e6 / took[way], "9.0f"),
        ("the same call to a server that does nothing", lambda way: took[TRIPS[way]], "9.0f"),
        ("bare append and fdatasync, plus that", lambda way: limit[way], "9.0f"),
        ("of that", lambda way: took[way] / limit[way], "9.2f"),
        ("with a sync each millisecond, plus that", lambda way: paced[way], "9.0f"),
        ("of that", lambda way: took[way] / paced[way], "9.2f"),
        ("CPU of the broker, a message", lambda way: cpu[way], "9.0f"),
        ("CPU of the client, a message", lambda way: result["cpu_us"][way] / sent, "9.0f"),
        ("tasks of the broker, a message", lambda way: tasks[way], "9.2f"),
    ]
    for what, value, form in rows:
        print(f"{what:58}" + "".join(format(value(way), form) for way in WAYS))
    print(
        "\nbare disk, microseconds at the median: "
        + ", ".join(f"{name} {us:.0f}" for name, us in bare.items())
    )


def _between(times: list[int], own: list[list[Any]]) -> int:
    """Return how many times lie within messages."""
    spans = zip(own[::2], own[1::2], strict=True)
    return sum(bisect_left(times, end) - bisect_left(times, begin) for (_, begin), (_, end) in spans)


def _disk_us(folder: Path, count: int) -> dict[str, list[float]]:
    """Microseconds to make as many bytes durable as a message takes: at the end of a file, and within its length."""
    block = os.urandom(_GROUP_BYTES)

    def appended(file: int, offset: int) -> None:
        os.pwrite(file, block, offset)
        os.fdatasync(file)

    def dsync(file: int, offset: int) -> None:
        os.pwritev(file, [block], offset, os.RWF_DSYNC)

    took: dict[str, list[float]] = {}
    for name, length, pause_seconds, write in (
        (_BARE, 0, 0.0, appended),
        (_BARE_PACED, 0, 0.001, appended),
        ("within the file, fdatasync", 1 << 20, 0.0, appended),
        ("within the file, RWF_DSYNC", 1 << 20, 0.0, dsync),
    ):
        path = folder / "disk-probe"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.ftruncate(file, length)
            os.fsync(file)
            took[name] = []
            for number in range(count):
                time.sleep(pause_seconds)
                begin = time.perf_counter_ns()
                write(file, number * _GROUP_BYTES)
                took[name].append((time.perf_counter_ns() - begin) / 1000)
        finally:
            os.close(file)
            path.unlink()
    return took


def _cpu_us(pid: int) -> float:
    """Return the CPU time of all threads, which /proc/PID/stat has in hundredths of a second only."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1000


def _count_calls(setup: Setup) -> None:
    for way in WAYS:
        log = setup.folder / "strace.log"
        with Broker(setup, f"calls-{way}") as broker, echo_server(setup) as echo_address:
            threads: dict[str, str] = {}
            strace: list[subprocess.Popen[bytes]] = []

            def begin(broker: Broker = broker, strace: list[Any] = strace, log: Path = log) -> None:
                command = ["strace", "-f", "-qq", "-o", str(log), "-p", str(broker.pid)]
                strace.append(subprocess.Popen(command))
                while not (log.exists() and log.stat().st_size):
                    time.sleep(0.05)

            def end(
                broker: Broker = broker, strace: list[Any] = strace, threads: dict[str, str] = threads
            ) -> None:
                for task in Path(f"/proc/{broker.pid}/task").iterdir():
                    threads[task.name] = (task / "comm").read_text().strip()
                strace[0].terminate()
                strace[0].wait()

            task = {
                "echo_address": echo_address,
                "payload_bytes": 100,
                "count": _COUNTED,
                "turns": 1,
                "ways": [way],
            }
            Client(setup, broker, "lone", **task).run(on_phase={f"{way}:begin:0": begin, f"{way}:end:0": end})
            threads[str(broker.pid)] = "loop"
        counts: Counter[tuple[str, str]] = Counter()
        for number, call in re.findall(
            r"^(\d+) +(?:<\.\.\. )?(\w+)(?:\(| resumed)", log.read_text(), re.MULTILINE
        ):
            counts[threads.get(number, "?"), call] += 1
        print(
            f"\nsystem calls a message, {way} ({_COUNTED} messages under strace; one that waits may count twice)"
        )
        for (thread, call), number in counts.most_common():
            if number >= _COUNTED / 10:
                print(f"  {thread:16} {call:16} {number / _COUNTED:6.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", type=checkout, default=HERE, help="another checkout to measure")
    parser.add_argument("--count", type=at_least_one, default=300, help="messages of each way in a turn")
    parser.add_argument("--turns", type=at_least_one, default=5)
    parser.add_argument("--calls", action="store_true", help="count system calls as well (needs strace)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
