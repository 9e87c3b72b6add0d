"""A file system in memory that can say what a crash at any moment would have left.

`MemVfs` keeps the state that programs see, and a list of every operation that changed or synced something.
`_Disk` replays that list and keeps, per file and per directory, what is durable and what is pending. A
`CrashPolicy` decides which of the pending changes the disk took. Invariants:

  MEMVFS-1  A file's bytes and length are durable once its `sync` returned; nothing else makes them so.
  MEMVFS-2  A name is durable once `sync_dir` of its directory returned, and every directory above it is durable
      too. A file without a durable name is gone, however often it was synced.
  MEMVFS-3  A rename within a directory is one change: after a crash the old mapping or the new, never neither. A
      rename between directories is one change in each, and each needs its own `sync_dir`.
  MEMVFS-4  Changes of names within one directory reach the disk in order; between directories in any order.
  MEMVFS-5  A sector of 512 bytes holds what it held after one of the writes, or zeros where writes are unsynced;
      what was synced before, and is not written over, stays.
  MEMVFS-6  After a sync failed, no later sync makes durable what was written to that file before, not even for another
      process: only what is written again is (fsyncgate). No later sync of a directory makes anything durable.

Relative and absolute paths name the same tree. Of a file space is taken up to the end of what was written;
what `truncate` added takes none.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from operator import itemgetter
from typing import NamedTuple

from broker.runtime.vfs import Buffer, File, WriteFailed
from broker.testing.fault_plan import FaultPlan

SECTOR_BYTES = 512
_UNLIMITED_BYTES = 1 << 40
_ROOT = 0


class CrashPolicy(enum.Enum):
    """The choice of which changes that were not yet durable the disk took before the power went."""

    KEEP_ALL = "keep_all"  # also what a killed process leaves on a machine that lives on
    LOSE_UNSYNCED = "lose_unsynced"
    NAMES_LOST_DATA_KEPT = "names_lost_data_kept"
    NAMES_KEPT_DATA_LOST = "names_kept_data_lost"
    TORN = "torn"  # names kept; of unsynced writes some sectors are new, others old or zero
    ZEROED = "zeroed"  # names and lengths kept; every unsynced byte is zero
    MIXED = "mixed"  # each directory and each file has its own fate, drawn from the above


RANDOM_POLICIES = frozenset({CrashPolicy.TORN, CrashPolicy.MIXED})
_FATES = (CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.TORN, CrashPolicy.ZEROED)


class Op(NamedTuple):
    """One recorded operation. `kind` is one of write, truncate, sync, create, link, rename, remove, make_dir,
    remove_dir, sync_dir, sync_failed."""

    kind: str
    path: str  # for a rename the source
    node: int
    offset: int = 0  # for a truncate the new length
    data: bytes = b""
    changes: tuple[tuple[int, str, int | None], ...] = ()  # directory, name, what it now names


@dataclass(slots=True, eq=False)
class _FileNode:
    id: int
    data: bytes | bytearray = b""  # bytes are shared with other crash states until the first write
    used_bytes: int = 0  # space taken: up to the end of what was written
    locked: bool = False


@dataclass(slots=True, eq=False)
class _DirNode:
    id: int
    names: dict[str, _FileNode | _DirNode] = field(default_factory=dict)


class MemFile:
    """An open file of a `MemVfs`. It outlives its name, as files do."""

    def __init__(self, vfs: MemVfs, path: str, node: _FileNode, *, holds_lock: bool = False) -> None:
        self._vfs = vfs
        self._path = path
        self._node = node
        self._holds_lock = holds_lock
        self._closed = False

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return len(self._checked().data)

    def pread(self, length: int, offset: int) -> bytes:
        node = self._checked()
        self._vfs._meet_fault("read", self._path, range(offset, offset + length))
        return bytes(node.data[offset : offset + length])

    def pread_nowait(self, length: int, offset: int) -> bytes | None:
        # Of a file that faults are planned for nothing is in memory: they are for the read that waits.
        if self._vfs.faults.concern("read", _clean(self._path)):
            return None
        block = self.pread(length, offset)
        return block if len(block) == length else None

    def read_ahead(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        pass

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        node = self._checked()
        data = b"".join(parts)
        fault = self._vfs.faults.take("write", _clean(self._path))
        taken = len(data) if fault is None else min(fault.after_bytes, len(data))
        room = self._vfs._room(node, offset, taken)
        if room > 0:
            self._vfs._change(node, Op("write", _clean(self._path), node.id, offset, data[:room]))
        if room < taken:
            raise _write_failed(errno.ENOSPC, self._path)
        if fault is not None:
            raise _write_failed(fault.error, self._path)

    def pwrite_synced(self, parts: Sequence[Buffer], offset: int) -> None:
        # Two operations: a crash may come between them, and a fault hit either.
        self.pwrite(parts, offset)
        self.sync()

    def copy_from(self, source: File, length: int, offset: int) -> None:
        block = source.pread(length, offset)
        self.pwrite([block], offset)
        if len(block) < length:
            raise _os_error(errno.EIO, source.path)

    def truncate(self, length: int) -> None:
        node = self._checked()
        if (fault := self._vfs.faults.take("truncate", _clean(self._path))) is not None:
            raise _write_failed(fault.error, self._path)
        self._vfs._change(node, Op("truncate", _clean(self._path), node.id, length))

    def sync(self) -> None:
        self._vfs._sync("sync", self._path, self._checked().id)

    def close(self) -> None:
        self._closed = True
        if self._holds_lock:
            self._node.locked = self._holds_lock = False

    def _checked(self) -> _FileNode:
        if self._closed:
            raise _os_error(errno.EBADF, self._path)
        return self._node


class CrashState(NamedTuple):
    """A file system as a crash left it, and what to say to get it again."""

    at: int
    policy: CrashPolicy
    seed: int
    vfs: MemVfs


class MemVfs:
    """The state that programs see, and the record from which crashes are built.

    `op_count` is the moment in the record: a crash `at` k comes after the first k operations returned and
    before the next one did. Whoever is promised something while `op_count` is k is owed it from `at` k on.
    """

    def __init__(self, *, faults: FaultPlan | None = None, capacity_bytes: int | None = None) -> None:
        self.faults = faults if faults is not None else FaultPlan()
        self.capacity_bytes = capacity_bytes
        self.ops: list[Op] = []
        self._first = 0  # the number of ops[0]; it grows when the record is trimmed
        self._root = _DirNode(_ROOT)
        self._ids = itertools.count(_ROOT + 1)
        self._base = _Disk()
        self._replay = _Disk()

    # What programs use: the Vfs protocol.

    def open(self, path: str, *, create: bool = False) -> MemFile:
        self._meet_fault("create" if create else "open", path)
        if create:
            if self.exists(path):
                raise _os_error(errno.EEXIST, path)
            return MemFile(self, path, self._create(path))
        return MemFile(self, path, self._find_file(path))

    def exists(self, path: str) -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._find(path) is not None
        return False

    def list_dir(self, path: str) -> list[str]:
        self._meet_fault("list_dir", path)
        return sorted(self._find_dir(path).names)

    def make_dir(self, path: str) -> None:
        self._meet_fault("make_dir", path)
        parent, name = self._parent(path)
        if name and name not in parent.names:
            node = parent.names[name] = _DirNode(next(self._ids))
            self._record("make_dir", path, node.id, (parent.id, name, node.id))

    def remove_dir(self, path: str) -> None:
        self._meet_fault("remove_dir", path)
        if self._find_dir(path).names:
            raise _os_error(errno.ENOTEMPTY, path)
        self._unname("remove_dir", path)

    def rename(self, source: str, target: str) -> None:
        self._meet_fault("rename", source)
        old_parent, old_name = self._parent(source)
        new_parent, new_name = self._parent(target)
        node, replaced = self._find(source), new_parent.names.get(new_name)
        if replaced is node:
            return
        if f"{_clean(target)}/".startswith(f"{_clean(source)}/"):
            raise _os_error(errno.EINVAL, source)
        if replaced is not None:
            _check_replaceable(node, replaced, target)
        del old_parent.names[old_name]
        new_parent.names[new_name] = node
        gone, named = (old_parent.id, old_name, None), (new_parent.id, new_name, node.id)
        self._record("rename", source, node.id, gone, named)

    def link(self, source: str, target: str) -> None:
        self._meet_fault("link", source)
        node = self._find_file(source)
        if self.exists(target):
            raise _os_error(errno.EEXIST, target)
        parent, name = self._parent(target)
        parent.names[name] = node
        self._record("link", source, node.id, (parent.id, name, node.id))

    def remove(self, path: str) -> None:
        self._meet_fault("remove", path)
        self._find_file(path)
        self._unname("remove", path)

    def sync_dir(self, path: str) -> None:
        self._meet_fault("open_dir", path)
        self._sync("sync_dir", path, self._find_dir(path).id)

    def free_bytes(self, path: str) -> int:
        return self._free_bytes()

    def _free_bytes(self) -> int:
        if self.capacity_bytes is None:
            return _UNLIMITED_BYTES
        files = {node.id: node for _, node in _walk(self._root) if isinstance(node, _FileNode)}
        return max(0, self.capacity_bytes - sum(node.used_bytes for node in files.values()))

    def lock(self, path: str) -> MemFile | None:
        self._meet_fault("open", path)
        node = self._find_file(path) if self.exists(path) else self._create(path)
        if node.locked:
            return None
        node.locked = True
        return MemFile(self, path, node, holds_lock=True)

    # What tests use.

    @property
    def op_count(self) -> int:
        """Return how many operations have returned so far; trimmed ones count."""
        return self._first + len(self.ops)

    def snapshot(self) -> dict[str, bytes]:
        """Every file's content by its path, without a leading slash, in order of the paths."""
        files = ((path, node) for path, node in _walk(self._root) if isinstance(node, _FileNode))
        return {path: bytes(node.data) for path, node in sorted(files, key=itemgetter(0))}

    def crashed(self, at: int, policy: CrashPolicy, rng: random.Random | None = None) -> MemVfs:
        """The file system as found after a crash at `at`: unlocked, without faults, with an empty record."""
        self._seek(at)
        vfs = MemVfs(capacity_bytes=self.capacity_bytes)
        vfs._adopt(self._replay, policy, rng or random.Random(0))
        return vfs

    def killed(self, at: int) -> MemVfs:
        """The file system as the next process finds it on a machine that lives on: what was not durable is not yet."""
        self._seek(at)
        vfs = MemVfs(capacity_bytes=self.capacity_bytes)
        vfs._take_over(self._replay)
        return vfs

    def crash_states(
        self,
        *,
        first: int | None = None,
        last: int | None = None,
        policies: Sequence[CrashPolicy] = tuple(CrashPolicy),
        seeds: Sequence[int] = (0,),
    ) -> Iterator[CrashState]:
        """Every different state of every moment from `first` to `last`, both included, by default all.

        Random policies are drawn once for each seed.
        """
        begin = self._first if first is None else first
        for at in range(begin, (self.op_count if last is None else last) + 1):
            seen: set[frozenset[tuple[str, bytes | bool]]] = set()
            for policy in policies:
                for seed in seeds if policy in RANDOM_POLICIES else seeds[:1]:
                    vfs = self.crashed(at, policy, random.Random(f"{seed}/{at}"))
                    nodes = _walk(vfs._root)
                    tree = frozenset((path, isinstance(n, _FileNode) and bytes(n.data)) for path, n in nodes)
                    if tree not in seen:
                        seen.add(tree)
                        yield CrashState(at, policy, seed, vfs)

    def trim(self) -> None:
        """Forget the record so far, so that long runs stay small; only later crashes can be built."""
        self._base.advance(self.ops)
        self._base.drop_unreachable()
        self._replay = self._base.copy()
        self._first += len(self.ops)
        self.ops.clear()

    # Changes of state; each is one operation of the record.

    def _record(self, kind: str, path: str, node: int, *changes: tuple[int, str, int | None]) -> None:
        self.ops.append(Op(kind, _clean(path), node, changes=changes))

    def _create(self, path: str) -> _FileNode:
        parent, name = self._parent(path)
        node = parent.names[name] = _FileNode(next(self._ids))
        self._record("create", path, node.id, (parent.id, name, node.id))
        return node

    def _unname(self, kind: str, path: str) -> None:
        parent, name = self._parent(path)
        self._record(kind, path, parent.names.pop(name).id, (parent.id, name, None))

    def _change(self, node: _FileNode, op: Op) -> None:
        node.data = _applied(node.data, (op,))
        node.used_bytes = _used_bytes(node.used_bytes, op)
        self.ops.append(op)

    def _sync(self, kind: str, path: str, node: int) -> None:
        fault = self.faults.take(kind, _clean(path))
        self._record("sync_failed" if fault else kind, path, node)
        if fault is not None:
            raise _write_failed(fault.error, path)

    def _meet_fault(self, kind: str, path: str, touched: range = range(0)) -> None:
        if (fault := self.faults.take(kind, _clean(path), touched)) is not None:
            raise _os_error(fault.error, path)

    # Lookups.

    def _find(self, path: str) -> _FileNode | _DirNode:
        parent, name = self._parent(path)
        node = parent.names.get(name) if name else parent
        if node is None:
            raise _os_error(errno.ENOENT, path)
        return node

    def _find_file(self, path: str) -> _FileNode:
        node = self._find(path)
        if isinstance(node, _DirNode):
            raise _os_error(errno.EISDIR, path)
        return node

    def _find_dir(self, path: str) -> _DirNode:
        node = self._find(path)
        if isinstance(node, _FileNode):
            raise _os_error(errno.ENOTDIR, path)
        return node

    def _parent(self, path: str) -> tuple[_DirNode, str]:
        """The directory that holds `path`, and the last name; the root holds itself under no name."""
        *above, last = _clean(path).split("/")
        node = self._root
        for name in above:
            below = node.names.get(name)
            if below is None:
                raise _os_error(errno.ENOENT, path)
            if isinstance(below, _FileNode):
                raise _os_error(errno.ENOTDIR, path)
            node = below
        return node, last

    def _room(self, node: _FileNode, offset: int, length: int) -> int:
        """Return how many of `length` bytes fit at `offset`; negative if not even the offset does."""
        if self.capacity_bytes is None or offset + length <= node.used_bytes:
            return length
        return min(length, node.used_bytes + self._free_bytes() - offset)

    def _seek(self, at: int) -> None:
        """Replay up to `at`."""
        if not self._first <= at <= self.op_count:
            raise IndexError(f"no crash at {at}: the record holds {self._first} to {self.op_count}")
        if at < self._replay.at:
            self._replay = self._base.copy()
        self._replay.advance(self.ops[self._replay.at - self._first : at - self._first])

    def _take_over(self, disk: _Disk) -> None:
        """Fill this empty file system with what `disk` shows; what is pending there is pending here."""
        self._base, self._replay = (replace(disk.copy(), at=0) for _ in range(2))
        self._ids = itertools.count(max((*disk.dirs, *disk.files)) + 1)
        made: dict[int, _FileNode | _DirNode] = {_ROOT: self._root}
        rng = random.Random(0)

        def fill(node: _DirNode, its_id: int) -> None:
            for name, below in disk.dirs[its_id].after_crash(CrashPolicy.KEEP_ALL, rng).items():
                if below not in made and below in disk.dirs:
                    directory = made[below] = _DirNode(below)
                    fill(directory, below)
                elif below not in made:
                    content = disk.files[below].copy().after_crash(CrashPolicy.KEEP_ALL, rng)
                    made[below] = _FileNode(below, content, disk.files[below].used_bytes_max())
                node.names[name] = made[below]

        fill(self._root, _ROOT)

    def _adopt(self, disk: _Disk, policy: CrashPolicy, rng: random.Random) -> None:
        """Fill this empty file system with what `disk` shows after a crash; all of it is durable now."""
        made: dict[int, _FileNode | _DirNode] = {_ROOT: self._root}

        def fill(node: _DirNode, old_id: int) -> None:
            for name, old in disk.dirs[old_id].after_crash(policy, rng).items():
                if old not in made:
                    if old in disk.dirs:
                        made[old] = below = _DirNode(next(self._ids))
                        self._base.dirs[below.id] = _DiskDir()
                        fill(below, old)
                    else:
                        content = disk.files[old].after_crash(policy, rng)
                        used_bytes = min(disk.files[old].used_bytes_max(), len(content))
                        made[old] = _FileNode(next(self._ids), content, used_bytes)
                        self._base.files[made[old].id] = _DiskFile(content, used_bytes)
                node.names[name] = made[old]
                self._base.dirs[node.id].durable[name] = made[old].id

        fill(self._root, _ROOT)
        self._replay = self._base.copy()


