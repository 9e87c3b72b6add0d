"""Reads the fields of many messages at once, on their wire form.

Decoding a thousand messages one by one costs more than storing them. All messages of a batch are walked
together instead: each round reads the next field of every message with a few NumPy operations. Whatever does
not have the plain form that every protobuf library writes (a tag beyond one byte, an unknown field, a length
that leads nowhere, a payload behind another field) is answered with None: the caller then has the typed parser
decide, which also writes the plain form of what it accepts. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from broker.model import Int64Column, KeySpans, distinct_values
from broker.storage.message_fields import FRAME_TAG, LENGTH, VARINT_BYTES_MAX, tags_of
from broker.storage.octets import Octets, U8Column
from postdate_api.v1 import message_pb2

_COLUMN_NAMES = {
    "deliver_at_ms": "deliver_at_ms",
    "deliver_after_ms": "deliver_after_ms",
    "ttl_ms": "ttl_ms",
    "sequence_id": "sequence_ids",
}
_TEXT_NAMES = ("key", "properties", "traceparent")
_TAGS = tags_of(message_pb2.Message, "payload", "schedule_key", "event_time_ms", *_COLUMN_NAMES, *_TEXT_NAMES)
_COLUMNS = {_TAGS[name]: attrgetter(column) for name, column in _COLUMN_NAMES.items()}
_PAYLOAD, _SCHEDULE_KEY, _EVENT_TIME_MS = (
    _TAGS[name] for name in ("payload", "schedule_key", "event_time_ms")
)
_TEXTS = _KEY, _PROPERTIES, _TRACEPARENT = tuple(_TAGS[name] for name in _TEXT_NAMES)
_SHIFTS = np.arange(0, 70, 7, dtype=np.uint64)
_ONE, _TWO, _FOUR = np.uint64(1), np.uint64(2), np.uint64(4)
_CONTINUES = np.uint64(0x8080808080808080)
_EVEN_7, _ODD_7 = np.uint64(0x007F007F007F007F), np.uint64(0x7F007F007F007F00)
_EVEN_14, _ODD_14 = np.uint64(0x00003FFF00003FFF), np.uint64(0x3FFF00003FFF0000)
_EVEN_28, _ODD_28 = np.uint64(0x000000000FFFFFFF), np.uint64(0x0FFFFFFF00000000)


@dataclass(slots=True)
class Fields:
    """Fields found, aligned with the messages; 0 where a field is absent. The last of a repeated one counts."""

    payload_bytes: Int64Column
    deliver_at_ms: Int64Column
    deliver_after_ms: Int64Column
    ttl_ms: Int64Column
    sequence_ids: Int64Column  # the bits of uint64
    property_counts: Int64Column
    property_bytes: Int64Column
    traceparent_bytes: Int64Column
    has_text: bool = False
    """True if any message has a field that must be valid UTF-8, or holds a message of its own."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """Message -> its key, for those that have one."""
    schedule_keys: KeySpans | None = None
    """Texts, too, and not counted in `has_text` unless one comes twice."""

    @classmethod
    def absent(cls, count: int) -> Fields:
        def column() -> Int64Column:
            return np.zeros(count, dtype=np.int64)

        return cls(column(), column(), column(), column(), column(), column(), column(), column())

    def note_keys(self, buffer: bytes, some: Int64Column, starts: Int64Column, ends: Int64Column) -> None:
        for index, start, end in zip(some.tolist(), starts.tolist(), ends.tolist(), strict=True):
            if start < end:
                self.keys[index] = buffer[start:end]
            else:
                self.keys.pop(index, None)  # an empty one is none

    def note_schedule_keys(
        self, buffer: bytes, some: Int64Column, starts: Int64Column, ends: Int64Column
    ) -> None:
        keys = self.schedule_keys
        if keys is None:
            count = len(self.payload_bytes)
            keys = KeySpans(buffer, np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64))
            self.schedule_keys = keys
        # Of a key that comes twice only the last one is kept here, and clients parse both.
        self.has_text |= bool(keys.ends[some].any())
        keys.starts[some], keys.ends[some] = starts, ends

    def whole(self) -> Fields:
        """All fields were noted."""
        if self.schedule_keys is not None and not len(self.schedule_keys.places()):
            self.schedule_keys = None  # empty ones are none
        return self


def scan_messages(buffer: bytes, starts: Int64Column, ends: Int64Column, fields_max: int) -> Fields | None:
    """Read the fields of all messages `buffer[starts[i]:ends[i]]`; None if one has not the plain form.

    `fields_max` bounds the rounds: more fields than that in one message are not plain either. A payload is the first
    field, so that no message is stored with two of them: clients that read the payloads of many messages at once take
    as many as there are messages for one of each.
    """
    octets = Octets(buffer)
    columns = Fields.absent(len(starts))
    at, some = starts, np.arange(len(starts))
    at, ends, some = _unfinished(at, ends, some)
    for place in range(fields_max):
        if not len(at):
            return columns.whole()
        tags = octets.bytes[at]
        tag = int(tags[0])
        is_same = np.count_nonzero(tags == tag) == len(tags)  # much cheaper, and how most batches look
        if place and np.count_nonzero(tags == _PAYLOAD):
            return None
        values, widths = _varints(octets, at + 1)
        if widths is None:
            return None
        at = at + (1 + widths)
        if is_same:
            if not _note(columns, buffer, tag, some, at, values):
                return None
            at = at + values if tag & 7 == LENGTH else at
        else:
            if not _note_each(columns, buffer, tags, some, at, values):
                return None
            at = at + np.where(tags & 7 == LENGTH, values, 0)
        if np.count_nonzero(at > ends):
            return None
        at, ends, some = _unfinished(at, ends, some)
    return None if len(at) else columns.whole()


def _unfinished(
    at: Int64Column, ends: Int64Column, some: Int64Column
) -> tuple[Int64Column, Int64Column, Int64Column]:
    """The messages that have fields left."""
    left = at < ends
    left_count = np.count_nonzero(left)
    if left_count == len(left):
        return at, ends, some
    if not left_count:
        return at[:0], ends[:0], some[:0]
    return at[left], ends[left], some[left]


def _note_each(
    columns: Fields, buffer: bytes, tags: U8Column, some: Int64Column, at: Int64Column, values: Int64Column
) -> bool:
    """Note one field of each message, not the same of all; False if one of them is none of ours."""
    for tag in distinct_values(tags).tolist():
        of_tag = tags == tag
        if not _note(columns, buffer, tag, some[of_tag], at[of_tag], values[of_tag]):
            return False
    return True


def _note(
    columns: Fields, buffer: bytes, tag: int, some: Int64Column, at: Int64Column, values: Int64Column
) -> bool:
    """Note one field of some messages; False if it is none of ours."""
    if tag in _COLUMNS:
        _COLUMNS[tag](columns)[some] = values
        return True
    if tag == _EVENT_TIME_MS:
        return True
    if int(values.min()) < 0 or int(values.max()) > 1 << 31:
        return False
    if tag == _PAYLOAD:
        columns.payload_bytes[some] = values
    elif tag == _SCHEDULE_KEY:
        columns.note_schedule_keys(buffer, some, at, at + values)
    elif tag == _KEY:
        columns.note_keys(buffer, some, at, at + values)
    elif tag == _PROPERTIES:
        columns.property_counts[some] += 1
        columns.property_bytes[some] += values
    elif tag == _TRACEPARENT:
        columns.traceparent_bytes[some] = values
    else:
        return False
    columns.has_text |= tag in _TEXTS
    return True


def _varints(octets: Octets, at: Int64Column) -> tuple[Int64Column, Int64Column | int | None]:
    """The varints that begin at `at`, as signed 64-bit integers, and their widths; no widths if one is none.

    Widths are one number where all are the same.
    """
    words = octets.words(at)
    ends = ~words & _CONTINUES
    # The lowest bit that is set marks the varint's last byte; everything above it belongs to other fields.
    last = ends & (~ends + _ONE)
    first = int(last[0])
    widths: Int64Column | int
    if first and np.count_nonzero(last == first) == len(last):  # times, and the lengths of equal payloads
        widths = (first.bit_length() + 7) >> 3
        values = words & np.uint64(first - 1)
    elif np.count_nonzero(ends) == len(ends):
        widths = (np.bitwise_count(last - _ONE).astype(np.int64) >> 3) + 1
        values = words & (last - _ONE)  # without continuation bits in the last byte; the others go now
    else:
        return _long_varints(octets, at)
    if not isinstance(widths, int) or widths > 1:
        # Seven bits of each byte, moved together: pairs of bytes, then of pairs, then of those.
        values = (values & _EVEN_7) | ((values & _ODD_7) >> _ONE)
        if not isinstance(widths, int) or widths > 2:
            values = (values & _EVEN_14) | ((values & _ODD_14) >> _TWO)
            values = (values & _EVEN_28) | ((values & _ODD_28) >> _FOUR)
    return values.view(np.int64), widths


def _long_varints(octets: Octets, at: Int64Column) -> tuple[Int64Column, Int64Column | None]:
    """As `_varints`, also for those of more than eight bytes: negative numbers, and times beyond all limits."""
    groups = octets.groups(at, VARINT_BYTES_MAX)
    last = groups < 0x80
    widths = last.argmax(axis=1)
    if not last[np.arange(len(at)), widths].all() or (groups[widths == VARINT_BYTES_MAX - 1, -1] > 1).any():
        return widths, None  # it never ends, or has more than 64 bits, which some parsers refuse
    used = np.arange(VARINT_BYTES_MAX) <= widths[:, None]
    parts = np.where(used, groups & 0x7F, 0).astype(np.uint64) << _SHIFTS
    return parts.sum(axis=1, dtype=np.uint64).view(np.int64), widths + 1


def find_frames(raw: bytes, at: int, heads: Int64Column, lengths: Int64Column) -> bytes | None:
    """The frames of all messages, if they lie in `raw` side by side from `at` on; else None.

    The lengths are those of the messages that the parser found, in order: if each place holds the tag and that very
    length, in as few bytes as it takes, the bytes are the messages and nothing else. The caller knows that a field
    begins at `at`.
    """
    sizes = heads + lengths
    end = at + int(sizes.sum())
    if end > len(raw):
        return None
    octets = Octets(raw)
    places = at + sizes.cumsum() - sizes
    head = int(heads[0])
    if head <= 3 and np.count_nonzero(heads == head) == len(heads):
        # Tag and length in two or three bytes each: compared as they would be written.
        words = octets.words(places) & np.uint64((1 << (8 * head)) - 1)
        high, low = lengths >> 7, lengths & 0x7F
        wanted = (lengths << 8 if head == 2 else (high << 16) | (low << 8) | 0x8000) | FRAME_TAG
        return raw[at:end] if np.count_nonzero(words == wanted.view(np.uint64)) == len(places) else None
    values, widths = _varints(octets, places + 1)
    if widths is None or (octets.bytes[places] != FRAME_TAG).any():
        return None
    return raw[at:end] if (values == lengths).all() and np.all(widths == heads - 1) else None
