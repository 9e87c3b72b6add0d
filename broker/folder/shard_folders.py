"""The data directory of a broker with several shards: a folder a shard, and a marker that says how many there are.

shards.json       how many; replaced by `reshard` alone
shard-0000/ ...   a data directory each, of one process
shard-0000.new    made by `reshard`, and not in use yet
run/              sockets of the processes
lock              held by their supervisor

Invariants:
  RESHARD-1  The marker alone says which of the files are in use. All others that `reshard` makes or leaves have
      other names, and whoever opens the folder to serve removes them (`settle_shard_folders`).
  RESHARD-2  A marker that says "moving" is written once all that it promises is durable. From then on names are
      moved to it, which whoever opens the folder goes on with. Names change within this folder only: elsewhere a crash
      could keep one half of a rename.
  RESHARD-3  Nothing is removed that `reshard` did not make or replace, and nothing by a start that is refused. Names of
      a folder without shards are not its own: before it makes them, the marker says "joining". Where they lie beside
      a marker that does not, somebody put them there, and the folder is refused.
  RESHARD-4  Once every shard has served, the marker says "begun". A shard that holds nothing has then lost what it
      held, as where a disk is not mounted, and would begin empty. So the folder is refused; and while others serve,
      so is that shard, as often as it is started again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from broker.errors import Corrupt, Fenced, Refused
from broker.observe.logs import get_logger
from broker.runtime.vfs import File, Vfs, list_if_there, read_file, replace_file
from broker.storage.layout import Layout, is_unused, remove_tree

log = get_logger(__name__)

_MARKER = "shards.json"
_MARKER_BYTES_MAX = 4_096
_FORMAT = 1
_NEW = ".new"
SHARD_NAME = re.compile(r"shard-[0-9]{4}")
"""Name of the folder of a shard."""
_SHARD = re.compile(r"shard-([0-9]{4})(\.new)?")
MEMBER_FOLDERS = "shards"
"""Name of the folder that holds those of the shards of a node."""
_OF_ONE_SHARD = (
    "broker.manifest",
    "broker.manifest.new",
    "alive",
    "alive.new",
    "journal",
    "topics",
    "staging",
)
"""Names of a data directory without shards that belong to its broker. Backups in it stay."""


@dataclass(frozen=True, slots=True)
class _Marker:
    shards: int
    is_moving: bool = False
    is_joining: bool = False
    is_begun: bool = False


def shard_folder(data_dir: str, number: int) -> str:
    return f"{data_dir.rstrip('/')}/shard-{number:04}"


def new_shard_folder(data_dir: str, number: int) -> str:
    """Return the path of a shard's folder that is not in use yet."""
    return shard_folder(data_dir, number) + _NEW


def lock_folder(vfs: Vfs, data_dir: str) -> File:
    """Lock a data directory, made if it is not there; Fenced if another process holds it."""
    layout = Layout(data_dir.rstrip("/"))
    vfs.make_dir(layout.root)
    vfs.sync_dir(layout.root.rpartition("/")[0] or ".")
    lock = vfs.lock(layout.lock)
    if lock is None:
        raise Fenced(
            f"Another broker uses the data directory {data_dir!r}: stop it, or choose another directory",
            reason="DATA_DIR_LOCKED",
        )
    return lock


def open_shard_folders(vfs: Vfs, data_dir: str, shards: int) -> File:
    """Lock a data directory for so many shards, made if it is empty; return what holds the lock.

    Raises Fenced if another process holds it or it is a node's, Refused if it was made for another number of shards.
    """
    root = data_dir.rstrip("/")
    lock = lock_folder(vfs, data_dir)
    try:
        check_cluster(vfs, data_dir, in_cluster=False)
        check_shards(vfs, data_dir, shards)
        settle_shard_folders(vfs, data_dir)
        if not read_shards(vfs, data_dir):
            write_shards(vfs, data_dir, shards)
        for number in range(shards):
            vfs.make_dir(shard_folder(data_dir, number))
        vfs.sync_dir(root)
    except BaseException:
        lock.close()
        raise
    return lock


def prepare_folder(vfs: Vfs, data_dir: str, *, in_cluster: bool = False) -> None:
    """Prepare a data directory for a node, or a broker without shards. Raises as `open_shard_folders` does."""
    check_cluster(vfs, data_dir, in_cluster=in_cluster)
    names = list_if_there(vfs, data_dir)
    if _MARKER in names or any(map(_SHARD.fullmatch, names)):
        lock = lock_folder(vfs, data_dir)
        try:
            check_shards(vfs, data_dir, 1)
            settle_shard_folders(vfs, data_dir)
        finally:
            lock.close()
    check_shards(vfs, data_dir, 1)


