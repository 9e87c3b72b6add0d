"""The collector of cycles: full collections look only at what is new, until what is left out has grown."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from broker.runtime import cycles
from broker.runtime.cycles import CycleCollection, is_whole_due


class _Cycle:
    """Something that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


@asynccontextmanager
async def watching() -> AsyncIterator[CycleCollection]:
    gc.collect()
    collection = CycleCollection()
    task = asyncio.create_task(collection.run())
    await asyncio.sleep(0)
    try:
        yield collection
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.slow
async def test_what_a_full_collection_has_walked_the_next_one_leaves_out() -> None:
    async with watching():
        old = [[i] for i in range(1_000)]
        gc.collect()
        assert gc.get_freeze_count() >= 1_000
        new: list[object] = []
        assert any(each is new for each in gc.get_objects())
        assert not any(each is old for each in gc.get_objects())


@pytest.mark.slow
async def test_garbage_of_what_is_new_is_found() -> None:
    async with watching():
        gc.collect()
        gone = weakref.ref(_Cycle())
        gc.collect()
        assert gone() is None


@pytest.mark.slow
async def test_garbage_of_what_was_left_out_is_found_once_that_has_doubled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with watching() as collection:
        old: _Cycle | None = _Cycle()
        gone = weakref.ref(old)
        gc.collect()
        old = None
        monkeypatch.setattr(cycles, "is_whole_due", lambda frozen, kept: False)
        collection.look()
        gc.collect()
        assert gone() is not None
        monkeypatch.setattr(cycles, "is_whole_due", lambda frozen, kept: frozen > kept)
        collection.look()
        assert gone() is None
        assert gc.get_freeze_count() > 0


@pytest.mark.slow
async def test_objects_that_come_and_go_are_not_walked_for_some_hundreds_of_them() -> None:
    thresholds, collections = gc.get_threshold(), list[int]()
    gc.set_threshold(700, 10, 10)  # as a process begins

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    async with watching():
        gc.collect()
        gc.callbacks.append(note)
        try:
            for _ in range(10):
                batch = [[i] for i in range(900)]
                del batch
        finally:
            gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    assert not collections


@pytest.mark.slow
async def test_nothing_is_counted_unless_something_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.disable()
    try:
        async with watching() as collection:
            monkeypatch.setattr(cycles, "is_whole_due", lambda *_: pytest.fail("it was counted"))
            collection.look()
    finally:
        gc.enable()


@pytest.mark.slow
async def test_the_end_leaves_the_collector_as_it_was() -> None:
    before, thresholds = list(gc.callbacks), gc.get_threshold()
    async with watching():
        gc.collect()
        assert len(gc.callbacks) == len(before) + 1
        assert gc.get_threshold() != thresholds
    assert gc.callbacks == before
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("frozen", "kept", "is_due"),
    [(0, 0, False), (200_000, 0, True), (399_999, 100_000, False), (400_000, 100_000, True)],
)
def test_all_is_walked_when_twice_as_much_was_left_out(frozen: int, kept: int, is_due: bool) -> None:
    assert is_whole_due(frozen, kept) is is_due
