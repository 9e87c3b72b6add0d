"""One seed: a broker, its clients and everything that can go wrong, on virtual time.

`run_seed` draws settings, a mix of actions and their order from the seed, checks the model all the while, and
ends without faults: time passes beyond everything, everything is acknowledged, and nothing may be missing (P3).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from broker.errors import (
    AlreadyExists,
    LimitReached,
    NotFound,
    StorageFailed,
    Unavailable,
)
from broker.policy import TopicPolicy
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_loop import Latency
from broker.topics.topic import Topic
from tests.configs import changed
from tests.harness import DAY_MS, EARLIEST, LATEST, Outgoing
from tests.reference import Violation, honors_delay, require
from tests.sim.endings import drain_everything, end_life, open_life
from tests.sim.model import Creation, Model, SubscriptionModel, TopicModel
from tests.sim.pacing import SHARE, change_pace, random_pace
from tests.sim.probe import Probe
from tests.sim.reclaim import note_ledgers
from tests.sim.settings import (
    SLOW,
    random_config,
    random_latency,
    random_subscription_policy,
    random_topic_policy,
)
from tests.sim.traffic import (
    MOMENT_MS,
    Payloads,
    SimConsumer,
    ack_unknown,
    calm_habits,
    identity,
    produce,
    random_habits,
    random_messages,
)
from tests.sim.world import Life, World

STEPS = 100
_CALM_SHARE = 0.15
TOPICS = ("t0", "t1", "t2")
SUBSCRIPTIONS = ("s0", "s1", "s2", "s3")
_REFUSALS = (LimitReached, NotFound, Unavailable)


@dataclass
class Outcome:
    """Result of one seed."""

    seed: int
    digest: str
    count: Counter[str]
    error: BaseException | None = None
    trace: list[str] = field(default_factory=list)


def run_seed(seed: int, steps: int = STEPS) -> Outcome:
    """Run one seed to its end or to the first broken promise."""
    world = World(seed)
    simulation = Simulation(world, steps)
    error: BaseException | None = None
    try:
        world.run(simulation.run())
    except (Exception, BaseExceptionGroup) as caught:
        error = caught
    return Outcome(seed, world.loop.digest(), world.count, error, list(world.loop.trace_lines))


def add_counts(total: Counter[str], more: Counter[str]) -> None:
    """Add what one seed covered."""
    for name, value in more.items():
        total[name] = max(total[name], value) if name.startswith("most ") else total[name] + value


class Simulation:
    """The director of one run: does one thing after the other, while clients and the broker do theirs."""

    def __init__(self, world: World, steps: int) -> None:
        self.world = world
        self.model = Model(world)
        self.rng = world.rng("director")
        self.config_rng = world.rng("config")
        self.config = random_config(self.config_rng)
        self.latency = random_latency(self.rng)
        world.loop.latency = self.latency
        slowest_ms = self.latency.slow_ms if self.latency.slow_every else self.latency.max_ms
        world.slack_us = round(1_000_000 + 8_000 * slowest_ms)
        self.vfs = MemVfs()
        self.life: Life = None  # type: ignore[assignment]  # there is one as soon as it runs
        self.probe = Probe(world, self.model, lambda: self.life)
        self.consumer_numbers = itertools.count(1)
        self._steps = steps
        self._payloads = Payloads(world.rng("payloads"))
        self.consumers: dict[SimConsumer, asyncio.Task[None]] = {}
        self._busy: list[str] = []  # names whose topic or subscription is being made or deleted
        self._pacing_rng = world.rng("pacing")  # of its own: seeds without it stay as they were
        self._has_pacing = self._pacing_rng.random() < SHARE
        self._has_long_delays = self.rng.random() < 0.5
        if self.rng.random() < _CALM_SHARE:
            self._calm_down()
        self._actions, self._weights = self._choose_actions()

    async def run(self) -> None:
        self.life = await open_life(self, self.vfs)
        probe = asyncio.create_task(self.probe.run())
        probe.add_done_callback(self._probe_done)
        for _ in range(self._steps):
            action = self.rng.choices(self._actions, self._weights)[0]
            await action()
            self._change_pace()
            await self._pause()
            if not self.life.serves:
                await self.recover()
        await drain_everything(self)
        probe.cancel()

    def _probe_done(self, probe: asyncio.Task[None]) -> None:
        """End the run at once with the probe's finding: a broker that polls would take minutes to come to its end."""
        if not probe.cancelled():
            error = probe.exception()
            assert error is not None, "a probe does not end by itself"
            self.world.fail(error)

    def _choose_actions(self) -> tuple[list[Callable[[], Awaitable[None]]], list[float]]:
        """A mix of its own for each seed: what is left out of some lets the rest go further."""
        all_actions: list[tuple[Callable[[], Awaitable[None]], float, float]] = [
            (self._produce, 30, 1.0),
            (self._attach, 14, 1.0),
            (self._create_subscription, 6, 1.0),
            (self._wait, 10, 0.9),
            (self._detach, 4, 0.7),
            (self._drain, 2, 0.6),
            (self._step_clock, 4, 0.6),
            (self._freeze_clock, 2, 0.4),
            (self._slow_disk, 1.5, 0.4),
            (self._delete_subscription, 1.5, 0.5),
            (self._delete_topic, 0.8, 0.3),
            (self._create_topic, 1, 0.5),
            (self._ack_unknown, 1, 0.7),
            (self._end_life, 2.5, 0.6),
            (self._arm_death, 3, 0.6),
            (self._break_disk, 1.5, 0.4),
            (self._low_disk, 1, 0.3),
            (self._full_disk, 0.7, 0.3),
        ]
        if self.world.is_calm:
            all_actions = all_actions[:4]
        chosen = [(action, weight) for action, weight, chance in all_actions if self.rng.random() < chance]
        return [action for action, _ in chosen], [weight for _, weight in chosen]

    def _calm_down(self) -> None:
        """Nothing goes wrong in this run, and no timer but the right one helps: lateness is checked closely."""
        self.world.is_calm = True
        self.latency = self.world.loop.latency = Latency(slow_every=0)
        self.config = changed(
            self.config, clock_recheck_ms=60_000, read_batch_entries=50, due_batch_entries=100
        )

    async def _pause(self) -> None:
        ms = self.rng.choice(
            (0, 0, self.rng.randint(0, 5), self.rng.randint(0, 100), self.rng.randint(0, 800))
        )
        await asyncio.sleep(ms / 1000)

    # -- what clients do -------------------------------------------------------------------------------------------

    async def _produce(self) -> None:
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            now_ms = self.world.wall.now_ms()
            asks = random_messages(self.rng, self._payloads, now_ms, long=self._has_long_delays)
            self.life.spawn(produce(self.life, self.model, self.rng.choice(TOPICS), asks))

    async def _attach(self) -> None:
        mine = self._any_subscription()
        if mine is None:
            return
        topic, subscription = find(self.life, mine)
        lease_ms = subscription.policy.lease_ms or self.config.lease_ms
        habits = calm_habits(self.rng) if self.world.is_calm else random_habits(self.rng, lease_ms)
        if mine.type == SubscriptionType.KEY_SHARED:
            habits = replace(habits, pulls=False)  # Receive is for SHARED
        number = next(self.consumer_numbers)
        consumer = SimConsumer(self.life, self.model, topic, subscription, mine, habits, number)
        self.world.trace(f"attach c{number} to {mine} {habits.permits}/{habits.permit_bytes}")
        if consumer.attach():
            task = self.life.spawn(consumer.run())
            self.consumers[consumer] = task
            task.add_done_callback(lambda _: self.consumers.pop(consumer, None))

    async def _detach(self) -> None:
        if self.consumers:
            self.send_away(self.rng.choice(list(self.consumers)))
            self.world.count["consumers sent away"] += 1

    async def _drain(self) -> None:
        """A consumer of keys hands them on, and holds what it has; sometimes it leaves later."""
        taking = [
            each
            for each in self.consumers
            if each.model.type == SubscriptionType.KEY_SHARED and not each.draining
        ]
        if taking:
            consumer = self.rng.choice(taking)
            consumer.drain()
            self.world.count["consumers drained"] += 1

    def send_away(self, consumer: SimConsumer) -> None:
        self.consumers.pop(consumer).cancel()
        consumer.detach(keeps_leases=consumer.habits.pulls)

    async def _create_subscription(self) -> None:
        self.life.spawn(
            self._create(
                self.rng.choice(TOPICS), self.rng.choice(SUBSCRIPTIONS), random.Random(self.rng.random())
            )
        )

    async def _create(self, topic_name: str, name: str, rng: random.Random) -> None:
        life, model = self.life, self.model
        if topic_name in self._busy:
            return
        try:
            topic = await life.broker.registry.topic_or_create(topic_name)
        except (AlreadyExists, *_REFUSALS):
            return
        if life.dead or topic_name in self._busy:
            return
        mine = model.topic(*identity(topic))
        type_ = rng.choice(
            (
                SubscriptionType.SHARED,
                SubscriptionType.SHARED,
                SubscriptionType.SHARED,
                SubscriptionType.KEY_SHARED,
                SubscriptionType.KEY_SHARED,
                SubscriptionType.EXCLUSIVE,
                SubscriptionType.FAILOVER,
            )
        )
        policy = random_subscription_policy(rng, honor_delay=rng.random() < 0.5)
        if self._has_pacing:
            policy = replace(policy, **random_pace(self._pacing_rng))
        creation = Creation(
            topic=mine,
            name=name,
            type=type_,
            honors=honors_delay(type_, policy.honor_delay),
            earliest=rng.random() < 0.4,
            policy=policy,
            invoked=model.tick(),
        )
        model.creation_asked(creation)
        self._busy.append(topic_name)
        try:
            subscription = await topic.subscriptions.create(
                name, type_, EARLIEST if creation.earliest else LATEST, policy
            )
        except (AlreadyExists, NotFound) as error:
            exists = any(each.name == name and each.state != "deleted" for each in mine.subscriptions)
            require(exists or mine.state != "live", "admin", f"{topic_name}/{name}: {error}")
            del model.creating[creation]
            return
        except (StorageFailed, Unavailable):
            return  # it may exist in the next life
        finally:
            self._busy.remove(topic_name)
        if not life.dead:
            note_ledgers(model, mine, {ledger.name.ledger_id for ledger in topic.log})
            created = model.created(creation, subscription.subscription_id, subscription.image.start)
            self.world.count["subscriptions created"] += 1
            self.world.trace(f"created {created} type {type_} from {created.start}")

    async def _delete_subscription(self) -> None:
        mine = self._any_subscription()
        if mine is not None and mine.topic.name not in self._busy:
            self.life.spawn(self._delete(mine))

    async def _delete(self, mine: SubscriptionModel) -> None:
        life, name = self.life, mine.topic.name
        topic, _ = find(life, mine)
        self.world.trace(f"delete {mine}")
        mine.state = "deleting"
        self._busy.append(name)
        try:
            await topic.subscriptions.delete(mine.name)
        except (StorageFailed, Unavailable):
            return  # the next life will tell
        finally:
            self._busy.remove(name)
        if not life.dead:
            mine.state = "deleted"
            self.world.count["subscriptions deleted"] += 1

    async def _delete_topic(self) -> None:
        topics = [each for each in self.model.topics.values() if each.state == "live"]
        topics = [each for each in topics if each.topic_id in self.life.broker.registry.topics]
        if topics and (mine := self.rng.choice(topics)).name not in self._busy:
            self.life.spawn(self._delete_whole(mine))

    async def _delete_whole(self, mine: TopicModel) -> None:
        life = self.life
        self.world.trace(f"delete topic {mine.name}#{mine.topic_id}")
        mine.state = "deleting"
        self._busy.append(mine.name)
        try:
            await life.broker.registry.delete_topic(mine.name)
        except (StorageFailed, Unavailable):
            return
        finally:
            self._busy.remove(mine.name)
        if not life.dead:
            mine.state = "deleted"
            self.world.count["topics deleted"] += 1

    async def _create_topic(self) -> None:
        self.life.spawn(self._create_one(self.rng.choice(TOPICS), random_topic_policy(self.rng)))

    async def _create_one(self, name: str, policy: TopicPolicy) -> None:
        life = self.life
        if name in self._busy:
            return
        self._busy.append(name)
        try:
            topic = await life.broker.registry.create_topic(name, policy)
        except (AlreadyExists, *_REFUSALS):
            return
        finally:
            self._busy.remove(name)
        if not life.dead:
            mine = self.model.topic(*identity(topic))
            mine.confirmed = True
            mine.retention_ms = (policy.retention_ms or 0) if policy.retention_bytes == 0 else 0
            self.world.count["topics created"] += 1

    async def _ack_unknown(self) -> None:
        mine = self._any_subscription()
        if mine is not None:
            self.life.spawn(ack_unknown(self.life, find(self.life, mine)[1], mine, self.rng))

    def _change_pace(self) -> None:
        if self._has_pacing and self._pacing_rng.random() < 0.1:
            known = list(self.model.subscriptions())
            if known and self.life.serves:
                mine = self._pacing_rng.choice(known)
                topic, subscription = find(self.life, mine)
                rng = random.Random(self._pacing_rng.random())
                self.life.spawn(change_pace(self.life, topic, subscription, mine, rng))

    def _any_subscription(self) -> SubscriptionModel | None:
        known = list(self.model.subscriptions())
        return self.rng.choice(known) if known else None

    # -- time ------------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Time passes, so that short delays come due and leases end."""
        await asyncio.sleep(self.rng.choice((0.5, 1, self.rng.uniform(0, 5), self.rng.uniform(0, 20))))

    async def _step_clock(self) -> None:
        rng = self.rng
        ms = rng.choice((1, rng.randint(1, 50), rng.randint(1, 5_000), rng.randint(1, 300_000), 3_600_000))
        if rng.random() < 0.1:
            ms = rng.randint(1, 2 * DAY_MS)
        ms *= rng.choice((-1, 1))
        self.world.trace(f"the clock steps by {ms} ms")
        self.world.wall.step(ms)
        self.world.count["clock steps forward" if ms > 0 else "clock steps back"] += 1

    async def _freeze_clock(self) -> None:
        wall, watched = self.world.wall, [each for each in self.model.subscriptions() if each.attached]
        if wall.is_frozen:
            return
        seconds = self.rng.uniform(0, 6)
        is_at_due = bool(watched) and self.rng.random() < 0.5
        if is_at_due:
            now_ms = wall.now_ms()
            moment_ms = now_ms - now_ms % MOMENT_MS + MOMENT_MS
            asks = [Outgoing(self._payloads.next(), deliver_at_ms=moment_ms)]
            self.life.spawn(produce(self.life, self.model, self.rng.choice(watched).topic.name, asks))
            await asyncio.sleep((moment_ms - now_ms) / 1000)
            seconds += 4
        wall.freeze()
        self.world.trace("the clock stands still")
        self.world.count["clock freezes"] += 1
        self.world.loop.call_later(seconds, self._thaw_clock, self.rng.random() < 0.5)
        if is_at_due:  # what is due at this very moment must be delivered while it lasts
            await asyncio.sleep(seconds)

    def _thaw_clock(self, catch_up: bool) -> None:
        self.world.trace("the clock ticks again")
        self.world.wall.thaw(catch_up=catch_up)

    # -- the disk --------------------------------------------------------------------------------------------------

    async def _slow_disk(self) -> None:
        seconds = self.rng.uniform(0.5, 8)
        self.world.loop.latency = SLOW
        self.world.slow_until_us = self.world.loop.now_us() + round(seconds * 1e6) + 20_000_000
        self.world.loop.call_later(seconds, self._speed_up)
        self.world.count["slow disk periods"] += 1

    def _speed_up(self) -> None:
        self.world.loop.latency = self.latency

    async def _break_disk(self) -> None:
        """From now on, one operation of some kind fails; the process must end and recover."""
        kind = self.rng.choice(("sync", "sync", "sync", "sync_dir", "write", "create", "rename", "read"))
        path = self.rng.choice(("*", "data/journal/*", "data/topics/*", "*manifest*"))
        error = self.rng.choice((errno.EIO, errno.EIO, errno.ENOSPC))
        taken = self.rng.choice((0, 0, 10, 1_000)) if kind == "write" else 0
        self.life.faults.add(Fault(kind, path, self.rng.randint(1, 6), error, after_bytes=taken))
        self.world.trace(f"the disk will fail: {kind} of {path}")

    async def _low_disk(self) -> None:
        """Less is free than the reserve: produce is refused (P9), the rest goes on, and all is well afterwards."""
        life, world = self.life, self.world
        reserve_bytes = life.config.disk_reserve_bytes
        life.vfs.capacity_bytes = 1 << 40
        life.vfs.capacity_bytes -= life.vfs.free_bytes("") - reserve_bytes // 2
        world.trace("the disk is nearly full")
        await asyncio.sleep(1.1)
        # What the broker has given back meanwhile, such as segments of its journal, may have made room.
        has_room = life.vfs.free_bytes("") >= reserve_bytes
        if life.serves and not life.is_disturbed and not has_room:
            world.count["produce calls on a nearly full disk"] += 1
            batch = random_messages(self.rng, self._payloads, world.wall.now_ms(), long=False)
            refused = world.count["produce refused: DISK_RESERVE_REACHED"]
            life.spawn(produce(life, self.model, TOPICS[0], batch))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            expected = refused < world.count["produce refused: DISK_RESERVE_REACHED"]
            require(expected, "P9", "a produce call was not refused on a nearly full disk")
        await asyncio.sleep(self.rng.uniform(0, 5))
        life.vfs.capacity_bytes = None
        await asyncio.sleep(1.1)
        require(not life.serves or not life.broker._disk_full, "P9", "there is room again and nobody noticed")

    async def _full_disk(self) -> None:
        """No room at all, not even for acks: the broker may fail, but must not lose or tell anything wrong."""
        life = self.life
        self.world.disk_ran_full = True
        life.vfs.capacity_bytes = 1 << 40
        life.vfs.capacity_bytes -= life.vfs.free_bytes("") - self.rng.randint(0, 3_000)
        self.world.trace("the disk is full")
        self.world.count["full disks"] += 1
        await asyncio.sleep(self.rng.uniform(0, 4))
        life.vfs.capacity_bytes = None

    # -- ends of lives ---------------------------------------------------------------------------------------------

    async def _arm_death(self) -> None:
        """The process will die before one of its next changes of the disk."""
        if self.life.faults.changes_left is None:
            self.life.faults.changes_left = self.rng.choice((0, 1, 2, self.rng.randint(0, 40)))

    async def _end_life(self) -> None:
        await self.recover(self.rng.choice(("stop", "kill", "power", "power")))

    async def recover(self, how: str = "power", *, consumers_max: int = 4) -> None:
        """End this life, and begin the next on what is left of the disk."""
        if self.life.dead:
            how = self.rng.choice(("kill", "power", "power"))
        elif self.life.failure is not None:
            how = self.rng.choice(("stop", "power"))
        self.vfs = await end_life(self, how)
        self._busy.clear()
        if self.config_rng.random() < 0.3:
            self.config = random_config(self.config_rng)
        self.life = await open_life(self, self.vfs)
        for _ in range(self.rng.randint(0, consumers_max)):
            await self._attach()

    def random_policy(self) -> CrashPolicy:
        return self.rng.choice(list(CrashPolicy))


def find(life: Life, mine: SubscriptionModel) -> tuple[Topic, Subscription]:
    """Return the broker's topic and subscription, which must exist."""
    topic = life.broker.registry.topics.get(mine.topic.topic_id)
    subscription = topic.subscriptions.get(mine.subscription_id) if topic else None
    if topic is None or subscription is None:
        raise Violation("P3", f"{mine} is not there")
    return topic, subscription
