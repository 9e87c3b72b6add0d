"""The machine: what it is, and what it can do without a broker."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkFailed

LIBRARIES = ("grpcio", "protobuf", "uvloop", "numpy", "pyroaring", "google-crc32c")
_BLOCK_BYTES = 4096
_COPY_BYTES = 64 << 20


def describe(folder: Path, source: Path) -> dict[str, Any]:
    """Everything a reader needs to know to compare these figures with others."""
    mount, kind = file_system(folder)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_first("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / (1 << 20), 1),
        "kernel": platform.release(),
        "system": _os_name(),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "file_system": f"{kind} at {mount}",
        "folder": str(folder),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "commit": commit(source),
    }


def file_system(folder: Path) -> tuple[str, str]:
    """Mount point and type of the file system that holds a folder."""
    best = ("/", "unknown")
    real = folder.resolve()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode().decode("unicode_escape")
        if real.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, after.split()[0])
    return best


def check_folder(folder: Path) -> None:
    """Refuse a file system in memory: a sync there costs nothing, and the figures would mean nothing."""
    mount, kind = file_system(folder)
    if kind in ("tmpfs", "ramfs", "devtmpfs"):
        raise BenchmarkFailed(f"{folder} is in memory ({kind} at {mount}): give --dir on a real disk")


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Run on one core meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def sync_us(folder: Path, count: int) -> list[float]:
    """Microseconds of `fdatasync` after each of `count` appends of 4 KiB, with the append."""
    path = folder / "sync-probe"
    block = os.urandom(_BLOCK_BYTES)
    took = []
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    try:
        for _ in range(count):
            begin = time.perf_counter_ns()
            os.write(file, block)
            os.fdatasync(file)
            took.append((time.perf_counter_ns() - begin) / 1000)
    finally:
        os.close(file)
        path.unlink()
    return took


def append_bytes_per_second(folder: Path, block_bytes: int, seconds: float) -> float:
    """Bytes a second that appends of so many bytes write, each followed by `fdatasync`."""
    path = folder / "append-probe"
    block = os.urandom(block_bytes)
    count = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    try:
        begin = time.perf_counter()
        while (took := time.perf_counter() - begin) < seconds:
            os.write(file, block)
            os.fdatasync(file)
            count += 1
    finally:
        os.close(file)
        path.unlink()
    return count * block_bytes / took


def python_mops() -> float:
    """Million turns a second of a plain Python loop on one core: best of five, a reference for other machines."""
    turns = 1_000_000
    best = min(_timed(lambda: sum(number & 7 for number in range(turns))) for _ in range(5))
    return turns / best / 1e6


def copy_gb_per_second() -> float:
    """Bytes copied in memory on one core, the median of seven."""
    block = bytes(_COPY_BYTES)
    return _COPY_BYTES / statistics.median(_timed(lambda: bytearray(block)) for _ in range(7)) / 1e9


def busy_seconds() -> float:
    """CPU time that the whole machine has spent, the hypervisor's theft included."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _first(path: str, name: str) -> str | None:
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


def _os_name() -> str:
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def commit(source: Path) -> str:
    """The commit of a checkout, and whether there is more in it."""
    try:
        said = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()
