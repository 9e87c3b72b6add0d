"""Random settings: limits so tiny that everything rolls, overflows and waits within a few messages."""

from __future__ import annotations

import random

from broker.config import BrokerConfig
from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.testing.sim_loop import Latency
from tests.configs import broker_config, changed
from tests.harness import DATA_DIR

_RESERVE_BYTES_MIN = 1 << 18
_RESERVE_SHARES = 4
"""The reserve, in segments or checkpoints of the journal, as in the broker's own settings: before one of either is over
nothing of the journal is given back, and deliveries go on meanwhile (seed 980125)."""
MUCH = 1 << 20


def random_config(rng: random.Random) -> BrokerConfig:
    """Return settings with a reserve of the disk in proportion to its journal."""
    config = _random_config(rng)
    journal_bytes = max(config.tuning.journal_segment_bytes, config.tuning.checkpoint_bytes)
    return changed(config, disk_reserve_bytes=max(_RESERVE_BYTES_MIN, _RESERVE_SHARES * journal_bytes))


def _random_config(rng: random.Random) -> BrokerConfig:
    pick = rng.choice
    return broker_config(
        data_dir=DATA_DIR,
        clock_recheck_ms=pick((100, 1_000, 1_000, 60_000)),
        frame_bytes_max=pick((1_024, 4_096, MUCH)),
        journal_segment_bytes=pick((4_096, 8_192, MUCH)),
        journal_spare_segments_max=pick((0, 1, 4)),
        journal_group_bytes_max=pick((1, 2_000, MUCH)),
        journal_pending_bytes_max=pick((1, 5_000, MUCH)),
        checkpoint_bytes=pick((1, 2_000, 20_000, MUCH)),
        checkpoint_interval_ms=pick((50, 500, 5_000, 30_000)),
        ledger_max_entries=pick((1, 4, 20, 20, 100, 1_000)),
        ledger_max_bytes=pick((200, 2_000, 20_000, MUCH, MUCH)),
        ledger_max_age_ms=pick((0, 0, 0, 1, 3_000)),
        tail_bytes_max=pick((1, 1_000, MUCH)),
        open_ledgers_max=pick((1, 2, 256)),
        reclaim_interval_ms=pick((50, 500, 500, 2_000, 60_000)),
        retention_ms=pick((0, 0, 0, 0, 500, 20_000)),
        retention_bytes=pick((0, 0, 0, 0, 1, 2_000)),
        tick_ms=pick((1, 10, 100, 1_000, 60_000)),
        default_ttl_ms=pick((0, 0, 0, 0, 0, 3_600_000)),
        lease_ms=pick((200, 1_000, 5_000, 30_000)),
        initial_backoff_ms=pick((0, 10, 1_000)),
        max_backoff_ms=pick((1_000, 10_000)),
        backoff_multiplier=pick((1.0, 2.0, 10.0)),
        replay_entries_max=pick((1, 3, 10, 50, MUCH)),
        read_batch_entries=pick((1, 2, 7, 50, 2_000)),
        due_batch_entries=pick((1, 2, 7, 100, 10_000)),
        tracker=pick(("bucket", "bucket", "bucket", "memory")),
        min_index_count=pick((1, 2, 5, 20, 50_000)),
        ledgers_per_bucket=pick((1, 2, 50)),
        seal_after_ms=pick((1, 100, 2_000, 60_000)),
        max_buckets=pick((1, 2, 3, 64)),
        max_segment_entries=pick((1, 2, 5, 5_000)),
        segment_time_step_ms=pick((1, 100, 2_000, 300_000)),
        packed_rows_min=1,
    )


def random_latency(rng: random.Random) -> Latency:
    return rng.choice(
        (
            Latency(slow_every=0),
            Latency(slow_every=0),
            Latency(min_ms=0.01, max_ms=0.5, slow_every=0),
            Latency(),
            Latency(max_ms=20, slow_every=50, slow_ms=1_000),
        )
    )


SLOW = Latency(min_ms=1, max_ms=100, slow_every=3, slow_ms=4_000)
"""A disk in trouble: seconds for a call."""


def random_topic_policy(rng: random.Random) -> TopicPolicy:
    return TopicPolicy(
        tick_ms=rng.choice((None, 1, 250, 5_000)),
        ledger_max_entries=rng.choice((None, 2, 30)),
        ledger_max_bytes=rng.choice((None, 500)),
        retention_ms=rng.choice((None, None, 0, 3_000)),
        retention_bytes=rng.choice((None, None, 0, 0, 500)),
    )


def random_subscription_policy(rng: random.Random, *, honor_delay: bool) -> SubscriptionPolicy:
    return SubscriptionPolicy(
        lease_ms=rng.choice((None, 300, 4_000)),
        initial_backoff_ms=rng.choice((None, 0, 50)),
        max_backoff_ms=rng.choice((None, 1_000)),
        backoff_multiplier=rng.choice((None, 3.0)),
        honor_delay=honor_delay or None,
    )
