"""The head of a group that lies in an object store: who stored it, as whom, when, and until when nobody else may.

    object  head 100, then the group as in a journal segment that begins with it (`storage/frame.py`, offset 24)
    head    magic 4 "PDG1", version 1, kind 1, node_bytes 1, zero 1, cluster 16, shard 2, shards 2, epoch 4,
            first_lsn 8, wall_ms 8, until_ms 8, nonce 8, node 32, crc32c 4 over the 96 bytes before

Integers are little-endian. A group without records has one of type LOG_BLANK in their place, which has no effect: so
every group takes an lsn, and the index of the next one follows from it. Its body is empty but for a resignation, where
it is the name of the node that is to take over at once, or empty.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import google_crc32c

from broker.errors import Corrupt
from broker.runtime.vfs import Buffer
from broker.storage.frame import encode_group
from broker.storage.group_log import NewRecord
from broker.storage.record_types import RecordType
from broker.storage.segment import HEADER_BYTES, Group, read_group

MAGIC = b"PDG1"
VERSION = 1
HEAD_BYTES = 100
NODE_BYTES_MAX = 32
CLUSTER_BYTES = 16
NONCE_BYTES = 8

_HEAD = struct.Struct("<4sBBBx16sHHIQqq8s32s")
_CRC = struct.Struct("<I")

ADVICE = "Look at the objects with the store's own tools: nothing but Postdate may write or remove there"


class GroupKind(IntEnum):
    """The meaning of a group. Numbers are for life."""

    RECORDS = 1
    HEARTBEAT = 2
    """Nothing but a sign of life."""

    TAKE_OVER = 3
    """Its writer owns the shard from here on; also the first group of a log, which nobody owns."""

    RESIGN = 4
    """Its writer owns the shard no longer."""


class Shard(NamedTuple):
    """The shard that a group belongs to (CLUSTER-6)."""

    cluster: bytes
    number: int
    shards: int

    def __str__(self) -> str:
        return f"shard {self.number} of {self.shards} of cluster {self.cluster.hex()}"


class Head(NamedTuple):
    """Facts of a group beside its records."""

    kind: GroupKind
    shard: Shard
    epoch: int
    first_lsn: int
    wall_ms: int
    until_ms: int  # until then its writer may take itself for the owner by virtue of this group (CLUSTER-11)
    nonce: bytes  # random, so that no two writers' groups are equal (CLUSTER-2)
    node: str


class LogEntry(NamedTuple):
    """A group of a log, with its head."""

    head: Head
    group: Group
    bytes: int

    @property
    def next_index(self) -> int:
        """The index of the group after it."""
        return self.group.first_lsn + len(self.group.records)

    @property
    def resigned_to(self) -> str | None:
        """The node that is to take over at once; None if this is no resignation."""
        if self.head.kind is not GroupKind.RESIGN:
            return None
        return bytes(self.group.records[0].body).decode(errors="replace")


def blank(note: bytes = b"") -> list[NewRecord]:
    """Return the records of a group that has none."""
    return [(RecordType.LOG_BLANK, (note,), len(note))]


def is_blank(records: Sequence[NewRecord]) -> bool:
    """Return whether a group of these records has no effect."""
    return all(record[0] == RecordType.LOG_BLANK for record in records)


def encode_entry(head: Head, records: Sequence[NewRecord]) -> bytes:
    """Return the object of a group."""
    parts: list[Buffer] = [encode_head(head)]
    parts += encode_group(head.first_lsn, HEADER_BYTES, records)[0]
    return b"".join(parts)


def encode_head(head: Head) -> bytes:
    node = head.node.encode()
    assert len(node) <= NODE_BYTES_MAX
    assert len(head.nonce) == NONCE_BYTES
    assert len(head.shard.cluster) == CLUSTER_BYTES
    data = _HEAD.pack(
        MAGIC,
        VERSION,
        head.kind,
        len(node),
        head.shard.cluster,
        head.shard.number,
        head.shard.shards,
        head.epoch,
        head.first_lsn,
        head.wall_ms,
        head.until_ms,
        head.nonce,
        node,
    )
    return data + _CRC.pack(google_crc32c.value(data))


def decode_head(data: bytes, name: str) -> Head:
    """Return the head at the beginning of an object. Accepts any bytes; raises Corrupt."""
    if data[:4] == MAGIC and len(data) > 4 and data[4] > VERSION:
        raise Corrupt(
            f"The group has version {data[4]}; this broker reads up to version {VERSION}",
            path=name,
            offset=4,
            advice="Start the version of the broker that wrote it, or a later one.",
        )
    if len(data) < HEAD_BYTES:
        raise Corrupt("The group is shorter than its head", path=name, offset=0, advice=ADVICE)
    magic, _, kind, node_bytes, cluster, number, shards, epoch, first_lsn, wall, until, nonce, node = (
        _HEAD.unpack_from(data)
    )
    is_whole = magic == MAGIC and _CRC.unpack_from(data, _HEAD.size)[0] == google_crc32c.value(
        data[: _HEAD.size]
    )
    if not is_whole or kind not in set(GroupKind) or node_bytes > NODE_BYTES_MAX:
        raise Corrupt("The head of the group is damaged", path=name, offset=0, advice=ADVICE)
    return Head(
        GroupKind(kind),
        Shard(cluster, number, shards),
        epoch,
        first_lsn,
        wall,
        until,
        nonce,
        node[:node_bytes].decode(errors="replace"),
    )


def decode_entry(data: bytes, index: int, shard: Shard, name: str) -> LogEntry:
    """Return the group that an object of this index and shard must hold; raises Corrupt for anything else."""
    head = decode_head(data, name)
    if head.shard != shard:
        raise Corrupt(f"The group is of {head.shard}, not of {shard}", path=name, offset=8, advice=ADVICE)
    if head.first_lsn != index:
        raise Corrupt(f"The group begins with lsn {head.first_lsn}", path=name, offset=32, advice=ADVICE)
    body = memoryview(data)[HEAD_BYTES:]
    group = read_group(body, index, HEADER_BYTES, index, HEADER_BYTES)
    if group is None or group.end - HEADER_BYTES != len(body) or not group.records:
        raise Corrupt("The group is damaged", path=name, offset=HEAD_BYTES, advice=ADVICE)
    if (head.kind is GroupKind.RECORDS) == all(
        record.type == RecordType.LOG_BLANK for record in group.records
    ):
        raise Corrupt(
            "The content of the group does not match the kind in its head", path=name, offset=5, advice=ADVICE
        )
    return LogEntry(head, group, len(data))
