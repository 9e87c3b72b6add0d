"""Brokers with one clause of the delivery rule switched off; the model must notice each of them.

The first four are those of architecture.md, section 6, that can be switched off today; the index is not on disk
yet, so that its sealed position and `frontier_ms` decide nothing, and nothing can be moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.index_feed import IndexFeed
from broker.delayed.index_pump import IndexPump
from broker.model import Array
from broker.runtime.clock import Clock
from broker.storage.log import UndelayedRuns
from broker.subscriptions.attempts import Attempts
from broker.subscriptions.cursor import Cursor
from broker.subscriptions.dispatcher import Dispatcher
from broker.subscriptions.entry_states import IN_COLUMNS
from broker.subscriptions.handout import HandOut
from broker.subscriptions.redelivery import RedeliveryQueue
from broker.subscriptions.replay import ReplayQueue
from broker.subscriptions.subscription import Subscription
from broker.topics import plan
from broker.topics.counts import Hidden

Mutant = Callable[[pytest.MonkeyPatch], None]


@contextmanager
def swapped(owner: object, name: str, value: object) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def mutant_skips_due_rows(patch: pytest.MonkeyPatch) -> None:
    """The index feed leaves out rows that are due when it passes them."""
    add, index = BucketTracker.add, IndexFeed.index_rows
    now_ms = 0

    async def index_rows(self: IndexFeed) -> None:
        nonlocal now_ms
        now_ms = self._clock.now_ms()
        await index(self)

    def add_later_ones(self: BucketTracker, ledger_id: int, entry_ids: Any, deliver_at_ms: Any) -> None:
        later = deliver_at_ms > now_ms
        add(self, ledger_id, entry_ids[later], deliver_at_ms[later])

    patch.setattr(IndexFeed, "index_rows", index_rows)
    patch.setattr(BucketTracker, "add", add_later_ones)


def mutant_rebuilds_after_live_frontier(patch: pytest.MonkeyPatch) -> None:
    """A rebuild leaves out what lies before the frontier as it is now, not as it was when the rebuild began."""
    after = IndexFeed._after_rebuild_frontier

    def after_live_frontier(self: IndexFeed, *arguments: Any) -> Array:
        self._rebuild_frontier = self._tracker.frontier
        return after(self, *arguments)

    patch.setattr(IndexFeed, "_after_rebuild_frontier", after_live_frontier)


def mutant_does_not_look_at_leases(patch: pytest.MonkeyPatch) -> None:
    """The last look asks only what is settled, not who holds it or waits for it."""
    look = Subscription.not_to_send

    def look_at_settled(self: Subscription, ledger_id: int, entry_ids: Any, states: Any = ()) -> Any:
        return look(self, ledger_id, entry_ids, ())

    patch.setattr(Subscription, "not_to_send", look_at_settled)


def mutant_does_not_look_at_settled(patch: pytest.MonkeyPatch) -> None:
    look = Subscription.not_to_send

    def look_elsewhere(self: Subscription, ledger_id: int, entry_ids: Any, states: Any = IN_COLUMNS) -> Any:
        with swapped(self.states, "cursor", Cursor(self.cursor.start)):
            return look(self, ledger_id, entry_ids, states)

    patch.setattr(Subscription, "not_to_send", look_elsewhere)


def mutant_drops_what_is_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOut, "_wait_for_time", lambda *_: None)


def mutant_is_early_by_a_millisecond(patch: pytest.MonkeyPatch) -> None:
    """Index and dispatcher take it for one millisecond later than it is."""

    class FastClock:
        def __init__(self, clock: Clock) -> None:
            self._clock = clock

        def now_ms(self) -> int:
            return self._clock.now_ms() + 1

        def monotonic_ns(self) -> int:
            return self._clock.monotonic_ns()

    for kind in (IndexPump, Dispatcher):
        patch.setattr(kind, "__init__", with_clock(kind.__init__, FastClock))


def with_clock(init: Callable[..., None], wrap: Callable[[Clock], Clock]) -> Callable[..., None]:
    return lambda self, *arguments, clock, **options: init(self, *arguments, clock=wrap(clock), **options)


def mutant_trusts_the_index_for_the_time(patch: pytest.MonkeyPatch) -> None:
    """No last look at the time: what a source yields is taken for due."""
    look = HandOut.last_look
    patch.setattr(HandOut, "last_look", lambda self, taken, read, _: look(self, taken, read, 1 << 60))


def mutant_catches_up_to_nothing(patch: pytest.MonkeyPatch) -> None:
    """A consumer that attaches does not look for what came due while nobody was there."""
    begin = Subscription.begin_catchup
    patch.setattr(Subscription, "begin_catchup", lambda self, _: begin(self, 0))


def mutant_forgets_an_overflow(patch: pytest.MonkeyPatch) -> None:
    push = ReplayQueue.push
    patch.setattr(ReplayQueue, "push", lambda self, chunk: push(self, chunk) or True)


def mutant_keeps_what_a_lost_consumer_held(patch: pytest.MonkeyPatch) -> None:
    detach = Subscription.detach

    def detach_keeping(self: Subscription, consumer: Any, *, keep_leases: bool = False) -> None:
        detach(self, consumer, keep_leases=True)

    patch.setattr(Subscription, "detach", detach_keeping)


def mutant_cursor_passes_a_gap(patch: pytest.MonkeyPatch) -> None:
    advance = Cursor._advance

    def advance_too_far(self: Cursor, spans: Any) -> None:
        if settled := self.settled.get(self.mark.ledger_id):
            settled.add(max(settled) - 1 if max(settled) else 0)
        advance(self, spans)

    patch.setattr(Cursor, "_advance", advance_too_far)


def mutant_hurries_retries_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    def queue_all_at_once(self: RedeliveryQueue) -> None:
        self.clear()
        self._owed.all_wait()
        owed = {ledger_id: bitmap.copy() for ledger_id, bitmap in self._owed.waits.items()}
        self.clear()
        self.push(0, owed)

    patch.setattr(RedeliveryQueue, "queue_owed", queue_all_at_once)


def mutant_forgets_attempts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Attempts, "add", lambda *_: None)


def mutant_nack_comes_back_at_once(patch: pytest.MonkeyPatch) -> None:
    apply = Subscription.apply_given_back
    patch.setattr(
        Subscription, "apply_given_back", lambda self, record: apply(self, replace(record, not_before_ms=0))
    )


def mutant_wakes_nobody_for_undelayed_messages(patch: pytest.MonkeyPatch) -> None:
    """Does not note where undelayed messages lie, so that the reader steps over them."""
    patch.setattr(UndelayedRuns, "append", lambda *_: None)


def mutant_expires_before_the_time(patch: pytest.MonkeyPatch) -> None:
    """A time to live that counts from when the message was accepted."""
    patch.setattr(
        plan, "_expiry", lambda batch, _, now_ms, __: np.where(batch.ttl_ms, now_ms + batch.ttl_ms, 0)
    )


def mutant_checkpoints_forget_a_cursor(patch: pytest.MonkeyPatch) -> None:
    settle = Subscription.apply_settled

    def settle_unnoticed(self: Subscription, record: Any) -> None:
        changed = self.changed
        settle(self, record)
        self.changed = changed

    patch.setattr(Subscription, "apply_settled", settle_unnoticed)


def mutant_delivers_while_paused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Subscription, "paused", property(lambda _: False))
    changed = Subscription.apply_changed
    patch.setattr(
        Subscription, "apply_changed", lambda self, record: changed(self, replace(record, paused=False))
    )


def mutant_keeps_what_was_settled_over_a_seek(patch: pytest.MonkeyPatch) -> None:
    seeked = Subscription.apply_seeked

    def keep_settled(self: Subscription, record: Any) -> None:
        settled = self.cursor.settled
        seeked(self, record)
        self.cursor.settle(settled, self.log)

    patch.setattr(Subscription, "apply_seeked", keep_settled)


def mutant_keeps_its_consumers_over_a_seek(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Subscription, "_end_streams", lambda self: None)


def mutant_counts_what_lies_before_the_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hidden, "count", lambda self: 0)


MUTANTS: dict[str, Mutant] = {
    name.removeprefix("mutant_"): function
    for name, function in list(globals().items())
    if name.startswith("mutant_")
}
