"""The limits of the access file: what they mean, and what is wrong with them."""

from __future__ import annotations

import pytest

from broker.rpc.access_grants import parse_grants
from broker.rpc.access_limits import LIMITS_MAX, parse_limits
from broker.rpc.access_rules import Ask, Right
from broker.settings import ConfigError

GRANT = '[[grant]]\nprincipals = ["token:a"]\ntopics = ["t"]\nrights = ["produce"]\n'
LIMITS = parse_limits(
    """
    [[limit]]
    name = "shops"
    principals = ["jwt:shop-*", "token:shop"]
    topics = ["orders", "orders-*"]
    messages_per_second = 1_000
    bytes_per_second = "10MiB"
    burst_ms = "100ms"

    [[limit]]
    name = "everybody"
    principals = ["*"]
    messages_per_second = 5

    [[limit]]
    name = "orders"
    topics = ["orders*"]
    pending_messages = 100
    pending_bytes = "1KiB"
    topics_max = 3
    """
)


@pytest.mark.parametrize(
    ("principal", "topic", "names"),
    [
        ("jwt:shop-1", "orders", ["shops", "everybody", "orders"]),
        ("token:shop", "orders-eu", ["shops", "everybody", "orders"]),
        ("token:shop", "orders2", ["everybody", "orders"]),
        ("token:shop-1", "orders", ["everybody", "orders"]),
        ("cert:x", "payroll", ["everybody"]),
        ("token:shop", "x.orders", ["everybody"]),
    ],
)
def test_all_limits_that_match_hold_in_the_order_of_the_file(
    principal: str, topic: str, names: list[str]
) -> None:
    assert [limit.name for limit in LIMITS.of(principal, topic)] == names


def test_sizes_and_durations_have_units_and_a_burst_is_a_second_s_worth_by_default() -> None:
    shops, everybody, orders = LIMITS.every
    assert (shops.bytes_per_second, shops.burst(1_000), shops.burst(shops.bytes_per_second)) == (
        10 << 20,
        100,
        (10 << 20) // 10,
    )
    assert (everybody.burst(5), everybody.has_totals, orders.has_rates) == (5, False, False)
    assert (orders.pending_bytes, orders.topics_max) == (1_024, 3)
    assert (
        parse_limits('[[limit]]\nname = "x"\nmessages_per_second = 1\nburst_ms = 1\n').every[0].burst(1) == 1
    )


def test_grants_and_limits_stand_in_one_file() -> None:
    text = GRANT + '[[limit]]\nname = "x"\nmessages_per_second = 1\n'
    assert parse_grants(text).allow("token:a", Ask(frozenset({Right.PRODUCE}), "t"))
    assert [limit.name for limit in parse_limits(text).every] == ["x"]
    assert parse_limits(GRANT).of("token:a", "t") == ()


X = '[[limit]]\nname = "x"\n'
WRONG: list[tuple[str, str]] = [
    ("[limit]\n", "limit must be written [[limit]]"),
    ("[[limits]]\n", "unknown table or key 'limits'; expected only [[grant]] and [[limit]]"),
    ("[[limit]]\nmessages_per_second = 1\n", "limit 1: name must be"),
    ('[[limit]]\nname = "x y"\nmessages_per_second = 1\n', "limit 1: name must be"),
    ('[[limit]]\nname = ""\nmessages_per_second = 1\n', "limit 1: name must be"),
    (f'[[limit]]\nname = "{"x" * 65}"\nmessages_per_second = 1\n', "limit 1: name must be"),
    (X, "limit 1: it limits nothing; set one of messages_per_second, bytes_per_second, pending_messages"),
    (X + "burst_ms = 1\n", "limit 1: it limits nothing"),
    (X + "topics_max = 1\nburst_ms = 1\n", "limit 1: burst_ms is for rates"),
    (X + "messages_per_minute = 1\n", "limit 1: unknown key 'messages_per_minute'"),
    (X + "messages_per_second = 0\n", "limit 1: messages_per_second must be from 1 to 1000000000, but is 0"),
    (
        X + "messages_per_second = 0.5\n",
        "limit 1: messages_per_second cannot be 0.5: expected a whole number",
    ),
    (X + 'bytes_per_second = "1 furlong"\n', "limit 1: bytes_per_second cannot be"),
    (X + 'topics = "orders"\ntopics_max = 1\n', "limit 1: topics must be a list of strings"),
    (X + 'principals = ["shop"]\nmessages_per_second = 1\n', "limit 1: invalid principal 'shop'"),
    (X + 'principals = ["token:a"]\ntopics_max = 1\n', "limit 1: topics_max cannot be limited by principal"),
    (
        X + 'principals = ["*"]\nmessages_per_second = 1\npending_bytes = 1\n',
        "limit 1: pending_bytes cannot be limited by principal",
    ),
    ((X + "topics_max = 1\n") * 2, "two limits have the name 'x'"),
    (
        "".join(f'[[limit]]\nname = "x{n}"\ntopics_max = 1\n' for n in range(LIMITS_MAX + 1)),
        "there are 1001 limits, more than 1000",
    ),
]


@pytest.mark.parametrize(("text", "told"), WRONG, ids=[told[:40] for _, told in WRONG])
def test_wrong_limits_are_refused_with_a_reason(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_limits(text)
    assert told in str(caught.value)
