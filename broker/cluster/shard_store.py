"""The part of an object store below one prefix, as a store."""

from __future__ import annotations

from collections.abc import AsyncIterator

from broker.cluster.object_store import ObjectInfo, ObjectStore
from broker.runtime.vfs import Buffer


class ShardStore:
    """Objects of one shard beside its log: bases and their chunks."""

    def __init__(self, store: ObjectStore, shard: int, folder: str = "shards") -> None:
        """`folder`: what those of all shards lie in."""
        self._store = store
        self._prefix = f"{folder}/{shard}"

    @property
    def url(self) -> str:
        return f"{self._store.url}/{self._prefix}"

    async def create(self, name: str, body: Buffer) -> None:
        await self._store.create(self._full(name), body)

    async def read(self, name: str) -> bytes:
        return await self._store.read(self._full(name))

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        return await self._store.read_range(self._full(name), start, length)

    async def info(self, name: str) -> ObjectInfo:
        return self._own(await self._store.info(self._full(name)))

    async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in self._store.objects(self._full(folder), after=self._full(after) if after else ""):
            yield self._own(info)

    async def remove(self, name: str) -> None:
        await self._store.remove(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _own(self, info: ObjectInfo) -> ObjectInfo:
        return info._replace(name=info.name.removeprefix(f"{self._prefix}/"))
