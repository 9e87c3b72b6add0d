"""Plans of batches: times, expiry, ids, places and the ledger they go to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import InvalidRequest, OutOfRange, Refused
from broker.model import DELIVER_AT_MS_MAX, FEW_ROWS, FLAG_DELAYED, TIME_MS_MAX, Batch, DueSpan
from broker.policy import DELAYED_DISABLED, DELAYED_ENABLED, EffectiveTopicPolicy
from broker.storage.records import Produced
from broker.topics.plan import LedgerEnd, check_times, effective_times, must_roll, plan_produced

NOW = 1_000
OPEN = EffectiveTopicPolicy(
    max_delay_ms=0,
    default_ttl_ms=0,
    ledger_max_age_ms=0,
    ledger_max_bytes=(1 << 32) - 1,
    ledger_max_entries=(1 << 32) - 1,
)
END = LedgerEnd(ledger_id=4, entry_count=7, data_bytes=100, first_publish_ms=500)


@pytest.fixture(autouse=True, scope="module", params=[0, FEW_ROWS], ids=["columns", "few"])
def _few_rows(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to plan few messages."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("broker.model", "broker.topics.plan", "broker.topics.refusals"):
            patch.setattr(f"{module}.FEW_ROWS", request.param)
        yield


class Asked(NamedTuple):
    """One message, as a producer asks for it."""

    at_ms: int = 0
    after_ms: int = 0
    ttl_ms: int = 0
    length: int = 5


def batch_of(messages: Sequence[Asked]) -> Batch:
    count = len(messages)
    return Batch(
        frames=bytes(sum(each.length for each in messages)),
        lengths=np.array([each.length for each in messages], dtype=np.uint32),
        crcs=np.arange(50, 50 + count, dtype=np.uint32),
        deliver_at_ms=np.array([each.at_ms for each in messages], dtype=np.int64),
        deliver_after_ms=np.array([each.after_ms for each in messages], dtype=np.int64),
        ttl_ms=np.array([each.ttl_ms for each in messages], dtype=np.int64),
        key_hashes=np.arange(60, 60 + count, dtype=np.uint32),
        schedule_hashes=np.arange(70, 70 + count, dtype=np.uint64),
    )


def times_of(*messages: Asked, policy: EffectiveTopicPolicy = OPEN) -> list[int]:
    return [int(time) for time in effective_times(batch_of(messages), NOW, policy)]


def plan(
    *messages: Asked, policy: EffectiveTopicPolicy = OPEN, end: LedgerEnd = END, now_ms: int = NOW
) -> Produced:
    return plan_produced(batch_of(messages), 3, end, lambda: 9, now_ms, policy)


# -- times ---------------------------------------------------------------------------------------------------


def test_without_a_time_a_message_is_for_now():
    assert times_of(Asked(), Asked()) == [0, 0]


def test_a_time_that_has_passed_means_at_once():
    assert times_of(Asked(at_ms=1), Asked(at_ms=NOW), Asked(at_ms=NOW + 1)) == [0, 0, NOW + 1]


def test_a_relative_time_counts_from_the_acceptance():
    assert times_of(Asked(after_ms=1), Asked(), Asked(at_ms=NOW + 9)) == [NOW + 1, 0, NOW + 9]


def test_the_end_of_time_can_be_asked_for():
    assert (
        times_of(Asked(at_ms=DELIVER_AT_MS_MAX), Asked(after_ms=DELIVER_AT_MS_MAX - NOW))
        == [DELIVER_AT_MS_MAX] * 2
    )


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (Asked(at_ms=-1), "deliver_at_ms"),
        (Asked(at_ms=-(1 << 63)), "deliver_at_ms"),
        (Asked(after_ms=-1), "deliver_after_ms"),
        (Asked(at_ms=NOW + 5, after_ms=5), "deliver_after_ms"),
        (Asked(at_ms=1, after_ms=1), "deliver_after_ms"),
        (Asked(at_ms=DELIVER_AT_MS_MAX + 1), "deliver_at_ms"),
        (Asked(after_ms=DELIVER_AT_MS_MAX - NOW + 1), "deliver_after_ms"),
        (Asked(after_ms=(1 << 63) - 1), "deliver_after_ms"),
        (Asked(at_ms=(1 << 63) - 1), "deliver_at_ms"),
        (Asked(ttl_ms=-1), "ttl_ms"),
        (Asked(ttl_ms=TIME_MS_MAX + 1), "ttl_ms"),
    ],
)
def test_p9_a_time_that_cannot_be_kept_is_refused_by_name(wrong: Asked, name: str):
    batch = batch_of([Asked(), Asked(at_ms=NOW + 1), wrong, wrong])
    for decide in (
        lambda: check_times(batch, NOW, OPEN),
        lambda: plan_produced(batch, 3, END, lambda: 9, NOW, OPEN),
    ):
        with pytest.raises(InvalidRequest) as caught:
            decide()
        assert not isinstance(caught.value, OutOfRange)
        assert (caught.value.field, caught.value.reason) == (f"messages[2].{name}", f"INVALID_{name.upper()}")


def test_a_delay_beyond_the_topics_limit_is_out_of_range():
    policy = replace(OPEN, max_delay_ms=10)
    assert times_of(Asked(at_ms=NOW + 10), Asked(after_ms=10), policy=policy) == [NOW + 10] * 2
    for wrong, name in ((Asked(at_ms=NOW + 11), "deliver_at_ms"), (Asked(after_ms=11), "deliver_after_ms")):
        with pytest.raises(OutOfRange) as caught:
            times_of(Asked(after_ms=3), Asked(), Asked(at_ms=5), wrong, Asked(after_ms=99), policy=policy)
        assert (caught.value.field, caught.value.reason) == (f"messages[3].{name}", "DELIVER_AT_TOO_FAR")
        assert caught.value.facts == {"max_delay_ms": 10}


def test_a_refused_batch_takes_no_ledger_id():
    def unwanted() -> int:
        raise AssertionError("a ledger for a batch that is refused")

    with pytest.raises(InvalidRequest):
        plan_produced(batch_of([Asked(at_ms=-1)]), 3, LedgerEnd(0, 0, 0, 0), unwanted, NOW, OPEN)


def test_the_batch_is_left_as_it_was():
    batch = batch_of([Asked(at_ms=5), Asked(at_ms=NOW + 5, ttl_ms=3)])
    plan_produced(batch, 3, END, lambda: 9, NOW, replace(OPEN, default_ttl_ms=7))
    assert batch.deliver_at_ms.tolist() == [5, NOW + 5]
    assert batch.ttl_ms.tolist() == [0, 3]


# -- expiry --------------------------------------------------------------------------------------------------


def test_p3_a_message_expires_its_ttl_after_its_time_or_its_arrival():
    messages = [
        Asked(ttl_ms=5),
        Asked(at_ms=NOW + 50, ttl_ms=5),
        Asked(at_ms=10, ttl_ms=5),
        Asked(after_ms=50),
    ]
    assert plan(*messages).rows["expire_at_ms"].tolist() == [NOW + 5, NOW + 55, NOW + 5, 0]


def test_the_topics_ttl_is_for_messages_without_their_own():
    policy = replace(OPEN, default_ttl_ms=100)
    produced = plan(Asked(), Asked(ttl_ms=1), Asked(after_ms=50), policy=policy)
    assert produced.rows["expire_at_ms"].tolist() == [NOW + 100, NOW + 1, NOW + 150]


def test_the_greatest_time_and_the_greatest_ttl_add_up():
    produced = plan(Asked(at_ms=DELIVER_AT_MS_MAX, ttl_ms=TIME_MS_MAX))
    assert produced.rows["expire_at_ms"].tolist() == [DELIVER_AT_MS_MAX + TIME_MS_MAX]


# -- ledgers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "end", "rolls"),
    [
        ({}, LedgerEnd(0, 0, 0, 0), True),
        ({}, END, False),
        ({"ledger_max_entries": 9}, END, False),
        ({"ledger_max_entries": 8}, END, True),
        ({"ledger_max_bytes": 110}, END, False),
        ({"ledger_max_bytes": 109}, END, True),
        ({"ledger_max_age_ms": 501}, END, False),
        ({"ledger_max_age_ms": 500}, END, True),
        (
            {"ledger_max_entries": 1, "ledger_max_bytes": 1, "ledger_max_age_ms": 1},
            LedgerEnd(4, 0, 0, 0),
            False,
        ),
    ],
    ids=[
        "no ledger yet",
        "room",
        "entries fit",
        "an entry too many",
        "bytes fit",
        "a byte too many",
        "young",
        "old",
        "an empty one takes any batch",
    ],
)
def test_a_batch_goes_where_it_fits_whole(policy: dict[str, Any], end: LedgerEnd, rolls: bool):
    limits, batch = replace(OPEN, **policy), batch_of([Asked(), Asked()])
    assert must_roll(batch, end, NOW, limits) == rolls
    produced = plan_produced(batch, 3, end, lambda: 9, NOW, limits)
    first = end.data_bytes
    wanted = (9, 0, [0, 5]) if rolls else (end.ledger_id, end.entry_count, [first, first + 5])
    assert (produced.ledger_id, produced.first_entry_id, produced.rows["offset"].tolist()) == wanted


def test_a_clock_that_stepped_back_makes_no_ledger_old():
    assert not must_roll(batch_of([Asked()]), END, 1, replace(OPEN, ledger_max_age_ms=1))


def test_offsets_reach_the_end_of_32_bits():
    end = replace(END, data_bytes=(1 << 32) - 11)
    assert plan(Asked(), Asked(), end=end).rows["offset"].tolist() == [(1 << 32) - 11, (1 << 32) - 6]


# -- all of it -----------------------------------------------------------------------------------------------

asked = st.builds(
    Asked,
    at_ms=st.sampled_from([0, 0, -1, 1, NOW, NOW + 1, NOW + 20, DELIVER_AT_MS_MAX, DELIVER_AT_MS_MAX + 1]),
    after_ms=st.sampled_from([0, 0, 0, 0, -1, 1, 20, 21, DELIVER_AT_MS_MAX - NOW, DELIVER_AT_MS_MAX]),
    ttl_ms=st.sampled_from([0, 0, 1, 30, -1, TIME_MS_MAX, TIME_MS_MAX + 1]),
    length=st.integers(2, 40),
)
policies = st.builds(
    EffectiveTopicPolicy,
    max_delay_ms=st.sampled_from([0, 20, 1 << 53]),
    default_ttl_ms=st.sampled_from([0, 7]),
    ledger_max_age_ms=st.sampled_from([0, 500, 501]),
    ledger_max_bytes=st.integers(1, 300),
    ledger_max_entries=st.integers(1, 12),
)


def wrong(each: Asked, policy: EffectiveTopicPolicy) -> bool:
    """Return whether a message alone makes its batch invalid."""
    times = (each.at_ms, each.after_ms, each.ttl_ms)
    return (
        min(times) < 0
        or max(times[:2]) > DELIVER_AT_MS_MAX
        or each.ttl_ms > TIME_MS_MAX
        or each.after_ms > DELIVER_AT_MS_MAX - NOW
        or min(times[:2]) > 0
    )


def effective(each: Asked) -> int:
    time = NOW + each.after_ms if each.after_ms else each.at_ms
    return time if time > NOW else 0


@given(messages=st.lists(asked, min_size=1, max_size=6), policy=policies)
def test_a_batch_becomes_what_one_message_at_a_time_would(
    messages: list[Asked], policy: EffectiveTopicPolicy
):
    too_far = [policy.max_delay_ms and effective(each) - NOW > policy.max_delay_ms for each in messages]
    if any(wrong(each, policy) for each in messages) or any(too_far):
        with pytest.raises(InvalidRequest):
            plan(*messages, policy=policy)
        return
    produced = plan(*messages, policy=policy)
    times = [effective(each) for each in messages]
    ttls = [each.ttl_ms or policy.default_ttl_ms or 0 for each in messages]
    rows = produced.rows
    assert (produced.topic_id, produced.publish_time_ms) == (3, NOW)
    assert produced.times.tolist() == times
    assert rows["flags"].tolist() == [FLAG_DELAYED if time > 0 else 0 for time in times]
    assert rows["publish_time_ms"].tolist() == [NOW] * len(messages)
    assert rows["expire_at_ms"].tolist() == [
        max(t, NOW) + ttl if ttl else 0 for t, ttl in zip(times, ttls, strict=True)
    ]
    assert rows["length"].tolist() == [each.length for each in messages]
    assert (rows["offset"][1:] == rows["offset"][:-1] + rows["length"][:-1]).all()
    assert rows["offset"][0] == (0 if produced.ledger_id == 9 else END.data_bytes)
    assert produced.first_entry_id == (0 if produced.ledger_id == 9 else END.entry_count)
    assert rows["crc"].tolist() == list(range(50, 50 + len(messages)))
    assert rows["key_hash"].tolist() == list(range(60, 60 + len(messages)))
    assert rows["schedule_hash"].tolist() == list(range(70, 70 + len(messages)))
    assert not rows["zero"].any()
    assert len(produced.frames) == int(rows["length"].sum())


@given(times=st.lists(st.sampled_from([0, 0, 1, NOW, NOW + 1, 1 << 52]), max_size=FEW_ROWS + 2))
def test_a_span_is_that_of_the_delayed_messages(times: list[int]):
    delayed = [time for time in times if time]
    span = DueSpan.of(np.array(times, dtype=np.int64))
    assert span == (len(delayed), min(delayed, default=0), max(delayed, default=0))


# -- delayed delivery switched off -----------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [Asked(at_ms=1), Asked(after_ms=1), Asked(at_ms=NOW + 5)])
def test_a_topic_without_delays_takes_no_message_with_a_time(asked: Asked) -> None:
    disabled = replace(OPEN, delayed_delivery=DELAYED_DISABLED)
    with pytest.raises(Refused, match=r"messages\[2\]") as caught:
        plan(Asked(), Asked(ttl_ms=5), asked, policy=disabled)
    assert caught.value.reason == "DELAYED_DELIVERY_DISABLED"
    assert plan(Asked(), Asked(ttl_ms=5), policy=disabled).times.tolist() == [0, 0]
    assert plan(asked, policy=replace(OPEN, delayed_delivery=DELAYED_ENABLED))


def test_a_time_that_is_none_is_invalid_before_it_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        plan(Asked(at_ms=-1), policy=replace(OPEN, delayed_delivery=DELAYED_DISABLED))
