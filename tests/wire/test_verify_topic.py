"""VerifyTopic: a topic at work is right at every moment, and every kind of damage is named."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import grpc
import pytest

import postdate
from broker.delayed.bucket_tracker import BucketTracker
from broker.storage.ledger import Ledger
from postdate import cli
from postdate_api.v1 import admin_pb2
from tests.depth import at_depth
from tests.wire.conftest import Id, Message, Serve, Wire, eventually, ids_of, refused, within

PAUSE_SECONDS = at_depth(change=100, deep=0) / 1000
"""Between two checks of a topic at work."""
TINY = {
    "min_index_count": 20,
    "max_buckets": 2,
    "max_segment_entries": 5,
    "segment_time_step_ms": 100,
    "seal_after_ms": 50,
    "checkpoint_interval_ms": 100,
    "ledger_max_entries": 5_000,
}


async def verify(wire: Wire, name: str = "t") -> admin_pb2.VerifyTopicResponse:
    return await within(wire.admin.VerifyTopic(admin_pb2.VerifyTopicRequest(name=name)))


def later(count: int, delay_ms: int = 3_600_000) -> list[Message]:
    return [Message(payload=b".", deliver_after_ms=delay_ms + 7 * number) for number in range(count)]


@pytest.mark.parametrize("name", ["", "a/b"])
async def test_a_name_that_is_none_is_refused(wire: Wire, name: str):
    refusal = await refused(wire.admin.VerifyTopic(admin_pb2.VerifyTopicRequest(name=name)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_NAME")


async def test_a_topic_that_is_not_there_is_not_found(wire: Wire):
    refusal = await refused(wire.admin.VerifyTopic(admin_pb2.VerifyTopicRequest(name="t")))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND")


async def test_an_empty_topic_and_one_that_was_not_sealed_yet_have_nothing_to_compare(wire: Wire):
    await within(wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="t")))
    assert await verify(wire) == admin_pb2.VerifyTopicResponse()
    await wire.produce("t", *later(3))
    assert await verify(wire) == admin_pb2.VerifyTopicResponse(ledgers=1)


async def test_a_topic_with_the_memory_tracker_has_nothing_to_compare(serve: Serve):
    wire = await serve(tracker="memory")
    await wire.produce("t", *later(3))
    assert await verify(wire) == admin_pb2.VerifyTopicResponse(ledgers=1)


async def test_a_topic_at_work_is_right_at_every_moment(serve: Serve):
    """Seals, merges, takes, acks and checkpoints go on under many checks; delivery does too."""
    wire = await serve(**TINY)
    # One consumer; the other subscription is owed everything, so that what is sealed stays pending.
    stream = await wire.subscribe("t", permits=1_000_000)
    await wire.create_subscription("t", "other")
    produced: list[Id] = []

    async def produce() -> None:
        for number in itertools.count():
            if number >= 60 and checks > 12:  # a busy machine takes longer for so many checks
                return
            produced.extend(await wire.produce("t", *later(20, 2_200 + 10 * number), *later(5), b"now"))
            await asyncio.sleep(0.01)

    async def consume() -> None:
        for number in range(10):
            got = await stream.deliveries(100)
            await stream.ack(ids_of(got), number + 1)

    checks = 0
    working = asyncio.gather(produce(), consume())
    most = admin_pb2.VerifyTopicResponse()
    while not working.done():
        checked = await verify(wire)
        assert not checked.findings, checked
        checks += 1
        await asyncio.sleep(PAUSE_SECONDS)
        most = max(most, checked, key=lambda each: each.pending)
    await working
    assert most.pending > 600
    assert most.entries >= most.pending
    assert wire.broker.counters.index_operations["merge", "ok"] >= 1
    assert wire.broker.registry.topic("t").index.rebuilds == 0


async def test_files_that_a_check_reads_stay_until_it_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    wire = await serve(**TINY)
    folder = Path(wire.server.config.data_dir) / "topics" / "1" / "buckets"
    await wire.produce("t", *later(30))
    topic = wire.broker.registry.topic("t")
    await eventually(lambda: bool(topic.index_image().bucket_ids))
    upkeep = topic.index.upkeep
    assert upkeep is not None
    with upkeep.keep_files() as image:
        async with asyncio.timeout(60):
            while set(image.bucket_ids) & set(topic.index_image().bucket_ids):  # until they are merged away
                await wire.produce("t", *later(30))
                await asyncio.sleep(0.02)
        await wire.broker.checkpointer.checkpoint()
        assert all((folder / f"{bucket_id}.bucket").exists() for bucket_id in image.bucket_ids)
    await wire.produce("t", *later(1))
    await wire.broker.checkpointer.checkpoint()
    assert not any((folder / f"{bucket_id}.bucket").exists() for bucket_id in image.bucket_ids)


async def sealed(wire: Wire, count: int = 100) -> list[Path]:
    """A topic all of whose messages are in buckets; the files."""
    await wire.produce("t", *later(count))
    topic = wire.broker.registry.topic("t")
    upkeep = topic.index.upkeep
    assert upkeep is not None
    await eventually(lambda: topic.index_image().indexed_through == topic.log.end)
    folder = Path(wire.server.config.data_dir) / "topics" / "1" / "buckets"
    return [folder / f"{bucket_id}.bucket" for bucket_id in topic.index_image().bucket_ids]


@pytest.mark.parametrize("damage", ["removed", "cut", "flipped"])
async def test_a_damaged_bucket_is_named(serve: Serve, damage: str):
    wire = await serve(**TINY)
    (path, *_) = await sealed(wire)
    assert (await verify(wire)).pending == 100
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    checked = await verify(wire)
    kinds = {finding.kind for finding in checked.findings}
    named = {"removed": "missing_file", "cut": "size_mismatch", "flipped": "bad_checksum"}[damage]
    assert kinds == {named, "lost"}
    assert checked.finding_count == len(checked.findings) >= 2
    assert any(str(path) in finding.text for finding in checked.findings)
    lost = sum(finding.count for finding in checked.findings if finding.kind == "lost")
    assert 0 < lost <= 100


async def test_what_the_tracker_forgot_is_named_lost(serve: Serve):
    wire = await serve(**TINY)
    await sealed(wire)
    tracker = wire.broker.registry.topic("t").index.tracker
    assert isinstance(tracker, BucketTracker)
    gone = tracker.buckets.in_use.pop()
    checked = await verify(wire)
    assert [(finding.kind, finding.count) for finding in checked.findings] == [("lost", gone.metadata.count)]
    assert checked.pending == 100
    tracker.buckets.in_use.append(gone)
    assert not (await verify(wire)).findings


async def test_a_ledger_that_cannot_be_read_is_named(serve: Serve):
    wire = await serve(**TINY)
    await sealed(wire)
    await wire.stop()
    data_dir = wire.server.config.data_dir
    (times,) = (Path(data_dir) / "topics" / "1" / "ledgers").glob("*.times")
    content = times.read_bytes()
    times.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    checked = await verify(await serve(**TINY, data_dir=data_dir))
    assert [finding.kind for finding in checked.findings] == ["bad_checksum"]
    assert times.name in checked.findings[0].text


async def test_a_topic_that_goes_while_it_is_checked_is_not_found(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    wire = await serve(**TINY)
    await sealed(wire)
    read_times, reading, deleted = Ledger.read_times, asyncio.Event(), asyncio.Event()

    async def slow(self: Ledger, first: int, count: int):
        reading.set()
        await deleted.wait()
        return await read_times(self, first, count)

    monkeypatch.setattr(Ledger, "read_times", slow)
    checking = asyncio.ensure_future(refused(wire.admin.VerifyTopic(admin_pb2.VerifyTopicRequest(name="t"))))
    await reading.wait()
    await within(wire.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="t")))
    deleted.set()
    assert (await checking).reason == "TOPIC_NOT_FOUND"


async def test_a_check_that_is_cancelled_lets_go_of_the_files(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    wire = await serve(**TINY)
    await sealed(wire)
    reading, never = asyncio.Event(), asyncio.Event()
    read_times = Ledger.read_times

    async def slow(self: Ledger, first: int, count: int):
        reading.set()
        await never.wait()

    monkeypatch.setattr(Ledger, "read_times", slow)
    call = wire.admin.VerifyTopic(admin_pb2.VerifyTopicRequest(name="t"))
    checking = asyncio.ensure_future(call)
    await reading.wait()
    upkeep = wire.broker.registry.topic("t").index.upkeep
    assert upkeep is not None and upkeep._keepers == 1
    checking.cancel()
    await eventually(lambda: upkeep._keepers == 0)
    monkeypatch.setattr(Ledger, "read_times", read_times)
    assert (await verify(wire)).pending == 100  # the next one does not wait for it


async def test_the_client_and_its_command_tell_what_was_found(
    serve: Serve, capsys: pytest.CaptureFixture[str]
):
    wire = await serve(**TINY)
    (path, *_) = await sealed(wire)
    async with postdate.connect(wire.server.grpc_address) as client:
        check = await client.topics.verify("t")
        assert (check.expected, check.finding_count, check.findings) == (100, 0, ())
        assert await command(wire, "topic", "verify", "t") == 0
        path.write_bytes(path.read_bytes()[:-1])
        check = await client.topics.verify("t")
        assert check.finding_count == len(check.findings) >= 2
        assert {finding.kind for finding in check.findings} == {"size_mismatch", "lost"}
        assert await command(wire, "topic", "verify", "t") == 6
        assert await command(wire, "topic", "verify", "nowhere") == 3
        assert "size_mismatch" in capsys.readouterr().out
        with pytest.raises(postdate.NotFound):
            await client.topics.verify("nowhere")


async def command(wire: Wire, *arguments: str) -> int:
    """Run `postdate` against the broker; its exit code."""
    return await asyncio.to_thread(
        cli.run, ["--address", wire.server.grpc_address, "--output", "json", *arguments]
    )
