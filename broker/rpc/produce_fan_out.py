"""A stream of batches for topics of several shards, passed on as one stream to each of them.

Answers come in the order of the requests, as one broker gives them. So an answer waits for those before it, and a shard
that is slow delays the answers of streams that send to it, and of no others. Answers that a shard gives in one message
are passed on one by one, since those of other shards may lie between them. A request that cannot be passed on ends the
stream once those before it are answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import grpc

from broker.errors import PostdateError, Unavailable
from broker.observe.logs import get_logger
from broker.rpc.calls import END_OF_STREAM, CallHost, refuse_unread
from broker.rpc.forward import (
    ForwardedCall,
    MessageRoom,
    OwnerConnections,
    end_alike,
)
from broker.rpc.status import Context
from broker.storage.message_fields import tag_of
from postdate_api.v1 import producer_pb2

log = get_logger(__name__)

_END = -1
_ANSWERS_HEAD = bytes((tag_of("answers", producer_pb2.ProduceResponse),))


class ProduceFanOut:
    """One such stream."""

    def __init__(
        self,
        host: CallHost,
        room: MessageRoom,
        find: Callable[[int], OwnerConnections],
        path: str,
        shard_for: Callable[[bytes], int],
    ) -> None:
        """`find` returns the owner of a shard, or raises PostdateError.

        `shard_for` finds the shard of a request; one that names no topic is refused by whichever gets it.
        """
        self._host = host
        self._room = room
        self._find = find
        self._path = path
        self._shard_for = shard_for
        self._calls: dict[int, Any] = {}  # by shard
        self._answers: dict[int, deque[bytes]] = {}  # by shard; those that came with the last one passed on
        self._order: asyncio.Queue[int] = asyncio.Queue()  # shards whose answers are due
        self._has_ended = False  # nothing more is sent
        self._refusal: PostdateError | None = None  # of a request; those before it are answered first

    async def run(self, context: Context) -> None:
        """Pass on the stream until its caller has ended it and all answers are given, or a shard ends it."""
        forwarded = ForwardedCall()
        await end_alike(self._host, context, forwarded, self._converse(context, forwarded), refuse_unread)

    async def _converse(self, context: Context, forwarded: ForwardedCall) -> None:
        with ExitStack() as connections:
            sending = asyncio.ensure_future(self._send(context, forwarded, connections))
            try:
                while (shard := await self._order.get()) != _END:
                    await self._take(shard, context, forwarded)
                if self._refusal is not None:
                    raise self._refusal
                for shard, call in self._calls.items():
                    if self._answers[shard] or await call.read() is not END_OF_STREAM:
                        raise Unavailable("A shard sent more answers than there were requests")
            finally:
                self._has_ended = True
                sending.cancel()
                for call in self._calls.values():
                    call.cancel()
                await asyncio.wait({sending})

    async def _take(self, shard: int, context: Context, forwarded: ForwardedCall) -> None:
        """Pass on the next answer of a shard."""
        answers = self._answers[shard]
        if not answers:
            answers += await self._read(shard)
        answer = answers.popleft()
        with self._room.hold(forwarded, len(answer)):
            await context.write(answer)

    async def _read(self, shard: int) -> Sequence[bytes]:
        """Read the next message of a shard; returns the answers in it."""
        try:
            message = await self._calls[shard].read()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and self._has_unanswered_beside(shard):
                # What the shard says may be that nothing was done, and is true of its own requests alone.
                raise Unavailable(
                    "A shard has ended the stream; requests to other shards may or may not have taken effect",
                    reason="OWNER_UNREACHABLE",
                ) from error
            raise
        if message is END_OF_STREAM:
            raise Unavailable("A shard has ended the stream")
        if not message.startswith(_ANSWERS_HEAD):
            return (message,)
        joined = producer_pb2.ProduceResponse.FromString(message)
        return [answer.SerializeToString() for answer in joined.answers]

    def _has_unanswered_beside(self, shard: int) -> bool:
        """Return whether answers of other shards are due. Drops the order of answers: the stream is to end."""
        due = [self._order.get_nowait() for _ in range(self._order.qsize())]
        return any(other not in (shard, _END) for other in due)

    async def _send(self, context: Context, forwarded: ForwardedCall, connections: ExitStack) -> None:
        try:
            while (message := await context.read()) is not END_OF_STREAM:
                shard = self._shard_for(message)
                call = self._calls.get(shard)
                if call is None:
                    call = self._open(shard, context, forwarded, connections)
                self._order.put_nowait(shard)
                # Once the shard has ended its call nothing can be written, and whoever reads from it hears why.
                with self._room.hold(forwarded, len(message)), suppress(_EndedCall, grpc.aio.AioRpcError):
                    await call.write(message)
                message = None  # not kept while the next one is awaited
            self._has_ended = True
            for call in self._calls.values():
                with suppress(_EndedCall, grpc.aio.AioRpcError):
                    await call.done_writing()
            self._order.put_nowait(_END)
        except PostdateError as error:
            self._refusal = error
            self._order.put_nowait(_END)
        except grpc.aio.BaseError:
            forwarded.end(Unavailable("The caller's stream broke"))
        except Exception as error:
            log.error("A call could not be forwarded", exc_info=error)
            forwarded.end(Unavailable("The call could not be forwarded: see the broker's log"))

    def _open(self, shard: int, context: Context, forwarded: ForwardedCall, connections: ExitStack) -> Any:
        owner = self._find(shard)
        channel = connections.enter_context(owner.channel(forwarded))
        call: Any = channel.stream_stream(self._path, None, None)(  # type: ignore[call-arg]  # it is written to, and needs no iterator
            timeout=context.time_remaining(), metadata=owner.metadata_for(context, forwarded)
        )
        self._calls[shard] = call
        self._answers[shard] = deque()
        call.add_done_callback(lambda _: self._note_end(shard))
        return call

    def _note_end(self, shard: int) -> None:
        """Have the end of a shard's call be read, also while no answer of it is due: its next request would be lost."""
        if not self._has_ended:
            self._order.put_nowait(shard)


_EndedCall = asyncio.InvalidStateError
