"""The shard of a topic: a pure function of its name and the number of shards, the same for broker and clients."""

from __future__ import annotations

from dataclasses import dataclass

from google_crc32c import value

from broker.errors import Unavailable

_RETRY_MS = 200
"""Time after which a caller may ask another shard."""
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


ID_STRIDE = 1 << 32
"""Shards give ids of topics and ledgers from ranges of this length, one above the other: no two give the same one, so
that their topics can be put together in one folder, where files carry these ids."""


@dataclass(frozen=True, slots=True)
class TopicShard:
    """The part of all topics that a broker holds."""

    number: int
    shards: int
    first_port: int = 0
    """Port of the first shard; those of the others follow. 0: nobody knows them beforehand, or there are none."""

    @property
    def first_id(self) -> int:
        """Return the first id of a topic and of a ledger that the shard gives in a new folder."""
        return self.number * ID_STRIDE + 1

    def holds(self, topic: str) -> bool:
        return self.shards == 1 or shard_of(topic, self.shards) == self.number

    def check(self, topic: str) -> None:
        """Raise NOT_OWNER for a topic of another shard, with the address of that one."""
        if self.holds(topic):
            return
        number = shard_of(topic, self.shards)
        address = port_address(self.first_port + number) if self.first_port else ""
        raise Unavailable(
            f"Topic {topic!r} belongs to shard {number} of {self.shards}, and this is shard {self.number}",
            reason="NOT_OWNER",
            retry_after_ms=_RETRY_MS,
            owner_address=address,
            shard=number,
            shards=self.shards,
        )


def port_address(port: int) -> str:
    """Return the address of a shard as clients are told it: on the host by which they reach the front."""
    return f":{port}"


ALL_TOPICS = TopicShard(0, 1)
