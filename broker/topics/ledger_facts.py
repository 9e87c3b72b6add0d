"""What a topic remembers of each ledger besides its length: enough to tell, without reading it, when it can go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from broker.model import EXPIRE_MS_MAX
from broker.storage.changes import Changed
from broker.storage.log import TopicLog
from broker.storage.manifest import LedgerImage
from broker.storage.records import Produced
from broker.topics.plan import LedgerEnd


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """Follows from the ledger's rows; all times in milliseconds since the Unix epoch."""

    first_publish_ms: int
    last_due_ms: int  # greatest time at which an entry was ever due; 0: none is DELAYED
    last_expire_ms: int  # no entry expires later; 0: at least one message never expires
    last_publish_ms: int

    def after(self, record: Produced) -> LedgerFacts:
        """The facts once a batch was appended."""
        expire_at_ms = record.rows["expire_at_ms"]
        keeps = self.last_expire_ms and expire_at_ms.all()
        return replace(
            self,
            last_due_ms=max(self.last_due_ms, int(record.times.max())),
            last_expire_ms=max(self.last_expire_ms, int(expire_at_ms.max())) if keeps else 0,
            last_publish_ms=max(self.last_publish_ms, record.publish_time_ms),  # the clock may step back
        )

    def moved(self, changed: Changed) -> LedgerFacts:
        """The facts once entries were moved: their time to live counts from their new time."""
        assert changed.new_ms is not None
        later_ms = max(0, int((changed.new_ms - changed.old_ms).max()))
        return replace(
            self,
            last_due_ms=max(self.last_due_ms, int(changed.new_ms.max())),
            # What moves back takes nothing off, so that moves to and fro add up: but no message expires beyond the cap.
            last_expire_ms=min(self.last_expire_ms + later_ms, EXPIRE_MS_MAX) if self.last_expire_ms else 0,
        )


def facts_of(image: LedgerImage) -> LedgerFacts:
    """The facts of a ledger that a manifest names."""
    return LedgerFacts(image.first_publish_ms, image.last_due_ms, image.last_expire_ms, image.last_publish_ms)


def first_facts(record: Produced) -> LedgerFacts:
    """The facts of a ledger that begins with a batch."""
    expire_at_ms = record.rows["expire_at_ms"]
    return LedgerFacts(
        record.publish_time_ms,
        int(record.times.max()),
        int(expire_at_ms.max()) if expire_at_ms.all() else 0,
        record.publish_time_ms,
    )


def log_end(log: TopicLog, facts: Mapping[int, LedgerFacts]) -> LedgerEnd:
    """Return where the log ends, and how full its last ledger is."""
    last = log.last
    if last is None or last.sealed:
        return LedgerEnd(*log.end, 0, 0, is_sealed=True)
    ledger_id = last.name.ledger_id
    return LedgerEnd(ledger_id, last.entry_count, last.data_bytes, facts[ledger_id].first_publish_ms)
