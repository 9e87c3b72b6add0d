"""Streams that are ended while others wait for the room of unread answers: those whose answers wait longest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from broker.errors import LimitReached
from broker.rpc import unread_room
from broker.rpc.unread_room import FrameRoom, StreamUnread, UnreadRooms
from broker.settings import KIB, MIB


@dataclass
class HandClock:
    seconds: float = 100.0

    def monotonic_ns(self) -> int:
        return int(self.seconds * 1e9)

    def now_ms(self) -> int:
        raise AssertionError("the wall clock is nobody's measure of time passed")


class World:
    def __init__(self) -> None:
        self.clock = HandClock()
        self.rooms = UnreadRooms(self.clock)
        self.room = self.rooms.large
        self.room.bytes_max = 12 * MIB
        self.ended: list[StreamUnread] = []

    def stream(self, peer: str = "") -> StreamUnread:
        stream = StreamUnread(self.rooms, lambda: peer, lambda: self.ended.append(stream))
        return stream

    async def full_stream(self) -> tuple[StreamUnread, list[FrameRoom]]:
        """With as much as one may hold, in answers of 16 KiB."""
        stream = self.stream()
        places = [await stream.take(16 * KIB) for _ in range(256)]
        for place in places:
            place.answered(16 * KIB)
        return stream, places


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(unread_room, "ROUND_BYTES", 1 << 40)  # but where it is what is tested
    return World()


async def waiting(world: World, bytes_: int) -> asyncio.Task[FrameRoom]:
    """One who waits for room."""
    stream = world.stream()
    task = asyncio.create_task(stream.take(bytes_))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_client_that_reads_a_little_now_and_then_is_ended(world: World):
    """No single write lasts long, and the room is held for a quarter of an hour."""
    streams = []
    for _ in range(3):
        streams.append(await world.full_stream())
        world.clock.seconds += 0.1
    task = await waiting(world, MIB)
    for step in range(3):
        world.clock.seconds += 4.0
        for _, places in streams:
            places[step].release()
        world.room._look()
        if world.ended:
            break
    assert world.ended == [streams[0][0]]
    world.ended[0].close()
    await task


async def test_the_oldest_answers_go_first_and_no_more_than_needed(world: World):
    first, _ = await world.full_stream()
    world.clock.seconds += 1
    second, _ = await world.full_stream()
    world.clock.seconds += 1
    third, _ = await world.full_stream()
    task = await waiting(world, MIB)
    world.clock.seconds += 60
    for _ in range(3):
        world.room._look()
    assert world.ended == [first]
    more = await waiting(world, 4 * MIB)
    first.close()
    await task
    world.room._look()
    assert world.ended == [first, second]
    second.close()
    await more
    third.close()


async def test_who_reads_in_time_or_waits_for_the_disk_is_not_ended(world: World):
    prompt, places = await world.full_stream()
    idle = world.stream()
    working = [await idle.take(16 * KIB) for _ in range(256)]  # at work: nobody could have read an answer
    await world.full_stream()
    task = await waiting(world, MIB)
    world.clock.seconds += unread_room.STALLED_SECONDS - 0.1
    world.room._look()
    assert world.ended == []
    for place in places:
        place.release()
    await task
    assert len(idle) == len(working)
    assert prompt not in world.ended


async def test_one_timer_looks_for_all_who_wait_and_none_when_nobody_does(world: World):
    streams = [await world.full_stream() for _ in range(3)]
    tasks = [await waiting(world, MIB) for _ in range(50)]
    timer = world.room._timer
    assert timer is not None
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert world.room._timer is timer
    timer.cancel()
    world.room._look()
    assert world.room._timer is None
    for stream, _ in streams:
        stream.close()
    assert world.room.held == 0
    assert not world.room._queue


async def test_a_stream_without_answers_is_not_ended_for_those_of_others(world: World):
    idle = [world.stream() for _ in range(3)]
    places = [await stream.take(4 * MIB) for stream in idle]
    task = await waiting(world, MIB)
    world.clock.seconds += 3600
    world.room._look()
    assert world.ended == []
    places[1].answered(10)
    await task


async def test_who_leaves_as_room_comes_gives_it_back(world: World):
    """Its turn has come, and it is cancelled before it runs again."""
    held = await world.stream().take(12 * MIB)
    for _ in range(3):
        task = await waiting(world, MIB)
        held.release()
        assert world.room.held == MIB, "it has the room, and has not run yet"
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert world.room.held == 0
        held = await world.stream().take(12 * MIB)


async def test_small_frames_have_a_room_of_their_own_that_is_bounded(world: World):
    """Whoever has one small frame goes on where the large room is full; but small ones add up too."""
    large = [await world.full_stream() for _ in range(3)]
    assert world.room.held == 12 * MIB - 3 * 16 * KIB  # but for the first frame of each
    small = world.rooms.small
    small.bytes_max = small.held + 64 * KIB
    streams = [world.stream() for _ in range(4)]
    for stream in streams:
        world.clock.seconds -= 0.1
        place = stream.take_nowait(16 * KIB)
        assert place is not None
        place.answered(16 * KIB)
    assert small.held == small.bytes_max
    task = await waiting(world, 10 * KIB)
    world.clock.seconds += 60
    small._look()
    assert world.ended == [streams[-1]]
    streams[-1].close()
    await task
    for stream in (*streams, *(stream for stream, _ in large)):
        stream.close()
    assert world.room.held == 0 and small.held == 10 * KIB


async def test_as_many_are_ended_as_all_who_wait_need(world: World):
    streams = []
    for _ in range(3):
        streams.append((await world.full_stream())[0])
        world.clock.seconds += 0.1
    tasks = [await waiting(world, 3 * MIB) for _ in range(2)]
    world.clock.seconds += 60
    world.room._look()
    assert world.ended == streams[:2]
    for stream in streams:
        stream.close()
    await asyncio.gather(*tasks)


async def test_connections_get_room_in_turn(world: World):
    """However many streams of one connection wait, those of another are not behind all of them."""
    full, _ = await world.full_stream(), world.room
    world.room.bytes_max = 4 * MIB
    got: list[str] = []

    async def wait(peer: str) -> None:
        stream = world.stream(peer)
        (await stream.take(3 * MIB)).release()
        got.append(peer)

    tasks = [asyncio.create_task(wait(peer)) for peer in ["many"] * 50 + ["few"] * 2]
    await asyncio.sleep(0)
    full[0].close()
    await asyncio.gather(*tasks)
    assert [at for at, peer in enumerate(got) if peer == "few"] == [1, 3]


async def test_a_round_of_the_loop_gives_out_a_bounded_amount(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unread_room, "ROUND_BYTES", 2 * MIB)
    world = World()
    world.room.bytes_max = 1 << 40
    rounds: list[int] = []
    now = 0

    async def wait() -> None:
        await world.stream().take(MIB)
        rounds.append(now)

    tasks = [asyncio.create_task(wait()) for _ in range(50)]
    while not all(task.done() for task in tasks):
        now += 1
        await asyncio.sleep(0)
    assert (
        max(rounds.count(number) for number in rounds) <= 4
    )  # the rest of one round and the first of the next
    assert now >= 20


async def test_requests_of_calls_that_wait_are_bounded(world: World):
    with (
        world.rooms.waiting_call(unread_room.CALLS_BYTES_MAX),
        pytest.raises(LimitReached),
        world.rooms.waiting_call(1),
    ):
        pass
    with world.rooms.waiting_call(1):
        pass
