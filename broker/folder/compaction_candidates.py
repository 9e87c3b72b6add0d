"""Compaction candidates of a topic, as of now. Pure but for the topic's state: no await, no file."""

from __future__ import annotations

from broker.delayed.check import CursorView, settled_by_all
from broker.folder.compaction_values import BucketCandidate, LedgerCandidate
from broker.storage.amendments import NONE
from broker.storage.compaction_inputs import InputLedger
from broker.storage.ledger import Ledger
from broker.topics.topic import Topic


def eligible_ledgers(topic: Topic, now_ms: int) -> list[Ledger]:
    """The ledgers that could be rewritten, in the order of the log.

    Whole on disk, passed by the index, and not held by retention. A topic that never had a subscription has none: what
    is there waits for the first one.
    """
    if not topic.subscriptions.had_any or topic.deleted or topic.index.is_rebuilding:
        return []
    retained = _retained(topic, now_ms)
    position = topic.index.position
    return [
        ledger
        for ledger in topic.log
        if ledger.is_whole
        and position >= (ledger.name.ledger_id, ledger.entry_count)
        and ledger.name.ledger_id not in retained
    ]


def ledger_candidate(topic: Topic, ledger: Ledger) -> LedgerCandidate:
    """Return the candidate of a ledger: what a rewrite would save."""
    ledger_id, present_count = ledger.name.ledger_id, _present_count(ledger)
    gone_count = ledger.entry_count - present_count  # settled, too
    settled = settled_by_all(_cursors(topic), ledger_id, ledger.entry_count)
    return LedgerCandidate(
        ledger_id,
        ledger.name.generation,
        ledger.entry_count,
        present_count,
        max(0, len(settled) - gone_count),
        ledger.disk_bytes,
    )


def bucket_candidates(topic: Topic) -> list[BucketCandidate]:
    """The buckets of the index, in the order of the log."""
    if topic.deleted or topic.index.upkeep is None:
        return []
    return [
        BucketCandidate(bucket.bucket_id, bucket.metadata.count, bucket.waiting, bucket.disk_bytes())
        for bucket in topic.index.upkeep.buckets()
    ]


def input_ledger(topic: Topic, ledger: Ledger) -> InputLedger:
    """Return a ledger as an input of a job."""
    ledger_id = ledger.name.ledger_id
    return InputLedger(
        capture=ledger.capture(),
        new_generation=ledger.name.generation + 1,
        # A copy: it may be the cursor's own set, out of which entries go as its mark passes them.
        settled=settled_by_all(_cursors(topic), ledger_id, ledger.entry_count).copy(),
        amendments=topic.log.amendments.get(ledger_id, NONE),
    )


def _cursors(topic: Topic) -> list[CursorView]:
    cursors = [
        CursorView(subscription.cursor.mark, subscription.cursor.settled)
        for subscription in topic.subscriptions.values()
    ]
    # If no subscription is left of those that there were, nobody is owed anything.
    return cursors or [CursorView(topic.log.end, {})]


def _present_count(ledger: Ledger) -> int:
    return ledger.entry_count if ledger.sparse is None else ledger.sparse.present_count


def _retained(topic: Topic, now_ms: int) -> set[int]:
    """Ledgers that retention may hold: the youngest, as long and as many bytes as policy says."""
    retention_ms, retention_bytes = topic.policy.retention_ms, topic.policy.retention_bytes
    retained: set[int] = set()
    held_bytes = 0
    for ledger in reversed(list(topic.log)) if retention_ms or retention_bytes else ():
        ledger_id = ledger.name.ledger_id
        age_ms = now_ms - topic.ledgers.facts[ledger_id].last_publish_ms
        if retention_ms and age_ms >= retention_ms:
            continue
        if retention_bytes and held_bytes > retention_bytes:
            break
        held_bytes += ledger.data_bytes
        retained.add(ledger_id)
    return retained
