"""Calls whose answers may be large share the room of answers that are not read with the streams.

An answer of a call is given to gRPC whole, and waits there until its client reads it. The call has ended once it was
read, so until then its room is held. Where others wait for it, the connection is cut: gRPC has no way to take back an
answer. Requests that wait for room are bounded in bytes; of streams the unfinished messages are (`unfinished.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from broker.observe.logs import get_logger
from broker.rpc.status import Context
from broker.rpc.unread import FrameRoom, Unread, UnreadRooms
from broker.runtime.connections import cut_connection

log = get_logger(__name__)


def when_over(context: Context, do: Callable[[], None]) -> None:
    """Do something once a call is over: its client has read the answer, or never will."""
    over: Any = lambda _: do()  # noqa: E731 - the type of its argument is gRPC's own
    context.add_done_callback(over)


def cut_client(context: Context) -> None:
    """Close the connection of a call whose answer is not read."""
    peer = context.peer()
    log.warning("Closed the connection of a client that does not read responses", peer=peer)
    asyncio.get_running_loop().run_in_executor(None, cut_connection, peer)


async def answer_within(
    rooms: UnreadRooms,
    context: Context,
    request_bytes: int,
    bytes_max: int,
    work: Callable[[FrameRoom], Awaitable[bytes]],
) -> bytes:
    """Do some work once there is room for its answer, which takes so much at most.

    `work` may shrink the room once it knows more.
    Raises LimitReached, before the work, if too much waits for room already.
    """
    unread = Unread(rooms, context.peer, partial(cut_client, context))
    is_answered = False
    try:
        if (place := unread.take_nowait(bytes_max)) is None:
            with rooms.waiting_call(request_bytes):
                place = await unread.take(bytes_max)
        answer = await work(place)
        when_over(context, unread.close)
        place.answered(len(answer))
        is_answered = True
        return answer
    finally:
        if not is_answered:
            unread.close()
