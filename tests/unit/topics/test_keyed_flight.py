"""Hashes of batches under way: each until its batch landed, and no longer (INTAKE-2)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from broker.topics.keyed_intake import InFlight


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_those_of_a_batch_are_under_way_until_it_landed(order: tuple[int, ...]) -> None:
    async def scenario() -> None:
        flight = InFlight()
        batches = [np.arange(10, dtype=np.uint64) + np.uint64(1 + 100 * batch) for batch in range(5)]
        futures = [asyncio.get_running_loop().create_future() for _ in batches]
        for hashes, durable in zip(batches, futures, strict=True):
            assert flight.of(hashes) is None
            flight.add(hashes, durable)
        left = set(range(5))
        for landed in order:
            for batch, hashes in enumerate(batches):
                wanted = futures[batch] if batch in left else None
                assert flight.of(hashes) is wanted
                assert flight.of(np.append(hashes[3:4], np.uint64(77))) is wanted
            assert flight.of(np.array([77], dtype=np.uint64)) is None
            futures[landed].set_result(None)
            left.remove(landed)
            await asyncio.sleep(0)
        assert all(flight.of(hashes) is None for hashes in batches)

    asyncio.run(scenario())
