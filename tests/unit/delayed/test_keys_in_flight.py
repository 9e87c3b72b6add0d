"""Hashes of batches in flight: seen from the submission until the batch landed, and no longer (INTAKE-2, RECENT-3)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from broker.delayed.keys_in_flight import KeysInFlight
from broker.delayed.recent_keys import RecentKeys
from broker.model import Position, UInt64Column
from broker.storage.key_filter import Probe
from tests.unit.delayed.key_world import Topic, column

_OTHER = np.array([77], dtype=np.uint64)


def _hashes(batch: int, count: int = 10) -> UInt64Column:
    return np.arange(count, dtype=np.uint64) + np.uint64(1 + 1_000 * batch)


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_those_of_a_batch_are_in_flight_until_it_landed(order: tuple[int, ...]) -> None:
    async def scenario() -> None:
        flight = KeysInFlight()
        batches = [_hashes(batch) for batch in range(5)]
        futures = [_future() for _ in batches]
        for batch, (hashes, durable) in enumerate(zip(batches, futures, strict=True)):
            assert flight.of(hashes) is None and flight.of_batch(Position(1, batch)) is None
            flight.add(Position(1, batch), hashes, durable)
            assert flight.of_batch(Position(1, batch)) is hashes
        left = set(range(5))
        for landed in order:
            for batch, hashes in enumerate(batches):
                wanted = futures[batch] if batch in left else None
                assert flight.of(hashes) is wanted
                assert flight.of(np.append(hashes[3:4], _OTHER)) is wanted
            assert flight.of(_OTHER) is None
            assert len(flight) == 10 * len(left) == len(flight.hashes())
            futures[landed].set_result(None)
            left.remove(landed)
            await asyncio.sleep(0)
        assert all(flight.of(hashes) is None for hashes in batches)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_batch_in_flight_is_seen_whatever_is_sealed_or_cleared_meanwhile(is_cleared: bool) -> None:
    async def scenario() -> None:
        topic = await Topic().started()
        topic.produce([5, 6, 7])
        rows = [row for row, _ in topic.log.append([11, 12])]
        hashes, first, durable = column([11, 12]), rows[0], _future()
        assert not topic.keys.maybe(Probe(hashes)).any()
        topic.keys.expect(first, Probe(hashes), durable)
        assert topic.keys.maybe(Probe(hashes)).all()
        if is_cleared:
            topic.keys.clear()
        else:
            sealing = asyncio.create_task(topic.keys.seal())
            while not sealing.done():
                assert topic.keys.maybe(Probe(hashes)).all()
                await asyncio.sleep(0)
            assert await sealing
        assert topic.keys.maybe(Probe(hashes)).all()
        assert topic.keys.in_flight.of(hashes) is durable
        # Its rows come, and are noted no second time.
        entry_ids = np.array([row.entry_id for row in rows], dtype=np.uint32)
        topic.keys.add(first.ledger_id, entry_ids, hashes, is_expected=True)
        durable.set_result(None)
        await asyncio.sleep(0)
        assert topic.keys.in_flight.of(hashes) is None
        assert topic.keys.maybe(Probe(hashes)).all()
        assert await topic.keys.find(hashes) == {11: rows[:1], 12: rows[1:]}

    asyncio.run(scenario())


def test_hashes_whose_rows_never_come_do_not_gather() -> None:
    """Messages that are not delayed have a key that nobody holds."""

    async def scenario() -> None:
        flight = KeysInFlight()
        recent = RecentKeys(flight)
        for batch in range(200):
            durable = _future()
            recent.expect(Probe(_hashes(batch, 1_000)))
            flight.add(Position(1, batch), _hashes(batch, 1_000), durable)
            assert recent.maybe(Probe(_hashes(batch, 1_000))).all()
            if batch % 2:
                ids = np.arange(10, dtype=np.uint32)
                recent.add(_hashes(batch, 10), np.ones(10, np.int64), ids, is_expected=True)
            durable.set_result(None)
            await asyncio.sleep(0)
            assert recent.maybe(Probe(_hashes(1, 10))).all() or not batch
        assert len(recent) == 1_000
        assert recent.memory_bytes() < 1_000_000

    asyncio.run(scenario())
