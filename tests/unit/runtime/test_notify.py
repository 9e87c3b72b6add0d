"""Notifications to systemd, on a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.runtime.notify import ServiceNotifier
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(5)
        yield heard


def environ_of(listener: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(listener.getsockname()), **more}


def count_pings(environ: dict[str, str], well_seconds: float) -> list[float]:
    """Return the times of watchdog pings within ten seconds, for a service that is well for so long."""
    told: list[float] = []

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        notifier = ServiceNotifier(environ)
        notifier.tell = lambda *lines: told.append(loop.time())  # type: ignore[method-assign]
        start = loop.time()
        task = asyncio.create_task(notifier.keep_alive(lambda: loop.time() - start < well_seconds))
        await asyncio.sleep(10)
        task.cancel()

    run_sim(scenario, 1)
    return told


def test_lines_arrive_as_one_datagram(listener: socket.socket) -> None:
    ServiceNotifier(environ_of(listener)).tell("READY=1", "STATUS=Serving")
    assert listener.recv(1_000) == b"READY=1\nSTATUS=Serving"


def test_abstract_socket(tmp_path: Path) -> None:
    name = f"postdate-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind("\0" + name)
        heard.settimeout(5)
        ServiceNotifier({"NOTIFY_SOCKET": f"@{name}"}).tell("STOPPING=1")
        assert heard.recv(1_000) == b"STOPPING=1"


def test_without_a_listener_nothing_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServiceNotifier({}).tell("READY=1")
    assert not caplog.records
    ServiceNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).tell("READY=1")
    assert [record.message for record in caplog.records] == ["The service manager could not be notified"]


@pytest.mark.slow
def test_a_listener_that_does_not_read_holds_up_nothing(listener: socket.socket) -> None:
    notifier = ServiceNotifier(environ_of(listener))
    for _ in range(2_000):  # more than the socket's queue takes
        notifier.tell("WATCHDOG=1")
    assert listener.recv(1_000) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    ("more", "well_seconds", "count"),
    [
        ({"WATCHDOG_USEC": "4000000"}, 100, 5),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": str(os.getpid())}, 100, 5),
        ({"WATCHDOG_USEC": "4000000"}, 3, 2),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}, 100, 0),
        ({}, 100, 0),
    ],
    ids=["twice in its time", "its process", "not well any more", "another process", "no watchdog"],
)
def test_watchdog(listener: socket.socket, more: dict[str, str], well_seconds: float, count: int) -> None:
    assert len(count_pings(environ_of(listener, **more), well_seconds)) == count
