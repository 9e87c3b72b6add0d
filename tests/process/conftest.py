"""Real broker processes on real files: started, killed and always cleaned up."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from broker.cli import main
from postdate_api.v1 import consumer_pb2_grpc, producer_pb2_grpc
from tests import tuned_broker
from tests.process.fork_server import IMPORTED, ForkedProcess, ForkServer

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 20.0


async def until(holds: Callable[[], Awaitable[bool]], what: str, *, seconds: float = LIMIT_SECONDS) -> None:
    """Wait for what no line of a log and no answer tells of; `what` says that it did not come."""
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def command_here(*arguments: str) -> tuple[int, str]:
    """`postdate-broker` in this process: status and output. A process of its own spends half a second on imports."""
    done = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    return done.exit_code, done.output


# Small files and frequent checkpoints, so that a kill meets all of them.
SMALL = {
    "payload_bytes_max": "64KiB",
    "request_bytes_max": "1MiB",
    "batch_messages_max": "500",
    "journal_segment_bytes": "1MiB",
    "ledger_max_entries": "2000",
    "ledger_max_bytes": "1MiB",
    "checkpoint_bytes": "64KiB",
    "checkpoint_interval_ms": "100ms",
    "tail_bytes_max": "64KiB",
    "disk_reserve_bytes": "0",
}


class BrokerProcess:
    """`postdate-broker serve`, and what it writes."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess) -> None:
        self.process = process
        self.started = time.monotonic()
        self.lines: list[str] = []
        self.grpc_address = ""
        self.http_address = ""
        self._serving = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())
        self._channel: grpc.aio.Channel | None = None

    async def serving(self) -> BrokerProcess:
        """Wait until it serves; the addresses are in the log line that says so."""
        async with asyncio.timeout(LIMIT_SECONDS):
            await self._serving.wait()
        assert self.grpc_address, "\n".join(self.lines)
        return self

    async def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """Wait until it has ended and all of its lines are read; the exit status."""
        async with asyncio.timeout(seconds):
            status = await self.process.wait()
            await self._reader
        return status

    async def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        await self.wait()

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                self.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
        return self._channel

    @property
    def producer(self) -> Any:
        return producer_pb2_grpc.ProducerServiceStub(self.channel)

    @property
    def consumer(self) -> Any:
        return consumer_pb2_grpc.ConsumerServiceStub(self.channel)

    def logged(self, message: str) -> dict[str, Any]:
        """The log line with this sentence."""
        found = [json.loads(line) for line in self.lines if line.startswith("{") and message in line]
        assert found, "\n".join(self.lines)
        first: dict[str, Any] = found[0]
        return first

    async def clean_up(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.wait()
        if self._channel is not None:  # not before: closing cancels calls that have yet to see the broker go
            await self._channel.close(None)

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            text = line.decode().rstrip("\n")
            self.lines.append(text)
            if '"Serving"' in text:
                facts = json.loads(text)
                if "shard" in facts:
                    continue  # one of several: their supervisor serves once all of them do
                self.grpc_address, self.http_address = facts["grpc"], facts["http"]
                self._serving.set()
        self._serving.set()  # it has ended: whoever waits looks at the lines


Start = Callable[..., Awaitable[BrokerProcess]]


class Processes:
    """Brokers that a test has started, by command or from the fork server."""

    def __init__(self, server: ForkServer | None = None) -> None:
        self._server = server
        self._started: list[BrokerProcess] = []

    async def start(
        self,
        *arguments: str,
        environ: dict[str, str] | None = None,
        files_max: int = 0,
        module: str = "",
        **settings: str,
    ) -> BrokerProcess:
        """Start `postdate-broker serve`."""

        def limit_files() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))

        settings = {
            "grpc_address": "127.0.0.1:0",
            "http_address": "127.0.0.1:0",
            "log_format": "json",
            **settings,
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("POSTDATE_", "GRPC_"))}
        flags, tuning = tuned_broker.split(settings)
        module = module or ("tests.tuned_broker" if tuning else "broker.cli")
        command = ("-m", module, "serve", *flags, *arguments)
        env = {**inherited, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}", **tuning, **(environ or {})}
        process: asyncio.subprocess.Process | ForkedProcess
        if self._server is not None and module in IMPORTED:
            process = await self._server.fork(command, env, files_max=files_max)
        else:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                limit=1 << 20,
                preexec_fn=limit_files if files_max else None,
                env=env,
            )
        self._started.append(BrokerProcess(process))
        return self._started[-1]

    async def clean_up(self) -> None:
        for process in self._started:
            await process.clean_up()


class Command:
    """`postdate-broker` and a subcommand, forked: a process that can be killed."""

    def __init__(self, process: ForkedProcess) -> None:
        self.process = process

    async def finish(self) -> tuple[int, str]:
        """Wait until it has ended; its exit status, and what it wrote."""
        async with asyncio.timeout(60):
            output, errors = await self.process.communicate()
        return await self.process.wait(), (errors + output).decode()


Begin = Callable[..., Awaitable[Command]]


@pytest.fixture
def begin(fork_server: ForkServer) -> Begin:
    """Begins a command of `postdate-broker`."""

    async def begin_one(*arguments: str) -> Command:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("POSTDATE_", "GRPC_"))}
        return Command(await fork_server.fork(("-m", "broker.cli", *arguments), environ, has_stdout=True))

    return begin_one


@pytest.fixture
async def start(fork_server: ForkServer) -> AsyncIterator[Start]:
    """Starts what `postdate-broker serve` is, forked where that can be; whatever is left of it is killed at the end."""
    processes = Processes(fork_server)
    yield processes.start
    await processes.clean_up()


@pytest.fixture
async def start_command() -> AsyncIterator[Start]:
    """Starts the command `postdate-broker serve`; whatever is left of it is killed at the end."""
    processes = Processes()
    yield processes.start
    await processes.clean_up()
