"""Topics and subscriptions are created a few at a time, so that no round of the event loop makes hundreds of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.policy import TopicPolicy
from broker.rpc.admin import AdminService, OwnedCluster
from broker.rpc.hand_over import HandOver
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.topic import Topic
from postdate_api.v1 import admin_pb2
from tests.harness import Node
from tests.unit.rpc.call_world import VIEW, Edge

_COUNT = 100


class _Creations:
    """A broker, the calls that create, and how many records of creations were on their way at once."""

    def __init__(self, clock: SimClock, *, is_cluster: bool) -> None:
        node = Node(MemVfs(), clock).open()
        cluster = OwnedCluster(lambda: VIEW, HandOver(node.broker, lambda: VIEW, lambda to: None))
        self.registry = node.broker.registry
        self.handlers: dict[str, Any] = {
            **AdminService(node.broker, "0", cluster if is_cluster else None).handlers()
        }
        self.most = self._under_way = 0
        create_topic = self.registry.create_topic

        async def count(name: str, policy: TopicPolicy) -> Topic:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            try:
                return await create_topic(name, policy)
            finally:
                self._under_way -= 1

        self.registry.create_topic = count  # type: ignore[method-assign]

    async def topic(self, number: int) -> None:
        request = admin_pb2.CreateTopicRequest(name=f"topic-{number}")
        await self.handlers["CreateTopic"].unary_unary(request.SerializeToString(), Edge())

    async def subscription(self, number: int) -> None:
        request = admin_pb2.CreateSubscriptionRequest(topic=f"topic-{number}", name="s")
        await self.handlers["CreateSubscription"].unary_unary(request.SerializeToString(), Edge())

    def created(self) -> set[int]:
        return {int(name.removeprefix("topic-")) for name in self.registry.by_name}


@pytest.mark.parametrize(("is_cluster", "most"), [(False, 4), (True, 32)])
@pytest.mark.parametrize("kind", ["topic", "subscription"])
def test_they_are_created_a_few_at_a_time(kind: str, is_cluster: bool, most: int) -> None:
    async def check(_: SimLoop, clock: SimClock) -> None:
        creations = _Creations(clock, is_cluster=is_cluster)
        await asyncio.gather(*(getattr(creations, kind)(number) for number in range(_COUNT)))
        assert creations.most == most
        assert creations.created() == set(range(_COUNT))
        if kind == "subscription":
            assert all(topic.subscription("s") for topic in creations.registry.topics.values())

    run_sim(check, seed=1)


def test_who_goes_before_his_turn_creates_nothing_and_holds_up_nobody() -> None:
    async def check(_: SimLoop, clock: SimClock) -> None:
        creations = _Creations(clock, is_cluster=False)
        calls = [asyncio.ensure_future(creations.topic(number)) for number in range(_COUNT)]
        await asyncio.sleep(0)
        for call in calls[10:90]:
            call.cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in done] == [
            10 <= number < 90 for number in range(_COUNT)
        ]
        assert creations.created() == {*range(10), *range(90, _COUNT)}

    run_sim(check, seed=1)
