"""Rewritten ledgers put in the place of what they were made of: what decides, and what applying the record does.

What a generation lacks must be settled by every subscription when it takes its ledger's place, and must not have been
moved since it was read: a seek back, a new subscription from the beginning, or a move of a message that nobody was sent
may have come in between, and is then in the journal before the record. Both the broker that commits and the one that
replays ask the same question (`refusal_of`), so that they agree.

From then on what is not there counts as cancelled (`Amendments.leave_out`): it has no time, what the index holds of it
is stale, and subscriptions that begin later have it settled from the start. What of it somebody cancelled stays known.
What was moved of the rest stays moved, so that its revision is known; its time in the files is the one it was moved to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np

from broker.model import members, without_entries
from broker.storage.amendments import NONE, Amendments
from broker.storage.blocks import LedgerCapture
from broker.storage.compacted import CompactedLedger, LedgersCompacted
from broker.storage.ledger import Ledger
from broker.storage.log import TopicLog
from broker.storage.sparse import absent_of
from broker.subscriptions.cursor import Cursor
from broker.subscriptions.subscription import Subscription
from broker.topics.ledger_facts import LedgerFacts


class Refusal(Enum):
    """Why a generation does not take its ledger's place."""

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


def _is_there(now: LedgerNow, each: CompactedLedger) -> Refusal | None:
    ledger = now.ledger
    if ledger is None or not ledger.sealed:
        return Refusal.GONE
    is_within = not each.present or each.present.max() < ledger.entry_count
    return None if is_within else Refusal.DAMAGED


def _is_same_generation(now: LedgerNow, each: CompactedLedger) -> Refusal | None:
    assert now.ledger is not None
    return None if now.ledger.name.generation == each.from_generation else Refusal.REPLACED


def _is_not_owed(now: LedgerNow, each: CompactedLedger) -> Refusal | None:
    assert now.ledger is not None
    if not now.had_subscription:
        return Refusal.OWED  # what is there waits for the first one
    absent = {each.ledger_id: absent_of(each.present, now.ledger.entry_count)}
    owed = any(without_entries(absent, cursor.settled_part(absent)) for cursor in now.cursors)
    return Refusal.OWED if owed else None


def _is_not_moved(now: LedgerNow, each: CompactedLedger) -> Refusal | None:
    late = now.amendments.entry_ids[now.amendments.lsns > now.amended_lsn]
    late = late[~members(late, now.amendments.cancelled)] if len(late) else late
    if not len(late):
        return None
    return None if members(late, each.present).all() else Refusal.MOVED


GUARDS: list[Guard] = [_is_there, _is_same_generation, _is_not_owed, _is_not_moved]
"""In order; the first that refuses is the reason."""


def refusal_of(now: LedgerNow, each: CompactedLedger) -> Refusal | None:
    """Why a generation may not take its ledger's place now; None if it may. Pure."""
    for guard in GUARDS:
        if (refusal := guard(now, each)) is not None:
            return refusal
    return None


class CompactedTopic(Protocol):
    """A topic, as far as its ledgers go."""

    log: TopicLog
    ledger_facts: dict[int, LedgerFacts]
    subscriptions: dict[int, Subscription]
    next_subscription_id: int


def apply_compacted(record: LedgersCompacted, topic: CompactedTopic) -> None:
    """Put the generations in place, but for those that may not take it."""
    log, facts = topic.log, topic.ledger_facts
    for each in record.ledgers:
        now = look_at(topic, each.ledger_id, record.amended_lsn)
        if refusal_of(now, each) is not None:
            continue
        assert now.ledger is not None
        log.swap(
            now.ledger.replaced_by(capture_of(now.ledger, each)),
            now.amendments.leave_out(absent_of(each.present, now.ledger.entry_count)),
        )
        facts[each.ledger_id] = facts_after(facts[each.ledger_id], each, now.amendments, record.amended_lsn)


def look_at(topic: CompactedTopic, ledger_id: int, amended_lsn: int) -> LedgerNow:
    """A ledger as it is now, for `refusal_of`."""
    return LedgerNow(
        ledger=topic.log.find(ledger_id),
        amendments=topic.log.amendments.get(ledger_id, NONE),
        cursors=tuple(subscription.cursor for subscription in topic.subscriptions.values()),
        amended_lsn=amended_lsn,
        had_subscription=topic.next_subscription_id > 1,
    )


def capture_of(ledger: Ledger, each: CompactedLedger) -> LedgerCapture:
    """What the manifest will name of a generation."""
    name = ledger.name
    return LedgerCapture(
        topic_id=name.topic_id,
        ledger_id=name.ledger_id,
        generation=each.generation,
        entry_count=ledger.entry_count,
        data_bytes=each.data_bytes,
        sealed=True,
        sparse=each.sizes,
    )


def facts_after(
    facts: LedgerFacts, each: CompactedLedger, amendments: Amendments, amended_lsn: int
) -> LedgerFacts:
    """What is remembered of a rewritten ledger."""
    # By how much a later move put off an expiry is not known here; the older fact counts it in. When the last entry was
    # ever due stays as it was: until then the index may hold stale rows of the ledger, which must not be gone before.
    if not each.last_expire_ms or np.any(amendments.lsns > amended_lsn):
        return facts
    return replace(facts, last_expire_ms=each.last_expire_ms)
