"""Files that a topic's manifest names, for readers, copies, checks and removal."""

from __future__ import annotations

from broker.errors import MissingFile
from broker.runtime.vfs import Vfs, read_file
from broker.storage.blocks import KINDS
from broker.storage.manifest import TopicImage


def read_named(vfs: Vfs, path: str, advice: str = "") -> bytes:
    """Return the whole of a file that a manifest names; MissingFile if it is not there."""
    try:
        return read_file(vfs, path)
    except FileNotFoundError as error:
        raise MissingFile("A file that a manifest names is missing", path=path, advice=advice) from error


def named_files(image: TopicImage) -> dict[str, set[str]]:
    """The files that a topic's manifest names, by their folder below the topic's: what a backup must hold."""
    # The files of a ledger without entries may be missing, or torn: its first write makes them.
    captures = [ledger.capture for ledger in image.ledgers]
    captures = [capture for capture in captures if capture.sealed or capture.entry_count]
    files = {
        "ledgers": {capture.name("").file(kind) for capture in captures for kind in KINDS}
        | {ledger.amendments_file for ledger in image.ledgers},
        "cursors": {subscription.cursor_file for subscription in image.subscriptions}
        | {image.producers_file, image.recurring_file, image.bulk_file},
        "buckets": {f"{bucket_id}.bucket" for bucket_id in image.bucket_ids},
        "keys": {f"{run_id}.keys" for run_id in image.key_run_ids},
    }
    return {folder: names - {""} for folder, names in files.items()}
