"""Real processes of two shards: one is killed or frozen, then their supervisor; nothing that was answered is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from broker.jobs.verify import verify_folder
from broker.runtime.vfs import LocalVfs
from broker.topic_shards import shard_of
from postdate_api.v1 import admin_pb2, admin_pb2_grpc, message_pb2, producer_pb2
from tests.process.conftest import SMALL, BrokerProcess, Start, until
from tests.process.fork_server import SHARD_NAME
from tests.process.load import TOPIC, Load, run_for
from tests.process.test_crash import settle, verify

SHARDS = 2
LOADED = shard_of(TOPIC, SHARDS)
"""The shard that has the load."""
ELSEWHERE = next(name for name in ("a", "topic9") if shard_of(name, SHARDS) != LOADED)
KILLED_SECONDS = 90.0
"""Time for a frozen shard to be killed, half a minute, and to be back, on a busy machine."""
CALL_SECONDS = 8.0
"""Time for a call that waits for nobody, on a busy machine."""


async def start_shards(start: Start, folder: Path) -> BrokerProcess:
    settings = {"data_dir": str(folder), "shards": str(SHARDS), **SMALL}
    return await (await start(**settings)).serving()


def children(broker: BrokerProcess) -> dict[int, int]:
    """Return the process of each shard, by its number."""
    return dict(shard_processes(broker.process.pid))


def shard_processes(pid: int) -> Iterator[tuple[int, int]]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            number = next((each for each in arguments if each.startswith("--number=")), "")
            name = Path(f"/proc/{child}/comm").read_text()
            if number or name.startswith(SHARD_NAME):
                yield int(number.removeprefix("--number=") or name.removeprefix(SHARD_NAME)), int(child)


def environ_of(pid: int) -> list[bytes]:
    """Return what a process was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def produce(broker: BrokerProcess, topic: str, payload: bytes) -> None:
    request = producer_pb2.ProduceRequest(topic=topic, messages=[message_pb2.Message(payload=payload)])
    await broker.producer.Produce(request, timeout=CALL_SECONDS)


async def readiness(broker: BrokerProcess) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        answer = await session.get(f"http://{broker.http_address}/readyz")
        return answer.status, await answer.text()


async def test_a_shard_that_dies_or_freezes_keeps_only_its_own_topics(start_command: Start, tmp_path: Path):
    broker = await start_shards(start_command, tmp_path / "d")
    killed = children(broker)[LOADED]
    # A fork of a process that uses gRPC goes on with gRPC's work, and crashes now and then, unless that is off.
    assert b"GRPC_ENABLE_FORK_SUPPORT=0" in environ_of(killed)
    load = Load(seed=7)
    load.begin_life()
    tasks = await run_for(broker, load, 0.1)
    os.kill(killed, signal.SIGKILL)
    for number in range(5):
        await produce(broker, ELSEWHERE, b"%d" % number)
    await asyncio.gather(*tasks)
    assert not load.violations, load.violations[:5]

    async def is_back() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await produce(broker, f"{TOPIC}~again", b"x")  # of the same shard
            return (await readiness(broker))[0] == 200 and children(broker)[LOADED] != killed
        return False

    await until(is_back, "the shard did not come back")
    load.begin_life()
    await settle(load, broker)
    assert not load.violations, load.violations[:5]
    frozen = children(broker)[LOADED]
    os.kill(frozen, signal.SIGSTOP)
    waiting = asyncio.ensure_future(produce(broker, TOPIC, b"late"))
    begun = time.monotonic()
    for number in range(5):
        await produce(broker, ELSEWHERE, b"%d" % number)
    took = time.monotonic() - begun

    async def is_noticed() -> bool:
        return await readiness(broker) == (503, f"shard {LOADED}: does not answer\n")

    await until(is_noticed, "nobody says that the shard is frozen")
    os.kill(frozen, signal.SIGCONT)
    with contextlib.suppress(grpc.aio.AioRpcError):  # it may have taken too long
        await waiting
    assert took < CALL_SECONDS
    broker.process.send_signal(signal.SIGTERM)
    assert await broker.wait() == 0, broker.lines[-20:]
    for number in range(SHARDS):
        verify(tmp_path / "d" / f"shard-{number:04}")


