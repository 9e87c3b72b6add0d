"""A process that relays an outbox until it is empty, and kills itself before or after one of its steps.

Its arguments are CONNINFO ADDRESS STEP; steps are the statements it sends to the database and the
lists it sends to the broker, each before and after. STEP -1 kills nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import count
from typing import Any

import psycopg

import postdate
from postdate import postgres


def killing(call: Callable[..., Awaitable[Any]], kill: Callable[[], None]) -> Callable[..., Awaitable[Any]]:
    async def between(*arguments: Any, **options: Any) -> Any:
        kill()
        result = await call(*arguments, **options)
        kill()
        return result

    return between


class Watching(psycopg.AsyncCursor[Any]):
    """The cursor that looks whether the outbox is empty: its statements are no steps."""

    execute = psycopg.AsyncCursor.execute


async def main(conninfo: str, address: str, step: int) -> None:
    steps = count()

    def kill() -> None:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    async with postdate.connect(address) as client:
        relay = postgres.OutboxRelay(client, conninfo, poll=timedelta(milliseconds=10))
        watched = await psycopg.AsyncConnection.connect(conninfo, autocommit=True, cursor_factory=Watching)
        look = watched.execute
        psycopg.AsyncCursor.execute = killing(psycopg.AsyncCursor.execute, kill)  # type: ignore[assignment, method-assign]
        postdate.Producer.send_many = killing(postdate.Producer.send_many, kill)  # type: ignore[assignment, method-assign]
        running = asyncio.create_task(relay.run())
        async with watched:
            while await (await look("SELECT FROM postdate_outbox")).fetchone() is not None:
                await asyncio.sleep(0.01)
                assert not running.done(), running.exception()
        running.cancel()


def run() -> None:
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
