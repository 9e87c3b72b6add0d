from __future__ import annotations

import asyncio

import pytest

from broker.runtime.signal import Signal


async def test_a_signal_that_is_set_does_not_wait():
    signal = Signal()
    signal.set()
    assert signal.is_set()
    await signal.wait()
    await signal.wait()


async def test_a_waiter_goes_on_when_it_is_set_and_a_clear_counts_for_the_next_wait():
    signal = Signal()
    task = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert not task.done()
    signal.set()
    signal.set()
    signal.clear()
    await task
    again = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert not again.done()
    signal.set()
    await again


async def test_who_is_cancelled_leaves_the_signal_to_others():
    signal = Signal()
    task = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    other = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    signal.set()
    await other
