"""The data directory of a broker with several shards: a folder a shard, and a marker that says how many there are.

shards.json       how many; written once
shard-0000/ ...   a data directory each, of one process
run/              sockets of the processes
lock              held by their supervisor
"""

from __future__ import annotations

import json

from broker.errors import Corrupt, Fenced, Refused
from broker.runtime.vfs import File, Vfs, read_file, replace_file
from broker.storage.layout import Layout

_MARKER = "shards.json"
_MARKER_BYTES_MAX = 4_096
_FORMAT = 1


def shard_folder(data_dir: str, number: int) -> str:
    return f"{data_dir.rstrip('/')}/shard-{number:04}"


def open_shard_folders(vfs: Vfs, data_dir: str, shards: int) -> File:
    """Lock a data directory for so many shards, made if it is empty; return what holds the lock.

    Raises Fenced if another process holds it, Refused if it was made for another number of shards.
    """
    layout = Layout(data_dir.rstrip("/"))
    vfs.make_dir(layout.root)
    vfs.sync_dir(layout.root.rpartition("/")[0] or ".")
    lock = vfs.lock(layout.lock)
    if lock is None:
        raise Fenced(
            f"Another broker holds the data directory {data_dir!r}: stop it, or choose another one",
            reason="DATA_DIR_LOCKED",
        )
    try:
        check_shards(vfs, data_dir, shards)
        if not read_shards(vfs, data_dir):
            marker = json.dumps({"format": _FORMAT, "shards": shards}).encode()
            replace_file(vfs, f"{layout.root}/{_MARKER}", [marker + b"\n"])
        for number in range(shards):
            vfs.make_dir(shard_folder(data_dir, number))
        vfs.sync_dir(layout.root)
    except BaseException:
        lock.close()
        raise
    return lock


def check_shards(vfs: Vfs, data_dir: str, shards: int) -> None:
    """Raise Refused if a data directory was made for another number of shards."""
    layout = Layout(data_dir.rstrip("/"))
    made_for = read_shards(vfs, data_dir)
    if not made_for and any(map(vfs.exists, (layout.manifest, layout.journal, layout.topics))):
        made_for = 1
    if made_for in (0, shards):  # an empty folder may become anything
        return
    raise Refused(
        f"The data directory {data_dir!r} was made with --shards {made_for}, and --shards is {shards}: start with "
        f"--shards {made_for}, or choose another folder. The number cannot be changed: there is no `reshard` yet",
        reason="OTHER_SHARD_COUNT",
    )


def refuse_shard_folders(vfs: Vfs, folder: str) -> None:
    """Raise Refused if this is the folder around the data directories of shards, and name them."""
    shards = read_shards(vfs, folder)
    if shards:
        first, last = shard_folder(folder, 0), shard_folder(folder, shards - 1)
        raise Refused(
            f"{folder!r} holds {shards} shards, each a data directory by itself: name one of {first} to {last}",
            reason="SHARD_NOT_NAMED",
        )


def read_shards(vfs: Vfs, data_dir: str) -> int:
    """Return how many shards a data directory has by its marker; 0 without one. Raises Corrupt."""
    path = f"{data_dir.rstrip('/')}/{_MARKER}"
    if not vfs.exists(path):
        return 0
    try:
        marker = json.loads(read_file(vfs, path, _MARKER_BYTES_MAX))
        shards = marker["shards"] if marker["format"] == _FORMAT else 0
    except (ValueError, LookupError, TypeError):
        shards = 0
    if type(shards) is not int or shards < 2:
        raise Corrupt(f"{path}: does not say how many shards there are, or this version cannot read it")
    return shards
