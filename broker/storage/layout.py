"""Paths in the data directory. Folders are named by ids, never by client text.

lock  broker.manifest  alive  journal/
unfinished  backup.json  backup.pins/  (see `topics/backup.py`)
topics/<topic_id>/manifest
topics/<topic_id>/ledgers/<ledger_id>.<generation>.{data,times,rows}, or .packed in the place of .rows
topics/<topic_id>/ledgers/<ledger_id>.<lsn>.amend
topics/<topic_id>/cursors/<subscription_id>.<lsn>
topics/<topic_id>/buckets/<bucket_id>.bucket
topics/<topic_id>/keys/<run_id>.keys
staging/<compaction_id>/  (see `folder/compaction.py`)
"""

from __future__ import annotations

from broker.runtime.vfs import Vfs, list_if_there

ROOT_MANIFEST = "broker.manifest"
BACKUP_MARKER = "backup.json"


class Layout:
    """Paths below one data directory."""

    def __init__(self, data_dir: str) -> None:
        self.root = data_dir
        self.lock = f"{data_dir}/lock"
        self.manifest = f"{data_dir}/{ROOT_MANIFEST}"
        self.alive = f"{data_dir}/alive"
        self.journal = f"{data_dir}/journal"
        self.topics = f"{data_dir}/topics"
        self.unfinished = f"{data_dir}/unfinished"
        """There while a backup or a restore makes this folder."""
        self.backup_marker = f"{data_dir}/{BACKUP_MARKER}"
        """There if this folder is a backup."""
        self.pins = f"{data_dir}/backup.pins"
        """Second names of files that a backup has yet to copy."""
        self.staging = f"{data_dir}/staging"
        """Folder in which compaction jobs write; one for each lease."""

    def topic(self, topic_id: int) -> str:
        return f"{self.topics}/{topic_id}"

    def topic_manifest(self, topic_id: int) -> str:
        return f"{self.topics}/{topic_id}/manifest"

    def ledgers(self, topic_id: int) -> str:
        return f"{self.topics}/{topic_id}/ledgers"

    def cursors(self, topic_id: int) -> str:
        return f"{self.topics}/{topic_id}/cursors"

    def buckets(self, topic_id: int) -> str:
        return f"{self.topics}/{topic_id}/buckets"

    def keys(self, topic_id: int) -> str:
        return f"{self.topics}/{topic_id}/keys"

    def make_topic_folders(self, vfs: Vfs, topic_id: int) -> None:
        """Make a topic's folders if they are not there. Durable once the topic's and `topics` were synced."""
        for folder in (
            self.topic(topic_id),
            self.ledgers(topic_id),
            self.cursors(topic_id),
            self.buckets(topic_id),
            self.keys(topic_id),
        ):
            vfs.make_dir(folder)


def is_unused(vfs: Vfs, layout: Layout) -> bool:
    """Tell whether nothing was ever stored in a data directory: no broker came so far as to write its root manifest.

    Such a one is not there, is empty, or holds empty folders. Without the root manifest, all else is damage or half of
    a copy.
    """
    if any(map(vfs.exists, (layout.manifest, layout.unfinished, layout.backup_marker))):
        return False
    return not any(list_if_there(vfs, folder) for folder in (layout.journal, layout.topics))


def remove_tree(vfs: Vfs, folder: str) -> None:
    """Remove a folder and everything in it."""
    for name in vfs.list_dir(folder):
        path = f"{folder}/{name}"
        try:
            vfs.remove(path)
        except (IsADirectoryError, PermissionError):
            remove_tree(vfs, path)
    vfs.remove_dir(folder)
