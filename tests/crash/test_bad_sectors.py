"""A disk that cannot read one place of one file, for a while and for good: other messages go on, and none is given up.

An error that passes costs a wait. One that lasts is damage, as far as whoever reads is concerned, with a difference:
the bytes may be whole, so what lies there stays owed, and comes once the place can be read again.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine

import pytest

from broker.model import ROW, Position
from broker.storage.blocks import HEADER_BYTES, TIME
from broker.storage.ledger_files import FAILED_READS_MAX, FAILING_NS
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import EARLIEST, Inbox, Node, Outgoing, small_config

COUNT, DELAY_MS = 60, 20_000
LEDGER_ENTRIES = 20
BAD = 5  # in the second ledger
LONG_SECONDS = FAILING_NS / 1e9 + 180
"""A failure that lasts is known as such, and what waited for that has been tried again."""

# Where the message of BAD lies in each file: its frame alone, or rows that one checksum vouches for.
PLACES = {"times": HEADER_BYTES + BAD * TIME.itemsize, "rows": HEADER_BYTES + BAD * ROW.itemsize, "data": -1}


def run(scenario: Callable[[SimClock], Coroutine[None, None, None]]) -> None:
    async def whole(_: SimLoop, clock: SimClock) -> None:
        await scenario(clock)

    run_sim(whole, 1)


async def crashed_node(
    clock: SimClock, tracker: str, delay_ms: int = DELAY_MS
) -> tuple[Node, list[Position]]:
    """A broker, not started, with messages that its index holds nowhere but in the ledgers' times."""
    config = small_config(
        ledger_max_entries=LEDGER_ENTRIES,
        tracker=tracker,
        min_index_count=1 << 20,
        seal_after_ms=86_400_000,
        max_backoff_ms=20_000,
    )
    node = Node(MemVfs(), clock, config).open()
    await node.create_subscription("orders", "billing", position=EARLIEST)
    positions: list[Position] = []
    for number in range(0, COUNT, 10):  # in each ledger as many that are due as that are not
        batch = [Outgoing(b"%d" % number, deliver_after_ms=delay_ms if n % 2 else 0) for n in range(10)]
        positions += await node.produce("orders", batch)
    await node.checkpoint()
    return node.crash(CrashPolicy.KEEP_ALL).open(start=False), positions


async def bad_sector(node: Node, kind: str, ledger_id: int) -> Fault:
    ledger = node.topic("orders").log.find(ledger_id)
    assert ledger is not None
    at = PLACES[kind]
    if at < 0:
        row = (await ledger.read_rows(BAD, 1))[0]
        at = HEADER_BYTES + int(row["offset"]) + 4
    return node.vfs.faults.add(Fault("read", ledger.name.path(kind), onward=True, at=at))


