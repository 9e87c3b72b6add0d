"""Seals and merges of the runs of one topic's schedule keys, in the background.

Both are tasks of the broker's supervisor, at most one of each a topic; between them a timer runs only while something
waits to be sealed.
"""

from __future__ import annotations

import asyncio

from broker.delayed.schedule_keys import ScheduleKeys
from broker.runtime.supervise import OneAtATime
from broker.topics.key_services import KeyedTopic, KeyServices
from broker.topics.settled_upkeep import SettledUpkeep

_READ_MAX = 4
"""Rows are not read on while so many times as many keys as are sealed together are in memory."""
_PRODUCED_MAX = 20
"""Nor are batches taken while so many times as many are: a million, some 30 MB."""


class KeySealing:
    """See the module's description. Does nothing before `start`: the runs are not taken up yet."""

    def __init__(
        self, topic: KeyedTopic, keys: ScheduleKeys, remembered: SettledUpkeep, services: KeyServices
    ) -> None:
        self._topic = topic
        self._keys = keys
        self._remembered = remembered
        self._clock = services.clock
        self._timer: asyncio.TimerHandle | None = None
        self._sealing = OneAtATime(services.spawn, f"seal of schedule keys of topic {topic.topic_id}")
        self._merging = OneAtATime(services.spawn, f"merge of schedule keys of topic {topic.topic_id}")
        self._is_running = False

    def start(self) -> None:
        """The runs that there were are taken up."""
        self._is_running = True

    def stop(self) -> None:
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
        self._sealing.cancel()
        self._merging.cancel()

    def look(self) -> None:
        """Start a seal if it is time for one, and see to it that the next look comes."""
        if not self._is_running:
            return
        if not self._sealing.is_running and self._keys.needs_seal(self._clock.now_ms()):
            self._sealing.start(self._seal)
        self._arm()

    async def wait_room_to_read(self) -> None:
        """Return once there is room in memory for keys of rows that are read."""
        self.look()
        await self._wait_unsealed(_READ_MAX)

    async def wait_room_to_produce(self) -> None:
        """Return once there is room in memory for keys of new messages."""
        await self._wait_unsealed(_PRODUCED_MAX)

    async def _wait_unsealed(self, seals: int) -> None:
        # One seal is waited for: one that fails must not stop producers for as long as the disk does not work.
        if self._keys.unsealed_count > seals * self._keys.limits.seal_count:
            await self._sealing.wait()

    def _look_at_runs(self) -> None:
        if not self._is_running or self._merging.is_running:
            return
        if self._keys.needs_merge(self._clock.now_ms()):
            self._merging.start(self._merge)

    def _arm(self) -> None:
        """One timer, while something waits to be sealed."""
        if self._timer is not None or not self._keys.unsealed_count:
            return
        seconds = max(self._keys.limits.seal_after_ms, 1_000) / 1000
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self.look()
        self._look_at_runs()

    async def _seal(self) -> None:
        await self._topic.prepare_folders()
        if await self._keys.seal():
            self._remembered.changed()
            self._look_at_runs()
            # What came while this one was written may be enough for the next, of which those who wait do not wait.
            asyncio.get_running_loop().call_soon(self.look)
        else:
            self._arm()

    async def _merge(self) -> None:
        while self._keys.needs_merge(self._clock.now_ms()):
            if not await self._keys.merge():
                break
            self._remembered.changed()
