"""Three whole brokers of one shard under faults: nothing that a client was told turns out wrong, whoever told it.

Faults that it finds are in test_seeded_faults.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from tests.depth import at_depth
from tests.sim.cluster_world import ClusterWorld
from tests.sim.processes import ProcessLoop

SECONDS = 40


def run(seed: int) -> ClusterWorld:
    loop = ProcessLoop(seed)
    world = ClusterWorld(loop, seed)
    asyncio.set_event_loop(None)
    try:
        loop.run_until_complete(world.run(SECONDS))
    finally:
        try:
            loop.end()
        finally:
            loop.close()
    return world


def test_nothing_that_clients_were_told_turns_out_wrong(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for seed in range(at_depth(fast=2, change=3, deep=300)):
        world = run(seed)
        assert world.errors == [], f"seed {seed}: {world.count}"
        counts += world.count
    for name in (
        "take-overs",
        "killed",
        "frozen",
        "counted",
        "cancelled",
        "acks",
        "delivered",
        "ENGINE_UNREACHABLE",
        "bases",
        "seeded",
        "cut off by a trim",
        "states compared",
        "dropped ledgers",
    ):
        assert counts[name] > 0, f"{name}: the world has become harmless"