async def test_pages_of_all_shards_are_shown_without_a_frozen_one_which_they_name(
    start: Start, tmp_path: Path
):
    broker = await start_shards(start, tmp_path / "d")
    for topic in (TOPIC, ELSEWHERE):
        messages = [message_pb2.Message(payload=b"x", deliver_after_ms=n * 3_600_000) for n in (2, 3)]
        request = producer_pb2.ProduceRequest(topic=topic, messages=messages)
        await broker.producer.Produce(request, timeout=CALL_SECONDS)

    async def page(path: str) -> str:
        async with aiohttp.ClientSession() as session:
            answer = await session.get(f"http://{broker.http_address}{path}")
            assert answer.status == 200
            return await answer.text()

    async def is_indexed() -> bool:  # which is a little after the answer to the producer
        return "<b>4</b> messages are due in this window" in await page("/timeline")

    await until(is_indexed, "the timeline does not show all that waits")
    pages = {"/timeline": "messages are due in this window", "/scheduled": "messages wait", "/storage": ""}
    for path, counted in pages.items():
        text = await page(path)
        assert f"<b>4</b> {counted}" in text or not counted
        assert f">{TOPIC}<" in text and f">{ELSEWHERE}<" in text, path
        assert "shown here" not in text
    frozen = children(broker)[LOADED]
    os.kill(frozen, signal.SIGSTOP)
    for path, counted in pages.items():
        text = await page(f"{path}?unit=day")
        assert f"<b>2</b> {counted}" in text or not counted
        assert f">{TOPIC}<" not in text and f">{ELSEWHERE}<" in text, path
        assert f"Shard {LOADED} does not answer. Its topics are not shown here" in text
    os.kill(frozen, signal.SIGCONT)


async def test_calls_over_http_reach_the_topics_of_all_shards(start: Start, tmp_path: Path):
    broker = await start_shards(start, tmp_path / "d")
    async with aiohttp.ClientSession(f"http://{broker.http_address}/v1/") as session:
        for topic in (TOPIC, ELSEWHERE):
            stored = await session.post("produce", json={"topic": topic, "messages": [{"payload": "eA=="}]})
            assert stored.status == 200, await stored.text()
            named = {"topic": topic, "subscription": "s", "initial_position": "INITIAL_POSITION_EARLIEST"}
            answer = await session.post("receive", json=named | {"wait_ms": 5_000})
            (delivery,) = (await answer.json())["deliveries"]
            assert delivery["message"]["payload"] == "eA=="


async def test_a_shard_whose_disk_goes_while_others_serve_does_not_begin_empty(start: Start, tmp_path: Path):
    broker = await start_shards(start, tmp_path / "d")
    for topic in (TOPIC, ELSEWHERE):
        await produce(broker, topic, b"x")
    folder, away = tmp_path / "d" / f"shard-{LOADED:04}", tmp_path / "away"
    folder.rename(away)
    folder.mkdir()  # where the disk was mounted
    os.kill(children(broker)[LOADED], signal.SIGKILL)

    async def is_refused() -> bool:
        return "served before" in " ".join(broker.lines)

    await until(is_refused, "nobody says that the data is gone")
    assert list(folder.iterdir()) == []
    assert (await readiness(broker))[0] == 503
    await produce(broker, ELSEWHERE, b"y")
    folder.rmdir()
    away.rename(folder)

    async def is_back() -> bool:
        return await readiness(broker) == (200, "ok\n")

    await until(is_back, "the shard did not come back with its disk")
    admin = admin_pb2_grpc.AdminServiceStub(broker.channel)
    stats = await admin.GetStats(admin_pb2.GetStatsRequest(topics=[TOPIC]), timeout=CALL_SECONDS)
    assert [topic.topic for topic in stats.topics] == [TOPIC]


