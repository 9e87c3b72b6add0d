"""`cluster status URL`: a cluster as its store alone shows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from broker.cli import main
from broker.cluster.base_store import BaseCut, BaseStore
from broker.cluster.creation import Cluster, create_cluster
from broker.cluster.group_head import blank
from broker.cluster.object_group_log import LOG_ATTEMPT, ObjectGroupLog
from broker.cluster.object_store import ObjectStore
from broker.cluster.shard_store import ShardStore
from broker.cluster.store_status import read_state, render_state
from broker.cluster.stores import open_store
from broker.runtime.clock import SystemClock
from broker.runtime.vfs import replace_file
from broker.storage.layout import Layout
from broker.testing.mem_vfs import MemVfs
from tests.unit.cluster.object_logs import make_log

LEASE_MS = 60_000


def status(folder: Path) -> Result:
    return CliRunner().invoke(main, ["cluster", "status", f"file://{folder}"])


def play(folder: Path, steps: Callable[[ObjectStore, ObjectGroupLog], Awaitable[Any]]) -> None:
    """Have node `b` read the log of a new cluster and go on with it."""

    async def run() -> None:
        store = open_store(f"file://{folder}", LOG_ATTEMPT)
        cluster = await create_cluster(store, 1, LEASE_MS)
        log = make_log(store, "b", shard=cluster.shard(0))
        await log.open(1, 0)
        await log.follow()
        await steps(store, log)

    asyncio.run(run())


def test_a_cluster_that_nobody_has_owned_yet(tmp_path: Path) -> None:
    async def nothing(*_: Any) -> None:
        pass

    play(tmp_path, nothing)
    told = status(tmp_path)
    assert told.exit_code == 1
    _, owner, journal, bases = told.output.splitlines()
    assert (owner, bases) == ("shard 0: nobody has owned it yet", "  bases: none yet")
    assert journal.startswith("  journal: 1 groups, ")


def test_an_owner_its_journal_and_its_bases(tmp_path: Path) -> None:
    async def own(store: ObjectStore, log: ObjectGroupLog) -> None:
        await log.take_over(2, 1)
        await log.append(3, blank())
        vfs = MemVfs()
        layout = Layout("/folder")
        for folder in ("/folder", layout.topics):
            vfs.make_dir(folder)
        replace_file(vfs, layout.manifest, [b"manifest"])
        cut = BaseCut(
            tag="b", label="", broker_id="x", create_time_ms=SystemClock().now_ms(), lsn=2, topics=0
        )
        await BaseStore(ShardStore(store, 0), SystemClock()).upload(vfs, layout, cut)

    play(tmp_path, own)
    told = status(tmp_path)
    assert told.exit_code == 0, told.output
    lines = told.output.splitlines()
    assert lines[0].endswith(", shards: 1, a lease of 60 s") and lines[1] == "shard 0: owner b, epoch 1"
    assert lines[2].startswith("  last group: lsn 3, ") and lines[2].endswith(" s ago; take-overs: 1")
    assert lines[3].startswith("  journal: 3 groups, ")
    assert lines[4].startswith("  bases: 1, the newest with lsn 2, ")


def test_an_owner_that_resigned_and_one_that_is_silent(tmp_path: Path) -> None:
    async def resign(store: ObjectStore, log: ObjectGroupLog) -> None:
        await log.take_over(2, 1)
        await log.resign(3, "c")

    play(tmp_path, resign)
    told = status(tmp_path)
    assert told.exit_code == 1
    assert told.output.splitlines()[1] == "shard 0: no owner, b has resigned in epoch 1, in favour of c"


def test_an_owner_that_is_silent_for_a_lease_may_be_nobody(tmp_path: Path) -> None:
    async def own(store: ObjectStore, log: ObjectGroupLog) -> None:
        await log.take_over(2, 1)

    play(tmp_path, own)

    async def read() -> tuple[Cluster, list[Any]]:
        return await read_state(open_store(f"file://{tmp_path}"), SystemClock())

    cluster, shards = asyncio.run(read())
    later_ms = time.time_ns() // 1_000_000 + LEASE_MS
    assert list(render_state(cluster, shards, later_ms))[1] == (
        "shard 0: no sign of an owner, the last one was b, epoch 1"
    )
    assert not shards[0].is_owned(LEASE_MS, later_ms)


def test_no_cluster_and_a_log_that_is_gone(tmp_path: Path) -> None:
    told = status(tmp_path)
    assert told.exit_code == 1 and "There is no cluster" in told.output

    async def lose(store: ObjectStore, log: ObjectGroupLog) -> None:
        async for info in store.objects("shards/0/log"):
            await store.remove(info.name)

    play(tmp_path, lose)
    told = status(tmp_path)
    assert told.exit_code == 1 and "The journal has no groups" in told.output
