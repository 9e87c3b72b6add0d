"""Room for the batches of a stream: taken when they are handed out, waited for, and given up where none is."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from broker.model import Array
from broker.rpc.batch_room import StreamRoom, batch_rooms
from broker.rpc.unread_room import UnreadRooms
from broker.runtime.signal import Signal
from broker.settings import KIB
from broker.subscriptions.consumer import Consumer
from tests.unit.rpc.test_unread_room import HandClock

EACH = 2 * (64 * KIB + 128)
"""Bytes of room for a message of 64 KiB."""


def large(count: int) -> Array:
    return np.full(count, 64 * KIB, dtype=np.uint32)


class Waiting:
    """A stream that has one message of 64 KiB where the others have all the rest of the room, and asks for two."""

    def __init__(self, rooms: UnreadRooms) -> None:
        self.rooms = rooms
        self.held, self.other, _ = stream(rooms)
        assert self.other.fitting(large(4)) == 4
        self.consumer, self.room, self.work = stream(rooms)
        assert self.room.fitting(large(2)) == 0
        assert not self.consumer.can_take and self.room.fitting(large(1)) == 0

    async def room_comes(self) -> None:
        place = self.other.leave()
        assert place is not None
        place.release()
        async with asyncio.timeout(5):
            await self.work.wait()
        assert self.consumer.can_take and self.consumer.reserves_room
        assert self.rooms.large.held == 2 * EACH


def stream(rooms: UnreadRooms) -> tuple[Consumer, StreamRoom, Signal]:
    consumer, work = Consumer("c", "c", 30_000), Signal()
    consumer.grant(10, 0)
    room = StreamRoom(rooms, lambda: "peer", lambda: None, consumer, work)
    assert not consumer.can_take, "nothing can end it yet"
    room.begin()
    assert consumer.can_take
    work.clear()
    return consumer, room, work


@pytest.fixture
async def waiting() -> Waiting:
    rooms = batch_rooms(HandClock())
    rooms.large.bytes_max = 4 * EACH
    return Waiting(rooms)


async def test_room_that_came_takes_what_fits_of_what_is_there_then(waiting: Waiting):
    await waiting.room_comes()
    assert waiting.room.fitting(large(3)) == 2
    assert not waiting.consumer.reserves_room
    waiting.room.close()
    assert waiting.rooms.large.held == 0


async def test_room_that_came_shrinks_to_what_is_less(waiting: Waiting):
    await waiting.room_comes()
    assert waiting.room.fitting(large(1)) == 1
    assert waiting.rooms.large.held == EACH
    waiting.room.close()


async def test_a_message_that_is_larger_than_the_room_that_came_takes_its_own(waiting: Waiting):
    await waiting.room_comes()
    assert waiting.room.fitting(np.array([150 * KIB], dtype=np.uint32)) == 1
    assert waiting.rooms.large.held == 2 * (150 * KIB + 128)
    waiting.room.close()


async def test_room_that_nobody_uses_is_given_up(waiting: Waiting):
    await waiting.room_comes()
    waiting.consumer.give_up_room()
    assert waiting.rooms.large.held == 0
    assert waiting.consumer.can_take and not waiting.consumer.reserves_room
    waiting.room.close()


@pytest.mark.parametrize("turns", range(6))
async def test_a_stream_that_ends_as_its_room_comes_holds_none(waiting: Waiting, turns: int):
    place = waiting.other.leave()
    assert place is not None
    place.release()
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.room.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert waiting.rooms.large.held == 0
    assert not waiting.consumer.can_take


async def test_a_batch_counts_as_unread_from_when_it_is_handed_out(waiting: Waiting):
    """It may wait behind an answer to an ack: the stream is ended for the batch all the same."""
    assert waiting.other._unread.unread_since is not None
    assert waiting.room._unread.unread_since is None
    waiting.room.close()