def check_cluster(vfs: Vfs, data_dir: str, *, in_cluster: bool) -> None:
    """Raise Fenced if a data directory is of a cluster and this process of none, or the other way.

    Each would begin with an empty folder beside the messages of the other.
    """
    root = data_dir.rstrip("/")
    layout = Layout(root)
    own = layout.manifest, layout.journal, layout.topics, f"{root}/{_MARKER}"
    if in_cluster and any(map(vfs.exists, own)):
        raise Fenced(
            f"The data directory {root!r} belongs to a broker without a cluster, but cluster_store is set: choose "
            "another data_dir, or unset cluster_store",
            reason="DATA_DIR_OF_ANOTHER_SHARD",
        )
    if not in_cluster and list_if_there(vfs, f"{root}/{MEMBER_FOLDERS}"):
        raise Fenced(
            f"The data directory {root!r} belongs to a node of a cluster, but cluster_store is not set: choose "
            "another data_dir, or set cluster_store",
            reason="DATA_DIR_OF_ANOTHER_SHARD",
        )


def check_shards(vfs: Vfs, data_dir: str, shards: int) -> None:
    """Raise Refused if a data directory was made for another number of shards, or is on its way to another one."""
    layout = Layout(data_dir.rstrip("/"))
    marker = _read_marker(vfs, data_dir)
    made_for = marker.shards if marker is not None else 0
    if not made_for and any(map(vfs.exists, (layout.manifest, layout.journal, layout.topics))):
        made_for = 1
    if vfs.exists(layout.unfinished):
        raise Fenced(
            f"{layout.root!r} is incomplete: a restore or a reshard was interrupted. Run that command again",
            reason="COPY_UNFINISHED",
        )
    if made_for in (0, shards):  # an empty folder may become anything
        return
    raise Refused(
        f"The data directory {data_dir!r} was made with --shards {made_for}, but --shards is {shards}: start with "
        f"--shards {made_for}, choose another directory, or run postdate-broker reshard {data_dir} --shards {shards}",
        reason="OTHER_SHARD_COUNT",
    )


def refuse_shard_folders(vfs: Vfs, folder: str) -> None:
    """Raise Refused if this is the folder around the data directories of shards, and name them."""
    shards = read_shards(vfs, folder)
    if shards:
        first, last = shard_folder(folder, 0), shard_folder(folder, shards - 1)
        raise Refused(
            f"{folder!r} contains {shards} shards, each with a data directory of its own: name one of {first} to "
            f"{last}",
            reason="SHARD_NOT_NAMED",
        )


def read_shards(vfs: Vfs, data_dir: str) -> int:
    """Return how many shards a data directory has by its marker; 0 without one.

    Raises Corrupt, and Refused while `reshard` has not come to its end.
    """
    marker = _read_marker(vfs, data_dir)
    if marker is not None and marker.is_moving:
        raise Refused(
            f"`postdate-broker reshard` of {data_dir!r} was interrupted after it had written everything: start the "
            f"broker with --shards {marker.shards}, or run the command again; either completes it",
            reason="RESHARD_UNFINISHED",
        )
    return marker.shards if marker is not None else 0


def write_shards(
    vfs: Vfs,
    data_dir: str,
    shards: int,
    *,
    is_moving: bool = False,
    is_joining: bool = False,
    is_begun: bool = False,
) -> None:
    """Say durably how many shards there are. `settle_shard_folders` has to follow `is_moving` and `is_joining`."""
    marker: dict[str, int | bool] = {"format": _FORMAT, "shards": shards}
    flags = {"moving": is_moving, "joining": is_joining, "begun": is_begun}
    marker |= {name: True for name, is_set in flags.items() if is_set}
    replace_file(vfs, f"{data_dir.rstrip('/')}/{_MARKER}", [json.dumps(marker).encode() + b"\n"])


def note_begun(vfs: Vfs, data_dir: str) -> None:
    """Say durably that every shard has served, if the marker does not yet."""
    marker = _read_marker(vfs, data_dir)
    if marker is not None and not marker.is_begun:
        write_shards(vfs, data_dir, marker.shards, is_begun=True)


def refuse_lost_shard(vfs: Vfs, data_dir: str, number: int) -> None:
    """Raise Corrupt if one shard has lost what it held (RESHARD-4), as where its disk went while others serve."""
    root = data_dir.rstrip("/")
    marker = _decode_marker(read_file(vfs, f"{root}/{_MARKER}", _MARKER_BYTES_MAX))
    if marker is None or marker.is_begun:  # one that cannot be read says no more that it may begin
        _refuse_lost(vfs, root, number)


