"""Every byte of a small data directory, flipped one at a time: a flip costs at most what it hit, or the broker refuses to
start and says in which file and where.

What a flip may cost: one message, if it lies in a message; the messages of one ledger, if it lies in the rows or times of
that ledger, whose checksums cover 4,096 rows; the last group, if it lies in that, which nothing vouches for; nothing,
anywhere else. No wrong byte is ever delivered, nothing comes early, no task ends, and what was not delivered is counted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from broker.errors import Corrupt
from broker.jobs.verify import verify_data_dir
from broker.policy import SubscriptionPolicy
from broker.storage.segment import scan
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import Latency, SimLoop, run_sim
from broker.topics.schedule_values import Cancel, Move
from tests.depth import at_depth, sampled
from tests.harness import DATA_DIR, DAY_MS, EARLIEST, Node, Outgoing
from tests.unit.folder.compaction_world import TOPIC, compact, config, fill

KINDS = (
    "broker.manifest",
    "/manifest",
    ".seg",
    ".data",
    ".times",
    ".rows",
    ".amend",
    ".bucket",
    ".keys",
    "cursors/",
    "cursors/producers",
)
EDGE_BYTES = 32
"""Of each file the first and the last bytes, headers and footers, are flipped one by one; in between, some are skipped.
A change flips a few of these, on each day others."""
STRIDE = at_depth(change=11, deep=1)
QUICK = Latency(slow_every=0)
DELAY_MS = 15_000
CONFIG = config(checkpoint_interval_ms=DAY_MS, clock_recheck_ms=DELAY_MS, max_backoff_ms=20_000)
SUBSCRIPTIONS = ("billing", "mail")
LAST = b"the last group"


class Outcome(NamedTuple):
    """Messages sent to each subscription until all was due, by ledger, and the count of lost ones."""

    found: dict[str, dict[bytes, int]]
    told: int


@cache
def disk() -> tuple[MemVfs, int]:
    """A directory with every kind of file, as a crash left it, and when."""

    async def scenario(_: SimLoop, clock: SimClock) -> tuple[MemVfs, int]:
        node = Node(MemVfs(), clock, CONFIG).open()
        pending, _done, inbox = await fill(node, 1, kept=(2, 5), delay_ms=DELAY_MS)
        await node.create_subscription(
            TOPIC, "mail", policy=SubscriptionPolicy(max_delivery_attempts=3), position=EARLIEST
        )
        mail = await node.subscribe(TOPIC, "mail")
        await asyncio.sleep(1)
        await mail.ack([each.position for each in mail.poll()][1:])
        mail.detach()
        await compact(node)
        keyed = [Outgoing(b"keyed-%d" % n, deliver_after_ms=DELAY_MS, schedule_key=f"k{n}") for n in range(6)]
        await node.produce(TOPIC, keyed)
        await node.produce(TOPIC, [Outgoing(b"numbered", deliver_after_ms=1, sequence_id=7)], "a producer")
        await asyncio.sleep(3)
        schedule = node.topic(TOPIC).schedule
        await schedule.change(pending[:1], Cancel(), dry_run=False)
        await schedule.change(pending[1:2], Move(deliver_after_ms=DELAY_MS // 2), dry_run=False)
        await node.produce(TOPIC, [Outgoing(b"plain-%d" % n) for n in range(4)])
        inbox.detach()
        await node.checkpoint()
        later = [Outgoing(b"after-%d" % n, deliver_after_ms=n % 2 * DELAY_MS) for n in range(4)]
        await node.produce(TOPIC, later)
        await node.produce(TOPIC, [Outgoing(LAST)])
        await asyncio.sleep(1)
        next_life = node.crash(CrashPolicy.KEEP_ALL)
        return next_life.vfs, clock.now_ms()

    return run_sim(scenario, 1, latency=QUICK)


def copy_of(vfs: MemVfs) -> MemVfs:
    return vfs.crashed(vfs.op_count, CrashPolicy.KEEP_ALL)


def delivered_from(vfs: MemVfs, now_ms: int) -> Outcome:
    """Start a broker on a directory and deliver everything. Raises Corrupt of the start."""

    async def scenario(_: SimLoop, clock: SimClock) -> Outcome:
        node = Node(vfs, clock, CONFIG).open()
        found: dict[str, dict[bytes, int]] = {}
        inboxes = {name: await node.subscribe(TOPIC, name) for name in SUBSCRIPTIONS}
        for seconds in (1, DELAY_MS / 1000, 5):
            await asyncio.sleep(seconds)
            for name, inbox in inboxes.items():
                came = inbox.poll()
                for each in came:
                    assert each.sent_ms >= each.deliver_at_ms, f"{each.payload!r} came early"
                    found.setdefault(name, {})[each.payload] = each.position.ledger_id
                assert await inbox.ack(each.position for each in came) == []
        assert node.failures == []
        counts = [inbox.subscription.counters for inbox in inboxes.values()]
        told = sum(each.damaged_messages + each.unreadable_messages for each in counts)
        node.abandon()
        return Outcome(found, told)

    return run_sim(scenario, 1, start_ms=now_ms, latency=QUICK)


@cache
def owed() -> dict[str, dict[bytes, int]]:
    vfs, now_ms = disk()
    outcome = delivered_from(copy_of(vfs), now_ms)
    assert outcome.told == 0
    return outcome.found


def kind_of(path: str) -> str:
    return next((kind for kind in reversed(KINDS) if kind in path), "")


def files_of(kind: str) -> Iterator[tuple[str, bytes]]:
    vfs, _ = disk()
    return ((path, content) for path, content in vfs.snapshot().items() if kind_of(path) == kind)


def places_in(length: int) -> list[int]:
    edges = {*range(min(length, EDGE_BYTES)), *range(max(0, length - EDGE_BYTES), length)}
    return list(sampled(sorted({*edges, *range(0, length, STRIDE)}), at_depth(change=25, deep=1)))


def written_bytes(path: str, content: bytes) -> int:
    """Bytes of a file that hold something, and as many more as its last ones: a journal's file is longer than that."""
    return (
        min(len(content), len(content.rstrip(b"\0")) + EDGE_BYTES) if path.endswith(".seg") else len(content)
    )


