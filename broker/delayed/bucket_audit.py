"""Lookup of one entry in a bucket, for the check of a running topic, not for delivery."""

from __future__ import annotations

from collections.abc import Callable

from broker.delayed.due_rows import Key, rows_before
from broker.delayed.sealed_bucket import SealedBucket
from broker.errors import PostdateError
from broker.model import Position
from broker.storage.bucket_files import BucketStorage


async def holds_waiting(
    storage: BucketStorage, bucket: SealedBucket, position: Position, loaded_end: Callable[[], Key]
) -> bool:
    """Return whether a bucket holds an entry that lies at or after `loaded_end`. Reads its bitmap, then segments."""
    ledger_id, entry_id = position
    try:
        if entry_id not in await storage.read(bucket.bucket_id, lambda reader: reader.read_bitmap(ledger_id)):
            return False
        if not bucket.is_deleting and bucket.window_holds(ledger_id, entry_id):
            return True
        for segment in range(bucket.next_segment, bucket.segment_count):
            columns = await bucket.read(storage, segment)
            is_entry = (columns.ledger_ids == ledger_id) & (columns.entry_ids == entry_id)
            is_entry &= ~rows_before(columns, loaded_end())
            if is_entry.any():
                return True
    except (OSError, PostdateError):
        if not bucket.is_deleting:
            raise
    return False
