"""Brokers in which one clause of what a cancel or a move needs is switched off; the model must notice each of them.

That the last look uses times of now, and that what is on its way is held back, tests of single races see
(`tests/unit/topics/test_change_races.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.index_feed import IndexFeed
from broker.delayed.memory_tracker import MemoryTracker
from broker.storage.amendments import Amendments
from broker.storage.ledger_facts import LedgerFacts
from broker.subscriptions.subscription import Subscription
from broker.topics import changing, topic, topic_subscriptions
from broker.topics.keyed_intake import KeyedIntake

Mutant = Callable[[pytest.MonkeyPatch], None]


def mutant_forgets_moves_over_a_restart(patch: pytest.MonkeyPatch) -> None:
    """The buckets are taken up as they were written."""
    patch.setattr(IndexFeed, "_add_moved_since", lambda self, lsn: None)


def mutant_new_subscriptions_are_owed_what_was_cancelled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topic_subscriptions, "settle_cancelled", lambda log, subscription: None)


def mutant_nothing_was_ever_sent(patch: pytest.MonkeyPatch) -> None:
    """Skip the question whether a subscription was sent a message."""
    patch.setattr(changing, "_was_sent", lambda _, __, entry_ids, ___: np.zeros(len(entry_ids), dtype=bool))


def mutant_knows_what_was_sent_before_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Subscription, "note_unknown_through", lambda self, unknown_through_ms: None)


def mutant_counts_stale_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BucketTracker, "remove", lambda *_: None)
    patch.setattr(MemoryTracker, "remove", lambda *_: None)


def mutant_moves_are_not_indexed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IndexFeed, "add_moved", lambda self: False)


def mutant_moves_to_any_time(patch: pytest.MonkeyPatch) -> None:
    """Also to one that the index is past."""
    patch.setattr(changing.Changing, "_frontier_ms", property(lambda self: self._topic.frontier_ms - 3_000))


def mutant_cancels_nothing_of_what_it_replaces(patch: pytest.MonkeyPatch) -> None:
    submit = topic.Topic.submit
    patch.setattr(topic.Topic, "submit", lambda self, batch, replacing=None: submit(self, batch, None))


def mutant_does_not_look_for_holders_of_keys(patch: pytest.MonkeyPatch) -> None:
    async def nobody(self: KeyedIntake, *_: Any) -> None:
        return None

    patch.setattr(KeyedIntake, "_look", nobody)


def mutant_a_cancelled_message_is_moved_again(patch: pytest.MonkeyPatch) -> None:
    """Cancels last until the next move."""
    move = Amendments.move

    def move_and_forget(self: Amendments, entry_ids: Any, *arguments: Any) -> Amendments:
        moved = move(self, entry_ids, *arguments)
        moved.cancelled.clear()
        return moved

    patch.setattr(Amendments, "move", move_and_forget)


def mutant_a_ledger_does_not_wait_for_moved_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerFacts, "moved", lambda self, *_: self)


def mutant_a_moved_message_expires_as_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("broker.storage.log.with_expiry_moved", lambda rows, times, effective: rows)


MUTANTS: dict[str, Mutant] = {
    name.removeprefix("mutant_"): function
    for name, function in list(globals().items())
    if name.startswith("mutant_")
}
