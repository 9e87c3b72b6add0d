"""A peer: one class, made once where its server is started and once in the client's process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import spawn

Note = Callable[[Sequence[bytes]], None]
"""Told of the payloads of each batch of messages as it arrives."""

_STOP_SECONDS_MAX = 30.0
_LOG_TAIL = 1_500


class Peer:
    """A server in a folder of its own, and a client of it. `due_ms` are milliseconds of the wall clock."""

    title: ClassVar[str]
    answer: ClassVar[str]
    """The meaning of an answer to a producer, for the page."""
    setup: ClassVar[str]
    """Settings of the server and how the client is used, for the page."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Packages of the client, by their names in the package index."""
    not_measured: ClassVar[Mapping[str, str]] = {}
    """Patterns of scenarios that it does not run, with what stands in their place on the page."""
    ports_count: ClassVar[int] = 1
    in_flight: ClassVar[int] = 4
    """Prepared batches that are not answered, at most."""

    def __init__(self, folder: Path, ports: Sequence[int], core: int) -> None:
        self.folder = folder
        self.ports = ports
        self.core = core
        self._process: subprocess.Popen[Any] | None = None

    # The server.

    @classmethod
    def install(cls) -> None:
        """Bring the server into a folder of its own, if it is one that can be brought."""

    @classmethod
    def missing(cls) -> str:
        """Return what of the server is not on this machine; empty if all of it is there."""
        return ""

    @classmethod
    def version(cls) -> str:
        raise NotImplementedError

    @classmethod
    def instead_of(cls, scenario: str) -> str:
        """Return what stands in the place of a scenario's figures; empty if it is measured."""
        found = (text for pattern, text in cls.not_measured.items() if fnmatch(scenario, pattern))
        return next(found, "")

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def prepare_folder(self) -> None:
        """Make what the server wants to find before its first start."""
        (self.folder / "data").mkdir(parents=True)

    def spawn_options(self) -> dict[str, Any]:
        return {}

    def start(self) -> float:
        """Start it without waiting; return the monotonic time just before."""
        if not self.folder.exists():
            self.prepare_folder()
        with open(self.folder / "server.log", "a") as log:
            begin = time.monotonic()
            self._process = spawn(
                self.core,
                self.command(),
                env=self.environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **self.spawn_options(),
            )
        return begin

    def stop(self) -> None:
        """End it, first with SIGTERM, and remove its folder."""
        try:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_SECONDS_MAX)
        finally:
            self.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """kill -9 of the server and all that it started, and wait until they are gone."""
        if self._process is None:
            return
        pids = tree(self._process.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _STOP_SECONDS_MAX
        while any(_runs(pid) for pid in pids[1:]):
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"{self.title} did not die")
            time.sleep(0.005)

    def check_alive(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            log = (self.folder / "server.log").read_text(errors="replace")[-_LOG_TAIL:].strip()
            raise BenchmarkFailed(f"{self.title} ended with {self._process.returncode}; its log ends: {log}")

    def cpu(self) -> float:
        """Seconds of CPU that the server has spent, in processes that have ended too."""
        assert self._process is not None
        return sum(map(_cpu_seconds, tree(self._process.pid)))

    def memory(self) -> int:
        """Bytes of memory of the server's processes; what they share counts once."""
        assert self._process is not None
        return sum(map(_resident_bytes, tree(self._process.pid)))

    def disk(self) -> int:
        """Bytes on disk of what the server wrote, but for its log."""
        blocks = 0
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):
                if path.is_file() and path != self.folder / "server.log":
                    blocks += path.stat().st_blocks
        return blocks * 512

    # The client.

    async def connect(self) -> None:
        """Connect to the server; fail when it does not serve yet."""
        raise NotImplementedError

    async def create(self) -> None:
        """Create what the messages go to; once for a server."""

    async def produce(self, payload: bytes, due_ms: int) -> None:
        """Store one message; return when the answer has come."""
        raise NotImplementedError

    async def produce_batch(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> None:
        """Store messages as a user of the client would; return when all are answered."""
        raise NotImplementedError

    async def prepare(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> Any:
        """Make beforehand all of a batch that can be, so that the client costs as little as it can."""
        return payloads, due_ms

    async def produce_prepared(self, prepared: Any) -> None:
        payloads, due_ms = prepared
        await self.produce_batch(payloads, due_ms)

    async def consume(self, count: int, note: Note) -> None:
        """Take and acknowledge so many messages; return when all acknowledgements are confirmed."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connections."""


def tree(pid: int) -> list[int]:
    """A process and all that it started, itself first."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, path.read_text().split())
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


async def wait_connected(peer: Peer, seconds_max: float = 300.0) -> None:
    """Connect as soon as the server serves."""
    deadline = time.monotonic() + seconds_max
    while True:
        try:
            await peer.connect()
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)
