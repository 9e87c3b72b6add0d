"""Reads the fields of many messages at once, on their wire form.

Decoding a thousand messages one by one costs more than storing them. All messages of a batch are walked
together instead: each round reads the next field of every message with a few NumPy operations. Whatever does
not have the plain form that every protobuf library writes (a tag beyond one byte, an unknown field, a length
that leads nowhere) is answered with None: the caller then has the typed parser decide, which also writes the
plain form of what it accepts. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from broker.model import Int64Column

U8Column = npt.NDArray[np.uint8]

_VARINT, _LENGTH = 0, 2
_PADDING = 10  # a varint is read at its greatest width, also at the very end
_SHIFTS = np.arange(0, 70, 7, dtype=np.uint64)


@dataclass(slots=True)
class Fields:
    """What was found, aligned with the messages; 0 where a field is absent. The last of a repeated one counts."""

    payload_bytes: Int64Column
    deliver_at_ms: Int64Column
    deliver_after_ms: Int64Column
    ttl_ms: Int64Column
    sequence_ids: Int64Column
    property_counts: Int64Column
    property_bytes: Int64Column
    has_text: bool = False
    """Whether any message has a field that must be valid UTF-8, or holds a message of its own."""
    keys: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Message -> where its key lies in the buffer, for those that have one."""
    schedule_keys: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def absent(cls, count: int) -> Fields:
        def column() -> Int64Column:
            return np.zeros(count, dtype=np.int64)

        return cls(column(), column(), column(), column(), column(), column(), column())


def scan_messages(buffer: bytes, starts: Int64Column, ends: Int64Column, fields_max: int) -> Fields | None:
    """Read the fields of all messages `buffer[starts[i]:ends[i]]`; None if one has not the plain form.

    `fields_max` bounds the rounds: more fields than that in one message are not plain either.
    """
    octets = np.frombuffer(buffer + bytes(_PADDING), dtype=np.uint8)
    count = len(starts)
    found = Fields.absent(count)
    at = starts.copy()
    active = np.flatnonzero(at < ends)
    for _ in range(fields_max):
        if not len(active):
            return found
        tags = octets[at[active]]
        for tag in (tags[:1] if (tags == tags[0]).all() else np.unique(tags)).tolist():
            some = active if len(active) == len(tags) and (tags == tag).all() else active[tags == tag]
            values, widths = _varints(octets, at[some] + 1)
            if widths is None or not _note(found, tag, some, at[some] + 1 + widths, values):
                return None
            at[some] += 1 + widths
            if tag & 7 == _LENGTH:
                at[some] += values
        if (at[active] > ends[active]).any():
            return None
        active = active[at[active] < ends[active]]
    return None


def _note(found: Fields, tag: int, some: Int64Column, at: Int64Column, values: Int64Column) -> bool:
    """Note one field of some messages; False if it is none of ours."""
    number, wire_type = tag >> 3, tag & 7
    if wire_type == _VARINT:
        column = {
            4: found.deliver_at_ms,
            5: found.deliver_after_ms,
            7: found.ttl_ms,
            8: found.sequence_ids,
        }.get(number)
        if column is not None:
            column[some] = values
        return column is not None or number == 9
    if wire_type != _LENGTH or (values < 0).any() or (values > 1 << 31).any():
        return False
    if number == 1:
        found.payload_bytes[some] = values
        return True
    found.has_text = True
    if number == 3:
        found.property_counts[some] += 1
        found.property_bytes[some] += values
    elif number in (2, 6):
        places = found.keys if number == 2 else found.schedule_keys
        places.update(zip(some.tolist(), zip(at.tolist(), values.tolist(), strict=True), strict=True))
    else:
        return number == 10
    return True


def _varints(octets: U8Column, at: Int64Column) -> tuple[Int64Column, Int64Column | None]:
    """The varints that begin at `at`, as signed 64-bit integers, and their widths; no widths if one never ends."""
    first = octets[at]
    if not (first & 0x80).any():
        return first.astype(np.int64), np.ones(len(at), dtype=np.int64)
    groups = octets[at[:, None] + np.arange(_PADDING)]
    last = groups < 0x80
    widths = last.argmax(axis=1)
    if not last[np.arange(len(at)), widths].all():
        return first.astype(np.int64), None
    used = np.arange(_PADDING) <= widths[:, None]
    parts = np.where(used, groups & 0x7F, 0).astype(np.uint64) << _SHIFTS
    return parts.sum(axis=1, dtype=np.uint64).view(np.int64), widths + 1