def settle_shard_folders(vfs: Vfs, data_dir: str) -> None:
    """Leave nothing of a `reshard` but what the marker says, and finish what it has begun to move. Needs the lock.

    Raises Refused and Corrupt before anything is changed.
    """
    root = data_dir.rstrip("/")
    marker = _read_marker(vfs, root)
    vfs.sync_dir(root)  # whoever wrote the marker may have been killed before it was durable
    found = [match for match in map(_SHARD.fullmatch, vfs.list_dir(root)) if match]
    remove_names(vfs, root, [_MARKER + _NEW])
    if marker is None or not marker.is_moving:
        _remove_old(vfs, root, [match[0] for match in found if match[2]])
        if marker is not None and marker.is_joining:
            _remove_old(vfs, root, _OF_ONE_SHARD)
            write_shards(vfs, root, marker.shards)
        return
    if marker.shards == 1:
        _remove_old(vfs, root, [match[0] for match in found])
        _remove_old(vfs, root, [_MARKER])
        return
    _remove_old(vfs, root, _OF_ONE_SHARD)
    new = {int(match[1]) for match in found if match[2]}
    # A number below `shards` without a new folder was moved before.
    old = {int(match[1]) for match in found if not match[2]} & (new | set(range(marker.shards, 10_000)))
    _remove_old(vfs, root, [f"shard-{number:04}" for number in sorted(old)])
    for number in sorted(new):
        vfs.rename(new_shard_folder(root, number), shard_folder(root, number))
    vfs.sync_dir(root)
    write_shards(vfs, root, marker.shards, is_begun=True)


def _remove_old(vfs: Vfs, root: str, names: Sequence[str]) -> None:
    """Remove what a `reshard` replaced or left, and say so."""
    for name in names:
        if vfs.exists(f"{root}/{name}"):
            log.info("Removing files that a reshard replaced or did not complete", path=f"{root}/{name}")
    remove_names(vfs, root, names)


def remove_names(vfs: Vfs, folder: str, names: Sequence[str]) -> None:
    """Remove files and trees in a folder that are there, durably."""
    present = [name for name in names if vfs.exists(f"{folder}/{name}")]
    for name in present:
        path = f"{folder}/{name}"
        try:
            vfs.remove(path)
        except (IsADirectoryError, PermissionError):
            remove_tree(vfs, path)
    if present:
        vfs.sync_dir(folder)


def _read_marker(vfs: Vfs, data_dir: str) -> _Marker | None:
    """Return what the marker says. Raises Corrupt and Refused where that is not what is in the folder."""
    root = data_dir.rstrip("/")
    path = f"{root}/{_MARKER}"
    if not vfs.exists(path):
        return None
    marker = _decode_marker(read_file(vfs, path, _MARKER_BYTES_MAX))
    if marker is None:
        raise Corrupt(f"{path} does not contain a number of shards, or another version wrote it")
    if marker.is_moving:
        _check_moving(vfs, root, marker.shards)
    elif not marker.is_joining:
        _refuse_mixed(vfs, root, marker.shards)
        if marker.is_begun:
            for number in range(marker.shards):
                _refuse_lost(vfs, root, number)
    return marker


def _decode_marker(content: bytes) -> _Marker | None:
    try:
        values = json.loads(content)
        shards, flags = values["shards"], [values.get(name, False) for name in ("moving", "joining", "begun")]
        known = (
            values["format"] == _FORMAT and type(shards) is int and all(type(flag) is bool for flag in flags)
        )
        if known and sum(flags) <= 1 and shards >= (1 if flags[0] else 2):
            return _Marker(shards, *flags)
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return None


def _check_moving(vfs: Vfs, root: str, shards: int) -> None:
    """Raise Corrupt unless all is there that takes the place of what would be removed."""
    if shards == 1:
        missing = [] if vfs.exists(Layout(root).manifest) else [Layout(root).manifest]
    else:
        missing = [
            shard_folder(root, number)
            for number in range(shards)
            if not vfs.exists(shard_folder(root, number)) and not vfs.exists(new_shard_folder(root, number))
        ]
    if missing:
        raise Corrupt(
            f"According to {root}/{_MARKER} a reshard to {shards} shards has written everything, but {missing[0]} "
            "is missing",
            path=missing[0],
        )


def _refuse_lost(vfs: Vfs, root: str, number: int) -> None:
    """Raise Corrupt if a shard that has served holds nothing."""
    folder = shard_folder(root, number)
    if is_unused(vfs, Layout(folder)):
        raise Corrupt(
            f"{folder!r} is empty, but this shard has served before: its data was lost, or its file system is "
            "not mounted",
            path=folder,
            advice="mount it, or restore the whole directory from a backup; to give its messages up for good, take "
            f'"begun" out of {root}/{_MARKER}',
        )


def _refuse_mixed(vfs: Vfs, root: str, shards: int) -> None:
    """Raise Refused if a data directory without shards lies beside a marker that no reshard in progress has set."""
    mixed = [name for name in _OF_ONE_SHARD if vfs.exists(f"{root}/{name}")]
    if mixed:
        raise Refused(
            f"{root!r} holds {mixed[0]} of a broker without shards, and a {_MARKER} that says there are {shards}: move "
            f"away what does not belong here. Nothing was changed",
            reason="DATA_DIR_MIXED",
        )
