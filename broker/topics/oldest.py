"""Age of the oldest ready message of a subscription."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from broker.errors import NotFound
from broker.model import Int64Column, Position, UInt32Column, members
from broker.runtime.clock import Clock
from broker.runtime.supervise import YieldBudget
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.log import TopicLog
from broker.subscriptions.entry_states import HELD
from broker.subscriptions.subscription import Subscription

_ROWS = 65_536
_NEVER_MS = 1 << 62


class OldestReady:
    """The oldest ready message of one subscription, found on demand and remembered while it is ready.

    A message is ready since it was due, or since it was stored if it has no time; one that waited to be sent again,
    since that wait was over. Whatever becomes ready later is younger, but for what comes back: whoever keeps this
    forgets it then. The search reads the times of ledgers from the mark on, and ends at the first ledger that is
    younger than what was found.
    """

    def __init__(
        self, subscription: Subscription, log: TopicLog, ledger_facts: Mapping[int, LedgerFacts], clock: Clock
    ) -> None:
        self._subscription = subscription
        self._log = log
        self._facts = ledger_facts
        self._clock = clock
        self._position: Position | None = None
        self._since_ms = _NEVER_MS
        self._last_age_ms = 0
        self._searching = asyncio.Lock()

    @property
    def is_known(self) -> bool:
        """Return whether the one that was found is still ready."""
        return self._is_ready(self._position)

    def last_age_ms(self) -> int:
        """The age if the one that was found is still ready; else that of the last search."""
        return self._age_ms() if self.is_known else self._last_age_ms

    async def find_age_ms(self) -> int:
        """The age; looks for the oldest one if it is not known. 0 if none is ready."""
        async with self._searching:
            if not self.is_known:
                await self._search()
            # Also if it was sent while this looked: of a subscription that delivers it is always another one.
            self._last_age_ms = self._age_ms()
        return self._last_age_ms

    def _age_ms(self) -> int:
        """The age of the one that was found, or of one that waited to be sent again."""
        now_ms = self._clock.now_ms()
        since_ms = min(self._since_ms, self._waited_since_ms(now_ms))
        return max(0, now_ms - since_ms) if since_ms != _NEVER_MS else 0

    def _waited_since_ms(self, now_ms: int) -> int:
        since_ms = self._subscription.states.redelivery.ready_since_ms(now_ms)
        return _NEVER_MS if since_ms is None else since_ms

    def _is_ready(self, position: Position | None) -> bool:
        if position is None:
            return False
        ids = np.array([position.entry_id], dtype=np.uint32)
        return not self._not_ready(position.ledger_id, ids)[0]

    def _not_ready(self, ledger_id: int, ids: UInt32Column) -> np.ndarray:
        """Return which entries are settled, held, or waiting, or waited, for a time of their own."""
        subscription = self._subscription
        refused = subscription.not_to_send(ledger_id, ids, HELD)
        queued = subscription.states.redelivery.queued.get(ledger_id)
        if queued is None:
            return refused
        again = members(ids, queued)
        if again.any():
            at_once = subscription.states.redelivery.at_once().get(ledger_id)
            refused |= again if at_once is None else again & ~members(ids, at_once)
        return refused

    async def _search(self) -> None:
        budget = YieldBudget(self._clock)
        self._position, self._since_ms = None, _NEVER_MS
        ledger_id, first = self._subscription.cursor.mark
        if self._log.entry_count(ledger_id) is None:
            ledger_id, first = self._log.next_ledger_id(ledger_id) or 0, 0
        while ledger_id:
            facts, settled = self._facts.get(ledger_id), self._subscription.cursor.settled.get(ledger_id)
            count = self._log.entry_count(ledger_id) or 0
            if facts is not None and facts.first_publish_ms >= self._since_ms:
                return
            while first < count and not (settled is not None and len(settled) == count):
                try:
                    await self._look_at(ledger_id, first, min(_ROWS, count - first))
                except NotFound:
                    break  # the ledger was dropped meanwhile: all of it was settled
                first += _ROWS
                await budget.spent()
            ledger_id, first = self._log.next_ledger_id(ledger_id) or 0, 0

    async def _look_at(self, ledger_id: int, first: int, count: int) -> None:
        times = self._log.times_nowait(ledger_id, first, count)
        if times is None:
            times = await self._log.read_times(ledger_id, first, count)
        await self._choose(ledger_id, first, times)

    async def _choose(self, ledger_id: int, first: int, times: Int64Column) -> None:
        subscription = self._subscription
        ids = np.arange(first, first + len(times), dtype=np.uint32)
        ready = times <= self._clock.now_ms() if subscription.honors_delay else times < _NEVER_MS
        at = np.flatnonzero(ready)
        at = at[~self._not_ready(ledger_id, ids[at])]
        if not len(at):
            return
        by_time = at[times[at] > 0] if subscription.honors_delay else at[:0]
        if len(by_time):
            oldest = int(by_time[np.argmin(times[by_time])])
            self._consider(Position(ledger_id, int(ids[oldest])), int(times[oldest]))
        by_arrival = at[times[at] == 0] if subscription.honors_delay else at
        if len(by_arrival):
            # As they arrived: the first one is the oldest.
            position = Position(ledger_id, int(ids[by_arrival[0]]))
            rows = await self._log.read_rows(ledger_id, position.entry_id, 1)
            self._consider(position, int(rows["publish_time_ms"][0]))

    def _consider(self, position: Position, since_ms: int) -> None:
        if since_ms < self._since_ms:
            self._position, self._since_ms = position, since_ms
