"""The judge of a cluster's clients: each kind of broken promise is found, and what is right is not complained of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.process.cluster_history import History

SUBSCRIPTIONS = ("s",)


def answered(due_ms: int = 100) -> History:
    history = History()
    history.begins(1, due_ms)
    history.answered(1, "1:0", 0.0)
    return history


def test_what_was_answered_and_came_in_time_is_right():
    history = answered()
    history.moves(1, 50)
    history.delivered("s", 1, 60)
    history.delivered("s", 1, 160)
    history.confirmed("s", 1)
    assert not history.violations
    assert not history.missing("s")


def test_a_change_without_an_answer_may_have_happened():
    history = answered()
    history.cancels(1)
    assert not history.missing("s")
    history.not_cancelled(1)
    assert history.missing("s") == [1]


def test_what_was_never_answered_is_not_missed():
    history = History()
    history.begins(1, 100)
    assert not history.missing("s")


def delivered_early(history: History) -> None:
    history.delivered("s", 1, 99)


def delivered_before_its_new_time(history: History) -> None:
    history.moves(1, 200)
    history.moved(1, 200)
    history.delivered("s", 1, 150)


def delivered_after_its_ack(history: History) -> None:
    history.delivered("s", 1, 100)
    history.confirmed("s", 1)
    history.delivered("s", 1, 101)


def delivered_after_its_cancel(history: History) -> None:
    history.cancels(1)
    history.cancelled(1, 1.0)
    history.delivered("s", 1, 100)


def answered_with_an_id_of_another(history: History) -> None:
    history.begins(2, 0)
    history.answered(2, "1:0", 1.0)


@pytest.mark.parametrize(
    "fault",
    [
        delivered_early,
        delivered_before_its_new_time,
        delivered_after_its_ack,
        delivered_after_its_cancel,
        answered_with_an_id_of_another,
    ],
)
def test_each_broken_promise_is_found(fault: Callable[[History], None]):
    history = answered()
    fault(history)
    assert len(history.violations) == 1
    assert history.facts(SUBSCRIPTIONS)["violations"] == 1
