"""The numbers of the journal's record types.

Places that a new record type touches, in this order. Those with a (*) refuse to type-check or fail a test until they
know it:

    storage/record_types.py      its number, the next one that was never used
    storage/records.py           its class, `Record` (*), `decode_record` and its table (*); changes of what is pending
                                 live in changes.py, compactions in compacted.py, schedules in recurring.py,
                                 bulk changes in bulk.py
    storage-protos/              its body, if it is a protobuf message (`make protos`)
    topics/topic.py              `APPLIED_BY` (*): the components that apply it, and their `apply` (*)
    topics/topic.py              `Topic.submit_change` (*), if it cancels or moves: what is submitted by this
                                 holds its entries back from hand-out until it is applied
    topics/registry.py           instead, if it creates or deletes a topic
    storage/dump.py              `_fields_of` (*): what `postdate-broker dump` prints of it
    folder/consistency.py        `History.apply` (*): what in it a check of the whole journal can contradict
    folder/backup.py             `_NAMING_FILES`, if it names files that exist before it is written
    tests/golden/make.py         one of it in a golden segment of its own: `SEGMENTS`; test_golden.py (*)
    tests/unit/storage/test_records.py   `records`: there and back, any bytes, any value out of range
    tests/unit/topics/test_bounds.py     `use_everything` (*) leaves one; `LEFT_OUT`: fields that it never sets
    tests/crash/history.py       `fold`: what must be left of it after a crash; `play`: a broker that writes one
    docs/formats.md              its body
"""

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
    LOG_BLANK = 18
    RECURRED = 19
    BULK_STEPPED = 20
