"""Bloom filter over the hashes of a key run, in words of one cache line. Pure.

    filter    block ...     512 bits each, as 8 words of 64 bits
    block of  (hash >> 32) * block_count >> 32: blocks follow each other as hashes do
    bits of   one in each word: word i has the bit numbered by 6 bits of hash * 0x9E3779B97F4A7C15 (modulo 2**64),
              from bit 58 - 6 * i on

Integers are little-endian. With 32 bits a key about one of 65,000 hashes that are not there passes (the test measures
it). The usual filter needs 23 bits for that, but 16 reads all over it where this one needs a single cache line. And
as blocks are in the order of the hashes, a run of any length is written in bounded memory.

Invariants:
  FILTER-1  A hash that was added may be there: whatever the hashes are, and however many of them are the same.
  FILTER-2  Hashes are added in rising order; a block that was handed on is never changed again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from broker.model import Int64Column, UInt64Column

BITS_PER_KEY = 32
FILTER_BLOCK_BYTES = 64
FILTER_BLOCKS_MAX = 1 << 32

BoolColumn = npt.NDArray[np.bool_]

_BLOCK_BITS = FILTER_BLOCK_BYTES * 8
_WORDS = 8
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = np.arange(58, 58 - 6 * _WORDS, -6, dtype=np.uint64)
_BIT_OF_WORD = np.uint64(63)
_ONE = np.uint64(1)
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
        words = np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)
        self._words = words.reshape(-1, _WORDS)

    @property
    def memory_bytes(self) -> int:
        return self._words.nbytes

    def maybe(self, probe: Probe) -> BoolColumn:
        """For each hash whether it may have been added; False is certain (FILTER-1)."""
        places = _blocks_of(probe.halves, len(self._words))
        words = self._words.take(places, axis=0)
        words &= probe.bits
        # All eight words at once: a reduction over so short an axis costs more than all the rest.
        every: BoolColumn = ((words == probe.bits).view(np.uint64) == _ALL_TRUE).ravel()
        return every


class KeyFilterBuilder:
    """A filter in the making, for at most `count` hashes (more make it weaker, not wrong)."""

    def __init__(self, count: int) -> None:
        self.block_count = filter_blocks(count)
        self._next = 0  # the block that `_open` is, the first one not handed on
        self._open = np.zeros(_WORDS, dtype=np.uint64)

    def add(self, hashes: UInt64Column) -> bytes:
        """Take the hashes that follow, rising; returns the blocks that are complete now."""
        if not len(hashes):
            return b""
        places = _blocks_of(hashes >> _HALF, self.block_count)
        first, last = self._next, int(places[-1])
        assert int(places[0]) >= first
        words = np.zeros((last - first + 1, _WORDS), dtype="<u8")
        words[0] = self._open
        starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
        into, mixed = places[starts] - first, hashes * _FACTOR
        for word, shift in enumerate(_SHIFTS):  # a third of the price of all words at once
            bits = _ONE << ((mixed >> shift) & _BIT_OF_WORD)
            words[into, word] |= np.bitwise_or.reduceat(bits, starts)
        self._next, self._open = last, words[-1].copy()
        return words[:-1].tobytes()

    def end(self) -> bytes:
        """No hashes follow; returns the last blocks."""
        words = np.zeros((self.block_count - self._next, _WORDS), dtype="<u8")
        words[0] = self._open
        return words.tobytes()


def _bits_of(hashes: UInt64Column) -> npt.NDArray[np.uint64]:
    """Of each hash the bit in each word, a row a hash."""
    mixed = hashes * _FACTOR
    bits: npt.NDArray[np.uint64] = _ONE << ((mixed[:, None] >> _SHIFTS) & _BIT_OF_WORD)
    return bits


def _blocks_of(halves: UInt64Column, block_count: int) -> Int64Column:
    return ((halves * np.uint64(block_count)) >> _HALF).astype(np.int64)
