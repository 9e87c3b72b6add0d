"""One bucket segment: entries in due order as two packed columns. Pure.

    segment   times column, ordinals column; nothing after them
    times     encoding 1; the deltas are from each time to the next, from the first time on
              0 DELTAS  packed(count - 1) of the deltas
              1 RUNS    run_count 4, packed(run_count - 1) of the deltas between distinct times, packed(run_count)
                        of how many entries have each time
    ordinals  encoding 1
              0 PLAIN   packed(count) of the ordinals
              1 STEPS   packed(count - 1) of each ordinal's difference from the one before it
    packed(n) width 1, least 8 (signed), then `value - least` of n values in `width` bits each:
              whole 32, 16 and 8 bit parts from the low end as columns of their own (n items each), then the
              remaining 0 to 7 bits r of 8 values at a time in r bytes, the first value lowest; the last group is
              filled with zeros

The first time, the first ordinal and the count are in the bucket's metadata. Integers are little-endian. Of the
two encodings of a column the writer takes the shorter one.

Invariants:
  SEGMENT-1  A decoder gives columns in order, (time, ordinal) rising strictly, or `Corrupt`, whatever the bytes; it
      allocates nothing beyond what `count` allows.
"""

from __future__ import annotations

import struct

import numpy as np

from broker.errors import Corrupt
from broker.model import TIME_MS_MAX, Int64Column, UInt64Column

SEGMENT_ENTRIES_MIN = 2_048
SEGMENT_ENTRIES_MAX = 5_000
SEGMENT_COUNT_LIMIT = 1 << 20
"""Entries of a segment that any version of the broker would write; more is damage."""
ORDINAL_END = 1 << 62

_DELTAS, _RUNS = 0, 1
_PLAIN, _STEPS = 0, 1
_WIDTH_MAX = 63
_PACKED_HEAD = struct.Struct("<Bq")
_RUN_COUNT = struct.Struct("<I")
_PARTS = ((32, np.dtype("<u4")), (16, np.dtype("<u2")), (8, np.dtype("u1")))
_GROUP = 8


def encode_segment(times: Int64Column, ordinals: Int64Column) -> bytes:
    """The bytes of at least one entry, sorted by (time, ordinal), each once."""
    assert 0 < len(times) == len(ordinals) <= SEGMENT_COUNT_LIMIT
    return b"".join((*_encode_times(times), *_encode_ordinals(ordinals)))


def decode_segment(
    data: bytes,
    count: int,
    first_ms: int,
    first_ordinal: int,
    path: str = "",
    offset: int = 0,
) -> tuple[Int64Column, Int64Column]:
    """The times and ordinals of a segment of `count` entries; raises Corrupt, with the segment's `offset`."""
    try:
        return _decode_segment(data, count, first_ms, first_ordinal)
    except ValueError as error:
        raise Corrupt(f"A bucket segment is damaged: {error}", path=path, offset=offset) from error


def cut_segments(
    times: Int64Column,
    time_step_ms: int,
    max_entries: int = SEGMENT_ENTRIES_MAX,
    min_entries: int = SEGMENT_ENTRIES_MIN,
    *,
    is_last: bool = True,
) -> Int64Column:
    """Return where segments end in sorted times: the index after the last entry of each.

    A segment ends before an entry of another time step once it has `min_entries` (at most `max_entries`), and at
    `max_entries` in any case. Unless the times are the last ones, entries that may yet get company are left over.
    """
    assert time_step_ms > 0 < max_entries <= SEGMENT_COUNT_LIMIT
    min_entries = max(1, min(min_entries, max_entries))
    steps = times // time_step_ms
    changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    ends: list[int] = []
    start, count = 0, len(times)
    while start < count:
        end = start + max_entries
        at = int(np.searchsorted(changes, start + min_entries))
        if at < len(changes):
            end = min(end, int(changes[at]))
        elif end > count:
            if not is_last:
                break
            end = count
        ends.append(end)
        start = end
    return np.array(ends, dtype=np.int64)


def _encode_times(times: Int64Column) -> tuple[bytes, ...]:
    deltas = np.diff(times)
    plain = _Packed(deltas)
    starts = np.flatnonzero(deltas)  # before the first entry of each run but the first
    if 2 * len(starts) < len(deltas):
        bounds = np.empty(len(starts) + 2, dtype=np.int64)
        bounds[0], bounds[-1] = 0, len(times)
        bounds[1:-1] = starts + 1
        between, lengths = _Packed(deltas[starts]), _Packed(np.diff(bounds))
        if _RUN_COUNT.size + between.size + lengths.size < plain.size:
            head = bytes((_RUNS,)) + _RUN_COUNT.pack(len(starts) + 1)
            return head, between.encode(), lengths.encode()
    return bytes((_DELTAS,)), plain.encode()


def _encode_ordinals(ordinals: Int64Column) -> tuple[bytes, ...]:
    plain, steps = _Packed(ordinals), _Packed(np.diff(ordinals))
    if steps.size < plain.size:
        return bytes((_STEPS,)), steps.encode()
    return bytes((_PLAIN,)), plain.encode()


def _decode_segment(
    data: bytes, count: int, first_ms: int, first_ordinal: int
) -> tuple[Int64Column, Int64Column]:
    _check(0 < count <= SEGMENT_COUNT_LIMIT, f"{count} entries")
    _check(0 <= first_ms <= TIME_MS_MAX, f"first time {first_ms}")
    source = _Source(data)
    times = _decode_times(source, count, first_ms)
    ordinals = _decode_ordinals(source, count, first_ordinal)
    _check(source.offset == len(data), f"{len(data) - source.offset} bytes too many")
    # Sums may have wrapped around, but the first one that left its range shows: times only grow, by less than
    # 2**63, and no ordinal below 2**62 comes back into [0, 2**62) by a step that leaves int64.
    _check(times.min() >= first_ms and times.max() <= TIME_MS_MAX, "a time out of range")
    _check(ordinals.min() >= 0 and ordinals.max() < ORDINAL_END, "an ordinal out of range")
    _check(ordinals[0] == first_ordinal, f"it does not begin with ordinal {first_ordinal}")
    rises = (ordinals[1:] > ordinals[:-1]) | (times[1:] > times[:-1])
    _check(rises.all(), "its entries are out of order")
    return times, ordinals


