"""The power goes while messages move between a topic and its dead letters: each is in one place, never in none or two.

A history gives up, requeues, purges and acknowledges, by checkpoints and without. After each operation of its disk, and
for each way to lose what was not synced, the broker is opened, and every message is looked for: owed on its
subscription, or held as a dead letter. What was answered must have happened, and what was not asked for must not.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import cache

import pytest

from broker.model import Entries, Position
from broker.policy import SubscriptionPolicy
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.dead_letter_frames import HOLDER_NAME
from tests.crash.history import crash_config
from tests.crash.points import moments_of
from tests.depth import at_depth
from tests.harness import Inbox, Node, Outgoing, entries_of, payload_of
from tests.unit.topics.letters import DEAD, billing, held, letters, nack_dead, owed, stored, subscription_of

STRIDE = at_depth(change=2 * len(CrashPolicy), deep=1)
OWED, HELD, DONE = "owed", "held", "done"


@dataclass(slots=True)
class Fate:
    """Places to which a message was asked to go, in order, and those it has surely reached: (operation, place)."""

    asked: list[tuple[int, str]] = field(default_factory=list)
    answered: list[tuple[int, str]] = field(default_factory=list)

    def possible(self, at: int) -> set[str]:
        """Return the places where a crash at an operation may leave it."""
        settled = [place for op, place in self.answered if op <= at]
        asked = [place for op, place in self.asked if op <= at]
        return {*asked[max(0, len(settled) - 1) :], *([] if settled else ["nowhere"])}


class History:
    """Calls on a broker, with the moments at which they were made and answered."""

    def __init__(self, vfs: MemVfs) -> None:
        self.vfs = vfs
        self.fates: dict[bytes, Fate] = {}

    def ask(self, place: str, *payloads: bytes) -> None:
        for payload in payloads:
            self.fates.setdefault(payload, Fate()).asked.append((self.vfs.op_count, place))

    def answer(self, place: str, *payloads: bytes) -> None:
        for payload in payloads:
            self.fates[payload].answered.append((self.vfs.op_count, place))

    async def produce(self, node: Node, *payloads: bytes) -> None:
        self.ask(OWED, *payloads)
        await node.produce("orders", [Outgoing(payload) for payload in payloads])
        self.answer(OWED, *payloads)

    async def give_up(self, inbox: Inbox, *payloads: bytes) -> None:
        self.ask(HELD, *payloads)
        await nack_dead(inbox, [positions(inbox)[payload] for payload in payloads])
        self.answer(HELD, *payloads)

    async def ack(self, inbox: Inbox, *payloads: bytes) -> None:
        self.ask(DONE, *payloads)
        assert await inbox.ack([positions(inbox)[payload] for payload in payloads]) == []
        self.answer(DONE, *payloads)

    async def requeue(self, node: Node, *payloads: bytes) -> None:
        chosen = await places_of(node, payloads)
        self.ask(OWED, *payloads)
        await node.broker.dead_letters.requeue(subscription_of(node), chosen, 0)
        self.answer(OWED, *payloads)

    async def purge(self, node: Node, *payloads: bytes) -> None:
        chosen = await places_of(node, payloads)
        self.ask(DONE, *payloads)
        await node.broker.dead_letters.purge(subscription_of(node), chosen)
        self.answer(DONE, *payloads)


def positions(inbox: Inbox) -> dict[bytes, Position]:
    """Return the positions of a consumer's messages; of those that came twice, the last ones."""
    inbox.poll()
    return {each.payload: each.position for each in inbox.received}


async def places_of(node: Node, payloads: tuple[bytes, ...]) -> Entries:
    """The ids of the dead letters of some messages."""
    frames = await stored(node, DEAD)
    return entries_of([p for p in held(node) if payload_of(frames[p]) in payloads])


