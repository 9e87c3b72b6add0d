"""Rewritten ledgers that may not take the place of what they were made of: each reason by itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap

from broker.model import Position
from broker.storage.amendments import NONE, Amendments
from broker.storage.compacted import CompactedLedger
from broker.storage.ledger_facts import LedgerFacts
from broker.subscriptions.cursor import Cursor
from broker.topics.generations import LedgerNow, Refusal, facts_after, refusal_of

LEDGER = 7
ENTRIES = 6
PRESENT, ABSENT = BitMap([1, 3]), BitMap([0, 2, 4, 5])
READ_LSN = 100
"""Of the job's input: later changes it has not seen."""

REWRITTEN = CompactedLedger(LEDGER, 1, 2, 40, 20, PRESENT, 0)


def ledger(*, sealed: bool = True, entry_count: int = ENTRIES, generation: int = 1) -> Any:
    return SimpleNamespace(
        sealed=sealed, entry_count=entry_count, name=SimpleNamespace(generation=generation)
    )


def cursor(settled: BitMap, *, first_ledger: int = LEDGER) -> Cursor:
    return Cursor(Position(first_ledger, 0), settled={LEDGER: settled})


def moved(lsn: int, *entry_ids: int) -> Amendments:
    return NONE.move(np.array(entry_ids, np.uint32), np.full(len(entry_ids), 5_000, np.int64), lsn)


NOW = LedgerNow(
    ledger=ledger(),
    amendments=NONE,
    cursors=(cursor(ABSENT), cursor(BitMap(), first_ledger=LEDGER + 1)),
    amended_lsn=READ_LSN,
    had_subscription=True,
)

ALLOWED = {
    "done": NOW,
    "one that is there is owed to nobody either": replace(NOW, cursors=(cursor(BitMap(range(ENTRIES))),)),
    "nobody subscribes any more": replace(NOW, cursors=()),
    "what is there was moved": replace(NOW, amendments=moved(READ_LSN + 1, 1, 3)),
    "what is not there was moved before": replace(NOW, amendments=moved(READ_LSN, 0)),
    "what is not there was moved and cancelled": replace(
        NOW, amendments=moved(READ_LSN + 1, 0).cancel(BitMap([0]))
    ),
}

REFUSED = {
    "no ledger": (replace(NOW, ledger=None), Refusal.GONE),
    "one that takes entries": (replace(NOW, ledger=ledger(sealed=False)), Refusal.GONE),
    "entries that there are not": (replace(NOW, ledger=ledger(entry_count=3)), Refusal.DAMAGED),
    "one of two is owed it": (replace(NOW, cursors=(cursor(ABSENT), cursor(BitMap([0])))), Refusal.OWED),
    "a new one from the beginning is owed it": (
        replace(NOW, cursors=(cursor(ABSENT), cursor(BitMap()))),
        Refusal.OWED,
    ),
    "it waits for the first one": (replace(NOW, cursors=(), had_subscription=False), Refusal.OWED),
    "it was moved meanwhile": (replace(NOW, amendments=moved(READ_LSN + 1, 0)), Refusal.MOVED),
    "it was moved beside others": (replace(NOW, amendments=moved(READ_LSN + 1, 0, 1)), Refusal.MOVED),
}


@pytest.mark.parametrize("in_cluster", [False, True])
@pytest.mark.parametrize("now", ALLOWED.values(), ids=ALLOWED)
def test_what_lacks_nothing_that_anybody_wants_is_taken(now: LedgerNow, in_cluster: bool) -> None:
    assert refusal_of(now, REWRITTEN, files_follow=in_cluster) is None


@pytest.mark.parametrize("in_cluster", [False, True])
@pytest.mark.parametrize(("now", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_lacks_something_is_refused(now: LedgerNow, reason: Refusal, in_cluster: bool) -> None:
    assert refusal_of(now, REWRITTEN, files_follow=in_cluster) is reason


def test_a_generation_counts_where_the_files_are_those_of_one_broker() -> None:
    rewritten_since = replace(NOW, ledger=ledger(generation=2))
    assert refusal_of(rewritten_since, REWRITTEN) is Refusal.REPLACED
    assert refusal_of(rewritten_since, REWRITTEN, files_follow=True) is None


def test_nothing_is_left_out_twice_in_a_cluster() -> None:
    left_out = replace(NOW, amendments=NONE.leave_out(BitMap([0, 1])))
    assert refusal_of(left_out, REWRITTEN, files_follow=True) is Refusal.REPLACED
    apart = replace(NOW, amendments=NONE.leave_out(BitMap([0, 2])))
    assert refusal_of(apart, REWRITTEN, files_follow=True) is None


def test_an_expiry_is_that_of_what_is_left_unless_a_move_put_it_off() -> None:
    facts = LedgerFacts(1, last_due_ms=5_000, last_expire_ms=9_000, last_publish_ms=2)
    expiring = replace(REWRITTEN, last_expire_ms=7_000)
    assert facts_after(facts, expiring, NONE, READ_LSN) == replace(facts, last_expire_ms=7_000)
    assert facts_after(facts, expiring, moved(READ_LSN, 1), READ_LSN).last_expire_ms == 7_000
    assert facts_after(facts, expiring, moved(READ_LSN + 1, 1), READ_LSN) == facts
    assert facts_after(facts, REWRITTEN, NONE, READ_LSN) == facts, "something that is left never expires"
