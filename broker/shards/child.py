"""A shard's process as its supervisor sees it: started, started again when it ends, told to stop."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from broker.observe.logs import get_logger

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
        *,
        on_ended: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_ended` is told the number when a process has ended."""
        self.number = number
        self.starts: int = 0
        self._command = command
        self._environ = environ
        self._on_ended = on_ended
        self._process: Process | None = None
        self._stop = asyncio.Event()

    @property
    def pid(self) -> int:
        """Return the id of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

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

    async def _run_once(self) -> int:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=DEVNULL, env=dict(self._environ)
        )
        self.starts += 1
        if self._stop.is_set():  # while it was started
            self.send(signal.SIGTERM)
        try:
            return await self._process.wait()
        finally:
            self._process = None
            self._on_ended(self.number)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a shard's process: systemd is told by the supervisor alone."""
    own = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    return {name: value for name, value in environ.items() if name not in own}
