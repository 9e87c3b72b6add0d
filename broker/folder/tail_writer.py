"""Moves what was appended from memory into the ledgers' files, without syncing it: the journal holds it."""

from __future__ import annotations

import asyncio

from broker.runtime.patience import Patience
from broker.topics.topic import Topic

_WRITE_BYTES = 1 << 20
_WRITE_SECONDS = 0.05


class TailWriter:
    """Bounds the unwritten tails of all ledgers together.

    Writing a little later than at once costs nothing (consumers read from memory meanwhile) and saves a system
    call for each batch. Produce calls wait in `wait_room` when the disk does not keep up.
    """

    def __init__(self, tail_bytes_max: int, patience: Patience) -> None:
        self._tail_bytes_max = tail_bytes_max
        self._patience = patience
        self._topics: dict[int, Topic] = {}
        self._unwritten_bytes = 0
        self._full = asyncio.Event()
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def unwritten_bytes(self) -> int:
        """Bytes appended since the last round began, roughly: the sum of what `appended` was told."""
        return self._unwritten_bytes

    def appended(self, topic: Topic, byte_count: int) -> None:
        """A topic's tail grew. Called by apply: no await, and next to no work."""
        self._topics[topic.topic_id] = topic
        self._unwritten_bytes += byte_count
        self._some.set()
        if self._unwritten_bytes >= _WRITE_BYTES:
            self._full.set()
            if self._unwritten_bytes >= self._tail_bytes_max:
                self._room.clear()

    async def wait_room(self) -> None:
        """Wait until the tails are below their limit."""
        await self._room.wait()

    async def run(self) -> None:
        """Write until cancelled."""
        try:
            while True:
                await self._some.wait()
                timer = asyncio.get_running_loop().call_later(_WRITE_SECONDS, self._full.set)
                try:
                    await self._full.wait()
                finally:
                    timer.cancel()
                await self.write_all()
        finally:
            self._room.set()  # nobody will make room any more: whoever waits goes on, and the journal refuses it

    async def write_all(self) -> None:
        """Write every tail once."""
        self._full.clear()
        self._some.clear()
        topics, self._topics = self._topics, {}
        written_bytes = self._unwritten_bytes
        for topic in topics.values():
            for ledger in list(topic.log.dirty.values()):
                if not topic.deleted:
                    await topic.prepare_folders()
                    await self._patience.wait_done(ledger.flush)
        self._unwritten_bytes -= written_bytes
        if self._unwritten_bytes < self._tail_bytes_max:
            self._room.set()
