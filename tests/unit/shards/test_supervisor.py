"""The supervisor of shards: how it starts their processes, and whom it asks and tells what."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.config import load_config
from broker.rpc.port import GrpcPort
from broker.runtime.notify import ServiceNotifier
from broker.settings import UNIX
from broker.shards import supervisor
from broker.shards.child import ShardChild
from broker.shards.shard_process import http_socket
from broker.shards.supervisor import ShardSupervisor, shard_command
from broker.web.server import HttpServer
from broker.web.shard_http import ShardHttp, ShardReadiness
from tests.configs import broker_config

SECONDS = 20.0


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


class Supervised:
    """A supervisor of two processes that only sleep; what shards answer over HTTP is answered here."""

    def __init__(self, folder: str, **settings: Any) -> None:
        self.reasons: list[str | None] = ["starting", None]
        self.scrapes = 0
        self.may_answer = asyncio.Event()
        config = broker_config(
            data_dir=folder,
            shards=2,
            grpc_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            drain_grace_ms=0,
            **settings,
        )
        os.mkdir(f"{folder}/run")
        self.https = [self._http(UNIX + http_socket(config, number), number) for number in range(2)]
        self.supervisor = ShardSupervisor(
            config, lambda _: ["sleep", "100"], notifier=ServiceNotifier({}), read_config=lambda: config
        )

    def _http(self, address: str, number: int) -> HttpServer:
        async def metrics() -> bytes:
            self.scrapes += 1
            await self.may_answer.wait()
            return b"up 1\n"

        http = HttpServer(address, metrics, lambda: self.reasons[number])
        http.listen()
        return http

    def line(self) -> str | None:
        return self.supervisor._not_ready_because()


@pytest.fixture
async def supervised(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Supervised]:
    monkeypatch.setattr(supervisor, "_ANSWER_SECONDS", SECONDS)  # on a busy machine
    with tempfile.TemporaryDirectory(prefix="shards-") as folder:
        made = Supervised(folder)
        for http in made.https:
            await http.start()
        running = asyncio.create_task(made.supervisor.run())
        await eventually(lambda: made.line() == "shard 0: starting")
        yield made
        made.may_answer.set()
        made.supervisor._stop.set()
        async with asyncio.timeout(SECONDS):
            await running
        for http in made.https:
            await http.stop()


async def test_metrics_are_those_of_all_processes_also_of_one_that_is_not_ready(
    supervised: Supervised,
) -> None:
    supervised.may_answer.set()
    page = await supervised.supervisor._share_metrics()
    assert b'up{shard="0"} 1\n' in page
    assert b'up{shard="1"} 1\n' in page


async def test_scrapes_at_the_same_time_share_one_page(supervised: Supervised) -> None:
    scrapes = [asyncio.create_task(supervised.supervisor._share_metrics()) for _ in range(5)]
    await eventually(lambda: supervised.scrapes >= 2)
    scrapes.pop().cancel()  # whoever leaves takes nothing from the others
    supervised.may_answer.set()
    async with asyncio.timeout(SECONDS):
        pages = await asyncio.gather(*scrapes)
    assert len(set(pages)) == 1
    assert supervised.scrapes == 2, "one of each shard"


async def test_scrapes_that_wait_keep_no_probe_waiting(supervised: Supervised) -> None:
    http = ShardHttp(1, supervised.https[1].address.removeprefix(UNIX))
    scrapes = [asyncio.create_task(http.metrics(SECONDS)) for _ in range(8)]
    try:
        await eventually(lambda: supervised.scrapes >= 2)
        assert (await http.readiness(SECONDS / 4)).line == "ok"
        supervised.may_answer.set()
        assert await asyncio.gather(*scrapes) == [b"up 1\n"] * 8
    finally:
        await http.close()


@pytest.mark.slow
async def test_a_process_hears_sighup_once_it_was_ready_and_until_it_ends(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def note(child: ShardChild, number: signal.Signals) -> None:
        if number is signal.SIGHUP:
            told.append(child.number)
        else:
            sent(child, number)

    sent = ShardChild.send
    monkeypatch.setattr(ShardChild, "send", note)

    def reload() -> list[int]:
        told.clear()
        supervised.supervisor._reload()
        return list(told)

    assert reload() == [1]  # the other one may not listen yet, and would end
    supervised.reasons[0] = None
    await eventually(lambda: supervised.line() is None)
    supervised.reasons[:] = ["disk full", "disk full"]
    await eventually(lambda: supervised.line() == "shard 0: disk full; shard 1: disk full")
    assert reload() == [0, 1]
    child = supervised.supervisor._children[0]
    os.kill(child.pid, signal.SIGKILL)
    await eventually(lambda: child.starts == 2)
    assert reload() == [1]


@pytest.mark.parametrize(
    ("kind", "method"),
    [(ShardHttp, "readiness"), (ShardChild, "_run_once"), (GrpcPort, "_watch_security")],
)
async def test_a_task_that_fails_ends_the_whole_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, method: str
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(kind, method, fail)
    access_file = tmp_path / "access.toml"
    access_file.write_text("")
    with tempfile.TemporaryDirectory(prefix="shards-") as folder:
        made = Supervised(folder, access_file=str(access_file))
        async with asyncio.timeout(SECONDS):
            assert await made.supervisor.run() == 1


class Frozen:
    """A listening socket behind which nobody answers, in the place of a shard's HTTP."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        os.unlink(path)
        self.socket.bind(path)
        self.socket.listen(128)


