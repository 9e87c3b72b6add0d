"""Cache of what is read of all key runs: filters and fences, bounded in bytes, and open files, bounded in number.

What was used last stays. Nothing in here is needed: what is missing is read, or opened, again.
"""

from __future__ import annotations

from collections import OrderedDict

from broker.storage.key_filter import KeyFilter
from broker.storage.key_run import Fences
from broker.storage.key_run_files import KeyRunReader

_Part = KeyFilter | Fences
_Key = tuple[int, int, type[_Part]]  # topic_id, run_id, which of both: neither id is ever used again

OPEN_RUNS = 16
"""Files that stay open; they are among those for which descriptors are spared."""


class KeyCache:
    """Filters and fences of runs by topic and run, at most `bytes_max` of them; and files, for reads of what is in
    memory."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parts: OrderedDict[_Key, _Part] = OrderedDict()
        self._bytes = 0
        self._readers: OrderedDict[tuple[int, int], KeyRunReader] = OrderedDict()

    @property
    def memory_bytes(self) -> int:
        return self._bytes

    def takes(self, part_bytes: int) -> bool:
        """Return whether a part of this size could be kept at all."""
        return part_bytes <= self._bytes_max

    def filter_of(self, topic_id: int, run_id: int) -> KeyFilter | None:
        part = self._used((topic_id, run_id, KeyFilter))
        return part if isinstance(part, KeyFilter) else None

    def fences_of(self, topic_id: int, run_id: int) -> Fences | None:
        part = self._used((topic_id, run_id, Fences))
        return part if isinstance(part, Fences) else None

    def put(self, topic_id: int, run_id: int, part: _Part) -> None:
        """Keep a part, in the place of those not used for the longest time."""
        key = (topic_id, run_id, type(part))
        self._drop(key)
        if not self.takes(part.memory_bytes):
            return
        self._parts[key] = part
        self._bytes += part.memory_bytes
        while self._bytes > self._bytes_max:
            _, oldest = self._parts.popitem(last=False)
            self._bytes -= oldest.memory_bytes

    def reader_of(self, topic_id: int, run_id: int) -> KeyRunReader | None:
        """Return an open file of a run, for the event loop, and until it awaits something."""
        reader = self._readers.get((topic_id, run_id))
        if reader is not None:
            self._readers.move_to_end((topic_id, run_id))
        return reader

    def put_reader(self, topic_id: int, run_id: int, reader: KeyRunReader) -> None:
        """Keep a file open, in the place of the one not used for the longest time."""
        self.close_reader(topic_id, run_id)
        self._readers[topic_id, run_id] = reader
        if len(self._readers) > OPEN_RUNS:
            self.close_reader(*next(iter(self._readers)))

    def close_reader(self, topic_id: int, run_id: int) -> None:
        """Nobody looks into a run any more, or not here."""
        reader = self._readers.pop((topic_id, run_id), None)
        if reader is not None:
            reader.close()

    def close_topic(self, topic_id: int) -> None:
        """A topic is not served any more."""
        for key in [key for key in self._readers if key[0] == topic_id]:
            self.close_reader(*key)

    def drop(self, topic_id: int, run_id: int) -> None:
        """A run is gone."""
        self.close_reader(topic_id, run_id)
        for kind in (KeyFilter, Fences):
            self._drop((topic_id, run_id, kind))

    def bytes_of(self, topic_id: int, run_id: int) -> int:
        parts = (self._parts.get((topic_id, run_id, kind)) for kind in (KeyFilter, Fences))
        return sum(part.memory_bytes for part in parts if part is not None)

    def _used(self, key: _Key) -> _Part | None:
        part = self._parts.get(key)
        if part is not None:
            self._parts.move_to_end(key)
        return part

    def _drop(self, key: _Key) -> None:
        part = self._parts.pop(key, None)
        if part is not None:
            self._bytes -= part.memory_bytes
