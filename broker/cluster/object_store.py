"""The seam to an object store: names and bytes, each object written once.

Every call may be cancelled, and may fail with OSError at any point; of a `create` or `remove` that failed so nothing is
known. The stores are in `stores.py`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from broker.runtime.vfs import Buffer

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*", re.ASCII)


class StoreFailed(OSError):
    """A call that had no usable answer: it may have been carried out, and may succeed when it is repeated."""


class StoreRefused(StoreFailed):
    """A call that fails until an operator mends something: credentials, rights, the bucket or the folder."""


class OtherBytes(StoreRefused):
    """An object of this name is there that holds something else."""


class ObjectInfo(NamedTuple):
    """An object as the store lists it."""

    name: str
    bytes: int
    modified_ms: int  # by the store's own clock


class ObjectStore(Protocol):
    """Objects under a prefix of a bucket, or a folder."""

    @property
    def url(self) -> str:
        """The place of the objects, as messages tell it."""

    async def create(self, name: str, body: Buffer) -> None:
        """Store an object durably if there is none of this name.

        FileExistsError: the store says that there is one. It may be this one, stored by an attempt whose answer was
        lost, and stores exist that say so of a conflict that stored nothing: only reading it tells.
        """

    async def read(self, name: str) -> bytes:
        """Return the bytes of an object. Raises FileNotFoundError."""

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of an object, fewer only at its end, none behind it. Raises FileNotFoundError."""

    async def info(self, name: str) -> ObjectInfo:
        """Return size and time of an object. Raises FileNotFoundError."""

    def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield what lies in a folder or below it, in no certain order; only what sorts after the name `after`."""

    async def remove(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""


def is_name(name: str) -> bool:
    """Return whether every store takes this name as it is."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Raise ValueError unless every store takes this name as it is."""
    if not is_name(name):
        raise ValueError(f"Not a name of an object: {name!r}")
