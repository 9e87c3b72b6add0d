"""The hash of a schedule key, as rows and runs have it.

    state      bytes of the key * 0x9E3779B97F4A7C15; all numbers are modulo 2**64
    word       the next eight bytes of the key, little-endian, zeros behind the last one: state = mix(state ^ word)
    mix        the finish of splitmix64: x ^= x >> 30, x *= 0xBF58476D1CE4E5B9, x ^= x >> 27, x *= 0x94D049BB133111EB,
               x ^= x >> 31
    hash       the last state; 1 in the place of 0, which means none

It is on disk, so it is for life. It was chosen because it is computed over a whole batch at once: a cryptographic
hash, key by key, took a third of what it takes to store a message. Keys of one length that differ in one word never
meet, others as seldom as random numbers do. Whoever looks for keys of one hash can make them: they cost reads, as each
entry with the hash of a key has to be read before the key is known to be free, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from broker.model import KeySpans, UInt64Column
from broker.storage.octets import Octets

_FEW_KEYS = 8
"""Up to so many keys, numbers of Python cost less than the NumPy calls that many share."""

_SEED = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MODULO = (1 << 64) - 1
_NOT_ASCII = np.uint64(0x8080808080808080)


def hash_keys(keys: Collection[bytes]) -> UInt64Column:
    """The hash of each key."""
    return hash_spans(KeySpans.of(keys))


def hash_spans(keys: KeySpans) -> UInt64Column:
    """The hash of each message's key; 0 where there is none."""
    return hash_texts(keys)[0]


def hash_texts(keys: KeySpans) -> tuple[UInt64Column, bool]:
    """The hash of each message's key, 0 where there is none; and whether all keys are ASCII."""
    places = keys.places()
    if len(places) <= _FEW_KEYS:
        hashes = np.zeros(len(keys.starts), dtype=np.uint64)
        few = [keys.key(place) for place in places.tolist()]
        hashes[places] = list(map(_hash, few))
        return hashes, all(map(bytes.isascii, few))
    sizes = keys.ends - keys.starts
    states = sizes.astype(np.uint64) * np.uint64(_SEED)
    bits = np.uint64(0)
    for which, words in Octets(keys.buffer).words_of(keys.starts, keys.ends):
        bits |= np.bitwise_or.reduce(words)
        if which is None:
            states = _mix_all(states ^ words)
        else:
            states[which] = _mix_all(states[which] ^ words)
    states[(states == 0) & (sizes > 0)] = 1
    return states, not bits & _NOT_ASCII


def _hash(key: bytes) -> int:
    state = len(key) * _SEED & _MODULO
    for at in range(0, len(key), 8):
        state ^= int.from_bytes(key[at : at + 8], "little")
        state = (state ^ state >> 30) * _MIX_1 & _MODULO
        state = (state ^ state >> 27) * _MIX_2 & _MODULO
        state ^= state >> 31
    return state or 1


def _mix_all(mixed: UInt64Column) -> UInt64Column:
    """In place."""
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_MIX_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MIX_2)
    mixed ^= mixed >> np.uint64(31)
    return mixed
