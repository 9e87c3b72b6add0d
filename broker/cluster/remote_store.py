"""Object stores over the library obstore: S3 and compatible servers, Google, Azure, and one in memory for tests.

The library's own retries are off: of a first attempt of ours whose answer was lost they report "exists", as another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from broker.cluster.object_store import ObjectInfo, StoreFailed, StoreRefused, check_name
from broker.runtime.vfs import Buffer
from broker.settings import MIB

T = TypeVar("T")

READ_PATIENCE = 4
"""So many times the time of an attempt, at most, for a read while reads have had no answer in time."""
LIST_PATIENCE = 16
"""The same for a page of a list, for which some stores go through a whole folder. No lease counts on its time."""

_PAGE = 1000
_NO_RIGHTS = ("401 Unauthorized", "403 Forbidden")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")


class AttemptTime(NamedTuple):
    """The time that one attempt may take."""

    seconds: float
    seconds_per_mib: float

    def of(self, length: int) -> float:
        """Return the seconds for a request or an answer of so many bytes."""
        return self.seconds + self.seconds_per_mib * length / MIB


class _Patience:
    """The time for answers of one kind.

    One without an answer in time gives those that follow twice the time each, until one is answered in the usual time
    again: else nobody could ask a store that is slow for all, however often it is asked.
    """

    def __init__(self, attempt: AttemptTime, at_most: int) -> None:
        self._attempt = attempt
        self._at_most = at_most
        self._factor = 1

    async def wait(self, answer: Awaitable[T], length: int = 0) -> T:
        """Return an answer of so many bytes. Raises TimeoutError."""
        loop, usual_seconds = asyncio.get_running_loop(), self._attempt.of(length)
        begin = loop.time()
        try:
            async with asyncio.timeout(usual_seconds * self._factor):
                result = await answer
        except TimeoutError:
            self._factor = min(2 * self._factor, self._at_most)
            raise
        if (
            loop.time() - begin < usual_seconds and result is not None
        ):  # the end of a list is told without the store
            self._factor = 1
        return result


class RemoteStore:
    """Objects of a store that the library knows.

    Reads and lists are waited for the longer, the slower the store is; each of the two by its own answers, as a store
    that reads at once may need seconds for a page of a list. A create has no more time than it was given, as an owner's
    lease counts on that.
    """

    def __init__(self, library: Any, store: Any, url: str, attempt: AttemptTime) -> None:
        self._library = library  # the module, which is imported only where a store is wanted
        self._errors = library.exceptions
        self._store = store
        self._url = url
        self._attempt = attempt
        self._reads = _Patience(attempt, READ_PATIENCE)
        self._lists = _Patience(attempt, LIST_PATIENCE)

    @property
    def url(self) -> str:
        return self._url

    async def create(self, name: str, body: Buffer) -> None:
        check_name(name)
        with self._failures(f"create {name}"):
            try:
                await self._timed(self._library.put_async(self._store, name, body, mode="create"), len(body))
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError) as error:
                raise FileExistsError(f"{self._url} has an object {name}") from error
            except FileNotFoundError as error:  # nothing else can be missing
                raise StoreRefused(
                    f"{self._url}: the bucket does not exist, or access to it is denied"
                ) from error

    async def read(self, name: str) -> bytes:
        check_name(name)
        with self._failures(f"read {name}"):
            answer = await self._reads.wait(self._library.get_async(self._store, name))
            return bytes(await self._reads.wait(answer.bytes_async(), answer.meta["size"]))

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        try:
            return await self._read_range(name, start, length) if length else b""
        except StoreRefused:
            raise
        except StoreFailed:
            if (await self.info(name)).bytes > start:
                raise
            return b""  # stores and the library take a range that lies behind the end for an error

    async def _read_range(self, name: str, start: int, length: int) -> bytes:
        check_name(name)
        with self._failures(f"read {name}"):
            options = {"range": (start, start + length)}
            answer = await self._reads.wait(self._library.get_async(self._store, name, options=options))
            first, end = answer.range
            return bytes(await self._reads.wait(answer.bytes_async(), end - first))

    async def info(self, name: str) -> ObjectInfo:
        check_name(name)
        with self._failures(f"look at {name}"):
            return _info(await self._reads.wait(self._library.head_async(self._store, name)))

    async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        stream = self._library.list(self._store, folder or None, offset=after or None, chunk_size=_PAGE)
        pages = aiter(stream)
        while True:
            with self._failures(f"list {folder}"):
                page = await self._lists.wait(_next_page(pages))
            if page is None:
                return
            for meta in page:
                yield _info(meta)

    async def remove(self, name: str) -> None:
        check_name(name)
        with self._failures(f"remove {name}"):
            try:
                await self._timed(self._library.delete_async(self._store, name), 0)
            except FileNotFoundError as error:
                _refuse_without_bucket(self._url, error)

    async def _timed(self, answer: Awaitable[T], length: int) -> T:
        async with asyncio.timeout(self._attempt.of(length)):
            return await answer

    @contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        """Translate the library's errors."""
        try:
            yield
        except FileNotFoundError as error:
            _refuse_without_bucket(self._url, error)
            raise FileNotFoundError(f"{self._url}: nothing to {doing}") from error
        except TimeoutError as error:
            raise StoreFailed(f"{self._url}: timeout on an attempt to {doing}") from error
        except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
            raise StoreRefused(f"{self._url}: permission denied to {doing}: {_first_line(error)}") from error
        except self._errors.BaseError as error:
            _refuse_without_bucket(self._url, error)
            if any(
                words in str(error) for words in _NO_RIGHTS
            ):  # the library knows them of single objects only
                raise StoreRefused(
                    f"{self._url}: permission denied to {doing}: {_first_line(error)}"
                ) from error
            raise StoreFailed(f"{self._url}: could not {doing}: {_first_line(error)}") from error


async def _next_page(pages: AsyncIterator[Any]) -> Any:
    return await anext(pages, None)


def _refuse_without_bucket(url: str, error: Exception) -> None:
    # An absent bucket and an absent object have one status; only the body of the answer tells them apart.
    if any(words in str(error) for words in _NO_BUCKET):
        raise StoreRefused(f"{url}: there is no such bucket") from error


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
