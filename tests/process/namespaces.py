"""A network of namespaces on this machine: a process in each, and links between them that delay, lose and cut packets.

Every place has an address and a TUN device. What it sends is passed on by the test's own event loop, as each link has
it: the kernel's netem, which does the same, is not in every kernel. What is lost here is lost for TCP.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_TUN = "/dev/net/tun"
_ETC = Path("/etc/netns")
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_NET = f"198.18.{os.getpid() % 256}"
"""Of the addresses that are set apart for measuring networks; another run beside this one has others."""
_PACKET_BYTES = 1_500
_READ_TOGETHER = 64


@dataclass
class Link:
    """One direction between two places."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    is_cut: bool = False
    passed: int = 0
    lost: int = 0
    free_at: float = 0.0
    """Time before which nothing arrives: packets keep their order."""


def need_namespaces() -> None:
    """Skip the test where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (Debian: apt-get install iproute2)")
    name = _namespace("probe")
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
    try:
        os.close(_open_tun(_device(0), name))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no TUN device can be made here: {error}")
    finally:
        _ip("netns", "delete", name)


class Network:
    """Places by name; `outside` is the test's own."""

    def __init__(
        self, places: Sequence[str], outside: str, rng: random.Random, *, has_names: bool = False
    ) -> None:
        """With `has_names` a place knows the others by their names."""
        self._has_names = has_names
        self.names = (*places, outside)
        self._outside = outside
        self._rng = rng
        self._fds: dict[str, int] = {}
        self._by_address = {self.address(name).encode(): name for name in self.names}
        self._links = {(source, to): Link() for source in self.names for to in self.names if source != to}

    def address(self, name: str) -> str:
        return f"{_NET}.{self.names.index(name) + 1}"

    def command(self, name: str) -> tuple[str, ...]:
        """Return the words before a command that is to run in a place."""
        return ("ip", "netns", "exec", _namespace(name))

    def link(self, source: str, to: str) -> Link:
        return self._links[source, to]

    def links(self, name: str) -> list[Link]:
        """Return the links of a place to and from all others."""
        return [link for ends, link in self._links.items() if name in ends]

    def all_links(self) -> list[Link]:
        return list(self._links.values())

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Make the namespaces and pass packets on."""
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            for number, name in enumerate(self.names):
                namespace = "" if name == self._outside else _namespace(name)
                if namespace:
                    _ip("netns", "add", namespace)
                    stack.callback(_ip, "netns", "delete", namespace)
                    if self._has_names:
                        stack.enter_context(self._hosts(namespace))
                    _ip("-n", namespace, "link", "set", "lo", "up")
                self._fds[name] = fd = _open_tun(_device(number), namespace)
                stack.callback(os.close, fd)
                within = ("-n", namespace) if namespace else ()
                _ip(*within, "address", "add", f"{self.address(name)}/24", "dev", _device(number))
                _ip(*within, "link", "set", _device(number), "mtu", str(_PACKET_BYTES), "up")
                loop.add_reader(fd, self._read, name, fd)
                stack.callback(loop.remove_reader, fd)
            try:
                yield
            finally:
                self._fds.clear()

    @contextmanager
    def _hosts(self, namespace: str) -> Iterator[None]:
        """Have /etc/hosts of a namespace name all places (ip-netns(8))."""
        folder = _ETC / namespace
        folder.mkdir(parents=True)
        try:
            lines = [f"{self.address(name)} {name}\n" for name in self.names]
            (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
            yield
        finally:
            shutil.rmtree(folder)

    def _read(self, source: str, fd: int) -> None:
        for _ in range(_READ_TOGETHER):
            try:
                packet = os.read(fd, _PACKET_BYTES)
            except BlockingIOError:
                return
            if packet[0] >> 4 == 4:
                self._pass(source, packet)

    def _pass(self, source: str, packet: bytes) -> None:
        to = self._by_address.get(".".join(map(str, packet[16:20])).encode())
        if to is None or to == source:
            return
        link = self._links[source, to]
        if link.is_cut or self._rng.random() < link.loss:
            link.lost += 1
            return
        link.passed += 1
        loop = asyncio.get_running_loop()
        delay_ms = link.delay_ms + link.jitter_ms * self._rng.random()
        link.free_at = max(link.free_at, loop.time() + delay_ms / 1e3)
        loop.call_at(link.free_at, self._write, to, packet)

    def _write(self, to: str, packet: bytes) -> None:
        fd = self._fds.get(to)
        if fd is not None:  # else the network is gone
            os.write(fd, packet)


def _namespace(name: str) -> str:
    return f"postdate-{os.getpid()}-{name}"


def _device(number: int) -> str:
    return f"pd{os.getpid() % 1_000_000}n{number}"


def _open_tun(device: str, namespace: str) -> int:
    """Make a TUN device in a namespace, or here; it goes with its descriptor."""
    fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        if namespace:
            _ip("link", "set", device, "netns", namespace)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
