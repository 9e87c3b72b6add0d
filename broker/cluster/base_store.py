"""Bases: complete copies of a data directory at one lsn, in an object store.

    bases/<lsn, 16 hex>-<tag>   the manifest of a base (`base_manifest`); from when it is there, the base counts
    chunks/<sha256>-<nonce>     pieces of files, by content, shared by all bases
    probe/<nonce>               made and removed to ask the store what time it is

An upload stores chunks first, several at once, and the manifest last; what a killed one leaves is used by the next, or
swept. A file whose seal the newest base of the same broker has too is not read, and a chunk that is there is not stored
again. Why no base ever lacks a chunk: `base_plan`.

  BASES-1  Nothing is overwritten, and a manifest is stored only after every chunk it names was listed with its size.
  BASES-2  What is downloaded has the sha256 that its chunk's name states, or the download fails.
  BASES-3  Memory is bounded by `IN_FLIGHT` chunks of full size, two manifests and the list of chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from broker.cluster.base_manifest import (
    CHUNK_BYTES,
    HEADER_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    Base,
    BaseFile,
    BaseManifest,
    ChunkPlace,
    OtherVersion,
    base_name,
    chunk_places,
    decode_header,
    decode_manifest,
    digest_of,
    encode_manifest,
    is_base_name,
    is_file_path,
)
from broker.cluster.base_plan import (
    REST_MS,
    UPLOAD_MS,
    ChunkPlan,
    StoredBase,
    newest_base,
    no_base,
    plan_retention,
    plan_sweep,
    removable_from_ms,
)
from broker.cluster.object_store import ObjectInfo, ObjectStore, OtherBytes
from broker.cluster.patient_store import PatientStore
from broker.cluster.remote_store import AttemptTime
from broker.cluster.seals import read_seals
from broker.errors import Corrupt, MissingFile, NotFound, Refused, Unavailable
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.flight import for_all
from broker.runtime.steps import run_step
from broker.runtime.vfs import Vfs
from broker.storage.layout import BACKUP_MARKER, ROOT_MANIFEST, Layout

log = get_logger(__name__)

ATTEMPT = AttemptTime(seconds=30, seconds_per_mib=10)
"""Time for an attempt: so many chunks at once need 0.6 MB/s. Nobody waits for a backup."""

IN_FLIGHT = 8
_DOWNLOADS = 32  # most files are small, and wait for the store rather than for their bytes
_SMALL_IN_FLIGHT = 16
_ADVICE = "Use another base."
_OF_A_FOLDER = (BACKUP_MARKER, ROOT_MANIFEST, "alive", "journal", "topics")

Tell = Callable[[int], None]
"""Is told how many more bytes are done."""


class BaseCut(NamedTuple):
    """Description of a folder that becomes a base."""

    tag: str  # with the lsn, the name of the base
    label: str
    broker_id: str
    create_time_ms: int
    lsn: int
    topics: int


class BaseStore:
    """The bases under one prefix of an object store."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        executor: Executor | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._store = PatientStore(store)
        self._clock = clock
        self._executor = executor
        self._chunk_bytes = chunk_bytes
        self._headers: dict[ObjectInfo, Base] = {}  # of the last look: they never change

    @property
    def url(self) -> str:
        return self._store.url

    async def check(self) -> None:
        """Raise what an upload would meet at once: no store, no bucket, no rights."""
        await self._ask_time()

    async def bases(self) -> list[StoredBase]:
        """All bases whose manifests can be read, the oldest first."""
        infos = await self._list_bases()
        known = {info: self._headers[info] for info in infos if info in self._headers}

        async def read_header(info: ObjectInfo) -> None:
            try:
                known[info] = await self._read_header(info.name)
            except FileNotFoundError:  # removed since it was listed
                pass
            except Corrupt as error:
                log.warning("A base cannot be used", url=self.url, error=error.message)

        await for_all((info for info in infos if info not in self._headers), read_header, _SMALL_IN_FLIGHT)
        self._headers = known
        bases = [StoredBase(base, info.modified_ms) for info, base in known.items()]
        return sorted(bases, key=lambda stored: (stored.modified_ms, stored.base.name))

    async def names(self) -> list[str]:
        """The names of all bases, also of those that cannot be read."""
        return [info.name for info in await self._list_bases()]

    async def read_manifest(self, name: str) -> BaseManifest:
        """Raises NotFound or Corrupt."""
        path = f"bases/{name}"
        try:
            if not is_base_name(name):
                raise FileNotFoundError(path)
            data = await self._store.read_range(path, 0, MANIFEST_BYTES_MAX + 1)
        except FileNotFoundError as error:
            raise no_base(self.url, name) from error
        if len(data) > MANIFEST_BYTES_MAX:
            raise Corrupt("The manifest of a base exceeds the maximum size", path=path, advice=_ADVICE)
        manifest = await run_step(self._executor, lambda: decode_manifest(data, path))
        _named(manifest.base, name)
        return manifest

    async def upload(self, vfs: Vfs, folder: Layout, cut: BaseCut, tell: Tell = lambda count: None) -> Base:
        """Store the base of a folder that nobody changes; returns when it counts, or at once if it is there."""
        limit = _TimeLimit(self._clock, UPLOAD_MS)
        now_ms = await self._ask_time()
        bases = await self.bases()
        name = base_name(cut.lsn, cut.tag)
        if not is_base_name(name):
            raise Corrupt(f"Invalid backup name: {cut.tag[:100]!a}", path=folder.root)
        if any((stored.base.name, stored.base.broker_id) == (name, cut.broker_id) for stored in bases):
            return (await self.read_manifest(name)).base
        parent = await self._read_newest(bases, cut.broker_id)
        named = frozenset[str]() if parent is None else parent.chunk_names()
        chunks = ChunkPlan(named, await self._store.objects("chunks"), now_ms, secrets.token_hex(4))
        drafting = _Drafting(vfs, folder, parent, chunks, self._chunk_bytes)
        drafts = await run_step(self._executor, drafting.draft_files)
        upload = _Upload(self._store, self._executor, vfs, chunks, limit, tell)
        tell(sum(draft.size for draft in drafts if draft.is_known))
        await for_all(_unknown_pieces(drafts), upload.store_piece, IN_FLIGHT)
        base = Base(
            name=name,
            label=cut.label,
            broker_id=cut.broker_id,
            create_time_ms=cut.create_time_ms,
            lsn=cut.lsn,
            topics=cut.topics,
            files=len(drafts),
            bytes=sum(draft.size for draft in drafts),
            uploaded_bytes=upload.stored_bytes,
        )
        files = {draft.path: draft.file() for draft in drafts}
        manifest = BaseManifest(base, files, self._chunk_bytes)
        await self._check_chunks(manifest)
        return await self._store_manifest(manifest, limit)

    async def read_file(self, manifest: BaseManifest, path: str) -> bytes:
        """The whole of a small file of a base, checked."""
        file = manifest.files.get(path)
        if file is None:
            raise MissingFile("The base lacks a file", path=f"{manifest.base.name}/{path}")
        places = chunk_places(file, manifest.chunk_bytes)
        return b"".join([await self._read_chunk(path, place) for place in places])

    async def read_part(self, path: str, place: ChunkPlace, start: int, length: int) -> bytes:
        """A part of a chunk. What is not all of it is not checked."""
        if (start, length) == (0, place.length):
            return await self._read_chunk(path, place)
        name = f"chunks/{place.name}"
        try:
            body = await self._store.read_range(name, start, length)
        except FileNotFoundError as error:
            raise _no_chunk(self.url, path, name) from error
        if len(body) != length:
            raise _damaged_chunk(self.url, path, name)
        return body

    async def download(
        self,
        vfs: Vfs,
        manifest: BaseManifest,
        paths: Collection[str],
        folder: str,
        tell: Tell = lambda count: None,
    ) -> None:
        """Make files of a base in a folder, durably. None of them may be there."""
        files = [manifest.files[path] for path in sorted(paths)]
        folders = await run_step(self._executor, lambda: _make_files(vfs, folder, files))
        room = _Room(IN_FLIGHT * manifest.chunk_bytes)

        async def fetch(piece: tuple[str, ChunkPlace]) -> None:
            path, place = piece
            async with room.taken(place.length):
                body = await self._read_chunk(path, place)
                write = partial(_write_piece, vfs, f"{folder}/{path}", place.offset, body)
                await run_step(self._executor, write)
            tell(place.length)

        pieces = ((file.path, place) for file in files for place in chunk_places(file, manifest.chunk_bytes))
        await for_all(pieces, fetch, _DOWNLOADS)
        await run_step(self._executor, lambda: _sync_folders(vfs, folders))

    async def remove(self, name: str) -> None:
        """Remove a base, and what no other one needs. Raises NotFound, or Refused while uploads may rely on it."""
        now_ms = await self._ask_time()
        bases = await self.bases()
        if all(stored.base.name != name for stored in bases):
            await self._remove_damaged(name)
            return
        from_ms = removable_from_ms(bases, name)
        if from_ms is None or from_ms > now_ms:
            raise Refused(
                f"Base {name} cannot be deleted yet: a broker's two newest bases are kept, and older ones until "
                "those two are a day old, because an upload under way may use their chunks",
                reason="BACKUP_KEPT",
            )
        await self._store.remove(f"bases/{name}")
        await self.sweep()

    async def _remove_damaged(self, name: str) -> None:
        """Remove a base whose header is damaged, which no upload builds on. Raises NotFound, OtherVersion."""
        try:
            if is_base_name(name):
                await self._read_header(name)
        except FileNotFoundError:
            pass
        except OtherVersion:
            raise
        except Corrupt:
            await self._store.remove(f"bases/{name}")
            await self.sweep()
            return
        raise no_base(self.url, name)

    async def prune(self, broker_id: str, keep_count: int, max_age_ms: int) -> list[str]:
        """Remove a broker's bases that are too many or too old, and what nobody needs then; returns their names."""
        now_ms = await self._ask_time()
        names = plan_retention(await self.bases(), broker_id, now_ms, keep_count, max_age_ms)
        for name in names:
            await self._store.remove(f"bases/{name}")
        await self.sweep()
        return names

    async def sweep(self) -> int:
        """Remove chunks that nobody names; returns how many.

        Manifests are read while there are chunks in question: the newest, which names most of them, then the oldest
        first, whose chunks are old enough.
        """
        now_ms = await self._ask_time()
        names = plan_sweep(await self._store.objects("chunks"), frozenset(), now_ms)
        infos = sorted(await self._list_bases(), key=lambda info: info.name)
        for info in infos[-1:] + infos[:-1]:
            if not names:
                break
            try:
                named = (await self.read_manifest(info.name)).chunk_names()
                names = [name for name in names if name not in named]
            except NotFound:  # removed since it was listed
                pass
            except Corrupt as error:  # it could name any chunk
                raise Corrupt(
                    f"{error.message} No chunks are removed from {self.url} while it is there. If it can be done "
                    f"without, delete it: postdate-broker backup delete 'URL#{info.name}'"
                ) from error
        await for_all(iter(names), lambda name: self._store.remove(f"chunks/{name}"), _SMALL_IN_FLIGHT)
        for info in await self._store.objects("probe"):
            if now_ms - info.modified_ms >= REST_MS:  # whoever made it was killed
                await self._store.remove(f"probe/{info.name}")
        return len(names)

    async def _list_bases(self) -> list[ObjectInfo]:
        return [info for info in await self._store.objects("bases") if is_base_name(info.name)]

    async def _read_header(self, name: str) -> Base:
        path = f"bases/{name}"
        return _named(decode_header(await self._store.read_range(path, 0, HEADER_BYTES_MAX), path), name)

    async def _read_newest(self, bases: Iterable[StoredBase], broker_id: str) -> BaseManifest | None:
        newest = newest_base(bases, broker_id)
        if newest is None:
            return None
        try:
            return await self.read_manifest(newest.base.name)
        except (NotFound, Corrupt) as error:
            log.warning(
                "The newest base cannot be used for an incremental upload", url=self.url, error=error.message
            )
            return None

    async def _check_chunks(self, manifest: BaseManifest) -> None:
        """Look at what was stored: a store may have lost it, kept a part of it, or said more than it did."""
        sizes = {info.name: info.bytes for info in await self._store.objects("chunks")}
        for file in manifest.files.values():
            for place in chunk_places(file, manifest.chunk_bytes):
                if sizes.get(place.name) != place.length:
                    raise Unavailable(
                        f"{self.url} does not return chunks/{place.name} as it was stored, so the backup is "
                        "incomplete. Check whether another program removes objects there",
                        reason="BACKUP_FAILED",
                    )

    async def _store_manifest(self, manifest: BaseManifest, limit: _TimeLimit) -> Base:
        """Store a manifest; returns the base that is there, which may be one of the same backup by another upload."""
        path, name = f"bases/{manifest.base.name}", manifest.base.name
        body = await run_step(self._executor, lambda: encode_manifest(manifest))
        limit.check()
        try:
            await self._store.put(path, body)
        except OtherBytes:
            if not await self._is_there(name, manifest.base):
                raise
        if await self._store.read_range(path, 0, MANIFEST_BYTES_MAX + 1) == body:
            await self._take_back_if_late(path, limit)
        elif not await self._is_there(name, manifest.base):
            raise Unavailable(
                f"{self.url} has other content at {path} than was stored", reason="BACKUP_FAILED"
            )
        return (await self.read_manifest(name)).base

    async def _is_there(self, name: str, base: Base) -> bool:
        """Return whether a base of the same backup is there, whole."""
        try:
            stored = (await self.read_manifest(name)).base
        except (NotFound, Corrupt):
            return False
        return (stored.broker_id, stored.create_time_ms) == (base.broker_id, base.create_time_ms)

    async def _take_back_if_late(self, path: str, limit: _TimeLimit) -> None:
        try:
            limit.check()
        except Unavailable:  # the machine slept since it was looked at: sweeps may have taken what it names
            await self._store.remove(path)
            raise

    async def _read_chunk(self, path: str, place: ChunkPlace) -> bytes:
        name = f"chunks/{place.name}"
        try:
            body = await self._store.read_range(name, 0, place.length + 1)
        except FileNotFoundError as error:
            raise _no_chunk(self.url, path, name) from error
        digest = await run_step(self._executor, lambda: hashlib.sha256(body).hexdigest())
        if digest != digest_of(place.name) or len(body) != place.length:
            raise _damaged_chunk(self.url, path, name)
        return body

    async def _ask_time(self) -> int:
        """Time of the store's clock. Fails, before anything else is done, if nothing may be stored or removed."""
        probe = f"probe/{secrets.token_hex(8)}"
        await self._store.put(probe, b"time")
        modified_ms = (await self._store.info(probe)).modified_ms
        await self._store.remove(probe)
        return modified_ms