@dataclass(slots=True)
class _DiskFile:
    """One file's durable content, and the writes since."""

    durable: bytes | bytearray = b""
    used_bytes: int = 0  # of what is durable
    pending: list[Op] = field(default_factory=list)
    lost: list[Op] = field(default_factory=list)  # from before a sync that failed; older than what is pending

    def copy(self) -> _DiskFile:
        return _DiskFile(bytes(self.durable), self.used_bytes, self.pending.copy(), self.lost.copy())

    def sync(self) -> None:
        if not self.pending:
            return
        shown_bytes = reduce(_length, (*self.lost, *self.pending), len(self.durable))
        self.durable = _applied(self.durable, self.pending)
        del self.durable[shown_bytes:]
        self.used_bytes = reduce(_used_bytes, self.pending, self.used_bytes)
        for later in self.pending:
            self.lost = [part for op in self.lost if op.kind == "write" for part in _kept(op, later)]
        self.pending.clear()

    def fail_sync(self) -> None:
        self.lost += self.pending
        self.pending.clear()

    def used_bytes_max(self) -> int:
        """Return the space that it takes at most, whichever of the operations in doubt the disk took."""
        in_doubt = (*self.lost, *self.pending)
        return max(itertools.accumulate(in_doubt, _used_bytes, initial=self.used_bytes))

    def after_crash(self, policy: CrashPolicy, rng: random.Random) -> bytes:
        # Kept as bytes until the next sync, so that the states of one moment share what did not change.
        self.durable = bytes(self.durable)
        pending = [*self.lost, *self.pending]
        if not pending:
            return self.durable
        if policy is CrashPolicy.MIXED:
            policy = rng.choice(_FATES)
        if policy in (CrashPolicy.LOSE_UNSYNCED, CrashPolicy.NAMES_KEPT_DATA_LOST):
            return self.durable
        if policy is CrashPolicy.TORN:
            return _torn(self.durable, pending, rng)
        if policy is CrashPolicy.ZEROED:
            pending = [op._replace(data=bytes(len(op.data))) for op in pending]
        return bytes(_applied(self.durable, pending))


