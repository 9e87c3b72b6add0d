"""Hashes of batches in flight: seen from the submission until the batch landed, and no longer (INTAKE-2, RECENT-3)."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest

from broker.delayed.keys_in_flight import KeysInFlight
from broker.delayed.recent_keys import RecentKeys
from broker.model import Int64Column, Position, UInt32Column, UInt64Column
from broker.storage.key_filter import OpenFilter, Probe
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


@pytest.mark.parametrize("asked_count", [1, 100])
def test_a_look_takes_no_step_for_each_batch(asked_count: int) -> None:
    """A key that is replaced again and again passes the filter, and a store that takes long has hundreds in flight."""

    def calls_of_a_look(batch_count: int) -> int:
        flight, calls = KeysInFlight(), 0
        for batch in range(batch_count):
            flight.add(Position(1, batch), _hashes(batch, 1), _future())

        def note(_: object, event: str, __: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        asked = np.arange(asked_count, dtype=np.uint64) + np.uint64(500)
        flight.of(asked[:1])
        sys.setprofile(note)
        try:
            found = flight.of(asked)
        finally:
            sys.setprofile(None)
        assert found is None
        return calls

    async def scenario() -> None:
        few, many = calls_of_a_look(2), calls_of_a_look(300)
        assert 0 < many < few + 10

    asyncio.run(scenario())


def test_rows_are_noted_once_and_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a seal that failed, and those that are read: all of them at once would hold up the event loop."""
    counts: list[int] = []
    add = OpenFilter.add

    def counted(self: OpenFilter, probe: Probe) -> None:
        counts.append(len(probe.hashes))
        add(self, probe)

    def rows(batch: int, count: int) -> tuple[UInt64Column, Int64Column, UInt32Column]:
        return _hashes(batch, count), np.ones(count, np.int64), np.arange(count, dtype=np.uint32)

    monkeypatch.setattr(OpenFilter, "add", counted)
    older, recent = RecentKeys(KeysInFlight()), RecentKeys(KeysInFlight())
    older.add(*rows(0, 10_000))
    assert sum(counts) == 10_000 and max(counts) <= 2_048
    recent.add(*rows(100, 1_000))
    counts.clear()
    recent.prepend(older)
    assert sum(counts) == 11_000 and max(counts) <= 2_048  # in a larger filter
    counts.clear()
    recent.add(*rows(200, 4_000))
    assert sum(counts) == 4_000 and max(counts) <= 2_048  # in the same one
    for batch, count in ((0, 10_000), (100, 1_000), (200, 4_000)):
        assert recent.maybe(Probe(_hashes(batch, count))).all()
