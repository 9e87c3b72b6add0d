"""The shard of a topic, and the topic of a request: by these a call finds its owner without asking anybody.

A topic's shard is fixed for good, and any client can compute it: `fmix32(crc32c(name)) % 4096 * shards // 4096`, where
the name ends before its first "~", and `fmix32` is the final mix of MurmurHash3 (docs/shards.md).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor

_SLOTS = 4096
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected
_NAMES_MAX = 10_000
"""Topics whose shard is remembered."""
_NAMED = ("topic", "name")


@lru_cache(_NAMES_MAX)
def shard_of(topic: str, shards: int) -> int:
    """Return the shard that a topic lies on, of so many."""
    return key_hash(topic.partition("~")[0]) % _SLOTS * shards // _SLOTS


def key_hash(text: str) -> int:
    """Return the hash by which names fall on shards, and keys on partitions."""
    return _mix(_crc32c(text.encode()))


def topic_of(request: Any) -> str:
    """Return the topic that a request is about; empty for one about none, or several."""
    field = _topic_field(request.DESCRIPTOR)
    return str(getattr(request, field)) if field else ""


@lru_cache
def _topic_field(kind: Descriptor) -> str:
    """Return the field with the topic: the first one of every request that names one, by its number."""
    first = kind.fields_by_number.get(1)
    if first is None or first.name not in _NAMED or first.type != first.TYPE_STRING:
        return ""
    return "" if "Backup" in kind.name else str(first.name)


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = tuple(map(_table_entry, range(256)))


def _crc32c(data: bytes) -> int:
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    return checksum ^ 0xFFFFFFFF


def _mix(checksum: int) -> int:
    checksum ^= checksum >> 16
    checksum = checksum * 0x85EBCA6B & 0xFFFFFFFF
    checksum ^= checksum >> 13
    checksum = checksum * 0xC2B2AE35 & 0xFFFFFFFF
    return checksum ^ checksum >> 16
