"""The front of two shards, each a broker of its own behind a socket: what a client sees is one broker."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker.cli import main
from broker.cluster.base_manifest import decode_manifest
from broker.cluster.base_vfs import open_base_vfs, process_reader
from broker.errors import Fenced
from broker.folder.recovery import open_manifests
from broker.folder.shard_backups import ShardBackups
from broker.folder.shard_folders import open_shard_folders, shard_folder
from broker.jobs.compact import CompactRequest, Tell, run_compact
from broker.jobs.compact_plan import CompactLimits
from broker.jobs.engine import InlineEngine
from broker.jobs.verify import verify_folder
from broker.observe.metrics import BrokerCounters
from broker.rpc.compaction_client import RemoteDesk
from broker.rpc.front import FrontHost
from broker.rpc.produce_fan_out import ProduceFanOut
from broker.rpc.shard_front import ShardFront
from broker.rpc.shard_owners import LocalShards
from broker.rpc.shortcut import METHODS, Shortcut
from broker.rpc.topic_of import SUBSCRIBE
from broker.runtime.clock import SystemClock
from broker.runtime.supervise import Supervisor
from broker.runtime.vfs import LocalFile, LocalVfs, read_file
from broker.server import Server
from broker.settings import UNIX
from broker.shards.shard_process import shard_config
from broker.storage.layout import Layout
from broker.storage.manifest import decode_broker
from broker.storage.varint import encode_varint
from broker.topic_shards import TopicShard, shard_of
from postdate.credentials import Credentials
from postdate_api.v1 import (
    admin_pb2,
    compaction_pb2,
    compaction_pb2_grpc,
    consumer_pb2,
    message_pb2,
    producer_pb2,
    schedule_pb2,
)
from tests.configs import broker_config
from tests.wire.access_files import ACCESS, Files, bearer
from tests.wire.conftest import Wire, batch, eventually, ids_of, now_ms, refused, sets, within

SHARDS = 2
EARLIEST = consumer_pb2.INITIAL_POSITION_EARLIEST


def names_on(shard: int, count: int = 3, prefix: str = "topic") -> list[str]:
    """Return names of topics that lie on a shard."""
    names = (f"{prefix}{number}" for number in range(1_000))
    return [name for name in names if shard_of(name, SHARDS) == shard][:count]


(A, A2, A3), (B, B2, B3) = names_on(0), names_on(1)
ALL = sorted([A, A2, A3, B, B2, B3])


class Shards:
    """Two shards, their front, and a client of it."""

    def __init__(self, **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shards-")
        self.config = broker_config(
            data_dir=self._folder.name,
            shards=SHARDS,
            grpc_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            drain_grace_ms=100,
            disk_reserve_bytes=0,
            **settings,
        )
        os.mkdir(f"{self._folder.name}/run")
        self.servers = [Server(shard_config(self.config, number)) for number in range(SHARDS)]
        addresses = [UNIX + server.config.grpc_socket for server in self.servers]
        owners = LocalShards(self.config, addresses)
        self.front = ShardFront(FrontHost(self.config, SystemClock(), BrokerCounters()), owners)
        self.supervisor = Supervisor(lambda name, error: None)
        self._stopped: set[int] = set()
        self.broker = None  # it has none; a `Wire` asks
        self.wire: Wire

    @property
    def grpc_address(self) -> str:
        return self.front.address

    async def start(self) -> None:
        for server in self.servers:
            await server.start()
        self.front.bind()
        await self.front.start(self.supervisor)
        self.wire = Wire(cast(Server, self))

    async def stop_shard(self, number: int) -> None:
        if number not in self._stopped:
            self._stopped.add(number)
            await within(self.servers[number].stop())

    async def stop(self) -> None:
        await self.wire.disconnect()
        await within(self.supervisor.stop())
        await within(self.front.stop())
        for number in range(SHARDS):
            await self.stop_shard(number)
        self._folder.cleanup()


@pytest.fixture
async def shards() -> AsyncIterator[Shards]:
    started = Shards()
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
def wire(shards: Shards) -> Wire:
    return shards.wire


def topics_of(server: Server) -> list[str]:
    return sorted(server.broker.registry.by_name)


async def test_each_topic_lies_on_its_shard_and_is_served_there(shards: Shards, wire: Wire):
    for topic in (A, B):
        ids = await wire.produce(topic, b"one", b"two")
        stream = await wire.subscribe(topic, initial_position=EARLIEST)
        deliveries = await stream.deliveries(2)
        assert ids_of(deliveries) == ids
        assert await stream.ack(ids) == []
        assert await stream.close() is grpc.StatusCode.OK
    assert [topics_of(server) for server in shards.servers] == [[A], [B]]


async def test_calls_by_the_shortcut_end_as_those_by_grpc(
    shards: Shards, wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    """Requests that are refused in the three ways: by their form, by a limit, and by what is there."""
    requests = [
        b"\xff",
        batch("a b", b"x").SerializeToString(),
        consumer_pb2.AcknowledgeRequest(topic=A, subscription="none").SerializeToString(),
        schedule_pb2.CancelScheduledRequest(topic=A).SerializeToString(),
    ]

    async def outcome(path: str, request: bytes) -> tuple[Any, ...]:
        try:
            await within(wire.channel.unary_unary(path, None, None)(request))
            return ("answered",)  # with ids and times of its own
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details(), tuple(error.trailing_metadata())

    async def outcomes() -> list[tuple[Any, ...]]:
        return [await outcome(path, request) for path in sorted(METHODS) for request in requests]

    await wire.produce(A, b"x")
    taken: list[str] = []
    ask = Shortcut.ask

    async def noted(self: Shortcut, path: str, *rest: Any) -> Any:
        taken.append(path)
        return await ask(self, path, *rest)

    monkeypatch.setattr(Shortcut, "ask", noted)
    shortcut = cast(Any, shards.front._owners.connections()[0])._shortcut
    await eventually(lambda: shortcut.takes(min(METHODS), b""))
    by_shortcut = await outcomes()
    assert set(taken) == METHODS
    monkeypatch.setattr(Shortcut, "takes", lambda *_: False)
    assert await outcomes() == by_shortcut
    assert len({refused for refused in by_shortcut if refused != ("answered",)}) > 3


async def test_a_message_is_cancelled_where_it_lies(wire: Wire):
    for topic in (A, B):
        message = message_pb2.Message(payload=b"x", deliver_after_ms=3_600_000, schedule_key="k")
        await wire.produce(topic, message)
        request = schedule_pb2.CancelScheduledRequest(
            topic=topic, selector=schedule_pb2.Selector(schedule_keys=["k"])
        )
        answer = await within(wire.schedule.CancelScheduled(request))
        assert [outcome.result for outcome in answer.outcomes] == [schedule_pb2.CHANGE_RESULT_DONE]


async def test_a_produce_stream_over_both_shards_is_answered_in_order(shards: Shards, wire: Wire):
    call = wire.producer.ProduceStream()
    topics = [A, B, B, A, B, A2, B2, A] * 5
    for number, topic in enumerate(topics, 1):
        await within(call.write(batch(topic, f"{number}".encode(), request_id=number)))
    await within(call.write(batch("a b", b"x", request_id=99)))
    await within(call.done_writing())
    for number in range(1, len(topics) + 1):
        answer = await within(call.read())
        assert (answer.request_id, answer.ids[0].count) == (number, 1)
    answer = await within(call.read())
    assert (answer.request_id, answer.error.code) == (99, grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert await within(call.read()) is grpc.aio.EOF  # type: ignore[attr-defined]
    assert await within(call.code()) is grpc.StatusCode.OK
    assert [topics_of(server) for server in shards.servers] == [[A, A2], [B, B2]]


@pytest.mark.parametrize("joins", [True, False])
async def test_answers_that_shards_join_are_passed_on_in_the_order_of_the_requests(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, joins: bool
):
    is_open, write = threading.Event(), LocalFile.pwrite_synced

    def gated(self: LocalFile, *args: Any) -> None:
        assert is_open.wait(10)
        write(self, *args)

    for topic in (A, B):
        await wire.produce(topic, b"first")
    read: list[int] = []
    split = ProduceFanOut._read

    async def noted(self: ProduceFanOut, shard: int) -> Any:
        answers = await split(self, shard)
        read.append(len(answers))
        return answers

    monkeypatch.setattr(ProduceFanOut, "_read", noted)
    monkeypatch.setattr(LocalFile, "pwrite_synced", gated)
    call = wire.producer.ProduceStream()
    topics = [A, A, B, B, A, B, A, B] * 5
    for number, topic in enumerate(topics, 1):
        await within(call.write(batch(topic, b"x", request_id=number, join_answers=joins)))
    await within(call.done_writing())
    is_open.set()
    for number in range(1, len(topics) + 1):
        answer = await within(call.read())
        assert (answer.request_id, len(answer.answers), answer.ids[0].count) == (number, 0, 1)
    assert await within(call.read()) is grpc.aio.EOF  # type: ignore[attr-defined]
    assert await within(call.code()) is grpc.StatusCode.OK
    assert (max(read) > 1) == joins


async def test_a_produce_stream_ends_with_its_shard_and_not_with_the_other_one(shards: Shards, wire: Wire):
    calls = {}
    for topic in (A, B):
        calls[topic] = wire.producer.ProduceStream()
        await within(calls[topic].write(batch(topic, b"x", request_id=1)))
        assert (await within(calls[topic].read())).request_id == 1
    await shards.stop_shard(1)
    # Nothing is asked of it: a request that is written to a call that has ended would be lost without an answer.
    assert await within(calls[B].code()) is grpc.StatusCode.UNAVAILABLE
    await within(calls[A].write(batch(A, b"x", request_id=2)))
    assert (await within(calls[A].read())).request_id == 2
    calls[A].cancel()


async def test_lists_and_counts_over_all_shards_are_as_of_one_broker(wire: Wire):
    for topic in ALL:
        await wire.produce(topic, message_pb2.Message(payload=b"x", deliver_at_ms=now_ms() + 3_600_000))
    assert await wire.topic_names() == ALL
    listed: list[str] = []
    counted: list[str] = []
    token = ""
    for _ in range(3):
        answer = await within(
            wire.admin.ListTopics(admin_pb2.ListTopicsRequest(page_size=2, page_token=token))
        )
        stats = await within(wire.admin.GetStats(admin_pb2.GetStatsRequest(page_size=2, page_token=token)))
        listed += [topic.name for topic in answer.topics]
        counted += [topic.topic for topic in stats.topics]
        assert stats.next_page_token == answer.next_page_token
        token = answer.next_page_token
    assert listed == counted == ALL
    assert not token
    named = await within(wire.admin.GetStats(admin_pb2.GetStatsRequest(topics=[B, A, A2])))
    assert [topic.topic for topic in named.topics] == sorted([A, A2, B])
    for topics in ([A, B, B2], ALL):
        sums = await within(wire.schedule.CountScheduled(schedule_pb2.CountScheduledRequest(topics=topics)))
        assert sum(bar.messages for bar in sums.buckets) == len(topics)
    missing = await refused(wire.admin.GetStats(admin_pb2.GetStatsRequest(topics=[A, names_on(1, 9)[-1]])))
    assert missing.reason == "TOPIC_NOT_FOUND"


async def test_what_no_shard_takes_is_refused_as_by_a_broker(serve: Any, wire: Wire):
    alone = await serve()
    for path, request in {
        "/postdate.v1.AdminService/CreateTopic": admin_pb2.CreateTopicRequest(name="a b"),
        "/postdate.v1.ProducerService/Produce": producer_pb2.ProduceRequest(),
        "/postdate.v1.AdminService/ListTopics": admin_pb2.ListTopicsRequest(page_size=-1),
        "/postdate.v1.AdminService/GetStats": admin_pb2.GetStatsRequest(page_size=-1),
        "/postdate.v1.ScheduleService/CountScheduled": schedule_pb2.CountScheduledRequest(),
        "/postdate.v1.AdminService/MoveShard": admin_pb2.MoveShardRequest(to="b"),
    }.items():
        raw = request.SerializeToString()
        assert await refused(wire.raw(path)(raw)) == await refused(alone.raw(path)(raw)), path
    garbled = await refused(wire.raw("/postdate.v1.ProducerService/Produce")(b"\xff"))
    assert garbled.reason == "MALFORMED_REQUEST"
    stream = wire.stream()
    await stream.send(permits=consumer_pb2.Permits(messages=1))
    assert (await stream.refusal()).reason == "OPEN_EXPECTED"
    empty, alone_empty = wire.stream(), alone.stream()
    for opened in (empty, alone_empty):
        await within(opened.call.done_writing())
    assert await within(empty.call.code()) is await within(alone_empty.call.code())


def opening(topic: str, unknown_bytes: int) -> bytes:
    """Return the first frame of a Subscribe stream, with a field that nobody knows."""
    frame = consumer_pb2.SubscribeRequest(open=consumer_pb2.Open(topic=topic, subscription="s"))
    known = frame.SerializeToString()
    return known + bytes((0xFA, 0x7F)) + encode_varint(unknown_bytes) + bytes(unknown_bytes)


async def test_the_first_frame_of_a_stream_is_not_kept(wire: Wire):
    await wire.produce(A, b"x")
    streams = [wire.raw_stream(SUBSCRIBE)() for _ in range(20)]
    size = 300_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for stream in streams:
            await within(stream.write(opening(A, size)))
            assert consumer_pb2.SubscribeResponse.FromString(await within(stream.read())).HasField("opened")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < len(streams) * size / 2
    for stream in streams:
        stream.cancel()


async def test_a_first_frame_that_is_too_large_is_refused_by_front_and_shard(shards: Shards, wire: Wire):
    async with grpc.aio.insecure_channel(UNIX + shards.servers[0].config.grpc_socket) as straight:
        for channel in (wire.channel, straight):
            stream: Any = channel.stream_stream(SUBSCRIBE, None, None)()
            await within(stream.write(opening(A, 1 << 20)))
            assert (await refused(stream.read())).reason == "TOO_MANY_ENTRIES"


async def test_a_subscribe_stream_that_breaks_before_its_first_frame_ends_with_a_status(shards: Shards):
    class Broken:
        ended: grpc.StatusCode | None = None

        async def read(self) -> bytes:
            raise grpc.aio.InternalError("the stream broke")

        async def abort(self, code: grpc.StatusCode, *_: Any, **__: Any) -> None:
            self.ended = code
            raise grpc.aio.AbortError

    broken = Broken()
    with pytest.raises(grpc.aio.AbortError):
        await shards.front._subscribe(cast(Any, broken))
    assert broken.ended is grpc.StatusCode.UNAVAILABLE


async def test_a_topic_is_made_on_no_other_shard_than_its_own(shards: Shards, wire: Wire):
    # A request that names two topics reaches the shard of the first, and means the last.
    request = producer_pb2.ProduceRequest(topic=A).SerializeToString() + batch(B, b"x").SerializeToString()
    refusal = await refused(wire.raw("/postdate.v1.ProducerService/Produce")(request))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_OWNER")
    assert [topics_of(server) for server in shards.servers] == [[], []]


async def test_dead_letters_stay_on_the_shard_of_their_topic(shards: Shards, wire: Wire):
    policy = admin_pb2.SubscriptionPolicy(max_delivery_attempts=1, dead_letter_topic=B)
    await wire.produce(A, b"x")

    async def create(name: str) -> Any:
        request = admin_pb2.CreateSubscriptionRequest(
            topic=A, name=name, policy=policy, initial_position=EARLIEST
        )
        return await wire.admin.CreateSubscription(request)

    refusal = await refused(create("s"))
    assert (refusal.code, refusal.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "DEAD_LETTER_TOPIC_ELSEWHERE",
    )
    policy.dead_letter_topic = refusal.metadata["suggested"]
    assert policy.dead_letter_topic == f"{A}~{B}"
    await create("s")
    await wire.create_subscription(A, "plain", initial_position=EARLIEST)
    for subscription in ("s", "plain"):
        received = await wire.receive(A, subscription, wait_ms=5_000)
        nack = consumer_pb2.NackRequest(
            topic=A,
            subscription=subscription,
            consumer_id=received.consumer_id,
            entries=sets(ids_of(received.deliveries)),
            dead_letter=True,
        )
        assert not (await within(wire.consumer.Nack(nack))).failures
    await eventually(lambda: topics_of(shards.servers[0]) == [A, f"{A}~plain~dead-letters", f"{A}~{B}"])
    assert topics_of(shards.servers[1]) == []


async def test_a_compaction_through_the_front_rewrites_ledgers_of_all_shards():
    shards = Shards(ledger_max_entries=500, checkpoint_interval_ms=50, seal_after_ms=50)
    await shards.start()
    try:
        wire, compaction = shards.wire, compaction_pb2_grpc.CompactionServiceStub(shards.wire.channel)
        for topic in (A, B):
            await wire.create_subscription(topic, initial_position=EARLIEST)
            pending = message_pb2.Message(payload=b"!", deliver_after_ms=3_600_000)
            await wire.produce(topic, *[b"."] * 499, pending)
            await wire.produce(topic, b"next ledger")
            done = 0
            while done < 500:
                receive = consumer_pb2.ReceiveRequest(
                    topic=topic, subscription="s", max_messages=500, wait_ms=1_000
                )
                received = await within(wire.consumer.Receive(receive))
                acknowledge = consumer_pb2.AcknowledgeRequest(
                    topic=topic, subscription="s", entries=sets(ids_of(received.deliveries))
                )
                await within(wire.consumer.Acknowledge(acknowledge))
                done += len(received.deliveries)
        async with RemoteDesk(Credentials(shards.grpc_address), shards.config.data_dir) as desk:

            async def are_sealed() -> bool:
                return all([(await desk.candidates(topic)).ledgers for topic in (A, B)])

            async with asyncio.timeout(20):
                while not await are_sealed():
                    await asyncio.sleep(0.02)
            leases = []
            for topic in (A, B):
                (candidate,) = (await desk.candidates(topic)).ledgers
                leases.append(await desk.begin(topic, [candidate.ledger_id], []))
            listed = await within(compaction.ListCompactions(compaction_pb2.ListCompactionsRequest()))
            assert [held.compaction_id for held in listed.compactions] == [
                held.compaction_id for held in leases
            ]
            fenced = compaction_pb2.AbortCompactionRequest(compaction_id=leases[1].compaction_id, epoch=9)
            assert (await refused(compaction.AbortCompaction(fenced))).reason == "COMPACTION_FENCED"
            for lease in leases:
                await desk.abort(lease.compaction_id, lease.epoch)
            unknown = compaction_pb2.CommitCompactionRequest(compaction_id="x", epoch=1)
            refusal = await refused(compaction.CommitCompaction(unknown))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "COMPACTION_NOT_FOUND")
            request = CompactRequest(apply=True, limits=CompactLimits(reclaim_bytes_min=0))
            results = await run_compact(desk, InlineEngine(1), request, Tell())
        assert sorted(result.topic for result in results if result.committed) == sorted([A, B])
        assert all(result.committed and result.committed.ledger_ids for result in results)
        assert [server.broker.counters.compactions["committed"] for server in shards.servers] == [1, 1]
        await shards.stop_shard(0)
        lost = await refused(compaction.CommitCompaction(unknown))
        assert lost.code is grpc.StatusCode.UNAVAILABLE, "it may be of the shard that is down"
    finally:
        await shards.stop()


async def create_backup(wire: Wire, label: str = "", request_id: str = "") -> admin_pb2.Backup:
    request = admin_pb2.CreateBackupRequest(label=label, request_id=request_id)
    return (await within(wire.admin.CreateBackup(request))).backup


async def backup_names(wire: Wire) -> list[str]:
    answer = await within(wire.admin.ListBackups(admin_pb2.ListBackupsRequest()))
    return [backup.name for backup in answer.backups]


def parts_left(shards: Shards) -> list[Path]:
    """Return what shards have in folders of their own."""
    folders = Path(shards.config.data_dir, "backups").glob("shard-*")
    return [path for folder in folders for path in folder.iterdir() if path.name != "lock"]


async def test_a_backup_is_one_folder_of_all_shards_that_is_restored_as_a_whole(
    shards: Shards, wire: Wire, tmp_path: Path
):
    for topic in ALL:
        await wire.produce(topic, b"x")
    first, repeated = await asyncio.gather(
        create_backup(wire, "night", "id"), create_backup(wire, "night", "id")
    )
    assert first == repeated
    assert first.name.endswith("Z-night") and first.path == f"{shards.config.data_dir}/backups/{first.name}"
    assert (first.topics, first.lsn) == (len(ALL), 0)
    assert first.bytes > 0 and parts_left(shards) == []
    report = await asyncio.to_thread(verify_folder, LocalVfs(), first.path)
    assert report.problems == []
    done = await asyncio.to_thread(
        CliRunner().invoke, main, ["restore", first.path, f"--data-dir={tmp_path / 'd'}"]
    )
    assert done.exit_code == 0 and f"{len(ALL)} topics in {SHARDS} shards" in done.output, done.output
    assert verify_folder(LocalVfs(), str(tmp_path / "d")).problems == []
    for number in range(SHARDS):
        path = f"{shard_folder(str(tmp_path / 'd'), number)}/broker.manifest"
        topics = decode_broker(read_file(LocalVfs(), path), path).topics.values()
        assert sorted(topics) == topics_of(shards.servers[number])
    open_shard_folders(LocalVfs(), str(tmp_path / "d"), SHARDS).close()
    second = await create_backup(wire)
    assert await backup_names(wire) == [first.name, second.name]
    await within(wire.admin.DeleteBackup(admin_pb2.DeleteBackupRequest(name=first.name)))
    assert await backup_names(wire) == [second.name]
    assert not LocalVfs().exists(first.path)
    gone = await refused(wire.admin.DeleteBackup(admin_pb2.DeleteBackupRequest(name=first.name)))
    assert gone.reason == "BACKUP_NOT_FOUND"
    unlabelled = await refused(wire.admin.CreateBackup(admin_pb2.CreateBackupRequest(label="/")))
    assert unlabelled.reason == "INVALID_LABEL"


async def test_a_backup_in_an_object_store_is_of_all_shards_and_whole_or_not_there(
    shards: Shards, wire: Wire, tmp_path: Path
):
    address, store = ("--address", shards.front.address), f"file://{tmp_path / 'store'}"
    (tmp_path / "store").mkdir()

    async def command(*words: str) -> Any:
        done = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert "Traceback" not in done.output
        return done

    async def restored(url: str, name: str) -> list[str]:
        done = await command("restore", url, f"--data-dir={tmp_path / name}")
        assert done.exit_code == 0 and f"in {SHARDS} shards" in done.output, done.output
        data = str(tmp_path / name)
        assert verify_folder(LocalVfs(), data).problems == []
        open_shard_folders(LocalVfs(), data, SHARDS).close()
        images = [open_manifests(LocalVfs(), Layout(shard_folder(data, n)), 0) for n in range(SHARDS)]
        return sorted(name for image in images for name in image.root.topics.values())

    await wire.produce(A, b"x")
    urls = []
    for label, topic in (("one", B), ("two", A2), ("three", B2)):
        await wire.produce(topic, b"x")
        made = await command("backup", "create", store, label, "--keep", "1", *address)
        assert made.exit_code == 0, made.output
        urls.append(made.stdout.strip())
        assert urls[-1].startswith(f"{store}#") and urls[-1].endswith(f"Z-{label}")
        assert await backup_names(wire) == [] and parts_left(shards) == [], (
            "the folder on this machine is gone"
        )
    listed = json.loads((await command("backup", "list", store, "--output", "json")).stdout)
    assert [backup["url"] for backup in listed] == urls[1:], "the two newest stay"
    assert await restored(store, "newest") == sorted([A, A2, B, B2])
    assert await restored(urls[1], "named") == sorted([A, A2, B])
    gone = await command("restore", urls[0], f"--data-dir={tmp_path / 'gone'}")
    assert gone.exit_code == 1 and "has no backup" in gone.output
    kept = await command("backup", "delete", urls[1])
    assert kept.exit_code == 1 and "two newest are kept" in kept.output
    # What an upload that was cut leaves is no backup, and the next one goes on from there.
    whole = tmp_path / "store" / "backups" / urls[2].partition("#")[2]
    whole.rename(tmp_path / "aside")
    assert await restored(store, "before") == sorted([A, A2, B])
    whole.write_bytes((tmp_path / "aside").read_bytes().replace(b"three", b"thr33"))
    damaged = await command("restore", store, f"--data-dir={tmp_path / 'damaged'}")
    assert damaged.exit_code == 1 and "is damaged" in damaged.output


def base_of(store: Path, url: str, shard: int) -> Path:
    """Return the manifest of the part of a shard in a backup."""
    marker = json.loads((store / "backups" / url.partition("#")[2]).read_bytes())
    return store / "parts" / str(shard) / "bases" / marker["bases"][shard]


def chunks_of(base: Path, ending: str = "") -> set[str]:
    """Return the names of the chunks of the files of a base."""
    files = decode_manifest(base.read_bytes(), base.name).files.values()
    return {chunk for file in files if file.path.endswith(ending) for chunk in file.chunks}


async def test_a_backup_in_an_object_store_is_verified_and_audited_as_a_whole(
    shards: Shards, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("broker.jobs.engines.InlineEngine", lambda: InlineEngine(1))  # in this process
    folder, store = tmp_path / "store", f"file://{tmp_path / 'store'}"
    folder.mkdir()

    async def command(*words: str) -> Any:
        # As in a process of its own: nothing is kept of what was read before.
        open_base_vfs.cache_clear()
        process_reader().blocks.clear()
        done = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert "Traceback" not in done.output
        return done

    async def problems(url: str) -> list[str]:
        """Return what is wrong with a backup, by `verify`; `audit` has to say the same."""
        verified = await command("verify", url, "--output=json")
        audited = await command("audit", url, "--engine=inline", "--level=deep", "--output=json")
        report = json.loads(audited.stdout)
        found = json.loads(verified.stdout)["problems"]
        assert verified.exit_code == audited.exit_code == (2 if found else 0), audited.output
        assert [line["topic"] for line in report["topics"]] == sorted([A, B, B2])
        assert (report["folder"], report["unused_shards"]) == (url if "#" in url else newest, [])
        for finding in report["findings"]:
            part = f"{store}/parts/{shard_of(finding['topic'], SHARDS)}"
            assert part in finding["path"] + finding["what"]
        assert len(found) == report["finding_count"]
        return found

    async def backup() -> str:
        made = await command("backup", "create", store, "--address", shards.front.address)
        assert made.exit_code == 0, made.output
        return made.stdout.strip()

    def damage(chunk: str) -> None:
        path = folder / "parts" / "1" / "chunks" / chunk
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    for topic in (A, B, B2):
        await wire.produce(topic, b"x" * 100)
    older = await backup()
    await wire.produce(B, b"y" * 100)
    newest = await backup()
    for url in (store, newest, older):
        assert await problems(url) == []
    summary = (await command("verify", store)).output.splitlines()
    assert [line.partition(" topics")[0] for line in summary] == ["shard 0: 1", "shard 1: 2"]
    of_older, of_newest = (chunks_of(base_of(folder, url, 1), ".data") for url in (older, newest))
    (own,), (shared,) = of_older - of_newest, of_older & of_newest
    damage(own)
    (problem,) = await problems(older)
    assert problem.startswith("shard 1: ") and own in problem
    assert await problems(store) == [], "it has another chunk for this file"
    damage(shared)
    (problem,) = await problems(store)
    assert problem.startswith("shard 1: ") and shared in problem
    assert len(await problems(older)) == 2
    one_topic = await command("audit", store, "--engine=inline", f"--topic={A}", "--level=deep")
    assert one_topic.exit_code == 0, one_topic.output
    # A part that is damaged or gone keeps nobody from the others.
    for lose in (lambda path: path.write_bytes(b"?"), Path.unlink):
        lose(base_of(folder, newest, 0))
        told = (await command("verify", store)).output
        assert "problem: shard 0: " in told and "problem: shard 1: " in told
        told = await command("audit", store, "--engine=inline")
        assert told.exit_code == 3 and "The part of shard 0 cannot be read" in told.output


async def test_old_backups_of_all_shards_are_deleted_by_number():
    shards = Shards(backup_keep_count=2)
    await shards.start()
    try:
        made = [(await create_backup(shards.wire)).name for _ in range(3)]
        assert await backup_names(shards.wire) == made[1:]
    finally:
        await shards.stop()


async def test_a_shard_that_makes_no_backup_leaves_none_of_the_others(shards: Shards, wire: Wire):
    await wire.produce(A, b"x")
    await shards.stop_shard(1)
    refusal = await refused(wire.admin.CreateBackup(admin_pb2.CreateBackupRequest()))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "OWNER_UNREACHABLE")
    assert await backup_names(wire) == []
    assert parts_left(shards) == []


async def test_one_backup_of_all_shards_is_made_at_a_time(shards: Shards, wire: Wire):
    with ShardBackups(LocalVfs(), f"{shards.config.data_dir}/backups").hold():
        refusal = await refused(wire.admin.CreateBackup(admin_pb2.CreateBackupRequest()))
    assert refusal.reason == "BACKUP_RUNNING"
    await create_backup(wire)


async def test_a_shard_that_is_down_keeps_its_own_calls_and_no_others(shards: Shards, wire: Wire):
    await wire.produce(A, b"x")
    await wire.produce(B, b"x")
    await shards.stop_shard(0)
    await wire.produce(B, b"y")
    refusal = await refused(wire.producer.Produce(batch(A, b"y")))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "OWNER_UNREACHABLE")
    # A list that leaves topics out would pass for a whole one.
    assert (await refused(wire.admin.ListTopics(admin_pb2.ListTopicsRequest()))).reason == "OWNER_UNREACHABLE"
    info = await within(wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest()))
    assert info.broker_id == shards.servers[1].broker.broker_id
    answer = await within(wire.admin.GetCluster(admin_pb2.GetClusterRequest()))
    assert [(shard.number, shard.applied_lsn > 0) for shard in answer.shards] == [(0, False), (1, True)]
    health: Any = health_pb2_grpc.HealthStub(wire.channel)
    status = (await within(health.Check(health_pb2.HealthCheckRequest()))).status
    assert status == health_pb2.HealthCheckResponse.SERVING


async def test_what_shards_refuse_to_tell_of_themselves_is_refused(
    shards: Shards, wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    """Only a shard that is down is shown as one without records."""

    async def refuse(*_: Any) -> bytes:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.PERMISSION_DENIED, nothing, nothing, "not allowed")

    monkeypatch.setattr(shards.front, "_ask", refuse)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(wire.admin.GetCluster(admin_pb2.GetClusterRequest()))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_shard_that_is_back_is_looked_for_often(shards: Shards, monkeypatch: pytest.MonkeyPatch):
    opened: list[dict[str, Any]] = []
    open_channel = grpc.aio.insecure_channel

    def note(target: str, options: Any) -> grpc.aio.Channel:
        opened.append(dict(options))
        return open_channel(target, options=options)

    monkeypatch.setattr(grpc.aio, "insecure_channel", note)
    await shards.wire.produce(A, b"x")
    assert [options["grpc.max_reconnect_backoff_ms"] for options in opened] == [200]


async def test_rights_are_asked_for_by_the_front_and_by_the_shard(tmp_path: Path):
    Files(tmp_path).access(ACCESS.replace('"orders"', f'"orders", "{A}", "{B}"'))
    started = Shards(access_file=str(tmp_path / "access.toml"), tokens_file=str(tmp_path / "tokens.toml"))
    await started.start()
    try:
        wire = started.wire
        for topic in (A, B):
            await within(wire.producer.Produce(batch(topic, b"x"), metadata=bearer("shop-secret")))
        other = await refused(wire.producer.Produce(batch(A2, b"x"), metadata=bearer("shop-secret")))
        assert other.code is grpc.StatusCode.PERMISSION_DENIED
        unknown = await refused(wire.producer.Produce(batch(A, b"x")))
        assert unknown.code is grpc.StatusCode.UNAUTHENTICATED
        listed = await within(
            wire.admin.ListTopics(admin_pb2.ListTopicsRequest(), metadata=bearer("shop-secret"))
        )
        assert [topic.name for topic in listed.topics] == sorted([A, B])
    finally:
        await started.stop()


async def test_backups_need_the_right_to_manage(tmp_path: Path):
    Files(tmp_path)
    started = Shards(access_file=str(tmp_path / "access.toml"), tokens_file=str(tmp_path / "tokens.toml"))
    await started.start()
    try:
        admin = started.wire.admin

        def calls(token: str, name: str) -> list[Any]:
            repeat = admin_pb2.CreateBackupRequest(request_id="id")
            return [
                admin.CreateBackup(repeat, metadata=bearer(token)),
                admin.ListBackups(admin_pb2.ListBackupsRequest(), metadata=bearer(token)),
                admin.DeleteBackup(admin_pb2.DeleteBackupRequest(name=name), metadata=bearer(token)),
            ]

        repeat = admin_pb2.CreateBackupRequest(request_id="id")
        made = (await within(admin.CreateBackup(repeat, metadata=bearer("admin-secret")))).backup
        for call in calls("shop-secret", made.name):
            assert (await refused(call)).code is grpc.StatusCode.PERMISSION_DENIED
        for call in calls("admin-secret", made.name):
            await within(call)
    finally:
        await started.stop()


async def test_the_folder_of_another_shard_is_refused(shards: Shards, wire: Wire):
    await wire.produce(A, b"x")
    await shards.stop_shard(0)
    own = replace(shards.servers[0].config, drain_grace_ms=0)
    with pytest.raises(Fenced) as caught:
        await Server(replace(own, topic_shard=TopicShard(1, SHARDS))).start()
    assert caught.value.reason == "DATA_DIR_OF_ANOTHER_SHARD"
