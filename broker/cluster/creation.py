"""Making a cluster: its identity, and the first group of each shard's log.

    cluster-id   cluster, shards, format and lease, when its making began
    cluster      the same, when it was made whole: written last, once, never changed

A making that was cut begins again with the id that is there, and stores the same bytes. After `cluster` is there no
first group is ever stored again: a log without one was lost (CLUSTER-6).
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass

from broker.cluster.group_head import NONCE_BYTES, GroupKind, Head, Shard, blank, encode_entry
from broker.cluster.group_objects import entry_name
from broker.cluster.object_store import ObjectStore
from broker.config import SHARDS_MAX
from broker.errors import AlreadyExists, Corrupt, NotFound, Refused

FORMAT = 1
LEASE_MS_MIN = 1_000
LEASE_MS_MAX = 60_000

_BEGUN = "cluster-id"
_MADE = "cluster"
_ATTEMPTS_MAX = 10


@dataclass(frozen=True, slots=True)
class Cluster:
    """The facts of a cluster that never change."""

    id: str  # 32 hex digits
    shards: int
    owner_lease_ms: int
    format: int = FORMAT

    def shard(self, number: int) -> Shard:
        return Shard(bytes.fromhex(self.id), number, self.shards)


def encode_cluster(cluster: Cluster) -> bytes:
    return json.dumps(asdict(cluster), indent=1).encode() + b"\n"


def decode_cluster(data: bytes, place: str) -> Cluster:
    """Return the cluster of an object; raises Corrupt."""
    try:
        facts = json.loads(data)
        if facts["format"] > FORMAT:
            raise Corrupt(
                f"The cluster has format {facts['format']}; this broker reads up to format {FORMAT}",
                path=place,
                advice="Start the version of the broker that made it, or a later one.",
            )
        cluster = Cluster(**facts)
        uuid.UUID(cluster.id)
        is_sound = (
            1 <= cluster.shards <= SHARDS_MAX and LEASE_MS_MIN <= cluster.owner_lease_ms <= LEASE_MS_MAX
        )
    except (ValueError, TypeError, KeyError):
        is_sound = False
    if not is_sound:
        raise Corrupt("The object that describes the cluster is damaged", path=place)
    return cluster


async def read_cluster(store: ObjectStore) -> Cluster:
    """Return the cluster that was made in a store; raises NotFound if there is none."""
    cluster = await _read(store, _MADE)
    if cluster is None:
        raise NotFound(
            f"There is no cluster in {store.url}: create one with `postdate-broker cluster create`, or correct the "
            "URL",
            reason="CLUSTER_NOT_FOUND",
        )
    return cluster


async def create_cluster(store: ObjectStore, shards: int, owner_lease_ms: int) -> Cluster:
    """Make a cluster, or bring a making that was cut to its end.

    Raises AlreadyExists if there is one, Refused if another one's making was begun with other numbers.
    """
    if await _read(store, _MADE) is not None:
        raise AlreadyExists(f"{store.url} already contains a cluster", reason="CLUSTER_EXISTS")
    begun = await _store_once(store, _BEGUN, Cluster(uuid.uuid4().hex, shards, owner_lease_ms))
    if (begun.shards, begun.owner_lease_ms) != (shards, owner_lease_ms):
        raise Refused(
            f"The creation of a cluster with {begun.shards} shards and an owner lease of {begun.owner_lease_ms} ms "
            f"was begun in {store.url} and not finished: repeat it with these values, or use another prefix",
            reason="CLUSTER_BEGUN",
        )
    for number in range(begun.shards):
        await _store_or_read(store, entry_name(number, 1), encode_first(begun.shard(number)))
    return await _store_once(store, _MADE, begun)


def encode_first(shard: Shard) -> bytes:
    """Return the first group of a log: a fence of epoch 0, of nobody (CLUSTER-6)."""
    return encode_entry(Head(GroupKind.TAKE_OVER, shard, 0, 1, 0, 0, bytes(NONCE_BYTES), ""), blank())


async def _store_once(store: ObjectStore, name: str, cluster: Cluster) -> Cluster:
    data = await _store_or_read(store, name, encode_cluster(cluster))
    return decode_cluster(data, f"{store.url}/{name}")


async def _store_or_read(store: ObjectStore, name: str, body: bytes) -> bytes:
    """Store an object unless there is one; returns the one that is there."""
    for _ in range(_ATTEMPTS_MAX):
        try:
            await store.create(name, body)
        except FileExistsError:
            try:
                return await store.read(name)
            except FileNotFoundError:
                continue
        return body
    raise Refused(
        f"{store.url} reports that {name} exists, but does not return it", reason="CLUSTER_STORE_UNSOUND"
    )


async def _read(store: ObjectStore, name: str) -> Cluster | None:
    try:
        return decode_cluster(await store.read(name), f"{store.url}/{name}")
    except FileNotFoundError:
        return None
