"""Base of the tests of dead letters: a broker on virtual time, and what it says of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import numpy as np

from broker.config import BrokerConfig
from broker.model import Entries, Position, ids_of
from broker.policy import SubscriptionPolicy
from broker.rpc.decode import ProduceEnvelope
from broker.subscriptions import requests
from broker.subscriptions.subscription import Subscription
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.dead_letter_frames import HOLDER_NAME, PREFIX
from postdate_api.v1.message_pb2 import Message
from tests.harness import Inbox, Node, entries_of, payload_of, small_config

T = TypeVar("T")

DEAD = f"orders~billing~{HOLDER_NAME}"
THREE = SubscriptionPolicy(max_delivery_attempts=3, initial_backoff_ms=0)


def on_node(
    scenario: Callable[[Node], Coroutine[Any, Any, T]], *, seed: int = 1, config: BrokerConfig | None = None
) -> T:
    """Run a scenario on a broker with an empty disk."""

    async def run(_: SimLoop, clock: SimClock) -> T:
        node = Node(MemVfs(), clock, config or small_config()).open()
        result = await scenario(node)
        assert node.failures == []
        return result

    return run_sim(run, seed)


async def billing(node: Node, policy: SubscriptionPolicy = THREE, **options: int) -> Inbox:
    """A consumer of the subscription that gives up."""
    found = node.broker.registry.by_name.get("orders")
    if found is None or found.subscriptions.find("billing") is None:
        await node.create_subscription("orders", "billing", policy=policy)
    return await node.subscribe("orders", "billing", **options)


async def nack_dead(inbox: Inbox, positions: Iterable[Position], reason: str = "") -> None:
    consumer_id = inbox.consumer.consumer_id
    nacked = await requests.give_back(
        inbox.subscription, consumer_id, entries_of(positions), 0, dead_letter=True, reason=reason
    )
    assert nacked.failures == []


def subscription_of(node: Node, topic: str = "orders", name: str = "billing") -> Subscription:
    return node.topic(topic).subscription(name)


def positions_in(entries: Entries) -> list[Position]:
    return [
        Position(ledger_id, entry_id)
        for ledger_id, bitmap in sorted(entries.items())
        for entry_id in ids_of(bitmap).tolist()
    ]


def held(node: Node, topic: str = "orders", name: str = "billing") -> list[Position]:
    """The ids of the dead letters of a subscription."""
    return positions_in(node.broker.dead_letters.still_held(subscription_of(node, topic, name)))


async def stored(node: Node, topic: str) -> dict[Position, bytes]:
    """Every frame of a topic."""
    frames: dict[Position, bytes] = {}
    for ledger in node.topic(topic).log:
        found = await ledger.read(np.arange(ledger.entry_count, dtype=np.uint32))
        frames |= {
            Position(ledger.name.ledger_id, entry_id): frame for entry_id, frame in enumerate(found.frames)
        }
    return frames


async def owed(node: Node, topic: str, name: str) -> list[bytes]:
    """The payloads of what a subscription has yet to settle, in the order of the log."""
    cursor = subscription_of(node, topic, name).cursor
    return [
        payload_of(frame)
        for position, frame in (await stored(node, topic)).items()
        if not cursor.is_settled(position)
    ]


async def letters(node: Node, topic: str = "orders", name: str = "billing") -> dict[bytes, dict[str, str]]:
    """The dead letters of a subscription: what they say of themselves, by payload."""
    found: dict[bytes, dict[str, str]] = {}
    for place in node.broker.dead_letters.places(subscription_of(node, topic, name)):
        frames = await stored(node, place.topic.name)
        for position in positions_in(place.entries):
            message = Message.FromString(ProduceEnvelope.FromString(frames[position]).messages[0])
            assert message.payload not in found, "one message, two dead letters"
            found[message.payload] = {
                key.removeprefix(PREFIX): value for key, value in message.properties.items()
            }
    return found
