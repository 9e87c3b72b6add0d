"""Decisions of the take-over protocol, each a pure function: the broker and the model of the protocol call the same.

  CLUSTER-1  An index gets at most one group, ever: an append succeeds only at the first free index.
  CLUSTER-2  An append whose outcome is unknown is repeated, same index and same bytes, until reading tells it.
             Nothing else is sent before that, so the log has no holes.
  CLUSTER-3  Epochs rise: a group behind one of a higher epoch is void.
  CLUSTER-4  Take-over groups are never removed. A writer that slept through its successor's life still finds the index
             at which it was fenced occupied, however much was trimmed.
  CLUSTER-5  Whoever appended or read a take-over then reads the two newest bases. If the older one, behind which the
             log is trimmed (CLUSTER-17), covers the index, it may have been trimmed: they drop what they have and begin
             with a base. Before that the take-over counts for nothing: no folder, and so no base, says that it was
             applied.
  CLUSTER-8  An owner decides nothing before it has applied every group before its take-over.
  CLUSTER-13  A take-over needs a lease's length without a new group, or a resignation.

tests/model/test_take_over_protocol.py explores every order of events of two nodes and a store with them, and finds a
counterexample as soon as any of them is switched off.
"""

from __future__ import annotations

from enum import Enum

from broker.cluster.group_head import GroupKind


class Answer(Enum):
    """The answer to a create."""

    STORED = "stored"
    EXISTS = "exists"
    """Of this group, of another one, or of nothing: stores and their clients say so for many reasons."""

    UNKNOWN = "unknown"
    """None in time, or a failure: it may have been stored, and may be later."""


class AppendStep(Enum):
    """The next step of an append, or its outcome."""

    STORED = "stored"
    FENCED = "fenced"
    CREATE = "create"
    READ = "read"


def after_create(answer: Answer) -> AppendStep:
    """Return the step after a create was answered (CLUSTER-2)."""
    match answer:
        case Answer.STORED:
            return AppendStep.STORED
        case Answer.EXISTS:
            return AppendStep.READ
        case Answer.UNKNOWN:
            return AppendStep.CREATE


def after_read(own: object, stored: object | None) -> AppendStep:
    """Return the step after the index of an append was read: the group there, or None (CLUSTER-2)."""
    if stored is None:
        return AppendStep.CREATE
    return AppendStep.STORED if stored == own else AppendStep.FENCED


def is_void(epoch: int, epoch_before: int) -> bool:
    """Return whether a group counts for nobody, given the epoch of the group before it (CLUSTER-3)."""
    return epoch < epoch_before


def is_removable(kind: GroupKind, index: int, below: int) -> bool:
    """Return whether trimming below an index removes a group (CLUSTER-4)."""
    return index < below and kind is not GroupKind.TAKE_OVER


def is_stray(index: int, trimmed_below: int) -> bool:
    """Return whether a take-over at an index lies where the log may have been trimmed (CLUSTER-5).

    The bases must have been read after the take-over was appended or read.
    """
    return index < trimmed_below


REST_LEASES = 1
"""Leases by which a standby waits longer while it rests: where a store is slow for all, owners do not take turns; and
where all the others rest, a shard whose owner is gone is not left alone."""


FRESH_STEPS = 4
"""Quarters of a lease by which each rank waits longer for a shard that nobody has owned yet."""


def silence_ms_needed(owner_lease_ms: int, rank: int, *, rests: bool = False, is_fresh: bool = False) -> int:
    """Return how long a standby waits before it takes over: the first in rank is to be first.

    Nobody waits for a shard that nobody has owned yet (`is_fresh`): nodes that start one after the other leave it to
    the first.
    """
    steps = FRESH_STEPS if is_fresh else 1
    return owner_lease_ms * (4 + rank * steps + 4 * REST_LEASES * rests) // 4


def may_take_over(
    silent_ms: float,
    owner_lease_ms: int,
    rank: int,
    *,
    rests: bool = False,
    resigned_to_us: bool = False,
    is_fresh: bool = False,
) -> bool:
    """Return whether a standby that has read nothing new for so long may append a take-over (CLUSTER-13)."""
    needed_ms = silence_ms_needed(owner_lease_ms, rank, rests=rests, is_fresh=is_fresh)
    return resigned_to_us or silent_ms >= needed_ms
