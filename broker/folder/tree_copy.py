"""Copies of what manifests name, from one data directory to another: what backups and restores have in common.

Files that the broker never writes again get a second name in the copy where the file system allows that, and are
copied otherwise. Ledgers that still grow are always copied, up to the length that their manifest names: those bytes
never change (FILES-1), also while the broker appends. What no manifest names stays behind.

Everything blocks. What takes long is a generator of small steps, each of which yields the bytes it copied: whoever
runs it in a thread of a serving broker can pause between them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from broker.errors import Corrupt, LimitReached
from broker.runtime.vfs import Vfs
from broker.storage.blocks import file_lengths
from broker.storage.layout import Layout
from broker.storage.manifest import BrokerImage, TopicImage, decode_topic
from broker.storage.named_files import named_files, read_named

CHUNK_BYTES = 4 << 20
"""Copied and synced at once: more that waits for the disk would hold up a sync of the journal."""

_STEP_FILES = 64
"""Files in one step in the thread: a millisecond or so, and then somebody else's turn."""

_NO_LINKS = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS}
)
_ADVICE = "Run `postdate-broker verify` on the folder it comes from."

Steps = Iterator[int]


class TreeCopy:
    """One copy on its way from `source` to `target`, both laid out as data directories."""

    def __init__(self, vfs: Vfs, source: Layout, target: Layout, reserve_bytes: int) -> None:
        """A copy that would leave less than `reserve_bytes` free on its file system is refused."""
        self._vfs = vfs
        self.source = source
        self._target = target
        self._reserve_bytes = reserve_bytes
        self._links = True  # until the file system says no
        self.files = 0
        self.bytes = 0
        self.copied_bytes = 0

    def topics(self, root: BrokerImage) -> Steps:
        """Copy all topics that the root names; durable at the end."""
        for topic_id, name in root.topics.items():
            yield from self._topic(topic_id, name)
        self._vfs.sync_dir(self._target.topics)
        yield 0

    def file(self, source: str, target: str, length: int | None = None) -> Steps:
        """Copy one file, or as much of it as `length` says; the caller syncs the folder."""
        vfs = self._vfs
        read = vfs.open(source)
        try:
            size = read.size()
            if length is not None and size < length:
                raise Corrupt(
                    f"A file holds {size} bytes where its manifest names {length}",
                    path=source,
                    offset=size,
                    advice=_ADVICE,
                )
            end = size if length is None else length
            written = vfs.open(target, create=True)
            try:
                for offset in range(0, end, CHUNK_BYTES):
                    count = min(CHUNK_BYTES, end - offset)
                    self.check_room(count)
                    written.copy_from(read, count, offset)
                    written.sync()
                    yield count
                if not end:
                    written.sync()
            finally:
                written.close()
        finally:
            read.close()
        self._count(end, copied=True)

    def check_room(self, byte_count: int) -> None:
        """Raise LimitReached if so many bytes more would not leave the reserve free."""
        check_room(self._vfs, self._target.root, byte_count, self._reserve_bytes)

    def _topic(self, topic_id: int, name: str) -> Steps:
        vfs, source, target = self._vfs, self.source.topic(topic_id), self._target.topic(topic_id)
        image = _read_image(vfs, self.source, topic_id, name)
        lengths = _ledger_lengths(image)
        vfs.make_dir(target)
        for folder, names in named_files(image).items():
            vfs.make_dir(f"{target}/{folder}")
            for file_name in sorted(names):
                paths = f"{source}/{folder}/{file_name}", f"{target}/{folder}/{file_name}"
                grows, length = (
                    lengths.get(file_name, (False, None)) if folder == "ledgers" else (False, None)
                )
                if grows:
                    yield from self.file(*paths, length)
                else:
                    yield from self._link(*paths, length)
            vfs.sync_dir(f"{target}/{folder}")
        yield from self._link(self.source.topic_manifest(topic_id), self._target.topic_manifest(topic_id))
        vfs.sync_dir(target)

    def _link(self, source: str, target: str, length: int | None = None) -> Steps:
        """Give a file that never changes a name in the copy, or copy it."""
        size = self._size(source)
        if length is not None and size != length:
            raise Corrupt(
                f"A sealed file holds {size} bytes where its manifest names {length}",
                path=source,
                offset=min(size, length),
                advice=_ADVICE,
            )
        if self._links:
            try:
                self._vfs.link(source, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # A file can have too many names already; any other reason is one for all files.
                self._links = error.errno == errno.EMLINK
            else:
                self._count(size, copied=False)
                yield 0
                return
        yield from self.file(source, target)

    def _size(self, path: str) -> int:
        try:
            file = self._vfs.open(path)
        except FileNotFoundError as error:
            raise Corrupt("A file that a manifest names is missing", path=path, advice=_ADVICE) from error
        try:
            return file.size()
        finally:
            file.close()

    def _count(self, byte_count: int, *, copied: bool) -> None:
        self.files += 1
        self.bytes += byte_count
        self.copied_bytes += byte_count if copied else 0


def check_room(vfs: Vfs, folder: str, byte_count: int, reserve_bytes: int) -> None:
    """Raise LimitReached if so many bytes more in a folder would not leave the reserve free."""
    free_bytes = vfs.free_bytes(folder)
    if free_bytes - byte_count < reserve_bytes:
        raise LimitReached(
            f"The disk is nearly full: {free_bytes} bytes are free, of which {reserve_bytes} are kept",
            reason="DISK_RESERVE_REACHED",
            retry_after_ms=60_000,
            disk_reserve_bytes=reserve_bytes,
        )


def pin_topics(vfs: Vfs, source: Layout, pins: Layout, root: BrokerImage) -> Steps:
    """Give second names, in a folder beside them, to all files of all topics, those that still grow among them.

    So they outlive whatever removes their first names. Nothing is synced: after a crash nobody needs them. Raises
    OSError where the file system has no links (`is_linkless`).
    """
    vfs.make_dir(pins.root)
    vfs.make_dir(pins.topics)
    for topic_id, name in root.topics.items():
        image = _read_image(vfs, source, topic_id, name)
        vfs.make_dir(pins.topic(topic_id))
        for folder, names in named_files(image).items():
            vfs.make_dir(f"{pins.topic(topic_id)}/{folder}")
            for file_name in sorted(names):
                vfs.link(
                    f"{source.topic(topic_id)}/{folder}/{file_name}",
                    f"{pins.topic(topic_id)}/{folder}/{file_name}",
                )
                yield 0
        vfs.link(source.topic_manifest(topic_id), pins.topic_manifest(topic_id))
        yield 0


def is_linkless(error: OSError) -> bool:
    """Return whether a link failed because files cannot have second names there."""
    return error.errno in _NO_LINKS


def remove_in_steps(vfs: Vfs, folder: str) -> Steps:
    """Remove a folder and everything in it."""
    for name in vfs.list_dir(folder):
        path = f"{folder}/{name}"
        try:
            vfs.remove(path)
        except (IsADirectoryError, PermissionError):
            yield from remove_in_steps(vfs, path)
        yield 0
    vfs.remove_dir(folder)


def _read_image(vfs: Vfs, layout: Layout, topic_id: int, name: str) -> TopicImage:
    path = layout.topic_manifest(topic_id)
    image = decode_topic(read_named(vfs, path), path)
    if (image.topic_id, image.name) != (topic_id, name):
        raise Corrupt(
            f"The manifest is of another topic, {image.topic_id} {image.name!r}", path=path, advice=_ADVICE
        )
    return image


def _ledger_lengths(image: TopicImage) -> dict[str, tuple[bool, int]]:
    """Of each file of a ledger, whether it still grows, and how long the manifest says it is."""
    return {
        capture.name("").file(kind): (not capture.sealed, length)
        for capture in (ledger.capture for ledger in image.ledgers)
        for kind, length in file_lengths(capture).items()
    }


def advance(steps: Steps) -> tuple[bool, int]:
    """Some steps: whether these were the last, and the bytes they copied."""
    total = 0
    for _ in range(_STEP_FILES):
        try:
            total += next(steps)
        except StopIteration:
            return True, total
        if total >= CHUNK_BYTES:
            break
    return False, total
