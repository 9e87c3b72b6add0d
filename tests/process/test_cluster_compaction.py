"""Compaction in a cluster of real processes: three nodes that hold two shards each, and the job run at each of them."""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta
from pathlib import Path

import postdate
from tests.depth import at_depth, one_of_three
from tests.process.conftest import Start, until
from tests.process.test_cluster_shards import SECONDS, SHARDS, TOPICS, Nodes
from tests.process.test_compaction import LARGE, TINY, compact, fill, ledger_bytes, ledger_files
from tests.process.test_crash import verify

LEDGERS, ENTRIES = at_depth(change=3, deep=4), at_depth(change=200, deep=400)
PAYLOAD_BYTES = 1_024


@one_of_three(1)
async def test_the_job_at_each_node_frees_the_disks_of_all_and_a_take_over_delivers_what_is_left(
    start: Start, tmp_path: Path
) -> None:
    settings = {**TINY, **LARGE, "ledger_max_entries": str(ENTRIES), "ledger_max_bytes": "16MiB"}
    nodes = Nodes(start, tmp_path, **settings)
    await nodes.create()
    owners = await nodes.owned("a")
    await asyncio.gather(*(nodes.following(name) for name in "abc"))
    idle = next(name for name in "abc" if name not in owners)
    pending = await asyncio.gather(
        *(fill(nodes.processes[idle], LEDGERS, ENTRIES, PAYLOAD_BYTES, topic) for topic in TOPICS)
    )
    folders = [tmp_path / name / "shards" / str(number) for name in "abc" for number in range(SHARDS)]

    async def are_full() -> bool:
        return all(ledger_bytes(folder) > LEDGERS * ENTRIES * PAYLOAD_BYTES for folder in folders)

    await until(are_full, "standbys write what the owner wrote", seconds=SECONDS)
    full = [ledger_bytes(folder) for folder in folders]
    for owner, topic in zip(owners, TOPICS, strict=True):
        await planned(nodes, owner, f"{topic}: rewrite {LEDGERS} ledgers")
    status, output = await apply(nodes, idle)
    assert status == 0, output
    for owner in owners:
        assert f"the node at {nodes.address(owner)} owns them: run this command there, too" in output
    assert "Nothing is worth compacting" in output
    assert {generation for folder in folders for _, generation in ledger_files(folder)} == {"0"}
    for owner in sorted(set(owners)):
        status, output = await apply(nodes, owner)
        assert status == 0, output
        assert f"{LEDGERS * owners.count(owner)} ledgers were rewritten, 0 refused" in output

    async def are_rewritten() -> bool:
        return all(ledger_bytes(folder) < size / 50 for folder, size in zip(folders, full, strict=True))

    await until(are_rewritten, f"each node rewrites its own files: {nodes.lines()}", seconds=SECONDS)
    for owner in sorted(set(owners)):
        await nodes.end(owner, signal.SIGKILL)
        await nodes.owned(next(iter(nodes.processes)), not_by=owner)
        for topic, ids in zip(TOPICS, pending, strict=True):
            await see_what_is_left(nodes, topic, ids)
        await nodes.start_node(owner)
        await asyncio.gather(*(nodes.following(name) for name in "abc"))
    for name in "abc":
        assert await nodes.end(name, signal.SIGTERM) == 0, nodes.lines()
    for folder in folders:
        await asyncio.to_thread(verify, folder)


async def planned(nodes: Nodes, name: str, plan: str) -> None:
    """Wait until a node plans this: until its ledgers are whole on its disk."""

    async def is_planned() -> bool:
        status, output = await compact("--address", nodes.address(name), "--reclaim-mib", "0")
        assert status == 0, output
        return plan in output

    await until(is_planned, plan, seconds=SECONDS)


async def apply(nodes: Nodes, name: str) -> tuple[int, str]:
    return await compact("--address", nodes.address(name), "--apply", "--reclaim-mib", "0")


async def see_what_is_left(nodes: Nodes, topic: str, pending: list[postdate.MessageId]) -> None:
    """See that all is listed that waits, and take the last of it: it waits no more."""
    addresses = ",".join(map(nodes.address, nodes.processes))
    async with postdate.connect(addresses, retry_for=timedelta(seconds=SECONDS)) as client:
        listed = [each.id async for each in client.schedule.list(topic)]
        assert sorted(listed) == sorted(pending), nodes.lines()
        last = pending.pop()
        assert (await client.schedule.send_now(topic, id=last)).done
        async with client.subscribe(topic, "s") as subscription, asyncio.timeout(SECONDS):
            async for message in subscription:
                assert (message.id, message.payload) == (last, b"%d" % len(pending))
                await message.ack()
                break
