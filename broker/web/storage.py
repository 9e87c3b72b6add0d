"""The page of what lies on disk: the ledgers and the buckets of each topic, and how much of them is still of use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain
from urllib.parse import quote, urlencode

from aiohttp import web

from broker.folder.compaction_candidates import ledger_candidate
from broker.runtime.supervise import YieldBudget
from broker.storage.ledger import Ledger
from broker.topics.topic import Topic
from broker.web.refusals import PageRefusal
from broker.web.site import Missing, Visit

_TOPICS_SHOWN = 100
_LEDGERS_PAGE = 50
_BUCKETS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A ledger."""

    ledger_id: int
    generation: int
    is_sealed: bool
    entries: int
    live: int
    disk_bytes: int
    first_publish_ms: int
    last_due_ms: int


@dataclass(frozen=True, slots=True)
class BucketRow:
    """A sealed bucket of the index."""

    bucket_id: int
    entries: int
    waiting: int
    disk_bytes: int
    segments: int
    next_ms: int | None
    last_ms: int


@dataclass(frozen=True, slots=True)
class StorageFigures:
    """Sizes of a data directory, and of its largest topics."""

    rows: Sequence[tuple[int, str, int, int, int]]
    """Bytes of messages, topic, ledgers, bytes of the index and buckets, of the largest topics."""
    more: int
    """Topics that are not listed."""
    data_bytes: int
    index_bytes: int
    journal_bytes: int
    journal_pending_bytes: int
    free_bytes: int
    reserve_bytes: int
    removed: int
    compacted: int
    reclaimed_bytes: int


async def show_storage(visit: Visit) -> web.Response:
    """GET /storage: the topics that take the most room"""
    return await page_of_storage(visit, await list_storage(visit))


async def list_storage(visit: Visit) -> StorageFigures:
    """Return the sums over all topics, and the topics that take the most room."""
    broker = visit.broker
    budget = YieldBudget(broker.clock)
    sizes: list[tuple[int, str, int, int, int]] = []
    for topic in await visit.topics("GetTopic"):
        index = topic.index.tracker.stats()
        sizes.append(
            (topic.log.data_bytes, topic.name, topic.log.ledger_count, index.disk_bytes, index.bucket_count)
        )
        await budget.spent()
    largest = nlargest(_TOPICS_SHOWN, sizes)
    journal = broker.journal.stats()
    return StorageFigures(
        rows=largest,
        more=len(sizes) - len(largest),
        data_bytes=sum(row[0] for row in sizes),
        index_bytes=sum(row[3] for row in sizes),
        journal_bytes=journal.stored_bytes,
        journal_pending_bytes=journal.pending_bytes,
        free_bytes=broker.disk_free_bytes,
        reserve_bytes=broker.config.disk_reserve_bytes,
        removed=broker.counters.removed_ledgers,
        compacted=broker.counters.compacted_ledgers,
        reclaimed_bytes=broker.counters.reclaimed_bytes,
    )


def merge_storage(parts: Sequence[StorageFigures]) -> StorageFigures:
    """Return the sums over several shards, of which there is one at least; free is what the fullest disk has."""
    rows = nlargest(_TOPICS_SHOWN, chain.from_iterable(part.rows for part in parts))
    fullest = min(parts, key=lambda part: part.free_bytes - part.reserve_bytes)
    return StorageFigures(
        rows=rows,
        more=sum(len(part.rows) + part.more for part in parts) - len(rows),
        data_bytes=sum(part.data_bytes for part in parts),
        index_bytes=sum(part.index_bytes for part in parts),
        journal_bytes=sum(part.journal_bytes for part in parts),
        journal_pending_bytes=sum(part.journal_pending_bytes for part in parts),
        free_bytes=fullest.free_bytes,
        reserve_bytes=fullest.reserve_bytes,
        removed=sum(part.removed for part in parts),
        compacted=sum(part.compacted for part in parts),
        reclaimed_bytes=sum(part.reclaimed_bytes for part in parts),
    )


async def page_of_storage(
    visit: Visit,
    sums: StorageFigures | None,
    shards: Sequence[tuple[int, StorageFigures]] = (),
    missing: Sequence[Missing] = (),
) -> web.Response:
    """`sums`: None if no shard has told. `shards`: those that have. `missing`: what is lacking."""
    rows = sums.rows if sums is not None else ()
    return await visit.page(
        "storage.html",
        rows=[(name, f"/storage/{quote(name)}", *rest, data) for data, name, *rest in rows],
        sums=sums,
        shards=shards,
        missing=missing,
    )


async def show_topic_storage(visit: Visit) -> web.Response:
    """GET /storage/{topic}?after="""
    topic = visit.topic()
    text = visit.query.get("after", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise PageRefusal("The page begins at a ledger that is none.")
    after = int(text)
    budget = YieldBudget(visit.broker.clock)
    rows: list[LedgerRow] = []
    next_link = ""
    here = f"/storage/{quote(topic.name)}"
    for ledger in list(topic.log):
        if ledger.name.ledger_id <= after:
            continue
        if len(rows) == _LEDGERS_PAGE:
            next_link = f"{here}?" + urlencode({"after": rows[-1].ledger_id})
            break
        if topic.log.find(ledger.name.ledger_id) is not None:
            rows.append(_ledger_row(topic, ledger))
        await budget.spent()
    buckets = _bucket_rows(topic)
    return await visit.page(
        "topic_storage.html",
        topic=topic.name,
        ledgers=rows,
        ledger_count=topic.log.ledger_count,
        data_bytes=topic.log.data_bytes,
        buckets=buckets[:_BUCKETS_SHOWN],
        bucket_count=len(buckets),
        index=topic.index.tracker.stats(),
        next_link=next_link,
        first_link=here if after else "",
    )


def _ledger_row(topic: Topic, ledger: Ledger) -> LedgerRow:
    facts = topic.ledgers.facts[ledger.name.ledger_id]
    candidate = ledger_candidate(topic, ledger)
    # A topic that never had a subscription keeps everything for its first one.
    settled = candidate.settled_count if topic.subscriptions.had_any else 0
    return LedgerRow(
        ledger_id=ledger.name.ledger_id,
        generation=ledger.name.generation,
        is_sealed=ledger.sealed,
        entries=ledger.entry_count,
        live=candidate.present_count - settled,
        disk_bytes=ledger.disk_bytes,
        first_publish_ms=facts.first_publish_ms,
        last_due_ms=facts.last_due_ms,
    )


def _bucket_rows(topic: Topic) -> Sequence[BucketRow]:
    upkeep = topic.index.upkeep
    if upkeep is None:
        return ()
    rows = []
    for bucket in upkeep.buckets():
        first = bucket.first_waiting_key
        rows.append(
            BucketRow(
                bucket_id=bucket.bucket_id,
                entries=bucket.metadata.count,
                waiting=bucket.waiting,
                disk_bytes=bucket.disk_bytes(),
                segments=bucket.segment_count,
                next_ms=first[0] if first is not None else None,
                last_ms=bucket.last_key[0],
            )
        )
    return rows
