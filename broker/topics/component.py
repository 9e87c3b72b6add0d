"""The doors of a topic's components: each is the only writer of its state, and a checkpoint asks it what to write."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Never, Protocol

from broker.storage.blocks import LedgerCapture
from broker.storage.ledger import Ledger
from broker.storage.manifest import TopicImage
from broker.storage.records import Record


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that the next manifest names."""

    path: str  # in the topic's folder
    encode: Callable[[], bytes]  # for any thread


@dataclass(frozen=True, slots=True)
class Capture:
    """One component at one moment: what must be on disk before a manifest may say so, and what may go after it."""

    image: TopicImage
    """The manifest, with the part of this component and of those before it."""
    ledgers: tuple[tuple[Ledger, LedgerCapture], ...] = ()  # to be on disk as far as that
    files: tuple[NewFile, ...] = ()
    replaced: tuple[str, ...] = ()  # paths that this manifest does not name any more
    durable: Callable[[], Awaitable[None]] | None = None
    """Called once the manifest is durable."""


class Applier(Protocol):
    """A part of a topic that records change."""

    def apply(self, record: Record, lsn: int) -> None:
        """Change as a record says: called by the topic alone, in lsn order, live and in recovery."""


class Component(Applier, Protocol):
    """A part of a topic that a manifest tells of; made from what the last one says."""

    def capture(self, image: TopicImage) -> Capture:
        """Name its part in a manifest of now, of which `applied_lsn` is given. One step, without await."""


def not_applied(component: Applier, record: Record) -> Never:
    """Raise the error of a record that the topic's table sends to the wrong component."""
    raise AssertionError(f"{type(component).__name__} does not apply {type(record).__name__}")
