"""Turns and places go by connection: calls that only begin, on however many connections, keep no other one out."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from broker.errors import LimitReached
from broker.rpc import reception
from broker.rpc.reception import BegunCall, CallKind, Places, Shares, Turns
from broker.rpc.unfinished_messages import UnfinishedMessages
from broker.runtime.allocator import Trimmer
from broker.runtime.foreground import Foreground

TURNS = 4
NO_BOUND = UnfinishedMessages(1 << 40, 1, Trimmer(1_000))


class Caller:
    """A place as `Shares` needs it."""

    def __init__(self, peer: str) -> None:
        self.peer = peer


class Call:
    """A context whose message is there, or never comes."""

    def __init__(self, peer: str, *, is_silent: bool) -> None:
        self._peer, self._is_silent = peer, is_silent

    def peer(self) -> str:
        return self._peer

    async def read(self) -> bytes:
        if self._is_silent:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return b"x"


def make_places(most: int, seconds: float = 0.2) -> Places:
    return Places(
        CallKind.SHORT, most, most, Turns(TURNS, seconds), Trimmer(1_000), NO_BOUND, Foreground(lambda: False)
    )


async def call(places: Places, peer: str, *, is_silent: bool) -> bytes:
    place = places.enter(cast("Any", Call(peer, is_silent=is_silent)), 30)
    try:
        return cast("bytes", await places.first_message(place))
    finally:
        places.leave(place)


@asynccontextmanager
async def flood(places: Places, connections: int) -> AsyncIterator[None]:
    """Silent calls on all connections, and new ones all the time."""
    tasks: set[asyncio.Task[bytes]] = set()

    def begin() -> None:
        for number in range(connections):
            tasks.add(asyncio.create_task(call(places, f"stranger {number}", is_silent=True)))

    async def go_on() -> None:
        while True:
            begin()
            await asyncio.sleep(0.002)  # oftener than turns end: the newest call is a stranger's at any time

    begin()
    await asyncio.sleep(0)
    going = asyncio.create_task(go_on())
    try:
        yield
    finally:
        for task in (going, *tasks):
            task.cancel()
        await asyncio.gather(going, *tasks, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("connections", [1, TURNS, TURNS + 1, 5 * TURNS])
async def test_a_call_is_served_however_many_only_begin(connections: int):
    places = make_places(200)
    async with flood(places, connections):
        for _ in range(3):
            async with asyncio.timeout(5):
                assert await call(places, "friend", is_silent=False) == b"x"


async def test_calls_that_wait_to_be_read_are_bounded_and_the_oldest_of_most_gives_way():
    foreground = Foreground(lambda: False)
    places = Places(CallKind.SHORT, 1_000, 10, Turns(TURNS, 30), Trimmer(1_000), NO_BOUND, foreground)
    tasks: list[asyncio.Task[bytes]] = []
    for number in range(40):
        peer = "friend" if number == 0 else f"stranger {number % 3}"
        tasks.append(asyncio.create_task(call(places, peer, is_silent=True)))
        await asyncio.sleep(0)
    while sum(task.done() for task in tasks) < 30:
        await asyncio.sleep(0)
    assert all(isinstance(task.exception(), LimitReached) for task in tasks if task.done())
    assert not tasks[0].done() and not any(task.done() for task in tasks[-9:])
    assert foreground.calls == 10
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert foreground.calls == 0


@pytest.mark.slow
async def test_calls_of_a_connection_share_its_turn(monkeypatch: pytest.MonkeyPatch):
    """So a connection with many calls has more than one of them served while the others have one turn each."""
    monkeypatch.setattr(reception, "_TURN_SECONDS_MIN", 0.5)
    places = make_places(200, 1.0)
    async with flood(places, TURNS):
        begin = asyncio.get_running_loop().time()
        friends = [call(places, "friend", is_silent=False) for _ in range(8)]
        async with asyncio.timeout(5):
            assert await asyncio.gather(*friends) == [b"x"] * 8
        assert asyncio.get_running_loop().time() - begin < 3  # of 8 turns one after the other: 8


async def test_a_turn_that_was_taken_from_a_connection_is_not_its_own_again():
    """Its next call waits already, and for whom the turn was freed comes later."""
    places = Places(
        CallKind.SHORT, 20, 20, Turns(TURNS, 30), Trimmer(1_000), NO_BOUND, Foreground(lambda: False)
    )
    greedy = [asyncio.create_task(call(places, "greedy", is_silent=True)) for _ in range(TURNS + 1)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert await call(places, "friend", is_silent=False) == b"x"
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


async def test_the_connection_with_most_calls_gives_way():
    turns = Turns(TURNS, 30)
    places = Places(CallKind.SHORT, 20, 20, turns, Trimmer(1_000), NO_BOUND, Foreground(lambda: False))
    tasks: list[asyncio.Task[bytes]] = []

    async def begin(peer: str) -> asyncio.Task[bytes]:
        task = asyncio.create_task(call(places, peer, is_silent=True))
        tasks.append(task)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    friend = await begin("friend")
    for number in range(200):
        await begin(f"stranger {number % 7}")
    assert not friend.done()
    ended = [task for task in tasks if task.done()]
    assert len(ended) >= 180 and all(isinstance(task.exception(), LimitReached) for task in ended)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_shares_are_counted_as_a_counter_counts_them():
    rng = random.Random(3)
    shares = Shares()
    held: list[BegunCall] = []
    for _ in range(3_000):
        if held and rng.random() < 0.5:
            shares.discard(gone := held.pop(rng.randrange(len(held))))
            shares.discard(gone)
        else:
            place = cast("BegunCall", Caller(str(rng.randrange(6))))
            shares.add(place)
            held.append(place)
        counts = Counter(place.peer for place in held)
        most = max(counts.values(), default=0)
        assert shares.lead("nobody") == most
        oldest = shares.oldest_of_most()
        assert (oldest is None) == (not held)
        if oldest is not None:
            assert counts[oldest.peer] == most
            assert oldest is next(place for place in held if place.peer == oldest.peer)


@pytest.mark.slow
async def test_what_arrived_for_calls_that_are_ended_is_bounded_too():
    """A call has its message, as far as it came, until it is gone; that takes longer where the broker has much to do."""
    places = make_places(200)
    arriving = most = 0

    async def begin(number: int) -> None:
        nonlocal arriving, most
        silent = Call(f"stranger {number % 7}", is_silent=True)
        reads = silent.read

        async def read() -> bytes:
            nonlocal arriving, most
            arriving += 1
            most = max(most, arriving)
            return await reads()

        silent.read = read  # type: ignore[method-assign]
        place = places.enter(cast("Any", silent), 30)
        try:
            await places.first_message(place)
        except LimitReached:
            await asyncio.sleep(0.01)  # until the client has been told
            arriving -= 1
        finally:
            places.leave(place)

    calls = [asyncio.create_task(begin(number)) for number in range(100)]
    await asyncio.wait(calls, timeout=1)
    ended = sum(task.done() for task in calls)
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert most == TURNS
    assert ended > 2 * TURNS
