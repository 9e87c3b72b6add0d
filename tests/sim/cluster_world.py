"""Three whole brokers of a shard, on one loop: processes, disks and clocks of their own, one store that delays and
loses, and clients whose histories are judged as they come. Of several shards each is a world of its own on machines and a
store that all share (`Machines`): what becomes of a machine becomes of its processes of all shards.

Each node seeds itself, follows, takes over, makes bases and serves, as `broker/node` does, through the handlers of the
API. Meanwhile processes are frozen and woken, killed, and stopped in good order; disks lose what was not synced, or
everything; clocks are skewed and stepped; nodes are cut off, and the log is trimmed. No two nodes have the same
settings. What leaves a node is judged at the moment when it is given to the network, and the state of each node at each
lsn is that of the others (`shard_states.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, cast

from google.rpc import status_pb2

from broker.cluster.base_store import BaseStore
from broker.cluster.creation import encode_first
from broker.cluster.follower import CutOff, TakenOver
from broker.cluster.group_head import Shard, blank
from broker.cluster.group_objects import entry_name
from broker.cluster.shard_store import ShardStore
from broker.errors import Fenced
from broker.model import Position
from broker.node.placement import rank_nodes
from broker.node.shard_bases import ShardBases, needs_seed
from broker.rpc import admin, consumer, producer, schedule
from broker.rpc.calls import END_OF_STREAM
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_store import SimBucket, SimStore
from broker.topic_shards import TopicShard, shard_of
from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2, producer_pb2, schedule_pb2
from tests.crash.history import Model, observe
from tests.depth import at_depth
from tests.harness import DATA_DIR, Node, small_config
from tests.reference import Message
from tests.sim.processes import Process, ProcessLoop
from tests.sim.shard_brokers import SHARD, LeaseSimClock, ShardBroker, make_bucket
from tests.sim.shard_states import ShardStates
from tests.unit.rpc.call_world import Edge, Refused

NAMES = "abc"
SUBSCRIPTION = "all"
DAY_MS = 86_400_000
ANSWER_SECONDS = 4.0
CONFIGS = [
    small_config(
        heartbeat_ms=1_000,
        lease_ms=5_000,
        journal_group_bytes_max=1 << 16,
        reclaim_interval_ms=3_000,
        **changes,
    )
    for changes in (
        {"ledger_max_entries": 12, "min_index_count": 20, "max_segment_entries": 10},
        {"ledger_max_entries": 9, "min_index_count": 9, "initial_backoff_ms": 300},
        {"ledger_max_entries": 15, "checkpoint_interval_ms": 7_000, "max_buckets": 3},
    )
]
"""One a node: what nodes decide may differ with them, and nothing else (CLUSTER-15)."""
BASE_INTERVAL_MS = 8_000
SETTLE_SECONDS = 25
STATE_EVERY = at_depth(change=16, deep=1)
"""Of so many lsns the state of one is compared."""
STATE_LOOKS = 5
LATE_SECONDS = 20
"""Within this time what was produced last is delivered, also if a consumer held it that left."""


class NodeClock(LeaseSimClock):
    """Clocks of one machine: one runs a little fast or slow, the wall clock is a little off and may be stepped."""

    def __init__(self, loop: ProcessLoop, rng: random.Random) -> None:
        super().__init__(loop)
        self._loop = loop
        self._rate = 1 + rng.uniform(-0.01, 0.01)
        self.peak_ms = 0
        """The latest time that anybody has read."""
        self.step(rng.randint(-200, 200))

    def monotonic_ns(self) -> int:
        return int(self._loop.now_us() * 1000 * self._rate)

    def now_ms(self) -> int:
        now_ms = super().now_ms()
        self.peak_ms = max(self.peak_ms, now_ms)
        return now_ms


@dataclass(eq=False)
class Sent:
    """One message, as its producer and its consumers know it. Times are of the loop."""

    number: int
    delay_ms: int
    position: Position | None = None
    answered: float | None = None
    cancel_asked: float | None = None
    cancel_asks: int = 0
    cancelled: float | None = None
    ack_asked: bool = False
    acknowledged: float | None = None
    delivered_count: int = 0
    positions: set[Position] = field(default_factory=set)

    @property
    def may_be_settled(self) -> bool:
        """Return whether something that was asked, apart from the last cancel, may have settled it."""
        return self.ack_asked or self.cancel_asks > 1

    @property
    def is_far(self) -> bool:
        return self.delay_ms >= DAY_MS


class WorldEdge(Edge):
    """A call on the network; what it is given is judged at once."""

    def __init__(self, world: ClusterWorld, node: ClusterNode) -> None:
        super().__init__()
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self._world = world
        self._node = node

    async def read(self) -> Any:
        return await self.requests.get()

    async def write(self, raw: bytes) -> None:
        self._world.note_frame(self._node, self, raw)
        await asyncio.sleep(0.002)

    async def abort(self, code: Any, details: str, trailing_metadata: Any) -> None:
        raise Refused(status_pb2.Status.FromString(trailing_metadata[0][1]))


class ClusterNode:
    """A machine: its processes come and go, its disk stays unless it is lost."""

    def __init__(self, world: ClusterWorld, name: str) -> None:
        self.name = name
        self.rank = world.ranks.index(name)
        self.world = world
        self.clock = world.machines.clocks[name]
        self.store = SimStore(world.bucket)
        self.vfs = MemVfs()
        self.process = Process(world.loop)
        self.broker: ShardBroker | None = None
        self.handlers: dict[str, Any] = {}
        self.resigns_to: str | None = None
        self._lives = 0
        self._is_cut_off = False

    @property
    def durable_lsn(self) -> int:
        """The last lsn that is applied; 0 while its folder is being opened."""
        broker = self.broker.node.broker if self.broker is not None else None
        return 0 if broker is None or broker.not_ready_because == "recovering" else broker.journal.durable_lsn

    @property
    def serves(self) -> bool:
        return bool(self.handlers)

    def start(self) -> None:
        self._lives += 1
        self.process = Process(self.world.loop)
        self.handlers = {}
        task = self.process.start(self._run())
        task.add_done_callback(self.world.note_end)

    def kill(self, policy: CrashPolicy | None) -> None:
        """End the process at once; the disk keeps what a policy says, or (None) is lost."""
        if self.process.is_dead:
            return
        self.process.kill()
        self.handlers = {}
        # What the dead process has sent goes its way, and it sends no more.
        if policy is None:
            self.vfs = MemVfs()
        else:
            self.vfs = self.vfs.crashed(self.vfs.op_count, policy, self.world.rng)
        # By its supervisor, which lives on when it ends by itself.
        self.world.loop.call_later(self.world.rng.uniform(0.1, 3), self.start, context=Context())

    def freeze(self, seconds: float) -> None:
        """Have the process do nothing for so long."""
        process = self.process
        process.freeze()
        self.world.loop.call_later(seconds, process.wake)

    async def _run(self) -> None:
        """One process, from its start to its end; then the next one, as a supervisor would have it."""
        try:
            await self._live()
        except OSError:  # of the store: the log cannot be read now
            self.world.count["given up"] += 1
        except Fenced:  # between the take-over and the opening of the folder
            self.world.count["fenced"] += 1
        except CutOff:
            self.world.count["cut off by a trim"] += 1
            self._is_cut_off = True
        self.handlers = {}
        self.kill(CrashPolicy.KEEP_ALL)

    async def _live(self) -> None:
        world = self.world
        shard = world.shard.number
        threads = [cast("Executor", f"{self.name}{shard} {self._lives} {number}") for number in range(5)]
        bases = self._bases()
        await self._seed(bases)
        broker = self.broker = ShardBroker(
            world.bucket,
            world.loop,
            self.name,
            self.vfs,
            replace(CONFIGS[NAMES.index(self.name)], topic_shard=TopicShard(shard, world.shard.shards)),
            store=self.store,
            clock=self.clock,
            executors=threads,
            bases=bases,
            shard=world.shard,
            watch=world.states.watch,
        )
        following = await broker.follow(self.rank)
        self._keep(bases, broker, patience=1 + self.rank / 4)
        world.note_taken(self, await following)
        await self._wait_ceiling(broker)
        node = await broker.own()
        self._keep(bases, broker, patience=2)
        services = {
            "Producer": producer.ProducerService(node.broker),
            "Consumer": consumer.ConsumerService(node.broker),
            "Schedule": schedule.ScheduleService(node.broker),
            "Admin": admin.AdminService(node.broker, "0"),
        }
        self.handlers = {
            name: handler for service in services.values() for name, handler in service.handlers().items()
        }
        self.resigns_to = None
        while not node.failures and self.resigns_to is None:
            await asyncio.sleep(0.05)
        self.handlers = {}
        if self.resigns_to is not None:
            world.count["resigned"] += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30):
                    await broker.stop(resigns_to=self.resigns_to)
        else:
            assert isinstance(node.failures[0].__cause__, Fenced), node.failures
            world.count["fenced"] += 1

    def _bases(self) -> ShardBases:
        shard = self.world.shard
        store = BaseStore(ShardStore(self.store, shard.number), self.clock)
        return ShardBases(store, shard, self.vfs, self.clock, self.name, interval_ms=BASE_INTERVAL_MS)

    def _keep(self, bases: ShardBases, broker: ShardBroker, *, patience: float) -> None:
        work = bases.keep(broker.node.broker, broker.log, patience=patience)
        broker.node.broker.supervisor.spawn_lasting("bases", work)

    async def _seed(self, bases: ShardBases) -> None:
        if self._is_cut_off or needs_seed(self.vfs, DATA_DIR):
            is_seeded = await bases.seed(DATA_DIR)
            self.world.count["seeded"] += is_seeded
            if self._is_cut_off and not is_seeded:
                self.world.fail(f"{self.name} is behind what was trimmed, and there is no base")
            self._is_cut_off = False

    async def _wait_ceiling(self, broker: ShardBroker) -> None:
        until = self.world.loop.time() + 5
        while self.clock.now_ms() <= broker.taken.until_ms and self.world.loop.time() < until:
            await asyncio.sleep(0.2)
            await broker.log.append(broker.log.next_index, blank())

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, name: str, request: Any) -> asyncio.Task[Any]:
        """Begin a unary call; its answer is None where it was refused."""
        return self.process.start(self._call(name, request, self.handlers[name]))

    async def _call(self, name: str, request: Any, handler: Any) -> Any:
        edge = WorldEdge(self.world, self)
        try:
            raw = await handler.unary_unary(request.SerializeToString(), edge)
        except Refused as refused:
            self.world.note_refusal(name, refused, stopped=self.handlers.get(name) is not handler)
            return None
        finally:
            edge.end()
        answer = ANSWERS[name].FromString(raw)
        self.world.note_answer(self, name, request, answer)
        return answer

    def subscribe(self, edge: WorldEdge) -> asyncio.Task[None]:
        return self.process.start(self._subscribe(edge, self.handlers["Subscribe"]))

    async def _subscribe(self, edge: WorldEdge, handler: Any) -> None:
        with contextlib.suppress(Refused):
            await handler.stream_stream(None, edge)


ANSWERS: dict[str, Any] = {
    "Produce": producer_pb2.ProduceResponse,
    "CancelScheduled": schedule_pb2.CancelScheduledResponse,
    "CountScheduled": schedule_pb2.CountScheduledResponse,
    "GetScheduled": schedule_pb2.GetScheduledResponse,
    "Acknowledge": consumer_pb2.AcknowledgeResponse,
    "CreateSubscription": admin_pb2.CreateSubscriptionResponse,
}


class Machines:
    """Store and clocks of machines, which all shards share, and the trouble of whole machines."""

    def __init__(self, loop: ProcessLoop, seed: int, shards: int = 1) -> None:
        self.loop = loop
        self.rng = random.Random(f"{seed}/machines")
        self.bucket: SimBucket = make_bucket(seed)
        self.clocks = {name: NodeClock(loop, self.rng) for name in NAMES}
        self.worlds: list[ClusterWorld] = []
        for number in range(shards):
            shard = Shard(SHARD.cluster, number, shards)
            self.bucket.objects[entry_name(number, 1)] = encode_first(shard)
            self.worlds.append(ClusterWorld(self, f"{seed}/{number}", shard))

    @property
    def errors(self) -> list[str]:
        return [f"shard {world.shard.number}: {error}" for world in self.worlds for error in world.errors]

    @property
    def count(self) -> Counter[str]:
        return sum((world.count for world in self.worlds), Counter())

    async def run(self, seconds: float) -> None:
        """All worlds at the same time; with several shards machines are in trouble besides."""
        async with asyncio.TaskGroup() as group:
            for world in self.worlds:
                group.create_task(world.run(seconds))
            if len(self.worlds) > 1:
                group.create_task(self._trouble(seconds))

    async def _trouble(self, seconds: float) -> None:
        end = self.loop.time() + seconds
        while (left := end - self.loop.time()) > 0 and not self.errors:
            name, rng = self.rng.choice(NAMES), self.rng
            nodes = [node for world in self.worlds for node in world.nodes if node.name == name]
            kind = rng.choice(["killed", "lost disk", "frozen", "cut off"])
            policy, seconds_frozen = rng.choice(list(CrashPolicy)[:3]), rng.uniform(0.5, 15)
            for node in nodes:
                node.world.count_trouble(f"machine {kind}", node)
                match kind:
                    case "killed":
                        node.kill(policy)
                    case "lost disk":
                        node.kill(None)
                    case "frozen":
                        node.freeze(seconds_frozen)
                    case _:
                        node.store.is_cut = True
            await asyncio.sleep(min(left, rng.uniform(5, 20)))


class ClusterWorld:
    """Nodes of a shard, clients and what was promised to them."""

    def __init__(self, machines: Machines, seed: str, shard: Shard) -> None:
        self.machines = machines
        self.shard = shard
        names = (f"orders{number}" for number in itertools.count())
        self.topic = next(name for name in names if shard_of(name, shard.shards) == shard.number)
        self.ranks = rank_nodes(shard, NAMES)
        self.loop = machines.loop
        self.rng = random.Random(f"{seed}/world")
        self.bucket = machines.bucket
        self.count: Counter[str] = Counter()
        self.errors: list[str] = []
        self.sent: dict[int, Sent] = {}
        self.by_position: dict[Position, Sent] = {}
        self.nodes = [ClusterNode(self, name) for name in NAMES]
        self.states = ShardStates(self.fail, STATE_EVERY)
        self._bounds: dict[int, _Bounds] = {}  # of counts under way, by request
        self._acks: dict[tuple[int, int], list[Sent]] = {}  # by edge and request
        self._taken: list[TakenOver] = []
        self._is_ending = False

    def fail(self, what: str) -> None:
        self.errors.append(f"{self.loop.time():.3f} {what}")

    # -- the run -----------------------------------------------------------------------------------------------------

    async def run(self, seconds: float) -> None:
        """Trouble for so long, then peace; then everything must be there, the same everywhere."""
        for node in self.nodes:
            node.start()
        await self._create()
        asking = [asyncio.create_task(work) for work in (self._produce(0), self._produce(1), self._cancel())]
        others = [
            asyncio.create_task(work)
            for work in (
                self._look(),
                self._consume(),
                self._consume(),
            )
        ]
        end = self.loop.time() + seconds
        while self.loop.time() < end and not self.errors:
            self._trouble()
            await asyncio.sleep(self.rng.uniform(0.5, 6))
        self._heal()
        await asyncio.sleep(SETTLE_SECONDS)
        await _end(asking)
        await asyncio.sleep(LATE_SECONDS)
        self._is_ending = True
        await _end(others)
        self.count["states compared"] = self.states.compared
        self.count["dropped ledgers"] = self._count_dropped()
        self.count["bases"] = sum("/bases/" in name for name in self.bucket.objects)
        if not self.errors:
            await self._check_end()

    def note_end(self, task: asyncio.Task[None]) -> None:
        """The main task of a process has ended, and did not merely die with it."""
        if not (self.loop.is_over or task.cancelled()) and (error := task.exception()) is not None:
            self.fail(f"a node failed: {error!r}")

    def note_taken(self, node: ClusterNode, taken: TakenOver) -> None:
        """A node owns the shard, in a greater epoch than all before it (CLUSTER-3)."""
        self.count["take-overs"] += 1
        for other in self._taken:
            if (other.epoch < taken.epoch) != (other.at_index < taken.at_index):
                self.fail(f"{node.name} owns the shard at {taken.at_index}, as {other} was before")
        self._taken.append(taken)

    async def _create(self) -> None:
        request = admin_pb2.CreateSubscriptionRequest(topic=self.topic, name=SUBSCRIPTION, initial_position=2)
        while await self._ask("CreateSubscription", request) is None:
            if self.count["SUBSCRIPTION_ALREADY_EXISTS"]:  # the answer to an earlier request was lost
                return
            await asyncio.sleep(0.5)

    def _trouble(self) -> None:
        node, rng = self.rng.choice(self.nodes), self.rng
        serving = [each for each in self.nodes if each.serves]
        if serving and rng.random() < 0.6:  # it matters most there
            node = rng.choice(serving)
        match rng.randrange(9):
            case 0:
                self.count_trouble("killed", node)
                node.kill(rng.choice([CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.TORN]))
            case 1 if rng.random() < 0.5:
                self.count_trouble("lost disk", node)
                node.kill(None)
            case 2 | 3:
                self.count_trouble("frozen", node)
                node.freeze(rng.uniform(0.5, 15))
            case 4:
                self.count_trouble("cut off", node)
                node.store.is_cut = not node.store.is_cut
            case 5:
                self.bucket.is_sound = not self.bucket.is_sound
            case 6:
                self.count_trouble("clock stepped", node)
                node.clock.step(rng.choice([-3_000, -500, 500, 3_000]))
            case 7 if node.serves and rng.random() < 0.5:
                node.resigns_to = rng.choice(NAMES)
            case _:
                for other in self.nodes:
                    other.store.is_cut = False

    def count_trouble(self, kind: str, node: ClusterNode) -> None:
        self.count[kind] += 1
        self.count[f"{kind}, owner"] += node.serves

    def _heal(self) -> None:
        self.bucket.is_sound = True
        for node in self.nodes:
            node.store.is_cut = False
            node.process.wake()

    # -- clients -----------------------------------------------------------------------------------------------------

    async def _ask(self, name: str, request: Any, *, of: ClusterNode | None = None) -> Any:
        """Call a method of a node that serves, or takes itself for one that does; None for no answer in time."""
        serving = [node for node in self.nodes if node.serves]
        node = of or (self.rng.choice(serving) if serving else None)
        if node is None or not node.serves:
            await asyncio.sleep(0.2)
            return None
        call = node.call(name, request)
        await asyncio.wait({call}, timeout=ANSWER_SECONDS)
        return call.result() if call.done() and not call.cancelled() else None

    async def _produce(self, client: int) -> None:
        """One batch after another, each until it is answered, with the same sequence ids."""
        number = client
        while True:
            batch = []
            for _ in range(self.rng.randint(1, 3)):
                number += 2
                # Far ones come together, so that there are ledgers without them, which are reclaimed.
                longest_ms = DAY_MS if number % 60 < 20 else 1_000
                delay_ms = self.rng.choice([0, 0, self.rng.randint(1, 6_000), longest_ms])
                batch.append(Sent(number, delay_ms))
                self.sent[number] = batch[-1]
            request = producer_pb2.ProduceRequest(
                topic=self.topic,
                producer_name=f"p{client}",
                messages=[
                    message_pb2.Message(
                        payload=b"%d" % each.number, sequence_id=each.number, deliver_after_ms=each.delay_ms
                    )
                    for each in batch
                ],
            )
            while await self._ask("Produce", request) is None:
                await asyncio.sleep(0.2)
            if self.rng.random() < 0.3:
                await self._ask("Produce", request)  # a repeat, whose first answer was lost
            await asyncio.sleep(self.rng.expovariate(1.5))

    async def _cancel(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1))
            known = [each for each in list(self.sent.values())[-60:] if each.position is not None]
            chosen = self.rng.sample(known, min(len(known), self.rng.randint(1, 3)))
            if not chosen:
                continue
            for each in chosen:
                each.cancel_asked = each.cancel_asked or self.loop.time()
                each.cancel_asks += 1
            selector = schedule_pb2.Selector(entries=_sets(chosen))
            await self._ask(
                "CancelScheduled", schedule_pb2.CancelScheduledRequest(topic=self.topic, selector=selector)
            )

    async def _look(self) -> None:
        """Ask what is pending: the far ones that were answered, and no cancelled one."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1.5))
            far = [each for each in self.sent.values() if each.is_far]
            least = sum(each.answered is not None and each.cancel_asked is None for each in far)
            gone = sum(each.cancelled is not None for each in far)
            bounds = _Bounds(least, gone)
            due = schedule_pb2.TimeRange(start_ms=self.nodes[0].clock.now_ms() + DAY_MS // 2)
            request = schedule_pb2.CountScheduledRequest(topics=[self.topic], due=due)
            self._bounds[id(request)] = bounds
            await self._ask("CountScheduled", request)
            del self._bounds[id(request)]

    async def _consume(self) -> None:
        """Streams, one after the other; most of what comes is acknowledged, a little later."""
        while True:
            serving = [node for node in self.nodes if node.serves]
            if not serving:
                await asyncio.sleep(0.2)
                continue
            node = self.rng.choice(serving)
            edge = WorldEdge(self, node)
            opening = consumer_pb2.SubscribeRequest()
            opening.open.topic, opening.open.subscription = self.topic, SUBSCRIPTION
            opening.open.permits.messages = 20
            edge.requests.put_nowait(opening.SerializeToString())
            stream = node.subscribe(edge)
            await asyncio.wait({stream}, timeout=self.rng.uniform(3, 20))
            if self.rng.random() < 0.5:
                edge.requests.put_nowait(END_OF_STREAM)
                await asyncio.wait({stream}, timeout=2)
            if not stream.done():
                stream.cancel()
            await asyncio.sleep(0.2)

    # -- what leaves a node ------------------------------------------------------------------------------------------

    def note_frame(self, node: ClusterNode, edge: WorldEdge, raw: bytes) -> None:
        """A frame was given to the stream of a consumer."""
        response = consumer_pb2.SubscribeResponse.FromString(raw)
        if response.HasField("batch"):
            for delivery in response.batch.deliveries:
                self._note_delivery(node, delivery)
            numbers = [self.sent[int(each.message.payload)] for each in response.batch.deliveries]
            self.loop.call_later(self.rng.uniform(0.01, 2), self._answer_batch, edge, numbers)
        elif response.HasField("confirmed"):
            acks = self._acks.pop((id(edge), response.confirmed.request_id), [])
            failed = {Position(each.id.ledger_id, each.id.entry_id) for each in response.confirmed.failures}
            for each in acks:
                assert each.position is not None
                if each.position in failed:
                    self.fail(f"{node.name} does not know {each.number}, which it has sent")
                elif each.acknowledged is None:
                    each.acknowledged = self.loop.time()

    def _note_delivery(self, node: ClusterNode, delivery: consumer_pb2.Delivery) -> None:
        sent = self.sent[int(delivery.message.payload)]
        self.count["delivered"] += 1
        sent.delivered_count += 1
        self._note_position(sent, Position(delivery.id.ledger_id, delivery.id.entry_id))
        # Without a delay this is when an owner took it, whose clock may be further ahead than the next one waits for.
        if sent.delay_ms and delivery.deliver_at_ms > node.clock.peak_ms:
            self.fail(f"{node.name} delivers {sent.number} early")
        if sent.cancelled is not None:
            self.fail(f"{node.name} delivers {sent.number}, cancelled at {sent.cancelled:.3f}")
        if sent.acknowledged is not None:
            self.fail(f"{node.name} delivers {sent.number}, acknowledged at {sent.acknowledged:.3f}")

    def _note_position(self, sent: Sent, position: Position) -> None:
        sent.positions.add(position)
        sent.position = position
        if len(sent.positions) > 1 or self.by_position.setdefault(position, sent) is not sent:
            self.fail(f"{sent.number} has the places {sent.positions}")

    def _answer_batch(self, edge: WorldEdge, batch: list[Sent]) -> None:
        """The consumer acknowledges some of a batch, and grants permits for all."""
        if self._is_ending:
            return
        chosen = [each for each in batch if self.rng.random() < 0.8]
        if chosen:
            for each in chosen:
                each.ack_asked = True
            self.count["acks"] += 1
            request_id = self.count["acks"]
            self._acks[id(edge), request_id] = chosen
            ack = consumer_pb2.Ack(request_id=request_id, entries=_sets(chosen))
            edge.requests.put_nowait(consumer_pb2.SubscribeRequest(ack=ack).SerializeToString())
        permits = consumer_pb2.Permits(messages=len(batch))
        edge.requests.put_nowait(consumer_pb2.SubscribeRequest(permits=permits).SerializeToString())

    def note_refusal(self, name: str, refused: Refused, *, stopped: bool) -> None:
        """A call was refused; `stopped`: by a node that has stopped serving since the call began."""
        self.count[refused.reason] += 1
        if name == "GetScheduled" and refused.reason == "SCHEDULED_NOT_FOUND":
            return  # who asked judges it
        if stopped and refused.reason == "INDEX_NOT_BUILT":
            return  # the index is fed no more, and the call has waited for it
        if refused.reason not in (
            "ENGINE_UNREACHABLE",
            "STORAGE_FAILED",
            "DRAINING",
            "UNAVAILABLE",  # of a node that has drained
            "SUBSCRIPTION_ALREADY_EXISTS",
        ):
            self.fail(f"{name} is refused: {refused}")

    def note_answer(self, node: ClusterNode, name: str, request: Any, answer: Any) -> None:
        self.count[f"{name} answered"] += 1
        match name:
            case "Produce":
                self._note_produced(request, answer)
            case "CancelScheduled":
                self._note_cancelled(node, request, answer)
            case "CountScheduled":
                self._note_counted(node, request, answer)

    def _note_produced(
        self, request: producer_pb2.ProduceRequest, answer: producer_pb2.ProduceResponse
    ) -> None:
        positions = [
            Position(ids.ledger_id, ids.first_entry_id + index)
            for ids in answer.ids
            for index in range(ids.count)
        ]
        for message, position in zip(request.messages, positions, strict=True):
            sent = self.sent[int(message.payload)]
            sent.answered = sent.answered or self.loop.time()
            self._note_position(sent, position)

    def _note_cancelled(
        self, node: ClusterNode, request: Any, answer: schedule_pb2.CancelScheduledResponse
    ) -> None:
        for outcome in answer.outcomes:
            sent = self.by_position[Position(outcome.id.ledger_id, outcome.id.entry_id)]
            match outcome.result:
                case schedule_pb2.CHANGE_RESULT_DONE:
                    self.count["cancelled"] += 1
                    if sent.acknowledged is not None or sent.cancelled is not None:
                        self.fail(f"{node.name} cancels {sent.number}, which is settled")
                    sent.cancelled = self.loop.time()
                case schedule_pb2.CHANGE_RESULT_NOT_FOUND if sent.delay_ms and not sent.may_be_settled:
                    self.fail(f"{node.name} does not find {sent.number}")
                case schedule_pb2.CHANGE_RESULT_ALREADY_DELIVERED if sent.is_far:
                    self.fail(f"{node.name} says that {sent.number} was delivered")
                case schedule_pb2.CHANGE_RESULT_ALREADY_CANCELLED if sent.delivered_count:
                    self.fail(f"{node.name} says that {sent.number} was cancelled")

    def _note_counted(
        self, node: ClusterNode, request: Any, answer: schedule_pb2.CountScheduledResponse
    ) -> None:
        bounds = self._bounds.get(id(request))
        if (
            bounds is None or not answer.exact
        ):  # who asked has given up, or what is stale is still being looked for
            return
        self.count["counted"] += 1
        pending = sum(each.messages for each in answer.buckets) + answer.after
        most = sum(each.is_far for each in self.sent.values()) - bounds.gone
        cancelled_since = sum(each.is_far and each.cancel_asked is not None for each in self.sent.values())
        if pending + cancelled_since < bounds.least or pending > most:
            self.fail(f"{node.name} counts {pending} pending, of {bounds.least} to {most}")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _count_dropped(self) -> int:
        """Return the ledgers that were reclaimed."""
        known = {position.ledger_id for position in self.by_position}
        kept = [
            {ledger.name.ledger_id for ledger in topic.log}
            for node in self.nodes
            if node.serves and node.broker is not None
            for topic in node.broker.node.broker.registry.topics.values()
        ]
        return len(known - kept[0]) if kept else 0

    async def _check_end(self) -> None:
        """All is well and quiet: nothing is missing, and every node has the same state."""
        serving = [node for node in self.nodes if node.serves]
        if not serving:
            self.fail("nobody serves, though all is well again")
            return
        owner = max(serving, key=lambda node: node.broker.log.epoch if node.broker is not None else 0)
        for sent in self.sent.values():
            if sent.answered is None or sent.cancel_asked is not None:
                continue
            if not sent.is_far and not sent.delivered_count:
                self.fail(f"{sent.number} is lost")
        far = [each for each in self.sent.values() if each.is_far and each.answered is not None]
        for sent in far:
            assert sent.position is not None
            request = schedule_pb2.GetScheduledRequest(topic=self.topic)
            request.id.ledger_id, request.id.entry_id = sent.position
            is_there = await self._ask("GetScheduled", request, of=owner) is not None
            if is_there and sent.cancelled is not None:
                self.fail(f"{sent.number} is pending and was cancelled")
            if not is_there and sent.cancel_asked is None:
                self.fail(f"{sent.number} is lost")
        await self._check_states(owner)

    async def _check_states(self, owner: ClusterNode) -> None:
        """Every node has the same state at the same lsn."""
        for _ in range(STATE_LOOKS):  # what leases and reclaim still decide has an end
            await asyncio.sleep(LATE_SECONDS)
            lsn = owner.durable_lsn
            if lsn and all(node.durable_lsn >= lsn for node in self.nodes):
                states = [
                    await _common_state(node.broker.node) for node in self.nodes if node.broker is not None
                ]
                if all(state == states[0] for state in states):
                    return
        self.fail(f"the nodes have states of their own, at {[node.durable_lsn for node in self.nodes]}")


@dataclass(frozen=True)
class _Bounds:
    """Pending far messages when a count was asked for."""

    least: int
    gone: int


async def _common_state(node: Node) -> Model:
    """Return the state that all nodes have. Of a cancelled message that is its place: each node rewrites its own files."""
    model = await observe(node)
    for topic in model.values():
        for position, message in topic.messages.items():
            if message.is_cancelled:
                topic.messages[position] = Message(position, b"", revision=message.revision, cancelled_ns=0)
    return model


async def _end(clients: Sequence[asyncio.Task[None]]) -> None:
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)
    for client in clients:
        if not client.cancelled():
            client.result()


def _sets(some: Sequence[Sent]) -> list[message_pb2.EntrySet]:
    sets = []
    for each in some:
        assert each.position is not None
        sets.append(
            message_pb2.EntrySet(ledger_id=each.position.ledger_id, entry_ids=[each.position.entry_id])
        )
    return sets
