"""Rounds of the loop: large messages are handled a few at a time, connection by connection, and nobody else waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

from broker.rpc.calls import END_OF_STREAM
from broker.rpc.loop_share import SMALL_BYTES, LoopShare
from broker.rpc.reception import Begun
from broker.rpc.unfinished_messages import Arrivals
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim

ROUND_BYTES = 1_000


class Rounds:
    """The number of the loop's round."""

    def __init__(self) -> None:
        self.number = 0
        self._task = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            self.number += 1
            await asyncio.sleep(0)

    def end(self) -> None:
        self._task.cancel()


def test_a_round_handles_a_bounded_amount_and_all_are_handled() -> None:
    async def scenario(_: SimLoop, __: SimClock) -> None:
        share, rounds = LoopShare(ROUND_BYTES), Rounds()
        handled: Counter[int] = Counter()

        async def stream(peer: str) -> None:
            for _ in range(5):
                await share.wait(peer, 400)
                handled[rounds.number] += 1
                await asyncio.sleep(0)

        await asyncio.gather(*(stream(f"ipv4:127.0.0.1:{number}") for number in range(20)))
        rounds.end()
        assert sum(handled.values()) == 100
        assert max(handled.values()) == 3  # 400 and 400 are less than a round, and the third is the last one
        assert len(handled) < 100  # no round of those is left out for long

    run_sim(scenario, 1)


def test_a_message_larger_than_a_round_is_handled_alone() -> None:
    async def scenario(_: SimLoop, __: SimClock) -> None:
        share, rounds = LoopShare(ROUND_BYTES), Rounds()
        handled: Counter[int] = Counter()

        async def stream() -> None:
            await share.wait("a", 50 * ROUND_BYTES)
            handled[rounds.number] += 1

        await asyncio.gather(*(stream() for _ in range(10)))
        rounds.end()
        assert set(handled.values()) == {1}

    run_sim(scenario, 1)


def test_who_has_one_stream_does_not_wait_for_all_of_who_has_many() -> None:
    async def scenario(_: SimLoop, __: SimClock) -> None:
        share, order = LoopShare(ROUND_BYTES), list[str]()

        async def stream(peer: str) -> None:
            await share.wait(peer, ROUND_BYTES)
            order.append(peer)

        many = [asyncio.create_task(stream("many")) for _ in range(50)]
        await asyncio.sleep(0)
        await stream("few")
        assert order.index("few") <= 3
        await asyncio.gather(*many)

    run_sim(scenario, 1)


def test_alone_nothing_waits() -> None:
    async def scenario(_: SimLoop, __: SimClock) -> None:
        share = LoopShare(ROUND_BYTES)
        for _turn in range(3):
            wait = share.wait("a", 5 * ROUND_BYTES)
            try:
                wait.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it waits")
            await asyncio.sleep(0)

    run_sim(scenario, 1)


def test_who_leaves_while_waiting_takes_nobody_along_and_leaves_nothing() -> None:
    async def scenario(_: SimLoop, __: SimClock) -> None:
        share = LoopShare(ROUND_BYTES)
        waiting = [asyncio.create_task(share.wait(peer, ROUND_BYTES)) for peer in "abcabc"]
        await asyncio.sleep(0)
        for task in waiting[1:4]:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [task.cancelled() for task in waiting] == [False, True, True, True, False, False]
        assert share.waiting_count == 0

    run_sim(scenario, 1)


class Sender:
    """A context whose client sends messages of some sizes; notes what happens."""

    def __init__(self, sizes: list[int], notes: list[object]) -> None:
        self._sizes, self._notes = sizes, notes
        self.write = None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> object:
        self._notes.append("read")
        return bytes(self._sizes.pop(0)) if self._sizes else END_OF_STREAM


class NotingShare(LoopShare):
    def __init__(self, notes: list[object]) -> None:
        super().__init__()
        self._notes = notes

    async def wait(self, peer: str, cost: int) -> None:
        self._notes.append(cost)
        await super().wait(peer, cost)


def test_a_stream_pays_for_a_large_message_before_the_next_one_is_read():
    async def scenario(_: SimLoop, __: SimClock) -> None:
        notes: list[object] = []
        large = SMALL_BYTES // 2 + 1
        sender = Sender([large - 1, large, large, 1, 1], notes)
        stream = Begun(cast("Any", sender), b"open", NotingShare(notes), Arrivals(), byte_cost=2)
        while await stream.read() is not END_OF_STREAM:
            pass
        cost = 2 * large
        assert notes == ["read", "read", cost, "read", cost, "read", "read", "read"]

    run_sim(scenario, 1)
