"""Answers about messages that a compaction left out."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from broker.errors import Unavailable
from broker.model import Position
from broker.testing.mem_vfs import CrashPolicy
from broker.topics.schedule_values import Cancel, ChangeResult, Move
from broker.topics.topic_keys import TopicKeys
from tests.harness import DATA_DIR, Node, Outgoing
from tests.unit.folder.compaction_world import (
    DAY_MS,
    LATER_MS,
    TOPIC,
    begin,
    compact,
    fill,
    generations,
    ledger_ids,
    run,
    work,
)


def test_of_what_is_left_out_it_stays_known_whether_it_was_cancelled():
    """Asked by id: before, after each compaction, over a crash and a stop."""

    async def ended(node: Node, positions: list[Position]) -> list[tuple[ChangeResult, tuple[str, ...]]]:
        outcomes = await node.topic(TOPIC).schedule.change(positions, Cancel(), dry_run=False)
        moved = await node.topic(TOPIC).schedule.change(positions, Move(deliver_after_ms=1), dry_run=False)
        assert [each.result for each in moved] == [each.result for each in outcomes]
        return [(each.result, each.delivered_to) for each in outcomes]

    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(TOPIC, "billing")
        stays, later = Outgoing(b"stays", deliver_after_ms=LATER_MS), Outgoing(b"", deliver_after_ms=2_000)
        soon, kept = Outgoing(b"", deliver_after_ms=100), Outgoing(b"", deliver_after_ms=DAY_MS)
        of = await node.produce(TOPIC, [soon, kept, later, soon, kept, later, stays, Outgoing(b"now")])
        await node.topic(TOPIC).schedule.change([of[1], of[4]], Cancel(), dry_run=False)
        await inbox.wait(5)
        await inbox.ack([of[0], of[2], of[3], of[5], of[7]])
        await node.produce(TOPIC, [stays] * 10)
        await asyncio.sleep(3)
        await node.checkpoint()
        asked = of[:6]
        was, gone = (ChangeResult.ALREADY_CANCELLED, ()), (ChangeResult.ALREADY_DELIVERED, ())
        sent = (ChangeResult.ALREADY_DELIVERED, ("billing",))
        assert await ended(node, asked) == [sent, was, sent] * 2
        assert (await compact(node)).refused == {}
        assert await ended(node, asked) == [gone, was, gone] * 2
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert await ended(node, asked) == [gone, was, gone] * 2
        # What is left is cancelled, and compacted in its turn: known as such, beside what is known since.
        await node.topic(TOPIC).schedule.change(of[6:7], Cancel(), dry_run=False)
        await asyncio.sleep(3)
        await node.checkpoint()
        await compact(node)
        await node.stop()
        node = Node(node.vfs, node.clock, node.config).open()
        assert await ended(node, of[:7]) == [gone, was, gone, gone, was, gone, was]
        return node

    run(scenario)


@pytest.mark.slow
def test_nothing_is_left_out_while_its_keys_cannot_be_remembered():
    async def scenario(node: Node) -> Node:
        await fill(node, 1)
        (ledger_id,) = await ledger_ids(node)
        lease = await begin(node)
        outputs = await work(node, lease)
        before = generations(node), set(node.vfs.list_dir(f"{DATA_DIR}/topics/1/ledgers"))

        async def remember(_: TopicKeys, ledger_id: int) -> None: ...

        with patch.object(TopicKeys, "remember", remember), pytest.raises(Unavailable):
            await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert (generations(node), set(node.vfs.list_dir(f"{DATA_DIR}/topics/1/ledgers"))) == before
        assert (await compact(node)).ledger_ids == (ledger_id,)
        await asyncio.sleep(
            2 * node.config.tuning.compaction_cleanup_ms / 1000
        )  # what the first job wrote goes
        return node

    run(scenario)
