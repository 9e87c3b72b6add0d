"""Services that a subscription asks of its topic, and those that the subscriptions of a topic share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from broker.model import Int64Column, Position, RowColumn, UInt32Column
from broker.policy import EffectiveSubscriptionPolicy
from broker.runtime.clock import Clock
from broker.runtime.ownership import Ownership
from broker.storage.log import LogAmendments, RecordsUnderWay
from broker.storage.records import Record
from broker.subscriptions.giving_up import DeadLetterSink
from broker.subscriptions.reader import ReadableLog
from broker.subscriptions.reasons import ReasonsMemory
from broker.topic_shards import TopicShard


class SubscriptionLog(ReadableLog, Protocol):
    """Part of its topic's log that a subscription asks."""

    async def times_of(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
        """Effective times of some entries; 0 where the row is not DELAYED."""

    async def read(
        self, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
    ) -> tuple[Int64Column, RowColumn, list[bytes]]:
        """Effective times and rows of entries (ids rising), and the frames of as many as fit into `bytes_max`."""

    async def read_rows(self, ledger_id: int, first: int, count: int) -> RowColumn:
        """Rows of consecutive entries, as they were stored."""

    @property
    def amendments(self) -> LogAmendments:
        """Changes of effective times."""

    @property
    def under_way(self) -> RecordsUnderWay:
        """Entries that records on their way cancel or move: nobody is sent them."""

    def was_dropped(self, ledger_id: int) -> bool:
        """Return whether a ledger that is not there was, all of it settled."""

    def count_from(self, position: Position) -> int:
        """Return how many entries there are at or after a position."""

    @property
    def frame_bytes_average(self) -> int:
        """Bytes of a typical frame, at least 1."""


@dataclass(frozen=True, slots=True)
class DeliveryLimits:
    """Bounds of the work and the memory of one subscription."""

    batch_entries: int  # handed out in one step
    batch_bytes: int
    replay_entries_max: int
    consumers_max: int


@dataclass(frozen=True, slots=True)
class SubscriptionServices:
    """Services that the subscriptions of a topic share."""

    topic_name: str
    defaults: EffectiveSubscriptionPolicy
    limits: DeliveryLimits
    clock: Clock
    ownership: Ownership
    rng: random.Random
    submit: Callable[[Record], asyncio.Future[None]]
    dead_letter_sink: DeadLetterSink
    reasons_memory: ReasonsMemory
    topic_shard: TopicShard
