"""A broker on virtual time with something in every corner, all its services, and a request for every method."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from broker.folder.compaction_values import Lease
from broker.jobs.rewrite import rewrite
from broker.model import Position
from broker.observe.cluster_view import ClusterView, OwnerRoute
from broker.policy import SubscriptionPolicy
from broker.rpc import admin, compaction, consumer, producer, schedule
from broker.rpc.calls import END_OF_STREAM
from broker.rpc.hand_over import HandOver
from broker.runtime.ownership import Ownership
from broker.storage.bulk import BulkDefinition, BulkKind
from broker.storage.recurring_values import Definition, RecurringRule
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from postdate_api.v1 import admin_pb2, compaction_pb2, consumer_pb2, message_pb2, producer_pb2, schedule_pb2
from tests.harness import EARLIEST, Inbox, Node, Outgoing
from tests.unit.folder.compaction_world import TOPIC, config, fill, ledger_ids

LATER_MS = 3_600_000
MESSAGE_MAX = 1 << 20
VIEW = ClusterView("c", "a", (("a", "10.0.0.1:7650"),), 0, OwnerRoute(1, "a", "10.0.0.1:7650"))
FILES = (producer_pb2, consumer_pb2, schedule_pb2, admin_pb2, compaction_pb2)
METHODS: dict[str, Any] = {
    f"{service.name}.{method.name}": method
    for module in FILES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every method of the API, as a descriptor."""


def has_request_id(method: Any) -> bool:
    """Return whether a repeat is recognised by a text, as RequestIds does."""
    field = method.input_type.fields_by_name.get("request_id")
    return field is not None and bool(field.type == field.TYPE_STRING)