@dataclass(slots=True)
class _DiskDir:
    """One directory's durable names, and the changes since, oldest first."""

    durable: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)
    broken: bool = False

    def copy(self) -> _DiskDir:
        return _DiskDir(self.durable.copy(), self.pending.copy(), self.broken)

    def sync(self) -> None:
        if not self.broken:
            self.durable = self._names(len(self.pending))
            self.pending.clear()

    def fail_sync(self) -> None:
        self.broken = True

    def after_crash(self, policy: CrashPolicy, rng: random.Random) -> dict[str, int]:
        if policy in (CrashPolicy.LOSE_UNSYNCED, CrashPolicy.NAMES_LOST_DATA_KEPT):
            return self.durable
        taken = len(self.pending)
        if policy is CrashPolicy.MIXED:
            taken = rng.randint(0, taken)
        return self._names(taken)

    def _names(self, taken: int) -> dict[str, int]:
        names: dict[str, int | None] = {**self.durable}
        for changes in self.pending[:taken]:
            names.update(changes)
        return {name: node for name, node in names.items() if node is not None}


@dataclass(slots=True)
class _Disk:
    """Return what is durable and what is pending after the first `at` operations."""

    at: int = 0
    files: dict[int, _DiskFile] = field(default_factory=dict)
    dirs: dict[int, _DiskDir] = field(default_factory=lambda: {_ROOT: _DiskDir()})

    def copy(self) -> _Disk:
        files = {node: file.copy() for node, file in self.files.items()}
        return _Disk(self.at, files, {node: directory.copy() for node, directory in self.dirs.items()})

    def advance(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self._apply(op)
        self.at += len(ops)

    def drop_unreachable(self) -> None:
        # Nothing gives a name to a file that no directory names or could name again after a crash.
        reachable, todo = {_ROOT}, [_ROOT]
        while todo:
            directory = self.dirs[todo.pop()]
            named = set(directory.durable.values())
            named.update(node for names in directory.pending for node in names.values() if node is not None)
            todo.extend(node for node in named - reachable if node in self.dirs)
            reachable |= named
        self.files = {node: file for node, file in self.files.items() if node in reachable}
        self.dirs = {node: directory for node, directory in self.dirs.items() if node in reachable}

    def _apply(self, op: Op) -> None:
        match op.kind:
            case "write" | "truncate":
                if op.node in self.files:  # else it was removed for good, and is only still open
                    self.files[op.node].pending.append(op)
            case "sync" | "sync_dir" | "sync_failed":
                synced = self.files.get(op.node) or self.dirs.get(op.node)
                if synced is not None and op.kind == "sync_failed":
                    synced.fail_sync()
                elif synced is not None:
                    synced.sync()
            case "create":
                self.files[op.node] = _DiskFile()
            case "make_dir":
                self.dirs[op.node] = _DiskDir()
        for directory in dict.fromkeys(change[0] for change in op.changes):
            changes = {name: node for where, name, node in op.changes if where == directory}
            self.dirs[directory].pending.append(changes)


def _used_bytes(used_bytes: int, op: Op) -> int:
    """Return the space that a file takes after a write or a truncate."""
    if op.kind == "truncate":
        return min(used_bytes, op.offset)
    return max(used_bytes, op.offset + len(op.data))


def _length(length: int, op: Op) -> int:
    """Return the length that a file shows after a write or a truncate."""
    return op.offset if op.kind == "truncate" else max(length, op.offset + len(op.data))


def _kept(write: Op, later: Op) -> Iterator[Op]:
    """The parts of a write that a later operation left as they were."""
    first, end = write.offset, write.offset + len(write.data)
    later_end = max(end, later.offset) if later.kind == "truncate" else later.offset + len(later.data)
    for low, high in ((first, min(end, later.offset)), (max(first, later_end), end)):
        if low < high:
            yield write._replace(offset=low, data=write.data[low - first : high - first])


def _applied(content: bytes | bytearray, ops: Sequence[Op]) -> bytearray:
    """`content` after some writes and truncates; changed in place where it can be."""
    image = content if isinstance(content, bytearray) else bytearray(content)
    for op in ops:
        if len(image) < op.offset:
            image.extend(bytes(op.offset - len(image)))
        if op.kind == "truncate":
            del image[op.offset :]
        else:
            image[op.offset : op.offset + len(op.data)] = op.data
    return image


def _torn(durable: bytes, ops: Sequence[Op], rng: random.Random) -> bytes:
    """`durable` after a part of each op: every sector has its own fate, and so has the length."""
    lengths = [len(durable)]
    for op in ops:
        lengths.append(_length(lengths[-1], op))
    image = bytearray(durable) + bytes(max(lengths) - len(durable))
    kept_chance = rng.random()
    fates: dict[int, int] = {}  # by sector: how many of the ops it took; -1 if it took zeros instead
    for number, op in enumerate(ops):
        end = len(image) if op.kind == "truncate" else op.offset + len(op.data)
        for sector in range(op.offset // SECTOR_BYTES, -(-end // SECTOR_BYTES)):
            if sector not in fates:
                lost = rng.choice((-1, 0, rng.randint(0, len(ops))))
                fates[sector] = len(ops) if rng.random() < kept_chance else lost
            low = max(op.offset, sector * SECTOR_BYTES)
            high = min(end, (sector + 1) * SECTOR_BYTES)
            if fates[sector] < 0 or (fates[sector] > number and op.kind == "truncate"):
                image[low:high] = bytes(high - low)
            elif fates[sector] > number:
                image[low:high] = op.data[low - op.offset : high - op.offset]
    if rng.random() < 0.5:
        return bytes(image[: lengths[-1]])
    moment = rng.randrange(len(ops))
    shorter, longer = lengths[moment], max(lengths[moment : moment + 2])
    return bytes(image[: rng.randint(shorter, longer)])  # what grows may stop half-way


def _walk(root: _DirNode) -> Iterator[tuple[str, _FileNode | _DirNode]]:
    todo = [("", root)]
    while todo:
        prefix, directory = todo.pop()
        for name, node in directory.names.items():
            yield prefix + name, node
            if isinstance(node, _DirNode):
                todo.append((f"{prefix}{name}/", node))


def _check_replaceable(node: _FileNode | _DirNode, replaced: _FileNode | _DirNode, path: str) -> None:
    if isinstance(node, _FileNode) != isinstance(replaced, _FileNode):
        raise _os_error(errno.EISDIR if isinstance(node, _FileNode) else errno.ENOTDIR, path)
    if isinstance(replaced, _DirNode) and replaced.names:
        raise _os_error(errno.ENOTEMPTY, path)


@lru_cache(maxsize=4_096)  # called for every operation, with few paths
def _clean(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"no way up in a MemVfs: {path!r}")
    return "/".join(parts)


def _os_error(error: int, path: str) -> OSError:
    return OSError(error, os.strerror(error), path)  # becomes FileNotFoundError and the like by its number


def _write_failed(error: int, path: str) -> WriteFailed:
    return WriteFailed(error, os.strerror(error), path)