@cache
def history() -> History:
    async def play(_: SimLoop, clock: SimClock) -> History:
        vfs = MemVfs()
        story = History(vfs)
        node = Node(vfs, clock, crash_config()).open()
        await node.create_subscription("orders", "other")
        inbox = await billing(node, SubscriptionPolicy(initial_backoff_ms=0, max_delivery_attempts=2))
        await story.produce(node, b"m01", b"m02", b"m03", b"m04")
        await story.produce(node, b"m05", b"m06", b"m07", b"m08")
        await inbox.wait(8)
        await story.give_up(inbox, b"m01", b"m02")
        await asyncio.gather(story.give_up(inbox, b"m03", b"m05"), story.ack(inbox, b"m04"))
        await node.checkpoint()
        await story.give_up(inbox, b"m06")
        await asyncio.gather(
            node.checkpoint(), story.requeue(node, b"m01", b"m03"), story.purge(node, b"m02")
        )
        await inbox.wait(2)
        await asyncio.gather(story.ack(inbox, b"m01"), story.give_up(inbox, b"m03", b"m07"))
        await inbox.nack([positions(inbox)[b"m08"]], reason="boom")
        await inbox.wait(1)
        story.ask(HELD, b"m08")
        inbox.detach()  # the second delivery was the last
        await node.broker.dead_letters.wait_idle()
        story.answer(HELD, b"m08")
        await node.stop()
        node = Node(vfs, clock, crash_config()).open()
        inbox = await billing(node)
        await story.requeue(node, b"m05", b"m06")
        await inbox.wait(2)
        await story.purge(node, b"m03")
        await story.give_up(inbox, b"m05")
        await node.stop()
        return story

    return run_sim(play, seed=1)


async def check(story: History, vfs: MemVfs, clock: SimClock, at: int) -> None:
    node = Node(vfs, clock, crash_config()).open()
    await asyncio.sleep(1)
    topic = node.broker.registry.by_name.get("orders")
    found: dict[bytes, list[str]] = {payload: [] for payload in story.fates}
    there: set[bytes] = set()
    if topic is not None and topic.subscriptions.find("billing"):
        for payload in await owed(node, "orders", "billing"):
            found[payload].append(OWED)
        for payload, letter in (await letters(node)).items():
            found[payload].append(HELD)
            assert letter["subscription"] == "billing"
            assert letter.get("last-reason") == ("boom" if payload == b"m08" else None)
        there = {frame[-3:] for frame in (await stored(node, "orders")).values()}
        other = await owed(node, "orders", "other")
        assert len(other) == len(set(other)), "a requeued message reached another subscription"
    for payload, fate in story.fates.items():
        places = found[payload] or [DONE if payload in there else "nowhere"]
        assert len(places) == 1, f"{payload!r} is in two places: {places}"
        assert places[0] in fate.possible(at), f"{payload!r} is {places[0]}, not one of {fate.possible(at)}"
    if DEAD in node.broker.registry.by_name and node.topic(DEAD).subscriptions.find(HOLDER_NAME):
        held_there = await owed(node, DEAD, HOLDER_NAME)
        assert sorted(held_there) == sorted(p for p, places in found.items() if places == [HELD])
    assert node.failures == []
    node.abandon()


@pytest.mark.parametrize("policy", CrashPolicy, ids=lambda policy: policy.value)
def test_each_message_is_in_one_place_after_any_crash(policy):
    story = history()
    seen: dict[frozenset[tuple[str, bytes]], int] = {}
    for at in moments_of(policy, range(story.vfs.op_count + 1), STRIDE):
        vfs = story.vfs.crashed(at, policy, random.Random(f"1/{at}"))
        tree = frozenset(vfs.snapshot().items())
        possible = hash(tuple(sorted((p, tuple(sorted(f.possible(at)))) for p, f in story.fates.items())))
        if seen.get(tree) == possible:
            continue
        seen[tree] = possible
        try:
            run_sim(lambda _, clock, vfs=vfs, at=at: check(story, vfs, clock, at), seed=at)
        except BaseException as error:
            op = story.vfs.ops[at - 1] if at else None
            error.add_note(f"crash at {at} ({policy}), after {op and (op.kind, op.path)}")
            raise


def test_the_history_moves_messages_every_way():
    ways = {tuple(place for _, place in fate.answered) for fate in history().fates.values()}
    assert (OWED, HELD, OWED, DONE) in ways
    assert (OWED, HELD, DONE) in ways
    assert (OWED, HELD, OWED, HELD) in ways
