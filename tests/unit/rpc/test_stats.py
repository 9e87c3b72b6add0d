"""GetStats of very many topics."""

from __future__ import annotations

import asyncio

import pytest

from broker.policy import TopicPolicy
from broker.rpc.stats import get_stats
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from postdate_api.v1 import admin_pb2
from tests.harness import EARLIEST, Node, Outgoing


@pytest.mark.slow
def test_counts_of_2500_topics_come_in_three_pages():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock).open()
        names = [f"topic-{i:04}" for i in range(2_500)]
        for name in names:
            await node.broker.registry.create_topic(name, TopicPolicy())
        await node.create_subscription("topic-1234", "s", position=EARLIEST)
        await node.produce("topic-1234", [Outgoing(b"1"), *[Outgoing(b"2", deliver_after_ms=10**9)] * 2])
        request = admin_pb2.GetStatsRequest()
        pages = [await get_stats(node.broker, request)]
        while request.page_token != (token := pages[-1].next_page_token) and token:
            request.page_token = token
            pages.append(await get_stats(node.broker, request))
        assert [len(page.topics) for page in pages] == [1_000, 1_000, 500]
        topics = {topic.topic: topic for page in pages for topic in page.topics}
        assert list(topics) == names
        assert {name for name in names if topics[name].scheduled_messages} == {"topic-1234"}
        (counts,) = topics["topic-1234"].subscriptions
        assert (counts.ready_messages, counts.scheduled_messages) == (1, 2)
        node.abandon()

    run_sim(scenario, seed=1)


def test_counts_and_times_of_an_answer_agree_from_the_first_message_on():
    """The index is told a quarter of a second after the log, and an answer may come between."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock).open()
        await node.broker.registry.create_topic("t", TopicPolicy())
        await node.create_subscription("t", "s", position=EARLIEST)

        async def stats() -> tuple[int, int, int]:
            (topic,) = (await get_stats(node.broker, admin_pb2.GetStatsRequest())).topics
            return topic.scheduled_messages, topic.next_due_time_ms, topic.last_due_time_ms

        assert await stats() == (0, 0, 0)
        due_ms = clock.now_ms() + 10**9
        await node.produce("t", [Outgoing(b"1", deliver_at_ms=due_ms)])
        for _look in range(20):
            assert await stats() == (1, due_ms, due_ms)
            await asyncio.sleep(0.05)
        node.abandon()

    run_sim(scenario, seed=1)
