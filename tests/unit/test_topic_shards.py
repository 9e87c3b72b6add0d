"""The shard of a topic is the same for ever: folders hang on it, and clients that find it by themselves."""

from __future__ import annotations

from collections import Counter

import pytest

from broker.errors import Unavailable
from broker.topic_shards import ALL_TOPICS, TopicShard, shard_of


@pytest.mark.parametrize(
    ("topic", "of_4096", "of_2", "of_3", "of_8"),
    [
        ("", 0, 0, 0, 0),
        ("123456789", 460, 0, 0, 0),  # the check value of crc32c: 0xe3069283
        ("orders", 3296, 1, 2, 6),
        ("invoices", 210, 0, 0, 0),
        ("topic9", 872, 0, 0, 1),
        ("a", 3616, 1, 2, 7),
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


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("endings", [[f"-{n}" for n in range(8)], [f"{n}" for n in range(16)]])
def test_names_that_differ_at_the_end_fall_as_if_at_random(endings: list[str], shards: int) -> None:
    """Of 256 families of such names, the mean of chi-square is that of a random choice: the degrees of freedom."""
    families = [[f"orders{number}{ending}" for ending in endings] for number in range(256)]
    mean = sum(chi_square(names, shards) for names in families) / len(families)
    assert 0.8 < mean / (shards - 1) < 1.2


@pytest.mark.parametrize(
    ("names", "most_of_2", "most_of_4", "most_of_8"),
    [
        ([f"orders-{n}" for n in range(8)], 6, 4, 3),
        ([f"orders-{n:02}" for n in range(32)], 22, 16, 10),
        ([f"x{n}" for n in range(16)], 11, 7, 5),
        ([f"topic-{n}" for n in range(4096)], 2_150, 1_110, 575),
    ],
)
def test_no_shard_gets_most_of_such_names(
    names: list[str], most_of_2: int, most_of_4: int, most_of_8: int
) -> None:
    counts = [max(Counter(shard_of(name, shards) for name in names).values()) for shards in (2, 4, 8)]
    assert all(count <= most for count, most in zip(counts, (most_of_2, most_of_4, most_of_8), strict=True))


def chi_square(names: list[str], shards: int) -> float:
    counts = Counter(shard_of(name, shards) for name in names)
    mean = len(names) / shards
    return sum((counts[shard] - mean) ** 2 / mean for shard in range(shards))


def test_one_shard_holds_all_and_of_several_exactly_one_holds_a_topic() -> None:
    assert ALL_TOPICS.holds("anything")
    for name in ("orders", "invoices", "a", "b~c"):
        assert [TopicShard(number, 3).holds(name) for number in range(3)].count(True) == 1


def test_a_topic_of_another_shard_is_refused_with_the_address_of_that_one() -> None:
    shards = [TopicShard(number, 3, 7651) for number in range(3)]
    for name in ("orders", "invoices", "a", "b~c"):
        number = shard_of(name, 3)
        for shard in shards:
            if shard.number == number:
                shard.check(name)
                continue
            with pytest.raises(Unavailable) as caught:
                shard.check(name)
            assert caught.value.reason == "NOT_OWNER"
            facts = caught.value.facts
            assert (facts["owner_address"], facts["shard"], facts["shards"]) == (
                f":{7651 + number}",
                number,
                3,
            )
    with pytest.raises(Unavailable) as unknown:
        TopicShard(1 - shard_of("orders", 2), 2).check("orders")
    assert unknown.value.facts["owner_address"] == ""
    ALL_TOPICS.check("anything")
