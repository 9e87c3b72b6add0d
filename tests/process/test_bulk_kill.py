"""A broker that is killed in the middle of a bulk change goes on with it: each message is moved once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import postdate
from tests.depth import at_depth
from tests.process.conftest import SMALL, Start

COUNT = at_depth(change=400, deep=2_000)
KILLS = at_depth(change=2, deep=6)
HOUR = timedelta(hours=1)


async def test_a_bulk_change_survives_a_killed_broker(start: Start, tmp_path: Path):
    settings = SMALL | {"data_dir": str(tmp_path / "data"), "bulk_step_messages": 5}
    broker = await (await start(**settings)).serving()
    settings |= {"grpc_address": broker.grpc_address}
    async with (
        postdate.connect(broker.grpc_address, retry_for=timedelta(seconds=30)) as client,
        asyncio.timeout(60),
    ):
        async with client.producer("t", batch_messages_max=int(SMALL["batch_messages_max"])) as producer:
            sent = [producer.send(b"x", deliver_after=HOUR, schedule_key=f"k{at}") for at in range(COUNT)]
            await asyncio.gather(*sent)
        before = {message.id: message.deliver_at async for message in client.schedule.list("t")}
        bulk = await client.schedule.move_matching(
            "t", key_prefix="k", shift=timedelta(minutes=1), wait=False
        )
        halfway = 0
        for kill in range(KILLS):
            while (seen := await client.schedule.bulk_change("t", bulk.id)).done < COUNT * (kill + 1) // (
                KILLS + 2
            ):
                await asyncio.sleep(0)
            halfway += seen.end_time is None
            await broker.kill()
            broker = await (await start(**settings)).serving()
        ended = await client.schedule.wait_bulk_change("t", bulk.id)
        after = {message.id: message async for message in client.schedule.list("t")}
    assert halfway, "no kill came in the middle"
    assert (ended.matched, ended.done, set(after)) == (COUNT, COUNT, set(before))
    assert {each.revision for each in after.values()} == {1}
    assert all(after[id_].deliver_at - due == timedelta(minutes=1) for id_, due in before.items())