class _Room:
    """Memory for pieces, of which none is larger than all of it."""

    def __init__(self, byte_count: int) -> None:
        self._left = byte_count
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def taken(self, length: int) -> AsyncIterator[None]:
        """Wait for room, and hold it."""
        while length > self._left:
            self._freed.clear()
            await self._freed.wait()
        self._left -= length
        try:
            yield
        finally:
            self._left += length
            self._freed.set()


class _TimeLimit:
    """Limit of an upload (KEEP-1)."""

    def __init__(self, clock: Clock, limit_ms: int) -> None:
        self._clock = clock
        self._limit_ms = limit_ms
        self._begun = clock.now_ms(), clock.monotonic_ns()

    def check(self) -> None:
        wall_ms = self._clock.now_ms() - self._begun[0]  # counts a suspended machine's time too
        running_ms = (self._clock.monotonic_ns() - self._begun[1]) // 1_000_000
        if max(wall_ms, running_ms) > self._limit_ms:
            raise Unavailable(
                "The upload was stopped after six hours. The next upload reuses the chunks that it stored",
                reason="BACKUP_FAILED",
            )


@dataclass(slots=True)
class _Draft:
    """A file of a base that is being made."""

    path: str
    source: str
    size: int
    seal: str
    chunk_bytes: int
    chunks: list[str]
    is_known: bool

    def file(self) -> BaseFile:
        return BaseFile(self.path, self.size, self.seal, tuple(self.chunks))


