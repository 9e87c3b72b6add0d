"""Times of a ledger that cannot be read cost that block of them, and not the index of the topic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from broker.model import Position
from broker.storage.blocks import BLOCK_ROWS, HEADER_BYTES
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.configs import changed
from tests.harness import EARLIEST, Inbox, Node, Outgoing, small_config
from tests.unit.topics.test_damage import flip

DELAY_MS = 30_000
TRACKERS = ("bucket", "memory")
NEVER_SEALED = {"min_index_count": 1 << 20, "seal_after_ms": 86_400_000, "max_backoff_ms": 20_000}


def run(scenario: Callable[[SimClock], Coroutine[None, None, None]]) -> None:
    async def whole(_: SimLoop, clock: SimClock) -> None:
        await scenario(clock)

    run_sim(whole, 1)


async def crashed_node(
    clock: SimClock, tracker: str, count: int, ledger_max_entries: int
) -> tuple[Node, list[Position]]:
    """A broker, not opened, whose ledgers hold messages that no bucket holds."""
    config = small_config(
        ledger_max_entries=ledger_max_entries,
        journal_segment_bytes=1 << 22,
        journal_group_bytes_max=1 << 20,
        tracker=tracker,
        **NEVER_SEALED,
    )
    node = Node(MemVfs(), clock, config).open()
    await node.create_subscription("orders", "billing", position=EARLIEST)
    positions: list[Position] = []
    while len(positions) < count:
        size = min(count - len(positions), ledger_max_entries, 1000)
        positions += await node.produce("orders", [Outgoing(b"x", deliver_after_ms=DELAY_MS)] * size)
    await node.checkpoint()
    return node.crash(CrashPolicy.KEEP_ALL), positions


def times_path(node: Node, ledger_id: int) -> str:
    ledger = node.topic("orders").log.find(ledger_id)
    assert ledger is not None
    return ledger.name.path("times")


async def came(inbox: Inbox, seconds: float) -> set[Position]:
    """Acknowledge and return what arrives until then, each once."""
    found: set[Position] = set()
    for part in [10.0] * int(seconds // 10) + [seconds % 10]:
        await asyncio.sleep(part)
        arrived = inbox.poll()
        assert all(each.sent_ms >= each.deliver_at_ms for each in arrived)
        assert await inbox.ack(each.position for each in arrived) == []
        found |= {each.position for each in arrived}
    assert len({each.position for each in inbox.received}) == len(inbox.received)
    return found


@pytest.mark.parametrize("tracker", TRACKERS)
@pytest.mark.parametrize("at", [4, HEADER_BYTES + 4, -4], ids=["header", "times", "footer"])
def test_damaged_times_hold_up_their_own_ledger_alone(tracker: str, at: int) -> None:
    async def scenario(clock: SimClock) -> None:
        node, positions = await crashed_node(clock, tracker, 30, 10)
        node.open(start=False)
        path = times_path(node, positions[0].ledger_id)
        place = at if at >= 0 else len(node.vfs.snapshot()[path]) + at
        flip(node.vfs, path, place)
        node.broker.start()
        inbox = await node.subscribe("orders", "billing")
        assert await came(inbox, DELAY_MS / 1000 + 1) == set(positions[10:])
        # What is produced now is indexed behind the damage.
        later = await node.produce("orders", [Outgoing(b"later", deliver_after_ms=5_000)])
        assert await came(inbox, 6) == set(later)
        assert node.broker.counters.index_operations["read", "failed"] >= 1
        flip(node.vfs, path, place)  # the file is put right
        assert await came(inbox, 70) == set(positions[:10])
        assert node.failures == []
        await node.stop()

    run(scenario)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_what_was_stepped_over_is_indexed_by_the_start_that_can_read_it(tracker: str) -> None:
    async def scenario(clock: SimClock) -> None:
        node, positions = await crashed_node(clock, tracker, 30, 10)
        sealing = changed(node.config, min_index_count=3, seal_after_ms=500)
        node = Node(node.vfs, clock, sealing).open(start=False)
        path = times_path(node, positions[0].ledger_id)
        flip(node.vfs, path, HEADER_BYTES + 4)
        node.broker.start()
        await node.topic("orders").index.caught_up()
        await asyncio.sleep(2)
        if tracker == "bucket":  # what is sealed may not pass for all of it
            assert node.broker.counters.index_operations["seal", "ok"] >= 1
        await node.stop()
        flip(node.vfs, path, HEADER_BYTES + 4)
        node = Node(node.vfs, clock, sealing).open()
        await node.topic("orders").index.caught_up()
        assert node.topic("orders").index.scheduled_count() == 30
        inbox = await node.subscribe("orders", "billing")
        assert await came(inbox, DELAY_MS / 1000 - 5) == set()
        assert await came(inbox, 6) == set(positions)
        await node.stop()

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", TRACKERS)
def test_one_damaged_block_of_many_is_stepped_over_alone(tracker: str) -> None:
    async def scenario(clock: SimClock) -> None:
        count = BLOCK_ROWS * 2 + 100
        node, positions = await crashed_node(clock, tracker, count, 100_000)
        node.open(start=False)
        flip(node.vfs, times_path(node, positions[0].ledger_id), HEADER_BYTES + BLOCK_ROWS * 8 + 4)
        node.broker.start()
        await node.topic("orders").index.caught_up()
        assert node.topic("orders").index.scheduled_count() == count - BLOCK_ROWS
        inbox = node.attach(node.topic("orders"), node.topic("orders").subscription("billing"), permits=count)
        found = await came(inbox, DELAY_MS / 1000 + 1)
        assert found == {each for each in positions if each.entry_id // BLOCK_ROWS != 1}
        node.abandon()

    run(scenario)
