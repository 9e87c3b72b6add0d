"""Services that a topic's schedule keys ask of their topic, and those that the keys of all topics share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

from broker.delayed.key_cache import KeyCache
from broker.delayed.schedule_keys import KeyLimits
from broker.observe.metrics import BrokerCounters
from broker.runtime.clock import Clock
from broker.runtime.supervise import Spawn
from broker.storage.key_run_files import KeyStorage
from broker.storage.log import TopicLog


class KeyedTopic(Protocol):
    """A topic as its keys need it."""

    @property
    def topic_id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def deleted(self) -> bool: ...

    @property
    def log(self) -> TopicLog: ...

    @property
    def frontier_ms(self) -> int:
        """Entries due at or before it do not wait any more."""

    async def prepare_folders(self) -> None: ...

    def note_change(self) -> None:
        """There is something for the next checkpoint."""


@dataclass(frozen=True, slots=True)
class KeyServices:
    """Services that the keys of all topics share."""

    clock: Clock
    spawn: Spawn
    storage: Callable[[int], KeyStorage]  # (topic_id)
    executor: Executor  # writes runs
    cache: KeyCache
    counters: BrokerCounters
    limits: KeyLimits = field(default_factory=KeyLimits)
