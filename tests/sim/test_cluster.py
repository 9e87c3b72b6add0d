"""Three whole brokers of a shard, or of several, under faults: nothing that a client was told turns out wrong.

Faults that it finds are in test_seeded_faults.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from tests.depth import DEPTH
from tests.sim.cluster_world import Machines
from tests.sim.processes import ProcessLoop

SECONDS = 40
SEEDS = range(300) if DEPTH == "deep" else (4,)
"""For a change one of three shards, which meets all that is counted."""


def run(seed: int, shards: int = 1) -> Machines:
    loop = ProcessLoop(seed)
    world = Machines(loop, seed, shards)
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
    """Of one shard, and of three: what becomes of a process becomes of one, what becomes of a machine of all."""
    caplog.set_level(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        world = run(seed, shards=3 if seed % 3 else 1)
        assert world.errors == [], f"seed {seed}: {world.count}"
        assert all(each.count["delivered"] for each in world.worlds), f"seed {seed}: a shard was of no use"
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
        "machine killed, owner",
        "machine lost disk",
    ):
        assert counts[name] > 0, f"{name}: the world has become harmless"
