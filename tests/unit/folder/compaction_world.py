"""A topic with ledgers of which little is live, and the job that rewrites them: what tests of compaction share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from broker.config import BrokerConfig
from broker.folder.compaction_values import Committed, Lease
from broker.jobs.rewrite import rewrite
from broker.jobs.verify import verify_data_dir
from broker.model import Position
from broker.storage.compaction_inputs import Outputs
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import DATA_DIR, EARLIEST, Inbox, Node, Outgoing, small_config

TOPIC = "orders"
DAY_MS = 86_400_000
LATER_MS = 600_000
"""Due time of messages that are kept: long after everything else."""


def config(**changes: Any) -> BrokerConfig:
    settings = {
        "ledger_max_entries": 10,
        "reclaim_interval_ms": DAY_MS,
        "seal_after_ms": 1_000,
        "min_index_count": 4,
        "max_buckets": 100,
        "journal_segment_bytes": 1 << 20,
        "journal_group_bytes_max": 1 << 18,
    }
    return small_config(**{**settings, **changes})


def run(scenario: Callable[[Node], Awaitable[Node]], **changes: Any) -> None:
    """Run a scenario; what is on the disk at its end must be clean."""

    async def whole(_: SimLoop, clock: SimClock) -> Node:
        node = await scenario(Node(MemVfs(), clock, config(**changes)).open())
        assert (await node.broker.verify_topic(TOPIC)).findings == []
        await node.stop()
        assert node.failures == []
        return node

    node = run_sim(whole, seed=1)
    report = verify_data_dir(node.vfs, DATA_DIR)
    assert report.problems == []
    assert report.notes == []


def payload(ledger: int, entry: int) -> bytes:
    return b"%d-%d" % (ledger, entry)


async def fill(
    node: Node, ledgers: int, *, kept: tuple[int, ...] = (3,), delay_ms: int = LATER_MS
) -> tuple[list[Position], list[Position], Inbox]:
    """Ledgers of ten messages: all delivered and acknowledged but for those kept, which are due much later.

    Returns the positions that are pending, those that are done, and the inbox. One more ledger takes entries.
    """
    inbox = await node.subscribe(TOPIC, "billing")
    pending, done = [], []
    for ledger in range(ledgers):
        positions = await node.produce(
            TOPIC,
            [
                Outgoing(payload(ledger, entry), deliver_after_ms=delay_ms + ledger if entry in kept else 0)
                for entry in range(10)
            ],
        )
        pending += [positions[entry] for entry in kept]
        done += [position for entry, position in enumerate(positions) if entry not in kept]
    received = await inbox.wait(len(done))
    await inbox.ack(each.position for each in received)
    await node.produce(TOPIC, [Outgoing(b"last", deliver_after_ms=delay_ms - 1)])
    await asyncio.sleep(3)  # indexed and sealed
    await node.checkpoint()
    return pending, done, inbox


async def ledger_ids(node: Node) -> list[int]:
    """Return the ledgers that could be rewritten."""
    return [each.ledger_id for each in (await node.broker.compactions.candidates(TOPIC)).ledgers]


async def begin(node: Node, **changes: Any) -> Lease:
    return await node.broker.compactions.begin(
        TOPIC, changes["ledgers"] if "ledgers" in changes else await ledger_ids(node), ()
    )


async def work(node: Node, lease: Lease) -> Outputs:
    """The job, on the broker's disk."""
    return await rewrite(node.vfs, DATA_DIR, f"{DATA_DIR}/{lease.folder}")


async def compact(node: Node) -> Committed:
    lease = await begin(node)
    return await node.broker.compactions.commit(lease.compaction_id, lease.epoch, await work(node, lease))


def generations(node: Node) -> dict[int, int]:
    return {ledger.name.ledger_id: ledger.name.generation for ledger in node.topic(TOPIC).log}


async def receive_all(node: Node, name: str, position: int = EARLIEST) -> Inbox:
    """A subscription's inbox, after all that is due now had time to arrive."""
    topic = node.topic(TOPIC)
    subscription = topic.subscriptions.find(name) or await node.create_subscription(
        TOPIC, name, position=position
    )
    inbox = node.attach(topic, subscription)
    await asyncio.sleep(1)
    inbox.poll()
    return inbox