def may_cost(path: str, content: bytes, at: int) -> tuple[int, set[bytes]]:
    """Return how many messages of a subscription a flip may cost, and which."""
    all_owed = [pair for messages in owed().values() for pair in messages.items()]
    if match := re.search(r"ledgers/(\d+)\.\d+\.(data|times|rows)$", path):
        here = {payload for payload, ledger_id in all_owed if ledger_id == int(match[1])}
        # A broken header costs the file, which is all of the ledger.
        return (1 if match[2] == "data" and at >= 32 else len(here)), here
    if path.endswith(".seg"):
        last = list(scan(content, int(path[-20:-4], 16)))[-1]
        return (1, {LAST}) if at >= last.start else (0, set())
    return 0, set()


def wrong_of(path: str, content: bytes, at: int) -> str:
    """Describe an excessive cost of one flip; empty if there is none."""
    vfs, now_ms = disk()
    flipped = copy_of(vfs)
    file = flipped.open(path)
    file.pwrite([bytes([content[at] ^ 1 << at % 8])], at)
    file.close()
    notes = verify_data_dir(flipped, DATA_DIR).notes if path.endswith(".seg") else []
    try:
        outcome = delivered_from(flipped, now_ms)
    except Corrupt as error:
        return "" if error.path and error.offset >= 0 else f"refused without file and offset: {error}"
    except AssertionError as error:
        return str(error)
    count, which = may_cost(path, content, at)
    for name, messages in owed().items():
        have = outcome.found.get(name, {})
        if strange := have.keys() - messages.keys():
            return f"{name} got {strange}"
        lost = messages.keys() - have.keys()
        if len(lost) > count or lost - which:
            return f"{name} lost {lost}"
        if lost and not (outcome.told or notes):
            return f"{name} lost {lost}, and nothing tells of it"
    return ""


def test_the_directory_has_every_kind_of_file() -> None:
    vfs, _ = disk()
    assert {kind_of(path) for path, content in vfs.snapshot().items() if content} == set(KINDS)
    assert all(len(messages) > 5 and LAST in messages for messages in owed().values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_costs_at_most_what_it_hit(kind: str) -> None:
    flips = [
        (path, content, at)
        for path, content in files_of(kind)
        for at in places_in(written_bytes(path, content))
    ]
    assert flips
    wrong = [f"{path}@{at}: {what}" for path, content, at in flips if (what := wrong_of(path, content, at))]
    assert not wrong, "\n".join(wrong)
