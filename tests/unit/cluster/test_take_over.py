"""Decisions of the take-over protocol, one by one; what they make of each other is in tests/model."""

from __future__ import annotations

import pytest

from broker.cluster.group_head import GroupKind
from broker.cluster.take_over import (
    Answer,
    AppendStep,
    after_create,
    after_read,
    is_removable,
    is_stray,
    is_void,
    may_take_over,
    silence_ms_needed,
)


def test_only_stored_is_believed() -> None:
    assert {answer: after_create(answer) for answer in Answer} == {
        Answer.STORED: AppendStep.STORED,
        Answer.EXISTS: AppendStep.READ,
        Answer.UNKNOWN: AppendStep.CREATE,
    }


def test_what_is_read_tells_the_outcome_of_an_append() -> None:
    assert after_read(b"ours", b"ours") is AppendStep.STORED
    assert after_read(b"ours", b"another") is AppendStep.FENCED
    assert after_read(b"ours", None) is AppendStep.CREATE


@pytest.mark.parametrize("kind", GroupKind)
def test_all_below_is_removable_but_take_overs(kind: GroupKind) -> None:
    assert is_removable(kind, 6, 7) is (kind is not GroupKind.TAKE_OVER)
    assert not is_removable(kind, 7, 7)


def test_a_take_over_where_the_log_may_be_trimmed_came_too_late() -> None:
    assert [is_stray(7, trimmed_below) for trimmed_below in (6, 7, 8)] == [False, False, True]


def test_epochs_rise() -> None:
    assert [is_void(epoch, 5) for epoch in (4, 5, 6)] == [True, False, False]


def test_a_standby_waits_for_a_lease_and_a_quarter_for_each_rank() -> None:
    assert [silence_ms_needed(4000, rank) for rank in range(3)] == [4000, 5000, 6000]
    assert [silence_ms_needed(4000, rank, is_fresh=True) for rank in range(3)] == [4000, 8000, 12000]
    assert not may_take_over(7_999, 4000, 1, is_fresh=True) and may_take_over(8_000, 4000, 1, is_fresh=True)
    assert not may_take_over(3999, 4000, 0) and may_take_over(4000, 4000, 0)
    assert not may_take_over(4999, 4000, 1) and may_take_over(5000, 4000, 1)
    assert may_take_over(0, 4000, 1, resigned_to_us=True)
    assert not may_take_over(7_999, 4000, 0, rests=True) and may_take_over(8_000, 4000, 0, rests=True)
