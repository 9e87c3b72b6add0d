"""Bloom filter over hashes of keys, in half a cache line each: of a key run, and of keys in memory. Pure.

    filter    block ...     256 bits each, as 8 words of 32 bits
    block of  (hash >> 32) * block_count >> 32: blocks follow each other as hashes do
    bits of   one in each word: word i has the bit numbered by the highest 5 bits of hash * 0x9E3779B1**(i + 1),
              modulo 2**32

Integers are little-endian. With 40 bits a key about one of 90,000 hashes that are not there passes (the test measures
it). The usual filter needs 24 bits for that, but 16 reads all over it where this one needs a single cache line. And
as blocks are in the order of the hashes, a run of any length is written in bounded memory.

Invariants:
  FILTER-1  A hash that was added may be there: whatever the hashes are, and however many of them are the same.
  FILTER-2  Hashes are added in rising order; a block that was handed on is never changed again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from broker.model import Int64Column, UInt64Column

BITS_PER_KEY = 40
FILTER_BLOCK_BYTES = 32
FILTER_BLOCKS_MAX = 1 << 32

BoolColumn = npt.NDArray[np.bool_]
_Bits = npt.NDArray[np.uint32]

_BLOCK_BITS = FILTER_BLOCK_BYTES * 8
_WORDS = 8
_FACTORS = np.array([pow(0x9E3779B1, word + 1, 1 << 32) for word in range(_WORDS)], dtype=np.uint32)
_SHIFT = np.uint32(27)
_ONE = np.uint32(1)
_HALF = np.uint64(32)
_ALL_TRUE = np.uint64(0x0101010101010101)  # eight booleans, looked at as one number


def filter_blocks(count: int) -> int:
    """Return how many blocks the filter of so many hashes has."""
    return -(-count * BITS_PER_KEY // _BLOCK_BITS)


class Probe:
    """Hashes to look up, with what every filter needs of them: worked out once for all runs."""

    def __init__(self, hashes: UInt64Column) -> None:
        self.hashes = hashes
        self.halves = hashes >> _HALF
        self.bits = _bits_of(hashes)


class KeyFilter:
    """A whole filter in memory, immutable."""

    def __init__(self, data: bytes | bytearray) -> None:
        """`data`: whole blocks, at least one."""
        words = np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)
        self._words = words.reshape(-1, _WORDS)

    @property
    def memory_bytes(self) -> int:
        return self._words.nbytes

    def maybe(self, probe: Probe) -> BoolColumn:
        """For each hash whether it may have been added; False is certain (FILTER-1)."""
        words = self._words.take(_blocks_of(probe.halves, len(self._words)), axis=0)
        words &= probe.bits
        # All eight words at once: a reduction over so short an axis costs more than all the rest.
        every: BoolColumn = ((words == probe.bits).view(np.uint64) == _ALL_TRUE).ravel()
        return every


class OpenFilter(KeyFilter):
    """A filter that takes hashes in any order, for about `capacity` of them (more make it weaker, not wrong)."""

    def __init__(self, capacity: int) -> None:
        super().__init__(bytes(max(filter_blocks(capacity), 1) * FILTER_BLOCK_BYTES))
        self._words = self._words.copy()
        self.capacity = capacity

    def add(self, probe: Probe) -> None:
        """Some thousands at a time: of many more, most would share their block with others."""
        blocks = _blocks_of(probe.halves, len(self._words))
        words = self._words.take(blocks, axis=0)
        words |= probe.bits
        self._words[blocks] = words
        # Of several hashes with one block one was written, and NumPy does not promise which: the others follow, each
        # by itself.
        others = np.flatnonzero(~self.maybe(probe))
        if len(others):
            np.bitwise_or.at(self._words, blocks[others], probe.bits[others])


class KeyFilterBuilder:
    """A filter in the making, for at most `count` hashes (more make it weaker, not wrong)."""

    def __init__(self, count: int) -> None:
        self.block_count = filter_blocks(count)
        self._next = 0  # the block that `_open` is, the first one not handed on
        self._open = np.zeros(_WORDS, dtype=np.uint32)

    def add(self, hashes: UInt64Column) -> bytes:
        """Take the hashes that follow, rising; returns the blocks that are complete now."""
        if not len(hashes):
            return b""
        places = _blocks_of(hashes >> _HALF, self.block_count)
        first, last = self._next, int(places[-1])
        assert int(places[0]) >= first
        words = np.zeros((last - first + 1, _WORDS), dtype="<u4")
        words[0] = self._open
        starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
        into, low = places[starts] - first, hashes.astype(np.uint32)
        for word, factor in enumerate(_FACTORS):  # a third of the price of all words at once
            words[into, word] |= np.bitwise_or.reduceat(_ONE << (low * factor >> _SHIFT), starts)
        self._next, self._open = last, words[-1].copy()
        return words[:-1].tobytes()

    def end(self) -> bytes:
        """No hashes follow; returns the last blocks."""
        words = np.zeros((self.block_count - self._next, _WORDS), dtype="<u4")
        words[0] = self._open
        return words.tobytes()


def _bits_of(hashes: UInt64Column) -> _Bits:
    """Of each hash the bit in each word, a row a hash."""
    bits: _Bits = hashes.astype(np.uint32)[:, None] * _FACTORS
    bits >>= _SHIFT
    return np.left_shift(_ONE, bits, out=bits)


def _blocks_of(halves: UInt64Column, block_count: int) -> Int64Column:
    places = halves * np.uint64(block_count)
    places >>= _HALF
    return places.view(np.int64)
