"""Brokers, commands and programs of the SDK, forked from a process that has imported what they need.

It spares each of them half a second of imports. A broker forked so is a process like any other: killed by signals, with an environment, files and memory of its own.
So are the processes of its shards, which a process beside the supervisor forks as the children of that.
What a command line, a limit or a variable does at the start of the interpreter is tested with the command itself.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from broker.runtime.ending import Ending

_ROOT = Path(__file__).parents[2]
IMPORTED = (
    "broker.cli",
    "broker.server",
    "broker.node.node",
    "broker.shards.node_supervisor",
    "tests.tuned_broker",
    "postdate.cli",
)
"""Modules that can be run."""
_IMPORTED_TOO = (
    "broker.jobs.compact_command",
    "broker.rpc.compaction_client",
    "broker.runtime.process_upkeep",
    "postdate.commands.settings",
    "postdate.sync",
)
"""Modules that commands and programs import."""
REQUEST_BYTES_MAX = 1 << 18
_CLONE_PARENT = 0x8000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
_PR_SET_NAME = 15
_M_ARENA_MAX = -8
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, -1
SHARD_NAME = "shard "
"""Name of the process of a shard, before its number: its command line is that of the fork server."""


class ForkedProcess:
    """A forked process, with what tests use of `asyncio.subprocess.Process`."""

    def __init__(
        self,
        pid: int,
        stderr: asyncio.StreamReader,
        status: asyncio.StreamReader,
        stdout: asyncio.StreamReader | None,
    ) -> None:
        self.pid = pid
        self.stderr = stderr
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = asyncio.ensure_future(self._end(status))

    async def wait(self) -> int:
        """Wait until it has ended; the exit status, or the number of the signal below 0."""
        return await asyncio.shield(self._ended)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Wait until it has ended; what it wrote to its standard output and to its standard error."""
        assert self.stdout is not None
        output, errors, _ = await asyncio.gather(self.stdout.read(), self.stderr.read(), self.wait())
        return output, errors

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def _end(self, status: asyncio.StreamReader) -> int:
        told = await status.read()
        assert told, "the fork server has ended before its processes"
        self.returncode = int(told)
        return self.returncode


class ForkServer:
    """The process that brokers are forked from: one for each process of the tests."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("POSTDATE_", "GRPC_"))}
        # A forked process has but the thread that forked it; OpenBLAS would have one for each core.
        environ = {"PYTHONPATH": f"{_ROOT}:{_ROOT / 'clients/python'}", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.process.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**inherited, **environ},
            )

    async def fork(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        files_max: int = 0,
        has_stdout: bool = False,
        is_traced: bool = False,
    ) -> ForkedProcess:
        """Fork a process that does what `python *arguments` would: `-m`, one of some modules, and its arguments, or `-c`.

        What is traced stops itself before it begins, and goes on at a SIGCONT.
        """
        asked = {
            "arguments": arguments,
            "environ": dict(environ),
            "files_max": files_max,
            "is_traced": is_traced,
        }
        ends = [os.pipe() for _ in range(2 + has_stdout)]
        try:
            pid = await asyncio.to_thread(self._ask, json.dumps(asked).encode(), [write for _, write in ends])
        finally:
            for _, write in ends:
                os.close(write)
        stderr, status, *stdout = [await _reader(read) for read, _ in ends]
        return ForkedProcess(pid, stderr, status, stdout[0] if stdout else None)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _ask(self, request: bytes, descriptors: list[int]) -> int:
        with self._asking:
            socket.send_fds(self._socket, [request], descriptors)
            return int(self._socket.recv(64))


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader


def _run(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    files_max: int,
    is_traced: bool,
    stderr: int,
    stdout: Sequence[int],
) -> None:
    """Be what `python *arguments` would have started."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, place in ((nothing, 0), ([*stdout, nothing][0], 1), (stderr, 2)):
        os.dup2(descriptor, place)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if files_max:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    if is_traced:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY))
        os.kill(os.getpid(), signal.SIGSTOP)
    if "serve" in arguments and _SYS_CLONE is not None and _fork_shards():
        return
    _become(arguments, environ)


def _become(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    if arenas := environ.get("MALLOC_ARENA_MAX"):  # which the allocator reads as a process begins
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, int(arenas))
    how, what, *others = arguments
    sys.argv = [what if how == "-m" else how, *others]
    if how == "-m":
        # A supervisor starts its shards by the module that it was started by.
        sys.modules["__main__"] = sys.modules[what]
        sys.modules[what].main()
        return
    os.setsid()  # it may have children of its own
    sys.modules["__main__"] = program = ModuleType("__main__")
    exec(what, vars(program))


class ForkedShard:
    """A forked child of this process, with what a supervisor uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._status = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    def send_signal(self, number: int) -> None:
        if self._status.done():
            raise ProcessLookupError
        os.kill(self.pid, number)

    async def wait(self) -> int:
        status: int = await asyncio.shield(self._status)
        return status

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._status.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))


def _fork_shards() -> bool:
    """Have this process start children from one beside it, which stays as it was imported: without threads.

    Returns True in a child, when it has ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        return _fork_on_request(theirs)
    theirs.close()

    async def start(*command: str, env: Mapping[str, str], **_: Any) -> ForkedShard:
        request = {"arguments": command[command.index("-m") :], "environ": env}
        ours.send(json.dumps(request).encode())
        return ForkedShard(int(ours.recv(64)))

    vars(asyncio)["create_subprocess_exec"] = start
    return False


def _fork_on_request(channel: socket.socket) -> bool:
    while message := channel.recv(REQUEST_BYTES_MAX):
        pid = _fork_sibling()
        if not pid:
            channel.close()
            request = json.loads(message)
            number = next(each.partition("=")[2] for each in request["arguments"] if "--number=" in each)
            ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{SHARD_NAME}{number}".encode())
            _become(**request)
            return True
        channel.send(str(pid).encode())
    return True


def _fork_sibling() -> int:
    """Fork, as `os.fork` does, a child of the parent of this process."""
    python, system = ctypes.pythonapi, ctypes.PyDLL(None)
    python.PyOS_BeforeFork()
    pid = int(system.syscall(_SYS_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid:
        python.PyOS_AfterFork_Parent()
    else:
        python.PyOS_AfterFork_Child()
    assert pid >= 0, "clone failed"
    return pid


def serve(channel: socket.socket) -> None:
    """Fork each process that is asked for, and tell how it ended, until nobody can ask any more."""
    ending = Ending()
    atexit.register(ending.leave)
    for module in (*IMPORTED, *_IMPORTED_TOO):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that the collector of a forked process copies no page for what was imported
    statuses: dict[int, int] = {}
    with selectors.PollSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not channel:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, wait_status = os.waitpid(key.data, 0)
                    with open(statuses.pop(key.data), "wb", buffering=0) as file, suppress(BrokenPipeError):
                        file.write(str(os.waitstatus_to_exitcode(wait_status)).encode())
                    continue
                message, descriptors, *_ = socket.recv_fds(channel, REQUEST_BYTES_MAX, 3)
                if not message:
                    for pid in statuses:  # nobody is left who would
                        os.kill(pid, signal.SIGKILL)
                    return
                stderr, status, *stdout = descriptors
                pid = os.fork()
                if not pid:
                    channel.detach()
                    with ending.noted():
                        _run(**json.loads(message), stderr=stderr, stdout=stdout)
                    return
                for descriptor in (stderr, *stdout):
                    os.close(descriptor)
                statuses[pid] = status
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                channel.send(str(pid).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
