"""A broker under a service manager: a real process tells a real socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

from tests.process.conftest import LIMIT_SECONDS, Start


async def test_systemd_hears_of_ready_alive_and_stopping(start: Start, tmp_path: Path) -> None:
    heard: list[str] = []
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)

        async def hear(line: str) -> None:
            async with asyncio.timeout(LIMIT_SECONDS):
                while line not in heard:
                    heard.extend((await loop.sock_recv(listener, 4_096)).decode().splitlines())

        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        broker = await start(environ=environ, data_dir=str(tmp_path / "data"))
        await hear("READY=1")
        assert heard.index("STATUS=Recovering") < heard.index("READY=1")
        assert any(each.startswith("STATUS=Serving gRPC on 127.0.0.1:") for each in heard)
        await hear("WATCHDOG=1")
        broker.process.send_signal(signal.SIGTERM)
        await hear("STOPPING=1")
        assert await broker.wait() == 0, broker.lines


async def test_a_loop_that_hangs_is_not_called_alive(start: Start, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        broker = await start(environ=environ, data_dir=str(tmp_path / "data"))
        async with asyncio.timeout(LIMIT_SECONDS):
            while await loop.sock_recv(listener, 4_096) != b"WATCHDOG=1":
                pass
        broker.process.send_signal(signal.SIGSTOP)
        told = 0
        try:
            # What was sent before it stopped may still come; then nothing does for as long as systemd would wait.
            async with asyncio.timeout(0.6):
                while True:
                    await loop.sock_recv(listener, 4_096)
                    told += 1
        except TimeoutError:
            pass
        broker.process.send_signal(signal.SIGCONT)
        assert told <= 1