class Worker:
    """Comes again when its stream ends, and acknowledges what it gets."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.came: set[Position] = set()
        self.inboxes: list[Inbox] = []

    async def work(self, seconds: float) -> set[Position]:
        """Return what has arrived so far."""
        inbox = await self._connect()
        for _ in range(int(seconds)):
            await asyncio.sleep(1)
            if inbox.consumer.closed_because is not None:
                inbox.detach()
                inbox = await self._connect()
            arrived = inbox.poll()
            assert all(each.sent_ms >= each.deliver_at_ms for each in arrived)
            assert await inbox.ack(each.position for each in arrived) == []
            assert not self.came & {each.position for each in arrived}
            self.came |= {each.position for each in arrived}
        inbox.detach()
        return self.came

    async def _connect(self) -> Inbox:
        self.inboxes.append(await self.node.subscribe("orders", "billing"))
        return self.inboxes[-1]


@pytest.mark.parametrize("tracker", ["bucket", "memory"])
@pytest.mark.parametrize("kind", PLACES)
def test_a_place_that_can_never_be_read_holds_up_what_lies_there_alone(kind: str, tracker: str) -> None:
    async def scenario(clock: SimClock) -> None:
        node, positions = await crashed_node(clock, tracker)
        fault = await bad_sector(node, kind, positions[LEDGER_ENTRIES].ledger_id)
        node.broker.start()
        worker = Worker(node)
        came = await worker.work(LONG_SECONDS)
        behind = positions[
            LEDGER_ENTRIES : 2 * LEDGER_ENTRIES
        ]  # one checksum vouches for the whole of this ledger
        held = {behind[BAD]} if kind == "data" else set(behind)
        assert came == set(positions) - held
        # Nobody is turned away any more, and what is produced now goes its way.
        connected = len(worker.inboxes)
        later = await node.produce("orders", [Outgoing(b"later"), Outgoing(b"late", deliver_after_ms=2_000)])
        assert await worker.work(60) == came | set(later)
        assert len(worker.inboxes) == connected + 1
        subscription = node.topic("orders").subscription("billing")
        assert subscription.unsettled_count() == len(held)
        assert subscription.counters.unreadable_messages >= len(held)
        assert subscription.counters.damaged_messages == subscription.counters.dead_lettered_messages == 0
        if kind == "times":
            assert node.broker.counters.index_operations["read", "failed"] >= 1
        fault.at = 1 << 60  # the disk reads it again
        assert await worker.work(120) == {*positions, *later}
        assert subscription.unsettled_count() == 0
        assert node.failures == []
        await node.stop()

    run(scenario)


@pytest.mark.parametrize("kind", PLACES)
def test_an_error_that_passes_costs_a_wait_and_nothing_is_set_aside(kind: str) -> None:
    async def scenario(clock: SimClock) -> None:
        node, positions = await crashed_node(clock, "bucket")
        fault = await bad_sector(node, kind, positions[LEDGER_ENTRIES].ledger_id)
        node.broker.start()
        worker = Worker(node)
        await worker.work(FAILING_NS / 1e9 - 10)
        assert fault.hit_count > FAILED_READS_MAX
        fault.at = 1 << 60
        assert await worker.work(DELAY_MS / 1000) == set(positions)
        subscription = node.topic("orders").subscription("billing")
        assert subscription.counters.unreadable_messages == 0
        assert ("read", "failed") not in node.broker.counters.index_operations
        await node.stop()

    run(scenario)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_the_process_lacks_is_no_fault_of_the_file(error: int) -> None:
    async def scenario(clock: SimClock) -> None:
        node, positions = await crashed_node(clock, "bucket")
        node.vfs.faults.add(Fault("open", "*/ledgers/*", onward=True, error=error))
        node.broker.start()
        worker = Worker(node)
        assert await worker.work(LONG_SECONDS) == set()
        node.vfs.faults.clear()
        assert await worker.work(10) == set(positions)
        assert node.topic("orders").subscription("billing").counters.unreadable_messages == 0
        await node.stop()

    run(scenario)


def test_rows_that_were_stepped_over_are_not_forgotten_when_the_next_read_fails_in_passing() -> None:
    async def scenario(clock: SimClock) -> None:
        node, positions = await crashed_node(clock, "bucket", 600_000)
        ledger = node.topic("orders").log.find(positions[LEDGER_ENTRIES].ledger_id)
        assert ledger is not None
        path = ledger.name.path("times")
        file = node.vfs.open(path)
        place, whole = PLACES["times"], file.pread(1, PLACES["times"])
        file.pwrite([bytes([whole[0] ^ 8])], place)
        node.broker.start()
        await node.topic("orders").index.caught_up()
        assert node.topic("orders").index.scheduled_count() < COUNT // 2
        file.pwrite([whole], place)
        node.vfs.faults.add(Fault("read", path, at=place))  # when it is read again, once
        await asyncio.sleep(130)
        assert node.topic("orders").index.scheduled_count() == COUNT // 2
        await node.stop()

    run(scenario)
