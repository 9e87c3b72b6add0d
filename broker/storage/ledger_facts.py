"""Facts of a ledger besides its length: enough to tell, without reading it, when it can go. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from broker.model import EXPIRE_MS_MAX, Int64Column, RowColumn


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """Follows from the ledger's rows; all times in milliseconds since the Unix epoch."""

    first_publish_ms: int
    last_due_ms: int = 0  # greatest time at which an entry was ever due; 0: none is DELAYED
    last_expire_ms: int = 0  # no entry expires later; 0: at least one message never expires
    last_publish_ms: int = 0

    @classmethod
    def first(cls, publish_time_ms: int, last_due_ms: int, rows: RowColumn) -> LedgerFacts:
        """The facts of a ledger that begins with a batch, whose messages are due by a time."""
        expire_at_ms = rows["expire_at_ms"]
        last_expire_ms = int(expire_at_ms.max()) if expire_at_ms.all() else 0
        return cls(publish_time_ms, last_due_ms, last_expire_ms, publish_time_ms)

    def after(self, publish_time_ms: int, last_due_ms: int, rows: RowColumn) -> LedgerFacts:
        """The facts once a batch was appended."""
        last_expire_ms = self.last_expire_ms
        if last_expire_ms:  # not all messages of most ledgers expire
            expire_at_ms = rows["expire_at_ms"]
            last_expire_ms = max(last_expire_ms, int(expire_at_ms.max())) if expire_at_ms.all() else 0
        return LedgerFacts(
            first_publish_ms=self.first_publish_ms,
            last_due_ms=max(self.last_due_ms, last_due_ms),
            last_expire_ms=last_expire_ms,
            last_publish_ms=max(self.last_publish_ms, publish_time_ms),  # the clock may step back
        )

    def moved(self, old_ms: Int64Column, new_ms: Int64Column) -> LedgerFacts:
        """The facts once entries were moved: their time to live counts from their new time."""
        later_ms = max(0, int((new_ms - old_ms).max()))
        return replace(
            self,
            last_due_ms=max(self.last_due_ms, int(new_ms.max())),
            # What moves back takes nothing off, so that moves to and fro add up: but no message expires beyond the cap.
            last_expire_ms=min(self.last_expire_ms + later_ms, EXPIRE_MS_MAX) if self.last_expire_ms else 0,
        )