async def test_a_shard_that_stays_frozen_is_killed_and_started_again_and_makes_its_part_of_a_backup(
    start: Start, tmp_path: Path
):
    broker = await start_shards(start, tmp_path / "d")
    for topic in (TOPIC, ELSEWHERE):
        await produce(broker, topic, b"x")
    before = children(broker)
    os.kill(before[LOADED], signal.SIGSTOP)

    async def is_back() -> bool:
        return children(broker).get(LOADED, before[LOADED]) != before[LOADED] and (
            await readiness(broker) == (200, "ok\n")
        )

    await until(is_back, "the frozen shard was not started again", seconds=KILLED_SECONDS)
    assert broker.logged("does not answer and is killed")["shard"] == LOADED
    await produce(broker, TOPIC, b"y")
    admin = admin_pb2_grpc.AdminServiceStub(broker.channel)
    backup = (await admin.CreateBackup(admin_pb2.CreateBackupRequest(), timeout=CALL_SECONDS)).backup
    assert backup.topics == 2
    assert verify_folder(LocalVfs(), backup.path).problems == []
    async with grpc.aio.insecure_channel(
        f"unix:{tmp_path}/d/run/0.grpc"
    ) as shard:  # before or after it, by itself
        part = admin_pb2_grpc.AdminServiceStub(shard).CreateBackup(
            admin_pb2.CreateBackupRequest(), timeout=CALL_SECONDS
        )
        assert (await part).backup.path.startswith(f"{tmp_path}/d/backups/shard-0000/")
    assert {number: pid for number, pid in children(broker).items() if number != LOADED} == {
        number: pid for number, pid in before.items() if number != LOADED
    }
    broker.process.send_signal(signal.SIGTERM)
    assert await broker.wait() == 0, broker.lines[-20:]
    for number in range(SHARDS):
        verify(tmp_path / "d" / f"shard-{number:04}")


async def test_children_end_with_their_supervisor_and_come_back_with_the_next(start: Start, tmp_path: Path):
    broker = await start_shards(start, tmp_path / "d")
    for topic in (TOPIC, ELSEWHERE):
        await produce(broker, topic, b"x")
    processes = children(broker)
    assert sorted(processes) == list(range(SHARDS))
    # The signals of a terminal are for the supervisor, and processors are shared out by sessions.
    assert [os.getpgid(pid) for pid in processes.values()] == list(processes.values())
    assert {os.getsid(pid) for pid in processes.values()} == {os.getsid(broker.process.pid)}
    os.kill(processes[0], signal.SIGSTOP)  # also one that could do nothing about it itself
    broker.process.send_signal(signal.SIGKILL)

    async def are_gone() -> bool:
        return not any(map(is_running, processes.values()))

    await until(are_gone, "a shard has outlived its supervisor")
    await broker.wait()
    again = await start_shards(start, tmp_path / "d")
    assert sum(opened(again, number)["topics"] for number in range(SHARDS)) == 2
    again.process.send_signal(signal.SIGHUP)  # which ends nothing
    again.process.send_signal(signal.SIGTERM)
    assert await again.wait() == 0, again.lines[-20:]
    (tmp_path / "d" / "shard-0001").rename(tmp_path / "not-mounted")
    refused = await start(data_dir=str(tmp_path / "d"), shards=str(SHARDS), **SMALL)
    assert await refused.wait() == 1
    assert any("has served before" in line for line in refused.lines), refused.lines
    (tmp_path / "not-mounted").rename(tmp_path / "d" / "shard-0001")
    last = await start_shards(start, tmp_path / "d")
    assert opened(last, 1)["topics"] == opened(again, 1)["topics"]


def opened(broker: BrokerProcess, number: int) -> dict[str, Any]:
    lines = [broker.logged(f'"shard": {number}')]
    assert lines[0]["message"] == "Data directory opened"
    return lines[0]
