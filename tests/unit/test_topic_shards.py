"""The shard of a topic is the same for ever: folders hang on it, and clients that find it by themselves."""

from __future__ import annotations

from collections import Counter

import pytest

from broker.topic_shards import ALL_TOPICS, TopicShard, shard_of


@pytest.mark.parametrize(
    ("topic", "of_4096", "of_2", "of_3", "of_8"),
    [
        ("", 0, 0, 0, 0),
        ("123456789", 643, 0, 0, 1),  # the check value of crc32c: 0xe3069283
        ("orders", 138, 0, 0, 0),
        ("invoices", 529, 0, 0, 1),
        ("topic9", 3660, 1, 2, 7),
    ],
)
def test_names_fall_where_they_always_fell(topic: str, of_4096: int, of_2: int, of_3: int, of_8: int) -> None:
    assert [shard_of(topic, shards) for shards in (4096, 1, 2, 3, 8)] == [of_4096, 0, of_2, of_3, of_8]


def test_what_follows_the_first_tilde_does_not_count() -> None:
    for name in ("orders~billing~dead-letters", "orders~", "orders~x~6~dead-letters"):
        assert shard_of(name, 4096) == shard_of("orders", 4096)


def test_twice_as_many_shards_split_each_of_them() -> None:
    names = [f"topic-{number}" for number in range(2_000)]
    assert all(shard_of(name, 8) // 2 == shard_of(name, 4) for name in names)
    counts = Counter(shard_of(name, 4) for name in names)
    assert sorted(counts) == [0, 1, 2, 3]
    assert min(counts.values()) > 400


def test_one_shard_holds_all_and_of_several_exactly_one_holds_a_topic() -> None:
    assert ALL_TOPICS.holds("anything")
    for name in ("orders", "invoices", "a", "b~c"):
        assert [TopicShard(number, 3).holds(name) for number in range(3)].count(True) == 1
