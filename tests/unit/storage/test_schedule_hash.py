"""The hash of schedule keys: for life, the same one by one and all at once, and well mixed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.model import KeySpans
from broker.storage import schedule_hash
from broker.storage.schedule_hash import hash_keys, hash_spans, hash_texts

# Never edit these: hashes are on disk.
FROZEN = {
    b"a": "fb761138e1e0a78c",
    b"order-17": "06ee846335e21ebd",
    b"order-000000000042": "5e6049ae6d9b5c13",
    "bestellung-ü".encode(): "8b6b7104f734bd5e",
    b"x" * 512: "5282d71da95fa289",
}

keys_of_all_lengths = st.lists(st.binary(max_size=40) | st.binary(min_size=500, max_size=520), max_size=30)


def plain(key: bytes) -> int:
    """As docs/formats.md has it."""
    state = len(key) * 0x9E3779B97F4A7C15 % 2**64
    for word in np.frombuffer(key + bytes(-len(key) % 8), dtype="<u8").tolist():
        state ^= word
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state or 1


def test_hashes_of_keys_are_for_life() -> None:
    assert {
        key: f"{value:016x}" for key, value in zip(FROZEN, hash_keys(FROZEN).tolist(), strict=True)
    } == FROZEN


@given(keys=keys_of_all_lengths, few=st.sampled_from([0, 8, 1_000]))
def test_one_by_one_and_all_at_once_they_are_the_same(keys: list[bytes], few: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_hash, "_FEW_KEYS", few)
        assert hash_keys(keys).tolist() == [plain(key) if key else 0 for key in keys]
        assert hash_texts(KeySpans.of(keys))[1] == all(map(bytes.isascii, keys))


@pytest.mark.parametrize("few", [0, 1_000])
def test_a_single_byte_beyond_ascii_is_noticed_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(schedule_hash, "_FEW_KEYS", few)
    keys = [b"k" * size for size in (20, 1, 8, 9)]
    assert hash_texts(KeySpans.of(keys))[1]
    for which, key in enumerate(keys):
        for place in range(len(key)):
            other = key[:place] + b"\x80" + key[place + 1 :]
            assert not hash_texts(KeySpans.of([*keys[:which], other, *keys[which + 1 :]]))[1]


@given(parts=st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), min_size=9, max_size=30))
def test_what_lies_around_a_key_does_not_count(parts: list[tuple[bytes, bytes]]) -> None:
    buffer = b"".join(key + other for key, other in parts)
    starts = np.cumsum([0, *(len(key) + len(other) for key, other in parts)])[:-1]
    spans = KeySpans(buffer, starts, starts + np.array([len(key) for key, _ in parts]))
    assert hash_spans(spans).tolist() == hash_keys([key for key, _ in parts]).tolist()


def test_a_hash_of_zero_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # No key is known whose hash is 0: the seed of this one is undone by its only word.
    state = 8 * 0x9E3779B97F4A7C15 % 2**64
    key = state.to_bytes(8, "little")
    for few in (0, 1_000):
        monkeypatch.setattr(schedule_hash, "_FEW_KEYS", few)
        assert hash_keys([key, b"", b"a"])[:2].tolist() == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    ["{:d}", "order-{:012d}", "{:032x}", "tenant-7/{:08d}/reminder-for-the-day-after", "{:d}" + "\0" * 9],
)
def test_keys_that_count_up_are_spread_like_random_numbers(form: str) -> None:
    hashes = hash_keys([form.format(number).encode() for number in range(100_000)])
    assert len(np.unique(hashes)) == len(hashes)
    for shift in (0, 16, 32, 48):  # a table looks at the lowest bits, a filter at the highest ones
        counts = np.bincount(((hashes >> np.uint64(shift)) & np.uint64(255)).astype(np.intp), minlength=256)
        # The sum of squared deviations has the mean 255 and the deviation 22.6.
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 255 + 8 * 22.6


@pytest.mark.parametrize("size", [1, 8, 9, 64])
def test_each_bit_of_a_key_turns_half_of_the_hash(size: int) -> None:
    rng = np.random.default_rng(5)
    key = rng.bytes(size)
    for bit in range(size * 8):
        changed = (int.from_bytes(key, "little") ^ (1 << bit)).to_bytes(size, "little")
        (before, after) = hash_keys([key, changed]).tolist()
        assert 10 <= (before ^ after).bit_count() <= 54


def test_keys_that_begin_or_end_alike_differ() -> None:
    keys = [b"\0" * size for size in range(1, 100)] + [b"a" + b"\0" * size for size in range(100)]
    hashes = sorted(hash_keys(keys).tolist())
    assert all(before < after for before, after in pairwise(hashes))
