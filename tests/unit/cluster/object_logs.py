"""Logs in object stores: what the tests of them share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.cluster.creation import encode_first
from broker.cluster.group_head import Shard
from broker.cluster.group_objects import entry_name
from broker.cluster.lease import LeaseClock, OwnerLease, SystemLeaseClock
from broker.cluster.object_group_log import LOG_ATTEMPT, ObjectGroupLog
from broker.cluster.object_store import ObjectStore
from broker.cluster.stores import open_store
from tests.s3_server import CREDENTIALS, need_server, s3_server, store_url

SHARD = Shard(bytes(range(16)), 3, 8)
LEASE_MS = 4000
STORES = ["memory", "file", "versitygw", pytest.param("minio", marks=pytest.mark.deep)]


@contextlib.asynccontextmanager
async def object_store(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectStore]:
    """An empty store of a kind; without its server or library the test is skipped."""
    if kind == "file":
        yield open_store(f"file://{folder}", LOG_ATTEMPT)
        return
    pytest.importorskip("obstore")
    if kind == "memory":
        yield open_store("memory://", LOG_ATTEMPT)
        return
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with s3_server(need_server(kind), folder) as port:
        yield open_store(store_url(port, "a/prefix"), LOG_ATTEMPT)


async def create_log(store: ObjectStore, shard: Shard) -> None:
    """Write the first group of a log."""
    await store.create(entry_name(shard.number, 1), encode_first(shard))


def make_log(
    store: ObjectStore, node: str = "a", clock: LeaseClock | None = None, shard: Shard = SHARD
) -> ObjectGroupLog:
    lease = OwnerLease(clock or SystemLeaseClock(), LEASE_MS)
    return ObjectGroupLog(store, shard, node, lease, repeat_pause_seconds=0.001, tail_pause_seconds=0.01)


async def open_object_log(store: ObjectStore, node: str = "a", from_index: int = 1) -> ObjectGroupLog:
    """A log, read to its end."""
    log = make_log(store, node)
    await log.open(from_index, 0)
    while await log.follow() is not None:
        pass
    return log
