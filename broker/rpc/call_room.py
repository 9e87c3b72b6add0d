"""Room for the answers of calls that may be large: the same rooms as those of streams (`unread_room.py`).

An answer of a call is given to gRPC whole, and waits there until its client reads it. The call has ended once it was
read, so until then its room is held. Where others wait for it, the call is ended (`slow_readers.py`): gRPC has no way
to take back an answer. Requests that wait for room are bounded in bytes; of streams the unfinished messages are
(`unfinished_messages.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from broker.rpc.slow_readers import end_client, when_over
from broker.rpc.status import Context
from broker.rpc.unread_room import FrameRoom, StreamUnread, UnreadRooms


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
    unread = StreamUnread(rooms, context.peer, partial(end_client, context))
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
