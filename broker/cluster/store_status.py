"""The state of a cluster as its object store alone shows it: for an operator, where no node answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from broker.cluster.base_manifest import Base
from broker.cluster.base_store import BaseStore
from broker.cluster.creation import Cluster, read_cluster
from broker.cluster.group_head import ADVICE, GroupKind, LogEntry, decode_entry
from broker.cluster.group_objects import log_folder
from broker.cluster.object_store import ObjectStore
from broker.cluster.shard_store import ShardStore
from broker.cluster.status import format_span
from broker.errors import Corrupt
from broker.runtime.clock import Clock


class ShardState(NamedTuple):
    """The log and the bases of one shard."""

    number: int
    last: LogEntry
    groups: int
    bytes: int
    bases: tuple[Base, ...]
    """By lsn."""

    def is_owned(self, owner_lease_ms: int, now_ms: int) -> bool:
        """Return whether somebody has stored a group within a lease and did not resign with it."""
        head = self.last.head
        return (
            bool(head.epoch) and head.kind is not GroupKind.RESIGN and now_ms - head.wall_ms < owner_lease_ms
        )


async def read_state(store: ObjectStore, clock: Clock) -> tuple[Cluster, list[ShardState]]:
    """Return a cluster and its shards. Raises NotFound, Corrupt, OSError."""
    cluster = await read_cluster(store)
    return cluster, [await _read_shard(store, clock, cluster, number) for number in range(cluster.shards)]


def render_state(cluster: Cluster, shards: list[ShardState], now_ms: int) -> Iterator[str]:
    """Return lines for an operator. Ages are by the clock of whoever asks."""
    yield f"cluster {cluster.id}, shards: {cluster.shards}, a lease of {cluster.owner_lease_ms / 1e3:g} s"
    for shard in shards:
        head, lsn = shard.last.head, shard.last.next_index - 1
        yield f"shard {shard.number}: {_describe_owner(cluster, shard, now_ms)}"
        if head.epoch:
            yield f"  last group: lsn {lsn}, {format_span(now_ms - head.wall_ms)} ago; take-overs: {head.epoch}"
        yield f"  journal: {shard.groups} groups, {shard.bytes} bytes"
        if shard.bases:
            newest = shard.bases[-1]
            age = format_span(now_ms - newest.create_time_ms)
            yield f"  bases: {len(shard.bases)}, the newest with lsn {newest.lsn}, {age} old, {newest.bytes} bytes"
        else:
            yield "  bases: none yet"


def _describe_owner(cluster: Cluster, shard: ShardState, now_ms: int) -> str:
    head = shard.last.head
    if not head.epoch:
        return "nobody has owned it yet"
    if shard.last.resigned_to is not None:
        heir = shard.last.resigned_to or "any"
        return f"no owner, {head.node} has resigned in epoch {head.epoch}, in favour of {heir}"
    if shard.is_owned(cluster.owner_lease_ms, now_ms):
        return f"owner {head.node}, epoch {head.epoch}"
    return f"no sign of an owner, the last one was {head.node}, epoch {head.epoch}"


async def _read_shard(store: ObjectStore, clock: Clock, cluster: Cluster, number: int) -> ShardState:
    folder = log_folder(number)
    while True:
        sizes = {info.name: info.bytes async for info in store.objects(folder)}
        if not sizes:
            raise Corrupt(
                "The journal has no groups: they were removed", path=f"{store.url}/{folder}", advice=ADVICE
            )
        name = max(sizes)  # names are of one length
        try:
            data = await store.read(name)
        except FileNotFoundError:  # it was trimmed since, behind new ones
            continue
        index = int(name.rpartition("/")[2], 16)
        last = decode_entry(data, index, cluster.shard(number), f"{store.url}/{name}")
        stored = await BaseStore(ShardStore(store, number), clock).bases()
        bases = sorted((base.base for base in stored), key=lambda base: base.lsn)
        return ShardState(number, last, len(sizes), sum(sizes.values()), tuple(bases))
