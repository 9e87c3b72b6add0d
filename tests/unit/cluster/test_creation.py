"""Making a cluster: once, whole, also after it was cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.cluster.creation import (
    Cluster,
    create_cluster,
    decode_cluster,
    encode_cluster,
    read_cluster,
)
from broker.cluster.group_objects import entry_name
from broker.cluster.lease import OwnerLease, SystemLeaseClock
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.object_store import ObjectStore, StoreFailed
from broker.errors import AlreadyExists, Corrupt, NotFound, Refused
from tests.unit.cluster.faulty_store import CreateFault, FaultyStore
from tests.unit.cluster.object_logs import object_store

LEASE_MS = 4000


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultyStore]:
    async with object_store("file", tmp_path, monkeypatch) as objects:
        yield FaultyStore(objects)


async def check_logs(store: ObjectStore, cluster: Cluster) -> None:
    """Every shard has a log that can be opened."""
    for number in range(cluster.shards):
        log = ObjectGroupLog(store, cluster.shard(number), "a", OwnerLease(SystemLeaseClock(), LEASE_MS))
        await log.open(1, 0)
        entry = await log.follow()
        assert entry is not None and entry.head.epoch == 0


async def test_a_cluster_is_made_once(store: FaultyStore) -> None:
    with pytest.raises(NotFound, match="There is no cluster in file://") as missing:
        await read_cluster(store)
    assert missing.value.reason == "CLUSTER_NOT_FOUND"
    cluster = await create_cluster(store, 3, LEASE_MS)
    assert (cluster.shards, cluster.owner_lease_ms, cluster.format) == (3, LEASE_MS, 1)
    assert await read_cluster(store) == cluster
    await check_logs(store, cluster)
    with pytest.raises(AlreadyExists, match="already contains a cluster") as caught:
        await create_cluster(store, 3, LEASE_MS)
    assert caught.value.reason == "CLUSTER_EXISTS"


@pytest.mark.slow
async def test_wherever_its_making_is_cut_it_can_be_made_whole(store: FaultyStore) -> None:
    for place in range(5):  # an id, three first groups, and the cluster
        for fault in (CreateFault.REQUEST_LOST, CreateFault.ANSWER_LOST, CreateFault.LATE):
            for name in [info.name async for info in store.objects("")]:
                await store.remove(name)
            store.create_faults.extend([None] * place + [fault])
            with pytest.raises(StoreFailed):
                await create_cluster(store, 3, LEASE_MS)
            try:
                cluster = await create_cluster(store, 3, LEASE_MS)
            except AlreadyExists:
                assert (place, fault) == (4, CreateFault.ANSWER_LOST)
                cluster = await read_cluster(store)
            await store.arrive()
            assert await read_cluster(store) == cluster
            await check_logs(store, cluster)


async def test_two_who_make_it_at_once_make_the_same(store: FaultyStore) -> None:
    outcomes = await asyncio.gather(
        *(create_cluster(store, 2, LEASE_MS) for _ in range(4)), return_exceptions=True
    )
    clusters = {outcome for outcome in outcomes if isinstance(outcome, Cluster)}
    assert clusters == {await read_cluster(store)}
    await check_logs(store, clusters.pop())


async def test_a_log_that_was_lost_is_not_begun_anew(store: FaultyStore) -> None:
    await create_cluster(store, 1, LEASE_MS)
    await store.remove(entry_name(0, 1))
    with pytest.raises(AlreadyExists):
        await create_cluster(store, 1, LEASE_MS)
    with pytest.raises(FileNotFoundError):
        await store.read(entry_name(0, 1))


async def test_a_making_that_was_begun_with_other_numbers_is_refused(store: FaultyStore) -> None:
    store.create_faults.extend([None, CreateFault.REQUEST_LOST])
    with pytest.raises(StoreFailed):
        await create_cluster(store, 3, LEASE_MS)
    with pytest.raises(
        Refused, match="a cluster with 3 shards and an owner lease of 4000 ms was begun"
    ) as caught:
        await create_cluster(store, 4, LEASE_MS)
    assert caught.value.reason == "CLUSTER_BEGUN"


async def test_a_store_that_only_says_exists_is_refused(store: FaultyStore) -> None:
    store.create_faults.extend([CreateFault.SAYS_EXISTS] * 100)
    with pytest.raises(Refused, match="does not return it") as caught:
        await create_cluster(store, 1, LEASE_MS)
    assert caught.value.reason == "CLUSTER_STORE_UNSOUND"


def test_a_cluster_is_read_as_it_was_written() -> None:
    cluster = Cluster("0123456789abcdef" * 2, 7, 1000)
    assert decode_cluster(encode_cluster(cluster), "place") == cluster


@pytest.mark.parametrize(
    "change",
    [{"id": "no id"}, {"shards": 0}, {"shards": 5000}, {"owner_lease_ms": 0}, {"other": 1}, {"format": "1"}],
)
def test_a_cluster_that_is_not_sound_is_refused(change: dict[str, object]) -> None:
    facts = json.loads(encode_cluster(Cluster("0" * 32, 1, 4000)))
    with pytest.raises(Corrupt, match="damaged"):
        decode_cluster(json.dumps({**facts, **change}).encode(), "place")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"\xff", b'{"format": 1}'])
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Corrupt, match="damaged"):
        decode_cluster(data, "place")


def test_a_newer_format_is_told_from_damage() -> None:
    with pytest.raises(Corrupt, match="has format 2"):
        decode_cluster(b'{"format": 2}', "place")
