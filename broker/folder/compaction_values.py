"""Values of the compaction calls. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from broker.topics.generations import Refusal


@dataclass(frozen=True, slots=True)
class LedgerCandidate:
    """A sealed ledger that could be rewritten."""

    ledger_id: int
    generation: int
    entry_count: int
    present_count: int  # entries that are there
    settled_count: int  # of these, what every subscription has settled
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class BucketCandidate:
    """A bucket of the index that could be merged with its neighbours."""

    bucket_id: int
    entry_count: int
    waiting_count: int  # entries that were not given out yet
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """Compaction candidates of a topic, in the order of the log."""

    topic: str
    ledgers: tuple[LedgerCandidate, ...]
    buckets: tuple[BucketCandidate, ...]
    owner_address: str | None = None
    """Of the node of a cluster that has the files, where it is not the one that was asked; empty: nobody is known."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A job's right to hand in outputs for some inputs."""

    compaction_id: str
    epoch: int
    topic: str
    ledger_ids: tuple[int, ...]
    bucket_ids: tuple[int, ...]
    folder: str  # below the data directory: where `inputs` lies and outputs belong
    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Results of the outputs of one lease."""

    ledger_ids: tuple[int, ...]  # that were rewritten
    refused: dict[int, Refusal]  # by ledger
    bucket_swapped: bool
    is_repeat: bool = False
