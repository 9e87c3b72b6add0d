"""The decision whether a rewritten ledger takes the place of what it was made of. Pure.

What a generation lacks must be settled by every subscription when it takes its ledger's place, and must not have been
moved since it was read: a seek back, a new subscription from the beginning, or a move of a message that nobody was sent
may have come in between, and is then in the journal before the record. Both the broker that commits and the one that
replays ask the same question (`refusal_of`), so that they agree. In a cluster each node has generations of its own, and
they ask what does not depend on files: nothing may be left out twice.

From then on what is not there counts as cancelled (`Amendments.leave_out`): it has no time, what the index holds of it
is stale, and subscriptions that begin later have it settled from the start. What of it somebody cancelled stays known.
What was moved of the rest stays moved, so that its revision is known; its time in the files is the one it was moved to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from broker.model import members, without_entries
from broker.storage.amendments import Amendments
from broker.storage.blocks import LedgerCapture
from broker.storage.compacted import CompactedLedger
from broker.storage.ledger import Ledger
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.sparse import absent_of
from broker.subscriptions.cursor import Cursor


class Refusal(Enum):
    """Reason for which a generation does not replace its ledger."""

    GONE = "the ledger is not there any more"
    REPLACED = "the ledger has been rewritten meanwhile"
    OWED = "something that it lacks is owed to a subscription"
    MOVED = "something that it lacks was moved meanwhile"
    DAMAGED = "its files are not what they should be"


@dataclass(frozen=True, slots=True)
class LedgerNow:
    """A ledger at the moment of the decision, and who reads it."""

    ledger: Ledger | None
    amendments: Amendments
    cursors: tuple[Cursor, ...]
    amended_lsn: int
    had_subscription: bool


Guard = Callable[[LedgerNow, CompactedLedger], Refusal | None]


def _is_there(now: LedgerNow, rewritten: CompactedLedger) -> Refusal | None:
    ledger = now.ledger
    if ledger is None or not ledger.sealed:
        return Refusal.GONE
    is_within = not rewritten.present or rewritten.present.max() < ledger.entry_count
    return None if is_within else Refusal.DAMAGED


def _is_same_generation(now: LedgerNow, rewritten: CompactedLedger) -> Refusal | None:
    assert now.ledger is not None
    return None if now.ledger.name.generation == rewritten.from_generation else Refusal.REPLACED


def _is_not_left_out(now: LedgerNow, rewritten: CompactedLedger) -> Refusal | None:
    return None if now.amendments.left_out.isdisjoint(rewritten.present) else Refusal.REPLACED


def _is_not_owed(now: LedgerNow, rewritten: CompactedLedger) -> Refusal | None:
    assert now.ledger is not None
    if not now.had_subscription:
        return Refusal.OWED  # what is there waits for the first one
    absent = {rewritten.ledger_id: absent_of(rewritten.present, now.ledger.entry_count)}
    owed = any(without_entries(absent, cursor.settled_part(absent)) for cursor in now.cursors)
    return Refusal.OWED if owed else None


def _is_not_moved(now: LedgerNow, rewritten: CompactedLedger) -> Refusal | None:
    late = now.amendments.entry_ids[now.amendments.lsns > now.amended_lsn]
    late = late[~members(late, now.amendments.cancelled)] if len(late) else late
    if not len(late):
        return None
    return None if members(late, rewritten.present).all() else Refusal.MOVED


GUARDS: list[Guard] = [_is_there, _is_same_generation, _is_not_owed, _is_not_moved]
"""In order; the first that refuses is the reason."""
GUARDS_OF_CLUSTER: list[Guard] = [_is_there, _is_not_left_out, _is_not_owed, _is_not_moved]


def refusal_of(now: LedgerNow, rewritten: CompactedLedger, *, files_follow: bool = False) -> Refusal | None:
    """Return the reason why a generation may not replace its ledger now; None if it may. Pure.

    `files_follow`: as every node of a cluster is to decide, whatever its files are.
    """
    for guard in GUARDS_OF_CLUSTER if files_follow else GUARDS:
        if (refusal := guard(now, rewritten)) is not None:
            return refusal
    return None


def capture_of(ledger: Ledger, rewritten: CompactedLedger) -> LedgerCapture:
    """Return the capture of a generation for the manifest."""
    name = ledger.name
    return LedgerCapture(
        topic_id=name.topic_id,
        ledger_id=name.ledger_id,
        generation=rewritten.generation,
        entry_count=ledger.entry_count,
        data_bytes=rewritten.data_bytes,
        sealed=True,
        sparse=rewritten.sizes,
    )


def facts_after(
    facts: LedgerFacts, rewritten: CompactedLedger, amendments: Amendments, amended_lsn: int
) -> LedgerFacts:
    """Return the facts of a rewritten ledger."""
    # By how much a later move put off an expiry is not known here; the older fact counts it in. When the last entry was
    # ever due stays as it was: until then the index may hold stale rows of the ledger, which must not be gone before.
    if not rewritten.last_expire_ms or np.any(amendments.lsns > amended_lsn):
        return facts
    return replace(facts, last_expire_ms=rewritten.last_expire_ms)
