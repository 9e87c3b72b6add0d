"""Handling of entries that a subscription is owed and that cannot be read.

- *Damaged*: the message is not what was written; its row is. It is set aside for good, by a record: as a dead letter
  without a payload if the subscription has dead letters, else settled.
- *Unreadable*: not even the row is whole, so that nothing is known of the entry, its time included. It stays owed and
  is tried again now and then: a file that is put back in its place, or a disk that recovers, brings it.
"""

from __future__ import annotations

import contextlib

from broker.errors import Corrupt, Unavailable
from broker.model import Array, UInt32Column, bitmap_of, count_entries
from broker.observe.logs import get_logger
from broker.runtime.supervise import forget_result
from broker.storage.records import SettleReason
from broker.storage.salvage import Salvaged
from broker.subscriptions.entry_states import HELD
from broker.subscriptions.giving_up import DAMAGED
from broker.subscriptions.subscription import Subscription

log = get_logger(__name__)

_AGAIN_MS_MIN = 1_000
"""The policy's longest wait may be none at all: what cannot be read would be read for ever then, and nothing else."""


def meet_damage(
    subscription: Subscription, ledger_id: int, entry_ids: UInt32Column, salvaged: Salvaged
) -> None:
    """Deal with what could not be read of entries that were taken to be sent. One step, without await."""
    # Others may have settled some while it was read.
    refused = subscription.not_to_send(ledger_id, entry_ids, HELD)
    damaged, unreadable = entry_ids[salvaged.damaged & ~refused], entry_ids[salvaged.unreadable & ~refused]
    if len(damaged):
        _set_aside(subscription, ledger_id, damaged, salvaged.cause)
    if len(unreadable):
        _put_off(subscription, ledger_id, unreadable, salvaged.cause)


async def read_on(subscription: Subscription) -> None:
    """`Reader.fill`, which cannot choose among entries without their times: they are looked at one by one then."""
    reader = subscription.reader
    try:
        await reader.fill()
    except Corrupt:
        ledger_id, ids = reader.step_over()
        refused: Array = subscription.settled_or_in(ledger_id, ids)
        if len(rest := ids[~refused]):
            subscription.states.put_back(0, {ledger_id: bitmap_of(rest)})


def _set_aside(subscription: Subscription, ledger_id: int, ids: UInt32Column, cause: Corrupt | None) -> None:
    policy = subscription.policy
    has_dead_letters = bool(policy.max_delivery_attempts or policy.dead_letter_topic)
    log.error(
        "Damaged messages were moved to the dead letters, or settled where there are none",
        subscription=subscription.name,
        topic_id=subscription.topic_id,
        ledger_id=ledger_id,
        entry_id=int(ids[0]),
        messages=len(ids),
        as_dead_letters=has_dead_letters,
        error=cause,
    )
    entries = {ledger_id: bitmap_of(ids)}
    with contextlib.suppress(Unavailable):  # the broker writes no more: they are met again after the restart
        if has_dead_letters:
            forget_result(subscription.decisions.give_up(entries, DAMAGED))
            subscription.counters.damaged_messages += count_entries(entries)
        else:
            forget_result(subscription.decisions.settle(entries, SettleReason.DAMAGED))


def _put_off(subscription: Subscription, ledger_id: int, ids: UInt32Column, cause: Corrupt | None) -> None:
    wait_ms = max(subscription.policy.max_backoff_ms, _AGAIN_MS_MIN)
    again_ms = subscription.clock.now_ms() + wait_ms
    log.error(
        "Messages cannot be read; they stay pending and are retried",
        subscription=subscription.name,
        topic_id=subscription.topic_id,
        ledger_id=ledger_id,
        entry_id=int(ids[0]),
        messages=len(ids),
        error=cause,
    )
    subscription.counters.unreadable_messages += len(ids)
    subscription.states.put_back(again_ms, {ledger_id: bitmap_of(ids)})
