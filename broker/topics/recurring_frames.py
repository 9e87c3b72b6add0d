"""Messages of occurrences: that of the recurring schedule, with properties and schedule key of an occurrence. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import google_crc32c
import numpy as np

from broker.model import Batch, KeySpans
from broker.storage import schedule_hash
from broker.storage.message_fields import FRAME_HEAD, SCHEDULE_KEY_TAG, key_and_ttl, property_field
from broker.storage.varint import encode_varint
from broker.topics.recurrence import DueOccurrence

PREFIX = "postdate.schedule."
NAME = PREFIX + "name"
TIME_MS = PREFIX + "time-ms"
KEY_PREFIX = "schedule/"

_KEY_HEAD = bytes((SCHEDULE_KEY_TAG,))


def occurrence_key(name: str, time_ms: int) -> str:
    """The schedule key of an occurrence."""
    return f"{KEY_PREFIX}{name}/{time_ms}"


def occurrence_frame(name: str, message: bytes, time_ms: int) -> bytes:
    """The frame of an occurrence."""
    key = occurrence_key(name, time_ms).encode()
    body = b"".join(
        (
            message,
            property_field(NAME.encode(), name.encode()),
            property_field(TIME_MS.encode(), str(time_ms).encode()),
            _KEY_HEAD,
            encode_varint(len(key)),
            key,
        )
    )
    return b"".join((FRAME_HEAD, encode_varint(len(body)), body))


class OccurrenceBatch:
    """A batch that is being gathered."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._keys: list[bytes] = []
        self._times: list[int] = []
        self._ttls: list[int] = []
        self._key_hashes: list[int] = []
        self.byte_count = 0

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, name: str, message: bytes, occurrences: Sequence[DueOccurrence]) -> int:
        """Add occurrences of a schedule; returns the place of the first."""
        place = len(self._frames)
        key, ttl_ms = key_and_ttl(message)
        key_hash = (google_crc32c.value(key) or 1) if key else 0
        for occurrence in occurrences:
            frame = occurrence_frame(name, message, occurrence.time_ms)
            self._frames.append(frame)
            self._keys.append(occurrence_key(name, occurrence.time_ms).encode())
            self._times.append(occurrence.deliver_at_ms)
            self._ttls.append(ttl_ms)
            self._key_hashes.append(key_hash)
            self.byte_count += len(frame)
        return place

    def batch(self) -> Batch:
        """All of it, as a producer's batch."""
        count = len(self._frames)
        keys = KeySpans.of(self._keys)
        return Batch(
            frames=b"".join(self._frames),
            lengths=np.fromiter(map(len, self._frames), dtype=np.uint32, count=count),
            crcs=np.fromiter(map(google_crc32c.value, self._frames), dtype=np.uint32, count=count),
            deliver_at_ms=np.array(self._times, dtype=np.int64),
            deliver_after_ms=np.zeros(count, dtype=np.int64),
            ttl_ms=np.array(self._ttls, dtype=np.int64),
            key_hashes=np.array(self._key_hashes, dtype=np.uint32),
            schedule_hashes=schedule_hash.hash_spans(keys),
            schedule_keys=keys,
        )