def _decode_times(source: _Source, count: int, first_ms: int) -> Int64Column:
    encoding = source.byte()
    if encoding == _DELTAS:
        return _sum_up(first_ms, _checked_deltas(source.packed(count - 1)))
    _check(encoding == _RUNS, f"encoding {encoding} of times")
    (run_count,) = _RUN_COUNT.unpack(source.take(_RUN_COUNT.size))
    _check(0 < run_count <= count, f"{run_count} runs")
    distinct = _sum_up(first_ms, _checked_deltas(source.packed(run_count - 1)))
    lengths = source.packed(run_count)
    _check(lengths.min() > 0 and lengths.max() <= count and lengths.sum() == count, "the lengths of runs")
    return np.repeat(distinct, lengths)


def _decode_ordinals(source: _Source, count: int, first_ordinal: int) -> Int64Column:
    encoding = source.byte()
    if encoding == _PLAIN:
        return source.packed(count)
    _check(encoding == _STEPS, f"encoding {encoding} of ordinals")
    return _sum_up(first_ordinal, source.packed(count - 1))


def _checked_deltas(deltas: Int64Column) -> Int64Column:
    _check(not len(deltas) or deltas.min() >= 0, "a time that falls")
    return deltas


def _sum_up(first: int, steps: Int64Column) -> Int64Column:
    numbers = np.empty(len(steps) + 1, dtype=np.int64)
    numbers[0] = first
    numbers[1:] = steps
    return np.cumsum(numbers, out=numbers)


class _Packed:
    """Numbers to be packed, and how many bytes they will take."""

    def __init__(self, numbers: Int64Column) -> None:
        self._numbers = numbers
        self._least = int(numbers.min()) if len(numbers) else 0
        self._width = (int(numbers.max()) - self._least).bit_length() if len(numbers) else 0
        self.size = _PACKED_HEAD.size + packed_bytes(len(numbers), self._width)

    def encode(self) -> bytes:
        head = _PACKED_HEAD.pack(self._width, self._least)
        if not self._width:
            return head
        return head + pack_bits((self._numbers - self._least).view(np.uint64), self._width)


class _Source:
    """Bytes that are read from left to right; raises ValueError when they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.offset = 0

    def take(self, length: int) -> bytes:
        part = self._data[self.offset : self.offset + length]
        _check(len(part) == length, "it is too short")
        self.offset += length
        return part

    def byte(self) -> int:
        return self.take(1)[0]

    def packed(self, count: int) -> Int64Column:
        width, least = _PACKED_HEAD.unpack(self.take(_PACKED_HEAD.size))
        _check(width <= _WIDTH_MAX, f"a width of {width} bits")
        _check(-ORDINAL_END <= least < ORDINAL_END, f"least value {least}")
        if not width:
            return np.full(count, least, dtype=np.int64)
        content = self.take(packed_bytes(count, width))  # bounds `count` by what is there
        numbers = unpack_bits(content, count, width).view(np.int64)
        numbers += least
        return numbers


def packed_bytes(count: int, width: int) -> int:
    """Return how many bytes `count` values of `width` bits take."""
    return count * (width // 8) + -(-count // _GROUP) * (width % 8)


def pack_bits(values: UInt64Column, width: int) -> bytes:
    """Values below 2**width, packed; see the module's description. At most 63 bits."""
    parts: list[bytes] = []
    shift = 0
    for bits, dtype in _PARTS:
        if (width - shift) >= bits:
            parts.append((values >> np.uint64(shift)).astype(dtype).tobytes())
            shift += bits
    rest = width - shift
    if rest:
        groups = np.zeros((-(-len(values) // _GROUP), _GROUP), dtype=np.uint64)
        groups.reshape(-1)[: len(values)] = values >> np.uint64(shift)
        words = groups[:, 0].copy()
        for place in range(1, _GROUP):
            words |= groups[:, place] << np.uint64(place * rest)
        parts.append(words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :rest].tobytes())
    return b"".join(parts)


def unpack_bits(content: bytes, count: int, width: int) -> UInt64Column:
    """Undo `pack_bits`; `content` has exactly `packed_bytes(count, width)` bytes."""
    values: UInt64Column | None = None
    shift = offset = 0
    for bits, dtype in _PARTS:
        if (width - shift) >= bits:
            part = np.frombuffer(content, dtype, count, offset).astype(np.uint64)
            offset += count * dtype.itemsize
            values = part if values is None else values | (part << np.uint64(shift))
            shift += bits
    rest = width - shift
    if rest:
        group_count = -(-count // _GROUP)
        padded = np.zeros((group_count, 8), dtype=np.uint8)
        padded[:, :rest] = np.frombuffer(content, np.uint8, group_count * rest, offset).reshape(-1, rest)
        # All places of all groups at once: one pass over what fits the cache instead of eight with strides.
        groups = padded.view("<u8") >> (np.arange(_GROUP, dtype=np.uint64) * np.uint64(rest))
        groups &= np.uint64((1 << rest) - 1)
        low = groups.reshape(-1)[:count]
        values = low if values is None else values | (low << np.uint64(shift))
    assert values is not None, "a width of no bits"
    return values


def _check(holds: bool | np.bool_, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
