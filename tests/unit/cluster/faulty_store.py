"""An object store that loses requests and answers, carries them out late, and says "exists" of nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from enum import Enum

from broker.cluster.object_store import ObjectInfo, ObjectStore, StoreFailed
from broker.runtime.vfs import Buffer


class CreateFault(Enum):
    """A failure of one create."""

    REQUEST_LOST = "request lost"
    ANSWER_LOST = "answer lost"

    LATE = "late"
    """It fails now, and is carried out by `arrive`."""

    SAYS_EXISTS = "says exists"
    """Of a name that is free: a conflict of two that were both turned away, or an earlier attempt that was undone."""


class FaultyStore:
    """A store, with faults of the next calls, one each."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.create_faults: deque[CreateFault | None] = deque()
        self.failing_reads = 0
        self.failing_lists = 0
        self.created: list[tuple[str, bytes]] = []
        """Every attempt."""
        self._late: list[tuple[str, bytes]] = []
        self._held: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return self._store.url

    def hold(self) -> None:
        """From now on creates wait for `work`."""
        self._held = asyncio.Event()

    def work(self) -> None:
        assert self._held is not None
        self._held.set()

    async def arrive(self) -> None:
        """Carry out what is late."""
        late, self._late = self._late, []
        for name, body in late:
            with contextlib.suppress(FileExistsError):
                await self._store.create(name, body)

    async def create_behind(self, name: str, body: bytes) -> None:
        """Store an object at once, past what is held and planned."""
        await self._store.create(name, body)

    async def create(self, name: str, body: Buffer) -> None:
        self.created.append((name, bytes(body)))
        if self._held is not None:
            await self._held.wait()
        match self.create_faults.popleft() if self.create_faults else None:
            case CreateFault.REQUEST_LOST:
                raise StoreFailed("The connection was cut before the request")
            case CreateFault.SAYS_EXISTS:
                raise FileExistsError(name)
            case CreateFault.LATE:
                self._late.append((name, bytes(body)))
                raise StoreFailed("No answer in time")
            case CreateFault.ANSWER_LOST:
                with contextlib.suppress(FileExistsError):
                    await self._store.create(name, body)
                raise StoreFailed("The connection was cut after the request")
            case None:
                await self._store.create(name, body)

    async def read(self, name: str) -> bytes:
        if self.failing_reads:
            self.failing_reads -= 1
            raise StoreFailed("The connection was cut")
        return await self._store.read(name)

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        return await self._store.read_range(name, start, length)

    async def info(self, name: str) -> ObjectInfo:
        return await self._store.info(name)

    async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        if self.failing_lists:
            self.failing_lists -= 1
            raise StoreFailed("The connection was cut")
        async for info in self._store.objects(folder, after=after):
            yield info

    async def remove(self, name: str) -> None:
        await self._store.remove(name)
