"""Share of the event loop that large messages of streams may have.

Whatever has arrived is handled one after the other, and a call of somebody else needs several rounds of the loop. A
hundred streams that each have sent 2 MiB, or an acknowledgement of 10,000 ids, would make each of these rounds last for
a second. So a round handles a bounded amount of them; what is left waits for a later one, connection by connection.
Nothing waits longer than the others need, and small messages never do.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from broker.rpc.fair_queue import FairQueue

SMALL_BYTES = 16 << 10
"""A message up to this size is handled at once, and not counted."""
ROUND_BYTES = 512 << 10
"""About a millisecond's work; the last message of a round may take more."""


@dataclass(slots=True, eq=False)
class _Waiter:
    cost: int
    turn: asyncio.Future[None]


class LoopShare:
    """Messages that are handled in one round of the loop; the others wait."""

    def __init__(self, round_bytes: int = ROUND_BYTES) -> None:
        self._round_bytes = round_bytes
        self._left = round_bytes
        self._queue = FairQueue[_Waiter]()
        self._is_counting = False

    @property
    def waiting_count(self) -> int:
        return sum(1 for _ in self._queue)

    async def wait(self, peer: str, cost: int) -> None:
        """Wait until a message of this cost, in bytes, may be handled."""
        if self._left > 0 and not self._queue:
            self._spend(cost)
            return
        waiting = _Waiter(cost, asyncio.get_running_loop().create_future())
        self._queue.push(peer, waiting)
        try:
            await waiting.turn
        finally:
            self._queue.remove(peer, waiting)  # nothing is left of a call that was cancelled

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_counting = False
        self._left = self._round_bytes
        while self._queue and self._left > 0:
            first = self._queue.pop()
            if not first.turn.done():
                first.turn.set_result(None)
                self._spend(first.cost)