class _Upload:
    """Pieces on their way into the store."""

    def __init__(
        self,
        store: PatientStore,
        executor: Executor | None,
        vfs: Vfs,
        chunks: ChunkPlan,
        limit: _TimeLimit,
        tell: Tell,
    ) -> None:
        self._store = store
        self._executor = executor
        self._vfs = vfs
        self._chunks = chunks
        self._limit = limit
        self._tell = tell
        self.stored_bytes = 0

    async def store_piece(self, piece: tuple[_Draft, int]) -> None:
        draft, index = piece
        self._limit.check()
        body, digest = await run_step(self._executor, lambda: _read_piece(self._vfs, draft, index))
        choice = self._chunks.choose(digest, len(body))
        if not choice.is_stored:
            await self._store.put(f"chunks/{choice.name}", body)
            self._chunks.note_stored(choice.name, len(body))
            self.stored_bytes += len(body)
        draft.chunks[index] = choice.name
        self._tell(len(body))


class _Drafting:
    """Files of a folder, and what is known of them without reading them."""

    def __init__(
        self, vfs: Vfs, folder: Layout, parent: BaseManifest | None, chunks: ChunkPlan, chunk_bytes: int
    ) -> None:
        self._vfs = vfs
        self._folder = folder
        self._parent = parent
        self._chunks = chunks
        self._chunk_bytes = chunk_bytes

    def draft_files(self) -> list[_Draft]:
        vfs, folder = self._vfs, self._folder
        if vfs.exists(folder.unfinished):
            raise NotFound(
                f"{folder.root!r} is incomplete: a backup was interrupted or is still running",
                reason="BACKUP_NOT_FOUND",
            )
        seals: dict[str, str] = {}
        for name in vfs.list_dir(folder.topics):
            if name.isdecimal():
                seals.update(read_seals(vfs, folder, int(name)))
        names = [name for name in vfs.list_dir(folder.root) if name in _OF_A_FOLDER]
        sources = _walk(vfs, folder.root, names, len(folder.root) + 1)
        return [self._draft(source, seals.get(source, "")) for source in sources]

    def _draft(self, source: str, seal: str) -> _Draft:
        path, size = source[len(self._folder.root) + 1 :], _size(self._vfs, source)
        known = self._known_chunks(path, size, seal)
        unknown = [""] * -(-size // self._chunk_bytes)
        chunks = unknown if known is None else known
        return _Draft(path, source, size, seal, self._chunk_bytes, chunks, known is not None)

    def _known_chunks(self, path: str, size: int, seal: str) -> list[str] | None:
        """The chunks of a file that is as in the newest base, if that can be told without reading it."""
        file = self._parent.files.get(path) if self._parent is not None else None
        if self._parent is None or file is None or not seal or (file.seal, file.size) != (seal, size):
            return None
        if self._parent.chunk_bytes != self._chunk_bytes:
            return None
        places = chunk_places(file, self._chunk_bytes)
        if not all(self._chunks.has(place.name, place.length) for place in places):
            return None  # somebody took a chunk away: it is stored again
        return list(file.chunks)


def _unknown_pieces(drafts: Iterable[_Draft]) -> Iterator[tuple[_Draft, int]]:
    for draft in drafts:
        if not draft.is_known:
            for index in range(len(draft.chunks)):
                yield draft, index


def _read_piece(vfs: Vfs, draft: _Draft, index: int) -> tuple[bytes, str]:
    offset = index * draft.chunk_bytes
    length = min(draft.chunk_bytes, draft.size - offset)
    file = vfs.open(draft.source)
    try:
        body = file.pread(length, offset)
    finally:
        file.close()
    if len(body) != length:
        raise Corrupt("A file of the backup became shorter", path=draft.source, offset=offset + len(body))
    return body, hashlib.sha256(body).hexdigest()


def _walk(vfs: Vfs, folder: str, names: Iterable[str], start: int) -> Iterator[str]:
    """Paths of files; what a broker cannot have made is left out. Paths of a base begin at `start` of these."""
    for name in names:
        path = f"{folder}/{name}"
        if not is_file_path(path[start:]):
            continue
        try:
            inner = vfs.list_dir(path)
        except NotADirectoryError:
            yield path
        else:
            yield from _walk(vfs, path, inner, start)


def _size(vfs: Vfs, path: str) -> int:
    file = vfs.open(path)
    try:
        return file.size()
    finally:
        file.close()


def _make_files(vfs: Vfs, folder: str, files: Iterable[BaseFile]) -> list[str]:
    """Make files, empty, and the folders they need; returns all of these, the outer ones first."""
    folders = {folder: None}
    for file in files:
        parts = file.path.split("/")
        for depth in range(1, len(parts)):
            inner = "/".join([folder, *parts[:depth]])
            if inner not in folders:
                vfs.make_dir(inner)
                folders[inner] = None
        vfs.open(f"{folder}/{file.path}", create=True).close()
    return list(folders)


def _write_piece(vfs: Vfs, path: str, offset: int, body: bytes) -> None:
    file = vfs.open(path)
    try:
        file.pwrite([body], offset)
        file.sync()
    finally:
        file.close()


def _sync_folders(vfs: Vfs, folders: Iterable[str]) -> None:
    for folder in folders:
        vfs.sync_dir(folder)


def _named(base: Base, name: str) -> Base:
    if base.name != name:
        raise Corrupt(f"The manifest is of another base, {base.name}", path=f"bases/{name}")
    return base


def _no_chunk(url: str, path: str, name: str) -> MissingFile:
    return MissingFile(f"A chunk of {path} is missing in {url}", path=name, advice=_ADVICE)


def _damaged_chunk(url: str, path: str, name: str) -> Corrupt:
    return Corrupt(f"A chunk of {path} in {url} is damaged", path=name, advice=_ADVICE)