@pytest.mark.slow
async def test_only_a_shard_that_was_ready_is_killed_for_its_silence(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 0 is in recovery, and its port is taken already; shard 1 serves."""
    await eventually(lambda: supervised.line() == "shard 0: starting")
    monkeypatch.setattr(supervisor, "_ANSWER_SECONDS", 0.05)
    frozen = []
    children = supervised.supervisor._children
    for number, http in enumerate(supervised.https):
        await http.stop()
        frozen.append(Frozen(http_socket(supervised.supervisor._config, number)))
    first = [child.pid for child in children]
    await eventually(lambda: children[1].starts == 2)
    assert children[1].pid != first[1]
    looks = 0

    async def count(*_: object) -> ShardReadiness:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)
        return ShardReadiness("does not answer", "does not answer", is_silent=True)

    monkeypatch.setattr(ShardHttp, "readiness", count)
    monkeypatch.setattr(supervisor, "_FIRST_LOOK_SECONDS", 0.0)
    await eventually(lambda: looks > 8 * supervisor._SILENT_LOOKS_MAX)
    # Neither the one that was never ready, nor the other one before it was ready again.
    assert [child.starts for child in children] == [1, 2]
    for each in frozen:
        each.socket.close()


@pytest.mark.slow
async def test_a_shard_whose_port_is_closed_is_not_killed(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is about to end: perhaps it writes its last checkpoint."""
    http = supervised.https[1]
    await http.stop()
    monkeypatch.setattr(supervisor, "_FIRST_LOOK_SECONDS", 0.0)
    looks = 0
    ask = ShardHttp.readiness

    async def count(asked: ShardHttp, seconds: float) -> ShardReadiness:
        nonlocal looks
        looks += 1
        return await ask(asked, seconds)

    monkeypatch.setattr(ShardHttp, "readiness", count)
    await eventually(lambda: looks > 4 * supervisor._SILENT_LOOKS_MAX)
    assert supervised.supervisor._children[1].starts == 1


@pytest.mark.slow
def test_a_shard_of_an_installed_command_takes_no_code_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    for module in ("broker", "logging"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('code of the working directory')")
    command = shard_command(load_config({"shards": "2"}, {}), None, {}, os.getpid())(0)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [*command, "--help"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "serve-shard" in ended.stdout


def test_a_shard_that_is_started_again_has_the_number_of_shards_and_the_folder_of_its_supervisor(
    tmp_path: Path,
) -> None:
    path = tmp_path / "postdate.toml"
    path.write_text('shards = 2\ndata_dir = "old"\n')
    command = shard_command(load_config({}, {}, str(path)), str(path), {"lease_ms": "5s"}, 7)
    path.write_text('shards = 3\ndata_dir = "new"\n')
    flags = dict(argument[2:].split("=") for argument in command(1) if argument.startswith("--"))
    assert flags.pop("config") == str(path)
    assert (flags.pop("number"), flags.pop("supervisor")) == ("1", "7")
    again = load_config({name.replace("-", "_"): value for name, value in flags.items()}, {}, str(path))
    assert (again.shards, again.data_dir, again.lease_ms) == (2, "old", 5_000)
