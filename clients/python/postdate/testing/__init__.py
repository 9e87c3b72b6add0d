"""A broker for the tests of programs that use Postdate: three days pass when the test says so.

async with postdate.testing.broker() as fake:
    async with fake.client() as client:
        ...                                    # the program under test sends a reminder for in three days
        await fake.advance(timedelta(days=3))
        ...                                    # it has been delivered

It is the real broker, in a thread of the test's process, so all it does is exact, and any client may use it at
`fake.address`. It needs what a broker needs: pip install 'postdate[broker]'.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar, cast

from postdate import pull, subscription
from postdate._time import duration_ms, moment
from postdate.client import Client, connect
from postdate.model import MessageId

__all__ = ["FakeBroker", "broker"]

_T = TypeVar("_T")

# (topic, subscription, consumer_id, ids): what is held in this process, and kept.
_Kept = tuple[str, str, str, list[MessageId]]

_STOPS_MAX = 200
_KEPT_S = 5.0


class _Inside(Protocol):
    """The broker in its thread: `broker.fake`. The SDK does not import it unless a test asks."""

    address: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def now_ms(self) -> int: ...
    def run(self, work: Coroutine[Any, Any, _T]) -> Future[_T]: ...
    async def settled(self) -> None: ...
    async def step(self, until_ms: int, step_ms_min: int, kept: Iterable[_Kept]) -> bool: ...
    async def release(self, kept: Iterable[_Kept]) -> None: ...


class FakeBroker:
    """A running broker whose clock a test sets forward; made by `broker`."""

    def __init__(self, inside: _Inside) -> None:
        self._inside = inside

    @property
    def address(self) -> str:
        """The address where it listens, for `postdate.connect`."""
        return self._inside.address

    @property
    def now(self) -> datetime:
        """The time on its clock, which runs as usual and is ahead of the machine's by what it was advanced."""
        return moment(self._inside.now_ms())

    def client(self) -> Client:
        """`postdate.connect` to it, to be used as an async context manager."""
        return connect(self.address, retry_for=timedelta(seconds=5))

    async def advance(self, by: timedelta) -> None:
        """Let `by` pass: return once all that became due meanwhile has come to the consumers that can take it.

        What comes due on the way is delivered in its turn, not all at the end: messages at their times, retries,
        ended leases, expiry. Leases that the SDK keeps (in this process: what waits to be taken, what is inside
        `Message.processing` or a handler of `run`) are kept; a message that was taken otherwise and not settled loses
        its lease and comes back. Handlers are called, but not waited for.
        """
        until_ms = self._inside.now_ms() + duration_ms(by, "by")
        step_ms_min = max(1, duration_ms(by, "by") // _STOPS_MAX)
        await self._ask(self._inside.settled())
        is_there = False
        while not is_there:
            kept = await self._kept()
            is_there = await self._ask(self._inside.step(until_ms, step_ms_min, kept))
        # What was sent last has arrived when that is known.
        await self._ask(self._inside.release(await self._kept()))

    async def _ask(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(self._inside.run(work))

    async def _kept(self) -> list[_Kept]:
        """Return the held messages of this broker, stream by stream; those of other threads' loops are asked there."""
        kept: list[_Kept] = []
        for each in list(subscription.entered):
            loop = each.loop
            if each.address != self.address or loop is None or not loop.is_running():
                continue
            asking = asyncio.run_coroutine_threadsafe(each.kept(), loop)
            ids = await asyncio.wait_for(asyncio.wrap_future(asking), _KEPT_S)
            if ids:
                kept.append((each.topic, each.name, each.consumer_id, ids))
        for holder in list(pull.holders):
            if holder.address != self.address:
                continue
            ids = await asyncio.wait_for(holder.kept(), _KEPT_S)
            if ids:
                kept.append((holder.topic, holder.name, holder.consumer_id, ids))
        return kept


@asynccontextmanager
async def broker() -> AsyncGenerator[FakeBroker, None]:
    """A broker of its own for a test, with nothing in it. It starts in a few dozen milliseconds."""
    inside = start_inside()
    try:
        yield FakeBroker(inside)
    finally:
        # Not in this loop: its clients may still have to say goodbye.
        await asyncio.to_thread(inside.stop)


def start_inside() -> _Inside:
    try:
        module = importlib.import_module("broker.fake")
    except ImportError as error:
        raise ImportError(
            f"postdate.testing runs the real broker, and a part of it is not installed ({error}): "
            "pip install 'postdate[broker]'"
        ) from error
    inside = cast(_Inside, module.FakeBroker())
    inside.start()
    return inside
