"""Stored messages against the rows that were made of them. Pure.

A row is computed again from its message: hashes of the keys, and when the message is due. The time of a message
that was requeued, or became a dead letter, is in its row alone: it is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from google_crc32c import value

from broker.delayed.check.ledgers import Mask
from broker.model import Int64Column, RowColumn
from broker.rpc.wire import Fields, scan_messages
from broker.storage import schedule_hash
from broker.storage.blocks import FRAME_HEAD_BYTES, frame_length

_FIELDS_MAX = 100_000


def compare_messages(
    frames: list[bytes], rows: RowColumn, times: Int64Column, moved: Mask | None = None
) -> Iterable[tuple[int, str]]:
    """The places of messages whose row, or time, was not made of them, and why.

    The times of `moved` ones are not compared.
    """
    lengths = rows["length"].astype(np.int64)
    heads = np.fromiter(map(_head_bytes, frames), np.int64, len(frames))
    for place in np.flatnonzero(heads == 0).tolist():
        yield place, "the stored message is none"
    if not heads.all():
        return
    ends = lengths.cumsum()
    fields = scan_messages(b"".join(frames), ends - lengths + heads, ends, _FIELDS_MAX)
    if fields is None:
        yield 0, "a stored message here is not in the form that all of them have"
        return
    yield from (
        (place, what)
        for place, what in _wrong_times(fields, rows, times)
        if moved is None or not moved[place]
    )
    key_hashes = np.zeros(len(frames), dtype=np.uint32)
    for place, key in fields.keys.items():
        key_hashes[place] = value(key) or 1
    none = np.zeros(len(frames), dtype=np.uint64)
    schedule_hashes = none if fields.schedule_keys is None else schedule_hash.hash_spans(fields.schedule_keys)
    for name, expected in (("key_hash", key_hashes), ("schedule_hash", schedule_hashes)):
        for place in np.flatnonzero(expected != rows[name]).tolist():
            yield place, f"the {name} of its row is not that of its message"


def _wrong_times(fields: Fields, rows: RowColumn, times: Int64Column) -> Iterator[tuple[int, str]]:
    publish_ms = rows["publish_time_ms"]
    at_ms, after_ms = fields.deliver_at_ms, fields.deliver_after_ms
    asked_ms = np.where(after_ms > 0, publish_ms + after_ms, at_ms)
    expected_ms = np.where(asked_ms > publish_ms, asked_ms, 0)
    for place in np.flatnonzero((asked_ms != 0) & (expected_ms != times)).tolist():
        yield place, f"its row says deliver_at_ms {times[place]}, its message {expected_ms[place]}"


def _head_bytes(frame: bytes) -> int:
    """Bytes before the message itself; 0 if this is no frame."""
    head = frame[:FRAME_HEAD_BYTES]
    if frame_length(head) != len(frame):
        return 0
    return 1 + next(place for place, byte in enumerate(head[1:], 1) if byte < 0x80)
