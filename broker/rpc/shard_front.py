"""The gRPC port of a broker with several shards: it passes each call on to the shard of its topic, as bytes.

What a client sees is one broker. Calls about no topic, or about several, are asked of all shards, and their answers
are made into one (`shard_lists.py`). Health is answered here: the front serves while it is up, and whether each shard
does is told by /readyz.

A token passes through, and the shard judges it again.

Invariants:
  FRONT-1  A call to one shard waits for no other shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2_grpc

from broker.errors import InvalidRequest, PostdateError, Unavailable
from broker.observe.cluster_view import ClusterView
from broker.observe.logs import get_logger
from broker.rpc import admin, compaction, schedule, shard_backups
from broker.rpc.access_rules import RULES
from broker.rpc.call_metadata import DIRECT, metadata_value
from broker.rpc.calls import END_OF_STREAM, Handler, Request, parse, refuse
from broker.rpc.cluster import describe_cluster
from broker.rpc.entries import check_size
from broker.rpc.forward import (
    ForwardedCall,
    MessageRoom,
    OwnerConnections,
    end_alike,
    forward_stream,
    forward_unary,
    watch_unread,
)
from broker.rpc.front import SERVICES, UNARY, FrontGuard, FrontHost
from broker.rpc.health import HealthService
from broker.rpc.page_calls import PageCalls
from broker.rpc.port import GrpcPort
from broker.rpc.produce_fan_out import ProduceFanOut
from broker.rpc.reflection import add_reflection
from broker.rpc.shard_backups import ShardBackupCalls
from broker.rpc.shard_lists import merge_counts, merge_stats, merge_topics
from broker.rpc.shard_owners import ShardOwners
from broker.rpc.stats import TOPICS_MAX
from broker.rpc.status import Context
from broker.rpc.topic_of import SUBSCRIBE, TOPIC_METHODS, topic_of, topic_of_open
from broker.runtime.supervise import Supervisor
from broker.topic_shards import shard_of
from broker.tuning import SHARED_BYTES_MAX
from postdate_api.v1 import admin_pb2, compaction_pb2, schedule_pb2

log = get_logger(__name__)

_PRODUCE_STREAM = "/postdate.v1.ProducerService/ProduceStream"
_LIST_TOPICS, _GET_STATS, _GET_CLUSTER, _GET_SERVER_INFO = (
    f"/{admin.SERVICE}/{method}" for method in ("ListTopics", "GetStats", "GetCluster", "GetServerInfo")
)
_MOVE_SHARD = f"/{admin.SERVICE}/MoveShard"
_COUNT_SCHEDULED = f"/{schedule.SERVICE}/CountScheduled"
_COMMIT_COMPACTION, _ABORT_COMPACTION, _LIST_COMPACTIONS = (
    f"/{compaction.SERVICE}/{method}" for method in ("CommitCompaction", "AbortCompaction", "ListCompactions")
)
_SHARD_SECONDS = 1.0
"""Time for a shard to say what it is; one that does not is left out."""

Answer = Callable[[bytes, Context], Awaitable[Message]]
ViewShards: TypeAlias = Callable[[bool], Sequence[ClusterView]]
"""Returns what a node of a cluster knows of each shard; True: by itself, and not from other nodes."""


class ShardFront:
    """See the module's description."""

    def __init__(self, host: FrontHost, owners: ShardOwners, view: ViewShards | None = None) -> None:
        """`view`: in a cluster. Raises ConfigError."""
        self._host = host
        self._room = MessageRoom(host.config.receiving_bytes_max, host.clock)
        self._owners = owners
        self._view = view
        self._health = HealthService(service.SERVICE for service in SERVICES)
        self._port = GrpcPort(host, broker=None, guard=FrontGuard)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._port.server)
        names = [service.SERVICE for service in SERVICES]
        if host.config.reflection_enabled:
            add_reflection((*names, health.SERVICE_NAME), self._port.server)
        self._backups = ShardBackupCalls(host, owners.count, self._ask)
        self._answers: dict[str, Answer] = {
            shard_backups.CREATE: self._backups.create_backup,
            shard_backups.LIST: self._backups.list_backups,
            shard_backups.DELETE: self._backups.delete_backup,
            _COMMIT_COMPACTION: self._commit_compaction,
            _ABORT_COMPACTION: self._abort_compaction,
            _LIST_COMPACTIONS: self._list_compactions,
            _LIST_TOPICS: self._list_topics,
            _GET_STATS: self._get_stats,
            _GET_CLUSTER: self._get_cluster,
            _GET_SERVER_INFO: self._get_server_info,
            _COUNT_SCHEDULED: self._count_scheduled,
        }
        routed = {*TOPIC_METHODS, *self._answers, _MOVE_SHARD} - {_PRODUCE_STREAM}
        assert routed == UNARY, "a method that is not routed would go to the first shard alone"
        self._port.server.add_generic_rpc_handlers((_ShardMethods(self),))

    @property
    def address(self) -> str:
        """Address on which it listens, once it is bound."""
        return self._port.address

    def page_calls(self) -> PageCalls:
        """Return the port as pages use it."""
        return PageCalls(self._port, self.handler, has_tls=bool(self._host.config.tls_cert_file))

    def bind(self) -> None:
        """Take the port. Raises Fenced if that cannot be."""
        self._port.bind()

    async def start(self, supervisor: Supervisor) -> None:
        """Take calls. `supervisor` runs what lasts as long as the port is open, and is stopped before it."""
        self._health.tell(is_serving=True)
        await self._port.server.start()
        for name, watch in self._port.watches():
            supervisor.spawn_lasting(name, watch)
        supervisor.spawn_lasting("unread calls", watch_unread(self._owners.connections))

    def drain(self) -> None:
        """Say that it will stop; calls are passed on until then."""
        self._health.tell(is_serving=False)

    async def stop(self) -> None:
        """Close the port and end all calls."""
        await self._port.server.stop(None)
        await self._backups.stop()
        await self._owners.close()

    def look_now(self) -> None:
        """Read the security files without waiting for the next look."""
        self._port.look_now()

    def handler(self, path: str) -> Handler | None:
        """Return what serves a method; None for one that nobody knows."""
        if path not in RULES:  # whatever somebody calls is kept by its name
            return None
        if path in UNARY:
            return grpc.unary_unary_rpc_method_handler(
                lambda message, context: self._unary(path, message, context)
            )
        if path == _PRODUCE_STREAM:
            return grpc.stream_stream_rpc_method_handler(lambda _, context: self._produce(context))
        if path == SUBSCRIBE:
            return grpc.stream_stream_rpc_method_handler(lambda _, context: self._subscribe(context))
        return None

    # -- calls of one shard ------------------------------------------------------------------------------------

    async def _unary(self, path: str, message: bytes, context: Context) -> bytes:
        number = self._owners.named(context)
        if number is None:
            if path in self._answers:
                return await self._answer(self._answers[path], message, context)
            number = self._shard_for(path, message)
        owner = await self._owner(number, context)
        return await forward_unary(self._host, self._room, owner, path, message, context)

    async def _produce(self, context: Context) -> None:
        if (number := self._owners.named(context)) is not None:
            owner = await self._owner(number, context)
            await forward_stream(self._host, self._room, owner, _PRODUCE_STREAM, context)
            return

        def shard_for(message: bytes) -> int:
            return self._shard_for(_PRODUCE_STREAM, message)

        def find(number: int) -> OwnerConnections:
            return self._owners.find(number, context)

        await ProduceFanOut(self._host, self._room, find, _PRODUCE_STREAM, shard_for).run(context)

    async def _subscribe(self, context: Context) -> None:
        unsent: list[bytes] = []  # nobody else may keep the first frame, as the stream goes on for long
        number = await self._read_first(context, unsent)
        owner = await self._owner(number, context)
        await forward_stream(self._host, self._room, owner, SUBSCRIBE, context, unsent)

    async def _read_first(self, context: Context, unsent: list[bytes]) -> int:
        """Read the first frame of a Subscribe stream; returns the shard that it is for."""
        try:
            first: Any = await context.read()
            if first is END_OF_STREAM:
                first = b""  # which the first shard refuses, as it refuses a stream without a frame
            check_size(first, "frame", self._host.config.tuning.ack_entries_max)
        except (grpc.aio.BaseError, InvalidRequest) as error:
            await refuse(self._host, context, error)
            raise
        unsent.append(first)
        if (number := self._owners.named(context)) is not None:
            return number
        try:
            return shard_of(topic_of_open(first, self._host.config), self._owners.count)
        except InvalidRequest:
            return 0

    def _shard_for(self, path: str, message: bytes) -> int:
        """Return the shard of a request; the first one is for what is about no topic, and is to refuse what is none."""
        config, count = self._host.config, self._owners.count
        try:
            if path == _MOVE_SHARD:
                number: int = parse(admin_pb2.MoveShardRequest, message, config).shard
                return number if number < count else 0
            return shard_of(topic_of(path, message, config), count) if path in TOPIC_METHODS else 0
        except InvalidRequest:
            return 0

    async def _owner(self, number: int, context: Context) -> OwnerConnections:
        """Return the owner of a shard; a call that may not be passed on to it is refused."""
        try:
            return self._owners.find(number, context)
        except Unavailable as error:
            await refuse(self._host, context, error)
            raise

    # -- calls of all shards -----------------------------------------------------------------------------------

    async def _answer(self, answer: Answer, message: bytes, context: Context) -> bytes:
        answers: list[bytes] = []
        call = ForwardedCall()

        async def work() -> None:
            with self._room.hold(call, len(message)):
                answers.append((await answer(message, context)).SerializeToString())

        await end_alike(self._host, context, call, work(), refuse)
        self._room.hold_until_read(context, answers[0])
        return answers[0]

    async def _list_topics(self, message: bytes, context: Context) -> Message:
        request = self._parse(admin_pb2.ListTopicsRequest, message)
        asked = dict.fromkeys(range(self._owners.count), self._for_all(request))
        answers = await self._ask_all(_LIST_TOPICS, asked, context)
        return merge_topics(
            [admin_pb2.ListTopicsResponse.FromString(answer) for answer in answers], request.page_size
        )

    async def _get_stats(self, message: bytes, context: Context) -> Message:
        request = self._parse(admin_pb2.GetStatsRequest, message)
        answers = await self._ask_all(_GET_STATS, self._by_shard(request), context)
        return merge_stats(
            [admin_pb2.GetStatsResponse.FromString(answer) for answer in answers], request.page_size
        )

    async def _count_scheduled(self, message: bytes, context: Context) -> Message:
        request = self._parse(schedule_pb2.CountScheduledRequest, message)
        # Without topics it is no request, and the first shard refuses it.
        asked = self._by_shard(request) if request.topics else {0: request.SerializeToString()}
        answers = await self._ask_all(_COUNT_SCHEDULED, asked, context)
        return merge_counts([schedule_pb2.CountScheduledResponse.FromString(answer) for answer in answers])

    async def _commit_compaction(self, message: bytes, context: Context) -> Message:
        request = self._parse(compaction_pb2.CommitCompactionRequest, message).SerializeToString()
        answer = await self._ask_any(_COMMIT_COMPACTION, request, context)
        return compaction_pb2.CommitCompactionResponse.FromString(answer)

    async def _abort_compaction(self, message: bytes, context: Context) -> Message:
        request = self._parse(compaction_pb2.AbortCompactionRequest, message).SerializeToString()
        answer = await self._ask_any(_ABORT_COMPACTION, request, context)
        return compaction_pb2.AbortCompactionResponse.FromString(answer)

    async def _list_compactions(self, message: bytes, context: Context) -> Message:
        request = self._parse(compaction_pb2.ListCompactionsRequest, message)
        asked = dict.fromkeys(range(self._owners.count), self._for_all(request))
        answers = map(
            compaction_pb2.ListCompactionsResponse.FromString,
            await self._ask_all(_LIST_COMPACTIONS, asked, context),
        )
        return compaction_pb2.ListCompactionsResponse(
            compactions=[held for answer in answers for held in answer.compactions]
        )

    async def _get_cluster(self, _: bytes, context: Context) -> Message:
        if self._view is not None:
            return describe_cluster(self._view(bool(metadata_value(context, DIRECT))))
        shards = await asyncio.gather(
            *(self._describe_shard(number, context) for number in range(self._owners.count))
        )
        return admin_pb2.GetClusterResponse(shards=shards)

    async def _describe_shard(self, number: int, context: Context) -> admin_pb2.ClusterShard:
        described = admin_pb2.ClusterShard(number=number)
        try:
            async with asyncio.timeout(_SHARD_SECONDS):
                answer = await self._ask(_GET_CLUSTER, number, b"", context)
        except TimeoutError:
            return described
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            return described
        return admin_pb2.GetClusterResponse.FromString(answer).shards[0]

    async def _get_server_info(self, message: bytes, context: Context) -> Message:
        """Return what the first shard tells that answers; all have the same version and limits."""
        request = self._parse(admin_pb2.GetServerInfoRequest, message).SerializeToString()
        try:
            async with asyncio.timeout(_SHARD_SECONDS):
                answer = await self._ask_any(_GET_SERVER_INFO, request, context)
        except TimeoutError as error:
            raise Unavailable("No shard answers") from error
        return admin_pb2.GetServerInfoResponse.FromString(answer)

    def _parse(self, kind: type[Request], message: bytes) -> Request:
        """Parse a request without the fields that nobody knows, as parts of it go to several shards."""
        request = parse(kind, message, self._host.config)
        request.DiscardUnknownFields()
        return kind.FromString(request.SerializeToString())  # what was discarded keeps its memory

    def _for_all(self, rest: Message) -> bytes:
        """Return what all shards get. Raises InvalidRequest where that is too much to be copied for each."""
        if rest.ByteSize() > SHARED_BYTES_MAX:  # nothing else that all get can be long
            raise InvalidRequest("page_token is too long", field="page_token", reason="INVALID_PAGE_TOKEN")
        return rest.SerializeToString()

    def _by_shard(self, request: Any) -> dict[int, bytes]:
        """Return the requests to shards for one that names topics, or none for all of them."""
        count = self._owners.count
        if not request.topics:
            return dict.fromkeys(range(count), self._for_all(request))
        if len(request.topics) > TOPICS_MAX:
            return {0: request.SerializeToString()}  # which refuses it
        named: dict[int, list[str]] = {}
        for topic in request.topics:
            named.setdefault(shard_of(topic, count), []).append(topic)
        del request.topics[:]
        rest, kind = self._for_all(request), type(request)
        # A message is the concatenation of its fields.
        return {number: kind(topics=topics).SerializeToString() + rest for number, topics in named.items()}

    async def _ask_any(self, path: str, message: bytes, context: Context) -> bytes:
        """Return the first answer: a compaction is known to one shard, and which one its random id does not tell.

        Raises what a shard refuses for another reason than that it does not know it, or that none knows it.
        """
        tasks = [
            asyncio.ensure_future(self._ask(path, number, message, context))
            for number in range(self._owners.count)
        ]
        failure: grpc.aio.AioRpcError | PostdateError | None = None
        try:
            for task in asyncio.as_completed(tasks):
                try:
                    return await task
                except (grpc.aio.AioRpcError, PostdateError) as error:
                    if failure is None or _is_not_found(failure):
                        failure = error
            assert failure is not None
            raise failure
        finally:
            for other in tasks:
                other.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_all(self, path: str, asked: dict[int, bytes], context: Context) -> list[bytes]:
        """Return the answers of shards. Raises what the first of them answers that refuses."""
        tasks = [
            asyncio.ensure_future(self._ask(path, number, message, context))
            for number, message in asked.items()
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(
        self, path: str, number: int, message: bytes, context: Context, *, seconds: float | None = None
    ) -> bytes:
        call, owner = ForwardedCall(), self._owners.find(number, None)
        with call.telling_end(), self._room.hold(call, len(message)), owner.channel(call) as channel:
            answer: bytes = await channel.unary_unary(path, None, None)(
                message,
                timeout=seconds or context.time_remaining(),
                metadata=owner.metadata_for(context, call),
            )
        return answer


def _is_not_found(error: grpc.aio.AioRpcError | PostdateError) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.NOT_FOUND


class _ShardMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Methods of a front."""

    def __init__(self, front: ShardFront) -> None:
        self._front = front

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        return self._front.handler(handler_call_details.method)
