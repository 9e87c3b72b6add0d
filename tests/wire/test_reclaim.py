"""Disk follows live data, as a client and an operator see it (P8)."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest

from broker.jobs.verify import verify_data_dir
from broker.runtime.vfs import LocalVfs
from postdate_api.v1 import admin_pb2, consumer_pb2
from tests.wire.conftest import Message, Serve, Wire, eventually, failures_of, ids_of, within

QUICK = {
    "ledger_max_entries": 20,
    "reclaim_interval_ms": 30,
    "checkpoint_interval_ms": 30,
    "min_index_count": 10,
    "seal_after_ms": 20,
    "max_segment_entries": 5,
}
YEAR_MS = 365 * 86_400_000


def ledger_files(wire: Wire, topic_id: int = 1) -> list[str]:
    return LocalVfs().list_dir(f"{wire.broker.config.data_dir}/topics/{topic_id}/ledgers")


async def metric(wire: Wire, name: str) -> float:
    def scrape() -> str:
        with urllib.request.urlopen(f"http://{wire.server.http_address}/metrics", timeout=5) as response:
            return str(response.read().decode())

    lines = (await asyncio.to_thread(scrape)).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])


async def verified(wire: Wire) -> int:
    """VerifyTopic finds nothing; how many ledgers it looked at."""
    found = await within(wire.admin.VerifyTopic(admin_pb2.VerifyTopicRequest(name="t")))
    assert list(found.findings) == []
    return int(found.ledgers)


async def test_what_is_acknowledged_leaves_the_disk_and_what_is_due_next_year_stays(serve: Serve):
    wire = await serve(**QUICK)
    stream = await wire.subscribe("t")
    held = await wire.produce("t", *[b"now"] * 19, Message(payload=b"later", deliver_after_ms=YEAR_MS))
    rest = [await wire.produce("t", *[Message(payload=b"soon", deliver_after_ms=5)] * 20) for _ in range(5)]
    arrived = ids_of(await stream.deliveries(119))
    assert await stream.ack(arrived) == []
    await eventually(lambda: wire.broker.counters.removed_ledgers == 5)  # files are written later, or never
    assert {name.partition(".")[0] for name in ledger_files(wire)} == {str(held[0][0])}
    stats = await wire.stats("t")
    assert (stats.ledgers, stats.scheduled_messages) == (1, 1)
    assert await verified(wire) == 1
    assert await metric(wire, "postdate_removed_ledgers_total") == 5
    assert await metric(wire, "postdate_reclaimed_bytes_total") > 100 * 52
    # What came twice to a consumer may be acknowledged twice, also when it is gone.
    assert await stream.ack(rest[0]) == []
    unknown = [(rest[-1][0][0] + 1, 0), (rest[-1][0][0], 99)]
    assert failures_of(await stream.ack(unknown)) == dict.fromkeys(unknown, "NOT_FOUND")
    await stream.close()
    await wire.stop()
    assert verify_data_dir(LocalVfs(), wire.broker.config.data_dir).problems == []


async def test_messages_of_the_future_stay_until_their_time_whoever_has_settled_them(serve: Serve):
    wire = await serve(**QUICK)
    await wire.create_subscription("t", "s")
    later = await wire.produce("t", *[Message(payload=b"later", deliver_after_ms=YEAR_MS)] * 20)
    await wire.produce("t", *[b"now"] * 40)
    skipped = await within(wire.admin.SkipAll(admin_pb2.SkipAllRequest(topic="t", subscription="s")))
    assert skipped.skipped_messages == 60
    await eventually(lambda: wire.broker.counters.removed_ledgers >= 1)
    assert str(later[0][0]) in {name.partition(".")[0] for name in ledger_files(wire)}
    stats = await wire.stats("t")
    assert (stats.scheduled_messages, stats.subscriptions[0].scheduled_messages) == (20, 0)
    await wire.create_subscription("t", "new", initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST)
    new, _ = (await wire.stats("t")).subscriptions
    assert (new.name, new.scheduled_messages) == ("new", 20)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_topic_goes_on_when_nothing_of_it_is_left(serve: Serve, tmp_path: Path, restarts: bool):
    data_dir = str(tmp_path / "kept")
    wire = await serve(**QUICK, data_dir=data_dir)
    stream = await wire.subscribe("t")
    await wire.produce("t", *[b"old"] * 5)
    await stream.ack(ids_of(await stream.deliveries(5)))
    await eventually(lambda: wire.broker.counters.removed_ledgers == 1)
    assert ledger_files(wire) == []
    assert (await wire.stats("t")).ledgers == 0
    if restarts:
        await stream.close()
        await wire.stop()
        wire = await serve(**QUICK, data_dir=data_dir)
        stream = await wire.subscribe("t")
    for name, position in (
        ("latest", consumer_pb2.INITIAL_POSITION_LATEST),
        ("earliest", consumer_pb2.INITIAL_POSITION_EARLIEST),
    ):
        await wire.create_subscription("t", name, initial_position=position)
    new = await wire.produce("t", b"new", Message(payload=b"soon", deliver_after_ms=20))
    for each in (stream, await wire.subscribe("t", "latest"), await wire.subscribe("t", "earliest")):
        # Which of the two comes first is open once both are due.
        assert sorted(ids_of(await each.deliveries(2))) == new
        assert await each.ack(new) == []
    removed = 1 if restarts else 2
    await eventually(lambda: wire.broker.counters.removed_ledgers == removed)
    assert ledger_files(wire) == []
    assert await verified(wire) == 0
    await wire.stop()


async def test_verify_topic_while_ledgers_go_all_the_time(serve: Serve):
    wire = await serve(**QUICK)
    stream = await wire.subscribe("t")
    await wire.create_subscription("t", "other")
    other = await wire.subscribe("t", "other")
    for number in range(8):
        delays = [(number * 7 + index * 3) % 60 for index in range(20)]
        await wire.produce("t", *[Message(payload=b"x", deliver_after_ms=delay) for delay in delays])
        for each in (stream, other):
            await each.ack(ids_of(await each.deliveries(20)))
        await verified(wire)
    await eventually(lambda: wire.broker.counters.removed_ledgers >= 8)
    assert wire.broker.counters.index_rebuilds == 0
