"""The files of runs that lie on a disk, whoever names them."""

from __future__ import annotations

from broker.runtime.vfs import Vfs


def run_ids(vfs: Vfs, folder: str) -> list[int]:
    """Return the ids of the runs in a folder, rising; each is the name of its file."""
    return sorted(int(name.partition(".")[0]) for name in vfs.list_dir(folder))
