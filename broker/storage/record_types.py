"""The numbers of the journal's record types."""

from __future__ import annotations

from enum import IntEnum


class RecordType(IntEnum):
    """The journal's record types. Numbers are for life."""

    COMMIT = 1
    PRODUCED = 2
    SETTLED = 3
    GIVEN_BACK = 4
    TOPIC_CREATED = 5
    TOPIC_DELETED = 6
    SUBSCRIPTION_CREATED = 7
    SUBSCRIPTION_DELETED = 8
    CANCELLED = 9
    MOVED = 10
    SEEKED = 11
    TOPIC_POLICY_CHANGED = 12
    SUBSCRIPTION_CHANGED = 13
    LEDGERS_DROPPED = 14
    TRANSFERRED = 15
    REPLACED = 16
    LEDGERS_COMPACTED = 17
