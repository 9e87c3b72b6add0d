"""A node that does not own the shard: what it answers itself, what it passes on to the owner, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.http2 import END_HEADERS, HEADERS, connected, frame, message
from benchmarks.http2 import call as http2_call
from broker.cli import main
from broker.errors import Unavailable
from broker.observe.cluster_view import ClusterView, OwnerRoute
from broker.observe.metrics import BrokerCounters
from broker.rpc import call_metadata, calls, forward
from broker.rpc.forward import ForwardedCall, MessageRoom, OwnerConnections
from broker.rpc.front import Front, FrontHost
from broker.rpc.reception import Reception
from broker.rpc.unread_room import STALLED_SECONDS
from broker.runtime.clock import SystemClock
from broker.runtime.supervise import Supervisor
from broker.server import Server
from broker.settings import ConfigError
from postdate_api.v1 import admin_pb2, consumer_pb2, producer_pb2
from tests.certificates import Authority, credentials_of
from tests.configs import broker_config
from tests.wire.access_files import Files, bearer
from tests.wire.conftest import Serve, Wire, batch, eventually, ids_of, refused, within

DIRECT = ((call_metadata.DIRECT, "1"),)
RECEIVE = http2_call("/postdate.v1.ConsumerService/Receive")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class FrontNode:
    """A node with a front, whose route a test may change."""

    def __init__(self, owner: Wire | None, **settings: Any) -> None:
        self.nodes: tuple[tuple[str, str], ...] = (("owner", "10.0.0.1:7650"), ("here", "10.0.0.2:7650"))
        self.route = OwnerRoute()
        if owner is not None:
            self.route = OwnerRoute(7, "owner", owner.server.grpc_address)
        self.config = broker_config(grpc_address="127.0.0.1:0", **settings)
        self.counters = BrokerCounters()
        self.front = Front(FrontHost(self.config, SystemClock(), self.counters), self._view)
        self.supervisor = Supervisor(lambda name, error: None)
        self.wire: Wire

    @property
    def grpc_address(self) -> str:
        return self.front.address

    async def start(self) -> FrontNode:
        await self.front.start(self.supervisor.spawn_lasting)
        self.broker = None  # it has none; a `Wire` asks
        self.wire = Wire(cast(Server, self))
        return self

    async def stop(self) -> None:
        await self.wire.disconnect()
        await within(self.front.stop())

    def _view(self) -> ClusterView:
        return ClusterView("c", "here", self.nodes, 0, self.route, ("here",), 12, 34, 5, 6)


Face = Callable[..., Awaitable[FrontNode]]


@pytest.fixture
async def face() -> AsyncIterator[Face]:
    """Starts a front before an owner; all of them are stopped at the end."""
    nodes: list[FrontNode] = []

    async def start(owner: Wire | None, **settings: Any) -> FrontNode:
        nodes.append(await FrontNode(owner, **settings).start())
        return nodes[-1]

    yield start
    for node in nodes:
        await node.stop()


async def health_of(node: FrontNode) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(node.wire.channel)
    return (await within(stub.Check(health_pb2.HealthCheckRequest()))).status


async def test_calls_and_streams_go_to_the_owner(wire: Wire, face: Face):
    through = (await face(wire)).wire
    ids = await through.produce("t", b"one", b"two")
    stream = await through.subscribe("t", initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST)
    deliveries = await stream.deliveries(2)
    assert ids_of(deliveries) == ids
    assert [delivery.message.payload for delivery in deliveries] == [b"one", b"two"]
    assert await stream.ack(ids) == []
    assert await stream.close() is grpc.StatusCode.OK
    assert await through.topic_names() == ["t"] == await wire.topic_names()


async def test_a_produce_stream_goes_both_ways_message_by_message(wire: Wire, face: Face):
    through = (await face(wire)).wire
    call = through.producer.ProduceStream()
    for number in range(1, 20):
        await within(call.write(batch("t", b"x" * 10_000, request_id=number)))
        answer = await within(call.read())
        assert (answer.request_id, answer.ids[0].count) == (number, 1)
    await within(call.done_writing())
    assert await within(call.read()) is grpc.aio.EOF  # type: ignore[attr-defined]
    assert await within(call.code()) is grpc.StatusCode.OK


async def test_refusals_come_back_as_the_owner_gave_them(wire: Wire, face: Face):
    through = (await face(wire)).wire
    request = admin_pb2.CreateTopicRequest(name="a b")
    assert await refused(through.admin.CreateTopic(request)) == await refused(wire.admin.CreateTopic(request))
    stream, straight = through.stream(), wire.stream()
    for each in (stream, straight):
        await each.send(permits=consumer_pb2.Permits(messages=1))
    assert await stream.refusal() == await straight.refusal()


async def test_cluster_and_health_are_answered_here(wire: Wire, face: Face):
    node = await face(wire)
    answer = await within(node.wire.admin.GetCluster(admin_pb2.GetClusterRequest()))
    (shard,) = answer.shards
    assert (answer.cluster_id, answer.node) == ("c", "here")
    assert (shard.epoch, shard.owner, shard.owner_address) == (7, "owner", wire.server.grpc_address)
    assert await health_of(node) == SERVING
    node.route = OwnerRoute(8)
    async with asyncio.timeout(5):
        while await health_of(node) != NOT_SERVING:  # it is looked at several times a second
            await asyncio.sleep(0.02)


async def test_the_status_of_a_cluster_asks_each_node(wire: Wire, face: Face):
    node = await face(wire)
    command = ["cluster", "status", "--address", node.grpc_address]
    node.nodes = (("owner", wire.server.grpc_address), ("here", node.grpc_address), ("away", "127.0.0.1:1"))
    done = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert done.exit_code == 1
    told = done.output.splitlines()
    assert told[:2] == ["cluster c", "owner owner, epoch 7"]
    assert "standby  lsn 12" in told[3] and "no answer" in told[4]
    done = await asyncio.to_thread(CliRunner().invoke, main, [*command[:3], wire.server.grpc_address])
    assert (done.exit_code, done.output) == (0, "no cluster: one broker, which owns all topics\n")


async def test_who_asks_for_the_owner_alone_is_told_where_it_is(wire: Wire, face: Face):
    through = (await face(wire)).wire
    refusal = await refused(through.admin.ListTopics(admin_pb2.ListTopicsRequest(), metadata=DIRECT))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_OWNER")
    assert refusal.metadata == {"owner_address": wire.server.grpc_address, "epoch": "7"}
    stream = through.stream_as(DIRECT)
    await stream.send(open=consumer_pb2.Open(topic="t", subscription="s"))
    assert (await stream.refusal()).reason == "NOT_OWNER"
    assert await within(through.admin.GetCluster(admin_pb2.GetClusterRequest(), metadata=DIRECT))


async def test_while_nobody_is_known_calls_are_refused(face: Face):
    through = (await face(None)).wire
    refusal = await refused(through.admin.ListTopics(admin_pb2.ListTopicsRequest()))
    assert (refusal.reason, refusal.metadata) == ("NOT_OWNER", {"owner_address": "", "epoch": "0"})


async def test_a_node_that_owned_the_shard_does_not_pass_calls_to_itself(face: Face):
    node = await face(None)
    node.route = OwnerRoute(3, "here", node.grpc_address)
    refusal = await refused(node.wire.admin.ListTopics(admin_pb2.ListTopicsRequest()))
    assert (refusal.reason, refusal.metadata) == ("NOT_OWNER", {"owner_address": "", "epoch": "3"})
    (shard,) = (await within(node.wire.admin.GetCluster(admin_pb2.GetClusterRequest()))).shards
    assert (shard.epoch, shard.owner, shard.owner_address) == (3, "", "")


async def test_nodes_that_take_each_other_for_the_owner_pass_nothing_in_a_circle(face: Face):
    one, other = await face(None), await face(None)
    one.route = OwnerRoute(3, "other", other.grpc_address)
    other.route = OwnerRoute(3, "one", one.grpc_address)
    refusal = await refused(one.wire.admin.ListTopics(admin_pb2.ListTopicsRequest()))
    assert (refusal.reason, refusal.metadata["owner_address"]) == ("NOT_OWNER", one.grpc_address)


async def test_an_owner_that_is_away(wire: Wire, face: Face):
    node = await face(wire)
    await node.wire.produce("t", b"x")
    stream = await node.wire.subscribe("t")
    await wire.stop()
    await stream.frame("draining")
    refusal = await refused(node.wire.admin.ListTopics(admin_pb2.ListTopicsRequest()))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "OWNER_UNREACHABLE")
    assert "127.0.0.1" not in refusal.message


async def test_a_new_owner_ends_what_goes_to_the_former(serve: Serve, face: Face):
    former, now = await serve(), await serve()
    node = await face(former)
    await former.produce("t", b"x")
    await now.produce("t", b"y")
    stream = await node.wire.subscribe("t", initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST)
    assert (await stream.delivery()).message.payload == b"x"
    waiting = asyncio.ensure_future(node.wire.receive("empty", wait_ms=30_000))
    await eventually(lambda: any(topic.name == "empty" for topic in former.broker.registry.topics.values()))
    node.route = OwnerRoute(8, "now", now.server.grpc_address)
    assert (await stream.refusal()).reason == "OWNER_UNREACHABLE"  # what it asked for may have been done
    assert (await refused(waiting)).reason == "OWNER_UNREACHABLE"
    again = await node.wire.subscribe("t", initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST)
    assert (await again.delivery()).message.payload == b"y"


async def test_a_higher_epoch_of_the_same_owner_ends_its_calls_too(wire: Wire, face: Face):
    node = await face(wire)
    await wire.produce("t", b"x")
    stream = await node.wire.subscribe("t")
    node.route = node.route._replace(epoch=9)
    assert (await stream.refusal()).reason == "OWNER_UNREACHABLE"


async def test_a_caller_that_goes_away_ends_its_call_at_the_owner(wire: Wire, face: Face):
    node = await face(wire)
    await wire.produce("t", b"x")
    stream = await node.wire.subscribe("t")
    subscription = wire.broker.registry.topic("t").subscription("s")
    assert len(subscription.consumers) == 1
    stream.cancel()
    await eventually(lambda: not subscription.consumers)


async def test_deadlines_are_the_owners_too(wire: Wire, face: Face):
    node = await face(wire)
    await wire.produce("t", b"x")
    stream = node.wire.consumer.Subscribe(timeout=0.3)
    opening = consumer_pb2.Open(topic="t", subscription="s")
    await within(stream.write(consumer_pb2.SubscribeRequest(open=opening)))
    assert (await within(stream.read())).HasField("opened")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(stream.read())
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    subscription = wire.broker.registry.topic("t").subscription("s")
    await eventually(lambda: not subscription.consumers)


class Recorder(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """An owner that notes how it is called."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.left_seconds: float | None = None
        self.port = 0

    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._serve)

    async def _serve(self, _: Any, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        self.left_seconds = context.time_remaining()
        await context.write(await context.read())
        context.set_trailing_metadata((("x-trail", "1"), ("x-bytes-bin", b"\x00\xff")))


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    server, recorder = grpc.aio.server(), Recorder()
    server.add_generic_rpc_handlers((recorder,))
    recorder.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield recorder
    await server.stop(None)


async def test_deadlines_and_metadata_are_passed_on_both_ways(recorder: Recorder, face: Face):
    node = await face(None)
    node.route = OwnerRoute(1, "owner", f"127.0.0.1:{recorder.port}")
    sent = (("authorization", "Bearer t"), ("traceparent", "00-1-2-01"), ("x-bytes-bin", b"\x00\xff"))
    call = node.wire.raw("/postdate.v1.AdminService/ListTopics")(b"\x08\x01", timeout=60, metadata=sent)
    assert await within(call) == b"\x08\x01"
    assert set(sent) <= recorder.metadata.items()
    assert recorder.metadata[call_metadata.DIRECT][:1] == "f"
    assert recorder.left_seconds is not None and 50 < recorder.left_seconds < 62  # gRPC rounds it up
    assert dict(await call.trailing_metadata()) == {"x-trail": "1", "x-bytes-bin": b"\x00\xff"}
    await within(node.wire.raw("/postdate.v1.AdminService/ListTopics")(b"\x08\x01"))
    assert recorder.left_seconds is None


async def test_what_only_fronts_say_is_not_passed_on_for_a_client():
    """A front says it for itself: which call this is, and for which shard."""
    connections, call = OwnerConnections(cast(Any, None), 65_536, shard=1), ForwardedCall()
    forged = (("authorization", "Bearer t"), (call_metadata.DIRECT, "f0"), (call_metadata.SHARD, "0"))
    context: Any = SimpleNamespace(invocation_metadata=lambda: forged)
    own = ((call_metadata.DIRECT, call.tag), (call_metadata.SHARD, "1"))
    assert connections.metadata_for(context, call) == (forged[0], *own)


async def test_more_calls_than_one_connection_takes(wire: Wire, face: Face, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "_CALLS_A_CONNECTION", 3)
    node = await face(wire)
    await wire.produce("t", b"x")
    streams = [await node.wire.subscribe("t") for _ in range(8)]
    peers = {session._context.peer() for session in wire.server._consumer._sessions}
    assert len(peers) == 3
    for stream in streams:
        stream.cancel()
    await eventually(lambda: not wire.server._consumer._sessions)
    streams = [await node.wire.subscribe("t") for _ in range(8)]
    assert {session._context.peer() for session in wire.server._consumer._sessions} == peers


async def test_methods_that_nobody_knows_are_not_kept(wire: Wire, face: Face):
    node = await face(wire)
    reception = next(each for each in node.front._port.interceptors if isinstance(each, Reception))
    for number in range(3):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(node.wire.raw(f"/postdate.v1.AdminService/No{number}")(b""))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not reception._served


async def test_the_owner_can_take_the_port_of_the_front(tmp_path: Path, wire: Wire):
    node = await FrontNode(wire).start()
    stream = await node.wire.subscribe("t")
    address = node.grpc_address
    await within(node.front.stop())
    await eventually(stream.call.done)
    server = Server(
        broker_config(
            data_dir=str(tmp_path / "own"), grpc_address=address, http_address="127.0.0.1:0", drain_grace_ms=0
        )
    )
    await server.start()
    try:
        await node.wire.produce("t", b"x")  # on the channel that was open to the front
    finally:
        await node.wire.disconnect()
        await within(server.stop())
        shutil.rmtree(tmp_path / "own")


# -- access --------------------------------------------------------------------------------------------------


async def test_tokens_are_judged_here_and_by_the_owner(serve: Serve, face: Face, tmp_path: Path):
    files = Files(tmp_path)
    owner = await serve(**files.settings)
    node = await face(owner, **files.settings)
    request = batch("orders", b"x")
    await within(node.wire.producer.Produce(request, metadata=bearer("shop-secret")))
    seen = owner.broker.counters.auth_failures.copy()
    for metadata in (None, bearer("wrong"), bearer("nobody-secret")):
        refusal = await refused(node.wire.producer.Produce(request, metadata=metadata))
        assert refusal.code in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
        refusal = await refused(node.wire.admin.GetCluster(admin_pb2.GetClusterRequest(), metadata=metadata))
        assert refusal.code in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    assert owner.broker.counters.auth_failures == seen  # nothing of it came so far
    assert sum(node.counters.auth_failures.values()) == 6
    other = batch("billing", b"x")  # a topic that this token has no right on: only the owner reads requests
    refusal = await refused(node.wire.producer.Produce(other, metadata=bearer("shop-secret")))
    assert refusal.code is grpc.StatusCode.PERMISSION_DENIED
    assert await health_of(node) == SERVING


@asynccontextmanager
async def nodes_with_certificates(
    serve: Serve, folder: Path, authority: Authority
) -> AsyncIterator[tuple[FrontNode, Callable[..., Awaitable[Any]]]]:
    """A front before an owner, both with certificates, and Produce through it; the client has one of its own."""
    files = Files(folder)
    # The certificate of the nodes has rights of its own, which must not become those of whoever calls through them.
    files.access('[[grant]]\nprincipals = ["*"]\ntopics = ["*"]\nrights = ["produce", "manage"]\n')
    pair, own = authority.issue("server", is_local=True), authority.issue("client", common_name="billing")
    settings = {
        **files.settings,
        "tls_cert_file": pair.cert_file,
        "tls_key_file": pair.key_file,
        "tls_client_ca_file": authority.ca_file,
    }
    owner = await serve(**settings)
    node = FrontNode(owner, **settings)
    await node.front.start(node.supervisor.spawn_lasting)
    name = [("grpc.ssl_target_name_override", "localhost")]
    credentials = credentials_of(own, authority)
    try:
        async with grpc.aio.secure_channel(node.grpc_address, credentials, options=name) as channel:
            produce: Any = channel.unary_unary("/postdate.v1.ProducerService/Produce")
            message = batch("orders", b"x").SerializeToString()
            yield node, lambda metadata=None: produce(message, metadata=metadata)
    finally:
        await within(node.front.stop())


async def test_identities_of_certificates_do_not_pass(serve: Serve, tmp_path: Path):
    async with nodes_with_certificates(serve, tmp_path, Authority(tmp_path)) as (_, produce):
        assert (await refused(produce())).reason == "NOT_OWNER"
        answer = await within(produce(bearer("shop-secret")))
        assert producer_pb2.ProduceResponse.FromString(answer).ids[0].count == 1


async def test_a_connection_to_the_owner_is_opened_anew_with_the_certificates_of_that_day(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The owner ends a connection after an hour, and the former certificate may have ended by then."""
    authority = Authority(tmp_path)
    opened: list[grpc.aio.Channel] = []

    def open_channel(*arguments: Any, **options: Any) -> grpc.aio.Channel:
        opened.append(secure_channel(*arguments, **options))
        return opened[-1]

    secure_channel = grpc.aio.secure_channel
    async with nodes_with_certificates(serve, tmp_path, authority) as (node, produce):
        monkeypatch.setattr(grpc.aio, "secure_channel", open_channel)
        for _ in range(2):
            await within(produce(bearer("shop-secret")))
        assert len(opened) == 1, "it is kept"
        os.rename(node.config.tls_key_file, tmp_path / "away")
        await within(produce(bearer("shop-secret")))
        monkeypatch.setattr(forward, "CONNECTION_SECONDS", 0.0)
        monkeypatch.setattr(forward, "PAUSE_SECONDS", 0.0)
        refusal = await refused(produce(bearer("shop-secret")))
        assert refusal.code is grpc.StatusCode.UNAVAILABLE and "certificate" in refusal.message
        authority.issue("server", is_local=True)
        for _ in range(2):
            await within(produce(bearer("shop-secret")))
        assert len(opened) == 3
        await eventually(
            lambda: all(each.get_state() is grpc.ChannelConnectivity.SHUTDOWN for each in opened)
        )


class Opener:
    """Opens channels that take a moment to close, while there is no problem; counts how often it tried."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.tried_count = 0
        self.open_count = 0

    def __call__(self, _: object) -> grpc.aio.Channel:
        self.tried_count += 1
        if self.problem:
            raise ConfigError(self.problem)
        self.open_count += 1
        return cast(grpc.aio.Channel, self)

    async def close(self, _: float | None) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.open_count -= 1


def open_one(owner: OwnerConnections) -> None:
    with owner.channel(ForwardedCall()):
        pass


async def test_files_that_cannot_be_read_are_not_read_for_each_call_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    opener = Opener("tls_key_file: it is away")
    owner = OwnerConnections(opener, 1 << 20)
    for _ in range(3):
        with pytest.raises(Unavailable, match="certificate"):
            open_one(owner)
    assert (opener.tried_count, len(caplog.records)) == (1, 1)
    monkeypatch.setattr(forward, "PAUSE_SECONDS", 0.0)
    owner = OwnerConnections(opener, 1 << 20)
    caplog.clear()
    for problem in ("it is away", "it is away", "it is no key", "", "it is away"):
        opener.problem = problem
        monkeypatch.setattr(forward, "CONNECTION_SECONDS", 0.0)  # each call wants a connection of its own
        with suppress(Unavailable):
            open_one(owner)
    assert opener.tried_count == 6
    assert len(caplog.records) == 3, "told when it changes"
    await owner.close(Unavailable("done"))


async def test_no_connection_is_left_once_those_to_an_owner_are_closed(monkeypatch: pytest.MonkeyPatch):
    opener = Opener()
    owner = OwnerConnections(opener, 1 << 20)
    open_one(owner)
    monkeypatch.setattr(forward, "CONNECTION_SECONDS", 0.0)
    open_one(owner)  # both are old now, and begin to close
    assert opener.open_count == 2
    await owner.close(Unavailable("done"))
    assert opener.open_count == 0


# -- bounds --------------------------------------------------------------------------------------------------


class _Clock(SystemClock):
    """One that stands still."""

    seconds = 0.0

    def monotonic_ns(self) -> int:
        return int(self.seconds * 1e9)


async def test_messages_that_wait_take_a_bounded_room():
    room = MessageRoom(100, _Clock())
    told: list[str] = []

    async def wait(size: int, name: str) -> None:
        call = ForwardedCall()
        try:
            with room.hold(call, size):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append(name)
            if call.ended_because is None:
                raise

    tasks = [asyncio.create_task(wait(40, name)) for name in "abc"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (told, room.held_bytes) == (["a"], 80)
    tasks.append(asyncio.create_task(wait(1000, "d")))  # one that is larger than the room has it alone
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (told, room.held_bytes) == (["a", "b", "c"], 1000)
    tasks[-1].cancel()
    await asyncio.wait(tasks)
    assert room.held_bytes == 0


class _Call:
    """As much of a call as a room asks for an answer of it."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self._name = name
        self._ended = ended

    def invocation_metadata(self) -> None:
        return None

    def peer(self) -> str:
        self._ended.append(self._name)
        return "unix:"

    def add_done_callback(self, _: Any) -> None:
        pass


async def test_answers_that_stalled_give_way_first_then_calls_then_young_answers():
    clock = _Clock()
    room, ended = MessageRoom(100, clock), list[str]()

    async def wait(name: str, size: int) -> None:
        with suppress(asyncio.CancelledError), room.hold(ForwardedCall(), size):
            await asyncio.Event().wait()
        ended.append(name)

    async def begin(name: str, size: int = 20) -> asyncio.Task[None]:
        task = asyncio.create_task(wait(name, size))
        await asyncio.sleep(0)
        return task

    def answer(name: str, size: int) -> None:
        room.hold_until_read(cast(Any, _Call(name, ended)), bytes(size))

    answer("answer 1", 20)
    first = await begin("call 1")
    clock.seconds = STALLED_SECONDS - 1
    answer("answer 2", 20)
    second = await begin("call 2")
    answer("answer 3", 30)
    await within(asyncio.wait([first]))
    assert ended == ["call 1"], "no answer has stalled yet"
    clock.seconds = STALLED_SECONDS
    answer("answer 4", 20)
    assert ended == ["call 1", "answer 1"], "which has stalled by now"
    answer("answer 5", 50)
    await within(asyncio.wait([second]))
    assert set(ended[2:]) == {"call 2", "answer 2"}, "the oldest young one, as calls alone are not enough"
    assert room.held_bytes == 100
    third = await begin("call 3")
    await within(asyncio.wait([third]))
    small = await begin("call 4", 0)
    answer("answer 6", 60)
    assert ended[4:] == ["call 3", "answer 3", "answer 4", "answer 5"]
    assert not small.done(), "no call ends in vain"
    answer("answer 7", 200)
    await within(asyncio.wait([small]))
    assert ended[8:] == ["answer 6", "call 4"], "one that is larger than the room has it alone"
    assert room.held_bytes == 200


async def test_a_caller_that_does_not_read_gives_way_to_others(
    wire: Wire, face: Face, monkeypatch: pytest.MonkeyPatch
):
    """Its messages wait for it, and end the call when the room is full: the one that has waited for longest."""
    monkeypatch.setattr(calls, "STATUS_SECONDS", 0.2)
    node = await face(wire, receiving_bytes_max=4 << 20)
    for _ in range(40):
        await wire.produce("t", *(b"x" * 100_000 for _ in range(10)))
    narrow = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    channels = [grpc.aio.insecure_channel(node.grpc_address, options=narrow) for _ in range(4)]
    streams: list[Any] = []
    for number, channel in enumerate(channels):
        streams.append(call := channel.stream_stream("/postdate.v1.ConsumerService/Subscribe")())
        opening = consumer_pb2.Open(
            topic="t",
            subscription=f"s{number}",
            permits=consumer_pb2.Permits(messages=10_000),
            initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST,
        )
        await within(call.write(consumer_pb2.SubscribeRequest(open=opening).SerializeToString()))
    room = node.front._room
    await eventually(lambda: any(call.done() for call in streams[:3]))
    assert room.held_bytes <= 4 << 20
    await node.wire.produce("t", b"more")  # others go on
    for channel in channels:
        await channel.close(None)
    await eventually(lambda: room.held_bytes == 0)


async def test_answers_of_calls_that_a_caller_does_not_read_are_bounded(
    wire: Wire, face: Face, monkeypatch: pytest.MonkeyPatch
):
    """gRPC keeps them: the connection is cut once they take more than the room."""
    node = await face(wire, receiving_bytes_max=4 << 20)
    for _ in range(8):
        await wire.produce("t", bytes(900_000))
    await wire.create_subscription("t", initial_position="INITIAL_POSITION_EARLIEST")
    request = consumer_pb2.ReceiveRequest(topic="t", subscription="s", wait_ms=60_000).SerializeToString()
    room, held = node.front._room, list[int]()
    end = MessageRoom._let_go

    def let_go(entry: Any) -> None:
        held.append(room.held_bytes)  # before anything goes: all that was ever there
        end(room, entry)

    monkeypatch.setattr(room, "_let_go", let_go)
    async with connected(node.grpc_address) as raw:
        reading = asyncio.create_task(raw.live())
        for number in range(1, 17, 2):
            await raw.send(frame(HEADERS, END_HEADERS, number, RECEIVE), message(number, request, ends=True))
        await eventually(reading.done)
    assert 2 << 20 < max(held) <= (4 << 20) + 1_000_000, "with the one that was too much"
    await eventually(lambda: room.held_bytes == 0)
    await node.wire.produce("t", b"more")  # others go on
