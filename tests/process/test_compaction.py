"""Compaction by its command, on real files: under load, kill -9 of broker and job at named points, and what it frees."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

import postdate
from broker.storage.blocks import KINDS
from postdate_api.v1 import admin_pb2, admin_pb2_grpc
from tests.depth import DEPTH, at_depth
from tests.process.conftest import ROOT, SMALL, Begin, BrokerProcess, Start, command_here
from tests.process.load import Load
from tests.process.test_crash import verify

TINY = {
    **SMALL,
    "min_index_count": "50",
    "max_segment_entries": "20",
    "segment_time_step_ms": "1s",
    "seal_after_ms": "100ms",
    "ledger_max_entries": "400",
    "batch_messages_max": "300",
    "drain_grace_ms": "100ms",
    "checkpoint_interval_ms": "150ms",
    "reclaim_interval_ms": "1h",  # so that what is done stays for the job
}
LARGE = {"batch_messages_max": "1000", "request_bytes_max": "8MiB", "journal_segment_bytes": "16MiB"}
PAUSE_MS = at_depth(change=120, deep=4)
"""A load that goes on for as long as a job takes need not be great."""
WORTH_COMPACTING = 1_200
"""Messages with which two ledgers are full."""
EAGER = ("--live-ratio", "0.9", "--reclaim-mib", "0")


COMPACT = ("compact", "--engine", "inline")


async def compact(*arguments: str) -> tuple[int, str]:
    return await command_here(*COMPACT, *arguments)


# -- named points: what the disk looks like there ----------------------------------------------------------------------


def ledger_files(data_dir: Path) -> Iterator[tuple[str, str]]:
    """(ledger_id, generation) of each file of times."""
    for path in data_dir.glob("topics/*/ledgers/*.times"):
        ledger_id, generation, _ = path.name.split(".")
        yield ledger_id, generation


def _begun(data_dir: Path) -> bool:
    return any(data_dir.glob("staging/*/inputs"))


def _writing(data_dir: Path) -> bool:
    return any(data_dir.glob("staging/*/*/*.times"))


def _moving(data_dir: Path) -> bool:
    return any(generation != "0" for _, generation in ledger_files(data_dir)) and _begun(data_dir)


def _committed(data_dir: Path) -> bool:
    return any(generation != "0" for _, generation in ledger_files(data_dir)) and not _begun(data_dir)


POINTS: dict[str, tuple[Callable[[Path], bool], str]] = {
    "broker when the job has begun": (_begun, "broker"),
    "broker while the job writes": (_writing, "broker"),
    "broker while files are moved": (_moving, "broker"),
    "broker before the old files go": (_committed, "broker"),
    "job when it has begun": (_begun, "job"),
    "job while it writes": (_writing, "job"),
    "job while the broker moves files": (_moving, "job"),
}


IN_A_CHANGE = ("broker while files are moved", "job while it writes")
"""The points that a change is tried with; `make test-deep` takes all."""
LEDGERS, ENTRIES = at_depth(change=6, deep=20), at_depth(change=1_000, deep=2_000)


async def reached(point: Callable[[Path], bool], data_dir: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if point(data_dir):
                return True
        except FileNotFoundError:
            continue
        await asyncio.sleep(0.0005)
    return False


async def loaded(broker: BrokerProcess, load: Load) -> list[asyncio.Task[None]]:
    """Load a broker with a producer and a consumer, and wait until there is something to compact."""
    tasks = [asyncio.create_task(load.produce(broker)), asyncio.create_task(load.consume(broker, "all"))]
    await load.under_way(WORTH_COMPACTING)
    return tasks


async def test_kill_9_at_named_points_under_load_loses_and_doubles_nothing(
    start: Start, begin: Begin, tmp_path: Path
):
    load = Load(seed=31, delay_ms_max=3_000, pause_ms=PAUSE_MS)
    data_dir = tmp_path / "d"
    met: set[str] = set()
    points = {name: POINTS[name] for name in (POINTS if DEPTH == "deep" else IN_A_CHANGE)}
    for name, (point, victim) in points.items():
        load.begin_life()
        broker = await (await start(data_dir=str(data_dir), **TINY)).serving()
        tasks = await loaded(broker, load)
        known = set(ledger_files(data_dir))

        def is_met(
            folder: Path, point: Callable[[Path], bool] = point, known: set[tuple[str, str]] = known
        ) -> bool:
            if point in (_moving, _committed):
                new = {each for each in ledger_files(folder) if each[1] != "0"} - known
                return bool(new) and (point is _moving) == _begun(folder)
            return point(folder)

        for _ in range(3):
            job = await begin(*COMPACT, "--address", broker.grpc_address, "--apply", *EAGER)
            if await reached(is_met, data_dir, 8.0):
                met.add(name)
                break
            await job.finish()
        if victim == "job" and job.process.returncode is None:
            job.process.kill()
            await job.process.wait()
            await asyncio.sleep(0.1)  # it may hear of it
        await broker.kill()
        await asyncio.gather(*tasks)
        await job.finish()
        assert not load.violations, load.violations[:5]
        await asyncio.to_thread(verify, data_dir)
    assert len(met) >= len(points) - 1, met
    load.begin_life()
    broker = await (await start(data_dir=str(data_dir), **TINY)).serving()
    consumer = asyncio.create_task(load.consume(broker, "all"))
    async with asyncio.timeout(30):
        while load.missing("all"):
            await asyncio.sleep(0.02)
    assert not load.violations, load.violations[:5]
    assert not any(data_dir.glob("staging/*"))
    await broker.kill()
    await consumer
    await asyncio.to_thread(verify, data_dir)


@pytest.mark.deep
async def test_compaction_under_load_is_not_noticed(start: Start, tmp_path: Path):
    load = Load(seed=32, delay_ms_max=2_000, pause_ms=PAUSE_MS)
    data_dir = tmp_path / "d"
    broker = await (await start(data_dir=str(data_dir), **TINY)).serving()
    tasks = await loaded(broker, load)
    rewritten = 0
    async with asyncio.timeout(60):
        while rewritten < 2:
            status, output = await compact("--address", broker.grpc_address, "--apply", *EAGER)
            assert status == 0, output + "\n".join(broker.lines)
            rewritten += output.count("rewrite ")
    admin = admin_pb2_grpc.AdminServiceStub(broker.channel)
    findings = await admin.VerifyTopic(admin_pb2.VerifyTopicRequest(name="load"))
    assert list(findings.findings) == []
    tasks[0].cancel()
    async with asyncio.timeout(30):
        while load.missing("all"):
            await asyncio.sleep(0.02)
    assert not load.violations, load.violations[:5]
    assert any(generation != "0" for _, generation in ledger_files(data_dir))
    await broker.kill()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(verify, data_dir)


def ledger_bytes(data_dir: Path) -> int:
    size = 0
    for kind in (*KINDS, "amend"):
        for path in data_dir.glob(f"topics/*/ledgers/*.{kind}"):
            with suppress(FileNotFoundError):  # the broker deletes while this looks
                size += path.stat().st_size
    return size


async def fill(
    broker: BrokerProcess, ledgers: int, entries: int, size: int, topic: str = "t"
) -> list[postdate.MessageId]:
    """Ledgers of which all is delivered but one message, due next year; returns these."""
    pending: list[postdate.MessageId] = []
    async with postdate.connect(broker.grpc_address) as client:
        async with client.producer(topic) as producer:
            for ledger in range(ledgers):
                messages = [postdate.OutgoingMessage(os.urandom(size)) for _ in range(entries - 1)]
                later = postdate.OutgoingMessage(
                    b"%d" % ledger, deliver_after=timedelta(days=365), schedule_key=f"key-{ledger}"
                )
                receipts = await producer.send_many([*messages, later])
                pending.append(receipts[-1].id)
            await producer.send(b"the last ledger takes entries")
        expected = ledgers * (entries - 1) + 1
        async with client.subscribe(
            topic, "s", initial_position=postdate.InitialPosition.EARLIEST
        ) as subscription:
            acks = []
            async for message in subscription:
                acks.append(asyncio.ensure_future(message.ack()))  # many at once share a request
                expected -= 1
                if not expected:
                    break
            await asyncio.gather(*acks)
    return pending


async def test_one_message_due_next_year_does_not_keep_its_ledger(start: Start, tmp_path: Path):
    data_dir = tmp_path / "d"
    settings = {**TINY, **LARGE, "ledger_max_entries": str(ENTRIES), "ledger_max_bytes": "16MiB"}
    settings["batch_messages_max"] = str(ENTRIES)
    broker = await (await start(data_dir=str(data_dir), **settings)).serving()
    pending = await fill(broker, LEDGERS, ENTRIES, size=1024)
    output, before, after = "", 0, 1
    async with asyncio.timeout(60):  # until all is in files
        while f"t: rewrite {LEDGERS} ledgers" not in output or after != before:
            before = ledger_bytes(data_dir)
            status, output = await compact("--address", broker.grpc_address, "--reclaim-mib", "0")
            after = ledger_bytes(data_dir)
            assert status == 0, output
    assert "--apply" in output
    status, output = await compact("--address", broker.grpc_address, "--apply", "--reclaim-mib", "0")
    assert status == 0, output
    async with asyncio.timeout(10):
        while ledger_bytes(data_dir) > before / 100:
            await asyncio.sleep(0.05)
    async with postdate.connect(broker.grpc_address) as client:
        listed = [each async for each in client.schedule.list("t")]
        assert sorted(each.id for each in listed) == sorted(pending)
        await client.schedule.cancel("t", schedule_key="key-1")
        await client.schedule.send_now("t", id=pending[2])
        async with client.subscribe("t", "s") as subscription:
            async for message in subscription:
                assert (message.id, message.payload) == (pending[2], b"2")
                await message.ack()
                break
    status, output = await compact("--offline", str(data_dir), "--apply")
    assert status == 4, output  # the broker holds the folder
    broker.process.terminate()
    assert await broker.wait() == 0
    await asyncio.to_thread(verify, data_dir)


async def test_a_stopped_brokers_folder_is_compacted_offline(start: Start, tmp_path: Path):
    data_dir = tmp_path / "d"
    settings = {
        **TINY,
        "ledger_max_entries": "500",
        "ledger_max_bytes": "16MiB",
        **LARGE,
        "batch_messages_max": "500",
    }
    broker = await (await start(data_dir=str(data_dir), **settings)).serving()
    pending = await fill(broker, ledgers=3, entries=500, size=100)
    broker.process.terminate()
    assert await broker.wait() == 0
    before = ledger_bytes(data_dir)
    offline = ("--offline", str(data_dir), "--reclaim-mib", "0")
    status, output = await compact(*offline)
    assert (status, ledger_bytes(data_dir)) == (0, before), output
    status, output = await compact(*offline, "--apply")
    assert status == 0, output
    assert "3 ledgers were rewritten, 0 refused" in output
    assert ledger_bytes(data_dir) < before / 20
    await asyncio.to_thread(verify, data_dir)
    broker = await (await start(data_dir=str(data_dir), **settings)).serving()
    async with postdate.connect(broker.grpc_address) as client:
        listed = [each async for each in client.schedule.list("t")]
        assert sorted(each.id for each in listed) == sorted(pending)


@pytest.mark.parametrize("folder", ["nothing", "."])
async def test_what_is_no_data_directory_is_refused(tmp_path: Path, folder: str):
    status, output = await compact("--offline", str(tmp_path / folder))
    assert status == 3
    assert "broker.manifest" in output


async def test_a_broker_that_is_not_there_is_told():
    command = [sys.executable, "-m", "broker", *COMPACT, "--address", "127.0.0.1:1"]
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 3, done
