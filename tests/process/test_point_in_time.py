"""A shard of a real cluster, restored by the command to the times at which its owner had answered."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from broker.cluster.creation import create_cluster
from broker.cluster.file_store import FileStore
from postdate_api.v1 import admin_pb2, admin_pb2_grpc, message_pb2, producer_pb2
from tests.process.conftest import SMALL, BrokerProcess, Start, command_here
from tests.process.test_cluster import free_ports

BATCHES = 30


async def produce(broker: BrokerProcess, count: int) -> None:
    messages = [message_pb2.Message(payload=b"x", deliver_after_ms=3_600_000) for _ in range(count)]
    await broker.producer.Produce(producer_pb2.ProduceRequest(topic="t", messages=messages))


async def scheduled(broker: BrokerProcess) -> int:
    admin = admin_pb2_grpc.AdminServiceStub(broker.channel)
    stats = await admin.GetStats(admin_pb2.GetStatsRequest(topics=["t"]))
    return sum(topic.scheduled_messages for topic in stats.topics)


async def restore(url: str, data_dir: Path, *options: str) -> tuple[int, str]:
    return await command_here("restore", url, "--data-dir", str(data_dir), *options)


@pytest.mark.slow
async def test_a_shard_is_restored_to_the_times_at_which_its_owner_had_answered(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store"
    began_ms = time.time_ns() // 1_000_000
    await create_cluster(FileStore(str(tmp_path / "store")), 1, 1_000)
    (port,) = free_ports(1)
    owner = await start(
        data_dir=str(tmp_path / "a"), grpc_address=f"127.0.0.1:{port}", cluster_store=url,
        cluster_nodes=f"a=127.0.0.1:{port}", node="a", base_interval_ms="1s", **SMALL,
    )  # fmt: skip
    await owner.serving()
    answered: list[tuple[int, int]] = []
    for number in range(1, BATCHES + 1):
        await produce(owner, 10)
        answered.append((time.time_ns() // 1_000_000, 10 * number))
        await asyncio.sleep(0.1)  # batches at different times
    await owner.kill()
    for number, (to_ms, count) in enumerate((answered[-1], answered[-4])):
        data_dir = tmp_path / f"restored{number}"
        status, output = await restore(url, data_dir, "--to", str(to_ms))
        assert status == 0 and "contains shard 0 as of lsn" in output, output
        broker = await (await start(data_dir=str(data_dir), **SMALL)).serving()
        assert await scheduled(broker) == count
        await produce(broker, 1)
        await broker.kill()
    before = tmp_path / "before"
    for options, words in {
        (url, "--to", str(began_ms - 1)): "no longer contains the state at",
        (url, "--to", "2026-12-24T18:00:00"): "no time zone",
        (url, "--to", "1", "--shard", "1"): "has shards 0 to 0",
        (url,): "with --to TIME",
        (f"{url}#name", "--to", "1"): "omit the part after #",
        (f"{url}/shards/0",): "the URL of the cluster with --to TIME",
        (str(tmp_path), "--to", "1"): "is a folder, not an object store",
    }.items():
        status, output = await restore(options[0], before, *options[1:])
        assert status in (1, 2) and words in output, output
        assert not before.exists()
