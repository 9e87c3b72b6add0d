"""An object store on virtual time: requests travel, are lost, are carried out late; nodes are cut off from it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from typing import TypeVar

from broker.cluster.object_store import ObjectInfo, StoreFailed
from broker.runtime.vfs import Buffer

T = TypeVar("T")

ATTEMPT_SECONDS = 1.0


class SimBucket:
    """The objects, which all nodes' stores share."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.objects: dict[str, bytes] = {}
        self.is_sound = True
        """Everything is answered quickly; else it may be slow and lost, too."""
        self.late_count = 0
        """Creates that were carried out after their sender had given up."""


class SimStore:
    """A node's way to the bucket."""

    def __init__(self, bucket: SimBucket) -> None:
        self._bucket = bucket
        self.is_cut = False

    @property
    def url(self) -> str:
        return "sim://bucket"

    async def create(self, name: str, body: Buffer) -> None:
        data = bytes(body)

        def store() -> None:
            if name in self._bucket.objects:
                raise FileExistsError(name)
            self._bucket.objects[name] = data

        await self._call(store)

    async def read(self, name: str) -> bytes:
        return await self._call(lambda: self._get(name))

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        return await self._call(lambda: self._get(name)[start : start + length])

    async def info(self, name: str) -> ObjectInfo:
        return await self._call(lambda: ObjectInfo(name, len(self._get(name)), 0))

    async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        def names() -> list[str]:
            return sorted(name for name in self._bucket.objects if name.startswith(f"{folder}/"))

        for name in await self._call(names):
            if name > after and name in self._bucket.objects:
                yield ObjectInfo(name, len(self._bucket.objects[name]), 0)

    async def remove(self, name: str) -> None:
        await self._call(lambda: self._bucket.objects.pop(name, None))

    def _get(self, name: str) -> bytes:
        try:
            return self._bucket.objects[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    async def _call(self, work: Callable[[], T]) -> T:
        """Send a request and wait for its answer; the request goes its way whoever waits."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        # In a context of its own, as it is no part of its sender: that may be frozen meanwhile, or dead.
        loop.create_task(self._travel(work, answer), context=Context())  # noqa: RUF006 - the loop keeps what sleeps
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                return await answer
        except TimeoutError as error:
            raise StoreFailed("No answer in time") from error

    async def _travel(self, work: Callable[[], T], answer: asyncio.Future[T]) -> None:
        bucket = self._bucket
        if self.is_cut or not await self._arrives():
            return
        bucket.late_count += answer.done()
        try:
            result = work()
        except OSError as error:
            if await self._arrives() and not answer.done():
                answer.set_exception(error)
            return
        if await self._arrives() and not answer.done():
            answer.set_result(result)

    async def _arrives(self) -> bool:
        """Spend the time of one way; returns whether it led anywhere."""
        rng = self._bucket.rng
        if self._bucket.is_sound:
            await asyncio.sleep(rng.uniform(0.001, 0.02))
            return not self.is_cut
        chance = rng.random()
        if chance < 0.04:
            return False
        await asyncio.sleep(rng.uniform(0.001, 0.05) if chance < 0.9 else rng.expovariate(0.3))
        return not self.is_cut
