"""The take-over protocol, explored exhaustively: no order of events breaks a promise, unless a rule is off.

The world is in take_over_world.py. What is deep takes minutes and a gigabyte.
"""

from __future__ import annotations

import pytest

from broker.cluster import take_over
from broker.cluster.lease import LEASE_PART
from broker.cluster.take_over import Answer, AppendStep
from tests.depth import TODAY, deep_but
from tests.model.take_over_world import LEASE_TICKS, Bounds, Rules, begin, explore

TINY = Bounds(ticks=2, records=1, epochs=2, crashes=0)
"""Enough for nearly every rule that is off to be caught."""
SMALL = Bounds(ticks=2, records=2, epochs=2, crashes=0)
"""Enough for every one."""
CRASHES = Bounds(ticks=2, records=1, epochs=2, crashes=1)
OF_THE_DAY = [(SMALL, True, 50_000), (CRASHES, True, 37_000)][TODAY % 2]
"""A change explores the one, on the next day the other."""


def taking(taken: Answer) -> Rules:
    """Rules by which an answer means that the group is stored."""
    return Rules(
        after_create=lambda answer: AppendStep.STORED if answer is taken else take_over.after_create(answer)
    )


OFF = {
    "CLUSTER-2: exists is taken for ours": taking(Answer.EXISTS),
    "CLUSTER-2: no answer is taken for stored": taking(Answer.UNKNOWN),
    "CLUSTER-2: another group is taken for ours": Rules(
        after_read=lambda own, stored: AppendStep.CREATE if stored is None else AppendStep.STORED
    ),
    "CLUSTER-4: fences are trimmed": Rules(is_removable=lambda kind, index, below: index < below),
    "CLUSTER-5: bases are not read after a take-over was appended": Rules(
        is_stray=lambda index, below: False
    ),
    "CLUSTER-5: bases are not read after a take-over was read": Rules(
        is_read_stray=lambda index, below: False
    ),
    "CLUSTER-8: an owner decides at once": Rules(may_decide=lambda applied, taken: True),
    "CLUSTER-9: the lease counts from the answer": Rules(
        holds=lambda begin, answered, now: now - answered < LEASE_TICKS * LEASE_PART
    ),
    "CLUSTER-13: nobody waits": Rules(may_take_over=lambda silent_ms, lease_ms, rank: True),
}
TAKES_LONGER = {"CLUSTER-9: the lease counts from the answer"}
"""With one record alone nobody is told what is old."""


@pytest.mark.parametrize(
    ("bounds", "owned", "least"),
    [
        (TINY, True, 5_000),
        pytest.param(*OF_THE_DAY, marks=pytest.mark.slow, id="of the day"),
        pytest.param(SMALL, True, 50_000, marks=pytest.mark.deep),
        pytest.param(CRASHES, True, 37_000, marks=pytest.mark.deep),
        pytest.param(Bounds(ticks=2, records=1, epochs=2, crashes=2), True, 130_000, marks=pytest.mark.deep),
        pytest.param(Bounds(ticks=3, records=2, epochs=2, crashes=0), True, 250_000, marks=pytest.mark.deep),
        pytest.param(Bounds(ticks=4, records=1, epochs=2, crashes=0), False, 230_000, marks=pytest.mark.deep),
        pytest.param(
            Bounds(ticks=3, records=1, epochs=2, crashes=0, heartbeats=True),
            True,
            1_500_000,
            marks=pytest.mark.deep,
        ),
    ],
)
def test_no_order_of_events_breaks_a_promise(bounds: Bounds, owned: bool, least: int) -> None:
    explored = explore(begin(owned=owned), bounds)
    assert explored.violation == "", "\n".join(explored.way)
    assert explored.count > least, "else the world has become smaller than it was"


@pytest.mark.deep
def test_a_take_over_that_is_applied_before_the_bases_were_read_loses_what_was_answered() -> None:
    bounds = Bounds(ticks=2, records=1, epochs=2, crashes=2)
    assert explore(begin(owned=True), bounds, Rules(fences_wait=False)).violation


@pytest.mark.slow
@pytest.mark.parametrize("off", deep_but(OFF.keys() - TAKES_LONGER, OFF))
def test_with_a_rule_off_some_order_of_events_does(off: str) -> None:
    explored = explore(begin(owned=True), SMALL if off in TAKES_LONGER else TINY, OFF[off])
    assert explored.violation, f"{explored.count} states, and none is wrong"
    assert 2 <= len(explored.way) <= 20
