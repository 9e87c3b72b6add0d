"""Later messages that are not whole: who has most of them gives way, and whoever sends whole ones has none."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import pytest

from broker.rpc import unfinished_messages
from broker.rpc.unfinished_messages import Arrivals, UnfinishedMessages
from broker.runtime.allocator import Trimmer
from broker.runtime.connections import Peer, ReceiveCounters

MIB = 1 << 20
MOST = 64 * MIB
MESSAGE = 16 * MIB
FRAME = 16_384


class World:
    """Connections, and what the kernel would count of them."""

    def __init__(self) -> None:
        self.messages = UnfinishedMessages(MOST, MESSAGE, Trimmer(1_000))
        self.received: dict[Peer, ReceiveCounters] = {}

    def connect(self, port: int, *, streams: int = 1) -> Arrivals:
        arrivals = self.messages.of(f"ipv4:127.0.0.1:{port}")
        for _ in range(streams):
            arrivals.begin()
            self.messages.begin(arrivals)
        self.arrive(port, 100 * streams)
        return arrivals

    def arrive(self, port: int, count: int, *, sent: int = 0) -> None:
        before = self.received.get(peer(port), ReceiveCounters(0, 0))
        self.received[peer(port)] = ReceiveCounters(before.total_bytes + count, before.segments_sent + sent)

    def ended(self) -> set[int]:
        return {port for _, port in self.messages.look(self.received)}


def peer(port: int) -> Peer:
    return ip_address("127.0.0.1"), port


def on_the_wire(length: int) -> int:
    """Return the bytes of a message with each frame in a record of TLS."""
    frames = -(-(length + 5) // FRAME)
    return length + 5 + frames * (9 + 22)


async def test_memory_is_asked_for_only_while_streams_could_send_too_much(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def resident_bytes() -> int:
        asked.append(True)
        return 0

    monkeypatch.setattr(unfinished_messages, "LOOK_SECONDS", 0)
    monkeypatch.setattr(unfinished_messages, "resident_bytes", resident_bytes)
    world = World()
    arrivals = world.connect(1, streams=4)
    watching = asyncio.create_task(world.messages.watch(7650))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asked
    world.messages.begin(arrivals)
    for _ in range(10):
        await asyncio.sleep(0)
    assert asked
    world.messages.end(arrivals)
    for _ in range(10):
        await asyncio.sleep(0)
    asked.clear()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asked
    watching.cancel()


def test_as_much_as_may_be_unfinished_ends_nobody_and_more_ends_those_with_most_until_three_quarters_are_left():
    world = World()
    for port in range(1, 5):
        world.connect(port)
        world.arrive(port, MESSAGE - 1_000)
    assert world.ended() == set()
    world.connect(5, streams=3)
    world.arrive(5, 40 * MIB)
    world.connect(6)
    world.arrive(6, MIB)
    assert world.ended() == {5, *world.ended()}
    assert 6 not in world.ended()
    assert len(world.ended()) == 3  # 105 MiB without 40, 16 and 16


def test_a_connection_has_no_more_unfinished_bytes_than_its_streams_can():
    world = World()
    for port in range(1, 5):
        world.connect(port)
        world.arrive(port, 10 * MESSAGE)  # pings, settings
    assert world.ended() == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "count", "answers"),
    [(1, 400_000, 0), (FRAME, 20_000, 20_000), (MIB, 10_000, 0), (0, 0, 400_000)],
    ids=["small ones", "frames", "large ones", "a consumer's windows and pings"],
)
def test_who_sends_whole_messages_for_long_has_nothing_unfinished(length: int, count: int, answers: int):
    world = World()
    for port in range(1, 11):
        arrivals = world.connect(port)
        for _ in range(count):
            arrivals.read(length)
        world.arrive(port, count * on_the_wire(length) + 52 * answers, sent=answers)
    assert world.ended() == set()
    for port in range(20, 25):
        world.connect(port)
        world.arrive(port, MESSAGE)
    assert world.ended() and world.ended() <= set(range(20, 25))


def test_what_arrived_while_no_call_was_under_way_belongs_to_no_message():
    world = World()
    many = range(1, 30)
    for port in many:
        arrivals = world.connect(port)
        world.arrive(port, MESSAGE)
        arrivals.calls -= 1
        world.messages.end(arrivals)
    assert world.ended() == set()
    for port in many:
        world.connect(port)
    assert world.ended() == set()
    for port in many:
        world.arrive(port, MESSAGE)
    assert world.ended()


def test_another_connection_from_the_same_port_has_no_credit():
    world = World()
    former = {port: world.connect(port) for port in range(1, 30)}
    for port, arrivals in former.items():
        arrivals.read(1 << 40)
        world.arrive(port, 1 << 40)
        arrivals.calls -= 1
    assert world.ended() == set()
    for port, arrivals in former.items():
        arrivals.begin()
        world.received[peer(port)] = ReceiveCounters(MESSAGE, 0)
    assert world.ended()


def test_connections_that_have_gone_are_forgotten_and_those_with_calls_are_not():
    world = World()
    gone, busy = world.connect(1), world.connect(2)
    gone.calls -= 1
    world.received.clear()
    world.ended()
    assert world.messages.of("ipv4:127.0.0.1:1") is not gone
    assert world.messages.of("ipv4:127.0.0.1:2") is busy


def test_nothing_is_looked_at_while_there_cannot_be_too_much():
    world = World()
    world.connect(1, streams=MOST // MESSAGE)
    assert not world.messages.may_be_too_much(10 * MOST)  # so many streams cannot have more
    world.connect(2)
    assert not world.messages.may_be_too_much(MOST - 1)
    assert world.messages.may_be_too_much(MOST)
    assert not world.messages.may_be_too_much(MOST + MOST // 8 - 1)
    assert world.messages.may_be_too_much(MOST + MOST // 8)
    assert not world.messages.may_be_too_much(MOST)  # it has shrunk
    assert world.messages.may_be_too_much(MOST + MOST // 8)
