"""Sites of three nodes and their store, and the faults that each allows: processes stopped, links cut, packets lost.

FileSite        a folder is the store
ProxySite       a real S3-compatible server, each node behind a connection of its own that can be cut
NamespaceSite   the same server; it, each node and the clients in network namespaces of their own, whose links delay
                and lose packets at all times, and can be cut in either direction; each node has a small disk and a
                wall clock of its own
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from benchmarks.processes import free_ports
from tests.process.namespaces import Network
from tests.process.stepped_broker import set_clock
from tests.s3_server import need_server, s3_server, store_url

PREFIX = "run"
PORT = 7650
DISK_BYTES = 128 << 20
CLOCK_STEP_MS_MAX = 20_000
ON_ITS_WAY_SECONDS = 10.0
"""Time for which what an owner with a clock ahead has sent may still come."""
Signal = Callable[[signal.Signals], None]
"""Sends a signal to the process of the owner."""


class FileSite:
    """See the module's description."""

    takes_owner: frozenset[str] = frozenset({"kill", "freeze", "disk"})
    """Faults that cost an owner its shard, if they last."""
    kinds: tuple[str, ...] = ("kill", "freeze", "disk")
    module = "broker"
    """Module that a node runs."""

    def __init__(self, folder: Path, rng: random.Random, names: Sequence[str]) -> None:
        self.folder = folder
        self.rng = rng
        self.names = tuple(names)
        ports = free_ports(len(self.names))
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in zip(self.names, ports, strict=True)}
        self.stores: dict[str, str] = {}
        self.create_url = ""

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Have the store there, and what lies between it and the nodes."""
        (self.folder / "store").mkdir()
        self.create_url = f"file://{self.folder / 'store'}"
        self.stores = dict.fromkeys(self.names, self.create_url)
        yield

    def data_dir(self, name: str) -> Path:
        """Return the folder of a node; those above it are there."""
        return self.folder / f"data-{name}"

    def command(self, name: str) -> tuple[str, ...]:
        """Return the words before the command of a node."""
        return ()

    def ahead_ms(self) -> int:
        """Return by how much the clock of a node is, or just was, ahead of the clients'."""
        return 0

    @asynccontextmanager
    async def fault(self, kind: str, owner: str, send: Signal) -> AsyncIterator[None]:
        """The time of a fault. A process that was killed is started again by whoever watches it."""
        if kind == "kill":
            send(signal.SIGKILL)
            yield
        elif kind == "disk":
            send(signal.SIGKILL)
            lost = self.data_dir(owner).with_name("lost")
            os.rename(self.data_dir(owner), lost)
            await asyncio.to_thread(shutil.rmtree, lost, ignore_errors=True)
            yield
        else:
            assert kind == "freeze"
            send(signal.SIGSTOP)
            try:
                yield
            finally:
                send(signal.SIGCONT)

    def facts(self) -> dict[str, object]:
        """Return what is to be told of a run besides its history."""
        return {}


class ProxySite(FileSite):
    """See the module's description."""

    takes_owner = FileSite.takes_owner | {"cut"}
    kinds = (*FileSite.kinds, "cut")

    def __init__(self, folder: Path, rng: random.Random, names: Sequence[str]) -> None:
        super().__init__(folder, rng, names)
        self._proxies: dict[str, Proxy] = {}

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            port = await stack.enter_async_context(s3_server(need_server(), self.folder / "s3"))
            self.create_url = store_url(port, PREFIX)
            for name in self.names:
                self._proxies[name] = proxy = Proxy(port)
                self.stores[name] = store_url(await stack.enter_async_context(proxy.listening()), PREFIX)
            yield

    @asynccontextmanager
    async def fault(self, kind: str, owner: str, send: Signal) -> AsyncIterator[None]:
        if kind != "cut":
            async with super().fault(kind, owner, send):
                yield
            return
        self._proxies[owner].cut()
        try:
            yield
        finally:
            self._proxies[owner].mend()


