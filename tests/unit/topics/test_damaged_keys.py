"""Times or rows of a ledger that cannot be read: keyed calls, lists and counts of the other messages answer all the same."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import AlreadyExists
from broker.model import Position
from broker.storage.blocks import HEADER_BYTES
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.topics.schedule_values import Cancel, ChangeResult, DueRange
from tests.configs import changed
from tests.depth import every_pair
from tests.harness import EARLIEST, Node, Outgoing, small_config
from tests.stepping import change_next
from tests.unit.topics.test_damage import flip
from tests.unit.topics.test_damaged_times import NEVER_SEALED, TRACKERS, run

LATER_MS = 600_000
ALWAYS = DueRange(0, 1 << 60)


def keyed(name: str, deliver_after_ms: int = LATER_MS) -> Outgoing:
    return Outgoing(name.encode(), deliver_after_ms=deliver_after_ms, schedule_key=name)


async def stopped_node(clock: SimClock, tracker: str, *, sealed: bool) -> tuple[Node, list[Position]]:
    """A broker, stopped: 30 messages in a ledger, of which 20 are due and 5 of these acknowledged, and 10 in the next."""
    config = small_config(
        ledger_max_entries=30,
        journal_segment_bytes=1 << 22,
        journal_group_bytes_max=1 << 20,
        tracker=tracker,
        **({"max_backoff_ms": 20_000} if sealed else NEVER_SEALED),
    )
    node = Node(MemVfs(), clock, config).open()
    await node.create_subscription("orders", "billing", position=EARLIEST)
    batch = [keyed(f"due-{n}", 1_000) for n in range(20)] + [keyed(f"first-{n}") for n in range(10)]
    positions = await node.produce("orders", batch)
    positions += await node.produce("orders", [keyed(f"second-{n}") for n in range(10)])
    inbox = await node.subscribe("orders", "billing")
    await inbox.wait(20)
    await inbox.ack(positions[:5])
    inbox.detach()
    await node.create_subscription("orders", "late")
    await node.stop()
    assert positions[29].ledger_id < positions[30].ledger_id
    # What is sealed may not pass for all of it.
    sealing = changed(config, min_index_count=3, seal_after_ms=500)
    return Node(node.vfs, clock, sealing), positions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "sealed", "column", "at"),
    every_pair(
        TRACKERS, [True, False], ["times", "rows"], [4, HEADER_BYTES + 68, -4]
    ),  # header, block, footer
)
def test_keyed_calls_lists_and_counts_go_on_beside_what_cannot_be_read(
    tracker: str, sealed: bool, column: str, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(clock: SimClock) -> None:
        node, positions = await stopped_node(clock, tracker, sealed=sealed)
        path = next(
            path
            for path in node.vfs.snapshot()
            if path.endswith(f"ledgers/{positions[0].ledger_id}.0.{column}")
        )
        place = at if at >= 0 else len(node.vfs.snapshot()[path]) + at
        flip(node.vfs, path, place)
        node.open()
        topic = node.topic("orders")
        await node.subscribe("orders", "billing")
        await node.subscribe("orders", "late")
        # Keys of messages that can be read are held, others are free, also those of what cannot be read.
        with pytest.raises(AlreadyExists):
            await node.produce("orders", [keyed("second-1")])
        (added,) = await node.produce("orders", [keyed("added")])
        (again,) = await node.produce("orders", [keyed("first-1")])
        (outcome,) = await topic.schedule.change(["second-3"], Cancel(), dry_run=False)
        assert (outcome.position, outcome.result) == (positions[33], ChangeResult.DONE)
        waiting = {*positions[30:33], *positions[34:], added, again}
        page = await topic.schedule.page(ALWAYS, "", None, 100)
        # Buckets know when what is damaged is due; where its rows can be read it is shown.
        assert {each.position for each in page.scheduled} - waiting in (set(), set(positions[20:30]))
        assert waiting <= {each.position for each in page.scheduled}
        page = await topic.schedule.page(ALWAYS, "second-", None, 100)
        assert {each.position for each in page.scheduled} == {*positions[30:33], *positions[34:]}
        await topic.counts.wait_exact(10)
        assert topic.counts.is_exact
        counted = await topic.schedule.count(ALWAYS, 0)
        assert sum(count for _, count in counted.bars) in (len(waiting), len(waiting) + 10)
        assert topic.counts.of(topic.subscription("billing")).scheduled >= len(waiting)
        assert topic.counts.of(topic.subscription("late")).scheduled == 2
        outcomes, _ = await change_next(topic, ALWAYS, "", Cancel(), dry_run=True)
        assert waiting <= {each.position for each in outcomes}
        await asyncio.sleep(120)
        told = [record.message for record in caplog.records]
        assert sum("schedule keys" in each.lower() for each in told) <= (0 if sealed else 1)
        assert not any("cannot be counted" in each for each in told)
        # The file is put right: a start later its keys are known.
        await node.stop()
        flip(node.vfs, path, place)
        node = Node(node.vfs, clock, node.config).open()
        with pytest.raises(AlreadyExists):
            await node.produce("orders", [keyed("first-2")])
        assert node.failures == []
        await node.stop()

    run(scenario)
