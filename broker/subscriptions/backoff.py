"""Waits of what was given back before it is sent again. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable

from broker.model import Entries, bitmap_of, ids_of
from broker.policy import EffectiveSubscriptionPolicy
from broker.subscriptions.attempts import Attempts


def delays(
    held: Entries, asked_ms: int, attempts: Attempts, policy: EffectiveSubscriptionPolicy, rng: random.Random
) -> Iterable[tuple[int, Entries]]:
    """Return how long each part waits: as asked, or the back-off for how often it was sent."""
    if not held:
        return
    if asked_ms:
        yield asked_ms, held
        return
    by_count: dict[int, Entries] = {}
    for ledger_id, bitmap in held.items():
        ids = ids_of(bitmap)
        counts = attempts.counts(ledger_id, ids)
        for count in {int(c) for c in set(counts.tolist())}:
            by_count.setdefault(count, {})[ledger_id] = bitmap_of(ids[counts == count])
    for count, part in sorted(by_count.items()):
        yield _backoff_ms(count, policy, rng), part


def _backoff_ms(sent_before: int, policy: EffectiveSubscriptionPolicy, rng: random.Random) -> int:
    growth = min(policy.backoff_multiplier ** min(sent_before, 64), 2.0**40)
    delay_ms = min(policy.initial_backoff_ms * growth, policy.max_backoff_ms)
    # Jitter takes off at most one half, so that what failed together does not come back together.
    return int(delay_ms * (1 - rng.random() / 2))