class Refused(Exception):
    """Arguments of `abort`."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status
        info = error_details_pb2.ErrorInfo()
        status.details[0].Unpack(info)
        self.reason = info.reason


class Edge:
    """Stand-in for a call on the network. Reading a stream after its last frame waits for ever,
    as for a client that is silent, unless the client half-closes."""

    def __init__(self, frames: Sequence[bytes] = (), *, half_closes: bool = True) -> None:
        self.written: list[bytes] = []
        self._frames = list(frames)
        self._half_closes = half_closes
        self._over: list[Callable[[Any], None]] = []

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if self._frames:
            return self._frames.pop(0)
        if not self._half_closes:
            await asyncio.get_running_loop().create_future()
        return END_OF_STREAM

    async def write(self, raw: bytes) -> None:
        await asyncio.sleep(0.001)
        self.written.append(raw)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        await asyncio.sleep(0)
        raise Refused(status_pb2.Status.FromString(trailing_metadata[0][1]))

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._over.append(callback)

    def end(self) -> None:
        """The call is over, its answer sent."""
        for callback in self._over:
            callback(self)


@dataclass
class World:
    """A broker and its services."""

    node: Node
    handlers: dict[str, Any]
    roots: tuple[object, ...]
    inbox: Inbox
    pending: list[Position]
    dead: list[Position]
    backup: str = ""
    lease: Lease | None = None

    async def call(self, name: str, requests: Sequence[bytes]) -> list[bytes]:
        """Call a method to its end; raises Refused."""
        handler = self.handlers[name]
        if handler.unary_unary is not None:
            edge = Edge()
            try:
                return [await handler.unary_unary(requests[0], edge)]
            finally:
                edge.end()
        edge = Edge(requests)
        await handler.stream_stream(None, edge)
        return edge.written


async def make_world(clock: SimClock, ownership: Ownership | None = None, **changes: Any) -> World:
    """Ledgers that can be compacted, pending messages with keys, messages that are out, dead letters and a backup."""
    settings = {
        "compaction_cleanup_ms": 10_000,
        "clock_recheck_ms": 20_000,
        "lease_ms": LATER_MS,
        "lease_ms_max": LATER_MS,
    }
    node = Node(MemVfs(), clock, config(**settings, **changes), ownership=ownership).open()
    cluster = admin.OwnedCluster(lambda: VIEW, HandOver(node.broker, lambda: VIEW, lambda to: None))
    services: dict[str, Any] = {
        "ProducerService": producer.ProducerService(node.broker),
        "ConsumerService": consumer.ConsumerService(node.broker),
        "ScheduleService": schedule.ScheduleService(node.broker),
        "AdminService": admin.AdminService(node.broker, "0", cluster),
        "CompactionService": compaction.CompactionService(node.broker),
    }
    handlers = {
        f"{service}.{method}": handler
        for service, each in services.items()
        for method, handler in each.handlers().items()
    }
    pending, _, inbox = await fill(node, 2)
    inbox.detach()
    await node.create_subscription(TOPIC, "letters", policy=SubscriptionPolicy(max_delivery_attempts=1))
    letters = await node.subscribe(TOPIC, "letters")
    await node.produce(TOPIC, [Outgoing(b"dead") for _ in range(3)])
    dead = [each.position for each in await letters.wait(3)]
    await letters.nack(dead)
    letters.detach()
    keyed = [Outgoing(b"keyed", deliver_after_ms=LATER_MS, schedule_key=f"k{i}") for i in range(3)]
    pending = await node.produce(TOPIC, keyed)
    inbox = await node.subscribe(TOPIC, "billing")
    await inbox.wait(3)  # what died of the other subscription; nobody acknowledges it here
    await node.broker.registry.topic_or_create("empty")
    daily = Definition(RecurringRule(interval_ms=24 * LATER_MS), b"")
    await node.broker.recurring.put(node.topic(TOPIC), "daily", daily)
    await node.broker.bulk_changes.begin(node.topic(TOPIC), BulkDefinition(BulkKind.SHIFT, 1, begin_ms=1))
    await asyncio.sleep(1)
    world = World(node, handlers, (node.broker, *services.values()), inbox, pending, dead)
    world.backup = (await node.broker.backups.create("old")).name
    await node.checkpoint()
    return world


# -- a request for every method --------------------------------------------------------------------------------------

Make = Callable[[World], Awaitable[list[Any]]]


@dataclass(frozen=True)
class Case:
    """Call of a method, and the refusals that a repeat may get because the work was done."""

    make: Make
    repeats: frozenset[str] = frozenset()
    is_undone: bool = False
    """One that was cancelled has done nothing."""


CASES: dict[str, Case] = {}


def case(name: str, *repeats: str, is_undone: bool = False) -> Callable[[Make], Make]:
    def note(make: Make) -> Make:
        CASES[name] = Case(make, frozenset(repeats), is_undone)
        return make

    return note


def plain(name: str, request: Any, *repeats: str) -> None:
    """A method whose request needs nothing of the world."""

    async def make(_: World) -> list[Any]:
        return [deepcopy(request)]  # a test may change what it gets

    CASES[name] = Case(make, frozenset(repeats))


def entries(positions: Sequence[Position]) -> list[message_pb2.EntrySet]:
    return [message_pb2.EntrySet(ledger_id=p.ledger_id, entry_ids=[p.entry_id]) for p in positions]


BATCH = producer_pb2.ProduceRequest(
    topic="fresh",
    request_id=1,
    producer_name="p",
    messages=[message_pb2.Message(payload=b"x", sequence_id=1, schedule_key="k", deliver_after_ms=LATER_MS)],
)
NAMED: dict[str, Any] = {"topic": TOPIC, "subscription": "billing"}
plain("ProducerService.Produce", BATCH)


@case("ProducerService.ProduceStream")
async def _(_: World) -> list[Any]:
    """Three batches, of which the second and the third are answered in one message."""
    requests = [deepcopy(BATCH) for _ in range(3)]
    for number, request in enumerate(requests, 1):
        request.request_id, request.join_answers = number, True
        request.messages[0].sequence_id, request.messages[0].schedule_key = number, f"k{number}"
    return requests


plain("ConsumerService.Receive", consumer_pb2.ReceiveRequest(topic=TOPIC, subscription="new", wait_ms=500))
plain("ConsumerService.ListOwed", consumer_pb2.ListOwedRequest(**NAMED))
plain("ScheduleService.ListScheduled", schedule_pb2.ListScheduledRequest(topic=TOPIC))
plain("ScheduleService.CountScheduled", schedule_pb2.CountScheduledRequest(topics=[TOPIC]))
plain("ScheduleService.GetScheduled", schedule_pb2.GetScheduledRequest(topic=TOPIC, schedule_key="k0"))
KEYS = schedule_pb2.Selector(schedule_keys=["k0", "k1"])
plain("ScheduleService.CancelScheduled", schedule_pb2.CancelScheduledRequest(topic=TOPIC, selector=KEYS))
plain(
    "ScheduleService.Reschedule",
    schedule_pb2.RescheduleRequest(topic=TOPIC, selector=KEYS, deliver_after_ms=LATER_MS),
)
plain(
    "ScheduleService.StartBulkChange",
    schedule_pb2.StartBulkChangeRequest(topic=TOPIC, deliver_after_ms=LATER_MS),
)
plain("ScheduleService.GetBulkChange", schedule_pb2.GetBulkChangeRequest(topic=TOPIC, id=1))
plain("ScheduleService.ListBulkChanges", schedule_pb2.ListBulkChangesRequest(topic=TOPIC))
plain("ScheduleService.CancelBulkChange", schedule_pb2.CancelBulkChangeRequest(topic=TOPIC, id=1))
REPORTS = schedule_pb2.RecurringSchedule(
    name="new", interval_ms=24 * LATER_MS, message=message_pb2.Message(payload=b"x")
)
plain("ScheduleService.PutRecurring", schedule_pb2.PutRecurringRequest(topic=TOPIC, schedule=REPORTS))
plain("ScheduleService.ListRecurring", schedule_pb2.ListRecurringRequest(topic=TOPIC))
plain("ScheduleService.PreviewRecurring", schedule_pb2.PreviewRecurringRequest(topic=TOPIC, schedule=REPORTS))
DAILY: dict[str, Any] = {"topic": TOPIC, "name": "daily"}
plain("ScheduleService.GetRecurring", schedule_pb2.GetRecurringRequest(**DAILY))
plain("ScheduleService.DeleteRecurring", schedule_pb2.DeleteRecurringRequest(**DAILY), "RECURRING_NOT_FOUND")
plain("ScheduleService.PauseRecurring", schedule_pb2.PauseRecurringRequest(paused=True, **DAILY))
plain("ScheduleService.TriggerRecurring", schedule_pb2.TriggerRecurringRequest(**DAILY))
plain(
    "ScheduleService.BackfillRecurring", schedule_pb2.BackfillRecurringRequest(start_ms=1, end_ms=2, **DAILY)
)
plain("AdminService.CreateTopic", admin_pb2.CreateTopicRequest(name="new"), "TOPIC_ALREADY_EXISTS")
plain("AdminService.GetTopic", admin_pb2.GetTopicRequest(name=TOPIC))
plain(
    "AdminService.UpdateTopic",
    admin_pb2.UpdateTopicRequest(name=TOPIC, update_mask={"paths": ["max_delay_ms"]}),
)
plain("AdminService.DeleteTopic", admin_pb2.DeleteTopicRequest(name="empty"), "TOPIC_NOT_FOUND")
plain("AdminService.ListTopics", admin_pb2.ListTopicsRequest())
plain(
    "AdminService.CreateSubscription",
    admin_pb2.CreateSubscriptionRequest(topic="fresh", name="s"),
    "SUBSCRIPTION_ALREADY_EXISTS",
)
plain("AdminService.GetSubscription", admin_pb2.GetSubscriptionRequest(topic=TOPIC, name="billing"))
plain(
    "AdminService.UpdateSubscription",
    admin_pb2.UpdateSubscriptionRequest(topic=TOPIC, name="billing", update_mask={"paths": ["lease_ms"]}),
)
plain(
    "AdminService.DeleteSubscription",
    admin_pb2.DeleteSubscriptionRequest(topic=TOPIC, name="billing"),
    "SUBSCRIPTION_NOT_FOUND",
)
plain("AdminService.ListSubscriptions", admin_pb2.ListSubscriptionsRequest(topic=TOPIC))
plain("AdminService.Seek", admin_pb2.SeekRequest(publish_time_ms=1, **NAMED))
plain("AdminService.SkipAll", admin_pb2.SkipAllRequest(**NAMED))
plain("AdminService.Pause", admin_pb2.PauseRequest(**NAMED))
plain("AdminService.Resume", admin_pb2.ResumeRequest(**NAMED))
plain("AdminService.ListDeadLetters", admin_pb2.ListDeadLettersRequest(topic=TOPIC, subscription="letters"))
plain(
    "AdminService.RequeueDeadLetters",
    admin_pb2.RequeueDeadLettersRequest(topic=TOPIC, subscription="letters", all=True),
)
plain(
    "AdminService.PurgeDeadLetters",
    admin_pb2.PurgeDeadLettersRequest(topic=TOPIC, subscription="letters", all=True),
)
plain("AdminService.GetStats", admin_pb2.GetStatsRequest())
plain("AdminService.VerifyTopic", admin_pb2.VerifyTopicRequest(name=TOPIC))
plain("AdminService.GetServerInfo", admin_pb2.GetServerInfoRequest())
plain("AdminService.GetCluster", admin_pb2.GetClusterRequest())
plain("AdminService.MoveShard", admin_pb2.MoveShardRequest(to="a"))
plain("AdminService.CreateBackup", admin_pb2.CreateBackupRequest(label="x"))
plain("AdminService.ListBackups", admin_pb2.ListBackupsRequest())
plain("CompactionService.ListCompactions", compaction_pb2.ListCompactionsRequest())


@case("ConsumerService.Subscribe")
async def _(world: World) -> list[Any]:
    first, second, third = (entries([each]) for each in world.dead)
    await world.node.create_subscription(TOPIC, "early", position=EARLIEST)
    return [
        consumer_pb2.SubscribeRequest(
            open=consumer_pb2.Open(
                topic=TOPIC, subscription="early", permits=consumer_pb2.Permits(messages=10)
            )
        ),
        consumer_pb2.SubscribeRequest(ack=consumer_pb2.Ack(request_id=1, entries=first)),
        consumer_pb2.SubscribeRequest(nack=consumer_pb2.Nack(request_id=2, entries=second)),
        consumer_pb2.SubscribeRequest(extend=consumer_pb2.Extend(request_id=3, entries=third)),
    ]


@case("ConsumerService.Acknowledge")
async def _(world: World) -> list[Any]:
    return [consumer_pb2.AcknowledgeRequest(entries=entries(world.dead), **NAMED)]


@case("ConsumerService.Nack")
async def _(world: World) -> list[Any]:
    return [
        consumer_pb2.NackRequest(
            entries=entries(world.dead),
            consumer_id=world.inbox.consumer.consumer_id,
            redeliver_after_ms=LATER_MS,
            **NAMED,
        )
    ]


@case("ConsumerService.ExtendLease")
async def _(world: World) -> list[Any]:
    return [
        consumer_pb2.ExtendLeaseRequest(
            entries=entries(world.dead),
            consumer_id=world.inbox.consumer.consumer_id,
            lease_ms=LATER_MS,
            **NAMED,
        )
    ]


@case("AdminService.DeleteBackup", "BACKUP_NOT_FOUND")
async def _(world: World) -> list[Any]:
    return [admin_pb2.DeleteBackupRequest(name=world.backup)]


@case("CompactionService.BeginCompaction", "COMPACTION_RUNNING", is_undone=True)
async def _(world: World) -> list[Any]:
    return [compaction_pb2.BeginCompactionRequest(topic=TOPIC, ledger_ids=await ledger_ids(world.node))]


async def _leased(world: World) -> Lease:
    world.lease = await world.node.broker.compactions.begin(TOPIC, await ledger_ids(world.node), ())
    return world.lease


@case("CompactionService.AbortCompaction", "COMPACTION_NOT_FOUND")
async def _(world: World) -> list[Any]:
    lease = await _leased(world)
    return [compaction_pb2.AbortCompactionRequest(compaction_id=lease.compaction_id, epoch=lease.epoch)]


@case("CompactionService.CommitCompaction")
async def _(world: World) -> list[Any]:
    lease = await _leased(world)
    data_dir = world.node.config.data_dir
    outputs = await rewrite(world.node.vfs, data_dir, f"{data_dir}/{lease.folder}")
    return [
        compaction_pb2.CommitCompactionRequest(
            compaction_id=lease.compaction_id,
            epoch=lease.epoch,
            ledgers=[
                {
                    "ledger_id": each.ledger_id,
                    "data_bytes": each.data_bytes,
                    "present_count": each.present_count,
                    "present_bytes": each.present_bytes,
                }
                for each in outputs.ledgers
            ],
        )
    ]
