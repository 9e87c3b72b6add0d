"""An object store in memory, with a clock, a count of what is asked of it, and failures where a test wants them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from broker.cluster.object_store import ObjectInfo
from broker.runtime.vfs import Buffer

Fail = Callable[[str, str, int], BaseException | None]
"""The failure of a call, by its kind, its object and its number; asked before it is carried out."""


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.ms = 1_750_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ns(self) -> int:
        return 5


class FakeStore:
    url = "fake://store"

    def __init__(self, now_ms: Callable[[], int] = lambda: 1_750_000_000_000) -> None:
        self.objects_by_name: dict[str, tuple[bytes, int]] = {}
        self.calls: list[tuple[str, str]] = []
        self.fail: Fail = lambda kind, name, number: None
        self.fail_after: Fail = lambda kind, name, number: None
        self._now_ms = now_ms

    def names(self, folder: str) -> set[str]:
        return {name[len(folder) + 1 :] for name in self.objects_by_name if name.startswith(f"{folder}/")}

    def stored(self, folder: str) -> list[str]:
        """Names of the calls of `create` in a folder, in order."""
        return [name for kind, name in self.calls if kind == "create" and name.startswith(f"{folder}/")]

    def change(self, name: str, change: Callable[[bytes], bytes]) -> None:
        body, modified_ms = self.objects_by_name[name]
        self.objects_by_name[name] = change(body), modified_ms

    async def create(self, name: str, body: Buffer) -> None:
        number = self._begin("create", name)
        if name in self.objects_by_name:
            raise FileExistsError(name)
        self.objects_by_name[name] = bytes(body), self._now_ms()
        self._end("create", name, number)

    async def read(self, name: str) -> bytes:
        number = self._begin("read", name)
        body = self._get(name)[0]
        self._end("read", name, number)
        return body

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        self._begin("read_range", name)
        return self._get(name)[0][start : start + length]

    async def info(self, name: str) -> ObjectInfo:
        self._begin("info", name)
        body, modified_ms = self._get(name)
        return ObjectInfo(name, len(body), modified_ms)

    async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        self._begin("objects", folder)
        for name, (body, modified_ms) in sorted(self.objects_by_name.items()):
            if name.startswith(f"{folder}/") and name > after:
                yield ObjectInfo(name, len(body), modified_ms)

    async def remove(self, name: str) -> None:
        number = self._begin("remove", name)
        self.objects_by_name.pop(name, None)
        self._end("remove", name, number)

    def _get(self, name: str) -> tuple[bytes, int]:
        if name not in self.objects_by_name:
            raise FileNotFoundError(name)
        return self.objects_by_name[name]

    def _begin(self, kind: str, name: str) -> int:
        self.calls.append((kind, name))
        if (error := self.fail(kind, name, len(self.calls))) is not None:
            raise error
        return len(self.calls)

    def _end(self, kind: str, name: str, number: int) -> None:
        """The call was carried out, and its answer may be lost."""
        if (error := self.fail_after(kind, name, number)) is not None:
            raise error
