"""The ends of lives, their beginnings, and the end of a run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from broker.model import Position
from broker.policy import SubscriptionPolicy
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.topics.topic import Topic
from tests.harness import LATEST
from tests.reference import Violation, require
from tests.sim.facts import Creation, Recovered, SubscriptionModel
from tests.sim.probe import check_rebuilds
from tests.sim.reclaim import check_none_left, note_ledgers
from tests.sim.traffic import GREEDY, SimConsumer
from tests.sim.world import Life, ProcessDied, power_cut

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

_STOP_SECONDS = 600.0
_DRAIN_SECONDS = 900.0


async def end_life(run: Simulation, how: str) -> MemVfs:
    """End the present life by a stop, a kill or a power cut; returns the disk that the next life finds."""
    life, world = run.life, run.world
    died_by_itself = life.dead
    if how == "stop":
        how = await _stop(run, life)
    clean = how == "stopped"
    await life.bury()
    run.model.life_ended(cleanly=clean)
    world.count[f"lives ended: {how}"] += 1
    world.count["lives ended in the middle of a disk operation"] += died_by_itself
    # A disk that failed a sync is not trusted with what it has not synced: only a power cut tells what it holds.
    if (how == "kill" and not life.faults.hit_count) or (clean and run.rng.random() < 0.5):
        vfs = life.vfs
    else:
        policy = run.random_policy()
        world.count[f"power cuts: {policy.value}"] += not clean
        vfs = power_cut(life, policy, run.rng)
    world.trace(f"life {life.number} ended: {how}")
    vfs.capacity_bytes = None
    world.disk_ran_full = False
    world.forgetful |= life.faults.forgetful
    return vfs


async def _stop(run: Simulation, life: Life) -> str:
    """As the server stops: no new work, consumers go, the broker writes what is left. "stopped" if it could."""
    life.is_stopping = True
    life.broker.drain()
    await asyncio.sleep(run.rng.choice((0, 0.01, 0.5)))
    for subscription in run.model.subscriptions():
        for consumer in subscription.attached.copy():
            consumer.detach()
    stopping = asyncio.create_task(life.broker.stop())
    await asyncio.wait([stopping], timeout=_STOP_SECONDS)
    if not stopping.done():
        raise Violation("liveness", "the broker does not stop")
    error = stopping.exception()
    if life.dead or life.has_met_fault:
        return "power"
    if error is not None:
        raise error
    return "stopped"


async def open_life(run: Simulation, vfs: MemVfs) -> Life:
    """Begin a life, and perhaps die in its recovery and begin again; returns one that serves."""
    world = run.world
    while True:
        world.config = run.config
        life = world.new_life(vfs, run.config)
        if run.rng.random() < 0.15:
            life.faults.changes_left = run.rng.randint(0, 25)
        try:
            life.broker.open()
        except ProcessDied:
            await life.bury()
            world.count["lives ended in recovery"] += 1
            vfs = vfs if run.rng.random() < 0.3 else power_cut(life, run.random_policy(), run.rng)
            continue
        life.faults.changes_left = None
        run.model.recovered(await _read_back(life))
        life.broker.start()
        world.trace(f"life {life.number} serves")
        return life


async def _read_back(life: Life) -> Recovered:
    """Everything that the broker holds, as it would be read for a consumer."""
    found: Recovered = {}
    for topic_id, topic in life.broker.registry.topics.items():
        frames: dict[Position, bytes] = {}
        for ledger in topic.log:
            ids = np.arange(ledger.entry_count, dtype=np.uint32)
            read = await ledger.read(ids)
            ledger_id = ledger.name.ledger_id
            frames.update((Position(ledger_id, at), frame) for at, frame in enumerate(read.frames))
            require(len(read.frames) == ledger.entry_count, "P1", f"ledger {ledger_id} is short")
        subscriptions = {
            each.subscription_id: (each.name, each.image.start) for each in topic.subscriptions.values()
        }
        found[topic_id] = (topic.name, subscriptions, frames)
    return found


async def drain_everything(run: Simulation) -> None:
    """The end: no more faults, time passes beyond everything, and everything is acknowledged."""
    world = run.world
    world.loop.latency = run.latency
    world.wall.thaw(catch_up=run.rng.random() < 0.5)
    world.slow_until_us = world.loop.now_us() + 20_000_000
    run.life.vfs.capacity_bytes = None
    run.life.faults.changes_left = None
    if run.life.has_met_fault or run.life.faults.faults or not run.life.serves:
        await run.recover()
    world.trace("the end begins")
    world.is_calm = False
    await _send_consumers_away(run)
    await _subscribe_to_unread_topics(run)
    if run.rng.random() < 0.6:
        # The index is rebuilt while consumers wait for it and things come due.
        await run.recover(run.rng.choice(("stop", "kill", "power")), consumers_max=0)
        _attach_greedy(run)
        await _hurry(run)
    else:
        _attach_greedy(run)
    await _wait_delivered(run)
    _check_counts(run)
    _check_indexes(run)
    await _wait_reclaimed(run)
    handed_out = world.count["handed out"]
    await run.recover(run.rng.choice(("stop", "kill", "power")), consumers_max=0)
    _attach_greedy(run)
    await asyncio.sleep(world.slack_us / 1e6)
    for subscription in run.model.subscriptions():
        # What was perhaps acknowledged may come once more; what was confirmed may not, and the model saw to it.
        require(not run.model.missing(subscription), "P3", f"{subscription} is owed something again")
    world.count["delivered after the last restart"] += world.count["handed out"] - handed_out
    run.life.faults.clear()
    await asyncio.sleep(1)
    await run.life.wait_clients(0)
    await run.life.bury()


async def _send_consumers_away(run: Simulation) -> None:
    """Consumers leave, and calls that are on their way come to their end."""
    for consumer in list(run.consumers):
        run.send_away(consumer)
    ended = await run.life.wait_clients(_STOP_SECONDS)
    if not ended:
        raise Violation("liveness", f"calls of clients do not end: {list(run.life._tasks)}")


async def _subscribe_to_unread_topics(run: Simulation) -> None:
    """Subscribe to unread topics: earlier messages wait for the first subscription, even if that is LATEST."""
    for mine in list(run.model.topics.values()):
        if mine.state != "live" or mine.topic_id not in run.life.broker.registry.topics:
            continue
        run.world.count["messages that waited for a first subscription"] += (
            0 if mine.had_subscription else len(mine.by_position)
        )
        topic = run.life.broker.registry.topics[mine.topic_id]
        creation = Creation(
            mine, "last", SubscriptionType.SHARED, True, False, SubscriptionPolicy(), run.model.tick()
        )
        run.model.creation_asked(creation)
        made = await topic.subscriptions.create("last", SubscriptionType.SHARED, LATEST, SubscriptionPolicy())
        note_ledgers(run.model, mine, {ledger.name.ledger_id for ledger in topic.log})
        run.model.created(creation, made.subscription_id, made.image.start)


def _attach_greedy(run: Simulation) -> None:
    for mine in run.model.subscriptions():
        topic, subscription = _found(run.life, mine)
        number = next(run.consumer_numbers)
        consumer = SimConsumer(run.life, run.model, topic, subscription, mine, GREEDY, number)
        require(consumer.attach(), "H9", f"{mine} refuses its only consumer")
        run.consumers[consumer] = run.life.spawn(consumer.run())


def _found(life: Life, mine: SubscriptionModel) -> tuple[Topic, Subscription]:
    topic = life.broker.registry.topics[mine.topic.topic_id]
    return topic, topic.subscriptions[mine.subscription_id]


async def _hurry(run: Simulation) -> None:
    """Step the clock forward to some of the times that are waited for, one after the other, at once."""
    now_ms = run.world.wall.now_ms()
    owed = [message for mine in run.model.subscriptions() for message in mine.open]
    times = [message.due_ms for message in run.rng.sample(owed, min(4, len(owed))) if message.due_ms > now_ms]
    for due_ms in sorted(times):
        run.world.wall.step(max(0, due_ms - run.world.wall.now_ms()))
        await asyncio.sleep(run.rng.choice((0, 0.001, 0.004, 0.02)))


def _check_indexes(run: Simulation) -> None:
    """On a disk that works no index is ever built again: what was delivered in the end may still have been late."""
    for topic in run.life.broker.registry.topics.values():
        check_rebuilds(run.world, topic)


async def _wait_delivered(run: Simulation) -> None:
    """Wait until nothing is owed; what is far away is brought near by stepping the clock."""
    model, wall = run.model, run.world.wall
    end_us = run.world.loop.now_us() + round(_DRAIN_SECONDS * 1e6)
    leaps = 0
    while True:
        await asyncio.sleep(1)
        missing = [(mine, each) for mine in model.subscriptions() for each in model.missing(mine)]
        if not missing:
            return
        times = [max(each.due_ms, mine.open[each].wait_high_ms) for mine, each in missing]
        away_ms = min(times) - wall.now_ms()
        if run.world.loop.now_us() > end_us:
            mine, each = missing[0]
            raise Violation(
                "P3", f"{len(missing)} are missing; {mine} is still owed {each.position}: {each.ask}"
            )
        if away_ms > 15_000:
            leaps += 1
            target = min(times) if leaps < 10 else max(times)
            wall.step(target - wall.now_ms() - 1_500)


async def _wait_reclaimed(run: Simulation) -> None:
    """All is settled, so all ledgers go once they are due, but for what is retained; and with them their files."""
    facts = [each for t in run.life.broker.registry.topics.values() for each in t.ledgers.facts.values()]
    last_due_ms = max((each.last_due_ms for each in facts), default=0)
    run.world.wall.step(max(0, last_due_ms - run.world.wall.now_ms()))
    wait_ms = run.config.tuning.clock_recheck_ms + 2 * run.config.tuning.reclaim_interval_ms
    await asyncio.sleep(wait_ms / 1000 + run.world.slack_us / 1e6)
    for topic in run.life.broker.registry.topics.values():
        if topic.policy.retention_ms or topic.policy.retention_bytes:
            continue
        check_none_left(run.world, topic.name, topic.log.ledger_count)
    await run.life.broker.checkpointer.checkpoint()
    for topic in run.life.broker.registry.topics.values():
        # What was dropped after its topic was captured waits for the next checkpoint.
        ledgers = [*topic.log, *(each.ledger for each in topic.log.dropped)]
        named = {str(ledger.name.ledger_id) for ledger in ledgers}
        files = run.life.vfs.list_dir(f"data/topics/{topic.topic_id}/ledgers")
        left = [name for name in files if name.partition(".")[0] not in named]
        require(not left, "P8", f"files of dropped ledgers of {topic.name} stay: {left}")


def _check_counts(run: Simulation) -> None:
    """All is settled: the broker's own count must say so."""
    for mine in run.model.subscriptions():
        _, subscription = _found(run.life, mine)
        left = subscription.unsettled_count()
        unsure = sum(fact.perhaps_acked for fact in mine.open.values())
        waiting = len(mine.open) - unsure
        require(left <= waiting + unsure, "P3", f"{mine} counts {left} unsettled, and {waiting} are open")
        run.world.count["subscriptions drained"] += 1
