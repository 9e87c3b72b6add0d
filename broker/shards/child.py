"""A shard's process as its supervisor sees it: started, started again when it ends, told to stop.

The first one is started ahead of the supervisor, which loads more than this module needs (`beginning.py`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from broker.config import BrokerConfig
from broker.observe.logs import get_logger
from broker.shards.beginning import BEGIN

log = get_logger(__name__)

_PAUSE_SECONDS_MIN = 0.2
_PAUSE_SECONDS_MAX = 10.0
_STEADY_SECONDS = 30.0
"""A process that ran for so long is started again at once; one that ends sooner waits twice as long each time."""


class ShardChild:
    """The process of one shard, one after the other."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environ: Mapping[str, str],
    ) -> None:
        self.number = number
        self.starts: int = 0
        self._command = command
        self._environ = environ
        self.on_ended: Callable[[int], None] = lambda _: None
        """Is told the number when a process has ended."""
        self._process: Process | None = None
        self._stop = asyncio.Event()

    @property
    def pid(self) -> int:
        """Return the id of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def start_ahead(self) -> None:
        """Start the first process. It touches nothing before `run`, which tries again if there can be none."""
        with suppress(OSError):
            await self._start()

    async def run(self) -> None:
        """Keep a process running until `stop`; returns when the last one has ended."""
        loop = asyncio.get_running_loop()
        pause_seconds = _PAUSE_SECONDS_MIN
        while not self._stop.is_set():
            started = loop.time()
            try:
                status: int | str = await self._run_once()
            except OSError as error:
                status = str(error)
            if self._stop.is_set():
                return
            if loop.time() - started >= _STEADY_SECONDS:
                pause_seconds = _PAUSE_SECONDS_MIN
            log.error(
                "The process of a shard has ended and is started again",
                shard=self.number,
                status=status,
                pause_ms=round(pause_seconds * 1000),
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_seconds)
            pause_seconds = min(pause_seconds * 2, _PAUSE_SECONDS_MAX)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def stop(self) -> None:
        """Have the process drain, and start no other one."""
        self._stop.set()
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        self._stop.set()
        self.send(signal.SIGKILL)

    async def end(self) -> None:
        """Kill the process, if there is one, and wait until it has ended."""
        self.kill()
        if self._process is not None:
            await self._process.wait()

    async def _run_once(self) -> int:
        process = self._process or await self._start()
        if process.stdin is not None:
            process.stdin.write(BEGIN)
            process.stdin.close()
        if self._stop.is_set():  # while it was started
            self.send(signal.SIGTERM)
        try:
            return await process.wait()
        finally:
            self._process = None
            self.on_ended(self.number)

    async def _start(self) -> Process:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, env=dict(self._environ)
        )
        self.starts += 1
        return process


@asynccontextmanager
async def started_ahead(
    commands: Sequence[Sequence[str]], environ: Mapping[str, str]
) -> AsyncIterator[list[ShardChild]]:
    """Start the processes of shards, for the supervisor that runs within; without one they are killed."""
    children = [ShardChild(number, command, environ) for number, command in enumerate(commands)]
    try:
        for child in children:
            await child.start_ahead()
        yield children
    finally:
        for child in children:
            await child.end()


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a shard's process: systemd is told by the supervisor alone."""
    own = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    return {name: value for name, value in environ.items() if name not in own}


def shard_command(
    config: BrokerConfig, config_path: str | None, flags: Mapping[str, str], supervisor_pid: int
) -> Callable[[int], list[str]]:
    """Return what makes the command that starts the process of a shard, with the settings given to this one.

    A shard that is started again reads the file of settings anew. How many shards there are, and where, stays as it is.
    """
    fixed = {**flags, "shards": str(config.shards), "data_dir": config.data_dir}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in fixed.items()]
    if config_path is not None:
        given.append(f"--config={config_path}")
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "broker" if spec is None else spec.name.removesuffix(".__main__")
    # A command that was installed looks for no code in the working directory; `python -m` would. Who started this one
    # by `python -m` may have the code there.
    path = ["-P"] if spec is None or sys.flags.safe_path else []

    def command(number: int) -> list[str]:
        internal = [f"--number={number}", f"--supervisor={supervisor_pid}"]
        return [sys.executable, *path, "-m", module, "serve-shard", *internal, *given]

    return command
