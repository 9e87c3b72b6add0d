"""A buffer whose bytes are read at many places at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from broker.model import Int64Column, UInt64Column

U8Column = npt.NDArray[np.uint8]

_MASKS = np.array([(1 << (8 * size)) - 1 for size in range(9)], dtype=np.uint64)
"""The first bytes of a word, by their number."""


class Octets:
    """A buffer as bytes, and as the eight bytes that begin at each place. Zeros follow its end."""

    __slots__ = ("_last", "_words", "bytes")

    def __init__(self, buffer: bytes) -> None:
        if len(buffer) < 8:
            buffer += bytes(8 - len(buffer))
        self.bytes = np.frombuffer(buffer, dtype=np.uint8)
        self._last = len(buffer) - 8
        self._words: UInt64Column = np.ndarray((self._last + 1,), np.dtype("<u8"), buffer, strides=(1,))

    def words(self, at: Int64Column) -> UInt64Column:
        """The eight bytes at each place; places do not fall, and are at most the end."""
        if not len(at) or int(at[-1]) <= self._last:
            return self._words[at]
        beyond = np.maximum(at - self._last, 0)
        # Without a padded copy of the whole buffer: the last eight bytes, with zeros moved in behind them.
        return self._words[at - beyond] >> (beyond << 3).astype(np.uint64)

    def groups(self, at: Int64Column, size: int) -> U8Column:
        """So many bytes at each place."""
        padded = np.concatenate((self.bytes, np.zeros(size, dtype=np.uint8)))
        octets: U8Column = padded[at[:, None] + np.arange(size)]
        return octets

    def words_of(
        self, starts: Int64Column, ends: Int64Column
    ) -> Iterator[tuple[npt.NDArray[np.intp] | None, UInt64Column]]:
        """The bytes from each start to its end in words of eight, one of each part after the other, zeros behind the
        last byte; and which parts have one, if it is not all of them."""
        which: npt.NDArray[np.intp] | None = None
        at, left = starts, ends - starts
        while len(left):
            least = int(left.min())
            if least <= 0:
                more = np.flatnonzero(left > 0)
                which = more if which is None else which[more]
                at, left = at[more], left[more]
                if not len(left):
                    return
                least = int(left.min())
            words = self.words(at)
            yield which, (words if least >= 8 else words & _MASKS[np.minimum(left, 8)])
            at, left = at + 8, left - 8
