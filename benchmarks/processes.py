"""The broker and its clients: separate processes, one core each, dead when we are."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks import machine
from benchmarks.errors import BenchmarkFailed
from benchmarks.profiling import Profiler

HERE = Path(__file__).resolve().parents[1]
"""The checkout of these benchmarks; what they measure may be another one."""
CHOSEN_PORTS = (20_000, 32_768)
_PR_SET_PDEATHSIG = 1
_START_SECONDS_MAX = 60.0
_END_SECONDS_MAX = 300.0
_STOP_SECONDS_MAX = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")
_LIBC = ctypes.CDLL(None)
_LOG_FAILURE = re.compile(r"^\S+ (ERROR|CRITICAL) |^Traceback ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Setup:
    """Setup that all runs share."""

    source: Path  # the checkout whose broker and SDK are measured
    folder: Path  # where data directories and logs go
    broker_core: int
    client_core: int
    quick: bool
    broker_flags: tuple[str, ...] = ()
    entries: int | None = None  # of index-only rows, instead of their own number
    profiler: Profiler | None = None

    def sized(self, count: int) -> int:
        """A number of messages, ten times smaller for a quick look."""
        return count // 10 if self.quick else count

    def seconds(self, full: float) -> float:
        return full / 5 if self.quick else full


@contextmanager
def own_setup(name: str, source: Path = HERE, broker_flags: tuple[str, ...] = ()) -> Iterator[Setup]:
    """Setup of a program that measures by itself, with a folder that goes at its end; says on what it measures."""
    build = HERE / "build" / "bench"
    build.mkdir(parents=True, exist_ok=True)
    machine.check_folder(build)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=build)).resolve()
    cores = sorted(os.sched_getaffinity(0))
    try:
        about = machine.describe(folder, source)
        print(f"{about['date']}, commit {about['commit']}, {about['cpu']}, load {about['load_before']}")
        yield Setup(source, folder, cores[-2], cores[-1], quick=False, broker_flags=broker_flags)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(source: Path) -> dict[str, str]:
    """Our own environment without settings of a broker, importing from `source` and this package.

    What is installed has its bytecode; without it a broker would compile all its modules at each start.
    """
    left_out = ("POSTDATE_", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (source, source / "clients/python", HERE)))
    return env


def spawn(
    core: int, command: list[str], *, niceness: int = 0, text: bool = True, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process on one core, in a session of its own; the kernel kills it when this one dies, however it dies.

    Linux shares the time of the cores between sessions first, and then between the processes of each, as it does
    between services. With broker and clients in one session, and work on both cores, the kernel's worker that flushes
    the disk waits for a tick of 4 ms at each sync.
    """

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.sched_setaffinity(0, {core})
        if niceness:  # a user may set a session's ten times a second, all sessions counted
            os.nice(niceness)
            with suppress(OSError):  # a system whose sessions share nothing
                Path("/proc/self/autogroup").write_text(str(niceness))

    # Between fork and exec only the calling thread exists; we have no other, so nothing can be held locked.
    return subprocess.Popen(command, preexec_fn=prepare, start_new_session=True, text=text, **options)  # noqa: PLW1509


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has spent; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Broker:
    """One broker on a data directory of its own; it can be killed and started again on the same ports."""

    def __init__(
        self, setup: Setup, name: str, *, script: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """`script`: what starts it instead of its own command, with the same arguments. `env`: more of it."""
        self._env = env or {}
        self._setup = setup
        self._command = [sys.executable, "-m", "broker.cli"]
        if script is not None:
            self._command = [sys.executable, "-P", str(script)]
        self._folder = setup.folder / name
        self._folder.mkdir(parents=True)
        grpc, http = free_ports(2)
        self.address = f"127.0.0.1:{grpc}"
        self.http_address = f"127.0.0.1:{http}"
        self._log_path = self._folder / "broker.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.check_log()
        finally:
            self.kill()
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def data_folder(self) -> Path:
        return self._folder / "data"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Start it without waiting; returns the monotonic time just before."""
        command = [*self._command, "serve", "--data-dir", str(self.data_folder)]
        command += ["--grpc-address", self.address, "--http-address", self.http_address]
        with open(self._log_path, "a") as log:
            begin = time.monotonic()
            self._process = spawn(
                self._setup.broker_core,
                [*command, *self._setup.broker_flags],
                env={**environment(self._setup.source), **self._env},
                cwd=self._setup.source,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return begin

    def wait_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS_MAX
        while time.monotonic() < deadline:
            self.check_alive()
            with suppress(OSError):
                urllib.request.urlopen(f"http://{self.http_address}/readyz", timeout=2).close()
                return
            time.sleep(0.02)
        raise BenchmarkFailed(f"the broker was not ready in time; its log ends: {self.log_tail()}")

    def stop(self) -> float:
        """SIGTERM; returns the seconds until it has ended."""
        assert self._process is not None
        begin = time.monotonic()
        self._process.terminate()
        if status := self._process.wait(_END_SECONDS_MAX):
            raise BenchmarkFailed(f"the broker ended with {status}; its log ends: {self.log_tail()}")
        return time.monotonic() - begin

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()

    def check_alive(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise BenchmarkFailed(
                f"the broker died with status {self._process.returncode}; its log ends: {self.log_tail()}"
            )

    def check_log(self) -> None:
        """Fail if the broker lives but has logged an error: its figure would not be worth much."""
        self.check_alive()
        if logged := self.logged_failure():
            raise BenchmarkFailed(f"the broker logged an error: {logged}")

    def logged_failure(self) -> str:
        """The first error in its log; empty if there is none."""
        text = self.log_text()
        found = _LOG_FAILURE.search(text)
        return text[found.start() :][:2000].strip() if found else ""

    def log_text(self) -> str:
        return self._log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        return self.log_text()[-2000:].strip()

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory: all of it, and the parts that are memory proper and pages of files."""
        found = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "RssAnon", "RssFile", "RssShmem"):
                found[name] = int(value.split()[0]) * 1024
        return found

    def read_bytes(self) -> int:
        """Return the bytes read from the disk since the start; the page cache does not count."""
        lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics, by name with labels."""
        with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, _, value in samples}

    def wait_quiet(self, seconds_max: float = 60.0) -> None:
        """Wait until it has caught up with what it was given: half a second with hardly any work, twice."""
        deadline = time.monotonic() + seconds_max
        quiet = 0
        while quiet < 2:
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"the broker was still busy {seconds_max:.0f} s after the load")
            before = cpu_seconds(self.pid)
            time.sleep(0.5)
            self.check_alive()
            quiet = quiet + 1 if cpu_seconds(self.pid) - before < 0.05 else 0


@dataclass(frozen=True, slots=True)
class Use:
    """CPU time of a measured phase, in cores."""

    broker: float
    client: float
    foreign: float  # everybody else on this machine: near 0 for figures that count
    seconds: float


def spawn_client(
    setup: Setup, work: str, task: Mapping[str, Any], log_path: Path, *, niceness: int = 0
) -> subprocess.Popen[str]:
    """Start a client's process, to be talked to in lines."""
    with open(log_path, "w") as log:
        return spawn(
            setup.client_core,
            [sys.executable, "-m", "benchmarks.client", work, json.dumps(task)],
            niceness=niceness,
            env=environment(setup.source),
            cwd=HERE,  # python -m looks there first, and `benchmarks` must be ours
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=1,
        )