class NamespaceSite(FileSite):
    """See the module's description.

    cut       nothing passes between the owner and the store
    mute      nothing of the owner comes to the store
    deaf      nothing of the store comes to the owner
    island    nothing passes between the owner and anybody
    unheard   nothing passes between the owner and the clients: it stays the owner
    full      there is no room left on the owner's disk
    ahead     the owner's clock is set ahead, and back later
    behind    the owner's clock is set back, and right again later
    slow      packets of all links take ten times as long, and one in ten is lost
    store     the store is killed, and comes back later
    """

    takes_owner = FileSite.takes_owner | {"cut", "mute", "deaf", "island"}
    kinds = (
        *(*FileSite.kinds, "cut", "mute", "deaf", "island"),
        *("unheard", "slow", "store", "full", "ahead", "behind"),
    )
    module = "tests.process.stepped_broker"

    def __init__(self, folder: Path, rng: random.Random, names: Sequence[str]) -> None:
        super().__init__(folder, rng, names)
        self._ahead_ms = 0
        self._ahead_until = 0.0
        self._network = Network((*self.names, "store"), "clients", rng)
        self.addresses = {name: f"{self._network.address(name)}:{PORT}" for name in self.names}
        self._store = AsyncExitStack()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        host = self._network.address("store")
        self.create_url = store_url(PORT, PREFIX, host)
        self.stores = dict.fromkeys(self.names, self.create_url)
        async with self._network.up():
            await self._start_store()
            try:
                self._set_links(delay_ms=5, jitter_ms=5, loss=0.01)
                with self._disks():
                    yield
            finally:
                await self._store.aclose()

    def data_dir(self, name: str) -> Path:
        return self._disk(name) / "data"

    def command(self, name: str) -> tuple[str, ...]:
        return (*self._network.command(name), "env", f"CLOCK_OFFSET_FILE={self._clock(name)}")

    def ahead_ms(self) -> int:
        return self._ahead_ms if time.monotonic() < self._ahead_until else 0

    @asynccontextmanager
    async def fault(self, kind: str, owner: str, send: Signal) -> AsyncIterator[None]:
        network = self._network
        if kind in FileSite.kinds:
            async with super().fault(kind, owner, send):
                yield
        elif kind == "store":
            await self._store.aclose()
            try:
                yield
            finally:
                await self._start_store()
        elif kind == "full":
            async with self._full_disk(owner):
                yield
        elif kind in ("ahead", "behind"):
            with self._stepped_clock(owner, 1 if kind == "ahead" else -1):
                yield
        elif kind == "slow":
            self._set_links(delay_ms=50, jitter_ms=50, loss=0.1)
            try:
                yield
            finally:
                self._set_links(delay_ms=5, jitter_ms=5, loss=0.01)
        else:
            links = {
                "cut": [network.link(owner, "store"), network.link("store", owner)],
                "mute": [network.link(owner, "store")],
                "deaf": [network.link("store", owner)],
                "island": network.links(owner),
                "unheard": [network.link(owner, "clients"), network.link("clients", owner)],
            }[kind]
            for link in links:
                link.is_cut = True
            try:
                yield
            finally:
                for link in links:
                    link.is_cut = False

    def facts(self) -> dict[str, object]:
        links = self._network.all_links()
        return {"packets": {"passed": sum(x.passed for x in links), "lost": sum(x.lost for x in links)}}

    def _disk(self, name: str) -> Path:
        return self.folder / f"disk-{name}"

    def _clock(self, name: str) -> Path:
        return self.folder / f"clock-{name}"

    @contextlib.contextmanager
    def _disks(self) -> Iterator[None]:
        """A small disk and a clock for each node."""
        with contextlib.ExitStack() as stack:
            for name in self.names:
                set_clock(self._clock(name), 0)
                self._disk(name).mkdir()
                mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self._disk(name)))
                subprocess.run(mount, check=True)
                stack.callback(subprocess.run, ("umount", str(self._disk(name))), check=True)
            yield

    @asynccontextmanager
    async def _full_disk(self, name: str) -> AsyncIterator[None]:
        filler = self._disk(name) / "filler"
        await asyncio.to_thread(fill, filler)
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def _stepped_clock(self, name: str, sign: int) -> Iterator[None]:
        ahead_ms = sign * self.rng.randrange(200, CLOCK_STEP_MS_MAX)
        self._ahead_ms, self._ahead_until = max(ahead_ms, 0), float("inf")
        set_clock(self._clock(name), ahead_ms)
        try:
            yield
        finally:
            set_clock(self._clock(name), 0)
            self._ahead_until = time.monotonic() + ON_ITS_WAY_SECONDS

    def _set_links(self, *, delay_ms: float, jitter_ms: float, loss: float) -> None:
        for link in self._network.all_links():
            link.delay_ms, link.jitter_ms, link.loss = delay_ms, jitter_ms, loss

    async def _start_store(self) -> None:
        host, command = self._network.address("store"), self._network.command("store")
        await self._store.enter_async_context(
            s3_server(need_server(), self.folder / "s3", host=host, port=PORT, command=command)
        )


def fill(path: Path) -> None:
    """Write a file until there is no room left. Blocks."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))


class Proxy:
    """A connection between a node and its store that can be cut: nothing passes then, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for writer in [*self._writers]:
                writer.close()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        """Let new connections pass; those of before are ended."""
        for writer in [*self._writers]:
            writer.transport.abort()
        self._whole.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(far_writer)
            try:
                await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
            finally:
                self._writers.discard(far_writer)
                far_writer.close()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._whole.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


SITES: dict[str, type[FileSite]] = {"file": FileSite, "s3": ProxySite, "namespaces": NamespaceSite}
