"""The shard of a topic: a pure function of its name and the number of shards, the same for broker and clients."""

from __future__ import annotations

from dataclasses import dataclass

from google_crc32c import value

_SLOTS = 4096
"""Names fall into so many slots, and shards take ranges of them: of N and 2 N shards, two of the latter share one."""


def shard_of(topic: str, shards: int) -> int:
    """Return the shard that a topic lies on.

    What follows the first "~" does not count, so the dead letters of `orders`, in `orders~billing~dead-letters`, lie
    beside it.
    """
    name = topic.partition("~")[0]
    return _mix(int(value(name.encode()))) % _SLOTS * shards // _SLOTS


def _mix(checksum: int) -> int:
    """Return a checksum with every bit of it spread over all: the final mix of MurmurHash3, `fmix32`.

    A CRC is linear. Of names that differ at the end alone, as `orders-0` to `orders-7`, some of its bits are the same.
    """
    checksum ^= checksum >> 16
    checksum = checksum * 0x85EBCA6B & 0xFFFFFFFF
    checksum ^= checksum >> 13
    checksum = checksum * 0xC2B2AE35 & 0xFFFFFFFF
    return checksum ^ checksum >> 16


@dataclass(frozen=True, slots=True)
class TopicShard:
    """The part of all topics that a broker holds."""

    number: int
    shards: int

    def holds(self, topic: str) -> bool:
        return self.shards == 1 or shard_of(topic, self.shards) == self.number


ALL_TOPICS = TopicShard(0, 1)
