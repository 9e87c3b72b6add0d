"""The check of a topic at work: what it may hold in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.delayed.check import IndexCheck
from broker.folder import index_check, live_check
from tests.harness import Node
from tests.unit.topics.change_world import TOPIC, messages, run

HOUR_MS = 3_600_000


@pytest.mark.parametrize(("entries_max", "passes"), [(4, 2), (8, 1)])
def test_a_check_takes_as_many_passes_as_its_bound_of_entries_wants(
    entries_max: int, passes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(live_check, "ENTRIES_MAX", entries_max)
    begun: list[Any] = []

    def check(*arguments: Any, **ledgers: Any) -> IndexCheck:
        begun.append(ledgers)
        return IndexCheck(*arguments, **ledgers)

    monkeypatch.setattr(index_check, "IndexCheck", check)

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS))
        await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS))  # in a ledger of their own
        await asyncio.sleep(7)  # sealed
        assert (await node.broker.verify_topic(TOPIC)).findings == []
        assert len(begun) == passes
        return node

    run(scenario)
