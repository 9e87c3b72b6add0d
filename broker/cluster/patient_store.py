"""An object store whose calls are repeated while they fail in passing.

Only what may be repeated without looking first: reading, listing, removing, and storing bytes under a name that nobody
else would store other bytes under.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from broker.cluster.object_store import ObjectInfo, ObjectStore, OtherBytes, StoreFailed, StoreRefused
from broker.observe.logs import get_logger
from broker.runtime.vfs import Buffer

log = get_logger(__name__)

T = TypeVar("T")

ATTEMPTS = 12
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0


class PatientStore:
    """Raises what the last attempt raised; what an operator must mend at once (`StoreRefused`)."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    async def put(self, name: str, body: Buffer) -> None:
        """Return once the object is there, stored by this call or before. Raises OtherBytes if another one is."""
        await _repeat(self.url, lambda: self._put(name, body))

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        return await _repeat(self.url, lambda: self._store.read_range(name, start, length))

    async def info(self, name: str) -> ObjectInfo:
        return await _repeat(self.url, lambda: self._store.info(name))

    async def objects(self, folder: str) -> list[ObjectInfo]:
        """All objects in a folder, their names without it."""
        return await _repeat(self.url, lambda: self._list(folder))

    async def remove(self, name: str) -> None:
        await _repeat(self.url, lambda: self._store.remove(name))

    async def _put(self, name: str, body: Buffer) -> None:
        try:
            await self._store.create(name, body)
        except FileExistsError as error:
            # "It exists" is no proof (see `ObjectStore.create`).
            try:
                info = await self._store.info(name)
            except FileNotFoundError:
                raise StoreFailed(
                    f"{self.url}: the store reports that {name} exists, but does not return it"
                ) from error
            if info.bytes != len(body):
                raise OtherBytes(
                    f"{self.url}: {name} has {info.bytes} bytes instead of {len(body)}: the store does not keep "
                    "what is written, or another program writes to it"
                ) from error

    async def _list(self, folder: str) -> list[ObjectInfo]:
        start = len(folder) + 1
        return [info._replace(name=info.name[start:]) async for info in self._store.objects(folder)]


class PatientReads:
    """A store whose calls that read are repeated while they fail in passing, and the others are not."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    async def create(self, name: str, body: Buffer) -> None:
        await self._store.create(name, body)

    async def read(self, name: str) -> bytes:
        return await _repeat(self.url, lambda: self._store.read(name))

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        return await _repeat(self.url, lambda: self._store.read_range(name, start, length))

    async def info(self, name: str) -> ObjectInfo:
        return await _repeat(self.url, lambda: self._store.info(name))

    async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async def listed() -> list[ObjectInfo]:
            return [info async for info in self._store.objects(folder, after=after)]

        for info in await _repeat(self.url, listed):
            yield info

    async def remove(self, name: str) -> None:
        await self._store.remove(name)


async def _repeat(url: str, call: Callable[[], Awaitable[T]]) -> T:
    pause_seconds = FIRST_PAUSE_SECONDS
    for _ in range(ATTEMPTS - 1):
        try:
            return await call()
        except StoreRefused:
            raise
        except StoreFailed as error:
            log.info("A request to the object store failed; retrying", url=url, error=error)
        await asyncio.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)
    return await call()
