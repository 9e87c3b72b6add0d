"""Knowledge of a subscription about messages that a request names: which it was sent, may have been sent, or never was.

After a restart, and once a lease has ended, nobody knows exactly: hand-outs are not recorded.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from broker.errors import NotFound
from broker.model import (
    Entries,
    Position,
    bitmap_of,
    ids_of,
    merge_entries,
    without_entries,
)
from broker.subscriptions.cursor import entries_between
from broker.subscriptions.entry_states import NOT_UNSENT
from broker.subscriptions.failures import Failure, failures_of

if TYPE_CHECKING:
    from broker.subscriptions.subscription import Subscription


def known(subscription: Subscription, entries: Entries) -> Entries:
    """The part of a set of which it is certain that it was sent here."""
    sent = subscription.states.among(entries, *NOT_UNSENT)
    merge_entries(sent, subscription.cursor.settled_part(_stored(subscription, entries)))
    return sent


def _stored(subscription: Subscription, entries: Entries) -> Entries:
    """The part of a set that the log has, from the start of this subscription on."""
    stored: Entries = {}
    for ledger_id, bitmap in entries.items():
        count = subscription.log.entry_count(ledger_id)
        if count is not None:
            end = Position(ledger_id, count)
            stored |= entries_between({ledger_id: bitmap}, subscription.image.start, end)
    return stored


async def plausible(subscription: Subscription, entries: Entries) -> Entries:
    """The part of a set that exists, lies after the start, and is due if this subscription honours delays."""
    found: Entries = {}
    for ledger_id, existing in _stored(subscription, entries).items():
        due = existing
        if subscription.honors_delay:
            ids = ids_of(existing)
            with contextlib.suppress(NotFound):  # dropped meanwhile, and therefore settled
                times = await subscription.log.times_of(ledger_id, ids)
                due = bitmap_of(ids[times <= subscription.clock.now_ms()])
        if due:
            found[ledger_id] = due
    return found


def not_held(subscription: Subscription, entries: Entries) -> list[Failure]:
    if not entries:
        return []
    entries, gone, failures = there(subscription, entries)
    lost = known(subscription, entries)
    failures += failures_of(lost, "LEASE_LOST") + failures_of(gone, "LEASE_LOST")
    return failures + failures_of(without_entries(entries, lost), "NOT_FOUND")


def there(subscription: Subscription, entries: Entries) -> tuple[Entries, Entries, list[Failure]]:
    """The part of a set in ledgers that there are, the part in dropped ones, and failures of the rest.

    Of a dropped ledger all was settled: to acknowledge it again is right, and does nothing.
    """
    stored = {i: bitmap for i, bitmap in entries.items() if subscription.log.entry_count(i) is not None}
    if len(stored) == len(entries):
        return entries, {}, []
    others = {i: bitmap for i, bitmap in entries.items() if i not in stored}
    gone = {i: bitmap for i, bitmap in others.items() if subscription.log.was_dropped(i)}
    gone = entries_between(gone, subscription.image.start, subscription.log.end)
    return stored, gone, failures_of(without_entries(others, gone), "NOT_FOUND")
