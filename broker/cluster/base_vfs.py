"""The files of a base, read where they lie in the object store: a read-only file system for audits.

What is read comes in blocks of `BLOCK_BYTES`, of which the last `_CACHED` are kept, of all bases that a process reads.
Whoever reads a file from one end to the other gets twice as much with each request, up to `_AHEAD` blocks more. A chunk
that is read whole at once is checked against its name. Of others only what the file's own checksums cover is known to
be right, which is what an audit looks at.

Every call blocks, in a loop that all bases share: not for use on an event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple, TypeVar

from broker.cluster.base_manifest import BaseFile, BaseManifest, ChunkPlace, chunk_places
from broker.cluster.base_plan import choose_base
from broker.cluster.base_store import ATTEMPT, IN_FLIGHT, BaseStore
from broker.cluster.stores import open_store
from broker.config import SHARDS_MAX
from broker.runtime.clock import SystemClock
from broker.runtime.flight import for_all
from broker.runtime.vfs import Buffer, File

BLOCK_BYTES = 128 << 10
_AHEAD = 64
_CACHED = 512

T = TypeVar("T")


class _Block(NamedTuple):
    """A block of a chunk of a file."""

    place: ChunkPlace
    start: int  # in the chunk

    @property
    def offset(self) -> int:
        return self.place.offset + self.start

    @property
    def length(self) -> int:
        return min(BLOCK_BYTES, self.place.length - self.start)


class BlockReader:
    """Loop and last blocks that the bases of one process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by whoever looks for blocks, or lets the loop run."""
        self.blocks: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()
        """By the root of the base, the path of the file and the offset."""
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.close()


class BaseVfs:
    """See the module's description. `root` stands before the paths of the files, as a folder's path would."""

    def __init__(self, bases: BaseStore, manifest: BaseManifest, root: str, reader: BlockReader) -> None:
        self.base = manifest.base
        self._bases = bases
        self._manifest = manifest
        self._root = root
        self._reader = reader
        self._folders: dict[str, set[str]] = {"": set()}
        for path in manifest.files:
            folder, _, name = path.rpartition("/")
            while name:
                self._folders.setdefault(folder, set()).add(name)
                folder, _, name = folder.rpartition("/")

    def open(self, path: str, *, create: bool = False) -> File:
        if create:
            raise _read_only(path)
        name = self._name(path)
        file = self._manifest.files.get(name)
        if file is None:
            raise IsADirectoryError(path) if name in self._folders else FileNotFoundError(path)
        return _BaseVfsFile(path, file.size, lambda length, offset: self._read(file, length, offset))

    def exists(self, path: str) -> bool:
        name = self._name(path)
        return name in self._manifest.files or name in self._folders

    def list_dir(self, path: str) -> list[str]:
        name = self._name(path)
        if name not in self._folders:
            raise NotADirectoryError(path) if name in self._manifest.files else FileNotFoundError(path)
        return sorted(self._folders[name])

    def forget(self) -> None:
        """Read everything anew from here on."""
        with self._reader.lock:
            self._reader.blocks.clear()

    def make_dir(self, path: str) -> None:
        raise _read_only(path)

    def remove_dir(self, path: str) -> None:
        raise _read_only(path)

    def rename(self, source: str, target: str) -> None:
        raise _read_only(target)

    def link(self, source: str, target: str) -> None:
        raise _read_only(target)

    def remove(self, path: str) -> None:
        raise _read_only(path)

    def sync_dir(self, path: str) -> None:
        raise _read_only(path)

    def free_bytes(self, path: str) -> int:
        return 0

    def lock(self, path: str) -> File | None:
        """Nobody can change a base, so everybody may hold it."""
        return _BaseVfsFile(path, 0, lambda length, offset: b"")

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root).strip("/")

    def _read(self, file: BaseFile, length: int, offset: int) -> bytes:
        end = min(offset + length, file.size)
        with self._reader.lock:
            wanted = _blocks(file, self._manifest.chunk_bytes, offset, end)
            parts = {
                block.offset: part for block in wanted if (part := self._cached(file, block)) is not None
            }
            missing = [block for block in wanted if block.offset not in parts]
            if missing:
                parts |= self._fetch(file, missing)
        data = b"".join(parts[block.offset] for block in wanted)
        begin = offset - wanted[0].offset if wanted else 0
        return data[begin : begin + max(end - offset, 0)]

    def _fetch(self, file: BaseFile, missing: list[_Block]) -> dict[int, bytes]:
        """Fetch blocks, and as many behind them as are kept of what lies before them."""
        end = missing[-1].offset + missing[-1].length
        ahead = BLOCK_BYTES * self._kept_before(file, missing[0].offset)
        chunk_bytes = self._manifest.chunk_bytes
        missing = [*missing, *_blocks(file, chunk_bytes, end, min(end + ahead, file.size))]
        fetched: dict[int, bytes] = {}

        async def fetch(span: list[_Block]) -> None:
            place, start = span[0]
            length = sum(block.length for block in span)
            body = await self._bases.read_part(file.path, place, start, length)
            for block in span:
                at = block.start - start
                fetched[block.offset] = body[at : at + block.length]

        self._reader.run(for_all(_spans(missing), fetch, IN_FLIGHT))
        blocks = self._reader.blocks
        for offset in sorted(fetched):
            blocks[self._root, file.path, offset] = fetched[offset]
        while len(blocks) > _CACHED:
            blocks.popitem(last=False)
        return fetched

    def _kept_before(self, file: BaseFile, offset: int) -> int:
        """Return how many blocks before an offset are kept, one after the other."""
        for count in range(_AHEAD):
            before = _blocks(file, self._manifest.chunk_bytes, offset - 1, offset)
            if not before or self._cached(file, before[0]) is None:
                return count
            offset = before[0].offset
        return _AHEAD

    def _cached(self, file: BaseFile, block: _Block) -> bytes | None:
        key = self._root, file.path, block.offset
        part = self._reader.blocks.get(key)
        if part is not None:
            self._reader.blocks.move_to_end(key)
        return part


class _BaseVfsFile:
    """A file of a base."""

    def __init__(self, path: str, size: int, read: Callable[[int, int], bytes]) -> None:
        self._path = path
        self._size = size
        self._read = read

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return self._size

    def pread(self, length: int, offset: int) -> bytes:
        return self._read(length, offset)

    def pread_nowait(self, length: int, offset: int) -> bytes | None:
        return None

    def read_ahead(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        pass

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        raise _read_only(self._path)

    def pwrite_synced(self, parts: Sequence[Buffer], offset: int) -> None:
        raise _read_only(self._path)

    def copy_from(self, source: File, length: int, offset: int) -> None:
        raise _read_only(self._path)

    def truncate(self, length: int) -> None:
        raise _read_only(self._path)

    def sync(self) -> None:
        raise _read_only(self._path)

    def close(self) -> None:
        pass


@cache
def process_reader() -> BlockReader:
    """The reader of all bases that `open_base_vfs` opens."""
    reader = BlockReader()
    atexit.register(reader.close)
    return reader


@lru_cache(maxsize=SHARDS_MAX)  # the parts of one backup
def open_base_vfs(root: str) -> BaseVfs:
    """The files of the base that `root` names, as `<url of a store>#<name of a base>`; one for a process.

    Raises NotFound, Corrupt, ConfigError, OSError.
    """
    url, _, name = root.partition("#")
    bases = BaseStore(open_store(url, ATTEMPT), SystemClock())
    reader = process_reader()
    with reader.lock:
        manifest = reader.run(bases.read_manifest(name))
    return BaseVfs(bases, manifest, root, reader)


def pin_base(url: str) -> str:
    """Return the URL of a base with its name: the one it has, or that of the newest base."""
    store_url, _, name = url.partition("#")
    bases = BaseStore(open_store(store_url, ATTEMPT), SystemClock())
    with asyncio.Runner() as runner:
        chosen = choose_base(runner.run(bases.bases()), name, bases.url)
    return f"{store_url}#{chosen.name}"


def _blocks(file: BaseFile, chunk_bytes: int, offset: int, end: int) -> list[_Block]:
    """The blocks that hold a part of a file."""
    if not 0 <= offset < end:
        return []
    places = chunk_places(file, chunk_bytes, offset // chunk_bytes, -(-end // chunk_bytes))
    blocks = (_Block(place, start) for place in places for start in range(0, place.length, BLOCK_BYTES))
    return [block for block in blocks if block.offset < end and offset < block.offset + block.length]


def _spans(blocks: list[_Block]) -> Iterator[list[_Block]]:
    """Blocks that follow each other in one chunk, together."""
    span: list[_Block] = []
    for block in blocks:
        if span and (span[-1].place, span[-1].start + BLOCK_BYTES) != (block.place, block.start):
            yield span
            span = []
        span.append(block)
    yield span


def _read_only(path: str) -> PermissionError:
    return PermissionError(f"nothing is written in a base ({path})")