class Client:
    """Runs one piece of work in a client's process, told to it as JSON; it answers with JSON lines.

    `{"phase": name}` asks for leave to go on, `{"result": {...}}` is the end, `{"failed": text}` a failed end.
    """

    def __init__(self, setup: Setup, broker: Broker, work: str, **task: Any) -> None:
        self._setup = setup
        self._broker = broker
        self._work = work
        self._task = {"address": broker.address, **task}
        self._marks: dict[str, tuple[float, float, float, float, float]] = {}

    def run(
        self, seconds_max: float = 300.0, on_phase: Mapping[str, Callable[[], None]] | None = None
    ) -> dict[str, Any]:
        """Run to the end; `on_phase` does what a phase of that name needs before it may go on."""
        log_path = self._setup.folder / "client.log"
        process = spawn_client(self._setup, self._work, self._task, log_path)
        try:
            return self._converse(process, time.monotonic() + seconds_max, on_phase or {}, log_path)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    @property
    def use(self) -> Use | None:
        """Return the cost of the phase from `measuring` to `measured`; None if there was none."""
        if "measured" not in self._marks:
            return None
        begin, end = self._marks["measuring"], self._marks["measured"]
        seconds = end[0] - begin[0]
        broker, client, own, busy = ((end[i] - begin[i]) / seconds for i in range(1, 5))
        return Use(broker, client, max(0.0, busy - broker - client - own), seconds)

    def _converse(
        self,
        process: subprocess.Popen[str],
        deadline: float,
        on_phase: Mapping[str, Callable[[], None]],
        log_path: Path,
    ) -> dict[str, Any]:
        assert process.stdin is not None
        while True:
            line = self._next_line(process, deadline)
            if not line:
                said = log_path.read_text(errors="replace")[-2000:].strip()
                raise BenchmarkFailed(f"the client {self._work} died: {said}")
            said = json.loads(line)
            if "failed" in said:
                self._broker.check_alive()
                logged = self._broker.logged_failure()
                because = f"; the broker logged: {logged}" if logged else ""
                raise BenchmarkFailed(f"{self._work}: {said['failed']}{because}")
            if "result" in said:
                result: dict[str, Any] = said["result"]
                return result
            phase = said["phase"]
            if phase == "measured":  # before what is done for it, which is not part of it
                self._mark(phase, process.pid)
            on_phase.get(phase, _nothing)()
            if phase == "measuring":
                self._mark(phase, process.pid)
            process.stdin.write("go\n")
            process.stdin.flush()

    def _mark(self, phase: str, client_pid: int) -> None:
        profiler = self._setup.profiler
        if phase == "measuring" and profiler is not None:
            profiler.attach(self._broker.pid, self._setup.client_core)
        own = time.process_time()
        busy = machine.busy_seconds()
        self._marks[phase] = (
            time.monotonic(),
            cpu_seconds(self._broker.pid),
            cpu_seconds(client_pid),
            own,
            busy,
        )
        if phase == "measured" and profiler is not None:
            profiler.detach()

    def _next_line(self, process: subprocess.Popen[str], deadline: float) -> str:
        # One line is on its way at most, as the client waits for an answer: readline blocks for no other.
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not selector.select(timeout=1.0):
                if time.monotonic() > deadline:
                    self._broker.check_alive()
                    raise BenchmarkFailed(f"the client {self._work} did not end in time")
        return process.stdout.readline()


def _nothing() -> None:
    pass


def free_ports(count: int) -> list[int]:
    """Return ports below those that systems give to connections and to who asks for any, so that they stay free."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port = random.SystemRandom().randrange(*CHOSEN_PORTS)  # whatever seed a test has set
            bound = stack.enter_context(socket.socket())
            with suppress(OSError):
                bound.bind(("127.0.0.1", port))
                ports.append(port)
    return ports
