"""Requests of consumers about messages that they name: acknowledge them, give them back, hold them longer.

Hand-outs are not recorded. After a restart, and once a lease has ended, nobody knows exactly who was sent what, so a
request is answered by what is certain: which entries were sent, which may have been, and which never were.
"""

from __future__ import annotations

import contextlib
from array import array
from typing import NamedTuple

import numpy as np

from broker.errors import NotFound
from broker.model import (
    Entries,
    Position,
    UInt64Column,
    bitmap_of,
    count_entries,
    ids_of,
    merge_entries,
    without_entries,
)
from broker.storage.records import SettleReason
from broker.subscriptions.cursor import entries_between
from broker.subscriptions.entry_states import IN_COLUMNS
from broker.subscriptions.leases import lease_end_ns
from broker.subscriptions.subscription import Subscription


class FailedIds(NamedTuple):
    """Ids of a request that are refused, in aligned columns: `reason` is NOT_FOUND or LEASE_LOST.

    Anybody may name ten thousand ids that do not exist: an object for each of them, or for each of their ledgers, would
    cost far more than the rest of the request.
    """

    ledger_ids: UInt64Column
    entry_ids: UInt64Column
    reason: str


class Confirmation(NamedTuple):
    """The answer to a request, once what it asks for is durable."""

    failures: list[FailedIds]
    is_recorded: bool
    """A record of this request names each id; else the answer tells of what was so before it, too."""


async def acknowledge(subscription: Subscription, entries: Entries) -> Confirmation:
    """Settle entries; returns when that is durable. Failures name what can not have been sent here."""
    asked_count = count_entries(entries)
    entries, _, failures = _stored_or_dropped(subscription, entries)
    unknown = without_entries(entries, _sent(subscription, entries))
    if unknown:
        # Not out now, but perhaps before a restart or before its lease ended. Only what cannot have been sent
        # is refused: an acknowledgement that is lost would bring the message back.
        refused = without_entries(unknown, await _perhaps_sent(subscription, unknown))
        failures += failed_ids(refused, "NOT_FOUND")
        entries = without_entries(entries, refused)
    fresh = without_entries(entries, subscription.cursor.settled_part(entries))
    if fresh:
        await subscription.decisions.settle(fresh, SettleReason.ACKED)
    return Confirmation(failures, is_recorded=bool(fresh) and count_entries(fresh) == asked_count)


async def give_back(
    subscription: Subscription,
    consumer_id: str,
    entries: Entries,
    redeliver_after_ms: int,
    *,
    dead_letter: bool = False,
    reason: str = "",
    release: bool = False,
) -> Confirmation:
    """Give back entries that this consumer holds; returns when that is durable.

    With `dead_letter` they are given up, for this reason; so is what was delivered as often as it may be.
    With `release` they go out again at once, and this delivery does not count.
    """
    decisions = subscription.decisions
    if dead_letter:
        decisions.check_dead_letters()
    held = subscription.states.leases.held_by(consumer_id, entries)
    failures = _not_held(subscription, without_entries(entries, held))
    told: Entries = {}  # of dead letters a line of their own tells
    if release:
        waits = decisions.release(consumer_id, held)
    elif dead_letter:
        waits = decisions.reject(consumer_id, held, reason)
    else:
        waits, told = decisions.nack(consumer_id, held, redeliver_after_ms, reason)
    for done in waits:
        await done
    if told and reason:
        subscription.logs.nacked.note(told, reason=reason)
    return Confirmation(failures, is_recorded=bool(held) and not failures)


def extend(subscription: Subscription, consumer_id: str, entries: Entries, lease_ms: int) -> list[FailedIds]:
    """Hold entries longer. Leases are not durable, so there is nothing to wait for."""
    held = subscription.states.leases.held_by(consumer_id, entries)
    if held:
        subscription.states.leases.extend(held, lease_end_ns(subscription.clock.monotonic_ns(), lease_ms))
        subscription.work.set()
    return _not_held(subscription, without_entries(entries, held))


def _sent(subscription: Subscription, entries: Entries) -> Entries:
    """The part of a set of which it is certain that it was sent here."""
    sent = subscription.states.among(entries, *IN_COLUMNS)
    merge_entries(sent, subscription.cursor.settled_part(_stored(subscription, entries)))
    return sent


async def _perhaps_sent(subscription: Subscription, entries: Entries) -> Entries:
    """The part of a set that exists, lies after the start, and is due if this subscription honours delays."""
    perhaps: Entries = {}
    for ledger_id, existing in _stored(subscription, entries).items():
        due = existing
        if subscription.honors_delay:
            ids = ids_of(existing)
            with contextlib.suppress(NotFound):  # dropped meanwhile, and therefore settled
                times = await subscription.log.times_of(ledger_id, ids)
                due = bitmap_of(ids[times <= subscription.clock.now_ms()])
        if due:
            perhaps[ledger_id] = due
    return perhaps


def _stored(subscription: Subscription, entries: Entries) -> Entries:
    """The part of a set that the log has, from the start of this subscription on."""
    stored: Entries = {}
    for ledger_id, bitmap in entries.items():
        count = subscription.log.entry_count(ledger_id)
        if count is not None:
            end = Position(ledger_id, count)
            stored |= entries_between({ledger_id: bitmap}, subscription.image.start, end)
    return stored


def _not_held(subscription: Subscription, entries: Entries) -> list[FailedIds]:
    if not entries:
        return []
    entries, dropped, failures = _stored_or_dropped(subscription, entries)
    sent = _sent(subscription, entries)
    failures += failed_ids(sent, "LEASE_LOST") + failed_ids(dropped, "LEASE_LOST")
    return failures + failed_ids(without_entries(entries, sent), "NOT_FOUND")


def _stored_or_dropped(
    subscription: Subscription, entries: Entries
) -> tuple[Entries, Entries, list[FailedIds]]:
    """The part of a set in ledgers that there are, the part in dropped ones, and failures of the rest.

    Of a dropped ledger all was settled: to acknowledge it again is right, and does nothing.
    """
    stored = {i: bitmap for i, bitmap in entries.items() if subscription.log.entry_count(i) is not None}
    if len(stored) == len(entries):
        return entries, {}, []
    others = {i: bitmap for i, bitmap in entries.items() if i not in stored}
    dropped = {i: bitmap for i, bitmap in others.items() if subscription.log.was_dropped(i)}
    dropped = entries_between(dropped, subscription.image.start, subscription.log.end)
    return stored, dropped, failed_ids(without_entries(others, dropped), "NOT_FOUND")


def failed_ids(entries: Entries, reason: str) -> list[FailedIds]:
    """Return failures of all entries of a set, in order; none for none."""
    if not entries:
        return []
    ledger_ids = sorted(entries)
    bitmaps = [entries[ledger_id] for ledger_id in ledger_ids]
    ids = array("I")
    for bitmap in bitmaps:
        ids += bitmap.to_array()
    ledgers = np.repeat(np.array(ledger_ids, np.uint64), list(map(len, bitmaps)))
    return [FailedIds(ledgers, np.array(ids, np.uint64), reason)]
